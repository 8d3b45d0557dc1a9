"""Seconds of calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from graphwright.evaluation import clock
from graphwright.evaluation.clock import event_seconds, fastest_s, medians_in_turns, timed


class Ticking:
    """A clock that calls set forward."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now

    @classmethod
    def taking(cls, *seconds: float) -> Callable[[], int]:
        left = list(seconds)

        def call() -> int:
            cls.now += left.pop(0) if len(left) > 1 else left[0]
            return 7

        return call


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> type[Ticking]:
    monkeypatch.setattr(clock, "time", Ticking)
    return Ticking


def test_a_call_is_timed_with_its_result(ticking: type[Ticking]) -> None:
    result, seconds = timed(ticking.taking(0.5), torch.device("cpu"))
    assert result == 7
    assert seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"limit_s": 10.0, "most": 5}, 5),
        ({"limit_s": 0.0}, 2),
        ({"limit_s": 0.0, "least": 4, "warmup": 3}, 7),
        ({"limit_s": 2.5}, 3),
    ],
)
def test_the_fastest_call_within_limits(
    options: dict[str, float], calls: int, ticking: type[Ticking]
) -> None:
    made, ready = [], []
    call = ticking.taking(1.0)

    def counted() -> None:
        made.append(call())

    seconds = fastest_s(counted, ready=lambda: ready.append(1), **options)  # type: ignore[arg-type]  # numbers by name
    assert seconds == pytest.approx(1.0)
    assert len(made) == calls
    assert len(ready) == calls - int(options.get("warmup", 0))


def test_calls_take_turns_and_their_preparation_is_not_timed(ticking: type[Ticking]) -> None:
    order = []

    def prepared(name: str, call: Callable[[], object]) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            ticking.now += 100.0
            order.append(name)
            return call

        return prepare

    slow_at_first = prepared("a", ticking.taking(50.0, 1.0))
    steady = prepared("b", ticking.taking(2.0))
    found = medians_in_turns([slow_at_first, steady], torch.device("cpu"), rounds=3)
    assert found == pytest.approx([1.0, 2.0])
    assert order == ["a", "b"] * 4


@pytest.mark.gpu
def test_events_time_the_device_and_not_the_host() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    torch.mm(x, x)

    def slow_host() -> None:
        torch.mm(x, x)
        time.sleep(0.0)

    assert 0 < event_seconds(slow_host, device) < timed(slow_host, device)[1] * 1.5
