"""OperationObserver sees each ATen operation of a call, and notes what it does to a capture."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from ..calls.operations import generator_of, tensors
from ..errors import CaptureError
from ..graphs.journal import Journal
from . import obstacles
from .finding import Place, place_of
from .obstacles import Findings, Obstacle
from .placement import Side, Sides, ValueOrigin

# How users write functions that Python calls by other names.
_AS_WRITTEN = {
    "item": "Tensor.item()",
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "a tensor as an index or a size",
    "__contains__": "value in tensor",
    "__getitem__": "tensor[…]",
    "__setitem__": "tensor[…] = …",
}
_MASKS = (torch.bool, torch.uint8)
# Operations (parts of their names) with arguments that belong on the host.
_TAKE_HOST_TENSORS = ("pack", "rnn", "lstm", "gru", "ctc_loss", "tensor_split")
_COPIES = ("copy_", "_to_copy")
_INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_")
# Operations that wait for the GPU in their CUDA code, though their tags do not say so.
_WAIT_INSIDE = (
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_svd",
    "linalg_eig",
    "linalg_eigvals",
    "_linalg_eigvals",
    "linspace",
    "logspace",
)
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class OperationStep:
    """One operation of a run, for comparison with another run's."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[Any, ...]
    place: Place


@dataclass
class FunctionCall:
    """A function of torch that is being called.

    Attributes:
        name: of the function.
        side: where tensors that it makes lie.
        number: whether it writes a plain number to a tensor.
    """

    name: str
    side: Side
    number: bool = False


class OperationObserver(Journal):
    """Runs every operation unchanged, and notes what a capture would make of it.

    Args:
        sides: where tensors are.
        names: names of arguments, parameters and buffers, by their storage.

    Attributes:
        found: the obstacles.
        steps: the operations on the GPU, in order.
        copies: place, operation and digest of each copy of a constant from the host.
        kernels: how many operations launch a kernel on the GPU.
        calls: the functions of torch that are being called, outermost first.
    """

    supports_higher_order_operators = True  # torch's own switch

    def __init__(self, sides: Sides, names: Mapping[int, str]) -> None:
        super().__init__()
        self.sides = sides
        self.found = Findings()
        self.steps: list[OperationStep] = []
        self.copies: list[tuple[Place, str, str]] = []
        self.kernels = 0
        self.calls: list[FunctionCall] = []
        self._names = names
        self._silent = 0
        # Place and name of each of `draws`.
        self._drawn: list[tuple[Place, str]] = []

    def report(self, obstacle: Obstacle, operation: str = "", detail: str = "") -> None:
        """Note an obstacle at the line of the user's code that is running."""
        if not self._silent:
            self.found.add(obstacle, place_of(sys._getframe(1)), operation, detail)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Report nothing inside the block: the caller has done so."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def refuse(self, error: CaptureError) -> None:
        """Note what a capture would refuse, and go on."""
        self.report(obstacles.LAYOUT, str(self.operation), error.what)

    def writes(self, tensor: torch.Tensor) -> None:
        """As `Journal.writes`; also notes writes to memory from outside of the call."""
        super().writes(tensor)
        if not self.is_made(tensor) and tensor.numel():
            name = self._names.get(tensor.untyped_storage()._cdata)
            operation = self._as_written(str(self.operation))
            if name is not None and name.startswith("the argument"):
                self.report(obstacles.INPUT_WRITE, operation, name)
            else:
                self.report(obstacles.STATE_WRITE, operation, name or "a tensor from outside")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and note obstacles."""
        if isinstance(func, HigherOrderOperator):
            if func.name() in ("cond", "while_loop"):
                self.report(obstacles.READ, f"torch.{func.name()}()")
            return func(*args, **kwargs)
        self.before(func, args, kwargs)
        given = tensors((args, kwargs))
        on_device = any(self.sides.of(tensor) is Side.DEVICE for tensor in given)
        if on_device:
            self._check(func, args, kwargs, given)
        result = func(*args, **kwargs)
        made = tensors(result)
        origin = self.sides.origins(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin |= self._note_random(func, args, kwargs, made, on_device)
        self._note_made(made, self._side_of_new(given, on_device), origin)
        if func._opname == "_pack_padded_sequence":
            self.sides.put(made[1], Side.HOST)  # The sizes of its batches.
        if func._opname in _COPIES:
            self._note_copy(func, args, made, given)
        if on_device and func._opname not in _UNINITIALISED:
            self._note_step(func, args, kwargs, given)
        return result

    def _note_made(self, made: list[torch.Tensor], side: Side | None, origin: ValueOrigin) -> None:
        """Note where results are, and where their values come from."""
        for tensor in made:
            self.made(tensor)
            if tensor.layout is not torch.strided or tensor.is_nested:
                self.sides.put(tensor, side, origin)
                continue
            if not self.sides.known(tensor) and self.is_made(tensor):
                self.sides.put(tensor, side)
            if origin:
                self.sides.put(tensor, None, self.sides.origin(tensor) | origin)

    def _side_of_new(self, given: list[torch.Tensor], on_device: bool) -> Side | None:
        """The side of what an operation makes; None if unknown, as in TorchScript."""
        if on_device:
            return Side.DEVICE
        if given:
            return Side.HOST if any(map(self.sides.known, given)) else None
        return self.calls[-1].side if self.calls else None

    def _note_step(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        numbers = [
            a for a in (*args, *kwargs.values()) if isinstance(a, int | float | complex | bool)
        ]
        # A 0-d tensor on the host is passed to kernels as a number.
        numbers += [
            tensor.item()
            for tensor in given
            if tensor.dim() == 0 and self.sides.of(tensor) is Side.HOST
        ]
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        self.steps.append(
            OperationStep(str(func), shapes, tuple(numbers), place_of(sys._getframe(1)))
        )
        if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self.kernels += 1

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Note if an operation on the GPU makes the host wait, or mixes both sides."""
        name = func._opname
        waits = name in _WAIT_INSIDE or (name == "histc" and len(args) < 3)
        # For other dtypes it loops over the groups on the host.
        waits = waits or (name == "_grouped_mm" and args[0].dtype is not torch.bfloat16)
        if torch.Tag.data_dependent_output in func.tags or waits:
            operation = self._as_written(str(func))
            is_condition = operation == _AS_WRITTEN["__bool__"]
            self.report(obstacles.CONDITION if is_condition else obstacles.READ, operation)
        elif name in _INDEXING[1:]:
            self._check_masked_write(args)
        elif torch.Tag.dynamic_output_shape in func.tags:
            self._check_shape(func, args, kwargs)
        self._check_sides(func, args, given)

    def _check_sides(self, func: Any, args: tuple[Any, ...], given: list[torch.Tensor]) -> None:
        """Note if an operation is given tensors of both sides."""
        name, written = func._opname, self._as_written(str(func))
        if name in _COPIES:
            return
        if name in _INDEXING:
            self._check_indices(name, written, args)
            return
        if "pack_padded" in name and self.sides.of(args[1]) is Side.DEVICE:
            self.report(obstacles.MIXED, written)
        host = [t for t in given if self.sides.of(t) is Side.HOST]
        self._check_host_numbers(name, written, [t for t in host if not t.dim()])
        if not any(part in name for part in _TAKE_HOST_TENSORS):
            self._check_host_tensors(written, [t for t in host if t.dim()])

    def _check_host_numbers(self, name: str, written: str, host: list[torch.Tensor]) -> None:
        """Note if 0-d tensors on the host are copied to the GPU: most are passed as numbers."""
        number = next(filter(self.sides.known, host), None)
        if number is None:
            return
        if name == "where":
            self.note_host_copy(written, number)
        elif name == "cat":
            self.report(obstacles.MIXED, written)

    def _check_host_tensors(self, written: str, host: list[torch.Tensor]) -> None:
        """Note if tensors on the host, which are no numbers, stand beside some on the GPU."""
        if any(map(self.sides.known, host)):
            self.report(obstacles.MIXED, written)
        for tensor in host:
            # The call works without a capture, so an unknown tensor is where the others are.
            if not self.sides.known(tensor):
                self.sides.put(tensor, Side.DEVICE)

    def _check_indices(self, name: str, written: str, args: tuple[Any, ...]) -> None:
        """Note if indices on the host, or a number to be written, are copied to the GPU."""
        moving = [t for t in args[1] if t is not None]
        masked = any(t.dtype in _MASKS for t in moving)
        if name != "index" and not masked and self._is_number(args[2]):
            moving.append(args[2])
        first = next((t for t in moving if self.sides.of(t) is Side.HOST), None)
        if first is not None:
            self.note_host_copy(written, first)

    def _check_masked_write(self, args: tuple[Any, ...]) -> None:
        """Note a write through a mask, unless it only fills in a number."""
        indices = [t for t in args[1] if t is not None]
        if not any(t.dtype in _MASKS for t in indices):
            return
        number = self._is_number(args[2])
        accumulates = len(args) > 3 and args[3]
        if len(indices) > 1 or args[2].numel() != 1 or not number or accumulates:
            self.report(obstacles.MASKED_WRITE, self._as_written("index_put_"))

    def _is_number(self, value: torch.Tensor) -> bool:
        """Whether the value to write is a number, or a 0-d tensor on the host."""
        if value.dim() == 0 and self.sides.of(value) is Side.HOST:
            return True
        return bool(self.calls and self.calls[-1].number)

    def _check_shape(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name, written = func._opname, self._as_written(str(func))
        if name == "index":
            if any(t is not None and t.dtype in _MASKS for t in args[1]):
                self.report(obstacles.SHAPE, written)
        elif name == "repeat_interleave":
            if kwargs.get("output_size") is None:
                self.report(obstacles.REPEAT, written)
        else:
            self.report(obstacles.NONZERO if "nonzero" in name else obstacles.SHAPE, written)

    def _note_random(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        made: list[torch.Tensor],
        on_device: bool,
    ) -> ValueOrigin:
        """Note how random numbers were drawn, if they were; the origin of the result."""
        generator = generator_of(args, kwargs)
        _, before = self._generators[id(generator)]
        if torch.equal(generator.get_state(), before):
            return ValueOrigin.CONSTANT  # Attention without dropout draws none.
        sides: set[Side | None] = {self._side_of_new([], on_device)}
        if not self.sides.pretend:
            sides = {self.sides.of(tensor) for tensor in made}
        if Side.HOST not in sides:
            return ValueOrigin.CONSTANT
        written = self._as_written(str(func))
        self.report(obstacles.DRAWN_ON_HOST, written)
        if generator is torch.default_generator:
            self.draws.note(func, args, kwargs, made)
            self._drawn.append((place_of(sys._getframe(1)), written))
        return ValueOrigin.RANDOM

    def allow_unused_draws(self) -> None:
        """Take back what was noted of draws on the host that a replay can make again.

        The run is over, and its results are still alive.
        """
        used = {self._drawn[index] for index in self.draws.used()}
        for place, operation in self._drawn:
            if (place, operation) not in used:
                self.found.drop(obstacles.DRAWN_ON_HOST, place, operation)

    def _note_copy(
        self, func: Any, args: tuple[Any, ...], made: list[torch.Tensor], given: list[torch.Tensor]
    ) -> None:
        """Note a copy from one side to the other."""
        source = args[1] if func._opname == "copy_" else args[0]
        target = args[0] if func._opname == "copy_" else (made or given)[0]
        if self._silent or not isinstance(source, torch.Tensor):
            return
        sides = self.sides.of(source), self.sides.of(target)
        if sides == (Side.HOST, Side.DEVICE):
            self.note_host_copy(self._as_written(str(func)), source)
        elif sides == (Side.DEVICE, Side.HOST):
            self.report(obstacles.TRANSFER, self._as_written(str(func)))

    def note_host_copy(self, operation: str, source: torch.Tensor) -> None:
        """Note a copy from the host to the GPU; comparing runs shows if its values are constant."""
        if self._silent or not source.numel():
            return
        place, origin = place_of(sys._getframe(1)), self.sides.origin(source)
        name = self._names.get(source.untyped_storage()._cdata, "")
        if name.startswith("the argument"):
            self.found.add(obstacles.INPUT_COPY, place, operation)
            return
        if self.sides.is_pinned(source):
            self.found.add(obstacles.PINNED_COPY, place, operation)
            return
        changing = bool(origin)
        self.found.add(
            obstacles.CHANGING_COPY if changing else obstacles.CONSTANT_COPY, place, operation
        )
        if not changing:
            with torch.utils._python_dispatch._disable_current_modes():
                held = source.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                digest = hashlib.blake2b(held.tobytes()).hexdigest()
            self.copies.append((place, operation, digest))

    def _as_written(self, operation: str) -> str:
        """An operation as the user wrote it, as far as that is known."""
        name = self.calls[0].name if self.calls else ""
        for call in self.calls:
            if call.name in _AS_WRITTEN:
                return _AS_WRITTEN[call.name]
        return f"{name}()" if name else operation
