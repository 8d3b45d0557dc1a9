"""What every result is marked with, and where it is written."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
SCHEMA = "graphwright.bench"


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


def write(where: Path, result: dict[str, Any]) -> None:
    """Write a file, whole or not at all; the result of a benchmark with its date."""
    if "schema" in result:
        result = result | {"date": datetime.now(UTC).date().isoformat()}
    where.parent.mkdir(parents=True, exist_ok=True)
    beside = where.with_suffix(".new")
    beside.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, where)
