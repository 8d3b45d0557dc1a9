"""Try each candidate once: in a worker process where that is possible, else in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..report.progress import Progress
from ..report.result import EAGER, Row, Status
from ..strategies import eager
from ..strategies.base import Built, Candidate
from ..strategies.registry import is_slow
from .search import Search
from .trial import CandidateEvaluator
from .workers.pool import TrialLimits, WorkerPool
from .workers.task import IsolationError

# The share of a time budget that is kept for the finalists.
FINALISTS_SHARE = 0.2
# Larger budgets are advised in steps of so many seconds.
_BUDGET_STEP_S = 5
# Seconds that it may take to look whether a slow candidate could run: to import ONNX Runtime, say.
_PROBE_S = 5.0
# Calls that build, verify and time eager, at least.
_CALLS_OF_EAGER = 31


@dataclass
class Terms:
    """What one candidate may take, and when no further one is tried.

    Attributes:
        isolate: whether candidates get processes of their own.
        timeout_s: seconds to set up, and seconds to time.
        memory_limit: bytes in addition to the model; None for most of what is free.
        budget_s: seconds that all of tuning may take; None for no limit.
        deadline: `time.monotonic()` when screening has to end; None for no limit. It changes with
            what is found.
    """

    isolate: bool
    timeout_s: float
    memory_limit: int | None
    budget_s: float | None
    deadline: float | None


@dataclass
class Screening:
    """One run over the candidates; a context manager that leaves no process behind.

    Attributes:
        module: the model.
        device: where it is.
        search: what is tried besides eager, and when.
        terms: what each may take.
        repeat: makes the command that tries a strategy again.
        notes: of the report; reasons why candidates could not be isolated are added.
        kept: what was built in this process, by candidate; it grows.
    """

    module: nn.Module
    device: torch.device
    search: Search
    terms: Terms
    repeat: Callable[[str], str]
    notes: list[str] = field(default_factory=list)
    kept: dict[str, list[Built]] = field(default_factory=dict)
    _workers: WorkerPool | None = None

    def __enter__(self) -> Screening:
        """Start the fork server, which begins to import what workers need."""
        if self.terms.isolate and self.search.waiting:
            try:
                self._workers = WorkerPool(self.module, self.search.waiting, self.device)
                self.search.spare = self._workers.spare
            except IsolationError as error:
                self._note_not_isolated(str(error))
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers, self.search.spare = None, False

    def rows(self, evaluator: CandidateEvaluator, progress: Progress) -> Iterator[Row]:
        """Yield the row of each candidate, as it becomes known; the report must take it in."""
        progress.step(self._eager_in_words(evaluator))
        try:
            if self._workers is not None and not self._workers.spare:
                self._workers.wait_until_ready()  # Nothing else runs while eager is timed.
        except IsolationError as error:
            self._note_not_isolated(str(error))
            self._close()
        yield self._in_this_process(Candidate(eager.EAGER), evaluator)
        if self._workers is not None and self.search.waiting:
            yield from self._in_workers(self._workers, evaluator, progress)
        while chosen := self.search.choose(1, self._left_s()):
            for candidate in chosen:
                progress.step(candidate.name)
                yield self._in_this_process(candidate, evaluator)
        missing_s = -max(0.0, self._left_s() or 0.0)
        for candidate, why in self.search.rest():
            progress.step(candidate.name)
            if why:
                yield self._cannot_win(candidate, why)
            else:
                needs_s = self.search.needs_s(candidate)
                row = self._no_time_for(candidate, missing_s + needs_s)
                missing_s += needs_s if row.status is Status.NOT_TRIED else 0.0
                yield row

    def _left_s(self) -> float | None:
        """Seconds until no further candidate is set up; None for no limit."""
        return None if self.terms.deadline is None else self.terms.deadline - time.monotonic()

    def _eager_in_words(self, evaluator: CandidateEvaluator) -> str:
        """What is done with eager; with the time that takes, if the budget is less."""
        calls_s = sum(sample.reference.call_s for sample in evaluator.samples)
        needs_s, left_s = _CALLS_OF_EAGER * calls_s, self._left_s()
        if left_s is None or needs_s <= max(0.0, left_s):
            return EAGER
        return f"{EAGER}: its calls take about {needs_s:.0f} s, and the budget leaves less"

    def _in_workers(
        self,
        workers: WorkerPool,
        evaluator: CandidateEvaluator,
        progress: Progress,
    ) -> Iterator[Row]:
        terms = self.terms
        limits = TrialLimits.of_machine(terms.timeout_s, self.device, terms.memory_limit)
        handed_out: list[Candidate] = []

        def choose(count: int) -> list[Candidate]:
            chosen = self.search.choose(count, self._left_s())
            handed_out.extend(chosen)
            return chosen

        try:
            workers.load(evaluator, limits)
            for candidate, found in workers.evaluate(
                choose, ends=lambda: terms.deadline, doing=progress.doing
            ):
                handed_out.remove(candidate)
                progress.step(candidate.name)
                if isinstance(found, str):
                    self._note_not_isolated(found)
                    yield self._in_this_process(candidate, evaluator)
                elif found.status is Status.NOT_TRIED:
                    why = f"{found.reason}: the budget of {terms.budget_s:g} s left no more"
                    yield self._not_tried(candidate, why if found.reason else "")
                else:
                    yield self.with_repeat(found)
        except IsolationError as error:
            self._note_not_isolated(str(error))
            self.search.put_back(handed_out)

    def _note_not_isolated(self, why: str) -> None:
        note = f"Candidates were tried in this process, not in worker processes: {why}."
        if note not in self.notes:
            self.notes.append(note)

    def _in_this_process(self, candidate: Candidate, evaluator: CandidateEvaluator) -> Row:
        """Try a candidate here, if there is time for it; eager in any case.

        Nothing can stop it once it has begun.
        """
        left_s = None if candidate.name == EAGER else self._left_s()
        if left_s is not None and left_s < 0:
            return self._not_tried(candidate)
        if left_s is not None and is_slow(candidate, self.device):
            missing_s = self.search.needs_s(candidate) - left_s
            if missing_s > 0:
                return self._no_time_for(candidate, missing_s)
        trial = evaluator.set_up(candidate)
        if left_s is not None and trial.builts and (self._left_s() or 0.0) < 0:
            return self._not_tried(candidate)
        if trial.builts:
            evaluator.time(trial)
        if trial.builts:
            self.kept[candidate.name] = trial.builts
        return self.with_repeat(trial.row)

    def _cannot_win(self, candidate: Candidate, why: str) -> Row:
        again = "Pass exhaustive=True to try it all the same."
        name, complexity = candidate.name, candidate.complexity
        return Row(name, Status.NOT_TRIED, why, again, complexity=complexity)

    def _no_time_for(self, candidate: Candidate, missing_s: float) -> Row:
        """The row of a candidate that was not begun, since so many seconds were missing."""
        usual_s, missing_s = round(self.search.set_up_s(candidate)), math.ceil(missing_s)
        if self.terms.budget_s is None or usual_s < 1 or missing_s < 1:
            return self._not_tried(candidate)
        row = self._not_tried(
            candidate,
            f"its set-up takes about {usual_s} s: {missing_s} s more than the budget of "
            f"{self.terms.budget_s:g} s left",
        )
        if row.status is Status.NOT_TRIED:
            needed_s = self.terms.budget_s + missing_s / (1 - FINALISTS_SHARE)
            budget_s = math.ceil(needed_s / _BUDGET_STEP_S) * _BUDGET_STEP_S
            row.remedy = f"--budget {budget_s}s, or budget_s={budget_s}, would try it."
        return row

    def _not_tried(self, candidate: Candidate, why: str = "") -> Row:
        """The row of a candidate that there was no time for."""
        row = Row(candidate.name, Status.NOT_TRIED, complexity=candidate.complexity)
        left_s = self._left_s()
        is_late = left_s is not None and left_s < _PROBE_S
        if not (is_late and is_slow(candidate, self.device)):
            found = candidate.availability(self.device)
            if not found.available:
                row.status, row.reason, row.remedy = Status.UNAVAILABLE, found.reason, found.remedy
                return row
        spent = f"the budget of {self.terms.budget_s:g} s left no time to measure it"
        row.reason = why or spent
        row.remedy = "Give a larger budget or exhaustive=True, or name the strategies to try."
        return row

    def with_repeat(self, row: Row) -> Row:
        """The same row; if something went wrong, with the command that tries it again."""
        if row.status not in (Status.OK, Status.SLOWER, Status.UNAVAILABLE, Status.NOT_TRIED):
            row.repeat = self.repeat(row.strategy)
        return row
