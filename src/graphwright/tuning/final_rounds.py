"""The finalists: brought into the caller's process and timed again in common rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..artifacts.tuned_module import TunedModule
from ..evaluation.measurement import Measurement, interleave, weighted
from ..report.report import Report
from ..report.result import COMPILE_DEFAULT, EAGER, Row
from ..strategies.base import Built, Candidate
from .selection import cost, near_best
from .trial import CandidateEvaluator

_BARE = "torch.compile without checks"


@dataclass
class Finals:
    """The last rounds of a tuning.

    They are run as the user will call them: in this process, through a TunedModule with its checks.

    Attributes:
        report: with a row for each candidate; it gets the figures.
        evaluator: of this process.
        kept: what was built in this process, by candidate; it grows.
        candidates: by name.
        tuned: makes a TunedModule of what was built.
        seconds: of rounds for each finalist.
        deadline: `time.monotonic()` when tuning has to be over; None for no limit.
    """

    report: Report
    evaluator: CandidateEvaluator
    kept: dict[str, list[Built]]
    candidates: dict[str, Candidate]
    tuned: Callable[[str, list[Built]], TunedModule]
    seconds: float
    deadline: float | None

    def run(self, fallen: Callable[[Row], object]) -> None:
        """Build and verify here what was measured elsewhere, then time all in turns with eager.

        Args:
            fallen: told of a candidate that is not right in this process.
        """
        while missing := [row for row in near_best(self.report) if row.strategy not in self.kept]:
            late = self.deadline is not None and time.monotonic() > self.deadline
            if late and len(self.kept) > 1:
                for row in missing:
                    row.notes.append("near the best, but the budget was spent: not timed again")
                break
            # One that falls makes way: others are near the best then.
            self._bring_home(min(missing, key=lambda row: cost(self.report, row)), fallen)
        if len(self.kept) > 1:
            self._time()

    def _bring_home(self, row: Row, fallen: Callable[[Row], object]) -> None:
        trial = self.evaluator.set_up(self.candidates[row.strategy])
        if trial.builts:
            self.kept[row.strategy] = trial.builts
            return
        row.status, row.remedy = trial.row.status, trial.row.remedy
        row.reason = f"in this process: {trial.row.reason}"
        fallen(row)

    def _time(self) -> None:
        """Common rounds; torch.compile's default without the checks too, as a peer."""
        tuned = {name: self.tuned(name, builts) for name, builts in self.kept.items()}
        rows = {row.strategy: row for row in self.report.rows}
        samples, bound = self.evaluator.samples, self.evaluator.bound
        seconds = self._seconds() * len(tuned) / len(samples)
        found: dict[str, list[tuple[float, Measurement]]] = {}
        for place, sample in enumerate(samples):
            calls = {
                name: bound(self.evaluator.module if name == EAGER else call, sample.call)
                for name, call in tuned.items()
            }
            if COMPILE_DEFAULT in tuned:
                calls[_BARE] = bound(self.kept[COMPILE_DEFAULT][place].call, sample.call)
            measured = interleave(calls, self.evaluator.timer, budget_s=seconds)
            for name, measurement in measured.items():
                found.setdefault(name, []).append((sample.weight, measurement))
                if len(samples) > 1 and name != _BARE:
                    rows[name].by_shape[sample.name].final = measurement
        means = {n: m[0][1] if len(samples) == 1 else weighted(m) for n, m in found.items()}
        if _BARE in means:
            rows[COMPILE_DEFAULT].bare = means.pop(_BARE)
        for name, measurement in means.items():
            rows[name].final = measurement

    def _seconds(self) -> float:
        """Seconds of the common rounds for each finalist."""
        if self.deadline is None:
            return self.seconds
        left = self.deadline - time.monotonic()
        return max(0.0, min(self.seconds, left / len(self.kept)))
