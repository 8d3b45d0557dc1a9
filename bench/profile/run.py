"""What profile() predicts beside what is then measured, on twenty models and ten unseen ones.

    scripts/bench profile [--out DIR] [--only MODEL ...] [--seconds S] [--quick]

Calls of the model, of its graph, of a graph of it fused and of a graph of it in bfloat16 are timed
in turns, some rounds before each of three profiles of the model, since the host's speed changes
within seconds: each profile is compared with the rounds before it. A profile captures nothing of
the model. The gain of a plain graph is that over the model; those of fusion and precision are over
the graph. Some constants of the predictions were fitted to the twenty models; ten others, drawn by
a seed, show what these are worth.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import first_line
from graphwright.evaluation.measurement import Measurement, Timer, interleave
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked
from .models import MODELS, TINY, built, unseen

Row = dict[str, Any]

# What is asked: the predicted gain of a graph this near to the measured one, on so many of the
# models; measured gains inside of ranges, on as many; ranges at most so wide; seconds of profile().
NEAR, WIDEST, LIMIT_S = 0.15, 1.5, 10.0
ASKED = 16 / 20
# Profiles of a model, and seconds of timing before each.
TURNS, TIMING_S, QUICK_S = 3, 0.5, 0.2
EAGER, GRAPH, FUSED, BF16 = "eager", "graph", "fused+graph", "bf16+graph"
# Ranges by the way that they are about.
RANGES = {FUSED: "fusion", BF16: "bf16"}


def benchmark(
    out: Path, *, only: Sequence[str] = (), seconds: float = 540.0, quick: bool = False
) -> int:
    """Every model until the time is up; the number of targets that are missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drawn = {} if quick else unseen()
    names = list(only) or [*(TINY if quick else MODELS), *drawn]
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "profile",
        "commit": commit(),
        "quick": quick,
        "environment": environment(device),
        "models": {},
    }
    where = out / "profile.json"
    began = time.monotonic()
    if not quick:
        built_first = nn.Linear(8, 8).to(device)
        gw.profile(built_first, (torch.randn(4, 8, device=device),))  # The roofs are measured here.
    for name in names:
        if time.monotonic() - began > seconds:
            result["models"][name] = {"failed": "the time was up"}
            continue
        try:
            row = measured(name, device, budget_s=QUICK_S if quick else TIMING_S)
        except Exception as error:
            row = {"failed": first_line(error)}
        row["unseen"] = name in drawn
        result["models"][name] = row
        result["targets"] = targets(result["models"])
        write(where, result)
        print(line(name, row), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(where, result)
    for target in result.get("targets", []):
        print(f"{'met' if target['met'] else 'missed'}: {target['target']}: {target['found']}")
    print(f"wrote {where}")
    return sum(not target["met"] for target in result.get("targets", []))


def measured(name: str, device: torch.device, *, budget_s: float) -> Row:
    """Predictions and measurements of one model."""
    model, args, kwargs = built(name, device)
    row: Row = {"missing": {}}
    ways: dict[str, Callable[[], object]] = {EAGER: lambda: model(*args, **kwargs)}
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        GRAPH: lambda: _graphed(model, args, kwargs),
        FUSED: lambda: _graphed(gw.fuse(model, args, kwargs), args, kwargs),
        BF16: lambda: _in_bf16(model, args, kwargs),
    }
    found: list[dict[str, Measurement]] = []
    profiles: list[gw.Profile] = []
    with torch.no_grad():
        model(*args, **kwargs)
        for way, make in makers.items():
            try:
                ways[way] = make()
                ways[way]()
            except Exception as error:
                ways.pop(way, None)
                row["missing"][way] = first_line(error)
        for _ in range(TURNS):
            found.append(interleave(ways, Timer(device), budget_s=budget_s))
            profiles.append(gw.profile(model, args, kwargs))
    row |= _predicted(profiles)
    row["samples"] = {way: [each[way].latency for each in found] for way in ways}
    row["latency_s"] = {
        way: statistics.median(s for each in found for s in each[way].rounds("latency"))
        for way in ways
    }
    row["gains"] = {}
    for way in ways:
        base = EAGER if way == GRAPH else GRAPH
        if way != EAGER and base in ways:
            ratios = [ratio for each in found for ratio in each[base].ratios(each[way])]
            row["gains"][way] = statistics.median(ratios)
    return row


def _predicted(profiles: Sequence[gw.Profile]) -> Row:
    """What some profiles of a model say, the medians."""
    last = profiles[-1]
    remedies = {}
    for remedy in last.remedies:
        same = [profile.remedy(remedy.name) for profile in profiles]
        likely = [each.likely for each in same if each.likely is not None]
        ranges = [each.under_graph for each in same if each.under_graph is not None]
        remedies[remedy.name] = remedy.to_dict() | {
            "likely": statistics.median(likely) if likely else None,
            "under_graph": [statistics.median(ends) for ends in zip(*ranges, strict=True)] or None,
        }
    return {
        "causes": list(map(str, last.verdict.causes)),
        "seconds": max(profile.seconds for profile in profiles),
        "remedies": remedies,
        "figures": [profile.figures.to_dict() for profile in profiles],
        "notes": list(last.notes),
    }


def _graphed(model: nn.Module, args: Any, kwargs: Any) -> Callable[[], object]:
    fast = gw.graph(model)
    for _ in range(3):
        fast(*args, **kwargs)
    return lambda: fast(*args, **kwargs)


def _in_bf16(model: nn.Module, args: Any, kwargs: Any) -> Callable[[], object]:
    def half(value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16() if value.is_floating_point() else value

    args, kwargs = pytree.tree_map_only(torch.Tensor, half, (args, kwargs))
    return _graphed(copy.deepcopy(model).bfloat16(), args, kwargs)


def to_markdown(result: dict[str, Any]) -> str:
    """What docs/results/profile.md shows."""
    table = [["model", "bound by", "graph", "measured", "its time", *RANGES.values()]]
    for place in range(len(RANGES)):
        table[0].insert(6 + 2 * place, "measured")
    for name, row in result["models"].items():
        pair, spent = beside(row), beside(row, gain=False)
        cells = [f"{name} (drawn)" if row["unseen"] else name, " or ".join(row["causes"])]
        likely = row["remedies"]["graph"]["likely"]
        cells += ["–" if likely is None else f"{likely:.2f}×", _times(row["gains"].get(GRAPH))]
        cells.append("–" if pair is None or spent is None else f"{spent:.2f}")
        for way, remedy in RANGES.items():
            span = row["remedies"][remedy]["under_graph"]
            cells.append("–" if span is None else f"{span[0]:.2f}–{span[1]:.2f}×")
            cells.append(_times(row["gains"].get(way)))
        table.append(cells)
    met = [
        f"- {each['target']}: {each['found']}{'' if each['met'] else ' (missed)'}"
        for each in result["targets"]
    ]
    return "\n".join(
        [
            "Predicted gains beside measured ones; *its time* is the predicted time of a graph "
            "over the measured one. The models marked *drawn* were drawn by a seed; constants of "
            "the predictions were fitted to the others. The host of this machine is twice as fast "
            "in some seconds as in others, and gains over eager vary with it.",
            "",
            *marked(table),
            "",
            *met,
            "",
            machine(result["environment"]),
            "",
        ]
    )


def _times(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:.2f}×"


def targets(models: dict[str, Row]) -> list[dict[str, Any]]:
    """What is asked, with what was found and whether that meets it."""
    known = [row for row in models.values() if "gains" in row and not row.get("unseen")]
    others = [row for row in models.values() if "gains" in row and row.get("unseen")]
    return [*_met(known, ""), *_met(others, " of the models drawn by a seed")]


def _met(rows: Sequence[Row], which: str) -> list[dict[str, Any]]:
    near = [abs(apart - 1) for row in rows if (apart := beside(row)) is not None]
    times = [abs(apart - 1) for row in rows if (apart := beside(row, gain=False)) is not None]
    found = [
        _target(
            f"the graph's gain is predicted within {100 * NEAR:.0f} % on 80 %{which}",
            sum(each <= NEAR for each in near),
            len(near),
        ),
        _target(
            f"the graph's time is predicted within {100 * NEAR:.0f} % on 80 %{which}",
            sum(each <= NEAR for each in times),
            len(times),
        ),
    ]
    for way, remedy in RANGES.items():
        pairs = [
            (row["remedies"][remedy]["under_graph"], row["gains"][way])
            for row in rows
            if way in row["gains"] and row["remedies"][remedy]["under_graph"]
        ]
        inside = sum(low <= gain <= high for (low, high), gain in pairs)
        found.append(
            _target(f"the gain of {remedy} lies inside on 80 %{which}", inside, len(pairs))
        )
        wide = sum(high > WIDEST * low for (low, high), _ in pairs)
        found.append(
            {
                "target": f"ranges of {remedy} are at most {WIDEST:g} wide{which}",
                "found": f"{wide} of {len(pairs)} are wider",
                "met": not wide,
            }
        )
    slow = [row["seconds"] for row in rows if row["seconds"] > LIMIT_S]
    found.append(
        {
            "target": f"profile() takes under {LIMIT_S:g} s{which}",
            "found": f"{len(slow)} of {len(rows)} take longer",
            "met": not slow,
        }
    )
    return found


def beside(row: Row, *, gain: bool = True) -> float | None:
    """The predicted gain of a graph over the measured one, or so its time; None without either.

    Each profile is compared with the rounds before it, as the host is twice as fast in some seconds
    as in others; the median of these.
    """
    likely = row["remedies"]["graph"]["likely"]
    if likely is None or GRAPH not in row["gains"]:
        return None
    calls = [each["call_s"] for each in row["figures"]]
    predicted_s = statistics.median(calls) / likely
    if not gain:
        return float(predicted_s / row["latency_s"][GRAPH])
    ratios = []
    for call_s, eager, graph in zip(
        calls, row["samples"][EAGER], row["samples"][GRAPH], strict=True
    ):
        eager_s, graph_s = (
            statistics.median(map(statistics.median, each)) for each in (eager, graph)
        )
        ratios.append(call_s / predicted_s / (eager_s / graph_s))
    return statistics.median(ratios)


def _target(text: str, count: int, of: int) -> dict[str, Any]:
    return {"target": text, "found": f"{count} of {of}", "met": of == 0 or count >= ASKED * of}


def line(name: str, row: Row) -> str:
    """One model in one line."""
    if "failed" in row:
        return f"{name}: {row['failed']}"
    parts = [f"{name}: {' or '.join(row['causes'])}"]
    likely = row["remedies"]["graph"]["likely"]
    if GRAPH in row["gains"]:
        said = "no prediction" if likely is None else f"{likely:.2f}× predicted"
        parts.append(f"graph {said}, {row['gains'][GRAPH]:.2f}× measured")
    for way, remedy in RANGES.items():
        span = row["remedies"][remedy]["under_graph"]
        if way in row["gains"]:
            said = "no range" if span is None else f"{span[0]:.2f}–{span[1]:.2f}×"
            parts.append(f"{remedy} {said}, {row['gains'][way]:.2f}×")
    return "; ".join(parts)
