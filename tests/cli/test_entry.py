"""The command as a process: what its help imports, and what Ctrl-C does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import graphwright as gw
from graphwright.cli.main import main

# What a user's console script does.
SCRIPT = "from graphwright.cli.entry import run\nrun()\n"
INTERRUPTED = "graphwright: interrupted.\n"


@pytest.fixture
def torch_that(tmp_path: Path) -> Path:
    """A folder of Python's path with a torch of its own, to be filled in."""
    (tmp_path / "path").mkdir()
    (tmp_path / "graphwright").write_text(SCRIPT)
    return tmp_path / "path" / "torch.py"


def begun(words: Sequence[object], folder: Path | None = None) -> subprocess.Popen[str]:
    paths = [*([] if folder is None else [str(folder)]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize("way", ["module", "script"])
def test_help_and_version_need_no_pytorch(torch_that: Path, way: str) -> None:
    torch_that.write_text("raise SystemExit('PyTorch is imported')\n")
    script = torch_that.parent.parent / "graphwright"
    program: list[object] = ["-m", "graphwright"] if way == "module" else [script]
    commands = [[], *([name] for name in main.commands)] if way == "module" else [["tune"]]
    running = [begun([*program, *words, "--help"], torch_that.parent) for words in commands]
    for process, words in zip(running, commands, strict=True):
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert output.startswith(" ".join(["Usage: graphwright", *words]))
    version = begun([*program, "--version"], torch_that.parent)
    assert version.communicate() == (f"graphwright, version {gw.__version__}\n", "")


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_during_the_import_is_one_sentence(torch_that: Path) -> None:
    torch_that.write_text(
        "import time\nprint('importing', flush=True)\nwhile True:\n    try:\n"
        "        time.sleep(60)\n    except BaseException:\n        pass\n"
    )
    process = begun(["-m", "graphwright", "doctor"], torch_that.parent)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", INTERRUPTED)
    assert process.returncode == 130


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_a_second_ctrl_c_ends_at_once_with_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "slow.py"
    source.write_text(
        "import time\ndef model():\n    try:\n        print('once', flush=True)\n"
        "        time.sleep(600)\n    finally:\n        print('twice', flush=True)\n"
        "        time.sleep(600)\n"
    )
    process = begun(["-m", "graphwright", "check", f"{source}:model", "--device", "cpu"])
    assert process.stdout is not None
    for said in ("once\n", "twice\n"):
        assert process.stdout.readline() == said
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", INTERRUPTED)
    assert process.returncode == 130
