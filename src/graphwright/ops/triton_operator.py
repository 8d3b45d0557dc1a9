"""triton_op(): a function that launches Triton kernels becomes an operator of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import ExtensionError, OptionError, first_line
from .operator import Operator, check_name, no_backward


def triton_op(
    name: str,
    function: Callable[..., Any],
    *,
    mutates_args: Iterable[str] = (),
    reference: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    samples: Sequence[tuple[Any, ...]] = (),
) -> Operator:
    """Make an operator of PyTorch of a function that launches Triton kernels.

    It is torch.library.triton_op with what else an operator needs: torch.compile sees the kernels
    and may put others around them, and the operator can be captured, exported, tuned and pickled.

    Args:
        name: `"space::name"`, a namespace of your own and a name.
        function: makes the results with operations of PyTorch, and launches kernels by
            `torch.library.wrap_triton(kernel)[grid](...)`. Its annotations are its schema.
        mutates_args: names of arguments that it writes to.
        reference: the same in plain PyTorch, for tensors on the CPU.
        backward: `backward(ctx, *gradients)`, as torch.library.register_autograd takes it. None: a
            backward through it is an error.
        setup_context: `setup_context(ctx, inputs, output)`, which keeps what `backward` needs.
        samples: calls that torch.library.opcheck checks it with at once.

    Raises:
        ExtensionError: its annotations make no schema, or a check of a sample fails.
        OptionError: the name makes no sense.
    """
    space, separator, own = name.partition("::")
    if not separator:
        raise OptionError(f"{name!r} has no namespace.", remedy=f"Call it 'mine::{name}', say.")
    check_name(space, "an extension")
    check_name(own, "a function")
    mutated = tuple(mutates_args)
    try:
        made: Any = torch.library.triton_op(name, function, mutates_args=mutated)
    except Exception as error:
        raise ExtensionError(
            f"{name} cannot be made: {first_line(error)}",
            remedy="Annotate each argument and the result: "
            "def f(x: torch.Tensor, n: int) -> torch.Tensor.",
        ) from error
    if reference is not None:
        made.register_kernel("cpu")(reference)
    else:
        made.register_kernel("cpu")(functools.partial(_only_on_a_gpu, name))
    if not mutated:
        made.register_autograd(backward or no_backward(name), setup_context=setup_context)
    elif backward is not None:
        raise ExtensionError(
            f"{name} writes to an argument, and has a backward.",
            remedy="Return a new tensor instead, which autograd can follow.",
        )
    operator = Operator(
        name, functools.partial(_again, name, function, mutated, reference, backward, setup_context)
    )
    for sample in samples:
        operator.check(*sample)
    return operator


def _again(name: str, function: Callable[..., Any], mutated: Sequence[str], *rest: Any) -> Operator:
    """The operator of a pickle: in this process it may be there already."""
    space, _, own = name.partition("::")
    if hasattr(getattr(torch.ops, space), own):
        return Operator(name, functools.partial(_again, name, function, mutated, *rest))
    reference, backward, setup_context = rest
    return triton_op(
        name,
        function,
        mutates_args=mutated,
        reference=reference,
        backward=backward,
        setup_context=setup_context,
    )


def _only_on_a_gpu(name: str, *args: Any, **kwargs: Any) -> Any:
    raise ExtensionError(
        f"{name} was called with tensors on the CPU, where Triton has no kernels.",
        remedy="Pass triton_op() a reference in plain PyTorch, or move the tensors.",
    )
