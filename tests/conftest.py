"""Fixtures that all tests share, and how the workers of pytest-xdist run them."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from graphwright.calls import threads
from graphwright.graphs import capture_budget
from graphwright.graphs.capture_budget import Capture, CaptureBudget

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each test has a cache of its own, and would build them anew; tests/calls turns them on.
os.environ.setdefault("GRAPHWRIGHT_COMPILED_CHECKS", "0")
# Ray reads this when it is imported: on Linux, too, its own clusters are to use 127.0.0.1 only.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# pytest-xdist has its workers print 80 columns; commands obey it.
os.environ.pop("COLUMNS", None)
# A busy machine is no failure.
settings.register_profile("graphwright", deadline=None)
settings.load_profile("graphwright")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One process where all would share a GPU; else a worker a core, and one more.

    Each has one thread, and many a test waits for a process of its own.
    """
    return 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long ones first; last what takes gradients and more from a process
    # (docs/reference/strategies.md).
    items.sort(key=lambda item: ("xla" in item.nodeid, item.get_closest_marker("long") is None))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that runs beside other threads is trusted less.

    Threads from before the test count for nothing: a worker's talk to the process that started it
    has one, and other tests may have left some.
    """
    running = threads.running
    before = running() - 1
    monkeypatch.setattr(threads, "running", lambda: running() - before)


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Tuning collects garbage often: it need not look at what was there before the test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short timing rounds, in one process: no test asserts on a time; no memory of other runs."""
    monkeypatch.setattr("graphwright.tuning.tuner.ISOLATED", False)
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("graphwright.tuning.tuner.SCREENING_S", 0.05)
    monkeypatch.setattr("graphwright.tuning.tuner.FINAL_S_EACH", 0.05)
    monkeypatch.setattr("graphwright.evaluation.measurement.WARMUP_S", 0.0)
    monkeypatch.setattr("graphwright.evaluation.measurement.MAX_CALLS_PER_BLOCK", 10)
    monkeypatch.setattr("graphwright.evaluation.measurement.TELLING_S_EACH", 0.0)
    # What else runs here decides nothing: only planted samples are unsteady.
    monkeypatch.setattr("graphwright.tuning.final_rounds.MOST_SETS", 1)
    monkeypatch.setattr("graphwright.evaluation.measurement.MAX_SPREAD", math.inf)
    monkeypatch.setattr("graphwright.evaluation.measurement.MAX_HELD_UP_SHARE", math.inf)
    # Neither which passes a test sees nor what answers its calls must depend on a time.
    monkeypatch.setattr("graphwright.dispatch.graphed_callable._TIMED", frozenset())
    monkeypatch.setattr("graphwright.fusion.pass_manager.WORTH", 1.0)
    # Nor must what is captured: tests of the budget set it.
    monkeypatch.setattr(capture_budget, "FREE_CAPTURES", 1 << 30)


class Clock:
    """Seconds as budgets of captures count them, told by a test.

    Attributes:
        now_s: the time.
        capture_s: what each capture takes.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.capture_s = 0.1

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Captures are limited as they are outside of tests, by a clock that the test moves."""
    clock = Clock()
    monkeypatch.setattr(capture_budget, "FREE_CAPTURES", 3)
    monkeypatch.setattr(capture_budget, "CLOCK", clock)
    settle = CaptureBudget._settle

    def settle_later(budget: CaptureBudget, capture: Capture, seconds: float, *rest: Any) -> None:
        clock.now_s += clock.capture_s
        settle(budget, capture, seconds + clock.capture_s, *rest)

    monkeypatch.setattr(CaptureBudget, "_settle", settle_later)
    return clock


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors this small are faster on one; and no other thread draws random numbers."""
    monkeypatch.setattr(threads, "running", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def heeding_ctrl_c() -> Iterator[None]:
    """What a test starts can be interrupted, as from a terminal.

    A script's shell has what it starts with `&` ignore SIGINT, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
