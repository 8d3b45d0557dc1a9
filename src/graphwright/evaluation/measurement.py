"""Timing: interleaved rounds, raw samples, spread, and notes on noise.

The method follows hyperfine and Google Benchmark. Every sample is kept. Shown are the median and
its rank-based 95 % interval. Callables are timed in turns, so that a drifting clock affects all
alike, and ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..calls.modes import SharedSwitch

Call = Callable[[], object]

MAX_CALLS_PER_BLOCK = 50
BLOCK_S = 0.02
MIN_ROUNDS = 5
MAX_ROUNDS = 25
WARMUP_S = 0.1
# Seconds are kept to a tenth of a nanosecond, beyond any clock, so that a saved sample is short and
# yet exactly the one that was taken.
DIGITS = 10
# What is worth a reader's attention: these shares of the median, and of the samples.
_WIDE_SPREAD = 0.25
_DRIFT = 0.2
_OUTLIER = 1.5
_OUTLIER_SHARE = 0.05


@dataclass(frozen=True)
class Samples:
    """Raw timings of one callable, in seconds per call, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the interquartile range, in seconds."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of a median from the binomial ranks of the ordered values.

    Distribution-free (Conover, Practical Nonparametric Statistics, section 3.2). With fewer
    than six values no pair of ranks reaches 95 %, and the whole range is returned.
    """
    ordered = sorted(values)
    n = len(ordered)
    half = 1.96 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half) - 1)
    return ordered[low], ordered[max(high, low)]


@dataclass(frozen=True)
class Measurement:
    """What interleaved rounds gave for one callable.

    `latency` holds, for each round, the synchronised single calls; `throughput` one figure a
    round for calls issued back to back. All in seconds per call.
    """

    latency: tuple[tuple[float, ...], ...]
    throughput: tuple[float, ...]

    @property
    def latencies(self) -> Samples:
        """All single calls of all rounds."""
        return Samples(tuple(value for block in self.latency for value in block))

    @property
    def back_to_back(self) -> Samples:
        """Seconds per call in back-to-back operation, one sample a round."""
        return Samples(self.throughput)

    def rounds(self, objective: str) -> list[float]:
        """One figure a round: the median latency, or the seconds per call back to back."""
        if objective == "throughput":
            return list(self.throughput)
        return [statistics.median(block) for block in self.latency]

    def ratios(self, other: Measurement, objective: str = "latency") -> list[float]:
        """This callable's time over another's, round by round of the same interleaved run."""
        mine, theirs = self.rounds(objective), other.rounds(objective)
        return [a / b for a, b in zip(mine, theirs, strict=True)]


def weighted(parts: Sequence[tuple[float, Measurement]]) -> Measurement:
    """The mean call of several, by their weights: one figure a round."""
    count = min(len(measurement.latency) for _, measurement in parts)
    total = sum(weight for weight, _ in parts)

    def mean(objective: str) -> list[float]:
        rounds = [(weight / total, m.rounds(objective)) for weight, m in parts]
        return [round(sum(w * r[turn] for w, r in rounds), DIGITS) for turn in range(count)]

    return Measurement(tuple((value,) for value in mean("latency")), tuple(mean("throughput")))


class Timer:
    """Times calls on one device. On CUDA every single call is synchronised."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished what was issued."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def once(self, call: Call) -> float:
        """Seconds of one synchronised call, by the host's clock."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def block(self, call: Call, calls: int) -> float:
        """Seconds per call of back-to-back calls: by CUDA events, or the clock on the CPU."""
        self.synchronize()
        if not self._cuda:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls


def interleave(
    calls: Mapping[str, Call],
    timer: Timer,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Measurement]:
    """Time several callables in turns: each round times each of them once, in rotating order.

    Args:
        calls: what to time, by name; each takes no argument.
        timer: where they run.
        budget_s: seconds to spend in all; at least five rounds are taken whatever they cost,
            and at most twenty-five.
        clock: seconds, monotonic; tests pass their own.

    Returns:
        a Measurement for each name, with as many rounds as all the others.
    """
    names = list(calls)
    sizes = {name: _block_size(calls[name], timer) for name in names}
    latency: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    throughput: dict[str, list[float]] = {name: [] for name in names}
    deadline = clock() + budget_s
    with collection_held_off():
        for turn in range(MAX_ROUNDS):
            if turn >= MIN_ROUNDS and clock() >= deadline:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                call = calls[name]
                # One call for the caches that the callable before has used.
                timer.once(call)
                calls_taken = (timer.once(call) for _ in range(sizes[name]))
                latency[name].append(tuple(round(s, DIGITS) for s in calls_taken))
                throughput[name].append(round(timer.block(call, sizes[name]), DIGITS))
    return {name: Measurement(tuple(latency[name]), tuple(throughput[name])) for name in names}


def _block_size(call: Call, timer: Timer) -> int:
    """Calls that fill a block, after a warm-up that brings caches and clocks up."""
    spent = [timer.once(call) for _ in range(3)]
    while sum(spent) < WARMUP_S and len(spent) < 1000:
        spent.append(timer.once(call))
    seconds = statistics.median(spent)
    return max(1, min(MAX_CALLS_PER_BLOCK, round(BLOCK_S / max(seconds, 1e-9))))


@contextlib.contextmanager
def collection_held_off() -> Iterator[None]:
    """Collect Python's garbage now, and not again inside the block."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _freeze() -> Callable[[], object]:
    if gc.get_freeze_count():  # The program has frozen what it wants frozen.
        return lambda: None
    gc.collect()
    gc.freeze()
    return gc.unfreeze


# While it is thrown, collections pass over all objects that were there before: torch's alone are
# hundreds of thousands, and each figure of memory takes a collection or two.
OLD_OBJECTS_FROZEN = SharedSwitch(_freeze)


def noise_notes(measurement: Measurement) -> list[str]:
    """What a reader should know before trusting these samples; empty when they are calm."""
    samples = measurement.latencies
    median = samples.median
    notes = []
    relative = samples.spread / median
    if relative > _WIDE_SPREAD:
        notes.append(f"noisy: half of the calls lie over {_WIDE_SPREAD:.0%} off the median")
    far = sum(s > _OUTLIER * median for s in samples.seconds) / len(samples.seconds)
    if far > _OUTLIER_SHARE:
        notes.append(f"over {_OUTLIER_SHARE:.0%} of the calls took over {_OUTLIER:g} × the median")
    rounds = measurement.rounds("latency")
    half = len(rounds) // 2
    if half >= 3:
        drift = statistics.median(rounds[half:]) / statistics.median(rounds[:half]) - 1
        if abs(drift) > _DRIFT:
            notes.append(f"drifted by over {_DRIFT:.0%} during its rounds: other load, clocks?")
    return notes


def break_even(
    setup_s: float, call_s: float, other_setup_s: float, other_call_s: float
) -> int | None:
    """Calls after which a candidate has repaid its set-up against another, or None if never.

    The candidate costs `setup_s + n · call_s`, the other `other_setup_s + n · other_call_s`.
    """
    gain = other_call_s - call_s
    if gain <= 0:
        return None
    return max(0, math.ceil((setup_s - other_setup_s) / gain))


class MemoryMeter:
    """Peak memory, in bytes, above what was in use when the meter was made.

    On CUDA it is what torch's allocator has handed out, or what it has reserved beyond that, as
    the pools of graphs are; on Linux CPUs the process's resident set, its high-water mark being
    reset beforehand (proc(5), clear_refs). Elsewhere there is no figure.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settle()
        self._start = self._in_use()

    def peak(self, call: Call) -> int | None:
        """The largest peak of three calls, with what has been kept since the meter was made."""
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif not _reset_high_water():
            return None
        for _ in range(3):
            call()
            if self.device.type == "cpu":
                # What the heap keeps of a call that is over is not the next one's. They differ in
                # where they find room, so that it would add up.
                _trim_heap()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            allocated = torch.cuda.max_memory_allocated(self.device)
            high: tuple[int, ...] = (allocated, torch.cuda.max_memory_reserved(self.device))
        else:
            high = (_status_bytes("VmHWM"),)
        return max(0, *(after - before for after, before in zip(high, self._start, strict=True)))

    def kept(self) -> int:
        """Bytes in use between calls: allocated on CUDA, else resident."""
        self._settle()
        return self._in_use()[0]

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            _trim_heap()

    def _in_use(self) -> tuple[int, ...]:
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            return allocated, torch.cuda.memory_reserved(self.device)
        return (_status_bytes("VmRSS"),)


def _reset_high_water() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
            handle.write("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    """A figure of proc(5)'s status file; 0 where there is none."""
    with contextlib.suppress(OSError):
        with open("/proc/self/status", encoding="ascii") as handle:
            for line in handle:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    return 0


def _trim_heap() -> None:
    """Hand freed heap pages back, so that a later peak is not hidden under an earlier one."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Any = ctypes.CDLL(None).malloc_trim
        trim(0)


def load_note() -> str | None:
    """A note when other work was running on this machine's cores, else None."""
    with contextlib.suppress(OSError, AttributeError):
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > 1.5 * cores:
            return f"load average {load:.1f} on {cores} cores: other work was running"
    return None
