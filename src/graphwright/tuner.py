"""tune(): try what this machine has, verify, measure in turns with eager, choose, report.

`Tuning` runs the steps and holds what is known so far, so that an interrupted run can still be
shown. `Tuning.evaluate` is the one place where a candidate's own code runs: it gets a candidate
and gives a row, which is all that a worker process would have to do in its place.
"""

from __future__ import annotations

import datetime
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from .errors import ModelFailed, OptionError, in_words
from .measurement import (
    MemoryMeter,
    Timer,
    interleave,
    load_note,
    median_interval,
    noise_notes,
)
from .reference import Reference, reference
from .report import Report, Row, Status
from .report.environment import environment
from .report.progress import Silent, shown
from .report.reason import sentence
from .report.result import COMPILE_DEFAULT, EAGER
from .request import check_options, device_of, input_in_words, name_of
from .signature import Args, CallSignature, Kwargs
from .snapshots import Call
from .strategies import (
    Built,
    Candidate,
    Compiler,
    default_candidates,
    parse_candidates,
)
from .strategies.base import without_grad
from .strategies.eager import EAGER as PLAIN_EAGER
from .tuned import TunedModule, quiet_eager
from .verification import verify
from .watch import FunctionModule, ModuleWatch

Objective = Literal["latency", "throughput", "memory"]

# Seconds of timing a candidate, in turns with eager, and of the finalists' common rounds.
SCREENING_S = 3.0
FINAL_S_EACH = 3.0
# Candidates within this factor of the best are timed again.
FINALIST_FACTOR = 1.10
# Slower than eager: the whole interval of the ratio lies above this.
_SLOWER = 1.02
_BARE = "torch.compile without checks"
# A gain below this factor is not worth a less simple candidate, however certain it is.
_WORTH_IT = 1.01


class Progress(Protocol):
    """Hears what a run is doing; every method is called from the thread that tunes."""

    def start(self, total: int) -> None:
        """The run has so many steps."""

    def step(self, what: str) -> None:
        """The step now beginning."""

    def row(self, row: Row) -> None:
        """A row is complete."""


@dataclass
class _Evaluation:
    row: Row
    built: Built | None = None


def tune(
    model: Callable[..., Any],
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    strategies: Iterable[str | Compiler | Candidate] | None = None,
    objective: Objective = "latency",
    tolerance: float | None = None,
    allow: Sequence[str] = (),
    budget_s: float | None = None,
    progress: bool | None = None,
) -> TunedModule:
    """Try every way to run a model that this machine has, verify each, and take the best.

    The winner answers calls like the sample's (same shapes, dtypes, devices, plain values); any
    other call goes to the model itself and is counted. Eager always competes, so the result is
    never knowingly slower. Tuning changes neither the model nor the random-number state.

    Args:
        model: a module in eval mode, or a plain function of tensors.
        args: positional sample inputs, real values rather than zeros; a tuple.
        kwargs: keyword sample inputs.
        strategies: names such as "inductor+graph", strategies or candidates of your own; None
            tries all that usually pay. Eager is always added.
        objective: "latency" (one synchronised call), "throughput" (calls issued back to back) or
            "memory" (peak bytes).
        tolerance: accepted error relative to the output's root mean square. None asks for a root
            mean square error of at most 3 times, and a largest error of at most 8 times, what
            eager itself has against float64.
        allow: lossy rewrites that may be tried: "tf32", "bf16", "fp16".
        budget_s: seconds after which no further candidate is begun; None for no limit.
        progress: whether to show progress on stderr; None shows it on a terminal.

    Raises:
        OptionError: an option is unknown or makes no sense.
        SignatureError: the arguments or results cannot be compared.
        ModelFailed: the model fails in eager.
        VerificationError: two eager calls with the same inputs disagree.
    """
    tuning = Tuning(
        model,
        args,
        kwargs,
        strategies=strategies,
        objective=objective,
        tolerance=tolerance,
        allow=allow,
        budget_s=budget_s,
    )
    with shown(progress) as listener:
        return tuning.run(listener)


class Tuning:
    """One run of `tune`, step by step. `report` holds what is known at any moment."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: Args = (),
        kwargs: Kwargs | None = None,
        *,
        strategies: Iterable[str | Compiler | Candidate] | None = None,
        objective: str = "latency",
        tolerance: float | None = None,
        allow: Sequence[str] = (),
        budget_s: float | None = None,
        name: str | None = None,
    ) -> None:
        check_options(model, args, kwargs, objective, tolerance, allow, budget_s)
        if isinstance(model, TunedModule):
            model = model.module
        self.module = model if isinstance(model, nn.Module) else FunctionModule(model)
        lazy = [n for n, p in self.module.named_parameters() if torch.nn.parameter.is_lazy(p)]
        if lazy:
            raise OptionError(
                f"Parameter {lazy[0]} of the model has no shape yet.",
                remedy="Call the model once on real inputs first.",
            )
        if self.module.training:
            raise OptionError(
                "The model is in training mode, and tune() is for inference.",
                remedy="Call model.eval() first.",
            )
        self.call = Call("the sample inputs", tuple(args), dict(kwargs or {}))
        self.device = device_of(self.module, self.call)
        self.signature = CallSignature.of(self.call.args, self.call.kwargs)
        self.tolerance = tolerance
        self.budget_s = budget_s
        self.timer = Timer(self.device)
        self._started = time.monotonic()
        if strategies is None:
            self.candidates = default_candidates(self.module, self.device, allow)
        else:
            if isinstance(strategies, str):
                strategies = strategies.split(",")
            self.candidates = parse_candidates(strategies, allow)
        self._put_first()
        self.report = Report(
            model=name or name_of(model),
            inputs=[input_in_words(n, leaf) for n, leaf in self.call.leaves().items()],
            objective=objective,
            rows=[],
            environment={},
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        self._kept: dict[str, Built] = {}
        self._reference: Reference | None = None
        self._quiet = True

    def _put_first(self) -> None:
        """Eager first, since all else is measured against it; torch.compile's default second."""
        rest = {candidate.name: candidate for candidate in self.candidates}
        eager = rest.pop(EAGER, Candidate(PLAIN_EAGER))
        self.candidates = [eager, *rest.values()]

    # ------------------------------------------------------------ the run

    def run(self, progress: Progress | None = None) -> TunedModule:
        """Tune. On KeyboardInterrupt the report holds what was known, and the error goes on."""
        listener = progress or Silent()
        with _same_random_state(self.device):
            try:
                return self._run(listener)
            except KeyboardInterrupt:
                self.report.interrupted = True
                self._conclude()
                raise
            finally:
                self._kept.clear()
                self._restore()
                self.report.seconds = time.monotonic() - self._started

    def _run(self, progress: Progress) -> TunedModule:
        report = self.report
        progress.start(len(self.candidates) + 3)
        progress.step("environment")
        report.environment = environment(self.device)
        progress.step("float64 reference")
        ref = reference(
            self.module if not isinstance(self.module, FunctionModule) else self.module._function,
            self.module,
            self.call,
            tolerance=self.tolerance,
        )
        self._reference = ref
        report.eager_error = ref.worst_eager_error
        report.notes += ref.notes
        self._quiet = self._same_without_grad(ref)
        for candidate in self.candidates:
            progress.step(candidate.name)
            row = self._try(candidate, ref)
            report.rows.append(row)
            progress.row(row)
            self._drop_the_beaten()
        progress.step("finalists")
        self._final_rounds()
        chosen, built = self._choose(ref)
        note = load_note()
        if note:
            report.notes.append(note)
        # The watch that is handed out begins after the last change that tuning makes.
        self._restore()
        return self._tuned(chosen.strategy, built)

    def _same_without_grad(self, ref: Reference) -> bool:
        """Whether eager under no_grad gives the numbers of eager as the caller calls it."""
        if not torch.is_grad_enabled() or verify(without_grad(self.module), ref).ok:
            return True
        self.report.notes.append(
            "Under no_grad this model computes other numbers than with gradients on, as it is "
            "called here; if they are the ones you use, call tune() under torch.no_grad()."
        )
        return False

    def _try(self, candidate: Candidate, ref: Reference) -> Row:
        spent = time.monotonic() - self._started
        late = self.budget_s is not None and spent > self.budget_s
        if late and candidate.name != EAGER:
            return Row(
                candidate.name,
                Status.NOT_TRIED,
                f"the budget of {self.budget_s:g} s was spent after {spent:.0f} s",
                remedy="Give a larger budget, or name the strategies to try.",
                complexity=candidate.complexity,
            )
        evaluation = self.evaluate(candidate, ref)
        if evaluation.built is not None:
            self._kept[candidate.name] = evaluation.built
        return evaluation.row

    def evaluate(self, candidate: Candidate, ref: Reference) -> _Evaluation:
        """Probe, build, verify and measure one candidate; whatever goes wrong becomes its row."""
        row = Row(candidate.name, Status.OK, complexity=candidate.complexity)
        found = candidate.availability(self.device)
        if not found.available:
            row.status, row.reason, row.remedy = Status.UNAVAILABLE, found.reason, found.remedy
            return _Evaluation(row)
        meter = MemoryMeter(self.device)
        try:
            built, row.setup_s = self._build(candidate)
            row.notes += built.notes
            verdict = verify(built.call, ref, ulp=candidate.lossy_ulp)
            row.error = verdict.error
            if not verdict.ok:
                row.status, row.reason = Status.WRONG, verdict.reason
                return _Evaluation(row)
            self._measure(row, built, meter)
        except Exception as error:
            row.status = Status.FAILED
            row.reason, row.remedy = in_words(error)
            return _Evaluation(row)
        finally:
            self._restore()
        self._judge(row)
        return _Evaluation(row, built)

    def _build(self, candidate: Candidate) -> tuple[Built, float]:
        """Build and call once; set-up seconds cover both, as the first call often compiles."""
        # Loading the kernels of a first eager call is nobody's set-up.
        sample = self.call.clone()
        self.module(*sample.args, **sample.kwargs)
        self.timer.synchronize()
        sample = self.call.clone()
        start = time.perf_counter()
        built = candidate.build(self.module, sample.args, sample.kwargs)
        sample = self.call.clone()
        built.call(*sample.args, **sample.kwargs)
        self.timer.synchronize()
        return built, time.perf_counter() - start

    def _bound(self, function: Callable[..., Any]) -> Callable[[], object]:
        """A call with the sample's values, for timing."""
        sample = self.call.clone()
        args, kwargs = sample.args, dict(sample.kwargs)
        return lambda: function(*args, **kwargs)

    def _measure(self, row: Row, built: Built, meter: MemoryMeter) -> None:
        mine = self._bound(built.call)
        row.peak_bytes = meter.peak(mine)
        # Eager against itself shows how far apart two equal callables come out here.
        calls = {"candidate": mine, "eager": self._bound(self.module)}
        measured = interleave(calls, self.timer, budget_s=SCREENING_S)
        row.screening, row.baseline = measured["candidate"], measured["eager"]
        row.notes += noise_notes(row.screening)

    def _judge(self, row: Row) -> None:
        """`slower` when eager is faster beyond doubt, by the measure that is asked for."""
        if row.strategy == EAGER:
            return
        low, high = median_interval(self.report.ratios(row))
        if low > _SLOWER:
            row.status = Status.SLOWER
            row.reason = f"{low:.2f} to {high:.2f} times eager's time"

    # ------------------------------------------------------------ choosing

    def _eligible(self) -> list[Row]:
        return [row for row in self.report.rows if row.status is Status.OK]

    def _cost(self, row: Row) -> float:
        """What is to be small: time relative to eager's, or peak bytes."""
        if self.report.objective == "memory" and row.peak_bytes is not None:
            return float(row.peak_bytes)
        return statistics.median(self.report.ratios(row))

    def _absolute_cost(self, row: Row) -> float:
        """What is to be small, by the row's own samples."""
        if self.report.objective == "memory":
            return self._cost(row)
        assert row.screening is not None  # Only what was measured is eligible.
        return statistics.median(row.screening.rounds(self.report.objective))

    def _drop_the_beaten(self) -> None:
        """Let go of candidates that are out of the race, and of the memory they hold."""
        eligible = self._eligible()
        near = {EAGER, COMPILE_DEFAULT}
        # Near the best by either measure: when eager itself wavers from one screening to the next,
        # the ratios of two candidates to it cannot be set against each other.
        for cost in (self._cost, self._absolute_cost):
            limit = FINALIST_FACTOR * min(map(cost, eligible), default=0.0)
            near |= {row.strategy for row in eligible if cost(row) <= limit}
        for name in [name for name in self._kept if name not in near]:
            del self._kept[name]
        gc.collect()

    def _final_rounds(self) -> None:
        """Time the finalists again in common rounds, with eager and torch.compile's default.

        They are called as the user will call them, through a TunedModule with its checks;
        torch.compile's default without them too, for the sake of the comparison.
        """
        rows = {row.strategy: row for row in self.report.rows}
        calls = {
            name: self._bound(self.module if name == EAGER else self._tuned(name, built))
            for name, built in self._kept.items()
        }
        if len(calls) < 2:
            return
        bare = self._kept.get(COMPILE_DEFAULT)
        if bare is not None:
            calls[_BARE] = self._bound(bare.call)
        budget = FINAL_S_EACH * len(calls)
        measured = interleave(calls, self.timer, budget_s=budget)
        if bare is not None:
            rows[COMPILE_DEFAULT].bare = measured.pop(_BARE)
        for name, measurement in measured.items():
            rows[name].final = measurement

    def _ranked(self) -> list[Row]:
        """Eligible rows, the one to choose first: the simplest within the best one's noise."""
        rows = [row for row in self._eligible() if row.strategy in self._kept]
        rows.sort(key=self._cost)
        if not rows or self.report.objective == "memory":
            return rows
        tied = [row for row in rows if self._ties(row, rows[0])]
        tied.sort(key=lambda row: row.complexity)
        return tied + [row for row in rows if row not in tied]

    def _ties(self, row: Row, best: Row) -> bool:
        """Whether a row is as good as the best, as far as these rounds can tell."""
        if row.final is not None and best.final is not None:
            # Set against each other directly: eager's noise would only widen both.
            low, _ = median_interval(row.final.ratios(best.final, self.report.objective))
            return low <= _WORTH_IT
        low, _ = median_interval(self.report.ratios(row))
        _, high = median_interval(self.report.ratios(best))
        return low <= high * _WORTH_IT

    def _choose(self, ref: Reference) -> tuple[Row, Built]:
        """The first of the ranking that is still right when it is verified again."""
        for row in self._ranked():
            built = self._kept[row.strategy]
            candidate = next(c for c in self.candidates if c.name == row.strategy)
            try:
                verdict = verify(built.call, ref, ulp=candidate.lossy_ulp)
            except Exception as error:
                row.status = Status.FAILED
                row.reason, row.remedy = in_words(error)
                continue
            if verdict.ok:
                self._conclude(row)
                return row, built
            row.status, row.reason = Status.WRONG, f"when verified again: {verdict.reason}"
        failed = self.report.row(EAGER)
        why = failed.reason if failed is not None else "it was not measured"
        raise ModelFailed(f"Eager itself could not be verified or timed: {why}")

    def _conclude(self, chosen: Row | None = None) -> None:
        """State the choice in one sentence; after an interruption, of what is known."""
        report = self.report
        if chosen is None:
            ranked = self._ranked()
            if not ranked:
                report.reason = "Interrupted before anything was measured."
                return
            chosen = ranked[0]
        report.chosen = chosen.strategy
        finalists = [row for row in self._eligible() if row.final is not None]
        report.reason = sentence(report, chosen, finalists)

    def _tuned(self, name: str, built: Built) -> TunedModule:
        """The module with one of the candidates to answer its calls."""
        pure = self._reference is not None and self._reference.pure
        watch = None
        if name.split(":")[0] != EAGER:  # Eager needs no watching.
            watch = ModuleWatch(self.module, values=built.holds_weights)
        call = built.call
        if name == EAGER:  # What tune() gives never requires grad, eager included.
            call = quiet_eager(self.module, self._quiet)
        return TunedModule(self.module, self.report, call, self.signature, watch, pure, self._quiet)

    def _restore(self) -> None:
        """Leave the module's buffers and parameters as they were found."""
        if self._reference is not None:
            self._reference.state.restore()
            self._reference.state.corrupted()


@contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """Leave the random-number states of the CPU and of the device as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
