"""Run the tests marked `gpu` and write what came of each as JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from graphwright.report.environment import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


class Recorder:
    """Collects one outcome a test: the first that is not "passed", else "passed"."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.commit = "unknown"

    def pytest_sessionstart(self) -> None:
        """Ask for the commit now: only pytest has the repository's root on the path."""
        from bench.common.record import commit

        self.commit = commit()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what came of a test's set-up, call or clean-up."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.when != "call" and report.outcome == "passed":
            return
        if self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            text = report.longreprtext.replace(f"{ROOT}/", "")[-2000:]
            self.failures[report.nodeid] = text
            # At once: a run that is cut off has no summary.
            print(f"\nFAILED {report.nodeid}\n{text}", flush=True)


def main() -> int:
    """Run pytest with the arguments that are not ours; its exit status, or 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given, rest = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("scripts/gpu-test: there is no CUDA device here", file=sys.stderr)
        return 2
    recorder = Recorder()
    # A run that is cut off writes what it knows.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # That plugin warns beside xdist, and warnings are errors.
    options = ["-m", "gpu and not slow and not exhaustive", "-q", "-p", "no:benchmark"]
    code = pytest.main([*options, *rest], plugins=[recorder])
    counts = Counter(recorder.outcomes.values())
    result = {
        "schema": "graphwright.gpu-test",
        "schema_version": 1,
        "commit": recorder.commit,
        "environment": environment(torch.device("cuda")),
        "counts": dict(counts),
        "outcomes": recorder.outcomes,
        "failures": recorder.failures,
        "seconds": {name: round(s, 3) for name, s in recorder.seconds.items()},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    where = given.out / "gpu-test.json"
    where.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {where}: {dict(counts)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
