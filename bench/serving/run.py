"""MiniLM behind graphwright's server and behind its peers: rates, latencies, wrong answers.

    scripts/bench serving [--out DIR] [--only SERVER ...] [--modes MODE ...] [--seconds S]

Each server is started alone, with the same model, batch limit and threads of PyTorch: as it is
("eager", of which graphwright makes graphs on a GPU), or as tune() made it ("tuned"). The modes of
several runs on one kind of machine are joined in one file. Every run is checked: each request has
a known answer. Its figures are the latency of few requests beside that of bare calls with the same
pauses, the rate of a closed loop, and the highest rate of an open loop (load.py) at which 99 of 100
answers come in time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphwright.report.environment import environment

from ..common.processes import figures_of
from ..common.record import SCHEMA, commit, write
from ..common.rendering import Table, aligned, machine, marked
from .apps.common import FILE, Options
from .load import Plan
from .peers import SERVERS, Server, ServerFailed, free_port, running
from .search import highest
from .traffic import drawn, load, save

TARGETS = {mode: f"{Path(__file__).with_name(f'{mode}.py')}:model" for mode in ("eager", "tuned")}
# Seconds that tuning may take: of 32 × 128 tokens each call takes half a second on two cores.
TUNING_S = 1200.0
REQUESTS, SEED = 256, 71
# p99 has to stay under so many seconds.
BOUND_S = {"cpu": 0.05, "cuda": 0.01}
BATCH, WAIT_S = 32, 0.002
# Requests a second of a low load, and at which a search begins.
LOW, FIRST = 5.0, {"cpu": 20.0, "cuda": 160.0}
CLIENTS = 16
RUNS = 12
# An open loop takes long enough for so many requests, but not longer than so many times as usual.
ENOUGH, LONGER = 200, 3
# For which the answers to a load that was too high are waited for, before the next.
SETTLE_S = 30.0
# What a process needs besides its load.
BESIDE_S = 60.0

# Earlier figures stay in the file where these are the same.
SAME = ("schema_version", "environment", "seed", "seconds", "threads", "bound_s")

Figures = dict[str, Any]


def passes(found: Mapping[str, Any], bound_s: float) -> bool:
    """Whether every request was answered, rightly, and 99 of 100 in time."""
    return (
        "failed" not in found
        and found["due"] > 0
        and found["statuses"] == {"200": found["due"]}
        and not found["wrong"]
        and found["p99_s"] <= bound_s
    )


def stages(port: int) -> dict[str, tuple[float, float]]:
    """Seconds and count of each stage of graphwright's requests so far; empty for its peers."""
    sample = re.compile(
        r'graphwright_(request|stage)_seconds_(sum|count){.*?(?:stage="(\w+)".*)?} (.+)'
    )
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: dict[str, dict[str, float]] = {}
    for kind, which, stage, value in sample.findall(text):
        found.setdefault(stage or kind, {})[which] = float(value)
    return {name: (each["sum"], each["count"]) for name, each in found.items()}


class Trial:
    """Loads on one server that runs."""

    def __init__(self, port: int, wire: str, folder: Path, seconds: float) -> None:
        self.port, self.wire, self.folder, self.seconds = port, wire, folder, seconds
        self.seed = SEED

    def load(self, **what: Any) -> Figures:
        """One run, of another seed each time."""
        self.seed += 1
        plan = Plan(
            self.port,
            self.wire,
            str(self.folder / "requests.npz"),
            seed=self.seed,
            answers=str(self.folder / "answers.npy"),
            **({"seconds": self.seconds} | what),
        )
        where = self.folder / "plan.json"
        write(where, asdict(plan))
        limit = plan.seconds + plan.drain_s + BESIDE_S
        return what | figures_of("bench.serving.load", str(where), [], limit)

    def at(self, rate: float) -> Figures:
        """An open loop that is long enough for its percentiles."""
        seconds = min(max(self.seconds, ENOUGH / rate), LONGER * self.seconds)
        return self.load(rate=rate, seconds=seconds)

    def low(self) -> Figures:
        """A low load, with the mean seconds of each stage in the server."""
        before = stages(self.port)
        found = self.at(LOW)
        now = stages(self.port).items()
        new = {k: (s - before[k][0], n - before[k][1]) for k, (s, n) in now if k in before}
        return found | {"stages_s": {name: s / n for name, (s, n) in new.items() if n}}

    def measure(self, bound_s: float, first: float) -> Figures:
        """A low load, a closed loop, and the search for the highest rate, beginning at `first`."""
        self.load(clients=CLIENTS)  # warms up
        found: Figures = {
            "status": "ok",
            "low": self.low(),
            "closed": self.load(clients=CLIENTS),
            "runs": [],
        }

        def keeps_up(rate: float) -> bool:
            found["runs"].append(self.at(rate))
            passed = passes(found["runs"][-1], bound_s)
            if not passed:
                # One more request, which is answered after all those that were given up.
                self.load(clients=1, seconds=0.0, drain_s=SETTLE_S)
            return passed

        seconds = RUNS * LONGER * self.seconds
        found["highest_rate"], found["failed_rate"] = highest(
            keeps_up, first, runs=RUNS, seconds=seconds, lowest=LOW
        )
        every = [found["low"], found["closed"], *found["runs"]]
        found["wrong"] = sum(one.get("wrong", 0) for one in every)
        failures = [one["failed"] for one in every if "failed" in one]
        if failures:
            found |= {"status": "failed", "reason": failures[0]}
        return found


def served(server: Server, given: Options, folder: Path, seconds: float) -> Figures:
    """The row of one server."""
    if not server.installed():
        return {"status": "not installed"}
    try:
        with running(server, given, load(folder / "requests.npz")[0]):
            trial = Trial(given.port, server.wire, folder, seconds)
            return trial.measure(BOUND_S[given.device], FIRST[given.device])
    except ServerFailed as error:
        return {"status": "failed", "reason": str(error)}


def benchmark(
    out: Path, only: list[str], *, modes: Sequence[str], seconds: float, threads: int
) -> int:
    """Every server in these modes, the file written after each; the number that failed."""
    unknown = set(only) - set(SERVERS)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: none of {', '.join(SERVERS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = out / "serving.json"
    result: Figures = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "serving",
        "commit": commit(),
        "environment": environment(torch.device(device)),
        "seed": SEED,
        "seconds": seconds,
        "threads": threads,
        "bound_s": BOUND_S[device],
        "bare": {},
        "servers": {},
    }
    if where.exists():
        earlier = json.loads(where.read_text(encoding="utf-8"))
        if all(earlier[key] == result[key] for key in SAME):
            result = earlier | {"commit": result["commit"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "requests.npz", drawn(REQUESTS, SEED))
        common = ["--device", device, "--threads", str(threads)]
        # The eager model's answers are what every mode is checked against.
        for mode in sorted({"eager", *modes}):
            if mode == "tuned":
                file = str(folder / "minilm.gw")
                result["tuning"] = figures_of("bench.serving.tuned", file, common, TUNING_S)
                if "failed" in result["tuning"]:
                    sys.exit(f"tune: {result['tuning']['failed']}")
                os.environ[FILE] = file
            words = ["--target", TARGETS[mode], "--pause-s", str(1 / LOW), *common]
            if mode == "eager":
                words += ["--answers", str(folder / "answers.npy")]
            bare = figures_of("bench.serving.bare", str(folder / "requests.npz"), words, BESIDE_S)
            if "failed" in bare:
                sys.exit(f"{mode}, called without a server: {bare['failed']}")
            if mode not in modes:
                continue
            result["bare"][mode] = bare
            for server in only or SERVERS:
                given = Options(TARGETS[mode], free_port(), BATCH, WAIT_S, threads, device)
                row = served(SERVERS[server], given, folder, seconds)
                row["commit"] = result["commit"]
                result["servers"].setdefault(server, {})[mode] = row
                write(where, result)
                print(json.dumps({server: {mode: row["status"]}}), flush=True)
    print(f"\n{to_text(result)}\nwrote {where}")
    return sum(bad(row) for modes in result["servers"].values() for row in modes.values())


def bad(row: Mapping[str, Any]) -> bool:
    """Whether a server failed or answered wrongly."""
    return row["status"] == "failed" or row.get("wrong", 0) > 0


def to_text(result: Mapping[str, Any]) -> str:
    """A line for each server and mode."""
    bound = f"{1e3 * result['bound_s']:g} ms"
    table: Table = [
        ["", "mode", f"requests/s, p99 ≤ {bound}", "closed loop", "p50, low load", "bare", "wrong"]
    ]
    for server, modes in result["servers"].items():
        for mode, row in modes.items():
            cells = [row["status"], "", "", "", ""]
            if row["status"] == "ok":
                cells = [
                    f"{row['highest_rate']:.0f}",
                    f"{row['closed']['answered_per_s']:.0f}",
                    _ms(row["low"]),
                    _ms(result["bare"][mode]["low"]),
                    str(row["wrong"]),
                ]
            table.append([server, mode, *cells])
    return aligned(table)


def _ms(figures: Mapping[str, Any]) -> str:
    return f"{1e3 * figures['p50_s']:.1f} ms" if "p50_s" in figures else "–"


def to_markdown(result: Mapping[str, Any]) -> str:
    """What docs/results/servers.md shows of it."""
    bound = f"{1e3 * result['bound_s']:g} ms"
    table: Table = [["server", "model", f"requests/s, p99 ≤ {bound}", "closed loop, requests/s"]]
    table[0] += ["p50 at a low load", "a bare call", "wrong answers"]
    for server, modes in result["servers"].items():
        for mode, row in modes.items():
            cells = [row["status"], "", "", "", ""]
            if row["status"] == "ok":
                highest = f"{row['highest_rate']:.0f}"
                cells = [
                    highest if row["highest_rate"] else "none",
                    f"{row['closed']['answered_per_s']:,.0f}",
                    _ms(row["low"]),
                    _ms(result["bare"][mode]["low"]),
                    str(row["wrong"]),
                ]
            table.append([server, mode, *cells])
    return "\n".join(
        [
            "MiniLM, texts of mixed lengths, batches of up to "
            f"{BATCH}; each server alone, PyTorch's threads: {result['threads']}. An open "
            f"loop with Poisson arrivals, free of coordinated omission; {CLIENTS} clients in the "
            "closed loop.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )
