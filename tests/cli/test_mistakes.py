"""Ten usual mistakes of a first hour: each gets a sentence that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import graphwright as gw
from graphwright.cli.main import main

SOURCE = """
import socket
import threading
import urllib.error
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x):
        return self.linear(x).relu()

class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

class Huge(Net):
    def forward(self, x):
        return torch.empty(1 << 46).sum() + x

def embedder():
    return Net().eval(), (torch.randn(2, 8),)

def in_training():
    return nn.Sequential(Net(), nn.Dropout(0.5)), (torch.randn(2, 8),)

def elsewhere():
    return Net().eval(), (torch.randn(2, 8, device="meta"),)

def downloads():
    try:
        raise socket.gaierror(-2, "Name or service not known")
    except OSError as error:
        raise OSError("We couldn't load bert-base-uncased.") from error

def opens_a_page():
    raise urllib.error.URLError("timed out")

def too_large():
    return Huge().eval(), (torch.randn(2, 8),)

def locked():
    return Locked().eval(), (torch.randn(2, 8),)

def interrupted():
    raise KeyboardInterrupt
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(SOURCE)
    return path


def tune(source: Path, name: str, *options: str) -> Result:
    strategies = () if "--strategies" in options else ("--strategies", "eager:no_grad")
    target = f"{source}:{name}" if name else str(source)
    return CliRunner().invoke(main, ["tune", target, "--device", "cpu", *strategies, *options])


def told(result: Result) -> str:
    """What is said on stderr of a command that was wrong; it is short, and no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [
        line for line in result.stderr.splitlines() if not line.startswith("graphwright: tune")
    ]
    assert len(lines) <= 2, lines
    return " ".join(lines)


def test_a_wrong_path(tmp_path: Path) -> None:
    text = told(tune(tmp_path / "modles.py", "embedder"))
    assert "There is no file" in text
    assert "Check the path of TARGET." in text


def test_a_wrong_name(source: Path) -> None:
    assert "Did you mean 'embedder'?" in told(tune(source, "embeder"))


def test_a_model_in_training_mode(source: Path) -> None:
    result = tune(source, "in_training")
    assert result.exit_code == 0, result.output
    assert "call model.eval() where you use it" in " ".join(result.stdout.split())


def test_a_model_in_training_mode_in_python() -> None:
    with pytest.raises(gw.GraphwrightError, match="eval"):
        gw.tune(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)), (torch.randn(2, 8),))


def test_inputs_that_are_no_tuple() -> None:
    with pytest.raises(gw.GraphwrightError, match=r"\(x,\)|tuple"):
        gw.tune(nn.Linear(8, 4).eval(), torch.randn(2, 8))  # type: ignore[arg-type]  # the mistake


def test_a_tensor_on_another_device(source: Path) -> None:
    text = told(tune(source, "elsewhere"))
    assert "cannot be put on cpu" in text
    with pytest.raises(gw.GraphwrightError, match="meta"):
        gw.tune(nn.Linear(8, 4).eval(), (torch.randn(2, 8, device="meta"),))


def test_a_misspelt_strategy(source: Path) -> None:
    text = told(tune(source, "embedder", "--strategies", "inducter+graph"))
    assert "Did you mean 'inductor'?" in text


@pytest.mark.slow
@pytest.mark.long
def test_no_compiler(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphwright", "tune", f"{source}:embedder", "--device", "cpu"]
    command += ["--strategies", "inductor", "--details"]
    environment = {name: text for name, text in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        command,
        env={**environment, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c")},
        capture_output=True,
        text=True,
        check=True,
    )
    said = " ".join(done.stdout.split())
    assert "Inductor found no C++ compiler. Install g++" in said, said


@pytest.mark.parametrize("name", ["downloads", "opens_a_page"])
def test_no_network(source: Path, name: str) -> None:
    text = told(tune(source, name))
    assert f"{name}() fails" in text
    assert "There seems to be no network: load the weights from a local folder" in text


def test_too_little_memory(source: Path) -> None:
    text = told(tune(source, "too_large"))
    assert "can't allocate memory" in text
    assert "Eager itself needs more memory than there is: give smaller inputs" in text


def test_a_model_that_cannot_be_pickled(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.tuning.tuner.ISOLATED", True)
    result = tune(source, "locked")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "tried in this process, not in worker processes: it cannot be" in text
    assert "cannot pickle '_thread.lock' object" in text


def test_ctrl_c(source: Path) -> None:
    result = tune(source, "interrupted")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "graphwright: interrupted."
