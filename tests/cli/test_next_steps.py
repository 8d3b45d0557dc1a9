"""What `tune` prints to go on with: its lines of Python find the choice in the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from shares import share

import graphwright as gw
from graphwright.cli.main import main
from graphwright.cli.next_steps import load_options, serving
from graphwright.tuning import choice_cache
from graphwright.tuning.tuner import Tuning

SOURCE = """
import torch
from torch import nn

SCALE = 2.0

def scaled(x):
    return x * SCALE

class Config:
    def __init__(self):
        self.width = 4

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x):
        return scaled(self.linear(x))

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.block, self.drop = Config(), Block(), nn.Dropout(0.5)
    def forward(self, x, mask=None):
        y = self.drop(self.block(x))
        return y if mask is None else y * mask

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x):
        return self.linear(x) + 1

def pair():
    return Mixed().eval(), (torch.randn(2, 8),)

def training():
    return Mixed(), (torch.randn(2, 8),)

def keywords():
    return Mixed().eval(), {"x": torch.randn(2, 8), "mask": torch.rand(2, 4)}

def both():
    return Mixed().eval(), (torch.randn(2, 8),), {"mask": torch.rand(2, 4)}

def single():
    return Mixed().eval(), torch.randn(2, 8)

def single_and_more():
    return Mixed().eval(), torch.randn(2, 8), {"mask": torch.rand(2, 4)}

def function():
    return scaled, (torch.randn(2, 8),)

def anonymous():
    net = Mixed().eval()
    return lambda x: scaled(net(x)), (torch.randn(2, 8),)

def scripted():
    return torch.jit.script(Plain().eval()), (torch.randn(2, 8),)

def only_model():
    return Mixed()

def ids():
    return nn.Embedding(9, 4).eval()

instance = Mixed()
"""
QUICK = ("--strategies", "eager:no_grad", "--device", "cpu", "--here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `my_model.py` is, and Python begins; what it imports is forgotten."""
    (tmp_path / "my_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    sys.modules.pop("my_model", None)
    return tmp_path


def tuned(*words: object) -> Result:
    result = CliRunner().invoke(main, ["tune", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def lines(result: Result) -> list[str]:
    """The lines of Python that were printed."""
    before, _, after = result.stdout.partition("Next, in Python:\n")
    assert after, before
    return [line[4:] for line in after.splitlines() if line.startswith("    ")]


def answer(result: Result) -> gw.TunedModule:
    """What the printed lines make, each executed as it is."""
    names: dict[str, Any] = {}
    for line in lines(result):
        exec(line, names)
    made: gw.TunedModule = names["fast"]
    return made


@pytest.mark.parametrize(
    "name",
    share(
        [
            "pair",
            "training",
            "keywords",
            "both",
            "single",
            "single_and_more",
            "function",
            "anonymous",
            pytest.param("scripted", marks=pytest.mark.filterwarnings("ignore:.*torch.jit")),
        ]
    ),
)
def test_the_printed_lines_find_the_choice_in_the_cache(folder: Path, name: str) -> None:
    result = tuned(f"my_model.py:{name}", *QUICK)
    assert "# this choice, from the cache" in "\n".join(lines(result))
    assert answer(result).report.recalled


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Mixed", "2x8:float32"),
        ("only_model", "2x8"),
        ("instance", "2x8"),
        ("pair", "3x8"),
        ("ids", "2x8:int64:9"),
        ("ids", "2x8:int32:9"),
    ],
)
def test_inputs_of_the_command_line_are_made_in_python(folder: Path, name: str, shape: str) -> None:
    result = tuned(f"my_model.py:{name}", *QUICK, "--input", shape)
    assert answer(result).report.recalled


@pytest.mark.parametrize(
    "options",
    share(
        [
            ("--budget", "20s"),
            ("--budget", "2m", "--timeout", "90s"),
            ("--objective", "throughput", "--tolerance", "1e-3"),
            ("--allow", "bf16,tf32"),
            ("--exclude", "torchscript", "--memory-limit", "1GiB"),
            ("--exhaustive", "--fresh"),
        ]
    ),
)
def test_the_printed_lines_have_the_options_of_the_run(
    folder: Path, options: tuple[str, ...]
) -> None:
    result = tuned("my_model.py:pair", *QUICK, *options)
    assert answer(result).report.recalled


def test_a_command_that_repeats_the_run_finds_its_choice_too(folder: Path) -> None:
    options = ("--input", "3x8", "--budget", "20s", "--json", "out.json", "--fresh")
    printed = tuned("my_model.py:Mixed", *QUICK, *options).stdout.splitlines()
    [command] = [line.partition(":   ")[2] for line in printed if line.startswith("Save it:")]
    assert "--budget 20s" in command
    assert command.endswith(" --save Mixed.gw")
    program, name, *words = command.split()
    assert (program, name) == ("graphwright", "tune")
    tuned(*words, "--json", "again.json")
    assert json.loads((folder / "again.json").read_text())["recalled"]


def test_a_file_elsewhere_is_imported_from_where_it_is(folder: Path) -> None:
    place = folder / "some-where" / "my-model.py"
    place.parent.mkdir()
    (place.parent / "beside.py").write_text(SOURCE)
    place.write_text("from beside import *\nclass Mine(Mixed):\n    pass\n")
    result = tuned("some-where/my-model.py:Mine", *QUICK, "--input", "2x8")
    assert "sys.path.insert(0, 'some-where')" in lines(result)
    assert answer(result).report.recalled


def test_a_package_s_function_is_imported_by_its_name(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "models.py").write_text(SOURCE)
    result = tuned("package.models:pair", *QUICK)
    assert "from package.models import pair" in lines(result)
    assert answer(result).report.recalled


@pytest.mark.slow
def test_a_file_that_is_run_itself_finds_the_choice(folder: Path) -> None:
    tuned("my_model.py:pair", *QUICK)
    text = 'import graphwright as gw\nif __name__ == "__main__":\n    model, args = pair()\n'
    text += '    print(gw.tune(model, args, strategies=["eager:no_grad"]).report.recalled)\n'
    (folder / "my_model.py").write_text(f"{SOURCE}\n{text}")
    command = [sys.executable, "my_model.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() != "None"


def test_what_the_file_defines_in_another_way_is_tuned(folder: Path) -> None:
    result = tuned("my_model.py:pair", *QUICK)
    (folder / "my_model.py").write_text(SOURCE.replace("SCALE = 2.0", "SCALE = 3.25"))
    assert not answer(result).report.recalled


def test_a_choice_that_is_not_cached_is_not_called_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_cache, "remember", lambda key, report: None)
    result = tuned("my_model.py:pair", *QUICK, "--fresh")
    text = "\n".join(lines(result))
    assert "# not cached: its file could not be written" in text
    assert "# tunes again" in text


def test_a_busy_machine_is_why_a_choice_is_not_cached(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Tuning._choose

    def chosen(tuning: Tuning) -> Any:
        found = choose(tuning)
        found.unsteady = "15 processes wait for 2 cores"
        return found

    monkeypatch.setattr(Tuning, "_choose", chosen)
    result = tuned("my_model.py:pair", *QUICK, "--fresh")
    why = "# not cached: other work on this machine disturbed the timing"
    assert why in "\n".join(lines(result))


def test_the_last_lines_save_serve_and_show_more(folder: Path) -> None:
    target = "my_model.py:pair"
    *_, save, more = tuned(target, *QUICK).stdout.splitlines()
    given = "--device cpu --strategies eager:no_grad --here"
    assert save == f"Save it:   graphwright tune {target} {given} --save pair.gw"
    assert more == f"See more:  graphwright tune {target} {given} --details"
    done = tuned(target, *QUICK, "--save", "out.gw", "--json", "out.json")
    last = done.stdout.splitlines()[-3:]
    assert last == [
        f"Time it:   graphwright run out.gw --model {target}",
        f"Serve it:  graphwright serve out.gw --model {target}",
        "See more:  graphwright report out.json --details",
    ]
    before, _, after = done.stdout.partition("Next, in Python:\n")
    assert "Saved as out.gw, " in before
    assert "Saved as" not in after
    assert "Next" not in tuned(target, *QUICK, "--details").stdout


@pytest.mark.parametrize(
    ("strategy", "model", "options"),
    [
        ("fused", False, ""),
        ("torchscript:freeze", False, " --trust"),
        ("channels_last+inductor+graph", True, " --model net.py:net --trust"),
        ("eager:no_grad", True, " --model net.py:net"),
    ],
)
def test_the_command_that_serves_a_file_has_what_loading_needs(
    strategy: str, model: bool, options: str
) -> None:
    found = load_options(strategy, "net.py:net", model=model)
    assert serving(["out.gw", *found]) == f"Serve it:  graphwright serve out.gw{options}"
