"""`tune --ray`: several targets, each in a task, with their results in one folder."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import graphwright as gw
from graphwright.cli.main import main
from graphwright.cli.next_steps import words_of
from graphwright.cli.ray_tasks import jobs_of, resources
from graphwright.report.report import Report

# A choice is kept only where all times were steady, and beside other tests few are.
SOURCE = """
import math
import torch
from graphwright.evaluation import measurement

measurement.MAX_SPREAD = measurement.MAX_HELD_UP_SHARE = math.inf

def small():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4).eval(), (torch.randn(2, 8),)

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'graphwright[ray]'",
)
@pytest.mark.slow
def test_one_target_that_fails_keeps_no_other_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(SOURCE)
    words = ["models.py:small", "models.py:broken", "--device", "cpu", "--out", "tuned"]
    options = ["--strategies", "torchscript", "--budget", "20s", "--here"]
    source = str(Path(gw.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "graphwright", "tune", "--ray", *words, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "2 of 2: " in done.stderr
    assert "no weights here" in " ".join(done.stdout.split())
    # Ray itself may say something of its processes.
    ours = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert all(len(line) <= 80 for line in ours), done.stdout
    folder = tmp_path / "tuned"
    report = Report.from_json((folder / "small.json").read_text())
    assert report.chosen is not None
    assert report.chosen in done.stdout
    assert gw.load(folder / "small.gw", torch_model(), trust=True).report.chosen == report.chosen
    [choice] = (folder / "choices").iterdir()
    assert json.loads(choice.read_text())["report"]["chosen"] == report.chosen
    assert "no weights here" in (folder / "broken.txt").read_text()
    assert not (folder / "broken.gw").exists()


def torch_model() -> object:
    namespace: dict[str, object] = {}
    exec(SOURCE, namespace)
    return namespace["small"]()[0]  # type: ignore[operator]


def test_jobs_have_names_of_their_own() -> None:
    targets = ["a.py:net", "b.py:net", "package.module:other"]
    assert [job.name for job in jobs_of(targets, [])] == ["net", "net-2", "other"]
    found = jobs_of(targets[:1], ["H100", "A100"])
    assert [(job.name, job.accelerator) for job in found] == [
        ("net-H100", "H100"),
        ("net-A100", "A100"),
    ]


def test_a_task_takes_a_gpu_or_a_whole_machine() -> None:
    nodes = [{"CPU": 32.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 2.0}]
    assert resources(nodes, cpu=False) == {"num_gpus": 1, "num_cpus": 4}
    assert resources(nodes, cpu=True) == {"num_cpus": 2}
    assert resources([{"CPU": 1.0, "GPU": 4.0}], cpu=False) == {"num_gpus": 1, "num_cpus": 1}
    assert resources([{"memory": 1e9}, {"CPU": 4.0}], cpu=False) == {"num_cpus": 4}
    assert resources(nodes, "H100", cpu=False)["accelerator_type"] == "H100"
    # A cluster that has yet to add its nodes.
    assert resources([], "H100", cpu=False)["num_gpus"] == 1
    assert resources([], cpu=False) == {"num_cpus": 1}


def test_options_are_handed_on_as_they_were_given() -> None:
    found: list[str] = []

    @click.command()
    @click.option("--budget", type=float)
    @click.option("--allow", multiple=True)
    @click.option("--fresh", is_flag=True)
    @click.option("--here", is_flag=True)
    @click.option("--out")
    @click.option("--timeout", default=3.0)
    @click.pass_context
    def command(context: click.Context, **options: object) -> None:
        found.extend(words_of(context, ["out"]))

    words = ["--budget", "20", "--allow", "bf16", "--allow", "tf32", "--fresh", "--out", "x"]
    assert CliRunner().invoke(command, words).exit_code == 0
    assert found == ["--budget", "20", "--allow", "bf16", "--allow", "tf32", "--fresh"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.py:f", "b.py:g"], "are for --ray"),
        (["a.py:f", "--out", "x"], "are for --ray"),
        (["a.py:f", "--ray"], "--out FOLDER"),
        (["a.py:f", "--ray", "--out", "x", "--save", "y.gw"], "nothing elsewhere"),
    ],
)
def test_options_that_do_not_fit_are_told(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["tune", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
