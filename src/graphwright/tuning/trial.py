"""Try one candidate in this process: build it, verify it, and time it in turns with eager.

Whatever goes wrong is recorded in the candidate's row. Set-up and timing are separate steps, since
several set-ups may run at once and timings may not.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..calls.modules import FunctionModule
from ..calls.snapshots import Call, run
from ..calls.split import Args, Kwargs
from ..errors import in_words
from ..evaluation.accuracy import ErrorMeasure, tensors_in
from ..evaluation.gpu_turns import alone_on
from ..evaluation.measurement import (
    Measurement,
    Timer,
    interleave_until_steady,
    median_interval,
    unsteadiness,
    weighted,
)
from ..evaluation.peak_memory import MemoryMeter
from ..evaluation.reference import Case, Sample, exact_outcome
from ..evaluation.verification import Verification, agrees, compare, verify
from ..report.result import EAGER, Row, Status
from ..report.table import memory
from ..strategies.base import Built, Candidate, without_grad

# A candidate is slower than eager if the whole interval of the ratio lies above this.
_SLOWER = 1.02
# Bytes that may stay allocated after timed calls; some candidates fill caches late.
_LEAK = 256 * 2**20


@dataclass
class Trial:
    """A candidate that is being tried: its row, and what was built for each sample."""

    candidate: Candidate
    row: Row
    meter: MemoryMeter
    builts: list[Built] = field(default_factory=list)

    def sample_rows(self, samples: Sequence[Sample]) -> list[Row]:
        """A row for each sample; with one sample, the candidate's own row."""
        if len(samples) == 1:
            return [self.row]
        name, rank = self.candidate.name, self.candidate.complexity
        for sample in samples:
            self.row.by_shape.setdefault(sample.name, Row(name, Status.OK, complexity=rank))
        return [self.row.by_shape[sample.name] for sample in samples]


@dataclass
class _Compiled:
    """What a compiler made for one sample, or why it failed, and the seconds that took."""

    made: Built | Exception
    seconds: float


@dataclass
class SharedBuild:
    """What candidates that differ in the runner alone have in common: it is built once.

    Attributes:
        builder: name of the candidate that it was built for; empty before that.
        meter: measures memory above what was in use before it was built.
        compiled: for each sample, by its name.
    """

    builder: str = ""
    meter: MemoryMeter | None = None
    compiled: dict[str, _Compiled] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it could not be built."""
        return any(isinstance(part.made, Exception) for part in self.compiled.values())


class CandidateEvaluator:
    """Evaluates candidates for one model.

    Args:
        module: the model, or the module that wraps a function.
        samples: the calls to tune for.
        device: where they run.
        objective: decides which figure may make a candidate `slower`.
        screening_s: seconds to time a candidate in turns with eager, over all samples.
        timing_s: seconds by which timing has to end that is repeated since it was unsteady.
        dynamic_shapes: the dimensions that vary, as torch.export takes them; None for none.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: Sequence[Sample],
        device: torch.device,
        *,
        objective: str,
        screening_s: float,
        timing_s: float = math.inf,
        dynamic_shapes: Any = None,
    ) -> None:
        self.module = module
        self.samples = list(samples)
        self.timer = Timer(device)
        self.device = device
        self.objective = objective
        self.screening_s = screening_s
        self.timing_s = timing_s
        self.dynamic_shapes = dynamic_shapes
        # By sample, as far as it was looked at.
        self._differing: dict[str, bool] = {}

    @property
    def model(self) -> Callable[..., Any]:
        """What the caller would call: the module, or the function that it wraps."""
        return self.module.function_of() if isinstance(self.module, FunctionModule) else self.module

    def disagreement(self) -> str | None:
        """How eager here differs from eager in the process of the references; None if it agrees."""
        for sample in self.samples:
            case = sample.reference.cases[0]
            try:
                outcome = run(self.model, case.call, sample.reference.state)
            finally:
                # To compare all weights takes longer than the call.
                restore = (
                    self.restore if sample.reference.written else sample.reference.state.restore
                )
                restore()
            verdict = compare(outcome, case, sample.reference)
            if not verdict.ok:
                return verdict.reason
        return None

    def set_up(self, candidate: Candidate, shared: SharedBuild | None = None) -> Trial:
        """Build a candidate for each sample and verify it. Its row is OK if all went well.

        Args:
            candidate: what to build.
            shared: what an earlier candidate of the same rewrite and compiler was built of; what
                it lacks is built and added.
        """
        shared = SharedBuild() if shared is None else shared
        shared.meter = shared.meter or MemoryMeter(self.device)
        row = Row(candidate.name, Status.OK, complexity=candidate.complexity)
        trial = Trial(candidate, row, shared.meter)
        found = candidate.availability(self.device)
        if not found.available:
            row.status, row.reason, row.remedy = Status.UNAVAILABLE, found.reason, found.remedy
            return trial
        ranged = self._build_for_range(trial)
        try:
            for sample, part in zip(self.samples, trial.sample_rows(self.samples), strict=True):
                with self._recorded(row, sample):
                    if ranged is None:
                        built, part.setup_s = self._build_shared(trial, sample, part, shared)
                    else:
                        (built, part.setup_s), ranged = ranged, (ranged[0], 0.0)
                    trial.builts.append(built)
                    row.notes += [note for note in built.notes if note not in row.notes]
                    began = time.perf_counter()
                    verdict = self.verified(candidate, built, sample)
                    row.verify_s += time.perf_counter() - began
                    part.error = verdict.error
                    if not verdict.ok:
                        raise _NotToBeChosen(Status.WRONG, verdict.reason)
        except _IsOut:
            trial.builts.clear()
            if row.status is Status.FAILED:
                found = candidate.availability(self.device, late=True)
                if not found.available:
                    row.status, row.reason = Status.UNAVAILABLE, found.reason
                    row.remedy = found.remedy
            self._restore_after(row)  # Verification does so itself unless it is cut short.
        self._combine_samples(trial)
        return trial

    def _build_for_range(self, trial: Trial) -> tuple[Built, float] | None:
        """Build for all sizes at once: the result and its seconds; None if that is not possible."""
        if self.dynamic_shapes is None:
            return None
        ranged = trial.candidate.ranged(self.dynamic_shapes)
        if ranged is None:
            return None
        # Compilers take a size of 1 for a constant.
        largest = max(self.samples, key=lambda s: sum(t.numel() for t in s.call.tensors()))
        try:
            built, seconds = self._build(ranged.build, largest.call)
        except Exception as error:
            why = in_words(error)[0]
            trial.row.notes.append(
                f"built separately for each size, since building once for all sizes failed: {why}"
            )
            self.restore()
            return None
        built.ranged = True
        return built, seconds

    def verified(self, candidate: Candidate, built: Built, sample: Sample) -> Verification:
        """Whether what was built for a sample is right."""
        written = sorted(sample.reference.written)
        if built.holds_weights and written:
            # Samples may write what was there before, and then no comparison shows it.
            return Verification(False, f"the model writes to its {written[0]}, and this to a copy")
        verdict = verify(built.call, sample.reference, ulp=candidate.lossy_ulp)
        if not verdict.ok and candidate.name != EAGER and self.differs_without_grad(sample):
            why = "your model itself gives other results with gradients off, as it runs here"
            return replace(verdict, reason=f"{why}: {verdict.reason}")
        return verdict

    def differs_without_grad(self, sample: Sample) -> bool:
        """Whether the model itself gives other results for a sample under `torch.no_grad`."""
        if sample.name not in self._differing:
            right = not torch.is_grad_enabled()
            with contextlib.suppress(Exception):  # Then it cannot even be called so.
                right = right or agrees(without_grad(self.model), sample.reference)
            self._differing[sample.name] = not right
        return self._differing[sample.name]

    def problem_at(self, candidate: Candidate, built: Built, call: Call) -> str | None:
        """What is wrong with the result of a call of other sizes than the samples', or None."""
        nearest = max(self.samples, key=lambda s: sum(t.numel() for t in s.call.tensors()))
        ref, ulp = nearest.reference, candidate.lossy_ulp
        try:
            eager = run(self.model, call, ref.state)
            found = run(built.call, call, ref.state)
            verdict = compare(found, Case(call, eager, tensors_in(eager)), ref, ulp)
            if verdict.ok:
                return None
            # Eager and the candidate may both be off: compare both with float64.
            exact = exact_outcome(self.model, self.module, call, ref.state)[0]
            case = Case(call, eager, tensors_in(exact))
            # Eager's own error depends on the sizes too: allow the larger one.
            allowed = {
                name: ErrorMeasure(max(mine.rms, other.rms), max(mine.max, other.max))
                for name, mine in case.eager_error.items()
                for other in [ref.eager_error.get(name, mine)]
            }
            verdict = compare(found, case, replace(ref, eager_error=allowed), ulp)
            return None if verdict.ok else verdict.reason
        except Exception as error:
            return in_words(error)[0]
        finally:
            self.restore()

    def time(self, trial: Trial) -> None:
        """Time what was set up, in turns with eager, and say whether it is slower."""
        with alone_on(self.device):
            self._time(trial)

    def _time(self, trial: Trial) -> None:
        row = trial.row
        budget_s = self.screening_s / len(self.samples)
        deadline = time.monotonic() + self.timing_s
        parts = trial.sample_rows(self.samples)
        try:
            for sample, part, built in zip(self.samples, parts, trial.builts, strict=True):
                with self._recorded(row, sample):
                    mine = self.bound(built.call, sample.call)
                    part.peak_bytes = trial.meter.peak(mine)
                    # The row of eager thus shows by how much two equal callables differ here.
                    calls = {"candidate": mine, "eager": self.bound(self.module, sample.call)}
                    before = trial.meter.kept()
                    measured = interleave_until_steady(
                        calls,
                        self.timer,
                        budget_s=budget_s,
                        objective=self.objective,
                        deadline=deadline,
                    )
                    part.screening, part.baseline = measured["candidate"], measured["eager"]
                    part.unsteady = unsteadiness(part.screening, self.objective)
                    beside = unsteadiness(part.baseline, self.objective)
                    if beside and not part.unsteady:
                        part.unsteady = f"of eager beside it, {beside}"
                    grown = trial.meter.kept() - before
                    if grown > _LEAK and row.strategy != EAGER:
                        why = f"it leaks: {memory(grown)} stay allocated after the calls"
                        raise _NotToBeChosen(Status.MEMORY_EXCEEDED, why)
        except _IsOut:
            trial.builts.clear()
        finally:
            self._restore_after(row)
        self._combine_samples(trial)
        self._judge(row)

    def bound(self, function: Callable[..., Any], call: Call) -> Callable[[], object]:
        """A call to time: a function with its own copy of a sample's values."""
        mine = call.clone()
        args, kwargs = mine.args, dict(mine.kwargs)
        return lambda: function(*args, **kwargs)

    def restore(self) -> None:
        """Put the module's buffers and parameters back as they were."""
        state = self.samples[0].reference.state
        state.restore()
        state.corrupted()

    def _restore_after(self, row: Row) -> None:
        if row.status is not Status.CRASHED:  # After a crash the device cannot be used.
            self.restore()

    def _build_shared(
        self, trial: Trial, sample: Sample, part: Row, shared: SharedBuild
    ) -> tuple[Built, float]:
        """As `_build`, with what candidates of the same rewrite and compiler have in common."""
        candidate = trial.candidate
        known = shared.compiled.get(sample.name)

        def build(module: nn.Module, args: Args, kwargs: Kwargs) -> Built:
            if known is None:
                compiled = self._compile(candidate, sample, args, kwargs, shared)
            else:
                compiled = known.made
            if isinstance(compiled, Exception):
                raise compiled
            return candidate.wrap(compiled, module, args, kwargs)

        if known is not None:
            part.build_s = known.seconds
            note = f"shares the build of {shared.builder}, whose time is in the set-up of both"
            if note not in trial.row.notes:
                trial.row.notes.append(note)
        return self._build(build, sample.call)

    def _compile(
        self,
        candidate: Candidate,
        sample: Sample,
        args: Args,
        kwargs: Kwargs,
        shared: SharedBuild,
    ) -> Built | Exception:
        """Have the compiler build for a sample; what it makes, or raises, is shared."""
        shared.builder = candidate.name
        start = time.perf_counter()
        made: Built | Exception
        try:
            made = candidate.compile(self.module, args, kwargs)
            self.timer.synchronize()
        except Exception as error:
            made = error
        shared.compiled[sample.name] = _Compiled(made, time.perf_counter() - start)
        return made

    def _build(
        self, build: Callable[[nn.Module, Args, Kwargs], Built], call: Call
    ) -> tuple[Built, float]:
        """Build and call once. The seconds cover both, since the first call often compiles."""
        # The first eager call loads kernels, which is not the candidate's set-up.
        sample = call.clone()
        self.module(*sample.args, **sample.kwargs)
        self.timer.synchronize()
        sample = call.clone()
        start = time.perf_counter()
        built = build(self.module, sample.args, sample.kwargs)
        sample = call.clone()
        built.call(*sample.args, **sample.kwargs)
        self.timer.synchronize()
        return built, time.perf_counter() - start

    def _recorded(self, row: Row, sample: Sample) -> _FailureInto:
        return _FailureInto(row, sample.name if len(self.samples) > 1 else "")

    def _combine_samples(self, trial: Trial) -> None:
        """Combine the rows of several samples into the candidate's."""
        row, parts = trial.row, trial.sample_rows(self.samples)
        if len(self.samples) == 1:
            return
        for part in parts:
            if part.status is Status.OK:
                part.status = row.status
        row.setup_s = sum(part.setup_s or 0.0 for part in parts)
        row.build_s = sum(part.build_s for part in parts)
        row.peak_bytes = max(filter(None, (part.peak_bytes for part in parts)), default=None)
        errors = filter(None, (part.error for part in parts))
        row.error = max(errors, key=lambda error: error.rms, default=None)
        row.unsteady = next(filter(None, (part.unsteady for part in parts)), "")
        weights = [sample.weight for sample in self.samples]
        for figure in ("screening", "baseline"):
            found = [getattr(part, figure) for part in parts]
            if all(found):
                setattr(row, figure, weighted(list(zip(weights, found, strict=True))))

    def _judge(self, row: Row) -> None:
        if row.screening is not None and row.baseline is not None:
            judge(row, row.screening, row.baseline, self.objective)


def judge(row: Row, mine: Measurement, eager: Measurement, objective: str) -> None:
    """Mark a candidate as slower if eager is faster beyond the noise, by the objective.

    Args:
        row: the candidate's; a mark of other rounds is replaced.
        mine: the candidate's measurement.
        eager: eager's, of the same rounds.
        objective: what is tuned for.
    """
    if row.status is Status.SLOWER:
        row.status, row.reason = Status.OK, ""
    # Whoever wants the first answer early accepts slower calls later.
    if row.strategy == EAGER or row.status is not Status.OK or objective == "cold_start":
        return
    low, high = median_interval(mine.ratios(eager, objective))
    if low > _SLOWER and not row.unsteady:
        row.status = Status.SLOWER
        row.reason = f"{low:.2f} to {high:.2f} times eager's time"


class _NotToBeChosen(Exception):
    """A candidate ran and must not be chosen."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _IsOut(Exception):
    """A candidate is out of the race; its row says why."""


class _FailureInto:
    """Turns whatever is raised inside its block into the status and reason of a row."""

    def __init__(self, row: Row, shape: str) -> None:
        self._row = row
        self._prefix = f"{shape}: " if shape else ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, Exception):
            return
        row = self._row
        if isinstance(error, _NotToBeChosen):
            row.status, row.reason = error.status, str(error)
        else:
            row.status = status_of(error)
            row.reason, row.remedy = in_words(error)
        row.reason = self._prefix + row.reason
        raise _IsOut


def status_of(error: BaseException) -> Status:
    """The status of a candidate that raised an exception."""
    for cause in _causes(error):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return Status.MEMORY_EXCEEDED
        # This process cannot use the device any more.
        if isinstance(cause, torch.AcceleratorError):
            return Status.CRASHED
    return Status.FAILED


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
