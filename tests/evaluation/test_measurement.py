"""Rounds, ratios, intervals, break-even: with a fake clock and with real calls."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphwright.evaluation.measurement import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Measurement,
    MemoryMeter,
    Samples,
    Timer,
    break_even,
    interleave,
    median_interval,
    noise_notes,
)

times = st.floats(min_value=1e-6, max_value=1.0)


class FakeTimer(Timer):
    """Reports what each callable returns as its seconds, and notes the order of calls."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.order: list[float] = []

    def once(self, call: object) -> float:
        value = call()  # type: ignore[operator]
        if not self.order or self.order[-1] != value:
            self.order.append(value)
        return value

    def block(self, call: object, calls: int) -> float:
        return self.once(call) / 2


def test_rounds_rotate_and_every_sample_is_kept() -> None:
    timer = FakeTimer()
    ticks = itertools.count(step=1.0)
    found = interleave(
        {"a": lambda: 0.01, "b": lambda: 0.04, "c": lambda: 0.08},
        timer,
        budget_s=7.5,
        clock=lambda: next(ticks),
    )
    assert {len(m.latency) for m in found.values()} == {len(found["a"].throughput)}
    assert [len(block) for block in found["a"].latency] == [2] * len(found["a"].latency)
    assert timer.order[3:9] == [0.01, 0.04, 0.08, 0.04, 0.08, 0.01]
    assert found["b"].ratios(found["a"]) == pytest.approx([4.0] * len(found["a"].latency))
    assert found["b"].back_to_back.median == pytest.approx(0.02)


def test_at_least_and_at_most_so_many_rounds() -> None:
    calls = {"a": lambda: 0.01}
    assert len(interleave(calls, FakeTimer(), budget_s=0)["a"].throughput) == MIN_ROUNDS
    assert len(interleave(calls, FakeTimer(), budget_s=1e9)["a"].throughput) == MAX_ROUNDS


@given(st.lists(times, min_size=1, max_size=200))
def test_the_interval_holds_the_median(values: list[float]) -> None:
    low, high = median_interval(values)
    assert low <= statistics.median(values) <= high
    assert {low, high} <= set(values)


def test_the_interval_is_the_binomial_one() -> None:
    # For 25 values the 95 % ranks are the 8th and the 18th (Conover, table A3).
    assert median_interval(range(1, 26)) == (8, 18)


def test_the_interval_covers_the_true_median() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        low, high = median_interval(torch.randn(25, generator=generator).tolist())
        inside += low <= 0 <= high
    assert inside >= 0.93 * 400


@given(times, times, times, times)
def test_break_even_is_the_first_call_that_pays(a: float, b: float, c: float, d: float) -> None:
    calls = break_even(a, b, c, d)
    if calls is None:
        assert b >= d
    else:
        assert a + calls * b <= c + calls * d + 1e-6
        assert calls == 0 or a + (calls - 1) * b >= c + (calls - 1) * d - 1e-6


def test_spread_is_half_of_the_interquartile_range() -> None:
    assert Samples((1.0, 2.0, 3.0, 4.0, 5.0)).spread == 1.0
    assert Samples((1.0,)).spread == 0.0


def test_noise_is_reported_and_calm_is_not() -> None:
    calm = Measurement(tuple((1.0, 1.001) for _ in range(10)), (1.0,) * 10)
    assert noise_notes(calm) == []
    drifting = Measurement(tuple((1.0 + 0.06 * i,) * 2 for i in range(10)), (1.0,) * 10)
    assert any("drifted" in note for note in noise_notes(drifting))
    outliers = Measurement(tuple((1.0,) * 7 + (9.0, 9.0) for _ in range(10)), (1.0,) * 10)
    assert any("5% of the calls took" in note for note in noise_notes(outliers))
    wide = Measurement(tuple((1.0, 3.0) for _ in range(10)), (1.0,) * 10)
    assert any("noisy" in note for note in noise_notes(wide))


def test_peak_memory_sees_a_large_temporary(device: torch.device) -> None:
    size = 64 * 2**20
    meter = MemoryMeter(device)
    peak = meter.peak(lambda: torch.ones(size // 4, device=device).sum())
    if peak is None:  # No /proc, as on macOS.
        assert device.type == "cpu"
    else:
        assert 0.9 * size <= peak <= 1.5 * size


def test_temporaries_of_several_calls_do_not_add_up() -> None:
    """Each call finds room in another hole of the heap, where glibc keeps it once freed."""
    mib = 2**20
    torch.empty(31 * mib, dtype=torch.uint8)  # Once freed, what is smaller comes from the heap.
    sizes = [22 * mib, 23 * mib, 24 * mib]
    parts = [torch.empty(n, dtype=torch.uint8) for size in sizes for n in (size + 8192, mib)]
    del parts[::2]
    meter, turns = MemoryMeter(torch.device("cpu")), iter(sizes)
    peak = meter.peak(lambda: torch.ones(next(turns), dtype=torch.uint8))
    if peak is not None:
        assert 0.9 * sizes[-1] <= peak <= 1.5 * sizes[-1]


def test_calls_are_timed_on_the_device(device: torch.device) -> None:
    x = torch.randn(256, 256, device=device)
    found = interleave({"mm": lambda: x @ x}, Timer(device), budget_s=0.05)["mm"]
    assert found.latencies.median > 0
    assert found.back_to_back.median > 0
