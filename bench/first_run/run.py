"""The command `graphwright tune`, first on a machine where nothing was built, then again.

    scripts/bench first-run [--only MODEL ...] [--limits] [--out DIR]

Each model gets folders of its own for all that is cached. The second run finds there what the first
one has compiled, but not its choice. With `--limits` a third run, again with nothing built, has no
limit in time; it says which candidates need less than two seconds. With `--only` a file of the same
commit keeps its other models. Seconds are those of the whole command.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from graphwright.report.environment import environment
from graphwright.report.report import Report
from graphwright.report.result import Status
from graphwright.strategies.registry import LOSSY, parse_candidates

from ..common.processes import variables
from ..common.record import ROOT, SCHEMA, commit, write
from ..common.rendering import machine, marked
from .models import MODELS

Row = dict[str, Any]
# The choice of the first run beside that of the second; the command beside its budget; what is
# cheap.
LEAST_SHARE, GRACE, CHEAP_S = 0.95, 1.1, 2.0


def run(name: str, folder: Path, *options: str) -> tuple[Report, float]:
    """One run of the command; its report, and its seconds."""
    where = folder / "report.json"
    caches = {
        "GRAPHWRIGHT_CACHE_DIR": str(folder / "graphwright"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    words = ["-m", "graphwright", "tune", f"bench.first_run.models:{name}", "--json", str(where)]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, *words, *options],
        cwd=ROOT,
        env=variables(ROOT / "src") | caches,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return Report.from_json(where.read_text(encoding="utf-8")), time.monotonic() - began


def measured(name: str, *, limits: bool) -> Row:
    """What the runs of a model gave."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (first, first_s), (second, second_s) = run(name, folder), run(name, folder, "--fresh")
    full = None
    if limits:
        # In folders of its own: what finds its kernels compiled is cheap for that alone.
        with tempfile.TemporaryDirectory() as place:
            full = run(name, Path(place), "--exhaustive")[0]
    assert first.chosen is not None
    best = _gain(second, str(second.chosen))
    share = _gain(second, first.chosen) / best if best else 0.0
    return {
        "seconds": [first_s, second_s],
        "budget_s": [first.budget_s, second.budget_s],
        "chosen": [first.chosen, second.chosen],
        "gains": [_gain(first, first.chosen), _gain(second, str(second.chosen))],
        "share": share,
        "not_tried": [_not_tried(each) for each in (first, second)],
        "unsteady": [sum(bool(row.unsteady) for row in each.rows) for each in (first, second)],
        "cheap_and_not_tried": [] if full is None else _cheap(full, first),
        "notes": first.notes,
    }


def _gain(report: Report, strategy: str) -> float:
    """How many times as fast as eager a strategy was in a run; 0 if it was not timed."""
    row = report.row(strategy)
    speedup = None if row is None else report.speedup(row)
    return 0.0 if speedup is None else speedup[0]


def _not_tried(report: Report) -> list[str]:
    """What there was no time for."""
    rows = [row for row in report.rows if row.status is Status.NOT_TRIED]
    return [row.strategy for row in rows if "cannot win" not in row.reason]


def _cheap(full: Report, first: Report) -> list[str]:
    """What would have been cheap in the first run.

    Where that had set up nothing by the same compiler, the candidate would have paid for its start
    too: what the first one by this compiler takes in the full run.
    """
    left = _not_tried(first)
    begun = {_compiler(row.strategy) for row in first.rows if row.setup_s}
    found = []
    for name in left:
        by_same = [row for row in full.rows if _compiler(row.strategy) == _compiler(name)]
        row = full.row(name)
        counted = [row] if _compiler(name) in begun else by_same
        if max((each.setup_s or math.inf for each in counted if each), default=math.inf) < CHEAP_S:
            found.append(name)
    return found


def _compiler(strategy: str) -> str:
    """The compiler of a strategy, without its rewrite, its options and its runner."""
    (candidate,) = parse_candidates([strategy], LOSSY)
    return candidate.compiler.name.partition(":")[0]


def targets(rows: dict[str, Row]) -> list[Row]:
    """What is asked of each model, and whether it holds."""
    found: list[Row] = []
    for name, row in rows.items():
        for what, figure, met in (
            ("the first choice beside the second", row["share"], row["share"] >= LEAST_SHARE),
            ("seconds of the command", row["seconds"][0], row["seconds"][0] <= _limit_s(row)),
            (
                "cheap and not tried",
                len(row["cheap_and_not_tried"]),
                not row["cheap_and_not_tried"],
            ),
        ):
            found.append({"target": f"{name}: {what}", "figure": figure, "met": met})
    return found


def _limit_s(row: Row) -> float:
    """Seconds that the first command may take: a tenth more than its budget."""
    limit_s: float = GRACE * row["budget_s"][0]
    return limit_s


def to_markdown(result: Row) -> str:
    """What docs/results/search.md shows of it."""
    table = [["model", "first run", "s", "gain", "second run", "s", "gain", "first beside second"]]
    for name, row in result["models"].items():
        line = [name]
        for n in range(2):
            line += [row["chosen"][n], f"{row['seconds'][n]:.0f}", f"{row['gains'][n]:.2f}×"]
        table.append([*line, f"{row['share']:.2f}"])
    return "\n".join(
        [
            "### The first run on a machine",
            "",
            "The command `graphwright tune` with its default options, first with empty caches, "
            "then with what that compiled. *First beside second*: how fast the first run's choice "
            "was in the second run, relative to the second run's choice.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path, only: Sequence[str], *, limits: bool) -> int:
    """Measure all models and write; the number of targets that are missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = out / f"first-run-{'h200' if device.type == 'cuda' else 'cpu'}.json"
    rows = _measured_before(where) if only else {}
    for name in only or MODELS:
        rows[name] = measured(name, limits=limits)
        print(name, json.dumps(rows[name]), flush=True)
        # After each model: what was measured is not lost if a later one fails.
        write(where, _result(rows, device))
    result = _result(rows, device)
    for target in result["targets"]:
        print(f"{target['target']:60} {target['figure']:7.2f}  {'yes' if target['met'] else 'NO'}")
    print(f"wrote {where}")
    return sum(not target["met"] for target in result["targets"])


def _measured_before(where: Path) -> dict[str, Row]:
    """What a file holds of other models, if it is of this commit."""
    if not where.exists():
        return {}
    found = json.loads(where.read_text(encoding="utf-8"))
    rows: dict[str, Row] = found["models"] if found["commit"] == commit() else {}
    return rows


def _result(rows: dict[str, Row], device: torch.device) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "first-run",
        "commit": commit(),
        "environment": environment(device) | {"cores": str(os.cpu_count())},
        "models": rows,
        "targets": targets(rows),
    }
