"""What a call does, operation by operation: bytes, FLOPs, module, line, and waits of the host."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch._ops import HigherOrderOperator

from ..calls.modes import OperationMode
from ..calls.operations import reads_values, tensors
from ..calls.switches import precision
from .lines import Line, line_of, module_of

# Operations that write to their first argument without reading it.
_WRITE_ONLY = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
)
# Operations that read of their first tensor only what they return.
_GATHER = ("embedding", "index", "index_select", "gather", "take")
# Operations that neither read nor write.
_EMPTY = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
)


@dataclass(frozen=True)
class ObservedOperation:
    """One ATen operation of a call.

    Attributes:
        name: such as "aten::addmm".
        module: the module whose code runs it; empty where there is none.
        line: of the user's source; None where there is none.
        nbytes: bytes that it has to read and write.
        flops: of matrix products and convolutions, also of those inside of fused operators; 0 for
            elementwise operations, which are not counted; None for operations of others, which have
            no formula.
        dtype: of its first tensor, such as "float32"; empty without tensors.
        precision: what products are computed in, "tf32" where that is on.
        shapes: of its tensors.
        view: whether it only makes another view of memory.
        reads: whether the host has to see a value that the device has.
        copies: "to device", "to host" or "".
        pointwise: whether each element of the result depends on few of its inputs, as in chains
            that can be fused.
        backward: whether a backward pass runs it.
    """

    name: str
    module: str
    line: Line | None
    nbytes: int
    flops: int | None
    dtype: str
    precision: str
    shapes: tuple[tuple[int, ...], ...]
    view: bool
    reads: bool
    copies: str
    pointwise: bool
    backward: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass
class OperationSample:
    """An operation with what is needed to run it again on other values."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class WorkObserver(OperationMode):
    """Runs every operation and notes what it has to do.

    Args:
        names: names of modules by identity.

    Attributes:
        operations: in order.
        samples: of each operation that has a formula for its FLOPs, by index.
        waits: the lines that wait for the device by name, as synchronize() does, with the name.
    """

    supports_higher_order_operators = True  # torch's own switch

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        from .flops import formulas  # What it imports takes long, and is for profiles only.

        self.operations: list[ObservedOperation] = []
        self.samples: dict[int, OperationSample] = {}
        self.waits: list[tuple[Line | None, str]] = []
        self._formulas = formulas()
        self._names = names
        self._forward: dict[int, tuple[str, Line | None]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note it."""
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result
        module, line, backward = self._place()
        given, made = tensors((args, kwargs)), tensors(result)
        formula = self._formulas.get(func._overloadpacket)
        flops: int | None = None if func.namespace not in ("aten", "prims") else 0
        if formula is not None:
            with contextlib.suppress(Exception):  # It may not know this overload's arguments.
                flops = int(formula(*args, **kwargs, out_val=result))
                self.samples[len(self.operations)] = _sample(func, args, kwargs)
        first = next(iter(given or made), None)
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        self.operations.append(
            ObservedOperation(
                f"{func.namespace}::{func._opname}",
                module,
                line,
                0 if _is_view(func) else _bytes_of(func, given, made),
                flops,
                dtype,
                _precision(func, first, dtype),
                tuple(map(_shape, given or made)),
                _is_view(func),
                reads_values(func, args, kwargs),
                _copies(func, args, given, made),
                torch.Tag.pointwise in func.tags or _is_fusable(func._opname),
                backward,
            )
        )
        return result

    def reads(self) -> list[tuple[Line | None, str]]:
        """Where the host waits for the device, and by what, once for each time."""
        found = [
            (operation.line, operation.name)
            for operation in self.operations
            if operation.reads or operation.copies == "to host"
        ]
        return found + self.waits

    def _place(self) -> tuple[str, Line | None, bool]:
        """Module and line; of a backward pass those of the forward that it belongs to."""
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            return (*self._forward.get(number, ("", None)), True)
        frame = sys._getframe(2)
        place = module_of(frame, self._names), line_of(frame)
        # The number of the autograd node that this operation has just been given, if any.
        number = torch.autograd._get_sequence_nr() - 1 if torch.is_grad_enabled() else -1
        self._forward.setdefault(number, place)
        return (*place, False)

    @contextlib.contextmanager
    def watching_waits(self) -> Iterator[None]:
        """Note where the code waits for the device by name, while the block runs."""
        with contextlib.ExitStack() as stack:
            for owner, name in (
                (torch.cuda, "synchronize"),
                (torch.cuda.Stream, "synchronize"),
                (torch.cuda.Event, "synchronize"),
            ):
                original = getattr(owner, name, None)
                if original is not None:
                    put = mock.patch.object(owner, name, self._noting(original))
                    stack.enter_context(put)
            yield

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = getattr(original, "__qualname__", "synchronize")
            self.waits.append((line_of(sys._getframe(1)), f"{name}()"))
            return original(*args, **kwargs)

        return call


class Stopwatch(OperationMode):
    """Runs every operation and takes its time; of use on a CPU, where it is over when it returns.

    Attributes:
        seconds: of each operation, in order.
    """

    supports_higher_order_operators = True  # torch's own switch

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and take its time."""
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        began = time.perf_counter()
        result = func(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        return result


class Marker(OperationMode):
    """Runs every operation inside a mark of the profiler's, `graphwright.op.INDEX`."""

    supports_higher_order_operators = True  # torch's own switch

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation inside its mark."""
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        index, self._count = self._count, self._count + 1
        with torch.profiler.record_function(f"{MARK}{index}"):
            return func(*args, **kwargs)


MARK = "graphwright.op."


def _is_fusable(name: str) -> bool:
    return "norm" in name or "softmax" in name or name in ("clone", "copy_", "_to_copy")


def _sample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationSample:
    def formed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Form(tuple(value.shape), value.stride(), value.dtype, value.device)
        if isinstance(value, list | tuple):
            return [formed(each) for each in value]
        return value

    return OperationSample(
        func, tuple(map(formed, args)), {k: formed(v) for k, v in kwargs.items()}
    )


def _is_view(func: Any) -> bool:
    if func._opname in _EMPTY:
        return True
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape; of a nested one, whose parts differ, how many there are."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def _size(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's elements take: those that an expanded one shares count once."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return int(tensor.numel() * tensor.element_size())
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _bytes_of(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    name = func._opname
    written = sum(map(_size, made))
    if name in _GATHER and given:
        return 2 * written + sum(map(_size, given[1:]))
    read = list({id(t): t for t in given}.values())
    if name in _WRITE_ONLY:
        read = read[1:]
    return written + sum(map(_size, read))


def _precision(func: Any, first: torch.Tensor | None, dtype: str) -> str:
    if dtype != "float32" or first is None or not first.is_cuda:
        return dtype
    if "conv" in func._opname:  # TF32 unless somebody has turned it off.
        return dtype if precision("cuda", "conv") == "ieee" else "tf32"
    return "tf32" if precision("cuda", "matmul") == "tf32" else dtype


def _copies(
    func: Any, args: tuple[Any, ...], given: list[torch.Tensor], made: list[torch.Tensor]
) -> str:
    if func._opname not in ("copy_", "_to_copy") or not given:
        return ""
    source = given[-1] if func._opname == "copy_" else given[0]
    target = given[0] if func._opname == "copy_" else (made or given)[0]
    if source.is_cuda == target.is_cuda:
        return ""
    return "to host" if source.is_cuda else "to device"
