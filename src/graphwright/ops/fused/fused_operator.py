"""Defining an operator from its reference: schema, fake implementation, gradients, kernel.

The reference is the operator on every device and its fake implementation, and the backward pass
differentiates it. On CUDA a kernel replaces it where it applies. The kernel's result has the layout
of the reference's, so that what was traced stays true.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...calls.threads import own_thread
from . import launch_cache

# Operators exist as long as their library: keep it as long as the process lives.
LIBRARY = torch.library.Library("graphwright", "FRAGMENT")
Function = Callable[..., Any]


@functools.cache
def triton_works() -> bool:
    """Whether Triton can be imported; first asked when a kernel is needed."""
    prepare_triton().join()  # Else the kernel would compute the hash a second time.
    try:
        importlib.import_module("triton")
    except Exception:
        return False
    return True


@functools.cache
def prepare_triton() -> threading.Thread:
    """Begin what the first kernel would wait for: Triton's hash of its own files, its driver.

    It takes a third of a second, nearly all of it without Python's lock; once on a machine the
    driver is compiled too.
    """

    def prepared() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("triton.runtime.cache").triton_key()
            _ = importlib.import_module("triton.runtime").driver.active

    return own_thread(prepared, "Triton's hash and driver")


@dataclass
class FusedOperator:
    """An operator torch.ops.graphwright.NAME.

    `reference` defines it, `plain` computes the same without a kernel of ours. `applies` says
    whether `launch` can compute a call. All take the operator's arguments.
    """

    name: str
    reference: Function
    plain: Function
    applies: Callable[..., bool]
    launch: Function

    def without_kernel(self, *args: Any) -> Any:
        """Compute `plain`; under autocast too in the dtype of the inputs, as the kernel does."""
        with _no_autocast(args[0].device.type):
            return self.plain(*args)

    def on_gpu(self, *args: Any) -> Any:
        """Run the kernel if it applies, else `plain`."""
        launch = launch_cache.known(self.name, args)
        if launch is None:
            if not (triton_works() and self.applies(*args)):
                return self.without_kernel(*args)
            how = launch_cache.asked if launch_cache.is_asking() else launch_cache.noted
            launch = functools.partial(how, self.name, self.launch)
        device = args[0].device
        # PyTorch sets no device for a Python function, and kernels start on the current one.
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return launch(*args)
        return launch(*args)


def define(
    schema: str,
    reference: Function,
    *,
    applies: Callable[..., bool],
    launch: Function,
    plain: Function | None = None,
) -> FusedOperator:
    """Register an operator with PyTorch.

    Args:
        schema: its name, arguments and results, as torch.library has it.
        reference: what it computes; differentiable, and free of aliases of its inputs.
        applies: whether the kernel computes these arguments.
        launch: the kernel; it is called only when `applies` said so.
        plain: the same values as the reference's in less time, where there is such a way.
    """
    name = schema.partition("(")[0]
    operator = FusedOperator(name, reference, plain or reference, applies, launch)
    LIBRARY.define(schema)
    # Any device's kernel goes before this one: the CPU's may be registered later.
    LIBRARY.impl(name, operator.without_kernel, "CompositeExplicitAutograd")
    LIBRARY.impl(name, operator.on_gpu, "CUDA")
    qualified = f"graphwright::{name}"
    torch.library.register_fake(qualified, operator.without_kernel, lib=LIBRARY)
    torch.library.register_autograd(
        qualified, _backward_of(operator.without_kernel), setup_context=_save_inputs, lib=LIBRARY
    )
    return operator


def _no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
    ctx.others = tuple(None if isinstance(v, torch.Tensor) else (v,) for v in inputs)


def _backward_of(function: Function) -> Function:
    """The gradients of a function, by running it again on the inputs that were saved."""

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        again = torch.is_grad_enabled()  # create_graph: the gradients have gradients of their own.
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if other is None else other[0] for other in ctx.others]
        needed = [n for n, needs in enumerate(ctx.needs_input_grad) if needs]
        with torch.enable_grad():
            for n in needed:
                # An alias for each: one tensor may be two arguments.
                value = inputs[n]
                inputs[n] = value.view_as(value) if again else value.detach().requires_grad_()
            outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        found: list[torch.Tensor | None] = [None] * len(inputs)
        if pairs and needed:
            ends, given = zip(*pairs, strict=True)
            wanted = [inputs[n] for n in needed]
            gradients = torch.autograd.grad(
                ends, wanted, given, create_graph=again, allow_unused=True
            )
            for n, gradient in zip(needed, gradients, strict=True):
                found[n] = gradient
        return tuple(found)

    return backward
