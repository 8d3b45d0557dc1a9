"""Other engines beside eager, in one table.

scripts/bench engines runs this module for each model, in a process of its own: tune() tries each
way in turns with eager, verified.
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.report.environment import environment
from graphwright.report.report import Report
from graphwright.report.result import Row
from graphwright.strategies.registry import parse_candidates

from .. import cases
from ..common.processes import figures_of
from ..common.record import SCHEMA, write

Figures = dict[str, Any]
WAYS = {
    "cuda": (
        "inductor+graph",
        "fused+graph",
        "onnxruntime",
        "onnxruntime:graph",
        "tensorrt",
        "xla",
    ),
    "cpu": ("inductor", "fused", "onnxruntime", "aot_inductor", "xla"),
}
# Seconds for a model, and for one way of it.
LIMIT_S, CANDIDATE_S = 240, 100


def measure(name: str, device: torch.device, *, quick: bool) -> Figures:
    """All ways on one model."""
    model, inputs = cases.load(name, device)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        tuned = gw.tune(
            model,
            args,
            kwargs,
            strategies=WAYS[device.type],
            remember=False,
            # In one process, each in turns with eager; JAX comes last, and stays.
            isolate=device.type != "cuda",
            timeout_s=20.0 if quick else CANDIDATE_S,
            progress=False,
        )
        tuned.report.model = name
        return {"report": json.loads(tuned.report.to_json())}


def _cell(row: Row | None) -> str:
    """A way's time in ms, and over eager's where it was measured in turns with it."""
    if row is None or row.screening is None:
        return "–"
    own = f"{statistics.median(row.screening.rounds('latency')) * 1e3:.3f}"
    share = share_of_eager(row)
    return own if share is None else f"{own} ({share:.2f})"


def share_of_eager(row: Row | None) -> float | None:
    """A way's time over eager's, in the median of the rounds that timed both."""
    if row is None or row.screening is None or row.baseline is None or row.strategy == "eager":
        return None
    return statistics.median(row.screening.ratios(row.baseline, "latency"))


def to_markdown(result: Figures) -> str:
    """A row a model: each way's time, and its share of eager's."""
    where = result["environment"]
    ways = WAYS["cuda" if "gpu" in where else "cpu"]
    place = where.get("gpu", f"{where['processor']}, {counted(int(where['threads']), 'thread')}")
    lines = [
        f"Milliseconds of a synchronised call ({place}, PyTorch {where['torch']}). In brackets: "
        "the ratio to eager, timed in turns. All results were verified against float64.",
        "",
        f"| model | eager | {' | '.join(ways)} | chosen |",
        "| --- |" + " ---: |" * (len(ways) + 1) + " --- |",
    ]
    whys: dict[str, list[str]] = {}
    for name, model in result["models"].items():
        if "report" not in model:
            why = textwrap.shorten(model.get("failed", "?"), 160, placeholder=" …")
            whys.setdefault(f"not measured: {why}", []).append(name)
            continue
        report = Report.from_json(json.dumps(model["report"]))
        cells = []
        for way in ("eager", *ways):
            row = report.row(way)
            bad = row is not None and row.status not in ("ok", "slower")
            cells.append(f"*{row.status}*" if row and bad else _cell(row))
            if row is not None and bad:
                whys.setdefault(f"`{way}`, {row.status}: {row.reason}", []).append(name)
            for note in row.notes if row is not None and "onnx" in way else ():
                if "CPU" in note:
                    whys.setdefault(f"`{way}`: {note}", []).append(name)
        lines.append(f"| {name} | {' | '.join(cells)} | {report.chosen} |")
    lines += ["", *(f"- {why} ({', '.join(names)})" for why, names in whys.items())]
    return "\n".join([*lines, ""])


def benchmark(out: Path, only: Sequence[str], *, quick: bool, commit: str) -> int:
    """Measure models and write after each; the number that failed.

    Others that the file has already, of the same commit and machine, are kept.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: Figures = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "engines",
        "commit": commit,
        "quick": quick,
        "environment": environment(device),
        "models": {},
    }
    where = out / "engines.json"
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        if all(earlier[key] == result[key] for key in ("commit", "quick", "environment")):
            result["models"] = earlier["models"]
    for name in only or cases.MODELS:
        began = time.perf_counter()
        found = figures_of("bench.engines.run", name, ["--quick"] * quick, LIMIT_S)
        result["models"][name] = found.get("figures", {}) | (
            {"failed": found["failed"]} if "failed" in found else {}
        )
        write(where, result)
        print(f"{name}: {time.perf_counter() - began:.0f} s {found.get('failed', '')}", flush=True)
    print(to_markdown(result))
    print(f"wrote {where}")
    return sum("failed" in model for model in result["models"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=cases.MODELS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.what in ("bert", "gpt2", "minilm"):
        import transformers

        transformers.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parse_candidates(WAYS[device.type], ())
    figures = measure(given.what, device, quick=given.quick)
    given.file.write_text(json.dumps({"figures": figures}), encoding="utf-8")


if __name__ == "__main__":
    main()
