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

    monkeypatch.setattr(payoff, "time", Clock)


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
