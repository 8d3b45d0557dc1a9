"""Is padding harmless? Found by running a call padded and unpadded, in float64.

At several sizes, 1 among them, and with several fillings of the padding, what the padded call gives
has to be what eager gives without it. In float64 two kernels for two shapes agree to 1e-14, so that
whatever depends on the padding shows. Sizes for which the function takes another way (it branches
on sizes) are a case of their own, and each such case is tried.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..reference import Widened, exact_outcome, widened
from ..signature import flatten
from ..snapshots import Call, Outcome, State, layout, run
from .comparison import changed, effect_of_padding, joint, only_nan
from .dimensions import Axes
from .outputs import OutputShapes, Sizes, steps_of
from .sharing import Sharing, shares_alike
from .subject import Subject
from .verdicts import Impossible, Verdicts

# Sizes of one dimension that are looked at one by one for branches.
_MAX_LOOKED_AT = 4096

FILLINGS = 3


class Prover:
    """Tries whether buckets of one subject may be filled up.

    Args:
        subject: what is called.
        shared: outputs that share memory with others, which cutting must not tear apart.
        written: storages of buffers that it writes to, by identity.
    """

    def __init__(self, subject: Subject, shared: Collection[int], written: Collection[int]) -> None:
        self.subject = subject
        self.shared = shared
        self.written = written
        self._state: State | None = None
        self._generator = torch.Generator().manual_seed(0)
        # In float64 a write to a part of a buffer would go to a copy, unseen.
        self._exactly = not self.written
        self._weights: Widened = {}
        self._calls = 0
        self._turn = itertools.cycle(range(FILLINGS))
        self._vary = itertools.cycle((True, False))

    def start(self, bucket: Sizes, shapes: OutputShapes, *, thorough: bool) -> Verdicts:
        """Try sizes at both ends of each range on which the function takes one way.

        Args:
            bucket: the bucket.
            shapes: of the outputs there.
            thorough: with every filling at every size, else with one in turn.
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
        """Each run starts from the module's state as it is now, which is put back in the end."""
        self._state = State(self.subject.module, weights=False)
        # What is written to holds other values than zeros: else zeros written to it would not show.
        self._state.vary(self.written)
        try:
            yield
        finally:
            self._state.restore()
            self._state = None

    def extend(
        self, verdicts: Verdicts, sizes: Sizes, *, thorough: bool = True, again: bool = False
    ) -> str | None:
        """Why a call of some sizes may not be filled up, or None where it may; tried if unknown.

        Args:
            verdicts: what is known.
            sizes: of the call.
            thorough: with every filling.
            again: try it though sizes of the same case are known to be right.
        """
        case = verdicts.case(sizes)
        if case in verdicts.refused and (verdicts.refused[case] is not None or not again):
            return verdicts.refused[case]
        reason = verdicts.part_refused(sizes)
        if reason is None:
            begun = time.perf_counter()
            before = self._calls
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
            verdicts.seconds += time.perf_counter() - begun
            verdicts.runs += self._calls - before
        verdicts.refused[case] = reason
        return reason

    def split(self, name: str, parts: Sequence[int], sizes: Sizes) -> list[int | None] | str:
        """Whether a call is what its chunks along one dimension are, joined.

        Args:
            name: of the dimension.
            parts: sizes of the chunks.
            sizes: the named sizes of the whole call.

        Returns:
            for each output the axis along which to join, None for one that is the same in all
            chunks; or a reason against it.
        """
        subject = self.subject
        if self.shared:
            return "it returns outputs that share memory"
        leaves = subject.at(sizes)
        try:
            with self._from_now():
                whole, seen = self._run(leaves)
                pieces = [self._run(chunk)[0] for chunk in subject.chunks(leaves, name, parts)]
        except _Inexact:
            self._exactly = False
            return self.split(name, parts, sizes)
        except Exception as error:
            return f"it fails in chunks of {parts[0]} along {name}: {first_line(error, 160)}"
        if whole.buffers or any(piece.buffers for piece in pieces):
            return "it writes to its buffers"
        memories = [memory for _, memory in seen.sharing.pattern if memory is not None]
        if any(memory < len(leaves) for memory in memories):
            return "it returns arguments or views of them"
        if len(set(memories)) < len(memories):
            return "it returns outputs that share memory"
        if any(map(changed, leaves, whole.inputs.values())):
            return "it writes to its arguments"
        joints: list[int | None] = []
        for leaf, want in whole.outputs.items():
            values = [piece.outputs.get(leaf) for piece in pieces]
            axis = joint(values, want, exactly=self._exactly)
            if isinstance(axis, str):
                return f"{leaf} of all rows is not that of chunks along {name}: {axis}"
            joints.append(axis)
        return joints

    def _points(self, verdicts: Verdicts, *, thorough: bool) -> Iterator[Sizes]:
        """Sizes to try: in each dimension alone, then in several at once."""
        bucket, shapes = verdicts.bucket, verdicts.shapes
        several: list[list[int]] = []
        for index, (name, full) in enumerate(zip(self.subject.names, bucket, strict=True)):
            low = self.subject.bounds[name].low
            places = [(*bucket[:index], n, *bucket[index + 1 :]) for n in _looked_at(low, full)]
            chosen = _telling(places, shapes.way, thorough=thorough)
            if shapes.fitted:  # Branches are unknown, so that more is tried.
                chosen = sorted({*chosen, *places[1:3], *places[:: max(1, len(places) // 4)]})
            yield from chosen
            several.append([*(sizes[index] for sizes in chosen), full])
        if sum(len(sizes) > 1 for sizes in several) < 2:
            return
        if not thorough:  # What else a call comes upon is tried then.
            several = [[sizes[0], sizes[max(0, len(sizes) - 2)]] for sizes in several]
        seen = set()
        for sizes in itertools.product(*several):
            case = verdicts.case(sizes)
            if len(case[0]) > 1 and case not in seen:
                seen.add(case)
                yield sizes

    def _try(self, verdicts: Verdicts, sizes: Sizes, thorough: bool) -> str | None:
        subject, bucket = self.subject, verdicts.bucket
        change = ", ".join(
            f"{name} padded from {n} to {m}"
            for name, n, m in zip(subject.names, sizes, bucket, strict=True)
            if n != m
        )
        true = subject.at(sizes, vary=next(self._vary))
        try:
            expected, seen = self._run(true)
        except _Inexact:
            raise
        except Exception as error:
            limits = " and ".join(f"Dim({name!r}, min=…)" for name in verdicts.padded(sizes))
            told = (
                f"with {change} it would answer a call that eager refuses: "
                f"{first_line(error, 160)}. Declare {limits} if there are no such calls"
            )
            same = verdicts.shapes.way(sizes) == verdicts.shapes.way(bucket)
            return told if same else Impossible(told)
        if only_nan(expected):
            return f"the sample proves nothing: it gives nothing but NaN with {change}"
        free = any(
            own and not said for own, said in zip(subject.axes, subject.declared, strict=True)
        )
        fillings = range(FILLINGS) if thorough else (next(self._turn),)
        for filling in fillings if free else (0,):
            padded = subject.padded(true, bucket, filling, self._generator)
            try:
                outcome, now = self._run(padded)
            except _Inexact:
                raise
            except Exception as error:
                return f"with {change} the call fails: {first_line(error, 160)}"
            if not outcome.spec == expected.spec == verdicts.shapes.spec:
                return f"with {change}, the tree of its outputs depends on the size"
            if not shares_alike(now.sharing.pattern, seen.sharing.pattern, len(true)):
                return f"with {change}, its outputs share memory with others than without padding"
            if views := now.sharing.views:
                return f"with {change}, output {views[0][0]} is a view of an argument"
            why = effect_of_padding(
                verdicts,
                sizes,
                expected,
                outcome,
                arguments=now.sharing.arguments,
                shared=self.shared,
                exactly=self._exactly,
            )
            if why is not None:
                return f"with {change}, {why}"
        return self._strides(verdicts, sizes, true, seen)

    def _strides(
        self, verdicts: Verdicts, sizes: Sizes, true: Sequence[Any], seen: _Seen
    ) -> str | None:
        """Whether eager lays its outputs out otherwise than the rule says, in words."""
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
        # In float64 a function may take another way: ask for its own.
        _, seen = self._run_as_it_is(true)
        other = first_other()
        if other is None:
            return None
        return (
            f"output {other} has strides {seen.layouts[other]}, where {rules[other]} follows the "
            "rule"
        )

    def _run(self, leaves: Sequence[Any]) -> tuple[Outcome, _Seen]:
        """What a call does, in float64 where the function can be run so."""
        self._calls += 1
        if not self._exactly:
            return self._run_as_it_is(leaves)
        subject, seen = self.subject, _Seen(self.subject.axes)
        assert self._state is not None
        call = subject.call("proof", leaves)
        try:
            outcome, _ = exact_outcome(
                subject.fn, subject.module, call, self._state, self._weights, seen.look
            )
        except Exception as error:
            self._run_as_it_is(leaves)  # Raises where the call itself is to blame.
            raise _Inexact from error
        return outcome, seen

    def _run_as_it_is(self, leaves: Sequence[Any]) -> tuple[Outcome, _Seen]:
        seen = _Seen(self.subject.axes)
        assert self._state is not None
        call = self.subject.call("proof", leaves)
        return run(self.subject.fn, call, self._state, seen.look), seen


class _Seen:
    """What the outputs of a call were, before copies were made.

    Attributes:
        sharing: what they shared.
        layouts: the strides that matter of those that are tensors.
    """

    sharing: Sharing
    layouts: list[list[int] | None]

    def __init__(self, axes: Sequence[Axes]) -> None:
        self._axes = axes

    def look(self, result: Any, call: Call) -> None:
        """Look at what a call returned."""
        self.sharing = Sharing.of(result, flatten(call.args, call.kwargs)[0], self._axes)
        leaves = pytree.tree_leaves(result)
        self.layouts = [layout(v) if isinstance(v, torch.Tensor) else None for v in leaves]


class _Inexact(Exception):
    """A call runs, but not in float64."""


def _looked_at(low: int, full: int) -> list[int]:
    """Sizes from the lowest one to below the bucket's, not all where they are too many."""
    step = max(1, (full - low) // _MAX_LOOKED_AT)
    return sorted({*range(low, full, step), max(low, full - 1)}) if low < full else []


def _telling(
    places: Sequence[Sizes], way: Callable[[Sizes], Any], *, thorough: bool
) -> list[Sizes]:
    """Both ends of each set of sizes that take one way; if `thorough`, the largest's middle too."""
    groups: dict[Any, list[Sizes]] = {}
    for sizes in places:
        groups.setdefault(way(sizes), []).append(sizes)
    if not groups:
        return []
    ends = {sizes for group in groups.values() for sizes in (group[0], group[-1])}
    largest = max(groups.values(), key=len)
    return sorted(ends | {largest[len(largest) // 2]} if thorough else ends)
