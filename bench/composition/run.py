"""graph(fuse(model)) beside tune()'s fused+graph and graph(model), in half precision on a GPU.

    scripts/bench composition [--out DIR]

Calls with their checks, one after the other, in turns; the device is waited for after each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked
from ..common.timing import times

Row = dict[str, Any]

ROUNDS, CALLS = 12, 30
# What is asked: the composition within this of tune's own candidate.
WITHIN = 1.02
BOTH, TUNED = "graph(fuse)", "tune: fused+graph"
# Swin-T is shown, and no target: its passes lose time there, which `measure=True` sees.
ASKED = ("resnet50", "bert", "convnext_tiny")


def models(device: torch.device) -> Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """Names, models and arguments."""
    from torchvision import models as known
    from transformers import BertConfig, BertModel

    for name in ("resnet50", "convnext_tiny", "swin_t"):
        torch.manual_seed(0)
        image = torch.randn(1, 3, 224, 224, device=device, dtype=torch.float16)
        yield name, getattr(known, name)().eval().to(device).half(), (image,)
    torch.manual_seed(0)
    ids = torch.randint(0, 30_000, (1, 128), device=device)
    yield "bert", BertModel(BertConfig()).eval().to(device).half(), (ids,)


def measured(model: nn.Module, args: tuple[torch.Tensor, ...]) -> Row:
    """Seconds of each way."""
    options = {"isolate": False, "remember": False, "progress": False}
    ways: dict[str, Callable[..., Any]] = {
        "eager": model,
        "graph": gw.graph(model),
        BOTH: gw.graph(gw.fuse(model, args)),
        TUNED: gw.tune(model, args, strategies=["fused+graph"], **options),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, call in ways.items():
                call(*args)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(CALLS):
                    call(*args)
                    torch.cuda.synchronize()
                found[name].append(time.perf_counter() - began)
    row = times(found, CALLS)
    pairs = zip(row[BOTH]["samples"], row[TUNED]["samples"], strict=True)
    return {"ways": row, "ratio": statistics.median(a / b for a, b in pairs)}


def to_markdown(result: Row) -> str:
    """What docs/results/fusion.md shows of it."""
    ways = ("eager", "graph", BOTH, TUNED)
    table = [["model", *ways, f"{BOTH} of {TUNED}"]]
    for name, model in result["models"].items():
        figures = [f"{model['ways'][way]['median'] * 1e3:.3f}" for way in ways]
        table.append([name, *figures, f"{model['ratio']:.3f}"])
    return "\n".join(
        [
            "### `graph(fuse(model))` compared with `tune`'s `fused+graph`, ms",
            "",
            "Synchronised calls in half precision, in turns: both are the same graph.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path) -> int:
    """Measure all models and write; the number of targets that are missed."""
    device = torch.device("cuda")
    rows = {name: measured(model, args) for name, model, args in models(device)}
    result = {
        "schema": SCHEMA,
        "schema_version": 2,
        "benchmark": "composition",
        "commit": commit(),
        "environment": environment(device),
        "models": rows,
        "targets": [
            {
                "target": f"{name}: {BOTH} within 2 % of {TUNED}",
                "figure": rows[name]["ratio"],
                "met": rows[name]["ratio"] <= WITHIN,
            }
            for name in ASKED
        ],
    }
    where = out / "composition.json"
    write(where, result)
    for name, row in rows.items():
        figures = ", ".join(f"{w} {each['median'] * 1e6:.1f}" for w, each in row["ways"].items())
        print(f"{name}: {figures} µs; ratio {row['ratio']:.3f}")
    print(f"wrote {where}")
    return sum(not target["met"] for target in result["targets"])
