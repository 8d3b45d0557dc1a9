"""Progress of long work, where stderr is a terminal, a notebook or a log."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.threads import others_run
from graphwright.ops.custom import building
from graphwright.ops.custom.sources import Unit
from graphwright.report import progress
from graphwright.report.progress import Silent, progress_shown


def wait_for(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_log_has_a_line_at_the_start_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress._Lines, "every_s", 0.02)
    printed: list[str] = []

    def lines(count: int) -> bool:
        printed.extend(capsys.readouterr().err.splitlines())
        return len(printed) >= count

    with progress_shown(None, "tune(MLP)") as listener:
        wait_for(lambda: lines(1))
        assert printed[0] == "graphwright: tune(MLP)"
        listener.start(12)
        for _ in range(4):
            listener.step("inductor")
        listener.doing("setting up eager")
        before = len(printed)
        wait_for(lambda: lines(before + 3))
    assert printed[-1].startswith("graphwright: tune(MLP): 3 of 12, setting up eager")
    printed.clear()
    time.sleep(0.1)
    assert not lines(1)


def test_what_is_over_at_once_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_shown(None, "fuse(MLP)", after_s=60) as listener:
        listener.doing("verifying")
    assert capsys.readouterr().err == ""
    assert not any(thread.name == "graphwright: progress" for thread in threading.enumerate())


def test_a_logger_that_takes_it_gets_it(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "graphwright")
    with progress_shown(None, "prepare(MLP)") as listener:
        listener.doing("capturing")
        wait_for(lambda: bool(caplog.messages))
    assert caplog.messages[0].startswith("prepare(MLP)")
    assert capsys.readouterr().err == ""


def test_false_is_silent_and_a_part_is_no_news_of_its_own() -> None:
    with progress_shown(False, "tune(MLP)") as none:
        assert isinstance(none, Silent)
        with progress_shown(None, "tune(MLP)") as outer, progress_shown(None, "fuse(MLP)") as inner:
            assert isinstance(inner, Silent)
            assert not isinstance(outer, Silent)


def test_a_terminal_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    found: list[str] = []
    with progress_shown(None, "tune(MLP)") as listener:
        listener.start(12)
        listener.step("in[duct]or")
        listener.step("eager")

        def drawn() -> bool:
            found.append(capsys.readouterr().err)
            return "eager" in "".join(found)

        wait_for(drawn)
    assert "1/12" in "".join(found)


def test_a_notebook_has_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Handle:
        update = staticmethod(found.append)

    def display(content: str, **options: Any) -> Handle:
        found.append(content)
        return Handle()

    here = types.ModuleType("IPython.display")
    vars(here).update(HTML=str, display=display)
    there = types.ModuleType("IPython")
    vars(there).update(get_ipython=lambda: types.SimpleNamespace(kernel=object()), display=here)
    monkeypatch.setitem(sys.modules, "IPython", there)
    monkeypatch.setitem(sys.modules, "IPython.display", here)
    with progress_shown(None, "tune(<MLP>)") as listener:
        listener.start(12)
        listener.step("eager")
        wait_for(lambda: any("eager" in text for text in found))
    assert '<progress max="12" value="0"></progress> tune(&lt;MLP&gt;)' in found[-2]
    assert found[-1] == ""


def test_its_thread_is_not_taken_for_one_that_draws_random_numbers() -> None:
    before = others_run()
    with progress_shown(None, "tune(MLP)", after_s=60):
        assert others_run() == before


@pytest.mark.parametrize("what", ["tune", "prepare", "fuse", "building"])
def test_long_work_shows_itself(
    what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = [""]

    def shown_already() -> bool:
        said[0] += capfd.readouterr().err
        return bool(said[0])

    monkeypatch.setattr("graphwright.report.progress.SHORT_S", 0.0)
    monkeypatch.setattr(building, "_compile", lambda *rest, **options: wait_for(shown_already))
    for place in ("dispatch.graphed_callable", "fusion.fused_module", "ops.custom.building"):
        monkeypatch.setattr(f"graphwright.{place}.SHORT_S", 0.0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    unit = Unit("C++", "", (), (), ())
    work: dict[str, Callable[[], Any]] = {
        "tune": lambda: gw.tune(model, (x,), strategies=["eager:no_grad"], remember=False),
        "prepare": lambda: gw.graph(model).prepare([(x,)]),
        "fuse": lambda: gw.fuse(model, (x,)),
        "building": lambda: building.library(unit, "shown", building.Flags()),
    }
    with contextlib.suppress(ValueError):  # Nothing was built.
        work[what]()
    title = "building shown" if what == "building" else f"{what}(Sequential)"
    assert f"graphwright: {title}" in said[0] + capfd.readouterr().err
