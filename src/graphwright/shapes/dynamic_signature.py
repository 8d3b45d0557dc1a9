"""DynamicSignature: what the calls of a family have in common, which is all but the named sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..calls.signature import CallSignature
from ..calls.snapshots import layout
from ..calls.split import Args, Kwargs, flatten
from ..errors import SignatureError
from .aliasing import twins_of
from .dimensions import Axes, Dimensions
from .padding import Sizes, contiguous_stride, memory_format, widths_of


class DynamicSignature:
    """A call's signature without its named sizes, by which calls of its family are recognized.

    Attributes:
        dimensions: which dimensions vary.
        axes: the dynamic dimensions of the call's leaves.
        own: the call's named sizes.
        names: of the leaves.
        formats: memory formats of the leaves that vary, None for others.
        gaps: which of these have other strides than new tensors.
        twins: for each leaf, the first one that is the same tensor.
    """

    def __init__(
        self, dimensions: Dimensions, signature: CallSignature, args: Args, kwargs: Kwargs
    ) -> None:
        """Describe a call.

        Raises:
            SignatureError: it does not have the dimensions, or its sizes do not agree.
        """
        self.dimensions = dimensions
        self.axes: list[Axes] = dimensions.axes(args, kwargs)
        self.names = dimensions.arguments(args, kwargs)
        leaves, _ = flatten(args, kwargs)
        self.own = self._sizes_that_agree(leaves)
        self.formats = [
            memory_format(leaf) if axes else None
            for leaf, axes in zip(leaves, self.axes, strict=True)
        ]
        self.gaps = _gaps(leaves, self.axes, self.formats)
        self.twins = twins_of(leaves)
        self._signature = signature

    def _sizes_that_agree(self, leaves: Sequence[Any]) -> Sizes:
        found = self._named_sizes(leaves)
        if found is None:
            sizes = [
                f"{name} has {leaf.shape[axis]} in dimension {axis}"
                for name, leaf, axes in zip(self.names, leaves, self.axes, strict=True)
                for axis in axes
            ]
            raise SignatureError(
                f"The arguments do not agree about the named sizes: {'; '.join(sizes)}.",
                remedy="Correct dynamic_shapes, or the arguments.",
            )
        if min(found) < 1:
            raise SignatureError(
                "A dimension is of size 0: there is nothing to pad.",
                remedy="Call the function itself for that.",
            )
        return found

    def _named_sizes(self, leaves: Sequence[Any]) -> Sizes | None:
        return self.dimensions.sizes([getattr(v, "shape", ()) for v in leaves], self.axes)

    def sizes(self, signature: CallSignature, leaves: Sequence[Any]) -> Sizes | None:
        """The named sizes of a call of this family; None for other calls."""
        mine = self._signature
        if signature.spec != mine.spec or signature.switches != mine.switches:
            return None
        for have, want, axes in zip(signature.leaves, mine.leaves, self.axes, strict=True):
            if not axes and have != want:
                return None
            if axes and not _alike(have, want, axes):
                return None
        if twins_of(leaves) != self.twins or not self.in_order(leaves):
            return None
        if _pairs(signature) != _pairs(mine):
            return None
        for leaf, format_ in zip(leaves, self.formats, strict=True):
            if format_ is not None and memory_format(leaf) is not format_:
                return None
        if _gaps(leaves, self.axes, self.formats) != self.gaps:
            return None
        return self._named_sizes(leaves)

    def difference(self, other: CallSignature, made: str) -> str | None:
        """How a call differs in more than the named sizes, in words; None if its arguments do not.

        Args:
            other: the signature of that call.
            made: what was done for calls of this family: "captured", "tuned".
        """
        theirs = other.by_name()
        leaves = []
        for (name, mine), axes in zip(self._signature.by_name().items(), self.axes, strict=True):
            have = theirs.get(name, ())
            leaves.append(have if axes and _alike(have, mine, axes) else mine)
        at_its_sizes = replace(self._signature, leaves=tuple(leaves))
        return "; ".join(at_its_sizes.other_arguments(other, made)) or None

    @property
    def overlap(self) -> bool:
        """Whether different arguments share memory."""
        twins = sum(first != index for index, first in enumerate(self.twins))
        return len(self._signature.aliases) > twins

    def in_order(self, leaves: Sequence[Any]) -> bool:
        """Whether dimensions lie in memory in their order, as they do in a padded copy.

        Gaps between rows and repeated rows do not change what a function returns; another order
        may, if only in its strides.
        """
        for leaf, axes in zip(leaves, self.axes, strict=True):
            # Only dense tensors are said to be channels last.
            if axes and memory_format(leaf) is torch.contiguous_format:
                steps = [step for step in layout(leaf) if step]
                if steps != sorted(steps, reverse=True):
                    return False
        return True

    def layout_widths(self, leaves: Sequence[Any]) -> tuple[Sizes | None, ...] | None:
        """Widths of 0 for leaves whose strides differ from a bucket's; None if there are none.

        Args:
            leaves: of a call of this family.
        """
        widths = [
            widths_of(leaf.shape, leaf.shape)
            if axes and leaf.stride() != contiguous_stride(leaf.shape, format_)
            else None
            for leaf, axes, format_ in zip(leaves, self.axes, self.formats, strict=True)
        ]
        return None if all(added is None for added in widths) else tuple(widths)

    def without_gaps(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, with those that have gaps copied to new tensors without gaps."""
        return [
            torch.empty_like(leaf, memory_format=format_).copy_(leaf)
            if gap and format_ is not None
            else leaf
            for leaf, gap, format_ in zip(leaves, self.gaps, self.formats, strict=True)
        ]


def _alike(have: Sequence[Any], want: Sequence[Any], axes: Axes) -> bool:
    """Whether what is known of an argument is that of a tensor which differs in `axes` alone."""
    if len(have) != 5 or (have[1], have[3]) != (want[1], want[3]):
        return False
    return len(have[0]) == len(want[0]) and all(
        n == m for axis, (n, m) in enumerate(zip(have[0], want[0], strict=True)) if axis not in axes
    )


def _pairs(signature: CallSignature) -> list[tuple[int, int]]:
    """Which arguments share memory."""
    return [(first, second) for first, second, _ in signature.aliases]


def _gaps(
    leaves: Sequence[Any], axes: Sequence[Axes], forms: Sequence[torch.memory_format | None]
) -> tuple[bool, ...]:
    """Which of the tensors that vary have other strides than new tensors."""
    return tuple(
        bool(own)
        and format_ is not None
        and layout(leaf) != layout(torch.empty_like(leaf, device="meta", memory_format=format_))
        for leaf, own, format_ in zip(leaves, axes, forms, strict=True)
    )
