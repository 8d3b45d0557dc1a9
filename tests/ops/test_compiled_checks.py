"""The checks in C++ are built once, before anything is timed, and what keeps them away is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted import Planted, Roundabout, directly

import graphwright as gw
from graphwright.calls import watch
from graphwright.ops import compiled_checks
from graphwright.ops.custom import building

X = torch.randn(4, 16)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing was built yet."""
    monkeypatch.setattr(watch, "COMPILED", [])
    monkeypatch.setattr(watch, "COMPILED_ARGUMENTS", [])
    monkeypatch.delenv("GRAPHWRIGHT_COMPILED_CHECKS")
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes a second and makes nothing; the file that it notes its calls in."""
    calls = tmp_path / "calls"
    script = tmp_path / "c++"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "if '-o' not in sys.argv:\n    print('planted 1.0')\n    sys.exit()\n"
        f"calls = pathlib.Path({str(calls)!r})\n"
        "calls.write_text((calls.read_text() if calls.exists() else '') + 'called ')\n"
        "time.sleep(1)\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_bytes(b'nothing')\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return calls


def built() -> list[Path]:
    return list(building.folder().glob("*/*.so"))


def test_tune_has_them_before_it_times_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    first = gw.tuning.tuner.Screening.rows

    def provide(**options: bool) -> None:
        time.sleep(0.2)  # Longer than it takes to come to the first candidate.
        began.append("built" if options.get("build", True) else "looked for")

    def rows(*args: object) -> object:
        began.append("timed")
        return first(*args)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(compiled_checks, "provide", provide)
    monkeypatch.setattr(gw.tuning.tuner.Screening, "rows", rows)
    gw.tune(Roundabout().eval(), (X,), strategies=[Planted("quick", directly)])
    assert began[:2] == ["built", "timed"]


def test_a_choice_from_the_cache_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Roundabout().eval()
    monkeypatch.setenv("GRAPHWRIGHT_COMPILED_CHECKS", "0")
    gw.tune(model, (X,), strategies="eager,eager:no_grad")
    monkeypatch.delenv("GRAPHWRIGHT_COMPILED_CHECKS")
    monkeypatch.setattr(compiled_checks, "begin", lambda: pytest.fail("it builds"))
    assert gw.tune(model, (X,), strategies="eager,eager:no_grad").report.recalled


@pytest.mark.parametrize("missing", ["compiler", "nothing"])
def test_a_report_says_why_checks_run_in_python(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.setattr(compiled_checks, "provide", lambda **options: None)
    report = gw.tune(Roundabout().eval(), (X,), strategies=[Planted("quick", directly)]).report
    told = [note for note in report.notes if "checks run in Python" in note]
    if missing == "nothing":
        assert not told
    else:
        assert "no C++ compiler" in told[0]
        assert "apt install g++" in told[0]


def test_that_they_are_turned_off_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_COMPILED_CHECKS", "0")
    report = gw.tune(Roundabout().eval(), (X,), strategies=[Planted("quick", directly)]).report
    assert not any("checks run in Python" in note for note in report.notes)


def test_what_was_built_and_cannot_be_used_is_told(compiler: Path) -> None:
    assert "file too short" in (compiled_checks.provide() or "")
    assert compiler.read_text() == "called "


def test_neither_ninja_nor_setuptools_is_needed(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which
    monkeypatch.setattr(
        building.shutil, "which", lambda name, **k: None if name == "ninja" else which(name, **k)
    )
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    compiled_checks.provide()
    assert built()


@pytest.mark.slow
def test_a_build_that_was_begun_ends_after_its_process(compiler: Path) -> None:
    text = (
        "import time; from graphwright.ops import compiled_checks as c;"
        "from graphwright.calls.threads import own_thread;"
        "import pathlib, os; own_thread(c._build_beside, 'checks');"
        f"calls = pathlib.Path({str(compiler)!r})\n"
        "while not calls.exists(): time.sleep(0.01)\n"
        "os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not built(), "it was not under way any more"
    wait_for(lambda: bool(built()))
    assert compiler.read_text() == "called "


def test_a_tensor_that_looks_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, path: str) -> None:
            self.graphwright_check_type = types.SimpleNamespace()
            self.graphwright_arguments_type = types.SimpleNamespace()
            self.graphwright_knows_tensor = lambda tensor, address: 0

    monkeypatch.setattr(compiled_checks.ctypes, "PyDLL", Library)
    assert "tensors" in (compiled_checks._load(Path("none.so")) or "")
    assert not watch.COMPILED


AUTOCAST, MODES = (lambda: torch.is_autocast_enabled("cpu")), torch._C._len_torch_function_stack


@pytest.mark.parametrize(
    ("heeded", "right"), [((AUTOCAST, MODES), True), ((MODES,), False), ((AUTOCAST,), False)]
)
def test_what_answers_in_another_mode_is_not_used(
    heeded: tuple[Callable[[], object], ...], right: bool
) -> None:
    def arguments(*given: object) -> Callable[..., object]:
        made_in = [read() for read in heeded]

        def made(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            return [*args, *kwargs.values()] if [read() for read in heeded] == made_in else None

        return made

    assert compiled_checks._tells_modes(arguments) is right


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 240
    while not done():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)
