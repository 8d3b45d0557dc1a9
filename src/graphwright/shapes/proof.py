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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..accuracy import ROUNDING, as_float64, error_of, special_values
from ..errors import first_line
from ..reference import Widened, exact_outcome, widened
from ..signature import flatten
from ..snapshots import Call, Outcome, State, layout, run
from .outputs import OutputShapes, Sizes
from .padding import Cut, cut_to, cuts_of
from .sharing import Pattern, pattern_of, shares_alike
from .subject import Subject

# Relative to each element, or to the small ones among an output's. In float64 only what a model
# computes in a narrower type of its own is above 1e-12.
_EXACT = 1e-6
_SMALL = 0.1
_MOST_SORTED = 1 << 20
_NO_TF32 = 1e-5
# Sizes of one dimension that are looked at one by one for branches.
_MAX_LOOKED_AT = 4096

FILLINGS = 3

Names = tuple[str, ...]
Layouts = list[list[int] | None]


@dataclass
class Verdicts:
    """What is known about filling one bucket up.

    Attributes:
        bucket: its sizes.
        shapes: of the outputs there.
        refused: by which dimensions are filled up and which way the function takes at the true
            sizes: why it may not be done, or None where it may.
        runs: calls that were run to find out.
        seconds: what that took.
    """

    bucket: Sizes
    shapes: OutputShapes
    refused: dict[tuple[Names, tuple[bool | None, ...]], str | None] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0

    def chosen(self, sizes: Sizes) -> list[Cut]:
        """How outputs are cut: the first of the ways that were right wherever it was tried."""
        ways = cuts_of(self.shapes, sizes, self.bucket)
        return [
            way[self.cuts[index][0]] if len(way) > 1 and index in self.cuts else way[0]
            for index, way in enumerate(ways)
        ]


class Prover:
    """Tries whether buckets of one subject may be filled up.

    Args:
        subject: what is called.
        written: storages of buffers that it writes to, by identity.
        shared: outputs that share memory with others, which cutting must not tear apart.
    """

    def __init__(
        self, subject: Subject, shared: Sequence[int] = (), written: Collection[int] = ()
    ) -> None:
        self.subject = subject
        self.written = frozenset(written)
        self.shared = tuple(shared)
        self._state: State | None = None
        self._generator = torch.Generator().manual_seed(0)
        # In float64 a write to a part of a buffer would go to a copy, unseen.
        self._exactly = not self.written
        self._weights: Widened = {}
        self._calls = 0
        self._pattern: Pattern = ()
        self._layouts: Layouts = []
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
            for sizes in self._points(bucket, shapes, thorough=thorough):
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
        key = self._key(verdicts, sizes)
        if key in verdicts.refused and (verdicts.refused[key] is not None or not again):
            return verdicts.refused[key]
        reason = self._known(verdicts, sizes, key[0])
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
        verdicts.refused[key] = reason
        return reason

    def split(self, name: str, chunk: int, others: Sizes) -> list[int | None] | str:
        """Whether a call is what its chunks along one dimension are, joined; see `Kind`."""
        subject = self.subject
        place = subject.names.index(name)
        if self.shared:
            return "it returns outputs that share memory"
        count, rest = divmod(others[place], chunk)
        parts = [chunk] * count + [rest] * (rest > 0)
        leaves = subject.at(others)
        try:
            with self._from_now():
                whole = self._run(leaves)
                patterns = self._pattern
                pieces = [self._run(chunks) for chunks in subject.chunks(leaves, name, parts)]
        except _Inexact:
            self._exactly = False
            return self.split(name, chunk, others)
        except Exception as error:
            return f"it fails in chunks of {chunk} along {name}: {first_line(error, 160)}"
        if whole.buffers or any(piece.buffers for piece in pieces):
            return "it writes to its buffers"
        memories = [memory for _, memory in patterns if memory is not None]
        if any(memory < len(leaves) for memory in memories):
            return "it returns arguments or views of them"
        if len(set(memories)) < len(memories):
            return "it returns outputs that share memory"
        after = whole.inputs.values()
        if any(map(_changed, leaves, after)):
            return "it writes to its arguments"
        joints: list[int | None] = []
        for leaf, want in whole.outputs.items():
            values = [piece.outputs.get(leaf) for piece in pieces]
            joint = _joint(values, want, exactly=self._exactly)
            if isinstance(joint, str):
                return f"{leaf} of all rows is not that of chunks along {name}: {joint}"
            joints.append(joint)
        return joints

    def known(self, verdicts: Verdicts, sizes: Sizes) -> bool:
        """Whether calls of some sizes need no further trial."""
        return self._key(verdicts, sizes) in verdicts.refused

    def _key(self, verdicts: Verdicts, sizes: Sizes) -> tuple[Names, tuple[bool | None, ...]]:
        return self._padded(sizes, verdicts.bucket), verdicts.shapes.way(sizes)

    def culprits(self, verdicts: Verdicts, sizes: Sizes) -> set[str]:
        """Dimensions that may not be filled up by themselves; if there are none, all that are."""
        names = self._padded(sizes, verdicts.bucket)
        found = {name for name in names if self._alone(verdicts, sizes, name) is not None}
        return found or set(names)

    def _known(self, verdicts: Verdicts, sizes: Sizes, names: Names) -> str | None:
        """Why one of several dimensions may not be filled up by itself."""
        if len(names) < 2:
            return None
        reasons = [self._alone(verdicts, sizes, name) for name in names]
        return next((reason for reason in reasons if reason is not None), None)

    def _alone(self, verdicts: Verdicts, sizes: Sizes, name: str) -> str | None:
        index = self.subject.names.index(name)
        alone = (*verdicts.bucket[:index], sizes[index], *verdicts.bucket[index + 1 :])
        return verdicts.refused.get(((name,), verdicts.shapes.way(alone)))

    def _padded(self, sizes: Sizes, bucket: Sizes) -> Names:
        """Names of the dimensions that are filled up."""
        return tuple(
            name for name, n, m in zip(self.subject.names, sizes, bucket, strict=True) if n != m
        )

    def _points(self, bucket: Sizes, shapes: OutputShapes, *, thorough: bool) -> Iterator[Sizes]:
        """Sizes to try: in each dimension alone, then in several at once."""
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
            key = (self._padded(sizes, bucket), shapes.way(sizes))
            if len(key[0]) > 1 and key not in seen:
                seen.add(key)
                yield sizes

    def _try(self, verdicts: Verdicts, sizes: Sizes, thorough: bool) -> str | None:
        subject, bucket = self.subject, verdicts.bucket
        names = self._padded(sizes, bucket)
        change = ", ".join(
            f"{name} padded from {n} to {m}"
            for name, n, m in zip(subject.names, sizes, bucket, strict=True)
            if n != m
        )
        true = subject.at(sizes, vary=next(self._vary))
        try:
            expected = self._run(true)
        except _Inexact:
            raise
        except Exception as error:
            limits = " and ".join(f"Dim({name!r}, min=…)" for name in names)
            told = (
                f"with {change} it would answer a call that eager refuses: "
                f"{first_line(error, 160)}. Declare {limits} if there are no such calls"
            )
            same = verdicts.shapes.way(sizes) == verdicts.shapes.way(bucket)
            return told if same else Impossible(told)
        pattern, layouts = self._pattern, self._layouts
        if _only_nan(expected):
            return f"the sample proves nothing: it gives nothing but NaN with {change}"
        free = any(
            own and not said for own, said in zip(subject.axes, subject.declared, strict=True)
        )
        fillings = range(FILLINGS) if thorough else (next(self._turn),)
        for filling in fillings if free else (0,):
            padded = subject.padded(true, bucket, filling, self._generator)
            try:
                outcome = self._run(padded)
            except _Inexact:
                raise
            except Exception as error:
                return f"with {change} the call fails: {first_line(error, 160)}"
            if not shares_alike(self._pattern, pattern, len(true)):
                return f"with {change}, its outputs share memory with others than without padding"
            view = self._view_of_argument()
            if view is not None:
                return f"with {change}, {view}"
            why = self._difference(verdicts, sizes, expected, outcome)
            if why is not None:
                return f"with {change}, {why}"
        return self._strides(verdicts, sizes, true, layouts)

    def _strides(
        self, verdicts: Verdicts, sizes: Sizes, true: Sequence[Any], layouts: Layouts
    ) -> str | None:
        """Whether eager lays its outputs out otherwise than the rule says, in words."""
        rules = [
            [step for step, n in zip(rule[1], rule[0], strict=True) if n > 1]
            if isinstance(rule, tuple) and not self._is_argument(index)
            else None
            for index, rule in enumerate(verdicts.shapes.of(sizes))
        ]

        def first_other() -> int | None:
            pairs = enumerate(zip(rules, layouts, strict=True))
            return next((n for n, (a, b) in pairs if None not in (a, b) and a != b), None)

        if first_other() is None or self._state is None:
            return None
        # In float64 a function may take another way: ask for its own.
        run(self.subject.fn, self.subject.call("strides", true), self._state, self._look)
        layouts = self._layouts
        other = first_other()
        if other is None:
            return None
        return f"output {other} has strides {layouts[other]}, where {rules[other]} follows the rule"

    def _run(self, leaves: Sequence[Any]) -> Outcome:
        """What a call does, in float64 where the function can be run so."""
        self._calls += 1
        subject = self.subject
        call = subject.call("proof", leaves)
        state = self._state
        assert state is not None
        if not self._exactly:
            return run(subject.fn, call, state, self._look)
        try:
            return exact_outcome(
                subject.fn, subject.module, call, state, self._weights, self._look
            )[0]
        except Exception as error:
            run(subject.fn, call, state)  # Raises where the call itself is to blame.
            raise _Inexact from error

    def _is_argument(self, output: int) -> bool:
        """Whether an output of the last run is one of the arguments that vary."""
        slot = self._pattern[output][0]
        return slot is not None and bool(self.subject.axes[slot])

    def _view_of_argument(self) -> str | None:
        """Which output of the last run is only a view of an argument that varies, in words."""
        axes = self.subject.axes
        for output, (_, memory) in enumerate(self._pattern):
            shares = memory is not None and memory < len(axes) and bool(axes[memory])
            if shares and not self._is_argument(output):
                return f"output {output} is a view of an argument"
        return None

    def _look(self, result: Any, call: Call) -> None:
        """Note which arguments and memory the outputs are."""
        self._pattern = pattern_of(result, flatten(call.args, call.kwargs)[0])
        leaves = pytree.tree_leaves(result)
        self._layouts = [layout(v) if isinstance(v, torch.Tensor) else None for v in leaves]

    def _difference(
        self, verdicts: Verdicts, sizes: Sizes, expected: Outcome, outcome: Outcome
    ) -> str | None:
        """How a padded call differs from eager without padding, in words, or None."""
        if outcome.spec != expected.spec or expected.spec != verdicts.shapes.spec:
            return "the tree of its outputs depends on the size"
        ways = cuts_of(verdicts.shapes, sizes, verdicts.bucket)
        rules = verdicts.shapes.of(sizes)
        full = verdicts.shapes.of(verdicts.bucket)
        wanted, given = list(expected.outputs.items()), list(outcome.outputs.values())
        owners = {way[0].owner for way in ways}
        done: dict[int, torch.Tensor] = {}
        # A view comes after what it is a view of.
        for index in sorted(range(len(ways)), key=lambda place: ways[place][0].owner is not None):
            (name, want), have = wanted[index], given[index]
            if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
                number = ways[index][0].number
                have = have if number is None else number
                if type(want) is not type(have) or not (want == have or want != want):
                    return f"{name} is {have!r}, without padding {want!r}"
                continue
            if self._is_argument(index):
                continue
            rule, filled = rules[index], full[index]
            if isinstance(rule, tuple) and tuple(want.shape) != rule[0]:
                return f"{name} has shape {tuple(want.shape)}, where {rule[0]} follows the rule"
            if isinstance(filled, tuple) and tuple(have.shape) != filled[0]:
                return f"{name} has shape {tuple(have.shape)}, where {filled[0]} follows the rule"
            several = len(ways[index]) > 1
            left = verdicts.cuts.get(index, list(range(len(ways[index])))) if several else [0]
            found: dict[int, str | None] = {}
            for way in left:
                cut = ways[index][way]
                apart = cut.whole or cut.owner is not None or index in owners
                if index in self.shared and not apart and isinstance(filled, tuple):
                    apart = cut.is_prefix(filled[1])
                    if not apart:
                        found[way] = "shares memory with another output in a way that no cut keeps"
                        continue
                try:
                    mine = cut(have) if cut.owner is None else cut.view_of(done[cut.owner])
                except (RuntimeError, IndexError) as error:
                    found[way] = f"cannot be cut: {first_line(error, 120)}"
                    continue
                found[way] = _apart(mine, want, exactly=self._exactly)
                if found[way] is None:
                    done.setdefault(index, mine)
            if several:
                verdicts.cuts[index] = [way for way in left if found[way] is None]
            if index not in done:
                return f"{name} {found[left[-1]]}"
        return self._side_effects(expected, outcome)

    def _side_effects(self, expected: Outcome, outcome: Outcome) -> str | None:
        """How what the calls wrote to differs."""
        for name, want in expected.inputs.items():
            have = outcome.inputs[name]
            if isinstance(want, torch.Tensor):
                why = _apart(cut_to(have, want.shape), want, exactly=self._exactly)
                if why is not None:
                    return f"{name} {why}"
        for name in {**expected.buffers, **outcome.buffers}:
            if name not in expected.buffers or name not in outcome.buffers:
                return f"{name} is changed only with or only without padding"
            why = _apart(outcome.buffers[name], expected.buffers[name], exactly=self._exactly)
            if why is not None:
                return f"{name} {why}"
        return None


class Impossible(str):
    """Why some calls are not filled up that eager refuses too: nobody misses them."""


class _Inexact(Exception):
    """A call runs, but not in float64."""


def _elementwise(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether each element is as good as exact, by its own size or that of the small ones.

    Not by the mean or the largest: a mask's -1e9 beside them would hide all others.
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


def _joint(values: Sequence[Any], want: Any, *, exactly: bool) -> int | str | None:
    """The axis along which parts make up the whole; None where each part is the whole."""
    if not isinstance(want, torch.Tensor):
        alike = all(type(v) is type(want) and (v == want or v != v) for v in values)
        return None if alike else "another value"
    parts = [value for value in values if isinstance(value, torch.Tensor)]
    if len(parts) < len(values) or any(part.dim() != want.dim() for part in parts):
        return "another shape"
    if all(part.shape == want.shape for part in parts):
        whys = [_apart(part, want, exactly=exactly) for part in parts]
        return next((why for why in whys if why is not None), None)
    told = "another shape"
    for axis in range(want.dim()):
        rest = [[n for i, n in enumerate(part.shape) if i != axis] for part in (want, *parts)]
        total = sum(part.shape[axis] for part in parts)
        if all(shape == rest[0] for shape in rest) and total == want.shape[axis]:
            joined = torch.cat(parts, axis)
            why = _apart(joined, want, exactly=exactly)
            if why is None and layout(joined) != layout(want):
                why = "another order in memory"
            if why is None:
                return axis
            told = why
    return told


def _looked_at(low: int, full: int) -> list[int]:
    """Sizes from the lowest one to below the bucket's, not all where they are too many."""
    step = max(1, (full - low) // _MAX_LOOKED_AT)
    return sorted({*range(low, full, step), max(low, full - 1)}) if low < full else []


def _changed(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor):
        return False
    return not torch.equal(as_float64(before).nan_to_num(), as_float64(after).nan_to_num())


def _only_nan(outcome: Outcome) -> bool:
    """Whether an output has no number at all."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.numel() > 0 and bool(leaf.isnan().all())
        for leaf in outcome.outputs.values()
    )


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


def _apart(have: torch.Tensor, want: torch.Tensor, *, exactly: bool) -> str | None:
    """How two tensors differ, in words, beyond rounding."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return f"has shape {tuple(have.shape)}, without padding {tuple(want.shape)}"
    if not want.numel():
        return None
    if not torch.equal(special_values(have), special_values(want)):
        return "has NaN or Inf in other places than without padding"
    error, peak = error_of(have, want, want)
    if exactly or want.dtype not in ROUNDING:
        if _elementwise(have, want):
            return None
    else:
        limit = ROUNDING[want.dtype]
        if want.dtype is torch.float32 and not want.is_cuda:
            limit = _NO_TF32
        if error.rms <= limit and error.max <= 10 * limit * peak:
            return None
    return f"changes by {error.rms:.1e} of its root mean square (largest: {error.max:.1e})"
