"""A function with a sample of one kind of call, and such calls of any sizes made of it.

They have the sample's values, or others of the same kind: what no row of the sample shows (that a
flag may be down, say) is not seen in a trial of the sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.signature import Args, Kwargs, unflatten
from ..calls.snapshots import Call
from ..evaluation.variations import drawn_like
from .dimensions import Axes, Bounds, shape_at
from .padding import Sizes, Value, cut_to, fill, memory_format, widths_of

_FAR = 100.0
_NEARLY = 1e-3


class Change(Enum):
    """How a call's values differ from the sample's. Where a pad value is declared, they never do.

    Attributes:
        NONE: not at all.
        SCALED: floats by factors from 0.5 to 1.5: samples may hold equal rows.
        NEGATED: floats by -1.
        SHUFFLED: floats, masks and booleans are drawn from all that the sample holds; of other
            integers whole slices are, since each column may have ids of its own.
        MIXED: as shuffled, and floats by factors from -10 to 10: where a sample lies to one side of
            a bound, others may lie beyond it.
        FLIPPED: booleans, and zeros and ones in tensors that hold nothing else.
    """

    NONE = "none"
    SCALED = "scaled"
    NEGATED = "negated"
    SHUFFLED = "shuffled"
    MIXED = "mixed"
    FLIPPED = "flipped"


@dataclass
class CallSampler:
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

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        tensors = [leaf for leaf in self.sample if isinstance(leaf, torch.Tensor)]
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def at(self, sizes: Sizes) -> list[Any]:
        """The sample with other sizes: a part of it, or more of its kind, no two rows alike.

        Args:
            sizes: named ones.
        """
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
                    resized = _extended(resized, axis, n, own)
            laid_out = torch.empty(
                resized.shape,
                dtype=leaf.dtype,
                device=leaf.device,
                memory_format=memory_format(leaf),
            )
            made[id(leaf)] = laid_out.copy_(resized)
        return [made.get(id(leaf), leaf) for leaf in self.sample]

    def changes(self) -> list[Change]:
        """What may be changed about calls, in turn: the first ones tell most."""
        samples = [self.sample[index] for index in self._free()]
        found = [Change.NONE]
        if any(_is_real(sample) and not _is_mask(sample) for sample in samples):
            found.append(Change.NEGATED)
        if any(s.dtype is torch.bool or _is_mask(s) or _is_zero(s) for s in samples):
            found.append(Change.FLIPPED)
        found += [Change.MIXED, Change.SHUFFLED, Change.SCALED]
        # Not a multiple of the fillings, so that each meets each.
        return found if len(found) % 3 else [*found, Change.SHUFFLED]

    def changed(self, sizes: Sizes, how: Change, generator: torch.Generator) -> list[Any]:
        """A call of some sizes with other values than the sample's.

        Args:
            sizes: named ones.
            how: in which way they differ.
            generator: of random values; on the CPU.
        """
        leaves = self.at(sizes)
        for index, leaf in self._apart(leaves):
            leaf.copy_(_changed(leaf, self.sample[index], self.axes[index], how, generator))
        return leaves

    def alike(
        self,
        sizes: Sizes,
        how: Change,
        generator: torch.Generator,
        names: Collection[str],
        row: int,
    ) -> list[Any]:
        """The same with all rows of some dimensions alike.

        Where an output is about whether any row has something, or all, rows that differ seldom
        tell. Floats differ a little, since the order of equal ones may be another with padding.

        Args:
            sizes: named ones.
            how: in which way the values differ from the sample's.
            generator: of random values; on the CPU.
            names: of the dimensions.
            row: which one of the sample is repeated, counted round and round.
        """
        leaves = self.at(sizes)
        named = dict(zip(self.names, sizes, strict=True))
        rows = self.at(tuple(self._own(name) if name in names else named[name] for name in named))
        for index, leaf in self._apart(leaves):
            own = self.axes[index]
            made = _changed(rows[index], self.sample[index], own, how, generator)
            for axis, size in own.items():
                if size.name not in names:
                    continue
                period = size.of(1)
                first = period * (row % max(1, made.shape[axis] // period))
                places = torch.arange(leaf.shape[axis]) % period + first
                made = made.index_select(axis, places.to(made.device))
                if _is_real(made) and not _is_mask(made):
                    shape = [-1 if a == axis else 1 for a in range(made.dim())]
                    factors = 1 + _NEARLY * torch.rand(made.shape[axis], generator=generator)
                    made = made * factors.reshape(shape).to(made.device, made.dtype)
            leaf.copy_(made)
        return leaves

    def _own(self, name: str) -> int:
        """A dimension's size in the sample."""
        for leaf, own in zip(self.sample, self.axes, strict=True):
            for axis, size in own.items():
                n = size.solve(leaf.shape[axis]) if size.name == name else None
                if n is not None:
                    return n
        return 1

    def _apart(self, leaves: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """The leaves whose values may be others, each object once, with their places."""
        done = set()
        for index in self._free():
            leaf = leaves[index]
            if id(leaf) not in done and leaf.numel():
                done.add(id(leaf))
                yield index, leaf

    def _free(self) -> list[int]:
        """Arguments with named sizes of which nothing is declared."""
        return [
            index
            for index, (own, said) in enumerate(zip(self.axes, self.declared, strict=True))
            if own and not said
        ]

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


def _extended(tensor: torch.Tensor, axis: int, n: int, axes: Axes) -> torch.Tensor:
    """A tensor with more elements along one axis: its own, varied so that no part is repeated."""
    own = tensor.shape[axis]
    places = torch.arange(n, device=tensor.device) % own
    more = tensor.index_select(axis, places)
    if _is_mask(tensor) or tensor.dtype is torch.bool:
        return more
    if _is_real(tensor):
        generator = torch.Generator().manual_seed(n)
        factors = 0.5 + torch.rand(more.shape, generator=generator, device="cpu")
        factors.narrow(axis, 0, own).fill_(1)
        return more * factors.to(more.device, more.dtype)
    # Along another dimension that varies, if there is one: what lies beside it may be a table's
    # columns, each with values of its own.
    among = [a for a in axes if a != axis] or [a for a in range(tensor.dim()) if a != axis]
    other = next((a for a in among if tensor.shape[a] > 1), None)
    if other is None:
        return more
    # Ids stay ids: each repetition is turned by one place more.
    parts = [part.roll(turn, other) for turn, part in enumerate(more.split(own, axis))]
    return torch.cat(parts, axis)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds zeros and ones alone, and not zeros alone."""
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor == 1).any())


def _is_zero(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers that are all 0, as flags may that nobody has set."""
    return not _is_real(tensor) and not bool(tensor.any())


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def varied(leaf: torch.Tensor) -> torch.Tensor:
    """A sample with other values where it has but one: dummies prove nothing."""
    if not leaf.is_floating_point() or leaf.numel() < 2 or _is_mask(leaf):
        return leaf
    if bool((leaf == leaf.reshape(-1)[0]).all()):
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(leaf.shape, generator=generator, device="cpu")
        return torch.empty_like(leaf).copy_(drawn)
    return leaf


def _changed(
    leaf: torch.Tensor,
    sample: torch.Tensor,
    axes: Axes,
    how: Change,
    generator: torch.Generator,
) -> torch.Tensor:
    """A call's tensor with other values of the kind that the sample holds."""
    real, mask = _is_real(leaf), sample.dtype is torch.bool or _is_mask(sample)
    if how is Change.FLIPPED:
        mask = mask or _is_zero(sample)
        return (1 - leaf.long()).to(leaf.dtype) if mask and not leaf.is_complex() else leaf
    if how is Change.NEGATED:
        return -leaf if real and not mask else leaf
    if how in (Change.SHUFFLED, Change.MIXED):
        if not real and not mask:
            return _slices(sample, leaf.shape, axes, generator)
        places = torch.randint(0, sample.numel(), leaf.shape, generator=generator, device="cpu")
        leaf = sample.reshape(-1)[places.to(sample.device)]
    if not real or mask or how not in (Change.SCALED, Change.MIXED):
        return leaf
    factors = torch.rand(leaf.shape, generator=generator, device="cpu")
    factors = 0.5 + factors if how is Change.SCALED else 20 * factors - 10
    return leaf * factors.to(leaf.device, leaf.dtype)


def _slices(
    sample: torch.Tensor, shape: Sequence[int], axes: Axes, generator: torch.Generator
) -> torch.Tensor:
    """Slices of a sample in random order, whole ones: what belongs together stays together."""
    made = sample
    for axis in axes:
        own = sample.shape[axis]
        places = torch.randint(0, own, (shape[axis],), generator=generator, device="cpu")
        made = made.index_select(axis, places.to(sample.device))
    other = next((a for a in range(sample.dim()) if a not in axes and sample.shape[a] > 1), None)
    if other is not None and all(sample.shape[axis] == 1 for axis in axes):
        # There is but one: it is turned, as for more rows than the sample has.
        turn = torch.randint(0, sample.shape[other], (), generator=generator, device="cpu")
        made = made.roll(int(turn), other)
    return made


def _other(
    like: torch.Tensor,
    sample: torch.Tensor,
    axes: Axes,
    filling: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Values of the kind that a sample holds, in another tensor's shape and layout."""
    values = sample.reshape(-1)
    if _is_real(sample):
        # Like the sample's, and far from these on both sides, all finite.
        if filling == 1:
            made = drawn_like(like, generator)
        else:
            signs = 1 - 2 * torch.rand(like.shape, generator=generator, device="cpu").round()
            made = (_far(values) * signs.double()).to(like.device, like.dtype)
    elif filling == 1 or sample.dtype is torch.bool:
        made = _slices(sample, like.shape, axes, generator)
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
