"""Padding inputs to a bucket, and slicing the outputs: PaddingPlan, Cut, and their helpers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ..graphs.static_outputs import Launch, Rebuild

Sizes = tuple[int, ...]
Geometry = tuple[Sizes, Sizes]  # shape and strides
Value = float | int | bool

_EXACT_IN_FLOAT = 2**53


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last for images and volumes that are laid out so, else contiguous."""
    # PyTorch decides this by the strides, also where both formats would fit.
    return suggest_memory_format(tensor) if tensor.dim() in (4, 5) else torch.contiguous_format


def contiguous_stride(shape: Sequence[int], format_: torch.memory_format | None) -> Sizes:
    """The strides of a new tensor of some shape and memory format."""
    made = torch.empty(
        tuple(shape), device="meta", memory_format=format_ or torch.contiguous_format
    )
    return made.stride()


def fill(leaf: torch.Tensor, widths: Sequence[int], value: Value) -> torch.Tensor:
    """Pad a tensor at the end of each dimension.

    The result is contiguous, or channels last if `leaf` is.

    Args:
        leaf: the tensor.
        widths: how much to add, as `widths_of` gives it.
        value: the pad value.
    """
    if any(widths) and (not isinstance(value, int) or abs(value) <= _EXACT_IN_FLOAT):
        return torch.constant_pad_nd(leaf, widths, value)
    added = reversed(widths[1::2])
    shape = [n + more for n, more in zip(leaf.shape, added, strict=True)]
    made = torch.empty(
        shape, dtype=leaf.dtype, device=leaf.device, memory_format=memory_format(leaf)
    )
    cut_to(made.fill_(value) if any(widths) else made, leaf.shape).copy_(leaf)
    return made


def widths_of(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Widths of padding before and after each dimension, the last first, as PyTorch takes them."""
    pairs = [(0, m - n) for n, m in zip(shape, wanted, strict=True)]
    return tuple(itertools.chain(*reversed(pairs)))


def cut_to(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Slice a tensor to a shape: the first elements of each dimension, as a view."""
    for axis, n in enumerate(shape):
        if tensor.shape[axis] != n:
            tensor = tensor.narrow(axis, 0, n)
    return tensor


@dataclass(frozen=True)
class Factors:
    """A dimension of an output that combines several named sizes: (batch * length, features).

    Its valid part is no prefix: the dimension is split, each factor is sliced, and they are joined.

    Attributes:
        axis: which dimension.
        bucket: its factors in the bucket.
        true: its factors in the call.
    """

    axis: int
    bucket: Sizes
    true: Sizes


@dataclass(frozen=True)
class Cut:
    """How one output of a bucket is sliced to the sizes of a call.

    Attributes:
        shape: of the result.
        stride: of the result, in elements.
        number: an integer to return in the output's place.
        factors: a dimension that has to be split to be sliced.
        whole: the output does not depend on the sizes, and is returned as it is.
        owner: index of the output that this one is a view of; the result is a view of its result.
        offset: where in the owner's result it begins, in elements.
    """

    shape: Sizes = ()
    stride: Sizes = ()
    number: int | None = None
    factors: Factors | None = None
    whole: bool = False
    owner: int | None = None
    offset: int = 0

    def view_of(self, owner: torch.Tensor) -> torch.Tensor:
        """The result as a view of the owner's result."""
        result = torch.empty(0, dtype=owner.dtype, device=owner.device)
        return result.set_(
            owner.untyped_storage(), owner.storage_offset() + self.offset, self.shape, self.stride
        )

    def __call__(self, output: Any) -> Any:
        """Slice an output; the result shares its memory only if it is a contiguous range of it."""
        if self.whole:
            return output
        if self.number is not None:
            return self.number
        assert isinstance(output, torch.Tensor)
        if self.is_prefix(output.stride()):
            result = torch.empty(0, dtype=output.dtype, device=output.device)
            return result.set_(
                output.untyped_storage(), output.storage_offset(), self.shape, self.stride
            )
        result = torch.empty_strided(
            self.shape, self.stride, dtype=output.dtype, device=output.device
        )
        factors = self.factors
        if factors is None:
            return result.copy_(cut_to(output, self.shape))
        rest = list(self.shape)
        rest[factors.axis : factors.axis + 1] = factors.true
        source = cut_to(output.unflatten(factors.axis, factors.bucket), rest)
        result.unflatten(factors.axis, factors.true).copy_(source)
        return result

    def is_prefix(self, stride: Sequence[int]) -> bool:
        """Whether a slice of an output with these strides has the strides that eager would give."""
        return self.factors is None and all(
            n == 1 or mine == theirs
            for n, mine, theirs in zip(self.shape, self.stride, stride, strict=True)
        )


@dataclass(frozen=True)
class PaddingPlan:
    """How calls of some sizes are padded to a bucket, and how its outputs are sliced.

    Attributes:
        sizes: the named sizes of the call.
        bucket: those of the bucket.
        widths: of each argument that has to be padded, or (all 0) copied to the bucket's memory
            layout; None for others.
        fills: the pad value of each argument.
        cuts: how each output is sliced.
        views: indices of outputs that are views of others.
    """

    sizes: Sizes
    bucket: Sizes
    widths: tuple[Sizes | None, ...]
    fills: tuple[Value, ...]
    cuts: tuple[Cut, ...]
    views: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        views = (index for index, cut in enumerate(self.cuts) if cut.owner is not None)
        object.__setattr__(self, "views", tuple(views))

    def pad(self, leaves: Sequence[Any]) -> list[Any]:
        """Pad a call's arguments; a tensor that occurs twice is padded once."""
        made: dict[int, Any] = {}
        found = []
        for leaf, widths, value in zip(leaves, self.widths, self.fills, strict=True):
            if widths is not None:
                if id(leaf) not in made:
                    made[id(leaf)] = fill(leaf, widths, value)
                leaf = made[id(leaf)]
            found.append(leaf)
        return found

    def around(self, launch: Launch, rebuild: Rebuild) -> Launch:
        """A launch for the arguments of a call, of one for those of the bucket.

        Args:
            launch: gives the leaves of what the bucket returns.
            rebuild: makes a result of the leaves of one.
        """
        pad, cut = self.pad, self.cut

        def padded(leaves: Sequence[Any]) -> Any:
            values = pad(leaves)
            return rebuild(cut(launch(values), leaves, values))

        return padded

    def cut(
        self, outputs: Sequence[Any], leaves: Sequence[Any], padded: Sequence[Any]
    ) -> list[Any]:
        """Slice the bucket's outputs.

        Args:
            outputs: leaves of what the bucket returned.
            leaves: the call's arguments.
            padded: the same, padded.
        """
        # An output that is an argument becomes the caller's; one that occurs twice is sliced once.
        made: dict[int, Any] = {id(v): leaf for v, leaf in zip(padded, leaves, strict=True)}
        found: list[Any] = []
        for output, cut in zip(outputs, self.cuts, strict=True):
            tensor = isinstance(output, torch.Tensor)
            result = made.get(id(output)) if tensor else None
            if result is None and cut.owner is None:
                result = cut(output)
                if tensor:
                    made[id(output)] = result
            found.append(result)
        for index in self.views:
            cut = self.cuts[index]
            assert cut.owner is not None
            if found[index] is None:
                found[index] = cut.view_of(found[cut.owner])
        return found

    def write_back(
        self, slots: Sequence[int], leaves: Sequence[Any], padded: Sequence[Any]
    ) -> None:
        """Copy what the bucket wrote to its padded arguments back to the call's arguments."""
        with torch.no_grad():
            for slot in slots:
                if self.widths[slot] is not None:
                    leaves[slot].copy_(cut_to(padded[slot], leaves[slot].shape))
