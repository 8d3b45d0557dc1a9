"""Each kind of process that is started beside the caller's, killed, hanging, starving or garbling.

The caller goes on: it has an answer of its own or a sentence that says why there is none, and
nothing of the process is left.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.diagnosis import faults
from graphwright.ops import compiled_checks
from graphwright.ops.fused import compiling
from graphwright.processes.child import GARBLED, KILLED, Child
from graphwright.processes.linux import children_of
from graphwright.tuning import background
from graphwright.tuning.background import _NO_SEARCH
from graphwright.tuning.workers import fork_server

# What runs in place of the process; it gets its arguments and its files.
SABOTEUR = """#!{python}
import os, signal, sys, time
fault = {fault!r}
if fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "starving":
    raise MemoryError("nothing is left")
if fault == "garbling":
    for handle in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(handle, b"\\x00garbage {{\\n")
        except OSError:
            pass
    sys.exit(0)
time.sleep(600)
"""
FAULTS = ("killed", "hanging", "starving", "garbling")
# How each ends, by who tells it.
STARVED = "its process ended with exit status 1: MemoryError: nothing is left"
TOLD = {
    "killed": KILLED,
    "starving": STARVED,
    "garbling": GARBLED,
    "hanging": "it runs on, and says nothing",
}
OTHERWISE = {
    ("cold starts", "hanging"): "its first answer took over 2.00 s",
    ("background", "hanging"): "It was cancelled.",
    # Whether it is still there when it is written to is chance.
    ("workers", "garbling"): f"({GARBLED}|its process ended with exit status 0)",
    ("faults", "hanging"): "it did not end within 1 s",
    ("kernels", "hanging"): "within 1 s",
    ("faults", "garbling"): "its process ended with exit status 0",
}


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = {*children_of(os.getpid())}
    yield
    deadline = time.monotonic() + 10
    while {*children_of(os.getpid())} - before:
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


@pytest.fixture
def sabotaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Have each process fail in a way."""

    def sabotage(fault: str) -> None:
        script = tmp_path / "saboteur"
        script.write_text(SABOTEUR.format(python=sys.executable, fault=fault))
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    monkeypatch.setattr(fork_server, "START_TIMEOUT_S", 3.0)
    monkeypatch.setattr(fork_server, "_END_TIMEOUT_S", 0.5)
    monkeypatch.setattr(background, "_END_TIMEOUT_S", 0.5)
    monkeypatch.setattr(compiling, "_LIMIT_S", 1.0)
    monkeypatch.setattr(compiling, "_is_cached", lambda key: False)
    monkeypatch.setattr(compiled_checks, "_LIMIT_S", 1.0)
    return sabotage


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x).relu()
        return made


MODEL, X = Model().eval(), torch.rand(2, 4)
OPTIONS: dict[str, Any] = {"strategies": ["torchscript"], "remember": False, "progress": False}


def of_workers(fault: str) -> str:
    tuned = gw.tune(MODEL, (X,), isolate=True, budget_s=8.0, **OPTIONS)
    torch.testing.assert_close(tuned(X), MODEL(X))
    return " ".join([*tuned.report.notes, *(row.reason for row in tuned.report.rows)])


def of_cold_starts(fault: str) -> str:
    options = OPTIONS | {"objective": "cold_start", "timeout_s": 2.0, "isolate": False}
    tuned = gw.tune(MODEL, (X,), **options)
    torch.testing.assert_close(tuned(X), MODEL(X))
    (row,) = (row for row in tuned.report.rows if row.strategy == "torchscript")
    return row.reason


def of_the_background(fault: str) -> str:
    with torch.no_grad():
        tuned: Any = gw.tune(MODEL, (X,), background=True, **OPTIONS)
        if fault == "hanging":
            time.sleep(1)
            tuned.close()
        else:
            with pytest.raises(gw.GraphwrightError, match=_NO_SEARCH) as ended:
                tuned.wait(30)
        torch.testing.assert_close(tuned(X), MODEL(X))
        told = tuned.explain() if fault == "hanging" else str(ended.value)
        tuned.close()
    return str(told)


def of_faults(fault: str) -> str:
    with torch.no_grad():
        graph = gw.capture(MODEL, X)
        found, note = faults.look_for_fault(graph, [X], 1.0)
    return f"{found and found.error} {note}"


def of_kernels(fault: str) -> str:
    with compiling.Compiling() as kernels:
        kernels.jobs["one"] = {}
        kernels._send()
        kernels.wait()
        assert not kernels.running
    return kernels.problem


def of_checks(fault: str) -> str:
    compiled_checks._build_beside()
    return ""


KINDS = {
    "workers": of_workers,
    "cold starts": of_cold_starts,
    "background": of_the_background,
    "faults": of_faults,
    "kernels": of_kernels,
    "checks": of_checks,
}
# These say what became of the process; others do without it, and are only slower.
SAID = ("workers", "cold starts", "background", "faults", "kernels")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::graphwright.FallbackWarning")
def test_a_process_that_fails_leaves_an_answer_and_a_sentence(
    kind: str, fault: str, sabotaged: Callable[[str], None]
) -> None:
    sabotaged(fault)
    began = time.monotonic()
    told = KINDS[kind](fault)
    assert time.monotonic() - began < 30
    if kind in SAID:
        assert re.search(OTHERWISE.get((kind, fault), re.escape(TOLD[fault])), told)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_process_whose_end_nobody_tells_is_ended_all_the_same() -> None:
    """As in a daemon, which ignores the signal: the system reaps its children."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Child(["-c", "print('done')"]) as child:
            assert child.status_within(20) == 0
        assert child.end() == 0
        with Child(["-c", "import time; time.sleep(60)"]) as child:
            assert child.status_within(0.05) is None
    finally:
        signal.signal(signal.SIGCHLD, before)
