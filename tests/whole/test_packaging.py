"""What is installed from a wheel or an sdist, in an environment that holds nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), (torch.randn(2, 8),)
"""


def run(*command: object, folder: Path) -> str:
    """What a command prints; nothing of this checkout or of pytest is in its way."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    found = folder / "venv" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run(found, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, folder=folder)
    return found


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    package = ROOT / "src" / "graphwright"
    there = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == there
    assert {"graphwright/py.typed", "graphwright/ops/fused/kernels/cpu.cpp"} <= names
    with tarfile.open(sdist) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert {"src", "tests", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= tops
    assert not tops & {"bench", "shared", ".ci", ".venv"}


@pytest.mark.long
@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_tunes_a_model(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    command = python.parent / "graphwright"
    items = json.loads(run(command, "doctor", "--json", folder=tmp_path))["items"]
    missing = {item["name"] for item in items if item["state"] == "missing"}
    assert missing, "an empty environment lacks what the extras bring"
    options = ("--device", "cpu", "--strategies", "eager:no_grad,torchscript", "--budget", "30s")
    text = run(command, "tune", "mine.py:model", *options, "--save", "mine.gw", folder=tmp_path)
    assert " chosen: " in text
    assert "mine.gw: model by" in run(
        command, "run", "mine.gw", "--model", "mine.py:model", folder=tmp_path
    )
    # All is there without an extra, but for what one has to bring.
    run(
        python,
        "-c",
        "import graphwright as gw; [getattr(gw, n) for n in gw.__all__]",
        folder=tmp_path,
    )


@pytest.mark.slow
def test_an_sdist_installs_the_same(python: Path, built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    install = (python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall")
    run(*install, sdist, folder=tmp_path)
    code = "import graphwright, sys; print(graphwright.__version__, graphwright.__file__)"
    version, file = run(python, "-c", code, folder=tmp_path).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == metadata("graphwright")["Version"]


def test_extras_are_named_by_task() -> None:
    extras = set(metadata("graphwright").get_all("Provides-Extra") or [])
    assert {"serve", "ray", "onnx", "xla", "report", "extension"} <= extras
    assert "Typing :: Typed" in (metadata("graphwright").get_all("Classifier") or [])
