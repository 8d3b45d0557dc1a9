"""Times of a call: until it has returned, until the device is done, and the device's alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..evaluation.measurement import (
    HELD_UP,
    Timer,
    collection_held_off,
    median_interval,
)
from .subject import Subject

# Calls to time: at least, at most, and the seconds that they may take together.
_LEAST, _MOST, _LIMIT_S = 5, 60, 0.6
# Rounds in which numbers of threads take turns, and seconds for all of them.
_ROUNDS, _ROUNDS_S = 9, 2.0
# Seconds that the device is kept busy beyond what the host needs, as a factor.
_AHEAD = 2.0


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
        while len(pairs) < _LEAST or (
            len(pairs) < _MOST and time.perf_counter() - began < limit_s
        ):
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
        seconds: the median call by number of threads.
        gain: how many times as fast the best number is, by the median of the rounds' ratios.
        gain_low: the lower end of that median's 95 % interval.
        gain_high: the upper end.
        best: the fastest number of threads.
    """

    current: int
    seconds: dict[int, float]
    best: int
    gain: float
    gain_low: float
    gain_high: float


def time_threads(subject: Subject, cores: int) -> ThreadTimes:
    """Time a call on a CPU with one thread, with half of the cores, with all, and as it is set.

    The number of threads is put back.
    """
    current = torch.get_num_threads()
    numbers = sorted({1, max(1, cores // 2), cores, current})
    rounds: dict[int, list[float]] = {n: [] for n in numbers}
    timer = Timer(subject.device)
    began = time.perf_counter()
    try:
        with subject.mode(), collection_held_off():
            for turn in range(_ROUNDS):
                if turn >= 3 and time.perf_counter() - began > _ROUNDS_S:
                    break
                for n in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
                    torch.set_num_threads(n)
                    _timed(subject, timer)  # Threads are started by the first call.
                    best = min(_timed(subject, timer)[1] for _ in range(3))
                    rounds[n].append(best)
    finally:
        torch.set_num_threads(current)
    return thread_times(current, rounds)


def thread_times(current: int, rounds: dict[int, list[float]]) -> ThreadTimes:
    """What rounds of times say: which number is best, and by how much."""
    seconds = {n: statistics.median(values) for n, values in rounds.items()}
    best = min(seconds, key=lambda n: (seconds[n], n))
    ratios = [a / b for a, b in zip(rounds[current], rounds[best], strict=True)]
    low, high = median_interval(ratios)
    return ThreadTimes(current, seconds, best, statistics.median(ratios), low, high)


def device_seconds(subject: Subject, host_s: float) -> float | None:
    """Seconds that the device needs for a call whose work is all there when it begins.

    The device spins until the host has issued everything, so that kernels run back to back, as in a
    graph. None where that cannot be: the call waits for the device, or issues more than fits in
    the queue.
    """
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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 2_000_000
        for _ in range(2):
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize(device)
        _CYCLES[index] = cycles / (float(begin.elapsed_time(end)) / 1e3)
    return _CYCLES[index]


def least(call: Callable[[], Any], *, limit_s: float, most: int = 50) -> float:
    """Seconds of the fastest of several calls on a CPU."""
    call()
    spent: list[float] = []
    while len(spent) < 2 or (len(spent) < most and sum(spent) < limit_s):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return min(spent)


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
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    block()
    host_s = time.perf_counter() - began
    found = [queued(block, device, host_s) for _ in range(repeats)]
    kept = [seconds for seconds in found if seconds is not None]
    if kept:
        return min(kept) / times
    return _with_events(block, device) / times


def _with_events(call: Callable[[], Any], device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3
