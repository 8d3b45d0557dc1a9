"""Compare a padded call with eager without padding, and describe differences in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..calls.snapshots import CallOutcome, layout, same_value
from ..errors import first_line
from ..evaluation.accuracy import ROUNDING, as_float64, error_of, special_values
from .output_shapes import cuts_of
from .padding import Cut, Geometry, Sizes, cut_to
from .verdicts import Verdicts

# Tolerances. The first is relative to each element, or to the small elements of an output. In
# float64 errors are below 1e-12, unless a model computes parts in a narrower type.
_EXACT = 1e-6
_SMALL = 0.1
_MOST_SORTED = 1 << 20
_NO_TF32 = 1e-5


def effect_of_padding(
    verdicts: Verdicts,
    sizes: Sizes,
    expected: CallOutcome,
    outcome: CallOutcome,
    *,
    arguments: Collection[int],
    shared: Collection[int],
    exactly: bool,
) -> str | None:
    """How a padded call that returns the same tree differs from eager, in words, or None.

    Ways to slice an output that turn out wrong are removed from `verdicts`.

    Args:
        verdicts: what is known about the bucket.
        sizes: the true sizes.
        expected: what eager did.
        outcome: what the padded call did.
        arguments: outputs that are arguments, which are compared as arguments.
        shared: outputs that share memory with others, which slicing must keep.
        exactly: whether both ran in float64.
    """
    outputs = _Outputs(verdicts, sizes, shared, exactly=exactly)
    wanted, given = list(expected.outputs.items()), list(outcome.outputs.values())
    for index in outputs.owners_first():
        (name, want), have = wanted[index], given[index]
        if isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor):
            why = None if index in arguments else outputs.difference(index, have, want)
            if why is not None:
                return f"{name} {why}"
            continue
        number = outputs.cuts[index][0].number
        have = have if number is None else number
        if not same_value(want, have):
            return f"{name} is {have!r}, without padding {want!r}"
    return _side_effects(expected, outcome, exactly=exactly)


class _Outputs:
    """The outputs of padded calls of some sizes, to be sliced and compared with eager's.

    Args:
        verdicts: as for `effect_of_padding`.
        sizes: likewise.
        shared: likewise.
        exactly: likewise.

    Attributes:
        cuts: the ways to slice each.
    """

    def __init__(
        self, verdicts: Verdicts, sizes: Sizes, shared: Collection[int], *, exactly: bool
    ) -> None:
        self.cuts = cuts_of(verdicts.shapes, sizes, verdicts.bucket)
        self._known = verdicts.cuts
        self._rules = verdicts.shapes.of(sizes)
        self._padded = verdicts.shapes.of(verdicts.bucket)
        # Views of an output are cut from it as it is.
        self._kept_whole = {cuts[0].owner for cuts in self.cuts}
        self._shared = shared
        self._exactly = exactly
        self._sliced: dict[int, torch.Tensor] = {}

    def owners_first(self) -> list[int]:
        """The outputs' places: views come after the outputs that they are views of."""
        return sorted(
            range(len(self.cuts)), key=lambda index: self.cuts[index][0].owner is not None
        )

    def difference(self, index: int, have: torch.Tensor, want: torch.Tensor) -> str | None:
        """How an output differs from eager's, in words, or None; notes which ways to slice it do.

        Args:
            index: its place.
            have: the output of the padded call.
            want: eager's.
        """
        padded, cuts = self._padded[index], self.cuts[index]
        broken = _broken_rule(want, self._rules[index]) or _broken_rule(have, padded)
        if broken is not None:
            return broken
        sharing = index in self._shared and index not in self._kept_whole
        strides = padded[1] if sharing and isinstance(padded, tuple) else None
        several = len(cuts) > 1
        left = self._known.get(index, list(range(len(cuts)))) if several else [0]
        found: dict[int, str | None] = {}
        for choice in left:
            mine = self._slice(have, cuts[choice], strides)
            if isinstance(mine, str):
                found[choice] = mine
                continue
            found[choice] = _tensor_difference(mine, want, exactly=self._exactly)
            if found[choice] is None:
                self._sliced.setdefault(index, mine)
        if several:
            self._known[index] = [choice for choice in left if found[choice] is None]
        return None if index in self._sliced else found[left[-1]]

    def _slice(
        self, output: torch.Tensor, cut: Cut, strides: Sequence[int] | None
    ) -> torch.Tensor | str:
        """An output without its padding, or why it cannot be had.

        Args:
            output: of the padded call.
            cut: how to slice it.
            strides: of the output, if others share its memory in a way that slicing has to keep.
        """
        if cut.owner is None and not cut.whole and not (strides is None or cut.is_prefix(strides)):
            return "shares memory with another output, which slicing cannot keep"
        try:
            return cut(output) if cut.owner is None else cut.view_of(self._sliced[cut.owner])
        except (RuntimeError, IndexError) as error:
            return f"cannot be cut: {first_line(error, 120)}"


def _broken_rule(output: torch.Tensor, rule: Geometry | int | None) -> str | None:
    """How the shape of an output is none that follows from the sizes, in words, or None."""
    if isinstance(rule, tuple) and tuple(output.shape) != rule[0]:
        return f"has shape {tuple(output.shape)}, but {rule[0]} was expected from other sizes"
    return None


def _side_effects(expected: CallOutcome, outcome: CallOutcome, *, exactly: bool) -> str | None:
    """How the calls' writes to arguments and buffers differ, in words, or None."""
    for name, want in expected.inputs.items():
        have = outcome.inputs[name]
        if isinstance(want, torch.Tensor):
            why = _tensor_difference(cut_to(have, want.shape), want, exactly=exactly)
            if why is not None:
                return f"{name} {why}"
    for name in {**expected.buffers, **outcome.buffers}:
        if name not in expected.buffers or name not in outcome.buffers:
            return f"{name} is changed only with or only without padding"
        why = _tensor_difference(outcome.buffers[name], expected.buffers[name], exactly=exactly)
        if why is not None:
            return f"{name} {why}"
    return None


def joint(values: Sequence[Any], want: Any, *, exactly: bool) -> int | str | None:
    """The axis along which parts join to the whole; None if each part is the whole; or why not."""
    if not isinstance(want, torch.Tensor):
        return None if all(same_value(v, want) for v in values) else "another value"
    if any(not isinstance(v, torch.Tensor) or v.dim() != want.dim() for v in values):
        return "another shape"
    if all(part.shape == want.shape for part in values):
        whys = (_tensor_difference(part, want, exactly=exactly) for part in values)
        return next(filter(None, whys), None)
    reason = "another shape"
    for axis in range(want.dim()):
        if not _adds_up(values, want, axis):
            continue
        joined = torch.cat(tuple(values), axis)
        why = _tensor_difference(joined, want, exactly=exactly)
        if why is None and layout(joined) == layout(want):
            return axis
        reason = why or "another order in memory"
    return reason


def _adds_up(parts: Sequence[torch.Tensor], whole: torch.Tensor, axis: int) -> bool:
    """Whether parts have the shape of the whole where they are joined along an axis."""
    rest = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in (whole, *parts)}
    return len(rest) == 1 and sum(part.shape[axis] for part in parts) == whole.shape[axis]


def changed(before: Any, after: Any) -> bool:
    """Whether a call wrote to an argument."""
    if not isinstance(before, torch.Tensor):
        return False
    return not torch.equal(as_float64(before).nan_to_num(), as_float64(after).nan_to_num())


def only_nan(outcome: CallOutcome) -> bool:
    """Whether an output is all NaN."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.numel() > 0 and bool(leaf.isnan().all())
        for leaf in outcome.outputs.values()
    )


def _tensor_difference(have: torch.Tensor, want: torch.Tensor, *, exactly: bool) -> str | None:
    """How two tensors differ by more than rounding, in words, or None."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return f"has shape {tuple(have.shape)}, without padding {tuple(want.shape)}"
    if not want.numel():
        return None
    if not torch.equal(special_values(have), special_values(want)):
        return "has NaN or Inf in other places than without padding"
    by_element = exactly or want.dtype not in ROUNDING
    if by_element and _elementwise(have, want):
        return None
    error, peak = error_of(have, want, want)
    if not by_element:
        limit = ROUNDING[want.dtype]
        if want.dtype is torch.float32 and not want.is_cuda:
            limit = _NO_TF32
        if error.rms <= limit and error.max <= 10 * limit * peak:
            return None
    return f"changes by {error.rms:.1e} of its root mean square (largest change: {error.max:.1e})"


def _elementwise(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether each element is nearly exact, relative to its own size or that of small elements.

    Relative to the mean or the largest, a mask's -1e9 would hide errors of all other elements.
    """
    mine, theirs = as_float64(have).reshape(-1), as_float64(want).reshape(-1)
    finite = torch.isfinite(theirs)
    mine, theirs = mine[finite], theirs[finite]
    sizes = theirs.abs()
    some = sizes[sizes > 0]
    if not some.numel():
        return not bool(mine.any())
    some = some[:: 1 + some.numel() // _MOST_SORTED]
    small = some.sort().values[int(_SMALL * (some.numel() - 1))]
    return bool(((mine - theirs).abs() <= _EXACT * (sizes + small)).all())
