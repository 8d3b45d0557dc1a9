"""Run the tests marked `gpu` and write what came of each as JSON.

Where a machine is lent for less time than all of them take, `--resume FILE` goes on: what passed or
was skipped in that file is not run again, and what is written holds both, with each run's commit.
It is a plugin of pytest as well, for the processes of xdist.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from graphwright.report.environment import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
# Seconds after which a test tells where all of its threads are.
HANGS_S = 150
# Names the file whose tests are not run again, for the processes of xdist.
KNOWN = "GRAPHWRIGHT_KNOWN_GPU_TESTS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is known from an earlier run."""
    known = settled(json.loads(Path(os.environ[KNOWN]).read_text(encoding="utf-8")))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


def settled(result: dict[str, Any]) -> dict[str, str]:
    """Outcomes that need no second run, by test."""
    outcomes = result["outcomes"].items()
    return {name: outcome for name, outcome in outcomes if outcome in ("passed", "skipped")}


class Recorder:
    """Collects one outcome a test: the first that is not "passed", else "passed".

    Args:
        machine: what it runs on.
        earlier: what an earlier run has written, if this one goes on.
    """

    def __init__(self, machine: dict[str, str], earlier: dict[str, Any] | None = None) -> None:
        self.machine = machine
        self.earlier = earlier
        self.began = time.monotonic()
        self.first_s: float | None = None
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.under_way: set[str] = set()
        self.commit = "unknown"

    def pytest_sessionstart(self) -> None:
        """Ask for the commit now: only pytest has the repository's root on the path."""
        from bench.common.record import commit

        self.commit = commit()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test has begun: one that hangs never reports."""
        self.under_way.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note that a test has ended."""
        self.under_way.discard(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what came of a test's set-up, call or clean-up."""
        if self.first_s is None:
            self.first_s = time.monotonic() - self.began
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.when != "call" and report.outcome == "passed":
            return
        if self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            text = report.longreprtext.replace(f"{ROOT}/", "")
            # Nothing of the machine that it ran on.
            text = text.replace(str(ROOT), ".").replace(sys.prefix, "ENVIRONMENT")[-2000:]
            self.failures[report.nodeid] = text
            # At once: a run that is cut off has no summary.
            print(f"\nFAILED {report.nodeid}\n{text}", flush=True)

    def write(self, where: Path) -> None:
        """Write what came of the tests so far."""
        seconds = {name: round(s, 3) for name, s in self.seconds.items()}
        result = {
            "schema": "graphwright.gpu-test",
            "schema_version": 1,
            "commit": self.commit,
            "environment": self.machine,
            "counts": dict(Counter(self.outcomes.values())),
            "wall_s": round(time.monotonic() - self.began, 1),
            "first_s": None if self.first_s is None else round(self.first_s, 1),
        }
        runs, outcomes = [result], self.outcomes
        if self.earlier is not None:
            runs = [*self.earlier.get("runs", [_of_run(self.earlier)]), _of_run(result)]
            outcomes = {**settled(self.earlier), **outcomes}
            seconds = {**self.earlier["seconds"], **seconds}
        counts = dict(Counter(outcomes.values()))
        result = {
            **result,
            "counts": counts,
            "runs": [_of_run(run) for run in runs],
            "outcomes": outcomes,
            "failures": self.failures,
            "unfinished": sorted(self.under_way),
            "seconds": seconds,
        }
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {where}: {counts}, first test after {result['first_s']} s", flush=True)
        for name in sorted(self.under_way):
            print(f"not finished: {name}", flush=True)


def _of_run(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("commit", "counts", "wall_s")}


def main() -> int:
    """Run pytest with the arguments that are not ours; its exit status, or 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--resume", type=Path, help="what an earlier run has written")
    given, rest = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("scripts/gpu-test: there is no CUDA device here", file=sys.stderr)
        return 2
    where = given.out / "gpu-test.json"
    earlier = None
    if given.resume is not None:
        earlier = json.loads(given.resume.read_text(encoding="utf-8"))
        os.environ[KNOWN] = str(given.resume.resolve())
        rest += ["-p", "gpu_tests"]
    recorder = Recorder(environment(torch.device("cuda")), earlier)

    def cut_off(signum: int, frame: object) -> None:
        """Write what is known, at once: workers may take long to end."""
        recorder.write(where)
        signal.default_int_handler(signum, None)

    signal.signal(signal.SIGTERM, cut_off)
    # That plugin warns beside xdist, and warnings are errors.
    options = ["-m", "gpu and not slow and not exhaustive", "-q", "-p", "no:benchmark"]
    options += ["-o", f"faulthandler_timeout={HANGS_S}"]
    if any(option.startswith(("-n", "--numprocesses")) for option in rest):
        options += ["--dist", "worksteal"]
    code = pytest.main([*options, *rest], plugins=[recorder])
    recorder.write(where)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
