"""`graphwright accelerate`: a program of a file, the lines that go on with it, and mistakes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

import graphwright as gw
from graphwright.cli.main import main
from graphwright.programs import acceleration

SOURCE = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, x):
        time.sleep(0.01)
        return self.layer(x).relu()

class Program:
    def __init__(self):
        torch.manual_seed(0)
        self.net = Net().eval()
    @torch.no_grad()
    def __call__(self, x):
        return self.net(x).sum()

def make():
    return Program(), [torch.ones(2, 16)]

def with_run():
    return Program(), ({"x": torch.ones(2, 16)},), lambda program, call: program(call["x"])

def no_calls():
    return Program()

def no_list():
    return Program(), torch.ones(2, 16)

def no_modules():
    return len, [[1]]
"""
OPTIONS = ("--strategies", "torchscript:freeze", "--here")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    (tmp_path / "programs.py").write_text(SOURCE)
    return tmp_path


def accelerate(name: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["accelerate", f"programs.py:{name}", *OPTIONS, *options])


def lines_of(output: str) -> str:
    """The lines of Python that a command has printed."""
    found = output.partition("Next, in Python:\n")[2]
    return "\n".join(line.strip() for line in found.splitlines())


def test_its_lines_go_on_with_what_was_found(folder: Path) -> None:
    result = accelerate("make", "--save", "program.gw", "--json", "parts.json")
    assert result.exit_code == 0, result.output
    assert re.search(r"^Program: .* before, .* now \(.*×\)\n +\d+%  net: answered", result.stdout)
    assert "Saved torchscript:freeze as program.gw." in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    found = json.loads((folder / "parts.json").read_text())
    assert [part["chosen"] for part in found["parts"]] == ["torchscript:freeze"]
    assert found["before_s"] > found["after_s"]
    lines = lines_of(result.output)
    assert "gw.load('program.gw', program, trust=True)" in lines
    again = accelerate("with_run")
    assert "gw.accelerate(program, calls, run=run, strategies=" in again.output
    for text in (lines, lines_of(again.output)):
        names: dict[str, Any] = {}
        with mock.patch.object(acceleration, "tuned_for", side_effect=AssertionError("it tunes")):
            exec(text, names)
        (part,) = names["accelerated"].parts
        assert (part.kept, part.chosen) == (True, "torchscript:freeze")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no_calls", (), "returned a Program. Return (program, calls) or"),
        ("no_list", (), "returned a tuple of a Program, a Tensor. Return (program, calls) or"),
        ("no_modules", (), "No module was found inside of builtin_function_or_method."),
        ("mak", (), "no 'mak'. Did you mean 'make'?"),
        ("make", ("--modules", "nett"), "modules names 'nett', and the program calls no such"),
        ("make", ("--strategies", ""), "--strategies"),
        ("make", ("--json", "a/b.json"), "there is no folder a."),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    folder: Path, name: str, options: tuple[str, ...], said: str
) -> None:
    result = accelerate(name, *options)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split()), result.output


def test_what_it_returns_is_shown_in_a_notebook(folder: Path) -> None:
    programs = importlib.import_module("programs")
    options = {"strategies": ["torchscript:freeze"], "isolate": False, "progress": False}
    found = gw.accelerate(*programs.make(), remember=False, **options)
    page = found._repr_html_()
    assert "<td>torchscript:freeze</td>" in page
    assert "<strong>Program: " in page
