"""Variations of a sample's inputs: random, permuted, flipped, lowered.

They are calls that the model could get: one that eager does not survive judges nobody. So ids are
drawn from the sample's own (on a GPU, an invalid one kills the process), and each row of a mask
keeps an element of what each row of the sample's has. Attention over a row that is masked as a
whole is undefined: kernels that are right give NaN, zeros or a mean there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ..calls.snapshots import Call, can_hold_anything, same_bits
from .accuracy import as_float64


@dataclass(frozen=True)
class Variation:
    """Other inputs than the sample's; `hint` says why they are tried, if that needs saying."""

    call: Call
    hint: str = ""


def variations(call: Call, generator: torch.Generator, draws: int) -> Iterator[Variation]:
    """Other inputs of the same kind; `generator` lives on the CPU.

    Integers that are all equal, and no mask, are lowered by one in a variation of their own, since
    a value that never changes proves nothing.
    """
    masks = _Masks.of(call)
    changes: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
        (f"random inputs {index + 1}", "", lambda t: _drawn(t, masks, generator))
        for index in range(draws)
    ]
    changes.append(("the sample's values permuted", "", lambda t: _permuted(t, masks, generator)))
    if any(_is_flippable(t, masks) for t in call.tensors()):
        changes.append(("booleans flipped", "", lambda t: ~t if _is_flippable(t, masks) else t))
    flags = {
        name: leaf
        for name, leaf in call.leaves().items()
        if isinstance(leaf, torch.Tensor) and _is_flag(leaf, masks)
    }
    if flags:
        changes.append((*_lowered_in_words(flags), lambda t: t - 1 if _is_flag(t, masks) else t))
    if not any(map(_is_varied, call.tensors())):
        return
    for name, hint, change in changes:
        mine = replace(call.clone(), name=name)
        with torch.no_grad():
            for tensor in filter(_is_varied, mine.tensors()):
                tensor.copy_(change(tensor.detach()))
        yield Variation(mine, hint)


def _is_varied(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and can_hold_anything(tensor)


def milder(sample: Call, other: Call) -> Iterator[tuple[str, Call]]:
    """A variation with the sample's own masks, then with all its integers, and what is kept."""
    tried = [sample, other]
    for kept, is_kept in (("masks", _is_binary), ("integers", _is_integer)):
        mine = other.clone()
        with torch.no_grad():
            for tensor, own in zip(mine.tensors(), sample.tensors(), strict=True):
                if is_kept(own) and can_hold_anything(own):
                    tensor.copy_(own)
        if not any(_same_values(mine, before) for before in tried):
            tried.append(mine)
            yield kept, mine


def notes_on_masks(call: Call) -> list[str]:
    """How masks that hold a single value were varied, in words."""
    found, masks = [], _Masks.of(call)
    for name, leaf in call.leaves().items():
        if not isinstance(leaf, torch.Tensor) or not _is_integer(leaf):
            continue
        mask = masks.find(leaf)
        ragged = mask is not None and mask.rows.shape[1] > 1
        if mask is not None and ragged and bool((mask.rows == mask.rows[0, 0]).all()):
            words = ("False", "True") if leaf.dtype is torch.bool else ("zeros", "ones")
            value, other = words if not mask.rows[0, 0] else words[::-1]
            whose, none = ("whose rows", "no row") if leaf.dim() > 1 else ("which", "none")
            found.append(
                f"{name} is all {value}: verified with ragged masks too, {whose} begin with "
                f"{value}, but with {none} of {other} alone"
            )
    return found


def drawn_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values like a tensor's: a mask for a mask, its mean and deviation, its integers."""
    shape = tensor.shape
    values = as_float64(tensor).reshape(-1).cpu()
    if tensor.is_complex():
        parts = drawn_like(torch.view_as_real(tensor), generator)
        return torch.view_as_complex(parts.contiguous())
    ones = bool((values == 1).any())
    only_both = bool(((values == 0) | (values == 1)).all())
    if only_both and (ones or tensor.dtype is torch.bool or tensor.is_floating_point()):
        drawn = torch.rand(shape, generator=generator, device="cpu") < 0.5
    elif tensor.is_floating_point():
        finite = values[torch.isfinite(values)]
        mean = float(finite.mean()) if finite.numel() else 0.0
        deviation = float(finite.std()) if finite.numel() > 1 else 0.0
        normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        drawn = normal * (deviation or 1.0) + mean
    else:
        places = torch.randint(0, tensor.numel(), shape, generator=generator, device="cpu")
        return tensor.reshape(-1)[places.to(tensor.device)]
    return drawn.to(tensor.device, tensor.dtype)


@dataclass(frozen=True)
class _Mask:
    """A tensor of zeros and ones, as rows of booleans on the CPU; `axis` is that of a row."""

    tensor: torch.Tensor
    axis: int
    rows: torch.Tensor

    def has_in_each_row(self, value: bool) -> bool:
        """Whether no row lacks a value."""
        return bool((self.rows == value).any(1).all())

    @property
    def edge(self) -> tuple[bool, bool] | None:
        """What all rows begin with, or end with if mirrored, where each changes at most once."""
        if int((self.rows[:, 1:] != self.rows[:, :-1]).sum(1).max()) > 1:
            return None
        for mirrored in (False, True):
            ends = self.rows[:, -1 if mirrored else 0]
            if bool((ends == ends[0]).all()):
                return bool(ends[0]), mirrored
        return None

    def drawn(self, generator: torch.Generator) -> torch.Tensor:
        """Ragged rows for ragged or equal ones, else random ones."""
        count, length = self.rows.shape
        if length == 1:  # Each row keeps what it has.
            return self._as_tensor(self.rows)
        if self.edge is not None:
            value, mirrored = self.edge
            lengths = torch.randint(1, length, (count,), generator=generator, device="cpu")
            if count > 1 and not self.has_in_each_row(not value):
                # As in a batch, whose longest row has no padding.
                lengths[int(torch.randint(count, (), generator=generator, device="cpu"))] = length
            made = (torch.arange(length) < lengths[:, None]) == value
            return self._as_tensor(made.flip(1) if mirrored else made)
        made = torch.rand((count, length), generator=generator, device="cpu") < 0.5
        places = torch.randint(length, (count,), generator=generator, device="cpu")
        for value in (False, True):
            if self.has_in_each_row(value):
                lacking = (made != value).all(1)
                made[lacking, places[lacking]] = value
        return self._as_tensor(made)

    def permuted(self, generator: torch.Generator) -> torch.Tensor:
        """The same rows in another order."""
        order = torch.randperm(len(self.rows), generator=generator, device="cpu")
        return self._as_tensor(self.rows[order])

    @property
    def may_be_flipped(self) -> bool:
        """Whether each row then still has what each had."""
        return self.edge is None and self.has_in_each_row(True) == self.has_in_each_row(False)

    def _as_tensor(self, rows: torch.Tensor) -> torch.Tensor:
        shape = self.tensor.movedim(self.axis, -1).shape
        made = rows.reshape(shape).movedim(-1, self.axis)
        return made.to(self.tensor.device, self.tensor.dtype)


@dataclass(frozen=True)
class _Masks:
    """Finds the masks of a call.

    Attributes:
        lengths: sizes that more than one of its tensors have.
        ids: shapes of its integers that are no zeros and ones.
    """

    lengths: frozenset[int]
    ids: frozenset[torch.Size]

    @classmethod
    def of(cls, call: Call) -> _Masks:
        sizes = Counter(size for tensor in call.tensors() for size in {*tensor.shape})
        ids = (t.shape for t in call.tensors() if _is_integer(t) and not _is_binary(t))
        return cls(frozenset(size for size, count in sizes.items() if count > 1), frozenset(ids))

    def find(self, tensor: torch.Tensor) -> _Mask | None:
        """None if it is no mask: zeros alone may be ids.

        The first dimension is the batch. Where it is the only one, it is a row if there is
        something that it may mask; floats are data then. Rows of a single element mask ids of the
        same shape, if there are some.
        """
        is_row = tensor.dim() == 1 and len(tensor) in self.lengths and _is_integer(tensor)
        long = [axis for axis in range(not is_row, tensor.dim()) if tensor.shape[axis] > 1]
        if not long and tensor.dim() > 1 and tensor.shape in self.ids:
            long = [tensor.dim() - 1]
        if not long or not tensor.numel() or not _is_binary(tensor):
            return None
        rows = tensor.detach().movedim(long[-1], -1).reshape(-1, tensor.shape[long[-1]])
        return _Mask(tensor, long[-1], rows.cpu().bool())


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_binary(tensor: torch.Tensor) -> bool:
    """Booleans, or zeros and ones, with a one among them."""
    if tensor.dtype is torch.bool or tensor.is_complex():
        return tensor.dtype is torch.bool
    values = as_float64(tensor)
    ones = values == 1
    return bool(((values == 0) | ones).all()) and bool(ones.any())


def _is_flag(tensor: torch.Tensor, masks: _Masks) -> bool:
    """An integer tensor, and no mask, all of whose elements are one value above 0."""
    if not _is_integer(tensor) or tensor.dtype is torch.bool or not tensor.numel():
        return False
    first = tensor.reshape(-1)[:1]
    return int(first) > 0 and bool((tensor == first).all()) and masks.find(tensor) is None


def _is_flippable(tensor: torch.Tensor, masks: _Masks) -> bool:
    if tensor.dtype is not torch.bool:
        return False
    mask = masks.find(tensor)
    return mask is None or mask.may_be_flipped


def _lowered_in_words(flags: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """What flags are lowered to; and why, with what to do."""
    lowered, given = [], []
    for name, tensor in flags.items():
        value = int(tensor.reshape(-1)[0])
        several = tensor.numel() > 1
        lowered.append(f"{name} of {'zeros' if several and value == 1 else value - 1}")
        given.append("all ones" if several and value == 1 else f"{'all ' * several}{value}")
    hint = f"tried because yours {'is' if len(flags) == 1 else 'are'} {' and '.join(given)}"
    if any(tensor.numel() > 1 for tensor in flags.values()):
        hint += "; give one with " + ("both" if {*given} == {"all ones"} else "several") + " values"
    return " and ".join(lowered), hint


def _drawn(tensor: torch.Tensor, masks: _Masks, generator: torch.Generator) -> torch.Tensor:
    mask = masks.find(tensor)
    return drawn_like(tensor, generator) if mask is None else mask.drawn(generator)


def _permuted(tensor: torch.Tensor, masks: _Masks, generator: torch.Generator) -> torch.Tensor:
    mask = masks.find(tensor)
    if mask is not None:
        return mask.permuted(generator)
    order = torch.randperm(tensor.numel(), generator=generator, device="cpu").to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


def _same_values(one: Call, other: Call) -> bool:
    return all(map(same_bits, one.tensors(), other.tensors()))
