"""Run the benchmarks, or make the tables of docs/ from their results.

scripts/bench tune [--out DIR] [CASE ...]     tune each case in a process of its own
scripts/bench tables                          bench/results/*.json -> docs/
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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCHEMA = "graphwright.bench"
# The case that README shows.
PICTURE = "minilm"


def commit() -> str:
    """The commit under test: from git, or from GRAPHWRIGHT_COMMIT where there is no checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GRAPHWRIGHT_COMMIT", "unknown")


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


def tables() -> None:
    """docs/results.md from every result that is committed."""
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
    text = "\n".join(lines).rstrip() + "\n"
    (ROOT / "docs" / "results.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench")
    commands = parser.add_subparsers(dest="command", required=True)
    tuning = commands.add_parser("tune", help="tune each case in a process of its own")
    tuning.add_argument("cases", nargs="*", metavar="CASE")
    tuning.add_argument("--out", type=Path, default=RESULTS)
    tuning.add_argument("--options", default="", help="more options of graphwright tune")
    commands.add_parser("tables", help="make docs/results.md")
    given = parser.parse_args()
    if given.command == "tune":
        tune(given.cases, given.out, given.options.split())
    else:
        tables()


if __name__ == "__main__":
    main()
