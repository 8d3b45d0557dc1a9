"""tune() beside a load: how far its ratios are off those of a quiet machine, and what it marks.

The MLP of examples/ is tuned once while nothing else runs, then some times beside busy processes.
A ratio that is off by more than LIMIT has to be of a row that is marked as unsteady.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import graphwright as gw
from graphwright.report.environment import environment
from graphwright.report.report import Report
from graphwright.report.result import COMPILE_DEFAULT, EAGER

from ..cases import mlp
from ..common.record import commit, write
from ..common.rendering import machine, marked

SCHEMA = "graphwright.bench.busy"
# A ratio may be off by this factor.
LIMIT = 1.5
# The share of the busy runs that may have marked rows.
MARKED_SHARE = 0.3

Ratios = dict[str, dict[str, float]]


def ratios(report: Report) -> Ratios:
    """How many times as fast as eager and as torch.compile's default each row is said to be."""
    found: Ratios = {}
    for other in (EAGER, COMPILE_DEFAULT):
        for row in report.rows:
            speed = report.speedup(row, other)
            if speed is not None:
                found.setdefault(other, {})[row.strategy] = speed[0]
    return found


def deviations(quiet: Ratios, busy: Ratios) -> dict[str, float]:
    """By which factor each ratio of a busy run is off the quiet one's, 1 or more, by its name."""
    return {
        f"{name} vs {other}": max(value / quiet[other][name], quiet[other][name] / value)
        for other, values in busy.items()
        for name, value in values.items()
        if name in quiet.get(other, {})
    }


def problems(quiet: Mapping[str, Any], busy: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the runs show that must not be; empty if all is well."""
    found = [f"quiet: {name} is marked as unsteady" for name in quiet["unsteady"]]
    for number, run in enumerate(busy, 1):
        for name, off in deviations(quiet["ratios"], run["ratios"]).items():
            if off > LIMIT:
                found.append(f"busy run {number}: {name} is off by a factor of {off:.2f}")
    marked = sum(bool(run["unsteady"]) for run in busy)
    if marked > MARKED_SHARE * len(busy):
        found.append(f"{marked} of {len(busy)} busy runs have rows that are marked as unsteady")
    return found


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def tuned() -> dict[str, Any]:
    """One run of tune(), all from the beginning."""
    torch._dynamo.reset()
    model, args = mlp()
    report = gw.tune(model, args, remember=False, progress=False).report
    return {
        "ratios": ratios(report),
        "unsteady": {row.strategy: row.unsteady for row in report.rows if row.unsteady},
        "chosen": report.chosen,
        "reason": report.reason,
        "seconds": report.seconds,
        "load": os.getloadavg()[0],
    }


def benchmark(out: Path, *, runs: int, processes: int) -> int:
    """Tune once alone and then beside the load; the number of things that must not be."""
    print(f"quiet: load average {os.getloadavg()[0]:.1f} before it", flush=True)
    quiet = tuned()
    print(_line("quiet", quiet, quiet), flush=True)
    busy: list[dict[str, Any]] = []
    with busy_processes(processes):
        for number in range(1, runs + 1):
            busy.append(tuned())
            print(_line(f"busy {number}", quiet, busy[-1]), flush=True)
    found = problems(quiet, busy)
    where = out / "busy-cpu.json"
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "busy",
        "commit": commit(),
        "environment": environment(torch.device("cpu")),
        "processes": processes,
        "quiet": quiet,
        "busy": busy,
        "problems": found,
    }
    write(where, result)
    print("\n".join(found) or "All is as it must be.")
    print(f"wrote {where}")
    return len(found)


def furthest(quiet: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[str, float]:
    """Which ratio of a run is furthest off the quiet one's, and by which factor."""
    off = deviations(quiet["ratios"], run["ratios"])
    return max(off.items(), key=lambda item: item[1], default=("", 1.0))


def to_markdown(result: Mapping[str, Any]) -> str:
    """The runs as a table, and what they show that must not be."""
    quiet = result["quiet"]
    table = [
        ["", "chosen", "seconds", "load average", "furthest off", "by a factor of", "unsteady"]
    ]
    for number, run in enumerate([quiet, *result["busy"]]):
        name, off = furthest(quiet, run) if number else ("–", 1.0)
        row = [f"run {number}" if number else "quiet", run["chosen"], f"{run['seconds']:.0f}"]
        row += [f"{run['load']:.1f}", name, f"{off:.2f}" if number else "–"]
        table.append([*row, ", ".join(run["unsteady"]) or "none"])
    return "\n".join(
        [
            f"An MLP of two layers, tuned on the CPU once while nothing else ran, then beside "
            f"{result['processes']} processes that only compute. *Furthest off* is the ratio that "
            "differs most from the quiet one's. What is marked as unsteady has no ratio.",
            "",
            *marked(table),
            "",
            "; ".join(result["problems"]) + "." if result["problems"] else "Every target was met.",
            "",
            machine(result["environment"]),
            "",
        ]
    )


def _line(name: str, quiet: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """One run in a line, for whoever watches."""
    worst, off = furthest(quiet, run)
    text = f"{name}: {run['chosen']} chosen, {run['seconds']:.0f} s, load {run['load']:.1f}"
    if run is not quiet and worst:
        text += f"; furthest off: {worst}, {off:.2f}"
    return f"{text}; unsteady: {', '.join(run['unsteady']) or 'none'}"
