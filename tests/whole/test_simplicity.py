"""The gates that keep the code simple see what they are about, and the list only gets shorter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("simplicity", ROOT / "scripts" / "simplicity.py")
assert spec is not None
assert spec.loader is not None
simplicity: Any = importlib.util.module_from_spec(spec)
sys.modules["simplicity"] = simplicity
spec.loader.exec_module(simplicity)

BRANCHES = "def f(x):\n" + "".join(f"    if x == {n} or x: pass\n" for n in range(8))
MANY = "class C:\n    def __init__(self):\n" + "".join(
    f"        self.a{n} = {n}\n" for n in range(21)
)
FUNCTION = "def _base(): ..."
HIDDEN = "class C:\n    def __init__(self):\n        self._mine = 1\n"


@pytest.mark.parametrize(
    ("gate", "files", "found"),
    [
        ("class names", {"a.py": "class C: ...", "b.py": "class C: ..."}, {"C": 2}),
        ("class names", {"a.py": "class C: ...", "b.py": "class D: ..."}, {}),
        ("private attributes", {"a.py": HIDDEN, "b.py": "def f(c): return c._mine"}, {"b.py": 1}),
        ("private attributes", {"a.py": HIDDEN + "def f(c): return c._mine"}, {}),
        ("private attributes", {"a.py": HIDDEN, "b.py": "def f(c): return c._other"}, {}),
        # A tensor's `_base` is no function of another file's; that of a module is.
        ("private attributes", {"a.py": FUNCTION, "b.py": "def f(t): return t._base"}, {}),
        (
            "private attributes",
            {"a.py": FUNCTION, "b.py": "from . import a\ndef f(): return a._base()"},
            {"b.py": 1},
        ),
        ("branches", {"a.py": BRANCHES}, {"a.py:f": 17}),
        ("branches", {"a.py": BRANCHES.replace(" or x", "")}, {}),
        ("attributes", {"a.py": MANY}, {"a.py:C": 21}),
        ("attributes", {"a.py": MANY.replace("self.a20", "x.a20")}, {}),
    ],
)
def test_each_gate_sees_what_it_is_about(
    gate: str, files: dict[str, str], found: dict[str, int]
) -> None:
    assert simplicity.found_in(files)[gate] == found


def test_what_is_not_listed_is_told_and_so_is_what_need_not_be() -> None:
    found = {"branches": {"a.py:f": 17, "b.py:g": 16}}
    listed = {"branches": {"a.py:f": 17, "b.py:g": 18, "c.py:h": 20}}
    assert simplicity.problems(found, listed) == [
        "branches: b.py:g has 16; lower its 18",
        "branches: c.py:h has none; lower its 20",
    ]
    assert simplicity.problems(found, {}) == [
        "branches: a.py:f has 17; none may stay",
        "branches: b.py:g has 16; none may stay",
    ]
