"""Times of a call: until it has returned, until the device is done, and the device's alone."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..evaluation.clock import event_seconds, fastest_s, synchronize
from ..evaluation.garbage_collection import collection_held_off
from ..evaluation.measurement import HELD_UP, Timer, median_interval
from .subject import Subject

# Calls to time: at least, at most, and the seconds that they may take together.
_LEAST, _MOST, _LIMIT_S = 3, 60, 0.6
# Rounds in which numbers of threads take turns, and seconds for all of them.
_ROUNDS, _ROUNDS_S = 9, 1.5
# Calls of each in a round; one alone where a call takes longer than so many seconds.
_TRIES, _LONG_S = 3, 0.05
# A number of threads that takes so many times as long as the best one is not timed again.
_HOPELESS = 3.0
# Where other processes use this share of the processors, times on several threads prove little.
CROWDED = 0.1
# Parts of a second that Linux counts processors' time in.
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# Seconds that the device is kept busy beyond what the host needs, as a factor.
_AHEAD = 2.0
# The device is not kept busy for a host that needs more seconds than this.
_LONG_HOST_S = 0.25


@dataclass(frozen=True)
class CallTimes:
    """Seconds of single synchronised calls.

    Attributes:
        call_s: until the device is done, the median.
        low_s: the lower end of the median's 95 % interval.
        high_s: the upper end.
        fastest_s: of the fastest call.
        host_s: until the call has returned, the median.
        calls: how many were timed.
    """

    call_s: float
    low_s: float
    high_s: float
    fastest_s: float
    host_s: float
    calls: int


def time_calls(subject: Subject, *, limit_s: float = _LIMIT_S) -> CallTimes:
    """Time single calls; the device has nothing to do when one begins.

    Calls that other work on the machine held up are left out, as in `evaluation.measurement`.
    """
    timer = Timer(subject.device)
    pairs: list[tuple[float, float]] = []
    with subject.mode(), collection_held_off():
        for _ in range(2):
            subject.prepared()()
        timer.synchronize()
        began = time.perf_counter()
        while len(pairs) < _LEAST or (len(pairs) < _MOST and time.perf_counter() - began < limit_s):
            pairs.append(_timed(subject, timer))
    fastest = min(done for _, done in pairs)
    kept = [pair for pair in pairs if pair[1] <= HELD_UP * fastest]
    done = [pair[1] for pair in kept]
    low, high = median_interval(done)
    host_s = statistics.median(returned for returned, _ in kept)
    return CallTimes(statistics.median(done), low, high, fastest, host_s, len(pairs))


def _timed(subject: Subject, timer: Timer) -> tuple[float, float]:
    call = subject.prepared()
    timer.synchronize()
    began = time.perf_counter()
    result = call()
    returned = time.perf_counter() - began
    timer.synchronize()
    done = time.perf_counter() - began
    del result
    return returned, done


@dataclass(frozen=True)
class ThreadTimes:
    """Seconds of a call by the number of PyTorch's threads.

    Attributes:
        current: the number that is set.
        seconds: the fastest call by number of threads, as other work only ever adds; it adds more
            to calls with more threads.
        best: the fastest number of threads.
        gain: how many times as fast that is, by the fastest calls.
        gain_low: the lower end of the 95 % interval of the median ratio of the rounds, or the gain.
        gain_high: the upper end, or the gain.
        cores: processors that the process may use.
        others: the share of them that other processes used meanwhile.
    """

    current: int
    seconds: dict[int, float]
    best: int
    gain: float
    gain_low: float
    gain_high: float
    cores: int
    others: float = 0.0


def time_threads(subject: Subject, cores: int) -> ThreadTimes:
    """Time a call on a CPU with one thread, with half of the cores, with all, and as it is set.

    The number of threads is put back.
    """
    current = torch.get_num_threads()
    numbers = sorted({1, max(1, cores // 2), cores, current})
    rounds: list[dict[int, float]] = []
    timer = Timer(subject.device)
    load = OtherWork()
    began = time.perf_counter()
    try:
        with subject.mode(), collection_held_off():
            for turn in range(_ROUNDS):
                if turn >= 2 and time.perf_counter() - began > _ROUNDS_S:
                    break
                found: dict[int, float] = {}
                for n in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
                    torch.set_num_threads(n)
                    first = _timed(subject, timer)[1]  # Threads are started by the first call.
                    tries = _TRIES if first < _LONG_S else 1
                    found[n] = min(_timed(subject, timer)[1] for _ in range(tries))
                rounds.append(found)
                # What is far from the fastest is not timed again.
                least_s = min(found.values())
                numbers = [n for n in numbers if n == current or found[n] <= _HOPELESS * least_s]
    finally:
        torch.set_num_threads(current)
    return thread_times(current, rounds, cores=cores, others=load.share())


def thread_times(
    current: int, rounds: Sequence[Mapping[int, float]], *, cores: int, others: float = 0.0
) -> ThreadTimes:
    """What rounds of times say: which number of threads is best, and by how much.

    Args:
        current: the number that is set, timed in every round.
        rounds: seconds by number of threads.
        cores: processors that the process may use.
        others: the share of them that other processes used meanwhile.
    """
    by_number: dict[int, list[float]] = {}
    for found in rounds:
        for n, spent in found.items():
            by_number.setdefault(n, []).append(spent)
    seconds = {n: min(values) for n, values in by_number.items()}
    best = min(seconds, key=lambda n: (seconds[n], n))
    ratios = [found[current] / found[best] for found in rounds if best in found]
    low, high = median_interval(ratios)
    gain = seconds[current] / seconds[best]
    return ThreadTimes(current, seconds, best, gain, min(low, gain), max(high, gain), cores, others)


class OtherWork:
    """How much of the processors other processes use, from now on."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float:
        """The share since the beginning, of the processors that this process may use.

        0 where the system does not say.
        """
        wall, busy, own = (b - a for a, b in zip(self._began, self._now(), strict=True))
        return min(1.0, max(0.0, (busy - own) / wall)) if wall > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds that there were, that were in use, and that this process used, of all cores."""
        if not hasattr(os, "sched_getaffinity"):
            return 0.0, 0.0, 0.0
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        wall = busy = 0.0
        try:
            with open("/proc/stat", encoding="ascii") as handle:
                for line in handle:
                    name, *counts = line.split()
                    if name in mine:
                        # user, nice, system, idle, waiting for input, interrupts, stolen (proc(5))
                        ticks = [float(count) for count in counts[:8]]
                        wall += sum(ticks)
                        busy += sum(ticks) - ticks[3] - ticks[4]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, 0.0
        return wall / _TICKS, busy / _TICKS, time.process_time()


def device_seconds(subject: Subject, host_s: float) -> float | None:
    """Seconds that the device needs for a call whose work is all there when it begins.

    The device spins until the host has issued everything, so that kernels run back to back, as in a
    graph. None where that cannot be: the call waits for the device, issues more than fits in the
    queue, or takes the host too long.
    """
    if host_s > _LONG_HOST_S:
        return None
    found = []
    with subject.mode():
        for _ in range(3):
            call = subject.prepared()
            seconds = queued(call, subject.device, host_s)
            if seconds is None:
                return None
            found.append(seconds)
    return statistics.median(found)


def queued(call: Callable[[], Any], device: torch.device, host_s: float) -> float | None:
    """Seconds of a call on a device that begins once the host has issued it; None if it waits."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(_AHEAD * (host_s + 2e-4) * _cycles_per_second(device)))
        begin.record()
        result = call()
        waited = begin.query()
        end.record()
        torch.cuda.synchronize(device)
        del result
    return None if waited else float(begin.elapsed_time(end)) / 1e3


_CYCLES: dict[int, float] = {}


def _cycles_per_second(device: torch.device) -> float:
    """Cycles of `torch.cuda._sleep` in a second, as measured once in a process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _CYCLES:
        cycles = 2_000_000
        sleep = functools.partial(torch.cuda._sleep, cycles)
        event_seconds(sleep, device)  # The first one is slower.
        _CYCLES[index] = cycles / event_seconds(sleep, device)
    return _CYCLES[index]


def back_to_back(
    call: Callable[[], Any], device: torch.device, *, times: int, repeats: int = 3
) -> float:
    """Seconds of a call on a GPU among equal ones, the least of several blocks; hides the host.

    Args:
        call: issues the work.
        device: a GPU.
        times: calls in a block; fewer than fit in the queue of the device.
        repeats: blocks.
    """

    def block() -> None:
        for _ in range(times):
            call()

    call()
    synchronize(device)
    host_s = fastest_s(block, limit_s=0.0, least=1)
    found = [queued(block, device, host_s) for _ in range(repeats)]
    kept = [seconds for seconds in found if seconds is not None]
    if kept:
        return min(kept) / times
    return event_seconds(block, device) / times
