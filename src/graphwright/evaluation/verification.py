"""Verifying a candidate: its error on several inputs, and probes for staleness and aliasing.

A candidate is right when it is about as close to a float64 reference as eager itself. Its root mean
square error may be 3 times eager's and its largest error 8 times, on every leaf of the output, for
several inputs, in calls that are repeated, interleaved, and whose results are held. The second
bound is there since one wrong element in a million does not move the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..calls.snapshots import (
    Call,
    CallOutcome,
    Model,
    can_hold_anything,
    keep,
    layout,
    outputs_by_name,
    run,
    same_bits,
)
from ..calls.split import flatten, unflatten
from .accuracy import ErrorMeasure, error_of, special_values, tensors_in, worse
from .reference import Case, Reference, aliases_of


@dataclass(frozen=True)
class Verification:
    """Whether a candidate is right, or why not, and its error on the worst leaf."""

    ok: bool
    reason: str = ""
    error: ErrorMeasure | None = None


def compare(
    outcome: CallOutcome, case: Case, ref: Reference, ulp: float | None = None
) -> Verification:
    """Compare one outcome with those of eager and float64 for the same inputs.

    `ulp` is the unit in the last place of a lossy precision that the caller allowed.
    """
    if outcome.spec != case.eager.spec:
        return Verification(False, "the output's structure differs from eager's")
    want, have = case.eager.leaves(), outcome.leaves()
    worst: ErrorMeasure | None = None
    for name in {**want, **have}:
        if name not in have or name not in want:
            which = "not changed, eager changes it" if name in want else "changed, eager leaves it"
            return Verification(False, f"{name}: {which}")
        leaf, expected = have[name], want[name]
        why = _another_kind(leaf, expected)
        if why is not None:
            return Verification(False, f"{name} {why}")
        if not isinstance(leaf, torch.Tensor):
            continue
        if name in case.eager_error and same_bits(leaf, expected):
            worst = worse(worst, case.eager_error[name])
            continue
        if not torch.equal(special_values(leaf), special_values(expected)):
            return Verification(False, f"{name} has NaN or Inf in other places than eager's")
        exact = case.exact.get(name, expected)
        if exact.shape != expected.shape:
            exact = expected
        error, peak = error_of(leaf, exact, expected)
        limit = ref.limit(name, leaf, peak, ulp)
        worst = worse(worst, error)
        if not (error.rms <= limit.rms and error.max <= limit.max):
            return Verification(
                False,
                f"{name} is off by {error.rms:.1e} (rms) and {error.max:.1e} (largest); "
                f"allowed {limit.rms:.1e} and {limit.max:.1e}",
                error,
            )
    return Verification(True, error=worst)


def _another_kind(leaf: Any, expected: Any) -> str | None:
    """How a leaf differs from eager's in more than a tensor's elements, in words, or None."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(expected, torch.Tensor):
        same = type(leaf) is type(expected) and _same_value(leaf, expected)
        return None if same else f"is {leaf!r}, eager's is {expected!r}"
    for what in ("shape", "dtype", "device"):
        mine, theirs = getattr(leaf, what), getattr(expected, what)
        if mine != theirs:
            return f"has {what} {mine}, eager's has {theirs}"
    if leaf.numel() and layout(leaf) != layout(expected):
        return f"has strides {leaf.stride()}, eager's has {expected.stride()}"
    return None


def _same_value(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


def verify(model: Model, ref: Reference, *, ulp: float | None = None) -> Verification:
    """Judge a candidate: every case, then calls that are repeated, held and interleaved.

    Args:
        model: the candidate, called as the original is.
        ref: what `reference` gave.
        ulp: unit in the last place of a lossy precision that the caller allowed.

    Raises:
        whatever the candidate raises. Buffers and parameters are as before in any case.
    """
    try:
        verdict = _verdict(model, ref, ulp)
    finally:
        ref.state.restore()
        name = ref.state.corrupted()
    if name is not None:
        return Verification(False, f"parameter {name} was changed by the candidate", verdict.error)
    return verdict


def agrees(model: Model, ref: Reference) -> bool:
    """Whether results for all cases are right. Nothing else is looked at, so it takes few calls.

    It raises whatever the model raises.
    """
    try:
        return all(compare(run(model, c.call, ref.state), c, ref).ok for c in ref.cases)
    finally:
        ref.state.restore()


def _verdict(model: Model, ref: Reference, ulp: float | None) -> Verification:
    worst: ErrorMeasure | None = None
    for case in ref.cases:
        verdict = compare(run(model, case.call, ref.state), case, ref, ulp)
        if not verdict.ok:
            return replace(verdict, reason=case.wrong(verdict.reason))
        worst = verdict.error if worst is None else worse(verdict.error, worst)
    aliases = aliases_of(model, ref.cases[0].call, ref.state)
    for output, other in sorted(aliases ^ ref.aliases):
        more = (output, other) in aliases
        how = "shares memory with" if more else "no longer shares memory, as eager's does, with"
        return Verification(False, f"{output} {how} {other}", worst)
    for probe in (_held, _written, _overwritten, _reused):
        verdict = probe(model, ref, ulp)
        if not verdict.ok:
            return verdict
    return Verification(True, error=worst)


def _other_case(ref: Reference) -> Case:
    """A case whose outcome differs from the first one's, so that staleness would show."""
    first = tensors_in(ref.cases[0].eager)
    for case in ref.cases[1:]:
        outputs = tensors_in(case.eager)
        if any(not same_bits(v, first[n]) for n, v in outputs.items() if n in first):
            return case
    return ref.cases[-1]


def _changed(live: Mapping[str, Any], kept: Mapping[str, Any]) -> str | None:
    for name, leaf in live.items():
        if isinstance(leaf, torch.Tensor) and not same_bits(leaf, kept[name]):
            return name
    return None


def _held(model: Model, ref: Reference, ulp: float | None) -> Verification:
    """Output 1 must survive call 2, and call 3 must not depend on either."""
    one, two = ref.cases[0], _other_case(ref)
    ref.state.restore()
    call = one.call.clone()
    live, _ = outputs_by_name(model(*call.args, **call.kwargs))
    kept = keep(live)
    verdict = compare(run(model, two.call, ref.state), two, ref, ulp)
    if not verdict.ok:
        return replace(verdict, reason=f"stale: called with other inputs, {verdict.reason}")
    name = _changed(live, kept)
    if name is not None:
        return Verification(False, f"{name} of one call was overwritten by the next call")
    again = compare(run(model, one.call, ref.state), one, ref, ulp)
    return replace(again, reason=f"called again, {again.reason}" if again.reason else "")


def _written(model: Model, ref: Reference, ulp: float | None) -> Verification:
    """What the caller writes into an output must not come back from a later call.

    A frozen or traced constant that is handed out as it is would do that.
    """
    one = ref.cases[0]
    ref.state.restore()
    call = one.call.clone()
    live, _ = outputs_by_name(model(*call.args, **call.kwargs))
    shared = {output for output, _ in ref.aliases}
    with torch.inference_mode():  # Outputs may be inference tensors.
        for name, leaf in live.items():
            if isinstance(leaf, torch.Tensor) and name not in shared and can_hold_anything(leaf):
                leaf.fill_(1)
    verdict = compare(run(model, one.call, ref.state), one, ref, ulp)
    if not verdict.ok:
        return replace(verdict, reason=f"after its output was written to, {verdict.reason}")
    return verdict


def _overwritten(model: Model, ref: Reference, ulp: float | None) -> Verification:
    """An output that shares no memory with an input must survive a change of the input."""
    one, two = ref.cases[0], _other_case(ref)
    ref.state.restore()
    call = one.call.clone()
    tensors = call.tensors()
    live, _ = outputs_by_name(model(*call.args, **call.kwargs))
    kept = keep(live)
    _overwrite(tensors, two.call)
    shared = {output for output, _ in ref.aliases}
    name = _changed({n: v for n, v in live.items() if n not in shared}, kept)
    if name is not None:
        return Verification(False, f"{name} changed when an input was written to after the call")
    return Verification(True)


def _reused(model: Model, ref: Reference, ulp: float | None) -> Verification:
    """The same tensors with new values must give the new values' outcome."""
    one, two = ref.cases[0], _other_case(ref)
    ref.state.restore()
    call = one.call.clone()
    # The same tensors for both calls, in containers that the first call cannot have changed.
    leaves, spec = flatten(call.args, call.kwargs)
    tensors = call.tensors()
    model(*call.args, **call.kwargs)
    ref.state.restore()
    _overwrite(tensors, two.call)
    args, kwargs = unflatten(leaves, spec)
    call = replace(call, args=args, kwargs=kwargs)
    outputs, spec = outputs_by_name(model(*call.args, **call.kwargs))
    after = {f"{name} after the call": leaf for name, leaf in call.leaves().items()}
    outcome = CallOutcome(spec, keep(outputs), keep(after), ref.state.changes())
    verdict = compare(outcome, two, ref, ulp)
    if not verdict.ok:
        return replace(verdict, reason=f"stale: input overwritten in place, {verdict.reason}")
    return verdict


def _overwrite(tensors: Sequence[torch.Tensor], other: Call) -> None:
    with torch.no_grad():
        for mine, theirs in zip(tensors, other.tensors(), strict=True):
            if can_hold_anything(mine):
                mine.copy_(theirs)
