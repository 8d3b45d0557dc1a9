"""Which candidate is tried next, and which need not be tried since they cannot win.

What is set up in a second or two comes first. The order of the others is by what a candidate should
gain per second of trying it: by what its parts usually gain, corrected by what was found here of
the same compiler. What cannot win is held back, and is tried after all if what it was compared with
fails; so is what there is no time for.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..report.report import Report
from ..report.result import EAGER, OF_TIME, Row, Status
from ..report.table import duration
from ..strategies.base import Candidate
from ..strategies.regional import REGIONAL
from ..strategies.registry import (
    FIRST_INDUCTOR_S,
    is_slow,
    is_whole_inductor,
    kernels_of,
    usual,
)

# A prediction may be too low by this factor.
_HOPE = 1.3
# Seconds that verifying and timing take in addition to set-up, and calls: some verify it, at least
# seven time it and as many eager beside it, three show its memory.
_BESIDE_S, _CALLS_BESIDE = 2.0, 25
# A quick set-up takes about this share of the usual time.
_QUICK_SHARE = 0.5
# A set-up that usually takes so many seconds is always tried.
_CHEAP_S = 2.0
# Seconds of a set-up that finds its kernels compiled, at most.
_WARM_S = 1.0
# Kernels in less memory, or warmer caches, may be faster than in eager by so much.
_KERNELS = 0.95
# The whole model, compiled at once, may be faster than its regions by this factor.
_WHOLE = 1.2
# A graph that is so much faster than eager shows that the host is the limit.
_HOST_LIMITED = 0.9
# What stops one candidate of a compiler often stops the others.
_STOPPED = (Status.FAILED, Status.UNAVAILABLE, Status.CRASHED, Status.TIMED_OUT)
# Bytes a second at which a graph copies its inputs, at least, and the share of its time that may
# take.
_COPIED, _COPIES_SHARE = 1e12, 0.05


@dataclass
class Search:
    """Candidates that are still to be tried.

    Attributes:
        report: of the run; the rows in it are what is known.
        device: where the model is.
        waiting: candidates that were not handed out yet.
        in_order: whether they are tried in their order, and all of them.
        exhaustive: whether all are tried, the most promising first.
        spare: whether slow set-ups go on while others are timed.
        modules: how many the model has.
    """

    report: Report
    device: torch.device
    waiting: list[Candidate]
    in_order: bool = False
    exhaustive: bool = False
    spare: bool = False
    modules: int = 0
    _all: dict[str, Candidate] = field(default_factory=dict)
    _handed_out: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._all = {candidate.name: candidate for candidate in self.waiting}

    def choose(self, count: int, left_s: float | None = None) -> list[Candidate]:
        """The candidates to try next; none if nothing left can win, or what is under way decides.

        Args:
            count: how many, at most; those that differ in the runner alone come together, since
                they are built once, and count as one.
            left_s: seconds that are left; None for no limit. What usually needs more would only
                hold others up.
        """
        able = [
            each for each in self.waiting if not self.cannot_win(each) and self._fits(each, left_s)
        ]
        first = [each for each in able if not self._can_wait(each)]
        if first or any(self.report.row(name) is None for name in self._handed_out):
            able = first
        chosen = _of_first_builds(able if self.in_order else self._ordered(able, count), count)
        self.waiting = [each for each in self.waiting if each not in chosen]
        self._handed_out |= {each.name for each in chosen}
        return chosen

    def put_back(self, candidates: Sequence[Candidate]) -> None:
        """Take back what was chosen and could not be tried."""
        self.waiting[:0] = candidates
        self._handed_out -= {each.name for each in candidates}

    def rest(self) -> list[tuple[Candidate, str]]:
        """What is left, with the reason why it cannot win; "" for what there is no time for."""
        rest, self.waiting = self.waiting, []
        return [(each, self.cannot_win(each)) for each in rest]

    def set_up_s(self, candidate: Candidate) -> float:
        """Seconds that its set-up usually takes; few if its kernels have been compiled here.

        On a CPU most of Inductor's is what the first one has to do for all.
        """
        seconds = usual(candidate, self.device, self.report.host_s, self.modules)[1]
        if self.device.type == "cpu" and is_whole_inductor(candidate) and self._knows_inductor():
            seconds = max(_WARM_S, seconds - FIRST_INDUCTOR_S)
        return min(seconds, _WARM_S) if self._shares_of_kernels(candidate) else seconds

    def _knows_inductor(self) -> bool:
        """Whether Inductor has compiled the model here."""
        rows = [row for row in self.report.rows if row.status in (Status.OK, Status.SLOWER)]
        known = [self._all[row.strategy] for row in rows if row.strategy in self._all]
        return any(map(is_whole_inductor, known))

    def needs_s(self, candidate: Candidate) -> float:
        """Seconds that it usually takes to set it up, verify and time it."""
        return self.set_up_s(candidate) + self._beside_s

    def is_cheap(self, candidate: Candidate) -> bool:
        """Whether its set-up usually takes so little that it is tried in any case."""
        return self.set_up_s(candidate) <= _CHEAP_S

    def one_after_the_other_s(self) -> float:
        """Seconds that all that is cheap usually takes, and the quickest of each other compiler."""
        quickest: dict[str, float] = {}
        for each in self.waiting:
            key = each.name if self.is_cheap(each) else _family(each)
            quickest[key] = min(quickest.get(key, math.inf), self.needs_s(each))
        return sum(quickest.values())

    def compiler_set_up_s(self) -> float:
        """Seconds of the quickest set-up by PyTorch's own compiler that has not failed here.

        Other compilers may not be installed.
        """
        ways: dict[str, float] = {}
        for each in self._all.values():
            if _family(each) == "inductor":
                name = each.compiler.name
                ways[name] = max(ways.get(name, 0.0), self.set_up_s(each))
        for row in self.report.rows:
            if row.strategy in self._all and row.status in (*_STOPPED, Status.WRONG):
                ways.pop(self._all[row.strategy].compiler.name, None)
        return min(ways.values(), default=0.0)

    def awaits_compiler(self) -> bool:
        """Whether nothing of PyTorch's own compiler is known, and it usually makes more.

        That is more than the best so far, by what a graph of eager's kernels takes on a GPU; as
        long as that is not known, too. Seconds are compared, since eager's time beside each may be
        disturbed.
        """
        compiled = [
            each for each in self._all.values() if _family(each) == "inductor" and each.runner
        ]
        if self._all_wanted or self.device.type != "cuda" or not compiled:
            return False
        best = self._best()
        if best is None or any(self.report.row(each.name) is not None for each in compiled):
            return False
        gain = max(usual(each.without_runner, self.device)[0] for each in compiled)
        graphed = f"{EAGER}+graph"
        if self.report.row(graphed) is None:
            return graphed in self._all
        best_s, graphed_s = map(self._seconds, (best.strategy, graphed))
        return best_s > graphed_s / gain

    def cannot_win(self, candidate: Candidate) -> str:
        """Why a candidate cannot be the best, as far as is known; "" if it may be."""
        if self._all_wanted:
            return ""
        beaten = self._beaten_by_regions(candidate)
        if beaten or candidate.runner is not None:
            return beaten
        return self._beaten_by_its_graph(candidate) or self._beaten_by_kernels(candidate)

    def _ordered(self, candidates: list[Candidate], count: int) -> list[Candidate]:
        """What is cheap first, then what should gain the most per second of trying it."""
        able = [each for each in candidates if not self._follows_regions(each)] or candidates
        able.sort(key=lambda each: (self.is_cheap(each), self._promise(each)), reverse=True)
        return self._slow_first(able, count) if self.spare else able

    def _slow_first(self, candidates: list[Candidate], count: int) -> list[Candidate]:
        """Begin slow set-ups early, which go on beside the others: two of three at a time."""
        slow = [each for each in candidates if is_slow(each, self.device)]
        first = sorted(slow, key=self._hope, reverse=True)[: count * 2 // 3]
        return [*first, *(each for each in candidates if each not in first)]

    def _fits(self, candidate: Candidate, left_s: float | None) -> bool:
        """Whether there is time to set it up, verify and time it, where not all is wanted."""
        if left_s is None or self.in_order or self.exhaustive:
            return True
        # Where it goes on beside others, it holds nothing up: it may be faster than usual.
        least = self.set_up_s(candidate) * (_QUICK_SHARE if self.spare else 1.0)
        return least + self._beside_s <= left_s

    def _can_wait(self, candidate: Candidate) -> bool:
        """Whether what is not known yet of graphs may show that it cannot win."""
        if self._all_wanted or candidate.runner is not None or self.device.type != "cuda":
            return False
        twin, eager = f"{kernels_of(candidate)}+graph", f"{EAGER}+graph"
        unknown = [name for name in (twin, eager) if self.report.row(name) is None]
        return twin in self._all and bool(unknown)

    def _follows_regions(self, candidate: Candidate) -> bool:
        """Whether it compiles the whole model, and what its regions give is not known yet.

        Beside these, the whole would make all set-ups longer: it comes when nothing else is left.
        """
        known = self._of_regions().values()
        return is_whole_inductor(candidate) and any(row is None for row in known)

    def _beaten_by_its_graph(self, candidate: Candidate) -> str:
        """A graph runs the same kernels, and the host is the limit."""
        if self.device.type != "cuda" or self._share(f"{EAGER}+graph") > _HOST_LIMITED:
            return ""
        twin = f"{kernels_of(candidate)}+graph"
        row = self.report.row(twin)
        fine = twin in self._all if row is None else row.status in (Status.OK, Status.NOT_TRIED)
        graphed, eager = (self._seconds(name) for name in (f"{EAGER}+graph", EAGER))
        if not fine or 2 * self.report.input_bytes / _COPIED > _COPIES_SHARE * graphed:
            return ""
        return (
            f"cannot win: {twin} runs the same kernels as a graph, and the host is the limit here "
            f"(eager takes {duration(eager)}, and {duration(graphed)} in a graph)"
        )

    def _beaten_by_regions(self, candidate: Candidate) -> str:
        """Inductor has compiled the same operations, region by region, and others are faster."""
        found = self._of_regions()
        if not is_whole_inductor(candidate) or None in found.values():
            return ""
        regions = min(found, key=self._share, default="")
        best = self._best()
        if (
            best is None
            or not _WHOLE * self._share(best.strategy) < self._share(regions) < math.inf
        ):
            return ""
        return (
            f"cannot win: {regions} compiles the same operations, region by region, and takes "
            f"{duration(self._seconds(regions))}; {best.strategy} takes "
            f"{duration(self._seconds(best.strategy))}"
        )

    def _of_regions(self) -> dict[str, Row | None]:
        """What is known of regional compilation under graphs, which takes less time."""
        every = self._all.values()
        names = [each.name for each in every if each.compiler is REGIONAL and each.runner]
        return {name: self.report.row(name) for name in names}

    def _beaten_by_kernels(self, candidate: Candidate) -> str:
        """It runs eager's kernels, and something else is faster than these alone."""
        plain = f"{EAGER}:no_grad"
        same = kernels_of(candidate) == EAGER and candidate.name not in (plain, EAGER)
        host_s = self.report.host_s
        if not same or host_s is None or self._share(plain) == math.inf:
            return ""
        eager = self._seconds(EAGER)
        least = _KERNELS * (self._share(plain) * eager - host_s)
        best = self._best()
        if best is None or least <= self._share(best.strategy) * eager:
            return ""
        return (
            f"cannot win: it runs eager's kernels, which alone take at least {duration(least)} of "
            f"eager's {duration(eager)}, and {best.strategy} takes "
            f"{duration(self._share(best.strategy) * eager)}"
        )

    # ------------------------------------------------------------ what is known

    @property
    def _all_wanted(self) -> bool:
        return self.in_order or self.exhaustive or self.report.objective not in OF_TIME

    def _share(self, strategy: str) -> float:
        """Time of a row relative to eager's, or the most that it can be; inf if not known."""
        row = self.report.row(strategy)
        if row is None or row.status not in (Status.OK, Status.SLOWER):
            return math.inf
        if self.report.objective in OF_TIME:
            return self.report.cost(row)
        return statistics.median(self.report.ratios(row) or [math.inf])

    @property
    def _beside_s(self) -> float:
        """Seconds to verify and to time a candidate, which takes as long as eager at most."""
        eager_s = self._seconds(EAGER)
        return _BESIDE_S + (0.0 if eager_s == math.inf else _CALLS_BESIDE * eager_s)

    def _seconds(self, strategy: str) -> float:
        row = self.report.row(strategy)
        if row is None or row.screening is None:
            return math.inf
        return row.screening.typical(self.report.figure).median

    def _best(self) -> Row | None:
        rows = [row for row in self.report.rows if self._share(row.strategy) < math.inf]
        return min(rows, key=lambda row: self._share(row.strategy), default=None)

    def _promise(self, candidate: Candidate) -> float:
        """What a candidate should gain over the best, per second of trying it."""
        hope = self._hope(candidate)
        return hope / self.needs_s(candidate) if hope > 0 else hope

    def _hope(self, candidate: Candidate) -> float:
        """What a candidate should gain over the best: the logarithm of a factor."""
        gain = usual(candidate, self.device)[0] * self._correction(candidate)
        if shares := self._shares_of_kernels(candidate):
            gain = 1 / min(shares)  # What they are worth is known.
        best = self._best()
        known = 1.0 if best is None else max(1.0, 1 / self._share(best.strategy))
        return math.log(_HOPE * gain / known)

    def _shares_of_kernels(self, candidate: Candidate) -> list[float]:
        """What others that run the same kernels have taken, as shares of eager's time."""
        kernels = kernels_of(candidate)
        if kernels == EAGER:  # Not compiled: all the difference is the runner's.
            return []
        found = []
        for row in self.report.rows:
            other = self._all.get(row.strategy)
            if other is not None and kernels_of(other) == kernels and not row.unsteady:
                found.append(self._share(row.strategy))
        return [share for share in found if share < math.inf]

    def _correction(self, candidate: Candidate) -> float:
        """By how much candidates of the same compiler gained more here than usual."""
        found = []
        for row in self.report.rows:
            other = self._all.get(row.strategy)
            if other is None or _family(other) != _family(candidate):
                continue
            if row.status in _STOPPED:
                found.append(0.5)
            elif self._share(row.strategy) < math.inf and not row.unsteady:
                found.append(1 / self._share(row.strategy) / usual(other, self.device)[0])
        return statistics.median(found) if found else 1.0


def _family(candidate: Candidate) -> str:
    return candidate.compiler.name.partition(":")[0]


def _of_first_builds(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The candidates of the first few builds, those of each build together."""
    builds: dict[str, list[Candidate]] = {}
    for each in candidates:
        builds.setdefault(each.without_runner.name, []).append(each)
    return list(itertools.chain(*itertools.islice(builds.values(), count)))
