"""A function with a sample of one kind of call, and such calls of any sizes made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..signature import unflatten
from ..snapshots import Call
from ..variations import drawn_like
from .dimensions import Axes, Bounds
from .outputs import Sizes, memory_format
from .padding import Value, cut_to, fill, shape_at, widths_of

_FAR = 100.0


@dataclass
class Subject:
    """A function and a sample of one kind of call.

    Attributes:
        fn: the function, and `module`, what holds its parameters.
        module: the same object for a module.
        spec: tree of the call's arguments.
        sample: its leaves.
        axes: their dynamic dimensions.
        names: of the dimensions.
        bounds: of their sizes.
        fills: what each leaf is filled up with.
        declared: whether the caller said so.
    """

    fn: Callable[..., Any]
    module: nn.Module
    spec: pytree.TreeSpec
    sample: list[Any]
    axes: list[Axes]
    names: tuple[str, ...]
    bounds: Mapping[str, Bounds]
    fills: list[Value]
    declared: list[bool]

    def at(self, sizes: Sizes) -> list[Any]:
        """The sample with other sizes: a part of it, or repeated."""
        named = dict(zip(self.names, sizes, strict=True))
        made: dict[int, Any] = {}
        for leaf, own in zip(self.sample, self.axes, strict=True):
            if id(leaf) in made or not own:
                continue
            resized = leaf
            for axis, n in enumerate(shape_at(leaf.shape, own, named)):
                if n < leaf.shape[axis]:
                    resized = resized.narrow(axis, 0, n)
                elif n > leaf.shape[axis]:
                    places = torch.arange(n, device=leaf.device) % leaf.shape[axis]
                    resized = resized.index_select(axis, places)
            laid_out = torch.empty(
                resized.shape,
                dtype=leaf.dtype,
                device=leaf.device,
                memory_format=memory_format(leaf),
            )
            made[id(leaf)] = laid_out.copy_(resized)
        return [made.get(id(leaf), leaf) for leaf in self.sample]

    def padded(
        self, leaves: Sequence[Any], bucket: Sizes, filling: int, generator: torch.Generator
    ) -> list[Any]:
        """A call's leaves filled up to a bucket.

        Args:
            leaves: of the call.
            bucket: named sizes.
            filling: 0 for what calls will be filled with; 1 and 2 for other values of the kind that
                the tensor holds, where the caller declared none.
            generator: of the other values; on the CPU.
        """
        named = dict(zip(self.names, bucket, strict=True))
        made: dict[int, Any] = {}
        for index, (leaf, own) in enumerate(zip(leaves, self.axes, strict=True)):
            if not own or id(leaf) in made:
                continue
            shape = shape_at(leaf.shape, own, named)
            if shape == tuple(leaf.shape):
                continue
            full = fill(leaf, widths_of(leaf.shape, shape), self.fills[index])
            if filling and not self.declared[index] and full.numel():
                full = _other(full, self.sample[index], filling, generator)
                cut_to(full, leaf.shape).copy_(leaf)
            made[id(leaf)] = full
        return [made.get(id(leaf), leaf) for leaf in leaves]

    def chunks(self, leaves: Sequence[Any], name: str, parts: Sequence[int]) -> Iterator[list[Any]]:
        """A call's leaves in parts along one dimension, as views."""
        begin = 0
        for n in parts:
            yield [
                narrowed(leaf, own, name, begin, n)
                for leaf, own in zip(leaves, self.axes, strict=True)
            ]
            begin += n

    def call(self, name: str, leaves: Sequence[Any]) -> Call:
        """Leaves as a call."""
        return Call(name, *unflatten(list(leaves), self.spec))


def _other(
    like: torch.Tensor, sample: torch.Tensor, filling: int, generator: torch.Generator
) -> torch.Tensor:
    """Values of the kind that a sample holds, in another tensor's shape and layout."""
    values = sample.reshape(-1)
    if sample.is_floating_point() or sample.is_complex():
        # Like the sample's, and far from these, both finite.
        made = drawn_like(like, generator) if filling == 1 else torch.full_like(like, _far(values))
    elif filling == 1 or sample.dtype is torch.bool:
        places = torch.randint(0, values.numel(), like.shape, generator=generator)
        made = values[places.to(values.device)]
        made = ~made if sample.dtype is torch.bool and filling == 2 else made
    else:
        made = torch.full_like(like, int(values.max()))
    return torch.empty_like(like).copy_(made)


def _far(values: torch.Tensor) -> float:
    real = torch.view_as_real(values) if values.is_complex() else values
    finite = real[torch.isfinite(real)].abs()
    largest = float(finite.double().max()) if finite.numel() else 0.0
    return min(_FAR * (largest or 1.0), torch.finfo(real.dtype).max / 4)


def narrowed(leaf: Any, axes: Axes, name: str, begin: int, n: int) -> Any:
    """The part of an argument that belongs to some rows of a named dimension."""
    for axis, size in axes.items():
        if size.name == name:
            leaf = leaf.narrow(axis, size.factor * begin, size.of(n))
    return leaf
