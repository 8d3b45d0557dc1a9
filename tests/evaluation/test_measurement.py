"""Rounds, ratios, intervals, break-even: with a fake clock and with real calls."""

from __future__ import annotations

import ctypes
import io
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphwright.evaluation import measurement
from graphwright.evaluation.measurement import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    TELLING_ROUNDS,
    Measurement,
    Samples,
    Timer,
    break_even,
    interleave,
    interleave_until_steady,
    median_interval,
    unsteadiness,
    weighted,
)
from graphwright.evaluation.peak_memory import MemoryMeter

times = st.floats(min_value=1e-6, max_value=1.0)


class FakeTimer(Timer):
    """Reports what each callable returns as its seconds, and notes the order of calls."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.slowest_block = measurement.HELD_UP
        self.order: list[float] = []

    def once(self, call: object) -> float:
        value = call()  # type: ignore[operator]
        if not self.order or self.order[-1] != value:
            self.order.append(value)
        return value

    def back_to_back(self, call: object, single: Sequence[float]) -> float:
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


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("seconds", "drift", "rounds"),
    [(0.01, 2, TELLING_ROUNDS), (0.01, 1, MIN_ROUNDS), (1.1, 2, MIN_ROUNDS)],
)
def test_while_it_is_unsteady_more_rounds_are_taken_if_they_are_cheap(
    seconds: float, drift: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "TELLING_S_EACH", 0.5)
    ticks = itertools.count(step=seconds)
    calls = itertools.count()
    found = interleave(
        {"a": lambda: 0.1 * (1 + next(calls) // 3 % drift), "b": lambda: 0.1},
        FakeTimer(),
        budget_s=0,
        clock=lambda: next(ticks),
    )
    assert len(found["a"].throughput) == rounds


def test_the_interval_of_many_rounds_leaves_out_its_ends() -> None:
    ends = [0.1, 0.2, 0.3, *[1.0] * (TELLING_ROUNDS - 6), 7.0, 8.0, 9.0]
    assert median_interval(ends) == (1.0, 1.0)


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


# ---------------------------------------------------------------- on a busy machine


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits that tune() has; other tests have none."""
    monkeypatch.setattr(measurement, "MAX_SPREAD", 1.5)
    monkeypatch.setattr(measurement, "MAX_HELD_UP_SHARE", 0.75)


def rounds_of(*seconds: float, calls: int = 4) -> Measurement:
    return Measurement(tuple((s,) * calls for s in seconds), seconds)


def test_calls_that_were_held_up_do_not_move_a_round() -> None:
    """Most calls wait for a core, as beside two busy processes."""
    blocks = ((72e-3, 1.2e-3, 24e-3, 1e-3, 48e-3),) * 5 + ((1.1e-3, 24e-3),)
    held_up = Measurement(blocks, (1e-3,) * 6)
    assert held_up.rounds("latency") == pytest.approx([1.1e-3] * 6)
    assert held_up.typical().median == pytest.approx(1.1e-3)
    assert held_up.typical().spread == pytest.approx(0.0)


@pytest.mark.usefixtures("strict")
def test_what_is_calm_is_steady() -> None:
    assert unsteadiness(rounds_of(*(1.0 + 0.01 * (i % 5) for i in range(10)))) == ""
    # A few rounds that were held up are no matter.
    assert unsteadiness(rounds_of(*[1.0] * 20, *[9.0] * 5)) == ""


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_spread_and_drift_are_unsteady(objective: str) -> None:
    spread = rounds_of(*[1.0, 3.0] * 10)
    assert unsteadiness(spread, objective) == "its rounds disagree by a factor of 3.0"
    drift = rounds_of(*(1.0 + 0.2 * i for i in range(20)))
    assert unsteadiness(drift, objective) == "its rounds disagree by a factor of 1.9"


@pytest.mark.usefixtures("strict")
def test_what_is_held_up_all_the_time_is_unsteady() -> None:
    """10.9 ms again and again, with a fastest call of 0.04 ms: steady, and wrong."""
    blocks = [(10.9e-3,) * 10] * 24 + [(0.04e-3,) + (10.9e-3,) * 9]
    held_up = Measurement(tuple(blocks), (10.9e-3,) * 25)
    low, high = median_interval(held_up.rounds("latency"))
    assert low == high == 10.9e-3
    why = "100% of its calls took over 3 times as long as the fastest one"
    assert unsteadiness(held_up) == why


class Machine:
    """A clock that timed calls and sleep move, and a load that holds some calls up until a time.

    Attributes:
        until: seconds; before that, all but the first calls of "threads" take 100 times as long.
        slept: seconds of each pause but for those in which threads are placed anew.
    """

    def __init__(self, until: float) -> None:
        self.now = 0.0
        self.until = until
        self.slept: list[float] = []
        self._turn = 0

    def run(self, seconds: float, *, held_up: bool) -> float:
        self._turn += held_up
        if held_up and self.now < self.until and self._turn > 4:
            seconds *= 100
        self.now += seconds
        return seconds

    def sleep(self, seconds: float) -> None:
        if seconds in measurement.PAUSES_S:
            self.slept.append(seconds)
        self.now += seconds

    def time(self, **given: float) -> dict[str, Measurement]:
        calls = {
            "eager": lambda: self.run(2e-3, held_up=False),
            "threads": lambda: self.run(1e-3, held_up=True),
        }
        return interleave_until_steady(
            calls, FakeTimer(), budget_s=1.0, clock=lambda: self.now, sleep=self.sleep, **given
        )


@pytest.mark.usefixtures("strict")
def test_on_a_quiet_machine_nothing_is_timed_again() -> None:
    machine = Machine(until=0.0)
    found = machine.time()
    assert machine.slept == []
    assert found["threads"].ratios(found["eager"]) == pytest.approx([0.5] * 25)


@pytest.mark.usefixtures("strict")
def test_what_is_unsteady_is_timed_again_later_and_longer() -> None:
    once = Machine(until=1e9).time(deadline=0.0)
    assert unsteadiness(once["threads"])
    assert not unsteadiness(once["eager"])
    machine = Machine(until=4.0)
    found = machine.time()
    assert machine.slept == [1.0]
    assert not any(map(unsteadiness, found.values()))
    assert found["threads"].ratios(found["eager"]) == pytest.approx([0.5] * 50)


@pytest.mark.usefixtures("strict")
def test_a_load_that_stays_is_given_up_after_two_more_times() -> None:
    machine = Machine(until=1e9)
    found = machine.time()
    assert machine.slept == [1.0, 4.0]
    assert unsteadiness(found["threads"])


@pytest.mark.usefixtures("strict")
def test_nothing_is_timed_again_that_would_end_too_late() -> None:
    machine = Machine(until=1e9)
    machine.time(deadline=machine.now + 16.0)
    assert machine.slept == [1.0]


def test_a_block_is_sized_by_the_fastest_call_and_ends_in_time() -> None:
    """A warm-up that was held up says nothing of the calls; and a block is not without end."""
    machine = Machine(until=0.05)
    found = interleave({"a": lambda: machine.run(1e-3, held_up=True)}, FakeTimer(), budget_s=1.0)
    assert {len(block) for block in found["a"].latency[1:]} == {10}
    slow = interleave({"a": lambda: 0.2}, FakeTimer(), budget_s=0)["a"]
    assert {len(block) for block in slow.latency} == {1}
    held_up = itertools.chain([1e-3] * 3, itertools.repeat(0.03))
    short = interleave({"a": lambda: next(held_up)}, FakeTimer(), budget_s=0)["a"]
    assert {len(block) for block in short.latency} == {2}


class Shared:
    """Two processors, and a scheduler that puts both threads of all calls on one of them.

    Attributes:
        until: how many pauses that lasts.
        own: processors that this process has.
        share: of the calls, how many are interrupted.
        together_s: seconds that a call takes there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int, own: float = 1.0) -> None:
        self.until, self.own, self.share, self.together_s = until, own, 1.0, 24e-3
        self.now, self.own_s, self.calls, self.interruptions = 0.0, 0.0, 0, 0
        self.slept: list[float] = []
        monkeypatch.setattr(measurement, "_interruptions", lambda: self.interruptions)
        monkeypatch.setattr(measurement, "_own_seconds", lambda: self.own_s)
        monkeypatch.setattr(measurement, "_processors", lambda: 2)

    def call(self) -> float:
        together = len(self.slept) < self.until
        seconds = self.together_s if together else 0.3e-3
        self.calls += 1
        if together and int(self.calls * self.share) > int((self.calls - 1) * self.share):
            self.interruptions += 6
        self.now += seconds
        self.own_s += seconds * (self.own if together else 2.0)
        return seconds

    def time(self, **given: float) -> Measurement:
        found = interleave_until_steady(
            {"a": self.call},
            FakeTimer(),
            budget_s=1.0,
            clock=lambda: self.now,
            sleep=self.slept.append,
            **given,
        )
        return found["a"]


@pytest.mark.usefixtures("strict")
def test_threads_that_share_a_processor_are_given_time_to_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Shared(monkeypatch, until=2)
    found = shared.time()
    assert shared.slept == [measurement.PLACING_S, 2 * measurement.PLACING_S]
    assert found.typical().median == pytest.approx(0.3e-3)
    assert found.interrupted == 0.0
    assert not unsteadiness(found)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("held_up", "count", "factor"), [(24e-3, 10, measurement.HELD_UP), (1.6e-3, 25, 1.4)]
)
def test_a_block_that_is_held_up_as_a_whole_is_timed_again(
    held_up: float, count: int, factor: float
) -> None:
    """The system does not count all of what holds calls up."""
    seconds = itertools.chain([1e-3] * 27, [held_up] * count, itertools.repeat(1e-3))
    slept: list[float] = []
    timer = FakeTimer()
    timer.slowest_block = factor
    found = interleave({"a": lambda: next(seconds)}, timer, budget_s=0, sleep=slept.append)["a"]
    assert slept[0] == measurement.PLACING_S
    assert found.rounds("latency") == [1e-3] * MIN_ROUNDS


def test_how_slow_a_block_may_be_depends_on_the_device() -> None:
    assert Timer(torch.device("cpu")).slowest_block == measurement.TOGETHER == 1.4
    assert Timer(torch.device("cuda")).slowest_block == measurement.HELD_UP


def test_on_the_cpu_single_calls_are_back_to_back() -> None:
    calls = itertools.count()
    found = interleave({"a": lambda: next(calls)}, Timer(torch.device("cpu")), budget_s=0)["a"]
    singles = [measurement._undisturbed_median(b, min(b)) for b in found.latency]
    assert list(found.throughput) == pytest.approx(singles, abs=1e-9)


@pytest.mark.usefixtures("strict")
def test_calls_that_stay_interrupted_are_unsteady_however_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Shared(monkeypatch, until=1000)
    found = shared.time(deadline=0.0)
    assert shared.slept == [measurement.PLACING_S * 2**n for n in range(measurement.IN_VAIN)]
    assert found.typical().median == pytest.approx(24e-3)
    assert unsteadiness(found) == "other work interrupted it 100% of the time"
    both = weighted([(1.0, found), (3.0, Measurement(found.latency, found.throughput))])
    assert unsteadiness(both) == "other work interrupted it 100% of the time"


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("crowded", "own", "until", "seconds"),
    [(True, 1.0, 2, 0.3e-3), (True, 1.5, 1000, 0.45e-3), (False, 1.0, 1000, 0.45e-3)],
)
def test_threads_that_wake_each_other_on_one_processor_are_given_time_to_part(
    crowded: bool, own: float, until: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the calls are not interrupted, and none takes much longer than the fastest."""
    monkeypatch.setattr(measurement, "_is_crowded", lambda: crowded)
    moves: list[int] = []
    monkeypatch.setattr(measurement, "_change_processor", lambda: moves.append(1))
    shared = Shared(monkeypatch, until=until, own=own)
    shared.share, shared.together_s = 0.5, 0.45e-3
    found = shared.time()
    pauses = until if until < 9 else 0
    assert shared.slept == [measurement.PLACING_S * 2**n for n in range(pauses)]
    assert len(moves) == pauses
    assert found.typical().median == pytest.approx(seconds)
    assert not unsteadiness(found)


@pytest.mark.usefixtures("strict")
def test_threads_that_stay_on_one_processor_beside_other_work_are_unsteady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measurement, "_is_crowded", lambda: True)
    shared = Shared(monkeypatch, until=1000)
    shared.share, shared.together_s = 0.5, 0.45e-3
    assert unsteadiness(shared.time()) == "other work interrupted it 100% of the time"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has it")
def test_a_thread_goes_to_another_processor_and_may_go_anywhere_after() -> None:
    allowed = os.sched_getaffinity(0)
    processor = ctypes.CDLL(None).sched_getcpu
    moved = []
    for _ in range(20):  # The system may move it back at any time.
        before = processor()
        measurement._change_processor()
        moved.append(processor() != before)
        assert os.sched_getaffinity(0) == allowed
    assert any(moved) or len(allowed) == 1
    os.sched_setaffinity(0, {min(allowed)})
    try:
        measurement._change_processor()
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("wanted", "crowded"), [("3/90", True), ("2/90", False), ("?", False)])
def test_a_machine_is_crowded_if_more_threads_want_a_processor_than_there_are(
    wanted: str, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"0.67 2.29 2.65 {wanted} 31778"
    monkeypatch.setattr(measurement, "open", lambda *_, **__: io.StringIO(line), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert measurement._is_crowded() is crowded


@pytest.mark.usefixtures("strict")
def test_where_threads_part_and_meet_for_too_long_no_more_rounds_are_taken() -> None:
    """Of every other block one waits for its threads to part, for six seconds in all."""
    seconds = itertools.cycle([1e-3] * 14 + [24e-3] * 10)
    slept: list[float] = []
    found = interleave(
        {"a": lambda: next(seconds)}, FakeTimer(), budget_s=1e9, max_rounds=1000, sleep=slept.append
    )["a"]
    assert sum(slept) == pytest.approx(measurement.PLACINGS_S)
    assert MIN_ROUNDS <= len(found.throughput) < 1000


@pytest.mark.usefixtures("strict")
def test_what_is_seldom_interrupted_or_in_its_own_way_is_steady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oversubscribed = Shared(monkeypatch, until=1000, own=2.0)
    assert not unsteadiness(oversubscribed.time())
    assert oversubscribed.slept == []
    seldom = Shared(monkeypatch, until=1000)
    seldom.share = 0.05
    assert not unsteadiness(seldom.time())


@pytest.mark.usefixtures("strict")
def test_beside_busy_processes_interruptions_are_seen() -> None:
    if measurement.resource is None:
        return
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(2)]
    try:
        x = torch.randn(700, 700)
        found = interleave({"a": lambda: x @ x @ x}, Timer(torch.device("cpu")), budget_s=0.5)
        assert unsteadiness(found["a"])
    finally:
        os.sched_setaffinity(0, processors)
        for process in busy:
            process.kill()
            process.wait()


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


def test_a_long_call_is_not_called_again_for_the_caches() -> None:
    for seconds, calls in ((0.01, 2), (0.2, 1)):
        made = itertools.count(1)
        last = 0

        def call(seconds: float = seconds, made: Iterator[int] = made) -> float:
            nonlocal last
            last = next(made)
            return seconds

        timer = FakeTimer()
        timer.back_to_back = lambda call, single: 0.0  # type: ignore[method-assign, misc, assignment]  # no calls
        found = interleave({"a": call}, timer, budget_s=0, max_rounds=MIN_ROUNDS)["a"]
        timed = sum(map(len, found.latency))
        in_blocks = timed + (calls - 1) * MIN_ROUNDS
        assert measurement.least_calls(seconds) == 2 + calls * MIN_ROUNDS
        assert last - in_blocks in (2, 10), "the calls that warm it up"
