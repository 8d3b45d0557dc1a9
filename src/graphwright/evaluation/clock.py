"""The clock: seconds of one call, of the fastest of several, and of several in turns.

All times of calls are taken here; `measurement` makes rounds of them, and says what is noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")
Call = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished what was issued; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The result of a call and its seconds by the host's clock; the device is idle before it.

    Args:
        call: is finished when the device is.
        device: where it runs.
    """
    synchronize(device)
    began = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - began


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds of a call, as `timed`."""
    return timed(call, device)[1]


def event_seconds(call: Call, device: torch.device) -> float:
    """Seconds of what a call issues to a GPU, between two events of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def fastest_s(
    call: Call,
    *,
    limit_s: float,
    most: int = 50,
    least: int = 2,
    warmup: int = 0,
    ready: Callable[[], object] = lambda: None,
) -> float:
    """Seconds that the host takes for the fastest of several calls.

    Args:
        call: it is not waited for where a device works on after it.
        limit_s: seconds of all calls, about.
        most: calls at most.
        least: calls at least.
        warmup: calls before these, which are not counted.
        ready: runs before each, and is not timed.
    """
    for _ in range(warmup):
        call()
    spent: list[float] = []
    while len(spent) < least or (len(spent) < most and sum(spent) < limit_s):
        ready()
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return min(spent)


def medians_in_turns(
    prepared: Sequence[Callable[[], Call]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 1,
) -> list[float]:
    """The median seconds of several calls, which take turns.

    Args:
        prepared: make a call for each round; that is not timed.
        device: where they run.
        rounds: of all of them.
        warmup: rounds before these, which are not counted.
    """
    found: list[list[float]] = [[] for _ in prepared]
    for turn in range(warmup + rounds):
        for prepare, seconds in zip(prepared, found, strict=True):
            taken = seconds_of(prepare(), device)
            if turn >= warmup:
                seconds.append(taken)
    return [statistics.median(each) for each in found]
