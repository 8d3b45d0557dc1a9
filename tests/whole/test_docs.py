"""Every Python block of README.md and docs/ runs as it stands, and prints what the page shows."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pages import PAGES, ROOT, Block, blocks
from torch.utils.cpp_extension import include_paths

# Where a block cannot run everywhere, it says so in its first line; no other is left out.
ELSEWHERE = {
    "README.md": {"slow": 1},
    "docs/how-to/operators.md": {"slow": 1, "gpu": 1},
    "docs/index.md": {"slow": 1},
    "docs/moving-from/make-graphed-callables.md": {"gpu": 1},
    "docs/moving-from/reduce-overhead.md": {"slow": 2},
}
# Models that are made smaller, but for exhaustive runs: compiling all of BERT-base takes a minute.
SMALLER = {"README.md": ("BertConfig()", "BertConfig(num_hidden_layers=2)")}
# Pages that import many libraries, or search for seconds.
LONG = {
    f"docs/how-to/{name}.md"
    for name in ("accelerate", "artifacts", "background", "buckets", "generation", "libraries")
}
# Text that no block above it prints: output of commands, and tables of measured times.
NOT_COMPARED = {
    "docs/how-to/accelerate.md": 5,
    "docs/how-to/several-shapes.md": 1,
    "docs/how-to/operators.md": 1,
    "docs/how-to/programs.md": 1,
}
# What differs from run to run.
TIME = re.compile(r"\b\d[\d.,]* ?(ns|µs|ms|s)\b")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def cases() -> Iterator[object]:
    """A page's blocks that run everywhere; these and the slow ones; on a GPU all of them."""
    for page in PAGES:
        marks = {block.mark for block in python(page)}
        if any("cuda" in block.text for block in python(page)):
            marks.add("gpu")
        for mark in sorted(marks):
            runs = {mark: mark}
            if mark == "slow" and name_of(page) in SMALLER:
                runs["exhaustive"] = "slow as it stands"
            elif not mark and name_of(page) in LONG:
                runs = {"slow": ""}
            for run, name in runs.items():
                yield pytest.param(
                    page,
                    mark,
                    name_of(page) in SMALLER and run == "slow",
                    marks=[
                        *([getattr(pytest.mark, run)] if run else []),
                        *([pytest.mark.long] if run == "slow" else []),
                    ],
                    id=" ".join(filter(None, (name_of(page), name))),
                )


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A program that runs in a folder of its own, as `python page.py` would."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    torch.manual_seed(1)  # What is shown goes by the seeds that the page sets, and no other.
    return module


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.* runs eagerly:RuntimeWarning")  # as the pages say
@pytest.mark.parametrize(("page", "mark", "smaller"), [*cases()])
def test_page(
    page: Path,
    mark: str,
    smaller: bool,
    script: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page is one program: its blocks in their order, with what those above them define."""
    file = Path(f"{page.stem}.py")
    script.__file__ = str(file.resolve())
    everything = blocks(page)
    chosen = [block for block in python(page) if block.mark in ("", mark) or mark == "gpu"]
    if smaller:
        large, small = SMALLER[name_of(page)]
        assert any(large in block.text for block in chosen)
        chosen = [replace(block, text=block.text.replace(large, small)) for block in chosen]
    file.write_text("\n".join(block.text for block in chosen), "utf-8")
    line = 0
    for block in chosen:
        try:
            if "torch.cuda.make_graphed_callables(" in block.text:  # It warns at times, not ours.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            exec(compile("\n" * line + block.text, file.name, "exec"), script.__dict__)
        except Exception as error:
            error.add_note(f"in the block at {name_of(page)}:{block.line}")
            raise
        line += block.text.count("\n") + 1
        printed = capsys.readouterr().out
        below = [each for each in everything if each.line > block.line][:1]
        # What is shown is the CPU's.
        if below and is_output(below[0]) and mark != "gpu":
            assert in_general(printed) == in_general(below[0].text), f"{name_of(page)}:{block.line}"


def is_output(block: Block) -> bool:
    return block.language == "text" and block.follows


def in_general(printed: str) -> list[str]:
    """Printed lines without what differs from run to run."""
    return [TIME.sub("…", line.rstrip()) for line in printed.rstrip().splitlines()]


def test_no_block_is_left_out_unnamed() -> None:
    known = {"python", "text", "console"}
    elsewhere: dict[str, dict[str, int]] = {}
    not_compared: dict[str, int] = {}
    for page in PAGES:
        found = blocks(page)
        assert {block.language for block in found} <= known, page
        marks = Counter(block.mark for block in python(page) if block.mark)
        if marks:
            elsewhere[name_of(page)] = dict(marks)
        before = [None, *found]
        loose = [
            block
            for block, last in zip(found, before, strict=False)
            if block.language == "text"
            and not (block.follows and last is not None and last.language == "python")
        ]
        if loose:
            not_compared[name_of(page)] = len(loose)
    assert elsewhere == ELSEWHERE
    assert not_compared == NOT_COMPARED


def test_every_block_is_python() -> None:
    """Those too that do not run here."""
    for page in PAGES:
        for block in python(page):
            compile(block.text, f"{name_of(page)}:{block.line}", "exec")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_cuda_sources_compile(tmp_path: Path) -> None:
    """On a machine without a GPU as well; what they compute is for `test_page` on one."""
    texts = [
        node.value
        for page in PAGES
        for block in python(page)
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Constant) and "__global__" in str(node.value)
    ]
    assert texts
    # PyTorch's packages for the CPU lack a header with macros that no function here needs.
    options = ["-std=c++20", "-DC10_USING_CUSTOM_GENERATED_MACROS", "-c", "-o", "/dev/null"]
    for text in texts:
        file = tmp_path / "source.cu"
        file.write_text(text)
        includes = [f"-I{folder}" for folder in include_paths("cpu")]
        done = subprocess.run(
            ["nvcc", *options, *includes, str(file)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
