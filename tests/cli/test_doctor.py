"""`graphwright doctor`: what is there, what is missing for what, and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import graphwright as gw
from graphwright.calls import watch
from graphwright.cli import doctor
from graphwright.cli.doctor import Item, State, examined, summary
from graphwright.cli.main import main
from graphwright.ops import compiled_checks
from graphwright.report.install_commands import install_command, install_extra


def item(name: str) -> Item:
    [found] = [each for each in examined() if each.name == name]
    return found


def test_the_table_fits_a_terminal_and_names_everything() -> None:
    done = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = click.unstyle(done.output).splitlines()
    assert all(len(line) <= 80 for line in lines), done.output
    assert torch.__version__ in lines[0]
    for each in examined():
        assert any(line.split()[0] == each.state.value and each.name in line for line in lines[1:])
    assert lines[-2] == summary(examined())
    assert lines[-1] == "Next:  graphwright tune my_model.py:function"


def test_json_says_the_same() -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(done.stdout)
    assert torch.__version__ in found["title"]
    assert [each["name"] for each in found["items"]] == [each.name for each in examined()]
    assert {each["state"] for each in found["items"]} <= {"ok", "missing", "broken"}


def test_without_a_compiler_it_says_what_for_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = item("C++ compiler")
    assert found.state is State.MISSING
    assert "no-such-compiler is not found" in found.found
    assert "extension()" in found.needed_for
    assert "apt install g++" in found.fix
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0
    assert "C++ compiler" in done.output.splitlines()[-2]


def test_a_cache_that_cannot_be_written_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(taken))
    found = item("cache")
    assert found.state is State.BROKEN
    assert str(taken) in found.found
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].rstrip() == "Broken: cache."


def test_more_threads_than_cores_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    found = item("processor")
    assert found.state is State.BROKEN
    assert found.fix == "export OMP_NUM_THREADS=2"


def test_an_extra_that_lacks_a_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "uvicorn":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = item("[serve]")
    assert found == Item(
        "[serve]",
        State.MISSING,
        "without uvicorn",
        "graphwright serve",
        install_extra("serve"),
    )
    assert item("[extension]").state is State.OK


def test_every_extra_for_users_is_there() -> None:
    extras = importlib.metadata.metadata("graphwright").get_all("Provides-Extra")
    assert extras is not None
    assert set(doctor._EXTRAS) == set(extras) - {"test", "lint", "docs"}


def test_from_its_source_alone_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    installed = importlib.metadata.distribution
    monkeypatch.setattr(
        importlib.metadata,
        "distribution",
        lambda name: installed(name) if name == "pip" else requires(name),
    )
    monkeypatch.setattr(sys, "executable", "/opt/python")
    checkout = Path(gw.__file__).parents[2]
    assert "runs from its source" in item("extras").found
    assert item("extras").fix == f"/opt/python -m pip install -e {checkout}"
    assert install_extra("serve") == f'/opt/python -m pip install -e "{checkout}[serve]"'


def test_the_command_installs_for_this_python_without_an_index() -> None:
    """Whether graphwright came from a checkout or from an index: pip need not look for it."""
    command = install_extra("report").replace("pip install", "pip install --no-deps --no-index")
    done = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True)
    assert "Requirement already satisfied: graphwright[report]" in done.stdout


def test_the_command_is_short_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    assert install_command("a", "b>=2") == '.venv/bin/python -m pip install a "b>=2"'
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(python.parent))
    assert install_command("a") == "python -m pip install a"

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert install_command("a") == "python -m ensurepip && python -m pip install a"


@pytest.mark.parametrize(
    ("built_for", "driver", "state", "fix"),
    [
        (None, False, State.MISSING, ""),
        (None, True, State.BROKEN, "Install PyTorch for CUDA"),
        ("13.0", True, State.BROKEN, "nvidia-smi"),
        ("13.0", False, State.MISSING, ""),
    ],
)
def test_a_gpu_that_pytorch_cannot_use(
    built_for: str | None,
    driver: bool,
    state: State,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(doctor, "_DRIVER", "/" if driver else "/no/such/file")
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda n, **k: None if n == "nvidia-smi" else real(n, **k))
    found = item("GPU")
    assert found.state is state
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


@pytest.mark.gpu
def test_a_gpu_replays_a_graph() -> None:
    found = [each for each in examined() if each.name.startswith("GPU")]
    assert found
    assert all("a graph was replayed" in each.found for each in found)


@pytest.mark.gpu
def test_a_gpu_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory\nMore of it.")

    monkeypatch.setattr(doctor, "_replay", replay)
    [found] = [each for each in examined() if each.name.startswith("GPU")]
    assert found.state is State.BROKEN
    assert found.found == "CUDA error: out of memory"


@pytest.mark.parametrize(
    ("compiler", "state", "found"),
    [(None, State.OK, "built"), ("no-such-compiler", State.MISSING, "no C++ compiler")],
)
def test_build_builds_the_checks_or_says_why_not(
    compiler: str | None,
    state: State,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(watch, "COMPILED", [])
    monkeypatch.delenv("GRAPHWRIGHT_COMPILED_CHECKS")
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    [before] = [each for each in examined() if each.name == "checks in C++"]
    assert "doctor --build" in before.found
    if compiler is None:  # That it compiles is tested where that is needed.
        monkeypatch.setattr(compiled_checks, "library", lambda *args, **given: tmp_path)
        monkeypatch.setattr(compiled_checks, "_load", lambda path: None)
    else:
        monkeypatch.setenv("CXX", compiler)
    [after] = [each for each in examined(build=True) if each.name == "checks in C++"]
    assert after.state is state
    assert found in after.found
    done = CliRunner().invoke(main, ["doctor", "--build"])
    assert done.exit_code == 0
    assert "checks in C++" in done.output
