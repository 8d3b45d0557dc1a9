"""scripts/lines counts what is code, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("lines", ROOT / "scripts" / "lines.py")
assert spec is not None
assert spec.loader is not None
lines: Any = importlib.util.module_from_spec(spec)
sys.modules["lines"] = lines
spec.loader.exec_module(lines)

PYTHON = '''"""Of a module.

Two lines.
"""

import os  # why


def f(x):
    """Of a function."""
    # A comment.
    text = """no
    docstring"""
    return (
        x + len(text)

    )


class C:
    """Of a class."""
'''
CPP = """// A comment.
#include <x>
/* Three
   lines
*/ int a = 1;  // behind

const char* url = "https://x"; /* in a line */
const char* none = "/*"; int b = 2;
const char* more = "*/";
"""


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [("a.py", PYTHON, 8), ("a.py", "# a\n\n", 0), ("a.cpp", CPP, 5), ("a.cu", "", 0)],
)
def test_code_is_counted(name: str, text: str, count: int) -> None:
    assert lines.code_lines(name, text) == count


def test_files_that_are_gone_or_new_are_compared_too() -> None:
    now, before = {"a/x.py": 10, "a/new.py": 5, "top.py": 1}, {"a/x.py": 12, "b/gone.py": 1_000}
    rows = [row.split() for row in lines.table(now, before, rooms=False).splitlines()]
    assert rows == [
        ["a/", "15", "12", "+3"],
        ["new.py", "5", "0", "+5"],
        ["x.py", "10", "12", "-2"],
        ["b/", "0", "1,000", "-1,000"],
        ["gone.py", "0", "1,000", "-1,000"],
        [".", "1", "0", "+1"],
        ["top.py", "1", "0", "+1"],
        ["all", "16", "1,012", "-996"],
    ]
    assert lines.table(now, None, rooms=True).split() == ["a/", "15", ".", "1", "all", "16"]


def test_the_package_is_counted() -> None:
    found = lines.counted(None)
    assert {"errors.py", "calls/checks.cpp"} <= found.keys()
    assert min(found.values()) >= 0
