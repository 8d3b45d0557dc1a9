"""Compare a padded call with eager without padding, and describe differences in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..calls.snapshots import Outcome, layout, same_value
from ..errors import first_line
from ..evaluation.accuracy import ROUNDING, as_float64, error_of, special_values
from .outputs import cuts_of
from .padding import Sizes, cut_to
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
    expected: Outcome,
    outcome: Outcome,
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
    options = cuts_of(verdicts.shapes, sizes, verdicts.bucket)
    rules = verdicts.shapes.of(sizes)
    full = verdicts.shapes.of(verdicts.bucket)
    wanted, given = list(expected.outputs.items()), list(outcome.outputs.values())
    owners = {choice[0].owner for choice in options}
    done: dict[int, torch.Tensor] = {}
    # Views come after the outputs that they are views of.
    for index in sorted(range(len(options)), key=lambda place: options[place][0].owner is not None):
        (name, want), have = wanted[index], given[index]
        if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
            number = options[index][0].number
            have = have if number is None else number
            if not same_value(want, have):
                return f"{name} is {have!r}, without padding {want!r}"
            continue
        if index in arguments:
            continue
        rule, padded = rules[index], full[index]
        if isinstance(rule, tuple) and tuple(want.shape) != rule[0]:
            return f"{name} has shape {tuple(want.shape)}, where {rule[0]} follows the rule"
        if isinstance(padded, tuple) and tuple(have.shape) != padded[0]:
            return f"{name} has shape {tuple(have.shape)}, where {padded[0]} follows the rule"
        several = len(options[index]) > 1
        left = verdicts.cuts.get(index, list(range(len(options[index])))) if several else [0]
        found: dict[int, str | None] = {}
        for choice in left:
            cut = options[index][choice]
            keeps_sharing = cut.whole or cut.owner is not None or index in owners
            if index in shared and not keeps_sharing and isinstance(padded, tuple):
                keeps_sharing = cut.is_prefix(padded[1])
                if not keeps_sharing:
                    found[choice] = "shares memory with another output in a way that no cut keeps"
                    continue
            try:
                mine = cut(have) if cut.owner is None else cut.view_of(done[cut.owner])
            except (RuntimeError, IndexError) as error:
                found[choice] = f"cannot be cut: {first_line(error, 120)}"
                continue
            found[choice] = _tensor_difference(mine, want, exactly=exactly)
            if found[choice] is None:
                done.setdefault(index, mine)
        if several:
            verdicts.cuts[index] = [choice for choice in left if found[choice] is None]
        if index not in done:
            return f"{name} {found[left[-1]]}"
    return _side_effects(expected, outcome, exactly=exactly)


def _side_effects(expected: Outcome, outcome: Outcome, *, exactly: bool) -> str | None:
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
    parts = [value for value in values if isinstance(value, torch.Tensor)]
    if len(parts) < len(values) or any(part.dim() != want.dim() for part in parts):
        return "another shape"
    if all(part.shape == want.shape for part in parts):
        whys = [_tensor_difference(part, want, exactly=exactly) for part in parts]
        return next((why for why in whys if why is not None), None)
    reason = "another shape"
    for axis in range(want.dim()):
        rest = [[n for i, n in enumerate(part.shape) if i != axis] for part in (want, *parts)]
        total = sum(part.shape[axis] for part in parts)
        if all(shape == rest[0] for shape in rest) and total == want.shape[axis]:
            joined = torch.cat(parts, axis)
            why = _tensor_difference(joined, want, exactly=exactly)
            if why is None and layout(joined) != layout(want):
                why = "another order in memory"
            if why is None:
                return axis
            reason = why
    return reason


def changed(before: Any, after: Any) -> bool:
    """Whether a call wrote to an argument."""
    if not isinstance(before, torch.Tensor):
        return False
    return not torch.equal(as_float64(before).nan_to_num(), as_float64(after).nan_to_num())


def only_nan(outcome: Outcome) -> bool:
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
    return f"changes by {error.rms:.1e} of its root mean square (largest: {error.max:.1e})"


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
