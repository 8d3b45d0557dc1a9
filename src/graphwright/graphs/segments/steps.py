"""What a walk through a call's Python sees, so that another walk can be compared with it.

A step is an operation: what it was asked, and what it made. Memory that the call itself makes is
known by a number, in the order in which it is made; everything else by what it is.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..static_tensors import Geometry


@dataclass(frozen=True)
class Given:
    """A result that is one of the tensors that the operation was given."""

    index: int


@dataclass(frozen=True)
class New:
    """A result in memory that the call makes: the memory's number and size, and the tensor's place.

    Attributes:
        number: which memory.
        nbytes: its size.
        offset: elements from its begin.
        geometry: shape, strides and dtype.
    """

    number: int
    nbytes: int
    offset: int
    geometry: Geometry

    def at(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Such a tensor in memory of that size."""
        return self.geometry.at_element(storage, self.offset)


@dataclass(frozen=True)
class Placed:
    """A result in the memory of an argument.

    Attributes:
        place: which of the arguments' memory.
        offset: elements from its begin.
        geometry: shape, strides and dtype.
    """

    place: int
    offset: int
    geometry: Geometry


@dataclass(frozen=True)
class Kept:
    """A result in memory from outside of the call."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Host:
    """A result on the host: its content, which each walk gets a copy of.

    Attributes:
        tensor: the content.
        into: which tensor that was given it was copied into; None if it is a tensor of its own.
    """

    tensor: torch.Tensor
    into: int | None = None


class Aside:
    """A result that nothing but a backward pass uses, on the host or not, as the kernel likes."""


class Outside:
    """An argument from outside of the call, the same as another one if it is the same memory.

    Constants of Python's are other memory in every walk: these are the same if they hold the same.
    """

    def __init__(self, tensor: torch.Tensor, *, constant: bool) -> None:
        self.tensor = tensor.detach()
        self._identity = tensor.untyped_storage()._cdata
        self._constant = constant

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outside):
            return False
        if self._identity == other._identity:
            return True
        return self._constant and other._constant and same_bytes(self.tensor, other.tensor)

    def __hash__(self) -> int:
        return 0


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors on the host hold the same, bit for bit."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return False
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a tensor on the host holds."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if plain.numel() and plain.stride(0) != 1:
            plain = plain.clone()
        plain = plain.as_strided((plain.numel(),), (1,))
        held: bytes = plain.view(torch.uint8).numpy().tobytes()
    return held


@dataclass
class Step:
    """One operation of a call.

    Attributes:
        func: the operation.
        asked: what identifies its arguments.
        made: its results: `Given`, `New`, `Placed`, `Kept`, `Host`, `Aside`, or a value.
        spec: the tree that they are the leaves of.
        key: what a break's results have to be again for what follows to hold; None for no break.
        statics: what was copied to the device for it from the host.
        real: what a break's results in memory of the call's own held.
        place: `file:line` of the user's code, of a break.
    """

    func: Any
    asked: tuple[Any, ...]
    made: tuple[Any, ...]
    spec: Any
    key: Hashable | None = None
    statics: Sequence[torch.Tensor] = ()
    real: Sequence[torch.Tensor] = ()
    place: str | None = None

    @property
    def sources(self) -> list[Any]:
        """What its tensor arguments are: numbers, `Outside`, or names of inputs."""
        return [
            what[0]
            for what in self.asked
            if isinstance(what, tuple) and what and _is_source(what[0])
        ]

    def same(self, func: Any, asked: tuple[Any, ...]) -> bool:
        """Whether another walk does the same here."""
        return self.func is func and self.asked == asked


def _is_source(what: Any) -> bool:
    return isinstance(what, int | str | Outside) and not isinstance(what, bool)


def on_the_way_out(leaf: Any, given: Sequence[torch.Tensor], *, host: bool) -> Any:
    """A result as a step has it, unless it lies in memory of the call's own: then None.

    Args:
        leaf: the result.
        given: the tensors that the operation was given.
        host: whether the host gets to know its content.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    index = next((i for i, tensor in enumerate(given) if tensor is leaf), None)
    if host:
        for tensor in given:
            if tensor.is_cuda:  # The copy may be under way.
                torch.cuda.current_stream(tensor.device).synchronize()
        return Host(leaf.detach().clone(), index)
    return None if index is None else Given(index)


def key_of(value: Any) -> Hashable:
    """What a value of Python is known by: its type and bits."""
    if isinstance(value, float):
        return value if value and value == value else struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def key_of_results(leaves: Sequence[Any], made: Sequence[Any]) -> Hashable:
    """What a break's results are known by: values by bits, host memory by content, others by shape.

    Args:
        leaves: the results.
        made: the same as a step has them.
    """
    parts: list[Hashable] = []
    for leaf, what in zip(leaves, made, strict=True):
        if isinstance(what, Host):
            parts.append((what.tensor.dtype, what.tensor.shape, bytes_of(what.tensor)))
        elif isinstance(what, New):
            parts.append((what.offset, what.geometry))
        elif not isinstance(leaf, torch.Tensor):
            parts.append((type(leaf), key_of(leaf)))
    return tuple(parts)
