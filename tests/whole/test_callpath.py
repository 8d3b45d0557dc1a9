"""A call of a known shape passes few files on its way to the recorder, and makes few frames."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What each call may have at most: files down to the recorder, climbs, frames. They only go down.
BOUNDS = {
    "graph()": (6, 0, 13),
    "graph(buckets=), a bucket's size": (6, 0, 13),
    "graph(buckets=), padded": (8, 0, 31),
    "fuse()": (None, 0, 31),
    "tune(), fused+graph": (7, 0, 14),
    "make_graphed_callables()": (8, 0, 34),
}
# PyTorch's builds for GPUs are asked whether TF32 is on.
MORE = 0 if torch.version.cuda is None else 1
# Run in a process of its own: what others have captured or switched on here would be seen.
COUNTED = """
import json, sys
sys.path.insert(0, "scripts")
import callpath
found = callpath.paths()
counts = {n: [p.depth, len(p.climbs), p.frames] for n, p in found.items()}
json.dump([counts, callpath.table(found)], sys.stdout)
"""


@pytest.fixture(scope="module")
def counted() -> tuple[dict[str, list[Any]], str]:
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", COUNTED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        check=True,
    )
    counts, table = json.loads(ran.stdout)
    return counts, table


@pytest.mark.long
def test_a_known_call_goes_no_further_than_it_did(
    counted: tuple[dict[str, list[Any]], str],
) -> None:
    counts, _ = counted
    assert counts.keys() == BOUNDS.keys()
    over = {
        name: (found, BOUNDS[name])
        for name, found in counts.items()
        if any(
            (count is None) != (most is None) or (count or 0) > (most or 0)
            for count, most in zip(found, (*BOUNDS[name][:2], BOUNDS[name][2] + MORE), strict=True)
        )
    }
    assert not over


@pytest.mark.skipif(bool(MORE), reason="the page shows PyTorch's build for the CPU")
@pytest.mark.long
def test_the_page_shows_what_is_counted(counted: tuple[dict[str, list[Any]], str]) -> None:
    _, table = counted
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    assert table in page


def test_a_callback_is_a_climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("callpath", ROOT / "scripts" / "callpath.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setenv("GRAPHWRIGHT_COMPILED_CHECKS", "0")  # As the script sets it; undone then.
    callpath: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "callpath", callpath)
    spec.loader.exec_module(callpath)
    (tmp_path / "graphs" / "cpu").mkdir(parents=True)
    files = {
        "a.py": "def begin(b, r): return b.go(back, r)\ndef back(): return [n for n in (1, 2)]\n",
        "b.py": "def go(back, r):\n    back()\n    r.run(lambda: back())\n    return 1\n",
        "graphs/cpu/recorder.py": "def run(inner): inner()\n",
    }
    modules = []
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        spaces: dict[str, Any] = {}
        exec(compile(text, str(tmp_path / name), "exec"), spaces)
        modules.append(SimpleNamespace(**spaces))
    monkeypatch.setattr(callpath, "SOURCE", str(tmp_path) + os.sep)
    a, b, recorder = modules
    found = callpath.path_of(lambda: a.begin(b, recorder))
    # What the recorder calls is its own affair.
    assert found.files == ["a.py", "b.py"]
    assert found.depth == 3
    assert found.climbs == [("b.py", "a.py")]
    assert found.frames == 3
