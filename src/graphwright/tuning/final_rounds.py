"""Time the finalists again, in common rounds in the caller's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..artifacts.tuned_module import TunedModule
from ..evaluation.measurement import (
    Measurement,
    interleave_until_steady,
    least_calls,
    unsteadiness,
    weighted,
)
from ..report.report import Report
from ..report.result import COMPILE_DEFAULT, EAGER, OF_TIME, Row, Status
from ..strategies.base import Built, Candidate
from .selection import NO_TIME_LEFT, eligible, near_best, undecided
from .trial import CandidateEvaluator, judge

# The name of torch.compile's default, called without the checks of a TunedModule.
_BARE = "torch.compile without checks"
# About the share of a worker's set-up that one takes here, where Inductor and Triton find on disk
# what they have compiled, and nothing else is set up meanwhile; with frozen weights Inductor finds
# only its kernels. What others do is done again, most of it.
_SHARES_HERE = {
    "fused": 0.6,
    "inductor": 0.15,
    "inductor:regional": 0.3,
    "inductor:reduce-overhead": 0.15,
    "inductor:max-autotune": 0.15,
    "inductor:freeze": 0.8,
}
# Of finalists that are as fast as each other, the one that takes the least is built first.
_AS_FAST = 1.03
# Where noise leaves the choice open, finalists are timed again, so often in all.
MOST_SETS = 3


def seconds_here(row: Row, candidates: Mapping[str, Candidate]) -> float:
    """Seconds that it should take to build and verify in this process what a worker has set up."""
    share = _SHARES_HERE.get(candidates[row.strategy].compiler.name, 1.0)
    return share * ((row.setup_s or 0.0) + row.build_s) + row.verify_s


def least_rounds_s(report: Report, rows: Sequence[Row]) -> float:
    """Seconds of the least common rounds of some rows, and of verifying the choice after them."""
    medians = [row.screening.typical(report.figure).median for row in rows if row.screening]
    return sum(least_calls(median) * median for median in medians) + verify_again_s(rows)


def verify_again_s(rows: Sequence[Row]) -> float:
    """Seconds to verify once more the one of some rows that is chosen, at most."""
    return max((row.verify_s for row in rows), default=0.0)


def first_to_build(report: Report, rows: Sequence[Row], candidates: Mapping[str, Candidate]) -> Row:
    """The fastest of some rows, since time may be left for one alone; of equal ones the quickest.

    By the fastest call: set-ups beside it make eager slow, and then the ratio to it is small.
    """

    def seconds(row: Row) -> float:
        if row.screening is None or report.objective not in OF_TIME:
            return report.cost(row)
        return row.screening.fastest(report.figure)

    least = min(map(seconds, rows))
    equal = [row for row in rows if seconds(row) <= _AS_FAST * least]
    return min(equal, key=lambda row: seconds_here(row, candidates))


@dataclass
class FinalRounds:
    """The last rounds of a tuning.

    Finalists run as the user will call them: in this process, through a TunedModule with its
    checks.

    Attributes:
        report: has a row for each candidate, which gets the figures.
        evaluator: of this process.
        kept: what was built in this process, by candidate; it grows.
        candidates: by name.
        tuned: makes a TunedModule of what was built.
        seconds_each: seconds of rounds for each finalist.
        deadline: `time.monotonic()` when tuning has to end; None for no limit.
        grace_s: seconds by which the first finalist may exceed that.
    """

    report: Report
    evaluator: CandidateEvaluator
    kept: dict[str, list[Built]]
    candidates: dict[str, Candidate]
    tuned: Callable[[str, list[Built]], TunedModule]
    seconds_each: float
    deadline: float | None
    grace_s: float = 0.0

    def run(self, on_failure: Callable[[Row], object]) -> None:
        """Build and verify here what workers have timed, then time all in turns with eager.

        Args:
            on_failure: called with the row of a candidate that is not right in this process.
        """
        while missing := [row for row in self._finalists() if row.strategy not in self.kept]:
            # One at a time: if it fails, others may be near the best.
            following = self._next(missing)
            if following is None:
                for row in missing:
                    row.notes.append(NO_TIME_LEFT)
                break
            self._build_here(following, on_failure)
        if len(self.kept) > 1:
            self._time()

    def _finalists(self) -> list[Row]:
        """The rows near the best, and torch.compile's default if it works."""
        found = near_best(self.report)
        compiled = self.report.row(COMPILE_DEFAULT)
        if compiled is None or compiled in found:
            return found
        return [*found, compiled] if compiled.status in (Status.OK, Status.SLOWER) else found

    def _next(self, missing: Sequence[Row]) -> Row | None:
        """What to build next, if there is time for it: first one that is near the best.

        If there is no time for any of these, the fastest that there is time for. torch.compile's
        default, which may be far from the best, comes after that.
        """
        near = [row for row in near_best(self.report) if row.strategy != EAGER]
        is_first = bool(near) and not self.kept.keys() - {EAGER}
        wanted = near if is_first else missing
        fitting = [row for row in wanted if self._fits(row, self.grace_s if is_first else 0.0)]
        if is_first and not fitting:
            faster = [row for row in eligible(self.report) if row.strategy != EAGER]
            fitting = [row for row in faster if self._fits(row, self.grace_s)]
        return first_to_build(self.report, fitting, self.candidates) if fitting else None

    def _fits(self, row: Row, grace_s: float) -> bool:
        """Whether there is time to build it here and to time it with those that are built."""
        if self.deadline is None:
            return True
        timed = [row, *filter(None, map(self.report.row, self.kept))]
        needed_s = seconds_here(row, self.candidates) + least_rounds_s(self.report, timed)
        return time.monotonic() + needed_s < self.deadline + grace_s

    def _build_here(self, row: Row, on_failure: Callable[[Row], object]) -> None:
        trial = self.evaluator.set_up(self.candidates[row.strategy])
        if trial.builts:
            self.kept[row.strategy] = trial.builts
            return
        row.status, row.remedy = trial.row.status, trial.row.remedy
        row.reason = f"in this process: {trial.row.reason}"
        on_failure(row)

    def _time(self) -> None:
        """Run the common rounds; torch.compile's default is also timed without the checks.

        Where noise leaves the choice open, more rounds are run while there is time.
        """
        tuned = {name: self.tuned(name, builts) for name, builts in self.kept.items()}
        found: list[dict[str, Measurement]] = [{} for _ in self.evaluator.samples]
        for _ in range(MOST_SETS):
            self._add_rounds(tuned, found)
            self._judge(found)
            if not undecided(self.report) or not self._has_time_for_more():
                break

    def _add_rounds(
        self, tuned: Mapping[str, TunedModule], found: Sequence[dict[str, Measurement]]
    ) -> None:
        """Time all in turns, and add the rounds to those found before, sample by sample."""
        samples = self.evaluator.samples
        seconds = self._affordable_seconds_each() * len(tuned) / len(samples)
        for index in range(len(samples)):
            measured = interleave_until_steady(
                self._calls(index, tuned),
                self.evaluator.timer,
                budget_s=seconds,
                objective=self.report.figure,
                deadline=self._rounds_end(),
            )
            for name, measurement in measured.items():
                before = found[index].get(name)
                found[index][name] = measurement if before is None else before.and_then(measurement)

    def _calls(
        self, index: int, tuned: Mapping[str, Callable[..., Any]]
    ) -> dict[str, Callable[[], Any]]:
        """What is timed in turns for a sample."""
        call, bound = self.evaluator.samples[index].call, self.evaluator.bound
        every: dict[str, Callable[..., Any]] = {**tuned, EAGER: self.evaluator.module}
        if COMPILE_DEFAULT in tuned:
            every[_BARE] = self.kept[COMPILE_DEFAULT][index].call
        return {name: bound(each, call) for name, each in every.items()}

    def _judge(self, found: Sequence[Mapping[str, Measurement]]) -> None:
        """Give the rows the figures of all rounds so far, by sample."""
        rows, figure = {row.strategy: row for row in self.report.rows}, self.report.figure
        samples = self.evaluator.samples
        means: dict[str, Measurement] = {}
        unsteady: dict[str, str] = {}
        for name in found[0]:
            parts = [measured[name] for measured in found]
            whys = [unsteadiness(part, figure) for part in parts]
            unsteady[name] = next(filter(None, whys), "")
            means[name] = self._mean(parts)
            if len(samples) > 1 and name != _BARE:
                for sample, part, why in zip(samples, parts, whys, strict=True):
                    shape = rows[name].by_shape[sample.name]
                    shape.final, shape.unsteady = part, why
        bare = means.pop(_BARE, None)
        if bare is not None:
            rows[COMPILE_DEFAULT].bare = None if unsteady[_BARE] else bare
        for name, measurement in means.items():
            rows[name].final, rows[name].unsteady = measurement, unsteady[name]
        if not unsteady[EAGER]:
            for name, measurement in means.items():
                judge(rows[name], measurement, means[EAGER], self.report.objective)

    def _mean(self, parts: Sequence[Measurement]) -> Measurement:
        """The mean call of all samples, by their weights."""
        weights = [sample.weight for sample in self.evaluator.samples]
        return parts[0] if len(parts) == 1 else weighted(list(zip(weights, parts, strict=True)))

    def _has_time_for_more(self) -> bool:
        """Whether there is time for at least the least rounds once more."""
        end = self._rounds_end()
        if end is None:
            return True
        timed = [*filter(None, map(self.report.row, self.kept))]
        return time.monotonic() + least_rounds_s(self.report, timed) < end

    def _affordable_seconds_each(self) -> float:
        """`seconds_each`, or less if the deadline is near."""
        end = self._rounds_end()
        if end is None:
            return self.seconds_each
        left = end - time.monotonic()
        return max(0.0, min(self.seconds_each, left / len(self.kept)))

    def _rounds_end(self) -> float | None:
        """When the rounds end: the choice is verified once more after them."""
        if self.deadline is None:
            return None
        return self.deadline - verify_again_s([*filter(None, map(self.report.row, self.kept))])
