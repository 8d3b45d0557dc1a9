"""Inductor region by region beside Inductor for the whole: set-up, latency, and how far off.

    scripts/bench regional [--only MODEL ...] [--seconds S] [--out DIR]

Models of transformers with their default configurations, each in a process of its own; compilers'
caches are empty before each way, and Inductor has compiled a tiny model. On a GPU in half precision
and as graphs. Models that the file has of the same commit are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from graphwright.calls.objects import flatten_result
from graphwright.errors import first_line
from graphwright.report.environment import environment
from graphwright.strategies.base import tiny_model
from graphwright.strategies.inductor import INDUCTOR
from graphwright.strategies.registry import parse_candidates

from ..common.processes import figures_of
from ..common.record import SCHEMA, commit, write
from ..common.rendering import Result, Table, machine, marked
from ..common.timing import in_turns, times
from ..search.models import case_of
from ..search.run import empty_caches, wait_for_ended_processes

MODELS = ("bert", "gpt2", "t5", "mobilebert", "swin", "convnext", "dinov2", "doge")
WAYS = ("eager", "inductor:regional", "inductor")
ROUNDS, LIMIT_S = 21, 240


def measured(name: str) -> Result:
    """The ways of one model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(2)
    case = case_of(f"transformers/{name}", device)
    tiny, x = tiny_model(device)
    INDUCTOR.build(tiny, (x,), {})
    rows: dict[str, Any] = {}
    calls = {}
    with torch.no_grad():
        expected, _ = flatten_result(case.on_others(case.model)())
        for way in WAYS:
            (candidate,) = parse_candidates([way + "+graph" * (device.type == "cuda")], ())
            wait_for_ended_processes(device)
            with empty_caches():
                began = time.perf_counter()
                try:
                    built = candidate.build(case.model, case.args, case.kwargs)
                except Exception as error:
                    rows[way] = {"failed": f"{type(error).__name__}: {first_line(error)}"}
                    continue
            rows[way] = {"setup_s": time.perf_counter() - began, "notes": built.notes}
            found, _ = flatten_result(case.on_others(built.call)())
            rows[way]["off"] = max(
                float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(1e-9))
                for a, b in zip(found, expected, strict=True)
                if isinstance(a, torch.Tensor) and a.is_floating_point()
            )
            calls[way] = case.on_others(built.call)
        for way, timed in times(in_turns(calls, ROUNDS), 1).items():
            rows[way] |= timed
    return {"figures": rows, "environment": environment(device)}


def to_markdown(result: Result) -> str:
    """The table of a result."""
    table: Table = [["model", "regions", "set-up, s", "whole, s", "latency, ms", "whole", "eager"]]
    for name, rows in result["models"].items():
        regional, whole = (rows.get(way, {}) for way in WAYS[1:])
        seconds = [
            f"{row['setup_s']:.1f}" if "setup_s" in row else "–" for row in (regional, whole)
        ]
        ms = [
            f"{rows[way]['median'] * 1e3:.2f}" if "median" in rows.get(way, {}) else "–"
            for way in (*WAYS[1:], WAYS[0])
        ]
        note = next(iter(regional.get("notes", ())), regional.get("failed", "–"))
        table.append([name, note, *seconds, *ms])
    gains = [
        rows["inductor"]["setup_s"] / rows["inductor:regional"]["setup_s"]
        for rows in result["models"].values()
        if all("setup_s" in rows.get(way, {}) for way in WAYS[1:])
    ]
    return "\n".join(
        [
            "### Regional compilation",
            "",
            "Inductor for each region of a model once, beside Inductor for the whole. Set up "
            f"{statistics.geometric_mean(gains):.1f} times as fast (geometric mean)."
            if gains
            else "",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path, only: list[str], seconds: float) -> int:
    """Measure all models, the file written after each; the number that failed."""
    where = out / f"regional-{'h200' if torch.cuda.is_available() else 'cpu'}.json"
    result: Result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "regional",
        "commit": commit(),
        "environment": {},
        "models": {},
    }
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        result |= earlier if earlier["commit"] == result["commit"] else {}
    ends = time.monotonic() + seconds
    for name in only or MODELS:
        if name in result["models"] or time.monotonic() > ends:
            continue
        limit_s = min(LIMIT_S, max(1.0, ends - time.monotonic()))
        found = figures_of("bench.regional.run", name, [], limit_s)
        result["environment"] = result["environment"] or found.get("environment", {})
        result["models"][name] = found.get("figures", {"failed": found.get("failed")})
        write(where, result)
        print(
            name, {w: round(r.get("setup_s", -1), 1) for w, r in found.get("figures", {}).items()}
        )
    print(to_markdown(result))
    return sum("failed" in model for model in result["models"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path, help="the JSON to write")
    given = parser.parse_args()
    given.file.write_text(json.dumps(measured(given.name)), encoding="utf-8")


if __name__ == "__main__":
    main()
