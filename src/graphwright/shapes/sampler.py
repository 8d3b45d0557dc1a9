"""CallSampler: a function with a sample call, of which it makes calls of other sizes and values.

Other values matter, since a trial of the sample alone misses what no row of it shows: that a flag
may be off, say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.snapshots import Call
from ..calls.split import Args, Kwargs, unflatten
from ..evaluation.variations import drawn_like
from .dimensions import Axes, Bounds, shape_at
from .padding import Sizes, Value, cut_to, fill, memory_format, widths_of

# Factor between the sample's largest value and padding that is far from all of its values.
_FAR = 100.0
# Declared pad values of floats from this magnitude on are those of masks that are added.
_ADDED = 1e3
# By how much rows that are alike differ.
_NEARLY = 1e-3


class ValueChange(Enum):
    """How a call's values differ from the sample's.

    In arguments with a declared pad value, what is padding in the sample stays so. Masks among them
    hold no padding if FLIPPED or MIXED, and some in the last row if SHUFFLED; integers that are no
    masks, and masks that are added, never change.

    Attributes:
        NONE: not at all.
        SCALED: floats are multiplied by factors from 0.5 to 1.5: samples may hold equal rows.
        NEGATED: floats are multiplied by -1.
        SHUFFLED: floats, masks and booleans are drawn from all values of the sample; of other
            integers whole slices are drawn, since each column may have its own ids.
        MIXED: as shuffled, and floats are multiplied by factors from -10 to 10: a sample may lie on
            one side of a threshold, and other calls beyond it.
        FLIPPED: booleans are negated, and so are zeros and ones in tensors that hold nothing else.
        FAR: as flipped, and floats are multiplied by 100 or -100.
        NAN: floats are NaN.
    """

    NONE = "none"
    SCALED = "scaled"
    NEGATED = "negated"
    SHUFFLED = "shuffled"
    MIXED = "mixed"
    FLIPPED = "flipped"
    FAR = "far"
    NAN = "nan"


@dataclass
class CallSampler:
    """A function and a sample of the calls of one family.

    Attributes:
        fn: the function.
        module: what holds its parameters; for a module the same object.
        spec: tree of the call's arguments.
        sample: leaves of the sample's arguments.
        axes: the dynamic dimensions of each leaf.
        names: of the dimensions.
        bounds: of their sizes.
        pad_values: what each leaf is padded with.
        declared: whether the caller declared the pad value of each leaf.
    """

    fn: Callable[..., Any]
    module: nn.Module
    spec: pytree.TreeSpec
    sample: list[Any]
    axes: list[Axes]
    names: tuple[str, ...]
    bounds: Mapping[str, Bounds]
    pad_values: list[Value]
    declared: list[bool]
    _valid_values: dict[int, Value | None] = field(default_factory=dict, init=False)

    @property
    def device(self) -> torch.device:
        """Where the function runs."""
        tensors = [leaf for leaf in self.sample if isinstance(leaf, torch.Tensor)]
        devices = (t.device for t in tensors if t.device.type != "cpu")
        return next(devices, torch.device("cpu"))

    def at(self, sizes: Sizes) -> list[Any]:
        """The sample at other sizes: a part of it, or extended so that no two rows are alike.

        Args:
            sizes: the named sizes.
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

    def changes(self) -> list[ValueChange]:
        """The changes of values to try, in order: the first ones tell most."""
        varying = [index for index in self._dynamic() if self._varies(index)]
        if not varying:
            return [ValueChange.NONE]
        free = [self.sample[index] for index in varying if not self.declared[index]]
        no_masks = [self.sample[index] for index in varying if self._valid(index) is None]
        found = [ValueChange.NONE]
        if any(map(_is_data, no_masks)):
            found.append(ValueChange.NEGATED)
        if len(no_masks) < len(varying) or any(map(_holds_flags, free)):
            found.append(ValueChange.FLIPPED)
        found += [ValueChange.MIXED, ValueChange.SHUFFLED, ValueChange.SCALED]
        # Their number is no multiple of the 3 variants of padding, so that each meets each.
        return found if len(found) % 3 else [*found, ValueChange.SHUFFLED]

    def changed(self, sizes: Sizes, how: ValueChange, generator: torch.Generator) -> list[Any]:
        """A call of some sizes with other values than the sample's.

        Args:
            sizes: the named sizes.
            how: in which way the values differ.
            generator: of random values; on the CPU.
        """
        leaves = self.at(sizes)
        for index, leaf in self._varying(leaves):
            leaf.copy_(self._changed(index, leaf, how, generator))
        return leaves

    def alike(
        self,
        sizes: Sizes,
        how: ValueChange,
        generator: torch.Generator,
        names: Collection[str],
        row: int,
    ) -> list[Any]:
        """As `changed`, with all rows of some dimensions alike.

        If an output tells whether any or all rows have some property, rows that differ rarely show
        it. Floats still differ a little, since padding may change the order of equal ones.

        Args:
            sizes: the named sizes.
            how: in which way the values differ from the sample's.
            generator: of random values; on the CPU.
            names: of the dimensions.
            row: which row of the sample is repeated, modulo their number.
        """
        leaves = self.at(sizes)
        named = dict(zip(self.names, sizes, strict=True))
        rows = self.at(tuple(self._sample_size(n) if n in names else named[n] for n in named))
        for index, leaf in self._varying(leaves):
            own = self.axes[index]
            if self._valid(index) is not None:  # Rows that are all masked would prove nothing.
                leaf.copy_(self._changed(index, leaf, how, generator))
                continue
            made = self._changed(index, rows[index], how, generator)
            for axis, size in own.items():
                if size.name not in names:
                    continue
                period = size.of(1)
                first = period * (row % max(1, made.shape[axis] // period))
                places = torch.arange(leaf.shape[axis]) % period + first
                made = made.index_select(axis, places.to(made.device))
                if _is_data(made):
                    shape = [-1 if a == axis else 1 for a in range(made.dim())]
                    factors = 1 + _NEARLY * torch.rand(made.shape[axis], generator=generator)
                    nearly = made * factors.reshape(shape).to(made.device, made.dtype)
                    made = torch.where(self._is_padding(index, made), made, nearly)
            if made.numel() and not bool(self._is_padding(index, made).all()):
                leaf.copy_(made)
        return leaves

    def with_odd_row(
        self,
        sizes: Sizes,
        how: ValueChange,
        odd: ValueChange,
        generator: torch.Generator,
        name: str,
        row: int,
    ) -> list[Any]:
        """As `alike`, with a last row along one dimension that differs from the others.

        Args:
            sizes: the named sizes.
            how: in which way the values differ from the sample's.
            odd: in which way those of the last row do.
            generator: of random values; on the CPU.
            name: of the dimension.
            row: which row of the sample is repeated, modulo their number.
        """
        leaves = self.alike(sizes, how, generator, (name,), row)
        others = self.alike(sizes, odd, generator, (name,), row)
        for index, leaf in self._varying(leaves):
            for axis, size in self.axes[index].items():
                if size.name == name:
                    last = leaf.shape[axis] - size.factor, size.factor
                    leaf.narrow(axis, *last).copy_(others[index].narrow(axis, *last))
        return leaves

    def _sample_size(self, name: str) -> int:
        """A dimension's size in the sample."""
        for leaf, own in zip(self.sample, self.axes, strict=True):
            for axis, size in own.items():
                n = size.solve(leaf.shape[axis]) if size.name == name else None
                if n is not None:
                    return n
        return 1

    def _varying(self, leaves: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """The leaves whose values may be changed, each tensor once, with their indices."""
        done = set()
        for index in self._dynamic():
            leaf = leaves[index]
            if id(leaf) not in done and leaf.numel() and self._varies(index):
                done.add(id(leaf))
                yield index, leaf

    def _dynamic(self) -> list[int]:
        """Indices of leaves with dynamic dimensions."""
        return [index for index, own in enumerate(self.axes) if own]

    def _varies(self, index: int) -> bool:
        """Whether calls with other values than a leaf's are like the sample."""
        if not self.declared[index] or self._valid(index) is not None:
            return True
        return _is_real(self.sample[index]) and abs(self.pad_values[index]) < _ADDED

    def _valid(self, index: int) -> Value | None:
        """What a mask with a declared pad value holds where there is data; None for others."""
        if not self.declared[index]:
            return None
        if index not in self._valid_values:
            self._valid_values[index] = _other_value(self.sample[index], self.pad_values[index])
        return self._valid_values[index]

    def _is_padding(self, index: int, leaf: torch.Tensor) -> torch.Tensor:
        """Which elements hold the pad value that the caller declared."""
        if not self.declared[index]:
            return torch.zeros_like(leaf, dtype=torch.bool)
        return leaf == self.pad_values[index]

    def _changed(
        self, index: int, leaf: torch.Tensor, how: ValueChange, generator: torch.Generator
    ) -> torch.Tensor:
        """A call's tensor with changed values that are still like the sample's."""
        sample, own, valid = self.sample[index], self.axes[index], self._valid(index)
        if not self.declared[index]:
            return _changed(leaf, sample, own, how, generator)
        if valid is not None:
            return _changed_mask(leaf, own, how, valid, self.pad_values[index])
        sample = sample[~self._is_padding(index, sample)]
        if not sample.numel():
            return leaf
        made = _changed(leaf, sample, own, how, generator)
        return torch.where(self._is_padding(index, leaf), leaf, made)

    def padded(
        self, leaves: Sequence[Any], bucket: Sizes, variant: int, generator: torch.Generator
    ) -> list[Any]:
        """A call's leaves, padded to a bucket.

        Args:
            leaves: of the call.
            bucket: its named sizes.
            variant: 0 for the values that calls will be padded with; 1 and 2 for other values like
                those of the tensor, unless the caller declared the pad value.
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
            full = fill(leaf, widths_of(leaf.shape, shape), self.pad_values[index])
            if variant and not self.declared[index] and full.numel():
                full = _pad_variant(full, self.sample[index], own, variant, generator)
                cut_to(full, leaf.shape).copy_(leaf)
            made[id(leaf)] = full
        return [made.get(id(leaf), leaf) for leaf in leaves]

    def chunks(self, leaves: Sequence[Any], name: str, parts: Sequence[int]) -> Iterator[list[Any]]:
        """A call's leaves in chunks along one dimension, as views."""
        begin = 0
        for n in parts:
            yield [
                narrowed(leaf, own, name, begin, n)
                for leaf, own in zip(leaves, self.axes, strict=True)
            ]
            begin += n

    def arguments(self, sizes: Sizes) -> tuple[Args, Kwargs]:
        """The sample's arguments at some sizes."""
        return unflatten(self.at(sizes), self.spec)

    def result(self, leaves: Sequence[Any]) -> Any:
        """What the function returns for a call's leaves."""
        args, kwargs = unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)

    def call(self, name: str, leaves: Sequence[Any]) -> Call:
        """A call with these leaves."""
        return Call(name, *unflatten(list(leaves), self.spec))


def _extended(tensor: torch.Tensor, axis: int, n: int, axes: Axes) -> torch.Tensor:
    """Extend a tensor along one axis by its own elements, varied so that no part is repeated."""
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
    # Rolled along another dynamic dimension, if there is one: others may be columns of a table,
    # each with its own values.
    among = [a for a in axes if a != axis] or [a for a in range(tensor.dim()) if a != axis]
    other = next((a for a in among if tensor.shape[a] > 1), None)
    if other is None:
        return more
    # Ids stay ids: each repetition is rolled by one place more.
    parts = [part.roll(turn, other) for turn, part in enumerate(more.split(own, axis))]
    return torch.cat(parts, axis)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds only zeros and ones, and at least one 1."""
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool((tensor == 1).any())


def _is_zero(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers that are all 0: flags that nobody set, maybe."""
    return not _is_real(tensor) and not bool(tensor.any())


def _is_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floats that are no mask."""
    return _is_real(tensor) and not _is_mask(tensor)


def _holds_flags(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bool or _is_mask(tensor) or _is_zero(tensor)


def _other_value(sample: torch.Tensor, pad: Value) -> Value | None:
    """The one value that a mask holds beside its padding; None for tensors that are no masks."""
    if sample.dtype is torch.bool:
        return not pad
    data = sample[sample != pad]
    mask = data.numel() > 0 and bool((data == data[0]).all())
    if _is_real(sample) and not (_is_mask(sample) or data.numel() < sample.numel()):
        mask = False
    return data[0].item() if mask else None


def _changed_mask(
    leaf: torch.Tensor, axes: Axes, how: ValueChange, valid: Value, pad: Value
) -> torch.Tensor:
    """A mask without padding, or with some at the end of the last row."""
    if how not in (ValueChange.FLIPPED, ValueChange.MIXED, ValueChange.SHUFFLED):
        return leaf
    made = torch.full_like(leaf, valid)
    axis = min(axes)
    inner = [a for a in range(axis + 1, leaf.dim()) if leaf.shape[a] > 1]
    # A row of a sequence of masks is never masked as a whole: it would attend to nothing.
    if how is ValueChange.SHUFFLED and leaf.shape[axis] > 1 and (inner or leaf.dim() == 1):
        row = made.narrow(axis, leaf.shape[axis] - 1, 1)
        if inner:
            n = leaf.shape[inner[-1]]
            row = row.narrow(inner[-1], n - n // 2, n // 2)
        row.fill_(pad)
    return made


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def varied(leaf: torch.Tensor) -> torch.Tensor:
    """Random values in place of a sample whose values are all equal: dummies prove nothing."""
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
    how: ValueChange,
    generator: torch.Generator,
) -> torch.Tensor:
    """A call's tensor with changed values that are still like the sample's."""
    data = _is_data(sample)
    if how is ValueChange.FLIPPED or (how is ValueChange.FAR and not data):
        flips = _holds_flags(sample) and not leaf.is_complex()
        return (1 - leaf.long()).to(leaf.dtype) if flips else leaf
    if how in (ValueChange.SHUFFLED, ValueChange.MIXED):
        if not data and not _is_mask(sample) and sample.dtype is not torch.bool:
            return _slices(sample, leaf.shape, axes, generator)
        places = torch.randint(0, sample.numel(), leaf.shape, generator=generator, device="cpu")
        leaf = sample.reshape(-1)[places.to(sample.device)]
    return _changed_floats(leaf, how, generator) if data else leaf


def _changed_floats(
    leaf: torch.Tensor, how: ValueChange, generator: torch.Generator
) -> torch.Tensor:
    """Floats that are no mask, with other values in the same places."""
    if how is ValueChange.NAN:
        return torch.full_like(leaf, torch.nan)
    if how is ValueChange.NEGATED:
        return -leaf
    if how not in (ValueChange.FAR, ValueChange.SCALED, ValueChange.MIXED):
        return leaf
    factors = torch.rand(leaf.shape, generator=generator, device="cpu")
    if how is ValueChange.FAR:
        factors = _FAR * (1 - 2 * factors.round())
    else:
        factors = 0.5 + factors if how is ValueChange.SCALED else 20 * factors - 10
    return leaf * factors.to(leaf.device, leaf.dtype)


def _slices(
    sample: torch.Tensor, shape: Sequence[int], axes: Axes, generator: torch.Generator
) -> torch.Tensor:
    """Whole slices of a sample in random order, so that what belongs together stays together."""
    made = sample
    for axis in axes:
        own = sample.shape[axis]
        places = torch.randint(0, own, (shape[axis],), generator=generator, device="cpu")
        made = made.index_select(axis, places.to(sample.device))
    other = next((a for a in range(sample.dim()) if a not in axes and sample.shape[a] > 1), None)
    if other is not None and all(sample.shape[axis] == 1 for axis in axes):
        # There is only one slice: it is rolled, as in `_extended`.
        turn = torch.randint(0, sample.shape[other], (), generator=generator, device="cpu")
        made = made.roll(int(turn), other)
    return made


def _pad_variant(
    like: torch.Tensor,
    sample: torch.Tensor,
    axes: Axes,
    variant: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Values like those of a sample, in another tensor's shape and layout."""
    values = sample.reshape(-1)
    if _is_real(sample):
        # Variant 1 is like the sample, variant 2 far from it on both sides; all are finite.
        if variant == 1:
            made = drawn_like(like, generator)
        else:
            signs = 1 - 2 * torch.rand(like.shape, generator=generator, device="cpu").round()
            made = (_far(values) * signs.double()).to(like.device, like.dtype)
    elif variant == 1 or sample.dtype is torch.bool:
        made = _slices(sample, like.shape, axes, generator)
        made = ~made if sample.dtype is torch.bool and variant == 2 else made
    else:
        made = torch.full_like(like, int(values.max()))
    return torch.empty_like(like).copy_(made)


def _far(values: torch.Tensor) -> float:
    """A finite magnitude far above all of some values."""
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
