"""Calls that graph() has to refuse, beside eager.

    scripts/bench refused [--out DIR] [--quick] [--changing]

A module of 300 submodules whose forward counts its calls, and on a GPU torchvision's RAFT and two
of its detection models. Medians of calls in turns; the mean over all calls includes every attempt
at a capture. A result of its own is for calls that find the model changed each time, whose captures
would never pay off.
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
from graphwright.graphs import capture_budget
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked

Row = dict[str, Any]
Args = tuple[Any, ...]

SUBMODULES, CALLS, QUICK_CALLS, LARGE_CALLS = 300, 10_000, 300, 30
# What is asked of the median and of the mean: a factor, and seconds on top of it.
MEDIAN, MEAN, ON_TOP_S = 1.03, 1.05, 10e-6
# Calls that find the model changed: before any is timed, in a block, and blocks; and what is asked.
FIRST, BLOCK, BLOCKS, QUICK_BLOCKS = 20, 300, 12, 2
CHANGED = 1.1


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


class LastSize(nn.Module):
    """Keeps a table for the size of the last call, as YOLO its grid."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.table, self.size = torch.empty(0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.size != len(x):
            self.size = len(x)
            self.table = torch.arange(len(x), device=x.device).float().unsqueeze(1)
        y: torch.Tensor = self.linear(x) + self.table
        return y


class Stepping(nn.Module):
    """Reads an attribute that the caller, or a hook, may change between calls."""

    def __init__(self, *, hook: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
        self.step = 0
        if hook:
            self.register_forward_pre_hook(lambda module, args: step_on(module))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x) * (1 + self.step)
        return y


def step_on(model: Any) -> None:
    model.step += 1


def move_weight(model: Any) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.clone()


def replace_weight(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().clone())


def changing(device: torch.device) -> Iterator[tuple[str, list[Callable[[int], object]]]]:
    """Names; and for each what makes the n-th call eagerly, and with graphs allowed."""

    def inference(sizes: int, each: int, model: Any) -> Callable[[int], object]:
        xs = [torch.randn(4 * (n + 1), 16, device=device) for n in range(sizes)]

        def call(n: int) -> object:
            with torch.no_grad():
                return model(xs[n // each % sizes])

        return call

    for sizes, each in ((2, 1), (2, 3), (3, 1)):
        models = [LastSize().eval().to(device) for _ in range(2)]
        calls = [inference(sizes, each, model) for model in (models[0], gw.graph(models[1]))]
        yield f"graph: a table for the last of {sizes} sizes, {each} calls each", calls

    def training(change: Callable[[Any], None], model: Any) -> Callable[[int], object]:
        x = torch.randn(8, 64, device=device)

        def call(n: int) -> object:
            change(model)
            return model(x).sum().backward()

        return call

    for name, change, hook in (
        ("an attribute changes", step_on, False),
        ("a hook sets an attribute", lambda model: None, True),
        ("a weight is moved", move_weight, False),
        ("a weight is replaced", replace_weight, False),
    ):
        models = [Stepping(hook=hook).to(device) for _ in range(2)]
        gw.make_graphed_callables(models[1], (torch.randn(8, 64, device=device),))
        yield f"make_graphed_callables: {name}", [training(change, model) for model in models]


class OwnTime:
    """The time that the graphed calls take, as if nothing ran beside them: the budget's clock."""

    def __init__(self) -> None:
        self.others_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self.others_s


OWN_TIME = OwnTime()


def changed(calls: list[Callable[[int], object]], blocks: int) -> Row:
    """Seconds of a call in blocks, eager and graphed in turns, after the first calls."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for call in calls:
        for n in range(FIRST):
            call(n)
    found: list[list[float]] = [[], []]
    for block in range(blocks):
        for call, seconds in zip(calls, found, strict=True):
            wait()
            began = time.perf_counter()
            for n in range(FIRST + block * BLOCK, FIRST + (block + 1) * BLOCK):
                call(n)
            wait()
            took = time.perf_counter() - began
            seconds.append(took / BLOCK)
            if call is calls[0]:  # Eager's time is no time in which graphs may be captured.
                OWN_TIME.others_s += took
    ratios = [mine / its for its, mine in zip(*found, strict=True)]
    return {
        "median_s": dict(zip(("eager", "graph"), map(statistics.median, found), strict=True)),
        "ratio": statistics.median(ratios),
        "ratio_of_sums": sum(found[1]) / sum(found[0]),
        "ratios": ratios,
    }


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
    """What is asked of the models, and whether it holds; of the mean with enough calls alone."""
    found: list[Row] = []
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


def targets_of_changing(rows: dict[str, Row]) -> list[Row]:
    """What is asked of calls that find the model changed, and whether it holds."""
    return [
        {
            "target": f"{name}: at most {CHANGED:g} of eager's",
            "figure": row["ratio"],
            "met": row["ratio"] <= CHANGED,
        }
        for name, row in rows.items()
    ]


def to_markdown(result: Row) -> str:
    """What docs/results/breaks.md shows of it."""
    if "changing" in result:
        return "\n".join([*_of_changing(result["changing"]), machine(result["environment"]), ""])
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


def _of_changing(rows: dict[str, Row]) -> list[str]:
    table = [["each call finds another state", "eager, µs", "graphed, µs", "ratio", "in all"]]
    for name, row in rows.items():
        eager, graph = (row["median_s"][way] for way in ("eager", "graph"))
        figures = [f"{eager * 1e6:.1f}", f"{graph * 1e6:.1f}", f"{row['ratio']:.3f}"]
        table.append([name, *figures, f"{row['ratio_of_sums']:.3f}"])
    return [
        "### Calls whose captures would not pay off",
        "",
        f"After the first {FIRST} calls, medians of {BLOCK} calls in turns with eager; *in all* "
        "is the ratio of the sums, with every look and every capture that is tried again.",
        "",
        *marked(table),
        "",
    ]


def benchmark(out: Path, *, quick: bool, changing_only: bool) -> int:
    """Measure all models and write; the number of targets that are missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # They say that calls are eager.
        torch.manual_seed(0)
        blocks = QUICK_BLOCKS if quick else BLOCKS
        capture_budget.CLOCK = OWN_TIME
        states = {name: changed(calls, blocks) for name, calls in changing(device)}
        capture_budget.CLOCK = time.perf_counter
        missed = _write(
            out / "refused-changing.json",
            {"changing": states, "targets": targets_of_changing(states)},
            device,
            quick,
        )
        if changing_only:
            return missed
        rows = {}
        for name, make, args, calls in models(device):
            torch.manual_seed(0)
            model = make().eval().to(device)
            rows[name] = measured(model, args, QUICK_CALLS if quick and calls == CALLS else calls)
    found = {"models": rows, "targets": targets(rows)}
    return missed + _write(out / "refused.json", found, device, quick)


def _write(where: Path, found: Row, device: torch.device, quick: bool) -> int:
    """Write a result and show its targets; how many are missed."""
    head = {"schema": SCHEMA, "schema_version": 2, "benchmark": "refused", "commit": commit()}
    write(where, head | {"quick": quick, "environment": environment(device)} | found)
    for target in found["targets"]:
        met = "yes" if target["met"] else "NO"
        print(f"{target['target']:65} {target['figure']:6.3f}  {met}")
    print(f"wrote {where}", flush=True)
    return sum(not target["met"] for target in found["targets"])
