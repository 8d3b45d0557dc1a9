"""Timing: interleaved rounds, raw samples, spread, and whether they are steady.

The method follows hyperfine and Google Benchmark. Every sample is kept. Callables are timed in
turns, so that a drifting clock affects all alike, and ratios are taken within a round. A round's
figure is the median of its calls, but for those that were held up: other work on the machine only
ever makes a call longer, often a hundred times (Chen and Revels, Robust benchmarking in noisy
environments, 2016). Shown are the median of the rounds and its rank-based 95 % interval.

Where several threads compute one call and other processes compute too, the scheduler may put two of
the threads on one processor, and leave them there. Each then waits for the other until its time is
up, some milliseconds, and all calls take that long: steadily, so that no spread tells. What tells
is that the system has interrupted them. After a pause they are mostly put apart. Threads that wait
for each other asleep stay together; they are apart once one has gone to another processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..calls.plurals import counted
from .clock import Call, event_seconds, seconds_of, synchronize
from .garbage_collection import collection_held_off

try:
    import resource
except ImportError:  # Windows has none.
    resource = None  # type: ignore[assignment]  # it is asked for before its use

MAX_CALLS_PER_BLOCK = 50
BLOCK_S = 0.02
MIN_ROUNDS = 5
MAX_ROUNDS = 25
# Of so many rounds, the interval of a median leaves out three at each end. While something is
# unsteady, so many are taken if that costs at most so many seconds more for each callable.
TELLING_ROUNDS, TELLING_S_EACH = 15, 0.5
WARMUP_S = 0.1
# Seconds after which a block ends early, as where other work holds its calls up.
MAX_BLOCK_S = 0.05
# A call that takes more than so many times as long as the fastest one was held up by other work.
HELD_UP = 3.0
# On a CPU, a call whose threads share a processor takes up to twice as long, in whole blocks.
TOGETHER = 1.4
# Figures are unsteady if the 95 % interval of their median spans more than this factor ...
MAX_SPREAD = 1.5
# ... or if more than this share of the calls were held up.
MAX_HELD_UP_SHARE = 0.75
# The system takes the processor from a call more often than so many times a second only if others
# want it: a slice of time is some milliseconds.
MAX_INTERRUPTIONS = 20.0
# Only the process's own threads, which wake each other on one processor that they share, interrupt
# each other so often a second. They then have hardly more than that processor.
MUTUAL_INTERRUPTIONS, ONE_PROCESSOR = 2000.0, 1.2
# A process that has so large a share of all processors is in its own way.
OWN_SHARE = 0.9
# Seconds to wait after a block that was interrupted or held up, so that threads are placed anew:
# twice as long each time in vain, so often in vain, and so long in all.
PLACING_S, IN_VAIN, PLACINGS_S = 0.05, 5, 6.0
# Seconds to wait before unsteady callables are timed again, each time for twice as long.
PAUSES_S = (1.0, 4.0)
# Seconds are kept to a tenth of a nanosecond, beyond any clock, so that a saved sample is short and
# yet exactly the one that was taken.
DIGITS = 10


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
    round for calls issued back to back. All in seconds per call. `interrupted` is the share of the
    single calls from which the system took a processor, for other work than the process's own, or
    of the rounds in which that was so of nearly all calls, or all were held up, if that is larger.
    """

    latency: tuple[tuple[float, ...], ...] = field(repr=False)
    throughput: tuple[float, ...] = field(repr=False)
    interrupted: float = 0.0

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
        fastest = self.fastest()
        return [_undisturbed_median(block, fastest) for block in self.latency]

    def fastest(self, objective: str = "latency") -> float:
        """The fastest single call, or the fastest round of calls back to back."""
        return min(self.throughput) if objective == "throughput" else min(map(min, self.latency))

    def typical(self, objective: str = "latency") -> Samples:
        """The figures of the rounds as samples, whose median is what is shown."""
        return Samples(tuple(self.rounds(objective)))

    def ratios(self, other: Measurement, objective: str = "latency") -> list[float]:
        """This callable's time over another's, round by round of the same interleaved run."""
        mine, theirs = self.rounds(objective), other.rounds(objective)
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    def and_then(self, later: Measurement) -> Measurement:
        """The rounds of both, one set after the other."""
        return Measurement(
            self.latency + later.latency,
            self.throughput + later.throughput,
            max(self.interrupted, later.interrupted),
        )


def _undisturbed_median(seconds: Sequence[float], fastest: float) -> float:
    """The median of the calls that were not held up; of all if all were."""
    kept = [each for each in seconds if each <= HELD_UP * fastest]
    return statistics.median(kept or seconds)


def weighted(parts: Sequence[tuple[float, Measurement]]) -> Measurement:
    """The mean call of several, by their weights: one figure a round."""
    count = min(len(measurement.latency) for _, measurement in parts)
    total = sum(weight for weight, _ in parts)

    def mean(objective: str) -> list[float]:
        rounds = [(weight / total, m.rounds(objective)) for weight, m in parts]
        return [round(sum(w * r[turn] for w, r in rounds), DIGITS) for turn in range(count)]

    interrupted = max(measurement.interrupted for _, measurement in parts)
    latency = tuple((value,) for value in mean("latency"))
    return Measurement(latency, tuple(mean("throughput")), interrupted)


@dataclass
class _Block:
    """Calls one after the other, and what the system did meanwhile.

    Attributes:
        seconds: of each call.
        interrupted: calls from which a processor was taken.
        interruptions: how often that happened.
        own_s: seconds that all threads of this process had a processor.
        crowded: whether more threads of all processes wanted a processor than there are.
    """

    seconds: list[float] = field(default_factory=list)
    interrupted: int = 0
    interruptions: int = 0
    own_s: float = 0.0
    crowded: bool = False

    def add(self, other: _Block) -> None:
        """Count the calls of another block too."""
        self.seconds += other.seconds
        self.interrupted += other.interrupted
        self.interruptions += other.interruptions
        self.own_s += other.own_s

    @property
    def interrupted_share(self) -> float:
        """The share of calls that were interrupted by other work than the process's own."""
        wall_s = sum(self.seconds)
        if self.interruptions <= MAX_INTERRUPTIONS * wall_s:
            return 0.0
        if self.own_s > OWN_SHARE * wall_s * _processors():
            return 0.0
        return self.interrupted / len(self.seconds)

    @property
    def shares_a_processor(self) -> bool:
        """Whether its threads took turns on one processor since other processes use the others."""
        wall_s = sum(self.seconds)
        mutual = self.interruptions > MUTUAL_INTERRUPTIONS * wall_s
        return self.crowded and mutual and self.own_s < ONE_PROCESSOR * wall_s

    def is_disturbed(self, most: float) -> bool:
        """Whether nearly all calls were interrupted, or all took more than so many seconds."""
        held_up = min(self.seconds) > most or self.interrupted_share > MAX_HELD_UP_SHARE
        return held_up or self.shares_a_processor


class Timer:
    """Times calls on one device. On CUDA every single call is synchronised."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        # How many times as long as the fastest call all calls of a block may take.
        self.slowest_block = HELD_UP if self._cuda else TOGETHER

    def synchronize(self) -> None:
        """Wait until the device has finished what was issued."""
        synchronize(self.device)

    def once(self, call: Call) -> float:
        """Seconds of one synchronised call, by the host's clock."""
        return seconds_of(call, self.device)

    def back_to_back(self, call: Call, single: Sequence[float]) -> float:
        """Seconds per call of as many calls issued back to back, by CUDA events.

        On the CPU each call is waited for in any case, so the single ones say it.
        """
        if not self._cuda:
            return _undisturbed_median(single, min(single))
        self.synchronize()

        def block() -> None:
            for _ in single:
                call()

        return event_seconds(block, self.device) / len(single)


@dataclass
class _Timed:
    """One of several callables that are timed in turns, and what was measured so far.

    Attributes:
        call: it.
        fastest: seconds of its fastest call.
        latency: seconds of single calls, by round.
        throughput: seconds per call of calls back to back, by round.
        total: all single calls.
        disturbed: how many rounds were.
        in_vain: pauses in a row after which it was disturbed still.
    """

    call: Call
    fastest: float
    latency: list[tuple[float, ...]] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    total: _Block = field(default_factory=_Block)
    disturbed: int = 0
    in_vain: int = 0

    @property
    def block_size(self) -> int:
        """Calls of a block, by the fastest one: one that was held up says little about others."""
        return max(1, min(MAX_CALLS_PER_BLOCK, round(BLOCK_S / max(self.fastest, 1e-9))))

    def add(self, block: _Block, *, disturbed: bool) -> None:
        """Take in the single calls of a round."""
        self.disturbed += disturbed
        self.fastest = min(self.fastest, *block.seconds)
        self.total.add(block)
        self.latency.append(tuple(round(s, DIGITS) for s in block.seconds))

    def measurement(self) -> Measurement:
        """All rounds."""
        disturbed_share = self.disturbed / len(self.latency)
        interrupted = max(self.total.interrupted_share, disturbed_share)
        return Measurement(tuple(self.latency), tuple(self.throughput), interrupted)


class _Placing:
    """Times calls where and when they are not disturbed, as far as pauses help.

    Args:
        timer: where they run.
        sleep: waits for seconds.

    Attributes:
        paused_s: seconds of all pauses so far.
    """

    def __init__(self, timer: Timer, sleep: Callable[[float], object]) -> None:
        self.paused_s = 0.0
        self._timer, self._sleep = timer, sleep

    def block(self, timed: _Timed, most: float) -> _Block:
        """Time a block of calls, and while it is disturbed another one after a pause.

        Args:
            timed: what is called.
            most: seconds; if all calls take more, the block is disturbed.
        """
        size = timed.block_size
        block = _timed_calls(self._timer, timed.call, size)
        while block.is_disturbed(most):
            pause_s = min(PLACING_S * 2**timed.in_vain, PLACINGS_S - self.paused_s)
            if timed.in_vain == IN_VAIN or pause_s <= 0:
                return block
            timed.in_vain += 1
            self.paused_s += pause_s
            self._sleep(pause_s)
            if block.shares_a_processor:
                _change_processor()
            self._timer.once(timed.call)
            block = _timed_calls(self._timer, timed.call, size)
        timed.in_vain = 0
        return block


def interleave(
    calls: Mapping[str, Call],
    timer: Timer,
    *,
    budget_s: float,
    max_rounds: int | None = None,
    fastest: dict[str, float] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Measurement]:
    """Time several callables in turns: each round times each of them once, in rotating order.

    Args:
        calls: what to time, by name; each takes no argument.
        timer: where they run.
        budget_s: seconds to spend in all; at least five rounds are taken whatever they cost, and
            while something is unsteady fifteen, if they cost little more.
        max_rounds: the most rounds to take; twenty-five by default.
        fastest: seconds of the fastest call of each that is known; brought up to date.
        clock: seconds, monotonic; tests pass their own.
        sleep: waits for seconds; likewise.

    Returns:
        a Measurement for each name, with as many rounds as all the others.
    """
    fastest = {} if fastest is None else fastest
    timed: dict[str, _Timed] = {}
    for name, call in calls.items():
        fastest[name] = min(_warm_up(call, timer), fastest.get(name, math.inf))
        timed[name] = _Timed(call, fastest[name])
    names, placing = list(timed), _Placing(timer, sleep)

    def found() -> dict[str, Measurement]:
        return {name: each.measurement() for name, each in timed.items()}

    deadline = clock() + budget_s
    with collection_held_off():
        for turn in range(max_rounds or MAX_ROUNDS):
            late_s = clock() - deadline
            if turn >= MIN_ROUNDS and late_s >= 0:
                telling = turn >= TELLING_ROUNDS or not _count_unsteady(found(), "latency")
                if telling or late_s >= TELLING_S_EACH * len(names):
                    break
            # What is no longer waited for says little.
            if turn >= MIN_ROUNDS and placing.paused_s >= PLACINGS_S:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                each = timed[name]
                # One call for the caches that the callable before has used; a long one fills them
                # early on.
                if each.fastest < MAX_BLOCK_S:
                    timer.once(each.call)
                most = timer.slowest_block * each.fastest
                block = placing.block(each, most)
                each.add(block, disturbed=block.is_disturbed(most))
                each.throughput.append(round(timer.back_to_back(each.call, block.seconds), DIGITS))
                fastest[name] = each.fastest
    return found()


def interleave_until_steady(
    calls: Mapping[str, Call],
    timer: Timer,
    *,
    budget_s: float,
    objective: str = "latency",
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Measurement]:
    """Time callables in turns; where one is unsteady, all of them again, later and longer.

    Args:
        calls: as for `interleave`.
        timer: likewise.
        budget_s: seconds to spend if all are steady at once.
        objective: the figure that has to be steady.
        deadline: by `clock`; nothing is timed again that would end after it. None for no limit.
        clock: as for `interleave`.
        sleep: waits for seconds; tests pass their own.

    Returns:
        the measurements that have the fewest unsteady ones among them, the latest of those.
    """
    fastest: dict[str, float] = {}
    given: dict[str, Any] = {"fastest": fastest, "clock": clock, "sleep": sleep}
    found = interleave(calls, timer, budget_s=budget_s, **given)
    for attempt, pause_s in enumerate(PAUSES_S, 1):
        unsteady = _count_unsteady(found, objective)
        longer_s = budget_s * 2**attempt
        if not unsteady or (deadline is not None and clock() + pause_s + longer_s > deadline):
            break
        sleep(pause_s)
        again = interleave(
            calls,
            timer,
            budget_s=longer_s,
            max_rounds=MAX_ROUNDS * 2**attempt,
            **given,
        )
        if _count_unsteady(again, objective) <= unsteady:
            found = again
    return found


def _count_unsteady(found: Mapping[str, Measurement], objective: str) -> int:
    return sum(bool(unsteadiness(measurement, objective)) for measurement in found.values())


def unsteadiness(measurement: Measurement, objective: str = "latency") -> str:
    """Why a measurement is not to be compared, in words; empty if it is steady.

    Spread and drift widen the interval of the median. What is held up or interrupted nearly all the
    time may have a narrow one.
    """
    figures = measurement.rounds(objective)
    low, high = median_interval(figures)
    if high > MAX_SPREAD * low:
        return f"its rounds disagree by a factor of {high / low:.1f}"
    calls = figures if objective == "throughput" else measurement.latencies.seconds
    share = sum(each > HELD_UP * min(calls) for each in calls) / len(calls)
    if share > MAX_HELD_UP_SHARE:
        return f"{share:.0%} of its calls took over {HELD_UP:g} times as long as the fastest one"
    if measurement.interrupted > MAX_HELD_UP_SHARE:
        return f"other work interrupted it {measurement.interrupted:.0%} of the time"
    return ""


def least_calls(call_s: float) -> int:
    """Calls that the least rounds of a callable take, with those that warm it up."""
    return 2 + MIN_ROUNDS * (2 if call_s < MAX_BLOCK_S else 1)


def _warm_up(call: Call, timer: Timer) -> float:
    """Seconds of the fastest call of a warm-up that brings caches and clocks up."""
    spent = [timer.once(call) for _ in range(2)]
    while sum(spent) < WARMUP_S and len(spent) < 1000:
        spent.append(timer.once(call))
    return min(spent)


def _timed_calls(timer: Timer, call: Call, count: int) -> _Block:
    """Single calls, fewer if they take too long together."""
    block = _Block()
    began, before = _own_seconds(), _interruptions()
    while len(block.seconds) < count and sum(block.seconds) < MAX_BLOCK_S:
        block.seconds.append(timer.once(call))
        now = _interruptions()
        block.interrupted += now > before
        block.interruptions += now - before
        before = now
    block.own_s = _own_seconds() - began
    block.crowded = _is_crowded()
    return block


def _own_seconds() -> float:
    """Seconds for which threads of this process had a processor."""
    return time.process_time()


def _interruptions() -> int:
    """How often the system has taken a processor from a thread of this process that wanted it."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _change_processor() -> None:
    """Have this thread go on on another processor, where the system allows that."""
    with contextlib.suppress(AttributeError, OSError):
        allowed = os.sched_getaffinity(0)
        here = ctypes.CDLL(None).sched_getcpu()
        others = sorted(allowed - {here}, key=lambda number: (number < here, number))
        if others:
            try:
                os.sched_setaffinity(0, others[:1])
            finally:
                os.sched_setaffinity(0, allowed)


def _is_crowded() -> bool:
    """Whether more threads of all processes want a processor now than there are."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/loadavg", encoding="ascii") as handle:
            return int(handle.read().split()[3].partition("/")[0]) > (os.cpu_count() or 1)
    return False


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def break_even(
    setup_s: float, call_s: float, other_setup_s: float, other_call_s: float
) -> int | None:
    """Calls after which a candidate is faster than another, set-up included; None if never.

    The candidate costs `setup_s + n · call_s`, the other `other_setup_s + n · other_call_s`.
    """
    gain = other_call_s - call_s
    if gain <= 0:
        return None
    return max(0, math.ceil((setup_s - other_setup_s) / gain))


def load_average() -> str:
    """The load of this machine in words; empty where the system has no such figure."""
    with contextlib.suppress(OSError, AttributeError):
        return f"load average {os.getloadavg()[0]:.1f} on {counted(os.cpu_count() or 1, 'core')}"
    return ""


def load_note() -> str | None:
    """A note when other work was running on this machine's cores, else None."""
    with contextlib.suppress(OSError, AttributeError):
        if os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
            return f"{load_average()}: other work was running"
    return None
