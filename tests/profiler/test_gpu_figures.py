"""What is made of a GPU's figures, with a trace that is planted in place of CUPTI's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_verdict import GPU, US
from torch import nn

import graphwright as gw
from graphwright.profiler.trace import Kernel, TracedCall
from graphwright.profiler.verdict import Cause

Plant = Callable[..., gw.Profile]


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()


@pytest.fixture(name="plant")
def _plant(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Plant:
    """profile() of a small model, of which a GPU is said to have taken some times."""

    def planted(
        each: float, *, kind: str = "kernel", alone: float | None = None, **traced: float
    ) -> gw.Profile:
        room = "graphwright.profiler.profiler"
        kernels = tuple(Kernel("k", n * each, each, n, kind) for n in range(4))
        trace = TracedCall(
            kernels=kernels,
            launches=4,
            operation_s=dict.fromkeys(range(4), each),
            window_s=1.0,
            **traced,
        )
        monkeypatch.setattr(f"{room}._on_gpu", lambda subject: True)
        monkeypatch.setattr(f"{room}._SAMPLED_S", 0.01)
        monkeypatch.setattr(f"{room}._TRIALS_S", 0.05)
        monkeypatch.setattr("graphwright.profiler.timing._LIMIT_S", 0.01)
        monkeypatch.setattr(f"{room}.roofs_of", lambda device: GPU)
        monkeypatch.setattr(f"{room}.traced", lambda subject: trace)
        monkeypatch.setattr(f"{room}.device_seconds", lambda subject, host_s: alone)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        return gw.profile(model(), (torch.randn(2, 3, 8, 8),))

    return planted


def test_a_busy_device_bounds_the_call(plant: Plant) -> None:
    found = plant(10.0, alone=40.0, busy_s=40.0)
    # Nothing on the host takes as long as what the device is said to take.
    assert found.figures.device_s == pytest.approx(found.times.call_s)
    assert not found.verdict.cause.of_the_host
    assert {row.launches for row in found.table("operation")} == {0, 1}


def test_an_idle_device_leaves_the_host(plant: Plant) -> None:
    found = plant(US, alone=4 * US, busy_s=4 * US)
    assert found.verdict.cause in (Cause.LAUNCHES, Cause.PYTHON)
    graph = found.remedy("graph")
    assert graph.likely is not None
    assert graph.low > 1
    assert "back to back" in graph.why
    assert max(map(len, str(found).splitlines())) <= 80
    assert found.to_json()


def test_copies_are_transfers(plant: Plant) -> None:
    found = plant(10.0, kind="to device", busy_s=40.0)
    assert found.verdict.causes == (Cause.TRANSFERS,)
    assert found.remedy("pinned, overlapped transfers").applies


def test_reads_are_lines_to_blame(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 1e9:  # a read
                return x
            return x + 1

    monkeypatch.setattr("test_gpu_figures.model", Reads)
    monkeypatch.setattr(
        "graphwright.profiler.profiler._Gpu._waiting", lambda self: 0.9 * self.times.host_s
    )
    found = plant(US, busy_s=4 * US)
    assert found.verdict.causes == (Cause.WAITS,)
    line, what = found.verdict.lines[0]
    assert line.source.endswith("# a read")
    assert "waits" in what
    assert "host needs a value" in found.remedy("graph").why


def test_reads_that_a_capture_skips_leave_one_graph(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks whether a stream is being captured before it reads a mask."""

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.cuda.is_current_stream_capturing() and x.sum() > 1e9:
                return x
            return x + 1

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("test_gpu_figures.model", Asks)
    graph = plant(US, alone=4 * US, busy_s=4 * US).remedy("graph")
    assert graph.likely is not None
    assert "back to back" in graph.why
