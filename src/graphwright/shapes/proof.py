"""Prover: proves that padding is harmless, by running calls padded and unpadded in float64.

At several sizes, 1 among them, with several pad values and several values of the arguments, the
padded call has to give what eager gives without padding. In float64 the kernels for two shapes
agree to 1e-14, so that any influence of the padding shows. Sizes for which the function takes
another branch are a separate case, and each case is tried.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.input_dependence import InputDependence
from ..calls.snapshots import Call, CallOutcome, ModuleState, layout, outputs_by_name, run
from ..calls.split import argument_names, flatten
from ..errors import first_line
from ..evaluation.reference import Widened, exact_outcome, finite_share, widened
from .aliasing import Sharing, shares_alike
from .comparison import changed, effect_of_padding, joint, only_nan
from .dimensions import Axes
from .output_shapes import OutputShapes, steps_of
from .padding import PaddingPlan, Sizes
from .positions import HOLDS_POSITIONS, Positions
from .sampler import CallSampler, ValueChange
from .verdicts import Impossible, Names, Verdicts

# Sizes of one dimension that are checked one by one for branches.
_MAX_CHECKED = 4096
# Variants of padding: the real pad values, and two others.
PAD_VARIANTS = 3
# Their order where each gets other argument values: the first two get opposite signs.
_VARIANT_ORDER = (1, 2, 0, 1)
# Rows of the sample for which a call with all rows alike is tried, and one with its opposite.
_ROWS = 3
# How often further values are tried to make outputs change that were the same in all trials.
_MAX_SEARCHED = 4


class Prover:
    """Tries whether calls of one function may be padded to buckets.

    Args:
        subject: the function and its sample.
        shared: outputs that share memory with others, which slicing must keep.
        written: storages of buffers that the function writes to, by identity.
    """

    def __init__(
        self, subject: CallSampler, shared: Collection[int], written: Collection[int]
    ) -> None:
        self.subject = subject
        self.shared = shared
        self.written = written
        self._state: ModuleState | None = None
        self._generator = torch.Generator().manual_seed(0)
        # In float64 a write to a part of a buffer would go unseen to a copy.
        self._exactly = not self.written
        self._weights: Widened = {}
        self._calls = 0
        # A pad value that the caller declared is the only one.
        free = any(
            own and not said for own, said in zip(subject.axes, subject.declared, strict=True)
        )
        self._every = range(PAD_VARIANTS if free else 1)
        self._variants = itertools.cycle(self._every)
        self._changes = itertools.cycle(subject.changes())
        # Changes of values that eager could not handle, and whether all rows were alike.
        self._useless: set[tuple[ValueChange, bool]] = set()
        # Dimensions whose padding, together, was found to matter in some trial.
        self._suspect: set[Names] = set()
        # Dimensions along which calls were split with the same results.
        self._divisible: set[str] = set()

    def start(self, bucket: Sizes, shapes: OutputShapes, *, thorough: bool) -> Verdicts:
        """Try sizes at both ends of each range in which the function takes the same branches.

        Args:
            bucket: the bucket.
            shapes: of the outputs there.
            thorough: try every variant of padding at every size, else one in turn.
        """
        verdicts = Verdicts(bucket, shapes)
        self._weights = widened(self.subject.module)
        try:
            for sizes in self._points(verdicts, thorough=thorough):
                self.extend(verdicts, sizes, thorough=thorough, again=True)
        finally:
            self._weights = {}
        return verdicts

    @contextlib.contextmanager
    def _from_now(self) -> Iterator[None]:
        """Have each run start from the module's current state, which is put back in the end."""
        self._state = ModuleState(self.subject.module, weights=False)
        # Written buffers must not hold zeros: zeros that are written to them would not show.
        self._state.vary(self.written)
        try:
            yield
        finally:
            self._state.restore()
            self._state = None

    def extend(
        self, verdicts: Verdicts, sizes: Sizes, *, thorough: bool = True, again: bool = False
    ) -> str | None:
        """Why a call of some sizes may not be padded, or None if it may; tried if unknown.

        Args:
            verdicts: what is known about the bucket.
            sizes: of the call.
            thorough: try every variant of padding.
            again: try even if sizes of the same case are known to be right.
        """
        case = verdicts.case(sizes)
        if verdicts.know(sizes) and (verdicts.reason(sizes) is not None or not again):
            return verdicts.reason(sizes)
        # Where branches are unknown, other sizes of the case were tried well, and this one is once.
        alone = case in verdicts.refused and not again
        thorough = thorough and not alone
        reason = verdicts.part_refused(sizes)
        if reason is None:
            begun = time.perf_counter()
            before = self._calls
            # What matters in one bucket must not pass in another one by luck.
            thorough = thorough or case[0] in self._suspect
            cuts = dict(verdicts.cuts)
            with self._from_now():
                try:
                    reason = self._try(verdicts, sizes, thorough)
                except _Inexact:
                    self._exactly = False
                    verdicts.cuts = dict(cuts)
                    reason = self._try(verdicts, sizes, thorough)
            if reason is not None:
                verdicts.cuts = cuts  # A refused trial tells nothing about others.
                if not isinstance(reason, Impossible):
                    self._suspect.add(case[0])
            verdicts.seconds += time.perf_counter() - begun
            verdicts.runs += self._calls - before
        verdicts.note(sizes, reason, alone=alone)
        return reason

    def split(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        """Whether joining the results of a call's chunks gives the result of the whole call.

        Args:
            name: of the dimension that is divided.
            parts: sizes of the chunks.
            sizes: the named sizes of the whole call.

        Returns:
            for each output, the axis along which to join, None for one that is the same in all
            chunks; or why the call cannot be split.
        """
        if self.shared:
            return "it returns outputs that share memory"
        found: list[int | None] = []
        try:
            with self._from_now():
                for leaves in self._whole_calls(name, sizes):
                    joints = self._joints(leaves, name, parts, first=not found)
                    if isinstance(joints, str):
                        return joints
                    found = found or joints
                why = self._dependent_output(found, name, parts, sizes)
        except _Inexact:
            self._exactly = False
            return self.split(name, parts, sizes)
        except Exception as error:
            return f"it fails in chunks of {parts[0]} along {name}: {first_line(error, 160)}"
        if why is not None:
            return why
        self._divisible.add(name)
        return found

    def _whole_calls(self, name: str, sizes: Sizes) -> Iterator[list[Any]]:
        """Calls of some sizes that are tried in chunks, the sample's values first.

        Once calls were split along a dimension, other sizes are tried with fewer values.
        """
        subject, generator = self.subject, self._generator
        yield subject.at(sizes)
        if name in self._divisible:
            yield subject.changed(sizes, next(self._changes), generator)
            return
        changes = subject.changes()
        for how in changes[1:]:
            yield subject.changed(sizes, how, generator)
        if len(changes) == 1:
            return
        # A row unlike all others changes their results where rows are taken together.
        for row in range(_ROWS):
            yield subject.with_odd_row(sizes, changes[0], ValueChange.FAR, generator, name, row)
            yield subject.with_odd_row(sizes, changes[1], changes[0], generator, name, row)
        yield subject.with_odd_row(sizes, changes[0], ValueChange.NAN, generator, name, 0)

    def _joints(
        self, leaves: list[Any], name: str, parts: Sequence[int], *, first: bool
    ) -> list[int | None] | str:
        """How the results of one call's chunks are joined, as `split`; [] if eager refuses it."""
        try:
            whole, seen = self._run(leaves)
        except _Inexact:
            raise
        except Exception:
            if first:
                raise
            return []
        pieces = [self._run(chunk)[0] for chunk in self.subject.chunks(leaves, name, parts)]
        why = _effects(leaves, whole, pieces, seen.sharing)
        if why is not None:
            return why
        joints: list[int | None] = []
        for leaf, want in whole.outputs.items():
            values = [piece.outputs.get(leaf) for piece in pieces]
            axis = joint(values, want, exactly=self._exactly)
            if isinstance(axis, str):
                return f"{leaf} of all rows is not that of chunks along {name}: {axis}"
            joints.append(axis)
        return joints

    def _dependent_output(
        self, joints: Sequence[int | None], name: str, parts: Sequence[int], sizes: Sizes
    ) -> str | None:
        """Which output would be taken from one chunk and depends on the rows, in words, or None."""
        if None not in joints:
            return None
        leaves = self.subject.at(sizes)
        for call in (leaves, next(self.subject.chunks(leaves, name, parts))):
            dependent = self._dependent_outputs(call, name)
            for axis, (leaf, depends) in zip(joints, dependent.items(), strict=True):
                if axis is None and depends:
                    return f"{leaf} is one for all rows and depends on their values"
        return None

    def _dependent_outputs(self, leaves: Sequence[Any], name: str) -> dict[str, bool]:
        """Which outputs may depend on the values of arguments that have a named dimension."""
        subject, dependence = self.subject, InputDependence()
        rows = [any(size.name == name for size in own.values()) for own in subject.axes]
        dependent: dict[str, bool] = {}

        def begun(*args: Any, **kwargs: Any) -> Any:
            given, _ = flatten(args, kwargs)
            dependence.begin([leaf for leaf, varies in zip(given, rows, strict=True) if varies])
            return subject.fn(*args, **kwargs)

        def look(result: Any, call: Call) -> None:
            for leaf, value in outputs_by_name(result)[0].items():
                dependent[leaf] = isinstance(value, torch.Tensor) and dependence.depends(value)

        assert self._state is not None
        self._calls += 1
        run(begun, subject.call("proof", leaves), self._state, look, dependence)
        return dependent

    def _points(self, verdicts: Verdicts, *, thorough: bool) -> Iterator[Sizes]:
        """Sizes to try: first each dimension alone, then several at once."""
        bucket, shapes = verdicts.bucket, verdicts.shapes
        several: list[list[int]] = []
        for index, (name, full) in enumerate(zip(self.subject.names, bucket, strict=True)):
            low = self.subject.bounds[name].low
            places = [
                (*bucket[:index], n, *bucket[index + 1 :]) for n in _sizes_to_check(low, full)
            ]
            chosen = _representatives(places, shapes.way, thorough=thorough)
            if shapes.blind:  # Branches are unknown, so that more is tried.
                chosen = sorted({*chosen, *places[1:3], *places[:: max(1, len(places) // 4)]})
            yield from chosen
            several.append([*(sizes[index] for sizes in chosen), full])
        if sum(len(sizes) > 1 for sizes in several) < 2:
            return
        if not thorough:  # Other cases are tried when a call meets them.
            several = [[sizes[0], sizes[max(0, len(sizes) - 2)]] for sizes in several]
        seen = set()
        for sizes in itertools.product(*several):
            case = verdicts.case(sizes)
            if len(case[0]) > 1 and case not in seen:
                seen.add(case)
                yield sizes

    def _try(self, verdicts: Verdicts, sizes: Sizes, thorough: bool) -> str | None:
        change, padded = verdicts.in_words(sizes), verdicts.padded(sizes)
        true: _Unpadded | None = None
        still: _Unchanged | None = None
        for trial in self._trials(verdicts, sizes, thorough):
            alike = trial.row is not None
            if trial.how is not None:
                try:
                    true = self._run_unpadded(sizes, trial.how, trial.row, padded)
                except _Inexact:
                    raise
                except Exception as error:
                    if not alike:
                        return self._impossible(verdicts, sizes, change, error)
                    continue  # A call with such rows may be invalid.
            assert true is not None
            if only_nan(true.outcome):
                if not alike:
                    return f"the sample proves nothing: it gives nothing but NaN with {change}"
                continue
            still = still or _Unchanged(verdicts, sizes, true.outcome)
            variants = trial.variants(self._every, struck=still.strike(true.outcome))
            if not variants and not still.any():
                break
            for variant in variants:
                why = self._differs(verdicts, sizes, true, variant)
                if why is not None:
                    return f"with {change}, {why}{self._why_it_moves(verdicts.bucket, padded)}"
        assert true is not None
        return self._strides(verdicts, sizes, true.leaves, true.seen)

    def _why_it_moves(self, sizes: Sizes, padded: Names) -> str:
        """Which arguments hold positions that padding moves, in words, to be added to a reason."""
        subject, positions = self.subject, Positions()

        def begun(*args: Any, **kwargs: Any) -> Any:
            positions.begin(flatten(args, kwargs)[0])
            return subject.fn(*args, **kwargs)

        assert self._state is not None
        self._calls += 1
        call = subject.call("proof", subject.at(sizes))
        run(begun, call, self._state, lambda result, call: None, positions)
        names = argument_names(call.args, call.kwargs)
        moved = [any(size.name in padded for size in own.values()) for own in subject.axes]
        found: dict[str, list[str]] = {}
        for place, other in sorted(positions.found):
            if moved[place] or moved[other]:
                found.setdefault(names[place], []).append(names[other])
        return "".join(
            f"; {name}{HOLDS_POSITIONS}{', '.join(others)}" for name, others in found.items()
        )

    def _trials(self, verdicts: Verdicts, sizes: Sizes, thorough: bool) -> Iterator[_PaddingTrial]:
        """What to try for some sizes."""
        subject = self.subject
        # Small calls with much padding show most and cost least, so more is tried for them, and for
        # the first sizes of a case. Each variant of padding gets other argument values then.
        few = 2 * math.prod(sizes) <= math.prod(verdicts.bucket)
        first = verdicts.case(sizes) not in verdicts.refused
        changes = subject.changes()
        if not thorough or not (few or first):
            how: ValueChange | None = next(self._changes)
            for variant in self._every if thorough else (next(self._variants),):
                yield _PaddingTrial(variant, how)
                how = None
            return
        if len(changes) == 1:
            yield _PaddingTrial(0, changes[0])
            return
        for variant, how in zip(_VARIANT_ORDER, itertools.cycle(changes), strict=False):
            yield _PaddingTrial(variant, how)
        if not first:
            return
        # A row or its opposite has most properties that outputs may ask of any or all rows.
        for row in range(_ROWS):
            yield _PaddingTrial(0, changes[0], row)
            yield _PaddingTrial(0, changes[1], row)
        searched = (ValueChange.MIXED, ValueChange.SHUFFLED)
        for row, how in enumerate((*changes[2:], *searched), _ROWS):
            yield _PaddingTrial(row % PAD_VARIANTS, how, row)
        for row in range(_MAX_SEARCHED):
            for how in searched:
                yield _PaddingTrial(None, how, row)
                yield _PaddingTrial(None, how)

    def _impossible(self, verdicts: Verdicts, sizes: Sizes, change: str, error: Exception) -> str:
        """The reason for refusing to pad a call that eager itself refuses."""
        limits = " and ".join(f"Dim({name!r}, min=…)" for name in verdicts.padded(sizes))
        message = (
            f"with {change} it would answer a call that eager refuses: "
            f"{first_line(error, 160)}. Declare {limits} if there are no such calls"
        )
        message += self._why_it_moves(verdicts.bucket, verdicts.padded(sizes))
        same = verdicts.shapes.way(sizes) == verdicts.shapes.way(verdicts.bucket)
        return message if same else Impossible(message)

    def _run_unpadded(
        self, sizes: Sizes, how: ValueChange, row: int | None, padded: Names
    ) -> _Unpadded:
        """Run a call with changed values, without padding.

        Values for which eager raises, or gives NaN or Inf where the sample's values do not, prove
        nothing: the sample's values are scaled or kept instead, and the change is not tried again.
        """
        eager = functools.partial(self._eager, sizes, row=row, padded=padded)
        same = row is not None
        if how not in (ValueChange.NONE, ValueChange.SCALED) and (how, same) not in self._useless:
            with contextlib.suppress(Exception):
                changed = eager(how)
                if finite_share(changed.outcome) == 1:
                    return changed
                usual = eager(ValueChange.SCALED)
                if finite_share(changed.outcome) >= finite_share(usual.outcome):
                    return changed
            self._useless.add((how, same))
        if how is not ValueChange.NONE:
            try:
                return eager(ValueChange.SCALED)
            except _Inexact:
                raise
            except Exception:
                self._useless.add((ValueChange.SCALED, same))
        return eager(ValueChange.NONE)

    def _eager(
        self, sizes: Sizes, how: ValueChange, *, row: int | None, padded: Names
    ) -> _Unpadded:
        if row is None:
            leaves = self.subject.changed(sizes, how, self._generator)
        else:
            leaves = self.subject.alike(sizes, how, self._generator, padded, row)
        return _Unpadded(leaves, *self._run(leaves))

    def _differs(
        self, verdicts: Verdicts, sizes: Sizes, true: _Unpadded, variant: int
    ) -> str | None:
        """How a padded call differs from the unpadded one, in words, or None."""
        padded = self.subject.padded(true.leaves, verdicts.bucket, variant, self._generator)
        try:
            outcome, now = self._run(padded)
        except _Inexact:
            raise
        except Exception as error:
            return f"the call fails: {first_line(error, 160)}"
        if not outcome.spec == true.outcome.spec == verdicts.shapes.spec:
            return "the tree of its outputs depends on the size"
        if not shares_alike(now.sharing.pattern, true.seen.sharing.pattern, len(true.leaves)):
            return "its outputs share memory with others than without padding"
        if views := now.sharing.views:
            return f"output {views[0][0]} is a view of an argument"
        return effect_of_padding(
            verdicts,
            sizes,
            true.outcome,
            outcome,
            arguments=now.sharing.arguments,
            shared=self.shared,
            exactly=self._exactly,
        )

    def compare_as_it_is(self, verdicts: Verdicts, plan: PaddingPlan) -> str | None:
        """How padding changes the sample's results in the function's own dtypes, or None.

        In float64 it may have taken another branch.
        """
        if not self._exactly:
            return None  # All trials were made so.
        sizes, names = plan.sizes, verdicts.padded(plan.sizes)
        self._exactly = False
        try:
            with self._from_now():
                true = self._eager(sizes, ValueChange.NONE, row=None, padded=names)
                why = self._differs(verdicts, sizes, true, 0)
        except Exception as error:
            why = f"the call fails: {first_line(error, 160)}"
        finally:
            self._exactly = True
        if why is None and tuple(verdicts.chosen(sizes)) != plan.cuts:
            why = "outputs are cut in another way than in float64"
        return None if why is None else f"with {' and '.join(names)} padded, {why}"

    def _strides(
        self, verdicts: Verdicts, sizes: Sizes, true: Sequence[Any], seen: _NotedOutputs
    ) -> str | None:
        """How the strides of eager's outputs differ from the rule, in words, or None."""
        given = seen.sharing.arguments
        rules = [
            steps_of(rule) if isinstance(rule, tuple) and index not in given else None
            for index, rule in enumerate(verdicts.shapes.of(sizes))
        ]

        def first_other() -> int | None:
            pairs = enumerate(zip(rules, seen.layouts, strict=True))
            return next((n for n, (a, b) in pairs if None not in (a, b) and a != b), None)

        if first_other() is None:
            return None
        # In float64 a function may take another branch: run it in its own dtypes.
        _, seen = self._run_as_it_is(true)
        other = first_other()
        if other is None:
            return None
        return (
            f"output {other} has strides {seen.layouts[other]}, where {rules[other]} follows the "
            "rule"
        )

    def _run(self, leaves: Sequence[Any]) -> tuple[CallOutcome, _NotedOutputs]:
        """Run a call, in float64 if the function can run so."""
        self._calls += 1
        if not self._exactly:
            return self._run_as_it_is(leaves)
        subject, seen = self.subject, _NotedOutputs(self.subject.axes)
        assert self._state is not None
        call = subject.call("proof", leaves)
        try:
            outcome, _ = exact_outcome(
                subject.fn, subject.module, call, self._state, self._weights, seen.look
            )
        except Exception as error:
            self._run_as_it_is(leaves)  # Raises if the call itself is to blame.
            raise _Inexact from error
        return outcome, seen

    def _run_as_it_is(self, leaves: Sequence[Any]) -> tuple[CallOutcome, _NotedOutputs]:
        seen = _NotedOutputs(self.subject.axes)
        assert self._state is not None
        call = self.subject.call("proof", leaves)
        return run(self.subject.fn, call, self._state, seen.look), seen


class _NotedOutputs:
    """What is noted about the outputs of a call before they are copied.

    Attributes:
        sharing: what they share.
        layouts: the strides that matter of each tensor, None for other outputs.
    """

    sharing: Sharing
    layouts: list[list[int] | None]

    def __init__(self, axes: Sequence[Axes]) -> None:
        self._axes = axes

    def look(self, result: Any, call: Call) -> None:
        """Note what a call returned."""
        self.sharing = Sharing.of(result, flatten(call.args, call.kwargs)[0], self._axes)
        leaves = pytree.tree_leaves(result)
        self.layouts = [layout(v) if isinstance(v, torch.Tensor) else None for v in leaves]


def _effects(
    leaves: Sequence[Any], whole: CallOutcome, pieces: Sequence[CallOutcome], sharing: Sharing
) -> str | None:
    """What a call does beside returning new outputs, which chunks cannot do in its place; or None.

    Args:
        leaves: of the call.
        whole: what it does.
        pieces: what its chunks do.
        sharing: which memory its outputs share.
    """
    if whole.buffers or any(piece.buffers for piece in pieces):
        return "it writes to its buffers"
    memories = [memory for _, memory in sharing.pattern if memory is not None]
    if any(memory < len(leaves) for memory in memories):
        return "it returns arguments or views of them"
    if len(set(memories)) < len(memories):
        return "it returns outputs that share memory"
    if any(map(changed, leaves, whole.inputs.values())):
        return "it writes to its arguments"
    return None


@dataclass(frozen=True)
class _PaddingTrial:
    """One trial of some sizes.

    Attributes:
        variant: of the padding; None for all variants, but only if the values show something new.
        how: the values are changed; None for the values of the trial before.
        row: the sample's row that all rows are like; None if rows differ.
    """

    variant: int | None
    how: ValueChange | None
    row: int | None = None

    def variants(self, every: Sequence[int], *, struck: bool) -> Sequence[int]:
        """The variants of padding to run.

        Args:
            every: all of them.
            struck: whether the values change an output that was the same so far.
        """
        if struck:  # What was the same so far may have hidden the effect of padding.
            return every
        return () if self.variant is None else (self.variant % len(every),)


@dataclass(frozen=True)
class _Unpadded:
    """A call without padding, and what eager did."""

    leaves: list[Any]
    outcome: CallOutcome
    seen: _NotedOutputs


class _Unchanged:
    """Elements of outputs of fixed size that were the same in all trials so far."""

    def __init__(self, verdicts: Verdicts, sizes: Sizes, first: CallOutcome) -> None:
        rules = zip(verdicts.shapes.of(sizes), verdicts.shapes.of(verdicts.bucket), strict=True)
        self._first: dict[str, torch.Tensor] = {
            name: value.reshape(-1)
            for (name, value), (mine, full) in zip(first.outputs.items(), rules, strict=False)
            if isinstance(value, torch.Tensor) and mine == full
        }
        self._same = {name: torch.ones_like(v, dtype=torch.bool) for name, v in self._first.items()}

    def strike(self, outcome: CallOutcome) -> bool:
        """Remove the elements that differ in an outcome; whether there were any."""
        struck = False
        for name, first in self._first.items():
            value = outcome.outputs.get(name)
            if isinstance(value, torch.Tensor) and value.numel() == first.numel():
                other = self._same[name] & (value.reshape(-1) != first)
                struck |= bool(other.any())
                self._same[name] &= ~other
        return struck

    def any(self) -> bool:
        """Whether any element was the same in all trials."""
        return any(bool(same.any()) for same in self._same.values())


class _Inexact(Exception):
    """Raised for a call that runs, but not in float64."""


def _sizes_to_check(low: int, full: int) -> list[int]:
    """Sizes from the lowest to just below the bucket's; a selection if there are too many."""
    step = max(1, (full - low) // _MAX_CHECKED)
    return sorted({*range(low, full, step), max(low, full - 1)}) if low < full else []


def _representatives(
    places: Sequence[Sizes], way: Callable[[Sizes], Any], *, thorough: bool
) -> list[Sizes]:
    """Both ends of each set of sizes with the same branches; if `thorough`, one middle too."""
    groups: dict[Any, list[Sizes]] = {}
    for sizes in places:
        groups.setdefault(way(sizes), []).append(sizes)
    if not groups:
        return []
    ends = {sizes for group in groups.values() for sizes in (group[0], group[-1])}
    largest = max(groups.values(), key=len)
    return sorted(ends | {largest[len(largest) // 2]} if thorough else ends)
