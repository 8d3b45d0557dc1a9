"""What `save` writes in place of a choice that cannot be saved: the best candidate that can be.

Of frozen Inductor that is a package of AOTInductor with frozen weights, which is built, verified
and timed in turns with the choice. Where it cannot be built, is wrong or is slower, the candidates
that were right when the model was tuned follow in the order of their figures.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..calls.dependencies import Dependencies
from ..calls.host_generators import generators_kept
from ..calls.snapshots import Call, ModuleState
from ..errors import OptionError, in_words
from ..evaluation.measurement import Measurement, Timer, interleave, weighted
from ..evaluation.reference import Sample
from ..evaluation.verification import verify
from ..graphs.conditions import for_inference
from ..report.report import Report
from ..report.result import EAGER, OF_TIME, Row, Status
from ..report.table import duration
from ..strategies.base import Built, Candidate
from ..strategies.registry import LOSSY, is_ours, parse_candidates, savable_form
from .tuned_module import Origin, TunedModule, choice_of
from .untuned_calls import Absent

# Up to this factor the form of the choice that can be saved is as good as the choice.
_AS_GOOD = 1.03
# Seconds to time a substitute in turns with the choice and eager, over all samples.
TIMING_S = 3.0
_CHOICE, _SUBSTITUTE = "choice", "substitute"


def unsavable(candidate: Candidate) -> str | None:
    """Why a candidate cannot be saved; None if it can."""
    if not is_ours(candidate):
        return "it is a strategy of your own, which load() would not know"
    reason: str | None = getattr(candidate.compiler, "unsavable", None)
    return reason


@dataclass(frozen=True)
class Substitute:
    """A candidate that can be saved, built and verified in this process.

    Attributes:
        origin: the candidate, and what was built of it.
        row: of the candidate.
        choice: times of the choice.
        own: times of the candidate in the same rounds.
    """

    origin: Origin
    row: Row
    choice: Measurement
    own: Measurement

    def ratio(self, objective: str) -> float:
        """Its time relative to that of the choice."""
        return statistics.median(self.own.ratios(self.choice, objective))

    def note(self, report: Report, why: str, failures: Sequence[str]) -> str:
        """The choice, and what is saved in its place, with their times.

        Args:
            report: of the choice.
            why: why the choice cannot be saved.
            failures: what came before it and failed, with the reasons.
        """
        what = "throughput" if report.objective == "throughput" else "latency"
        choice, own = (
            duration(statistics.median(each.rounds(what))) for each in (self.choice, self.own)
        )
        return (
            f"{report.chosen}, {choice} a call, cannot be saved: {why.rstrip('.')}. "
            f"Saved in its place: {self.row.strategy}, {own} a call."
        ) + "".join(f" {each.rstrip('.')}." for each in failures)

    def report(self, report: Report, note: str) -> Report:
        """The report of tuning with this as the choice."""
        rows = [row for row in report.rows if row.strategy != self.row.strategy]
        return replace(
            report,
            rows=[*rows, self.row],
            chosen=self.row.strategy,
            reason=f"{report.reason} {note}",
        )


def substitutes(tuned: TunedModule, origin: Origin, failures: list[str]) -> Iterator[Substitute]:
    """What may be saved in place of a choice, best first; none without the model.

    Args:
        tuned: the tuned module.
        origin: what it was made of.
        failures: gets the reason of each candidate that fails.
    """
    module, report = choice_of(tuned).module, tuned.report
    if isinstance(module, Absent):
        return
    builder = _Builder(module, origin)
    form: Substitute | None = None
    candidate = savable_form(origin.candidate)
    # Memory and first answers are not measured here.
    if candidate is not None and report.objective in OF_TIME and report.row(candidate.name) is None:
        form = builder.built(candidate, None, failures)
    ratio = None if form is None else form.ratio(report.objective)
    better, rest = _before_and_behind(report, ratio)
    yield from builder.built_of(better, failures)
    if form is not None:
        yield form
    yield from builder.built_of(rest, failures)


def _before_and_behind(report: Report, ratio: float | None) -> tuple[list[Row], list[Row]]:
    """Rows that were right other than the choice, best first: those before and behind its form.

    Args:
        report: of tuning.
        ratio: time of the form that can be saved, relative to the choice; None if there is none.
    """
    chosen = report.chosen_row
    rows = [row for row in report.rows if row.status is Status.OK and row is not chosen]
    rows.sort(key=report.cost)
    if ratio is None or chosen is None:
        return rows, []
    limit = 0.0 if ratio <= _AS_GOOD else ratio * report.cost(chosen)
    before = sum(report.cost(row) < limit for row in rows)
    return rows[:before], rows[before:]


def _named(name: str) -> Candidate | None:
    """A candidate of graphwright's by name; None for a name of a strategy of the user's."""
    try:
        (candidate,) = parse_candidates([name], LOSSY)
    except OptionError:
        return None
    return candidate


class _Builder:
    """Builds, verifies and times candidates for the samples of a choice."""

    def __init__(self, module: nn.Module, choice: Origin) -> None:
        self._module, self._choice = module, choice
        # The references' own is of the time of tuning, and would take later changes back.
        self._state = ModuleState(module)
        self._samples = [
            replace(each, reference=replace(each.reference, state=self._state))
            for each in choice.samples
        ]

    def built_of(self, rows: Sequence[Row], failures: list[str]) -> Iterator[Substitute]:
        """What can be saved of some rows, in their order, as far as it is right here."""
        for row in rows:
            candidate = _named(row.strategy)
            if candidate is not None and unsavable(candidate) is None:
                found = self.built(candidate, row, failures)
                if found is not None:
                    yield found

    def built(
        self, candidate: Candidate, row: Row | None, failures: list[str]
    ) -> Substitute | None:
        """A candidate that is right here; None if it fails.

        Args:
            candidate: what to build.
            row: its row, if it was tried when the model was tuned.
            failures: gets the reason if it fails.
        """
        device = self._choice.device
        devices = [device] if device.type == "cuda" else []
        reached = Dependencies(self._module, training=True, whole=True)
        same = torch.random.fork_rng(devices=devices)
        with for_inference(), same, generators_kept(reached):
            try:
                begun = time.perf_counter()
                builts = [self._build(candidate, sample) for sample in self._samples]
                seconds = time.perf_counter() - begun
                problem = self._problem(candidate, builts)
                if problem is None:
                    times = self._times(builts)
                    means = {name: _mean(self._samples, each) for name, each in times.items()}
            except Exception as error:  # A strategy may raise anything.
                problem = in_words(error)[0]
            finally:
                self._state.restore()
                self._state.corrupted()
        if problem is not None:
            failures.append(f"{candidate.name} failed: {problem}")
            return None
        if row is None:
            row = _row(candidate, means[_SUBSTITUTE], means[EAGER])
            row.setup_s = seconds
            parts = zip(self._samples, times[_SUBSTITUTE], times[EAGER], strict=True)
            if len(self._samples) > 1:
                row.by_shape = {each.name: _row(candidate, *both) for each, *both in parts}
        origin = replace(self._choice, candidate=candidate, builts=builts, ranges=())
        return Substitute(origin, row, means[_CHOICE], means[_SUBSTITUTE])

    def _build(self, candidate: Candidate, sample: Sample) -> Built:
        call = sample.call.clone()
        return candidate.build(self._module, call.args, call.kwargs)

    def _problem(self, candidate: Candidate, builts: Sequence[Built]) -> str | None:
        """What is wrong with what was built, in words; None if nothing."""
        for sample, built in zip(self._samples, builts, strict=True):
            if built.holds_weights and sample.reference.written:
                return "the model writes to what it holds, and this to a copy"
            verdict = verify(built.call, sample.reference, ulp=candidate.lossy_ulp)
            if not verdict.ok:
                return verdict.reason
        return None

    def _times(self, builts: Sequence[Built]) -> dict[str, list[Measurement]]:
        """Times of each sample, in common rounds with the choice and eager."""
        found: dict[str, list[Measurement]] = {}
        timer, budget_s = Timer(self._choice.device), TIMING_S / len(self._samples)
        for sample, choice, own in zip(self._samples, self._choice.builts, builts, strict=True):
            functions: dict[str, Callable[..., Any]]
            functions = {_CHOICE: choice.call, _SUBSTITUTE: own.call, EAGER: self._module}
            calls = {name: _bound(each, sample.call.clone()) for name, each in functions.items()}
            for name, measurement in interleave(calls, timer, budget_s=budget_s).items():
                found.setdefault(name, []).append(measurement)
        return found


def _mean(samples: Sequence[Sample], times: Sequence[Measurement]) -> Measurement:
    """Times of the mean call of several samples, by their weights."""
    if len(times) == 1:
        return times[0]
    return weighted([(sample.weight, each) for sample, each in zip(samples, times, strict=True)])


def _row(candidate: Candidate, own: Measurement, eager: Measurement) -> Row:
    rank = candidate.complexity
    return Row(candidate.name, Status.OK, complexity=rank, screening=own, baseline=eager)


def _bound(function: Callable[..., Any], call: Call) -> Callable[[], object]:
    return functools.partial(function, *call.args, **call.kwargs)
