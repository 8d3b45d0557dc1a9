"""Calls timed in turns, on a GPU by its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphwright.evaluation.measurement import DIGITS, Samples

Call = Callable[[], object]

WARMUPS = 5


def in_turns(ways: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, round by round, the first of a round another each time."""
    names = list(ways)
    for _ in range(WARMUPS):
        for name in names:
            ways[name]()
    if not torch.cuda.is_available():
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in _turned(names, number):
                began = time.perf_counter()
                ways[name]()
                found[name].append(time.perf_counter() - began)
        return found
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for number in range(rounds):
        for name in _turned(names, number):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            ways[name]()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) / 1e3 for a, b in pairs] for n, pairs in events.items()}


def _turned(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


def times(samples: Mapping[str, list[float]], repeats: int) -> dict[str, Any]:
    """Seconds of a call, of each way: every sample, the median and half of the middle range."""
    found = {}
    for name, seconds in samples.items():
        each = [round(value / repeats, DIGITS + 2) for value in seconds]
        kept = Samples(tuple(each))
        found[name] = {"median": kept.median, "spread": kept.spread, "samples": each}
    return found
