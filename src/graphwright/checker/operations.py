"""Seeing a run of a call, operation by operation, and what each does to a capture."""

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
from .obstacles import Found, Obstacle
from .placement import Origin, Side, Sides

_SPOKEN = {
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
# Arguments that belong on the host.
_TAKE_HOST_TENSORS = ("pack", "rnn", "lstm", "gru", "ctc_loss", "tensor_split")
_PLACES = ("index", "index_put_", "index_put", "_index_put_impl_")
# They wait inside of their CUDA kernels, which their tags do not say.
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
class Step:
    """One operation of a run, for comparison with another run's."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[Any, ...]
    place: Place


@dataclass
class Call:
    """A function of torch that is being called, and the side of what it makes."""

    name: str
    side: Side
    number: bool = False


class Observer(Journal):
    """Runs every operation as it is, and notes what a capture would make of it.

    Args:
        sides: where tensors are.
        names: of memory that belongs to arguments, parameters and buffers.

    Attributes:
        found: the obstacles.
        steps: the operations on the GPU, in order.
        copies: a digest of what each copy from the host held, with its place.
        kernels: operations on the GPU that start one.
    """

    supports_higher_order_operators = True  # torch's own switch

    def __init__(self, sides: Sides, names: Mapping[int, str]) -> None:
        super().__init__()
        self.sides = sides
        self.found = Found()
        self.steps: list[Step] = []
        self.copies: list[tuple[Place, str, str]] = []
        self.kernels = 0
        self.calls: list[Call] = []
        self._names = names
        self._silent = 0

    def report(self, kind: Obstacle, operation: str = "", detail: str = "") -> None:
        """Note an obstacle at the place in the user's code that is being run."""
        if not self._silent:
            self.found.add(kind, place_of(sys._getframe(1)), operation, detail)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Report nothing inside: what goes on there has been reported."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def refuse(self, error: CaptureError) -> None:
        """Note what a capture would refuse, and go on."""
        self.report(obstacles.LAYOUT, str(self.operation), error.what)

    def writes(self, tensor: torch.Tensor) -> None:
        """As the journal does; and note whose memory it is."""
        super().writes(tensor)
        if not self.is_made(tensor) and tensor.numel():
            name = self._names.get(tensor.untyped_storage()._cdata)
            operation = self._spoken(str(self.operation))
            if name is not None and name.startswith("the argument"):
                self.report(obstacles.INPUT_WRITE, operation, name)
            else:
                self.report(obstacles.STATE_WRITE, operation, name or "a tensor from outside")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and look at it."""
        if isinstance(func, HigherOrderOperator):
            if func.name() in ("cond", "while_loop"):
                self.report(obstacles.READ, f"torch.{func.name()}()")
            return func(*args, **kwargs)
        self.before(func, args, kwargs)
        given = tensors((args, kwargs))
        on_device = any(self.sides.of(tensor) is Side.DEVICE for tensor in given)
        if on_device:
            self._look(func, args, kwargs, given)
        result = func(*args, **kwargs)
        made = tensors(result)
        origin = self.sides.origins(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin |= self._drawn(func, args, kwargs, made, on_device)
        for tensor in made:
            self.made(tensor)
            if tensor.layout is not torch.strided or tensor.is_nested:
                self.sides.put(tensor, self._side_of_new(given, on_device), origin)
                continue
            if not self.sides.known(tensor) and self.is_made(tensor):
                self.sides.put(tensor, self._side_of_new(given, on_device))
            if origin:
                self.sides.put(tensor, None, self.sides.origin(tensor) | origin)
        if func._opname == "_pack_padded_sequence":
            self.sides.put(made[1], Side.HOST)  # The sizes of its batches.
        if func._opname in ("copy_", "_to_copy"):
            self._moved(func, args, made, given)
        if on_device and func._opname not in _UNINITIALISED:
            self._log(func, args, kwargs, given)
        return result

    def _side_of_new(self, given: list[torch.Tensor], on_device: bool) -> Side | None:
        """The side of what an operation makes; None where nobody can tell, as in TorchScript."""
        if on_device:
            return Side.DEVICE
        if given:
            return Side.HOST if any(map(self.sides.known, given)) else None
        return self.calls[-1].side if self.calls else None

    def _log(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        numbers = [
            a for a in (*args, *kwargs.values()) if isinstance(a, int | float | complex | bool)
        ]
        # A tensor of one number on the host goes to the GPU as a number.
        numbers += [
            tensor.item()
            for tensor in given
            if tensor.dim() == 0 and self.sides.of(tensor) is Side.HOST
        ]
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        self.steps.append(Step(str(func), shapes, tuple(numbers), place_of(sys._getframe(1))))
        if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self.kernels += 1

    def _look(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[torch.Tensor]
    ) -> None:
        """Whether an operation on the GPU has to wait for it, or for the host."""
        name = func._opname
        waits = name in _WAIT_INSIDE or (name == "histc" and len(args) < 3)
        # In other formats it loops over the groups on the host.
        waits = waits or (name == "_grouped_mm" and args[0].dtype is not torch.bfloat16)
        if torch.Tag.data_dependent_output in func.tags or waits:
            operation = self._spoken(str(func))
            condition = operation == _SPOKEN["__bool__"]
            self.report(obstacles.CONDITION if condition else obstacles.READ, operation)
        elif name in _PLACES[1:]:
            self._look_at_write(args)
        elif torch.Tag.dynamic_output_shape in func.tags:
            self._look_at_shape(func, args, kwargs)
        self._look_at_sides(func, args, given)

    def _look_at_sides(self, func: Any, args: tuple[Any, ...], given: list[torch.Tensor]) -> None:
        """Whether tensors of both sides meet."""
        name, spoken = func._opname, self._spoken(str(func))
        if name in ("copy_", "_to_copy"):
            return
        if "pack_padded" in name and self.sides.of(args[1]) is Side.DEVICE:
            self.report(obstacles.MIXED, spoken)
        host = [t for t in given if self.sides.of(t) is Side.HOST]
        numbers = [t for t in host if not t.dim() and self.sides.known(t)]
        host = [t for t in host if t.dim()]
        if name in _PLACES:
            moving = [t for t in args[1] if t is not None]
            masked = any(t.dtype in _MASKS for t in moving)
            if name != "index" and not masked and self._is_number(args[2]):
                moving += [args[2]]
            for tensor in moving:
                if self.sides.of(tensor) is Side.HOST:
                    self.copied(spoken, tensor)
                    break
            return
        if name == "where" and numbers:
            self.copied(spoken, numbers[0])
        elif name == "cat" and numbers:
            self.report(obstacles.MIXED, spoken)
        if any(part in name for part in _TAKE_HOST_TENSORS):
            return
        if any(map(self.sides.known, host)):
            self.report(obstacles.MIXED, spoken)
        for tensor in host:
            # It works by itself: what nothing is known of is where the others are.
            if not self.sides.known(tensor):
                self.sides.put(tensor, Side.DEVICE)

    def _look_at_write(self, args: tuple[Any, ...]) -> None:
        """A write to the places of a mask that is no plain filling with a number."""
        indices = [t for t in args[1] if t is not None]
        if not any(t.dtype in _MASKS for t in indices):
            return
        number = self._is_number(args[2])
        accumulates = len(args) > 3 and args[3]
        if len(indices) > 1 or args[2].numel() != 1 or not number or accumulates:
            self.report(obstacles.MASKED_WRITE, self._spoken("index_put_"))

    def _is_number(self, value: torch.Tensor) -> bool:
        """Whether a value that is to be written is a number, or a tensor of one on the host."""
        if value.dim() == 0 and self.sides.of(value) is Side.HOST:
            return True
        return bool(self.calls and self.calls[-1].number)

    def _look_at_shape(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name, spoken = func._opname, self._spoken(str(func))
        if name == "index":
            if any(t is not None and t.dtype in _MASKS for t in args[1]):
                self.report(obstacles.SHAPE, spoken)
        elif name == "repeat_interleave":
            if kwargs.get("output_size") is None:
                self.report(obstacles.REPEAT, spoken)
        else:
            self.report(obstacles.NONZERO if "nonzero" in name else obstacles.SHAPE, spoken)

    def _drawn(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        made: list[torch.Tensor],
        on_device: bool,
    ) -> Origin:
        """Random numbers were drawn, or might have been."""
        generator = generator_of(args, kwargs)
        _, before = self._generators[id(generator)]
        if torch.equal(generator.get_state(), before):
            return Origin.CONSTANT  # Attention without dropout draws none.
        named = any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values()))
        sides: set[Side | None] = {self._side_of_new([], on_device)}
        if not self.sides.pretend:
            sides = {self.sides.of(tensor) for tensor in made}
        if Side.HOST in sides:
            self.report(obstacles.HOST_RANDOM, self._spoken(str(func)))
            return Origin.RANDOM
        if named and generator is not torch.default_generator:
            self.report(obstacles.GENERATOR, self._spoken(str(func)))
        return Origin.CONSTANT

    def _moved(
        self, func: Any, args: tuple[Any, ...], made: list[torch.Tensor], given: list[torch.Tensor]
    ) -> None:
        """A copy, maybe from one side to the other."""
        source = args[1] if func._opname == "copy_" else args[0]
        target = args[0] if func._opname == "copy_" else (made or given)[0]
        if self._silent or not isinstance(source, torch.Tensor):
            return
        sides = self.sides.of(source), self.sides.of(target)
        if sides == (Side.HOST, Side.DEVICE):
            self.copied(self._spoken(str(func)), source)
        elif sides == (Side.DEVICE, Side.HOST):
            self.report(obstacles.TRANSFER, self._spoken(str(func)))

    def copied(self, operation: str, source: torch.Tensor) -> None:
        """A copy from the host to the GPU; what it is becomes clear when the runs are compared."""
        if self._silent or not source.numel():
            return
        place, origin = place_of(sys._getframe(1)), self.sides.origin(source)
        if self.sides.is_pinned(source):
            self.found.add(obstacles.PINNED_COPY, place, operation)
            return
        name = self._names.get(source.untyped_storage()._cdata, "")
        if name.startswith("the argument"):
            self.found.add(obstacles.INPUT_COPY, place, operation)
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

    def _spoken(self, operation: str) -> str:
        """What the user wrote, as far as that is known."""
        name = self.calls[0].name if self.calls else ""
        for call in self.calls:
            if call.name in _SPOKEN:
                return _SPOKEN[call.name]
        return f"{name}()" if name else operation
