"""Requests a second by the number of replicas on Ray Serve, each with a GPU or a core of its own.

    scripts/bench replicas [--replicas N ...] [--batch-ms MS] [--seconds S] [--out DIR] [--quick]

The model takes so many milliseconds a batch, and enough clients ask in a closed loop to keep all
replicas busy; there are as many for each number of replicas. Every answer is checked.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphwright.report.environment import environment

from ..common.processes import command, figures_of
from ..common.record import SCHEMA, commit, write
from ..common.rendering import Table, aligned, machine, marked
from .apps.common import Options
from .peers import Server, ServerFailed, free_port, running
from .run import BESIDE_S, REQUESTS, SEED, Trial
from .traffic import drawn, load, save

ROWS = 8
WIDTH = {"cpu": 512, "cuda": 8192}
# Batches of each replica for which clients ask at once.
AHEAD = 4
WAIT_S = 0.0
QUICK = {"rows": 2, "width": 64, "batch_s": 0.002, "seconds": 1.0, "requests": 16}

Figures = dict[str, Any]


def benchmark(
    out: Path, counts: Sequence[int], *, batch_s: float, seconds: float, quick: bool
) -> int:
    """Each number of replicas, the file written after each; the number that failed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = {"rows": ROWS, "width": WIDTH[device], "batch_s": batch_s, "seconds": seconds}
    chosen |= {"requests": REQUESTS} | (QUICK if quick else {})
    where = out / "replicas.json"
    result: Figures = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "replicas",
        "commit": commit(),
        "environment": environment(torch.device(device)),
        "quick": quick,
        "seed": SEED,
        "replicas": {},
        **chosen,
    }
    sizes = ["--width", str(chosen["width"]), "--rows", str(chosen["rows"]), "--device", device]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests, expected = folder / "requests.npz", folder / "answers.npy"
        save(requests, drawn(int(chosen["requests"]), SEED))
        words = [*sizes, "--batch-s", str(chosen["batch_s"]), "--threads", "1"]
        words += ["--answers", str(expected)]
        result["model"] = figures_of("bench.serving.heavy", str(requests), words, BESIDE_S)
        if "failed" in result["model"]:
            raise SystemExit(f"the model without a server: {result['model']['failed']}")
        sizes += ["--repeats", str(result["model"]["repeats"])]
        clients = AHEAD * int(chosen["rows"]) * max(counts)
        for count in counts:
            row = _measured(count, sizes, folder, clients, float(chosen["seconds"]))
            result["replicas"][str(count)] = row
            write(where, result)
            print(json.dumps({count: row["status"]}), flush=True)
    print(f"\n{to_text(result)}\nwrote {where}")
    return sum(row["status"] != "ok" for row in result["replicas"].values())


def _measured(
    count: int, words: Sequence[str], folder: Path, clients: int, seconds: float
) -> Figures:
    """A closed loop on so many replicas."""
    server = Server(
        "ray",
        "v2",
        lambda given: command(
            "bench.serving.on_ray", "--port", str(given.port), "--replicas", str(count),
            *words,
        ),
    )  # fmt: skip
    if not server.installed():
        return {"status": "not installed"}
    # Ray reads this when it is imported: its own cluster is to use 127.0.0.1 only.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    given = Options("", free_port(), 0, WAIT_S, 1, "")
    try:
        with running(server, given, load(folder / "requests.npz")[0]):
            trial = Trial(given.port, "v2", folder, seconds)
            trial.load(clients=clients, seconds=min(seconds, 2.0))  # warms up
            row = trial.load(clients=clients)
    except ServerFailed as error:
        return {"status": "failed", "reason": str(error)}
    right = row.get("statuses") == {"200": row.get("due")} and row.get("wrong") == 0
    return {"status": "ok" if right else "failed", **row}


def to_text(result: Mapping[str, Any]) -> str:
    """A line for each number of replicas."""
    table: Table = [["replicas", "requests/s", "vs first", "p50", "p99", "wrong"]]
    first = None
    for count, row in result["replicas"].items():
        if "answered_per_s" not in row:
            table.append([count, row["status"], "", "", "", ""])
            continue
        rate = row["answered_per_s"]
        first = first or rate
        times = [f"{1e3 * row[name]:.0f} ms" for name in ("p50_s", "p99_s")]
        table.append([count, f"{rate:.0f}", f"{rate / first:.2f}×", *times, str(row["wrong"])])
    batch = f"{1e3 * result['model']['batch_s']:.1f} ms a batch of {result['rows']} rows, eager"
    return f"{aligned(table)}\n{batch}"


def to_markdown(result: Mapping[str, Any]) -> str:
    """What docs/results/servers.md shows of it."""
    table: Table = [["replicas", "requests/s", "vs one", "p50", "p99", "wrong answers"]]
    first = None
    for count, row in result["replicas"].items():
        rate = row["answered_per_s"]
        first = first or rate
        times = [f"{1e3 * row[name]:,.0f} ms" for name in ("p50_s", "p99_s")]
        table.append([count, f"{rate:.1f}", f"{rate / first:.2f}×", *times, str(row["wrong"])])
    return "\n".join(
        [
            "On Ray Serve, a GPU for each replica, in a closed loop: a model that takes "
            f"{1e3 * result['model']['batch_s']:.0f} ms for {result['rows']} rows.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )
