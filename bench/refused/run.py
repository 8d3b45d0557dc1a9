"""Calls that graph() has to refuse, beside eager.

    scripts/bench refused [--out DIR] [--quick]

A module of 300 submodules whose forward counts its calls, and on a GPU torchvision's RAFT and two
of its detection models. Medians of calls in turns; the mean over all calls includes every attempt
at a capture.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked

Row = dict[str, Any]
Args = tuple[Any, ...]

SUBMODULES, CALLS, QUICK_CALLS, LARGE_CALLS = 300, 10_000, 300, 30
# What is asked of the median and of the mean: a factor, and seconds on top of it.
MEDIAN, MEAN, ON_TOP_S = 1.03, 1.05, 10e-6


class Counting(nn.Module):
    """Changes an attribute at every call, so that no graph can answer it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(SUBMODULES)))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.layers(x) * self.calls
        return y


def models(device: torch.device) -> Iterator[tuple[str, Callable[[], nn.Module], Args, int]]:
    """Names, what makes the models, their arguments, and how many calls are enough."""
    yield f"{SUBMODULES} submodules", Counting, (torch.randn(4, 8, device=device),), CALLS
    if device.type != "cuda":
        return
    from torchvision import models as known

    image = [torch.rand(3, 480, 640, device=device)]
    frames = tuple(torch.rand(1, 3, 360, 520, device=device) for _ in range(2))
    yield "raft_large", known.optical_flow.raft_large, frames, LARGE_CALLS
    for name in ("fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn"):
        make = getattr(known.detection, name)
        yield name, lambda make=make: make(weights_backbone=None), (image,), LARGE_CALLS


def measured(model: nn.Module, args: Args, calls: int) -> Row:
    """Seconds of each call, eager and graphed in turns, from the very first one on."""
    graphed = gw.graph(model)
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    found: dict[str, list[float]] = {"eager": [], "graph": []}
    with torch.no_grad():
        model(*args)
        for _ in range(calls):
            for name, call in (("eager", model), ("graph", graphed)):
                wait()
                began = time.perf_counter()
                call(*args)
                wait()
                found[name].append(time.perf_counter() - began)
    return {
        "calls": calls,
        "median_s": {name: statistics.median(each) for name, each in found.items()},
        "mean_s": {name: statistics.fmean(each) for name, each in found.items()},
        "first_s": found["graph"][:8],
        "eager": dict(graphed.statistics.eager),
    }


def targets(rows: dict[str, Row]) -> list[Row]:
    """What is asked of the figures, and whether it holds; of the mean with enough calls alone."""
    found = []
    for name, row in rows.items():
        asked = [("median", MEDIAN)] + [("mean", MEAN)] * (row["calls"] == CALLS)
        for figure, factor in asked:
            seconds = row[f"{figure}_s"]
            met = seconds["graph"] <= factor * seconds["eager"] + ON_TOP_S
            text = f"{name}: {figure} at most {factor:g} of eager's and 10 µs"
            found.append(
                {"target": text, "figure": seconds["graph"] / seconds["eager"], "met": met}
            )
    return found


def to_markdown(result: Row) -> str:
    """What docs/results/breaks.md shows of it."""
    table = [["model", "calls", "eager", "graph", "ratio", "mean of graph", "slowest first call"]]
    for name, model in result["models"].items():
        eager, graph = (model["median_s"][way] for way in ("eager", "graph"))
        row = [name, f"{model['calls']:,}", f"{eager * 1e3:.2f}", f"{graph * 1e3:.2f}"]
        row += [f"{graph / eager:.2f}", f"{model['mean_s']['graph'] * 1e3:.2f}"]
        row += [f"{max(model['first_s']) * 1e3:,.0f}"]
        table.append(row)
    return "\n".join(
        [
            "### Calls that graph() must divide or refuse, ms",
            "",
            "Medians of calls in turns. The *mean* includes the first calls, which try a capture. "
            "A module of 300 submodules counts its calls; the others are models of torchvision.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path, *, quick: bool) -> int:
    """Measure all models and write; the number of targets that are missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # They say that calls are eager.
        for name, make, args, calls in models(device):
            torch.manual_seed(0)
            model = make().eval().to(device)
            rows[name] = measured(model, args, QUICK_CALLS if quick and calls == CALLS else calls)
    result = {
        "schema": SCHEMA,
        "schema_version": 2,
        "benchmark": "refused",
        "commit": commit(),
        "quick": quick,
        "environment": environment(device),
        "models": rows,
        "targets": targets(rows),
    }
    where = out / "refused.json"
    write(where, result)
    for target in result["targets"]:
        met = "yes" if target["met"] else "NO"
        print(f"{target['target']:65} {target['figure']:6.3f}  {met}")
    print(f"wrote {where}")
    return sum(not target["met"] for target in result["targets"])
