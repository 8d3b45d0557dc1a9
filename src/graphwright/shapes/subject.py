"""A function with a sample of one kind of call, and such calls of any sizes made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..signature import Args, Kwargs, unflatten
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

    def at(self, sizes: Sizes, *, vary: bool = False) -> list[Any]:
        """The sample with other sizes: a part of it, or more of its kind, no two rows alike.

        Args:
            sizes: named ones.
            vary: give all numbers that are no whole ones other values: samples may hold equal rows.
        """
        named = dict(zip(self.names, sizes, strict=True))
        made: dict[int, Any] = {}
        for leaf, own, said in zip(self.sample, self.axes, self.declared, strict=True):
            if id(leaf) in made or not own:
                continue
            resized = leaf
            for axis, n in enumerate(shape_at(leaf.shape, own, named)):
                if n < leaf.shape[axis]:
                    resized = resized.narrow(axis, 0, n)
                elif n > leaf.shape[axis]:
                    resized = _extended(resized, axis, n)
            laid_out = torch.empty(
                resized.shape,
                dtype=leaf.dtype,
                device=leaf.device,
                memory_format=memory_format(leaf),
            )
            made[id(leaf)] = laid_out.copy_(resized)
            if vary and not said and leaf.is_floating_point() and not _is_mask(leaf):
                factors = torch.rand(resized.shape, generator=torch.Generator().manual_seed(1))
                laid_out.mul_((0.5 + factors).to(leaf.device, leaf.dtype))
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
                full = _other(full, self.sample[index], own, filling, generator)
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

    def arguments(self, sizes: Sizes) -> tuple[Args, Kwargs]:
        """Arguments of some sizes, made of the sample's values."""
        return unflatten(self.at(sizes), self.spec)

    def result(self, leaves: Sequence[Any]) -> Any:
        """What the function returns for a call's leaves."""
        args, kwargs = unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)

    def call(self, name: str, leaves: Sequence[Any]) -> Call:
        """Leaves as a call."""
        return Call(name, *unflatten(list(leaves), self.spec))


def _extended(tensor: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    """A tensor with more elements along one axis: its own, varied so that no part is repeated."""
    own = tensor.shape[axis]
    places = torch.arange(n, device=tensor.device) % own
    more = tensor.index_select(axis, places)
    if _is_mask(tensor) or tensor.dtype is torch.bool:
        return more
    if tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator().manual_seed(n)
        factors = 0.5 + torch.rand(more.shape, generator=generator)
        factors.narrow(axis, 0, own).fill_(1)
        return more * factors.to(more.device, more.dtype)
    other = next((a for a in range(tensor.dim()) if a != axis and tensor.shape[a] > 1), None)
    if other is None:
        return more
    # Ids stay ids: each repetition is turned by one place more.
    parts = [part.roll(turn, other) for turn, part in enumerate(more.split(own, axis))]
    return torch.cat(parts, axis)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds zeros and ones alone, and not zeros alone."""
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor == 1).any())


def varied(leaf: torch.Tensor) -> torch.Tensor:
    """A sample with other values where it has but one: dummies prove nothing."""
    if not leaf.is_floating_point() or leaf.numel() < 2 or _is_mask(leaf):
        return leaf
    if bool((leaf == leaf.reshape(-1)[0]).all()):
        drawn = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0))
        return torch.empty_like(leaf).copy_(drawn)
    return leaf


def _other(
    like: torch.Tensor,
    sample: torch.Tensor,
    axes: Axes,
    filling: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Values of the kind that a sample holds, in another tensor's shape and layout."""
    values = sample.reshape(-1)
    if sample.is_floating_point() or sample.is_complex():
        # Like the sample's, and far from these, both finite.
        made = drawn_like(like, generator) if filling == 1 else torch.full_like(like, _far(values))
    elif filling == 1 or sample.dtype is torch.bool:
        made = sample
        for axis in axes:  # Whole slices: what belongs together stays together.
            places = torch.randint(0, sample.shape[axis], (like.shape[axis],), generator=generator)
            made = made.index_select(axis, places.to(sample.device))
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
