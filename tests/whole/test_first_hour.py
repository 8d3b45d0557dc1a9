"""The first hour of a new user: each command prints the next, and none fails."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
MODEL = """
import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x, scale=None):
        y = self.layers(x)
        return y if scale is None else y * scale


def model():
    torch.manual_seed(0)
    return Mixed(), (torch.randn(8, 64),), {"scale": torch.rand(8, 10)}
"""
COMMAND = f"{shlex.quote(sys.executable)} -m graphwright"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of one's own, on a machine where nothing was tuned or built."""
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path


def run(line: str, folder: Path) -> str:
    """What a line of a shell prints; graphwright is called in this Python."""
    line = re.sub(r"^graphwright\b", COMMAND, line)
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def after(label: str, text: str) -> str:
    """What stands behind a label at the begin of a line."""
    [found] = re.findall(rf"^{label}:\s+(.*)$", text, re.MULTILINE)
    return str(found)


def python_in(text: str) -> str:
    """The indented lines of Python in what tune has printed."""
    lines = text.partition("Next, in Python:\n")[2].splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


@pytest.mark.long
def test_ten_commands_from_a_model_to_a_served_answer(folder: Path) -> None:
    tune = after("Next", run("graphwright doctor", folder)).replace(":function", ":model")
    strategies = "--strategies eager,eager:no_grad,torchscript:freeze"
    tuned = run(f"{tune} {strategies} --json r.json", folder)
    again = run(after("Save it", tuned), folder)
    lines = python_in(again)
    (folder / "use.py").write_text(
        f"{lines}\nprint('recalled', fast.report.recalled is not None)\n"
        "print('answered', fast(*args, **kwargs).shape)\n",
        encoding="utf-8",
    )
    used = run(f"{shlex.quote(sys.executable)} use.py", folder)
    assert "answered torch.Size([8, 10])" in used
    assert ("recalled True" in used) is ("not cached" not in lines)
    assert "torchscript:freeze" in run(after("See more", tuned), folder)
    timed = run(after("Time it", again), folder)
    assert "latency" in timed
    serve = after("Serve it", timed)
    assert serve == after("Serve it", again)
    if shutil.which("curl") is None:
        pytest.skip("there is no curl; all commands before it worked")
    assert '"outputs"' in answer_of_server(f"{serve} --http-port 0 --grpc-port 0", folder)


def answer_of_server(line: str, folder: Path) -> str:
    """What the line that a server prints gets of it."""
    words = shlex.split(re.sub(r"^graphwright\b", COMMAND, line))
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as server:
        try:
            assert server.stdout is not None
            said, until = b"", time.monotonic() + 240
            while b"Try it:" not in said or not said.endswith(b"\n"):
                ready = select.select([server.stdout], [], [], 1.0)[0]
                assert server.poll() is None, said.decode()
                assert time.monotonic() < until, said.decode()
                said += os.read(server.stdout.fileno(), 1 << 16) if ready else b""
            return run(after("Try it", said.decode()), folder)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
