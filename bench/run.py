"""Run the benchmarks, or make the tables of docs/ from their results.

scripts/bench tune [--out DIR] [CASE ...]             tune each case in a process of its own
scripts/bench capture [--out DIR] [--only MODEL ...]  capture each model in a process of its own
scripts/bench buckets [--out DIR]                     a model over batch × length, by buckets
scripts/bench architectures [--out DIR]               which architectures take buckets, on the CPU
scripts/bench tables                                  bench/results/*.json -> docs/
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCHEMA = "graphwright.bench"
# The case that README shows.
PICTURE = "minilm"
# Seconds after which a model of the capture benchmark is given up.
CAPTURE_LIMIT_S = 150


def commit() -> str:
    """The commit under test: GRAPHWRIGHT_COMMIT where it is given, else git's."""
    given = os.environ.get("GRAPHWRIGHT_COMMIT")
    if given:
        return given
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def tune(cases: list[str], out: Path, options: list[str]) -> None:
    """`graphwright tune` on each case; one JSON with every report and every raw sample."""
    from cases import TUNED

    reports = {}
    for name in cases or TUNED:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            target = f"{ROOT / 'bench' / 'cases.py'}:{name}"
            command = [sys.executable, "-m", "graphwright", "tune", target, "--json", str(file)]
            subprocess.run([*command, *options], check=True)
            reports[name] = json.loads(file.read_text(encoding="utf-8"))
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "tune",
        "commit": commit(),
        "host": platform.machine(),
        "cases": reports,
    }
    out.mkdir(parents=True, exist_ok=True)
    where = out / "tune.json"
    where.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {where}")


def capture(models: list[str], out: Path, options: list[str], *, quick: bool) -> int:
    """bench/capture.py on each model and on the batch sizes; the number that failed."""
    from capture import BATCHES
    from capture_batches import BATCHED
    from capture_table import targets, to_text
    from cases import MODELS

    names = models or list(MODELS)
    found = {name: _captured(name, options) for name in names}
    batches = _process(BATCHES, options) if BATCHED in names else None
    every = [*found.values(), *([batches] if batches else [])]
    if batches is not None:
        batches = batches.get("figures", {"model": BATCHED, **batches})
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "capture",
        "commit": commit(),
        "quick": quick,
        "environment": next((one["environment"] for one in every if "environment" in one), {}),
        "models": {name: one.get("figures", one) for name, one in found.items()},
        "batches": batches,
    }
    result["targets"] = targets(result)
    out.mkdir(parents=True, exist_ok=True)
    where = out / "capture.json"
    where.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{to_text(result)}\nwrote {where}")
    return sum("failed" in one for one in every)


def architectures(out: Path) -> int:
    """bench/architectures.py on every architecture; the number that were accepted and are wrong."""
    from architectures import failures, measure
    from architectures_table import counts

    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "architectures",
        "commit": commit(),
        **measure(),
    }
    out.mkdir(parents=True, exist_ok=True)
    where = out / "architectures.json"
    where.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = list(failures(result))
    print("\n".join([*wrong, *counts(result), f"wrote {where}"]))
    return len(wrong)


def _captured(name: str, options: list[str]) -> dict[str, Any]:
    """The figures of one model: without its peers where these take the process with them."""
    import torch
    from capture import PEERS

    found = _process(name, options)
    if "failed" not in found or "--no-peers" in options or not torch.cuda.is_available():
        return found
    again = _process(name, [*options, "--no-peers"])
    for way in PEERS if "figures" in again else ():
        reason = f"one of the peers ended the process: {found['failed']}"
        again["figures"]["ways"][way] |= {"status": "failed", "reason": reason}
    return again


def _process(what: str, options: list[str]) -> dict[str, Any]:
    """What bench/capture.py found in a process of its own, or why it "failed"."""
    print(f"== {' '.join([what, *options])}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(ROOT / "bench" / "capture.py"), what, str(file), *options]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=CAPTURE_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took over {CAPTURE_LIMIT_S} s"}
        except subprocess.CalledProcessError as error:
            print(error.stderr[-2000:], file=sys.stderr)
            last = error.stderr.strip().splitlines()[-1:] or [""]
            return {"failed": f"exit status {error.returncode}: {last[0]}"}
        return json.loads(file.read_text(encoding="utf-8"))


def tables() -> None:
    """docs/results.md from every result that is committed, and docs/architectures.md."""
    from architectures_table import to_markdown as architectures_to_markdown
    from buckets import to_markdown as buckets_to_markdown
    from capture_table import to_markdown as capture_to_markdown

    from graphwright.report import Report
    from graphwright.report.markdown import to_markdown
    from graphwright.report.terminal import to_svg

    lines = [
        "# Results",
        "",
        "Made by `scripts/bench tables` from the files under `bench/results/`, which hold every",
        "raw sample. [How the figures are taken](measuring.md).",
        "",
    ]
    for file in sorted(RESULTS.glob("tune*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## `{file.name}`, commit {data['commit']}", ""]
        for report in data["cases"].values():
            lines += [to_markdown(Report.from_json(json.dumps(report)))]
        if PICTURE in data["cases"]:
            picture = to_svg(Report.from_json(json.dumps(data["cases"][PICTURE])))
            (ROOT / "docs" / "images").mkdir(exist_ok=True)
            (ROOT / "docs" / "images" / f"{PICTURE}.svg").write_text(picture, encoding="utf-8")
    for file in sorted(RESULTS.glob("capture*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## `{file.name}`, commit {data['commit']}", "", capture_to_markdown(data)]
    for file in sorted(RESULTS.glob("buckets*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## `{file.name}`, commit {data['commit']}", "", buckets_to_markdown(data)]
    text = "\n".join(lines).rstrip() + "\n"
    (ROOT / "docs" / "results.md").write_text(text, encoding="utf-8")
    for file in RESULTS.glob("architectures*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        page = architectures_to_markdown(data, file.name)
        (ROOT / "docs" / "architectures.md").write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench")
    commands = parser.add_subparsers(dest="command", required=True)
    tuning = commands.add_parser("tune", help="tune each case in a process of its own")
    tuning.add_argument("cases", nargs="*", metavar="CASE")
    tuning.add_argument("--out", type=Path, default=RESULTS)
    tuning.add_argument("--options", default="", help="more options of graphwright tune")
    capturing = commands.add_parser("capture", help="capture each model in a process of its own")
    capturing.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    capturing.add_argument("--out", type=Path, default=RESULTS)
    capturing.add_argument("--no-peers", action="store_true", help="leave PyTorch's own ways out")
    capturing.add_argument("--quick", action="store_true", help="try the script: no result")
    bucketing = commands.add_parser("buckets", help="a model over batch × length, by buckets")
    bucketing.add_argument("--out", type=Path, default=RESULTS)
    bucketing.add_argument("--quick", action="store_true", help="try the script: no result")
    taking = commands.add_parser("architectures", help="which architectures take buckets")
    taking.add_argument("--out", type=Path, default=RESULTS)
    commands.add_parser("tables", help="make docs/results.md and docs/architectures.md")
    given = parser.parse_args()
    if given.command == "tune":
        tune(given.cases, given.out, given.options.split())
    elif given.command == "capture":
        options = ["--quick"] * given.quick + ["--no-peers"] * given.no_peers
        sys.exit(capture(given.only, given.out, options, quick=given.quick))
    elif given.command == "buckets":
        from buckets import benchmark

        sys.exit(not benchmark(given.out, commit(), quick=given.quick))
    elif given.command == "architectures":
        sys.exit(architectures(given.out))
    else:
        tables()


if __name__ == "__main__":
    main()
