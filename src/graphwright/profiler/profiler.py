"""profile(): what bounds a call, measured; it captures nothing and leaves the model as it was."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..calls.objects import apart
from ..calls.operations import tensors
from ..calls.options import (
    args_problem,
    callable_problem,
    flag_problem,
    in_brief,
    kwargs_problem,
    names_checked,
    refuse,
)
from ..calls.plurals import counted
from ..errors import GraphwrightError
from ..evaluation.measurement import Timer, load_note
from ..graphs.conditions import pretend_capturing
from ..report.environment import environment
from . import remedies as remedy_room
from .lines import Line, Sampler
from .observation import ObservedOperation, Stopwatch, WorkObserver
from .profile import Profile
from .remedies import Known, Remedy
from .roofs import Roofs, cores, raised, roofs_of
from .sentences import told
from .subject import Subject
from .table import Measured
from .timing import CROWDED, CallTimes, device_seconds, time_calls, time_threads
from .trace import Kernel, TracedCall, traced
from .trials import try_variants
from .verdict import (
    Cause,
    CpuFigures,
    GpuFigures,
    Verdict,
    cause_on_gpu,
    of_cpu,
    of_gpu,
    parts_on_cpu,
)
from .wait_clock import WaitClock

# Calls under the stopwatch, and seconds for them and for sampling lines.
_WATCHED, _WATCHED_S, _SAMPLED_S = 20, 1.0, 0.4
_TRIALS_S = 2.0
# Operations whose FLOPs nobody counts and that take this share of the time are noted.
_UNCOUNTED = 0.1


@names_checked
def profile(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = False,
) -> Profile:
    """Find what bounds a call, and the most that each remedy can give, before any tuning.

    The call runs some dozens of times, under `torch.no_grad()` unless `training`; nothing is
    captured or compiled. Kernels are timed by torch.profiler (CUPTI), FLOPs counted by
    torch.utils.flop_counter, and both held against the machine's own roofs (Williams, Waterman and
    Patterson, CACM 52(4), 2009), which are measured once and cached. What the call changes
    (buffers, gradients, attributes, random numbers) is put back at the end.

    Args:
        fn: a module or function.
        args: positional arguments of the call; tensors are copied, never written to.
        kwargs: keyword arguments.
        training: profile a forward and a backward pass, from the sum of the floating-point results.

    Returns:
        the verdict with shares of the time, ranges of gains, tables and plots.

    Raises:
        OptionError: an option makes no sense, `fn` is an object of graphwright's, or training=True
            and nothing can be trained.
        ModelFailed: the call raises.
        GraphwrightError: torch.profiler cannot run here, as where another profiler does.
    """
    refuse(
        "profile",
        callable_problem("fn", fn) or _ours_problem("fn", fn),
        args_problem("args", args),
        kwargs_problem("kwargs", kwargs),
        flag_problem("training", training),
    )
    began = time.perf_counter()
    subject = Subject(fn, tuple(args), dict(kwargs or {}), training=training)
    with subject.unchanged() as journal:
        result = subject.first(journal)
        outputs = len(tensors(apart(result)))
        del result
        roofs = roofs_of(subject.device)
        work = _Gpu(subject, roofs, outputs) if _on_gpu(subject) else _Cpu(subject, roofs, outputs)
        work.measure()
    if roofs.others > CROWDED:
        work.notes.append(
            f"Other processes used {roofs.others:.0%} of the processors while the roofs were "
            "measured: they may be too low, and will be measured again next time."
        )
    busy = load_note()
    notes = [*work.notes, *([f"{busy}: figures may be of that too"] if busy else [])]
    return Profile(
        name=subject.label,
        device=str(subject.device),
        training=training,
        verdict=work.verdict,
        remedies=tuple(work.remedies),
        times=work.times,
        figures=work.figures,
        roofs=work.roofs,
        environment=environment(subject.device),
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
        _measured=tuple(work.measured),
        _events=work.trace.events,
    )


def _ours_problem(name: str, value: Any) -> str | None:
    """What is wrong with an object of ours: it runs eagerly where operations are watched."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "graphwright":
        return None
    return f"{name} is {in_brief(value)} of graphwright: profile the model that it was made of"


def _on_gpu(subject: Subject) -> bool:
    return subject.device.type == "cuda"


class _Profiling:
    """What both devices share: the order in which things are measured.

    Attributes:
        times: of single calls.
        trace: of torch.profiler.
        measured: the operations with their times.
        verdict: what bounds the call.
        remedies: what can be gained.
        notes: what could not be measured.
    """

    figures: GpuFigures | CpuFigures
    verdict: Verdict

    def __init__(self, subject: Subject, roofs: Roofs, outputs: int) -> None:
        self.subject = subject
        self.roofs = roofs
        self.outputs = outputs
        self.notes: list[str] = []
        self.measured: list[Measured] = []
        self.remedies: list[Remedy] = []
        self.times: CallTimes
        self.trace = TracedCall()
        self.observer = WorkObserver(subject.names)
        self.sampler = Sampler()

    def measure(self) -> None:
        """Measure, decide, predict."""
        self.times = time_calls(self.subject)
        self._observe()
        self._sample()
        try:
            self.trace = traced(self.subject)
        except GraphwrightError as error:
            if _on_gpu(self.subject):
                raise
            self.notes.append(f"There is no timeline: {error.what}")
        self._decide()
        if uncounted := self._uncounted():
            self.notes.append(uncounted)

    @property
    def operations(self) -> list[ObservedOperation]:
        return self.observer.operations

    def _observe(self) -> None:
        with self.subject.mode():
            call = self.subject.prepared()
            with self.observer.watching_waits(), self.observer:
                result = call()
        del result

    def _sample(self) -> None:
        with self.subject.mode(), self.sampler.sampling():
            began = time.perf_counter()
            while time.perf_counter() - began < _SAMPLED_S:
                self.subject.prepared()()
                if _on_gpu(self.subject):
                    torch.cuda.synchronize(self.subject.device)

    def _decide(self) -> None:
        raise NotImplementedError

    def _raise_roofs(self, seconds: Mapping[int, float]) -> None:
        """Lift roofs that operations have broken through."""
        reached: dict[str, float] = {}
        for index, operation in enumerate(self.operations):
            spent = seconds.get(index, 0.0)
            if operation.flops and spent > 0:
                rate = operation.flops / spent
                reached[operation.precision] = max(reached.get(operation.precision, 0.0), rate)
        higher = raised(self.roofs, reached)
        for dtype, rate in higher.flops.items():
            if rate > 1.05 * self.roofs.flops[dtype]:
                self.notes.append(
                    f"An operation reached {rate / 1e9:,.0f} GFLOP/s in {dtype}, more than the "
                    f"{self.roofs.flops[dtype] / 1e9:,.0f} that were measured: that is the roof."
                )
        self.roofs = higher

    def _uncounted(self) -> str:
        """What takes long and has no formula for its FLOPs, in words."""
        total = sum(each.seconds for each in self.measured) or 1.0
        by_name: Counter[str] = Counter()
        for each in self.measured:
            if each.operation.flops is None:
                by_name[each.operation.name] += each.seconds  # type: ignore[assignment]
        long = [n for n, seconds in by_name.items() if seconds > _UNCOUNTED * total]
        if not long:
            return ""
        return f"FLOPs of {', '.join(long)} are not known: no formula is registered for them."

    def _lines_of_time(self) -> list[tuple[Line, str]]:
        """Lines by their share of the host's time."""
        shares = self.sampler.shares()
        return [(line, f"{share:.0%} of the host's time") for line, share in shares if share > 0.02]

    def _lines_of_reads(self) -> list[tuple[Line, str]]:
        """Lines where the host waits for the device, the most frequent first."""
        found: Counter[tuple[Line, str]] = Counter()
        for line, name in self.observer.reads():
            if line is not None:
                found[line, name] += 1
        return [
            (line, f"{name} waits for the device, {n} times" if n > 1 else f"{name} waits")
            for (line, name), n in found.most_common()
        ]

    def _lines_of_work(self, causes: Sequence[Cause]) -> list[tuple[Line, str]]:
        """Lines by the time of their operations that a cause bounds."""
        spent: dict[Line, float] = {}
        for each in self.measured:
            line = each.operation.line
            if line is not None and each.cause in map(str, causes):
                spent[line] = spent.get(line, 0.0) + each.seconds
        total = sum(each.seconds for each in self.measured) or 1.0
        ordered = sorted(spent.items(), key=lambda pair: -pair[1])
        return [(line, f"{s / total:.0%} of the operations' time") for line, s in ordered]

    def _finished(self, verdict: Verdict) -> Verdict:
        """A verdict with its lines and its text."""
        lines: list[tuple[Line, str]] = []
        for cause in verdict.causes:
            if cause is Cause.WAITS:
                lines += self._lines_of_reads()
            elif cause is Cause.PYTHON:
                lines += self._lines_of_time()
            elif cause not in (Cause.TOO_FEW_THREADS, Cause.TOO_MANY_THREADS):
                lines += self._lines_of_work((cause,)) or self._lines_of_time()
        text = told(verdict, self.figures, self.operations, self.trace)
        return Verdict(verdict.causes, verdict.shares, tuple(lines[:8]), text)


class _Gpu(_Profiling):
    """A call on a GPU."""

    def _kernels_by_operation(self) -> dict[int | None, list[Kernel]]:
        """The kernels of a call by the number of their operation; None for those of none."""
        found: dict[int | None, list[Kernel]] = {}
        for kernel in self.trace.kernels:
            index = kernel.operation
            if index is not None and index >= len(self.operations):
                index = None
            found.setdefault(index, []).append(kernel)
        return found

    def _parts(self, by_operation: Mapping[int | None, list[Kernel]]) -> dict[Cause, float]:
        """The device's seconds by what bounds them; notes those of each operation, too."""
        parts: dict[Cause, float] = {}
        for index, operation in enumerate(self.operations):
            kernels = by_operation.get(index, [])
            seconds = self.trace.operation_s.get(index, 0.0)
            cause = cause_on_gpu(operation, kernels, self.roofs) if kernels else Cause.LAUNCHES
            if kernels:
                parts[cause] = parts.get(cause, 0.0) + seconds
            self.measured.append(Measured(operation, seconds, len(kernels), str(cause)))
        if others := by_operation.get(None, []):
            cause = cause_on_gpu(None, others, self.roofs)
            parts[cause] = parts.get(cause, 0.0) + sum(kernel.seconds for kernel in others)
            self.notes.append(
                f"{counted(len(others), 'kernel')} of no operation, as of a replayed graph: "
                "what is read and computed there is not known."
            )
        return parts

    def _decide(self) -> None:
        times, trace, device = self.times, self.trace, self.subject.device
        waits = bool(self.observer.waits) or any(op.reads for op in self.operations)
        alone = None if waits else device_seconds(self.subject, times.host_s)
        self._raise_roofs(trace.operation_s)
        by_operation = self._kernels_by_operation()
        parts = self._parts(by_operation)
        waiting = max(trace.waiting_s, self._waiting()) if waits else trace.waiting_s
        busy = trace.busy_s if alone is None else alone
        copies_s = parts.get(Cause.TRANSFERS, 0.0)
        staging_s = max(0.0, trace.copying_s - copies_s)
        if copies_s:
            parts[Cause.TRANSFERS] = copies_s + staging_s
            busy += staging_s
        copying = trace.copying_s if copies_s else 0.0
        # Python that starts an operation belongs to it.
        started = sum(not operation.view for operation in self.operations)
        own = times.host_s - waiting - copying - started * self.roofs.operation_s
        self.figures = GpuFigures(
            call_s=times.call_s,
            host_s=times.host_s,
            waiting_s=waiting,
            copying_s=copying,
            python_s=max(0.0, min(trace.python_s, own)),
            device_s=min(busy, times.call_s),
            parts=parts,
        )
        self.verdict = self._finished(of_gpu(self.figures))
        trials = try_variants(
            self.operations,
            self.observer.samples,
            trace.operation_s,
            device,
            limit_s=_TRIALS_S,
        )
        places = len(set(self.observer.reads()))
        queued_s, reads = self._as_captured(alone)
        known = Known(
            self.operations,
            trace.operation_s,
            self.roofs,
            trials,
            queued_s=queued_s,
            bf16_s=self._in_bf16(pretend=places > reads),
            inputs=self.subject.input_bytes(),
            outputs=self.outputs,
            kernels=len(trace.kernels),
            launches={i: len(kernels) for i, kernels in by_operation.items() if i is not None},
            reads=reads,
        )
        self.remedies = remedy_room.for_gpu(self.figures, known)

    def _as_captured(self, alone: float | None) -> tuple[float | None, int]:
        """The device's seconds back to back, and the reads, of the call as a capture would see it.

        Libraries read fewer values where torch.cuda.is_current_stream_capturing() is True.

        Args:
            alone: the same seconds of the call as it is.
        """
        places = len(set(self.observer.reads()))
        if not places:
            return alone, 0
        observer = WorkObserver(self.subject.names)
        try:
            with self.subject.mode(), pretend_capturing():
                call = self.subject.prepared()
                with observer.watching_waits(), observer:
                    call()
                reads = len(set(observer.reads()))
                return None if reads else device_seconds(self.subject, self.times.host_s), reads
        except Exception:  # Whatever it does in a capture, the call as it is has reads.
            return alone, places

    def _in_bf16(self, *, pretend: bool) -> float | None:
        """Seconds that the device needs for the call in bfloat16; None if it does not run so.

        Args:
            pretend: whether the call reads nothing only where a capture seems to be under way.
        """
        half = self.subject.in_dtype(torch.bfloat16)
        if half is None:
            return None
        try:
            with pretend_capturing() if pretend else contextlib.nullcontext():
                # With weights in the place of others, the host takes longer.
                return device_seconds(half, 2 * self.times.host_s)
        except Exception:  # It has dtypes of its own, or there is no memory for it.
            return None

    def _waiting(self) -> float:
        """Seconds of a call in which the host waits, taken without a profiler."""
        found = []
        with self.subject.mode():
            for _ in range(5):
                call = self.subject.prepared()
                torch.cuda.synchronize(self.subject.device)
                clock = WaitClock(self.roofs.operation_s)
                with clock.running():
                    call()
                found.append(clock.seconds)
        return min(statistics.median(found), self.times.host_s)


class _Cpu(_Profiling):
    """A call on a CPU."""

    def _decide(self) -> None:
        watched = self._watched()
        seconds = watched.operations
        self._raise_roofs(dict(enumerate(seconds)))
        threads = time_threads(self.subject, cores())
        if threads.others > CROWDED:
            self.notes.append(
                f"Other processes used {threads.others:.0%} of the processors while threads were "
                "timed: what more threads give is then measured too low, what fewer give too high."
            )
        parts: dict[Cause, float] = {}
        dispatch = 0.0
        for index, operation in enumerate(self.operations):
            spent = seconds[index] if index < len(seconds) else 0.0
            started, cause, work = parts_on_cpu(operation, spent, self.roofs)
            dispatch += started
            if cause is not None:
                parts[cause] = parts.get(cause, 0.0) + work
            name = str(Cause.DISPATCH if cause is None or work < started else cause)
            self.measured.append(Measured(operation, started + work, 0, name))
        inside = dispatch + sum(parts.values())
        # What is left of the call; no more than there was between operations under the stopwatch.
        python = max(0.0, min(watched.call_s - inside, watched.between_s))
        self.figures = CpuFigures(
            call_s=inside + python,
            python_s=python,
            dispatch_s=dispatch,
            parts=parts,
            threads=threads,
        )
        self.verdict = self._finished(of_cpu(self.figures))
        by_index = dict(enumerate(each.seconds for each in self.measured))
        trials = try_variants(
            self.operations,
            self.observer.samples,
            by_index,
            self.subject.device,
            limit_s=_TRIALS_S,
        )
        known = Known(self.operations, by_index, self.roofs, trials, outputs=self.outputs)
        self.remedies = remedy_room.for_cpu(self.figures, known)

    def _watched(self) -> StopwatchTimes:
        """Calls with and without the stopwatch, in turns, so that other work disturbs both."""
        timer = Timer(self.subject.device)
        runs: list[list[float]] = []
        plain: list[float] = []
        between: list[float] = []
        began = time.perf_counter()
        with self.subject.mode():
            while len(runs) < 2 or (
                len(runs) < _WATCHED and time.perf_counter() - began < _WATCHED_S
            ):
                plain.append(timer.once(self.subject.prepared()))
                watch = Stopwatch()
                call = self.subject.prepared()
                with watch:
                    whole = timer.once(call)
                runs.append(watch.seconds)
                between.append(whole - sum(watch.seconds))
        same = [run for run in runs if len(run) == len(self.operations)]
        if not same:
            self.notes.append(
                "The call runs other operations each time: those of one call are shown."
            )
            same = runs[-1:]
        operations = [min(values) for values in zip(*same, strict=True)]
        return StopwatchTimes(operations, min(plain), max(0.0, min(between)))


@dataclass(frozen=True)
class StopwatchTimes:
    """Calls on a CPU, with and without the stopwatch; seconds.

    Attributes:
        operations: the fastest run of each operation, as other work only ever adds.
        call_s: the fastest call without the stopwatch.
        between_s: the least that passed between operations under the stopwatch.
    """

    operations: list[float]
    call_s: float
    between_s: float
