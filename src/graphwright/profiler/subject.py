"""Subject: the call that is profiled, run any number of times and left as it was.

Weights, buffers, gradients, attributes, modes and random numbers are put back at the end. Tensors
among the arguments are copied once, so that the caller's own are never written to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..calls.modules import FunctionModule
from ..calls.objects import apart
from ..calls.operations import tensors
from ..calls.snapshots import clone_leaves
from ..calls.split import flatten, unflatten
from ..errors import GraphwrightError, ModelFailed, OptionError, first_line, user_frame
from ..graphs.journal import Journal
from ..graphs.python_state import PythonState


class Keeping(Journal):
    """Copies what the call is about to write to, so that it can be put back.

    Attributes:
        gpu: a GPU that it has made a tensor on; None if there is none.
        guard: refuses that the first call advances an iterator.
    """

    gpu: torch.device | None = None

    def __init__(self, guard: contextlib.AbstractContextManager[None]) -> None:
        super().__init__()
        self.guard = guard

    def made(self, tensor: torch.Tensor) -> None:
        """Note a tensor that an operation returned, and its device."""
        super().made(tensor)
        if tensor.is_cuda:
            self.gpu = tensor.device

    def refuse(self, error: Exception) -> None:
        """Nothing is refused: the call is not captured."""


class Subject:
    """A call of a function or module.

    Args:
        fn: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
        training: whether each call is followed by a backward pass from the sum of its
            floating-point results.

    Attributes:
        module: the module, or the function as one.
        device: where it runs: a GPU if one of its tensors is there.
        names: of the module's modules, by their identity.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        training: bool,
    ) -> None:
        self.module = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
        self.training = training
        self._fn = fn
        leaves, self._spec = flatten(args, dict(kwargs), objects=True)
        self._leaves = _copied(leaves)
        held = [*self.module.parameters(), *self.module.buffers(), *tensors(self._leaves)]
        gpus = [tensor.device for tensor in held if tensor.is_cuda]
        self.device = gpus[0] if gpus else torch.device("cpu")
        self.names = {id(m): name or type(fn).__name__ for name, m in self.module.named_modules()}
        self._trained: list[torch.Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        self._trained += [t for t in tensors(self._leaves) if t.requires_grad and t.is_leaf]

    @property
    def label(self) -> str:
        """What is called, for a title."""
        if isinstance(self._fn, nn.Module):
            return type(self._fn).__name__
        return str(getattr(self._fn, "__qualname__", type(self._fn).__name__)).split(".")[-1]

    def input_bytes(self) -> list[int]:
        """Bytes of each tensor among the arguments."""
        return [tensor.nbytes for tensor in tensors(self._leaves)]

    def prepared(self) -> Callable[[], Any]:
        """One call, ready to run, with containers of its own and no gradients from before."""
        args, kwargs = unflatten(self._leaves, self._spec)
        for tensor in self._trained if self.training else ():
            tensor.grad = None
        fn = self._fn
        if not self.training:
            return lambda: fn(*args, **kwargs)

        def step() -> Any:
            result = fn(*args, **kwargs)
            loss = _loss(result)
            loss.backward()
            return result

        return step

    def in_dtype(self, dtype: torch.dtype) -> Subject | None:
        """The same call on copies of arguments, parameters and buffers in another dtype.

        None if it is none of a module in float32, or is trained.
        """
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        given = [*held.values(), *tensors(self._leaves)]
        if self.training or not any(tensor.dtype == torch.float32 for tensor in given):
            return None

        def cast(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().to(dtype if value.is_floating_point() else value.dtype, copy=True)

        with torch.no_grad():
            weights = {name: cast(tensor) for name, tensor in held.items()}
        module = self.module
        args, kwargs = unflatten([cast(leaf) for leaf in self._leaves], self._spec)

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, weights, args, kwargs)

        return Subject(call, args, kwargs, training=False)

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """The grad mode that calls run under."""
        return torch.enable_grad() if self.training else torch.no_grad()

    def first(self, journal: Keeping) -> Any:
        """Run the call for the first time, under a journal.

        Raises:
            ModelFailed: it raises.
            OptionError: it cannot be trained.
        """
        call = self.prepared()
        try:
            with self.mode(), journal, journal.guard:
                result = call()
            if self.device.type != "cuda" and journal.gpu is not None:
                self.device = journal.gpu
            return result
        except GraphwrightError:
            raise
        except Exception as error:
            raise ModelFailed(
                f"The call raises by itself: {first_line(error)}", where=user_frame(error)
            ) from error

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[Keeping]:
        """Put everything back that calls inside the block change.

        The journal that it gives has to see the first call.
        """
        state = PythonState(self.module, self._trained if self.training else None)
        modes = [(m, m.training) for m in self.module.modules()]
        torch_state = torch.random.get_rng_state()
        cuda_state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        journal = Keeping(state.refusing_advances())
        try:
            yield journal
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            with torch.no_grad():
                journal.undo()
            state.restore(python=True)
            for module, training in modes:
                if module.training != training:
                    module.training = training
            torch.random.set_rng_state(torch_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self.device)


def _copied(leaves: list[Any]) -> list[Any]:
    """Leaves with tensors of their own; those that cannot be copied stay."""
    try:
        return clone_leaves(leaves)
    except (RuntimeError, NotImplementedError):  # Sparse or nested tensors.
        return list(leaves)


def _loss(result: Any) -> torch.Tensor:
    found = [
        tensor.float().sum()
        for tensor in tensors(apart(result))
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    if not found:
        raise OptionError(
            "training=True needs a result that depends on something trained: this call returns no "
            "floating-point tensor that requires grad.",
            remedy="Pass training=False, or a module with parameters that require grad.",
        )
    return torch.stack([each.to(found[0].device) for each in found]).sum()
