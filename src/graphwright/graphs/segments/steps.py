"""Steps: descriptions of a call's operations by which one run can be compared with another.

A step is an operation, its arguments and its results. Memory that the call makes is identified by a
number, in the order in which it is made; everything else by what it is.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..static_inputs import Geometry


@dataclass(frozen=True)
class Given:
    """A result that is one of the operation's arguments."""

    index: int


@dataclass(frozen=True)
class New:
    """A result in memory that the call makes.

    Attributes:
        number: of the memory.
        nbytes: bytes of the memory.
        offset: of the result in it, in elements.
        geometry: shape, strides and dtype.
    """

    number: int
    nbytes: int
    offset: int
    geometry: Geometry

    def at(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Such a tensor in memory of the same size."""
        return self.geometry.at_element(storage, self.offset)


@dataclass(frozen=True)
class Placed:
    """A result in the memory of one of the call's arguments.

    Attributes:
        place: which of the arguments' storages.
        offset: of the result in it, in elements.
        geometry: shape, strides and dtype.
    """

    place: int
    offset: int
    geometry: Geometry


@dataclass(frozen=True)
class Kept:
    """A result in memory from outside of the call: a weight, say."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Host:
    """A result on the host: its content, of which each run gets a copy.

    Attributes:
        tensor: the content.
        into: index of the argument that it was copied into; None if it is a new tensor.
    """

    tensor: torch.Tensor
    into: int | None = None


class Unused:
    """A result that only a backward pass uses; some kernels put it on the host, others do not."""


class Outside:
    """An argument from outside of the call; equal to another one if it is the same memory.

    Python's constants get new memory in every run: these are equal if their content is.
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
    """Whether two tensors on the host hold the same bits; False for tensors elsewhere."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return False
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The content of a tensor on the host."""
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
        arguments: what identifies its arguments.
        made: its results: `Given`, `New`, `Placed`, `Kept`, `Host`, `Unused`, or a value.
        spec: the tree of the results.
        key: identifies the outcome of a break; None for other operations.
        statics: copies on the device of its arguments on the host.
        real: content of a break's results in memory that the call makes.
        place: `file:line` of the user's code, of a break or a copy from the host.
    """

    func: Any
    arguments: tuple[Any, ...]
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
            for what in self.arguments
            if isinstance(what, tuple) and what and _is_source(what[0])
        ]

    def same(self, func: Any, arguments: tuple[Any, ...]) -> bool:
        """Whether another run does the same here."""
        return self.func is func and self.arguments == arguments


def _is_source(what: Any) -> bool:
    return isinstance(what, int | str | Outside) and not isinstance(what, bool)


def describe_result(leaf: Any, given: Sequence[torch.Tensor], *, host: bool) -> Any:
    """Describe a result for its step; None for a tensor that lies in memory on the device.

    Args:
        leaf: the result.
        given: the tensors among the operation's arguments.
        host: whether the host can see the result's content.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    index = next((i for i, tensor in enumerate(given) if tensor is leaf), None)
    if host:
        for tensor in given:
            if tensor.is_cuda:  # The copy may still be running.
                torch.cuda.current_stream(tensor.device).synchronize()
        return Host(leaf.detach().clone(), index)
    return None if index is None else Given(index)


def key_of(value: Any) -> Hashable:
    """A key for a Python value that tells apart values of different types or bits."""
    if isinstance(value, float):
        return value if value and value == value else struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def key_of_results(leaves: Sequence[Any], made: Sequence[Any]) -> Hashable:
    """A key for the outcome of a break: values by bits, host memory by content, others by shape.

    Args:
        leaves: the results.
        made: their descriptions, as in `Step.made`.
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
