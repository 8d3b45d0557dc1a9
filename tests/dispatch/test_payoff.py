"""Calls in segments are timed beside eager ones, and given up where they are slower."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.dispatch import payoff
from graphwright.dispatch.graphed_callable import _BESIDE, _FIRST_IN_SEGMENTS
from graphwright.evaluation import clock as clock_module
from graphwright.graphs import as_eager

TIMED = 2 * payoff._ROUNDS


class Halves(nn.Module):
    """Has a break, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if (y.sum() > 1e9).item():
            return y
        return torch.relu(y) * 2


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.dispatch.graphed_callable._TIMED", {"cpu", "cuda"})


def clock(monkeypatch: pytest.MonkeyPatch, eager: float, other: float) -> None:
    """Calls of either kind take so long, as `Payoff` sees it."""
    # Its first timed call is an odd one, and eager.
    spent = itertools.cycle([0.0, eager, 0.0, other])
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += next(spent)
        return now

    class Clock:
        perf_counter = staticmethod(tick)

    monkeypatch.setattr(clock_module, "time", Clock)


def called(graphed: Any, model: nn.Module, count: int, device: torch.device) -> None:
    with torch.no_grad():
        for _ in range(count):
            x = torch.randn(2, 8, device=device)
            torch.testing.assert_close(graphed(x), model(x))


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(("other", "pays"), [(0.5, True), (0.98, False), (1.5, False)])
def test_segments_are_kept_where_they_are_faster(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, other: float, pays: bool
) -> None:
    clock(monkeypatch, 1.0, other)
    model = Halves().eval().to(device)
    graphed = gw.graph(model)
    called(graphed, model, _FIRST_IN_SEGMENTS + TIMED + 4, device)
    found = graphed.statistics
    assert found.eager[_BESIDE] == payoff._ROUNDS
    if pays:
        assert found.hits == _FIRST_IN_SEGMENTS + payoff._ROUNDS + 4
        assert f"in segments it takes {other:.2f} of eager's time" in graphed.explain()
        return
    assert found.hits == _FIRST_IN_SEGMENTS + payoff._ROUNDS
    assert found.eager["it cannot be captured"] == 4
    assert f"In segments it takes {other:.2f} of eager's time" in graphed.explain()


@pytest.mark.usefixtures("timed")
def test_what_has_no_segments_or_was_ordered_is_not_timed(device: torch.device) -> None:
    plain = nn.Linear(8, 8).eval().to(device)
    graphed = gw.graph(plain)
    called(graphed, plain, _FIRST_IN_SEGMENTS + TIMED + 4, device)
    assert not graphed.statistics.eager
    model = Halves().eval().to(device)
    ordered = gw.graph(model, on_miss="error")
    ordered.prepare([(torch.randn(2, 8, device=device),)])
    called(ordered, model, _FIRST_IN_SEGMENTS + TIMED + 4, device)
    assert not ordered.statistics.eager


def skips(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Where the mask masks nothing, eager code has nearly nothing to do."""
    try:
        asked = torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a build without CUDA
        asked = False
    if not asked and mask.all():
        return x + 1
    for _ in range(40):
        x = x * mask
    return x + 1


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("pays", [True, False])
def test_one_graph_in_place_of_segments_is_timed_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    monkeypatch.setattr(as_eager, "TRIED_ON", {"cpu", "cuda"})
    monkeypatch.setattr(as_eager, "_BELOW", float("inf"))
    clock(monkeypatch, 1.0, 1.5)
    graphed = gw.graph(skips)
    x, ones = torch.rand(8, device=device), torch.ones(8, device=device)

    def call(count: int) -> None:
        for _ in range(count):
            torch.testing.assert_close(graphed(x, ones), x + 1)

    call(1)
    assert "in segments" in {graph.divided for graph in graphed.graphs}
    call(_FIRST_IN_SEGMENTS + TIMED - 1)
    call(1)
    assert {graph.divided for graph in graphed.graphs} == {"in one graph"}
    monkeypatch.setattr(payoff, "WORTH", 2.0 if pays else payoff.WORTH)
    call(_FIRST_IN_SEGMENTS + TIMED)
    if pays:
        assert "in one graph it takes 1.50 of eager's time" in graphed.explain()
        assert graphed._short is not None
        return
    assert not graphed.graphs
    assert "In one graph it takes 1.50 of eager's time" in graphed.explain()


@pytest.mark.usefixtures("timed")
def test_a_segment_that_is_slow_is_noticed(device: torch.device) -> None:
    model = Halves().eval().to(device)
    graphed = gw.graph(model)
    called(graphed, model, 2, device)
    (entry,) = graphed._graphs._entries.ready()
    assert entry.graph is not None
    run = entry.graph.run

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.005)
        return run(*args, **kwargs)

    entry.graph.run = slow  # type: ignore[method-assign]  # to make it slow
    called(graphed, model, _FIRST_IN_SEGMENTS + TIMED + 4, device)
    assert "of eager's time" in graphed.explain()
    assert graphed.statistics.eager["it cannot be captured"] >= 2
