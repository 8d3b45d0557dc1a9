"""tune() from end to end on small models: statuses, choice, budget, interruption, side effects."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import planted
import pytest
import torch
from planted import Counting, Planted, Small
from torch import nn

import graphwright as gw
from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.strategies.base import Availability, Built
from graphwright.strategies.registry import parse_candidates
from graphwright.tuning import choice_cache
from graphwright.tuning.final_rounds import FinalRounds
from graphwright.tuning.search import Search
from graphwright.tuning.selection import near_best, ranked
from graphwright.tuning.trial import judge
from graphwright.tuning.tuner import MOST_BUDGET_S, Tuning

# In processes of their own it takes seconds, to start them.
EITHER_WAY = pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
HAS_ONNX = all(importlib.util.find_spec(n) for n in ("onnx", "onnxscript", "onnxruntime"))
DEFECTS = {
    "previous": (planted.previous_output, Status.WRONG),
    "aliasing": (planted.aliases_input, Status.WRONG),
    "one per cent": (planted.off_by_one_per_cent, Status.WRONG),
    "raising": (planted.raises, Status.FAILED),
    "slow": (planted.far_slower, Status.SLOWER),
    "static": (planted.static_output, Status.WRONG),
    "address": (planted.cached_by_address, Status.WRONG),
    "raising later": (planted.raises_later, Status.FAILED),
    "corrupting": (planted.corrupts_weights, Status.WRONG),
}


def small(device: torch.device | str = "cpu") -> tuple[Small, torch.Tensor]:
    return Small().eval().to(device), torch.randn(4, 16, device=device)


def test_planted_strategies_get_their_status_and_none_is_chosen(device: torch.device) -> None:
    model, x = small(device)
    weight = model.first.weight.clone()
    strategies = [Planted(name, make) for name, (make, _) in DEFECTS.items()]
    report = gw.tune(model, (x,), strategies=strategies).report
    found = {row.strategy: row.status for row in report.rows}
    assert found == {"eager": Status.OK} | {n: status for n, (_, status) in DEFECTS.items()}
    assert report.chosen == "eager"
    assert all(row.reason for row in report.rows if row.status is not Status.OK)
    assert torch.equal(model.first.weight, weight)


def test_a_faster_right_strategy_is_chosen_and_called(device: torch.device) -> None:
    class Slow(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(500):
                x = x + 0
            return super().forward(x)

    model = Slow().eval().to(device)
    x = torch.randn(4, 16, device=device)
    quick = Planted("quick", lambda m: torch.no_grad()(lambda x: Small.forward(m, x)))
    tuned = gw.tune(model, (x,), strategies=[quick])
    assert tuned.report.chosen == "quick", tuned.report
    assert "quick was chosen" in tuned.report.reason
    torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.calls == {"tuned": 1}


def test_a_finalist_is_near_the_best_by_its_own_time_too() -> None:
    """Eager that wavers between two screenings must not drop the faster candidate."""

    def row(name: str, mine: float, eager: float) -> Row:
        times = {k: Measurement(((v,),) * 5, (v,) * 5) for k, v in (("m", mine), ("e", eager))}
        return Row(name, Status.OK, screening=times["m"], baseline=times["e"])

    model, x = small()
    tuning = Tuning(model, (x,), strategies=[])
    figures = {"eager": (3, 3), "slow": (1.1, 5), "fast": (0.7, 3), "beaten": (2, 3)}
    tuning.report.rows = [row(name, *times) for name, times in figures.items()]
    tuning._kept = {r.strategy: [Built(model)] for r in tuning.report.rows}
    tuning._drop_the_beaten()
    assert set(tuning._kept) == {"eager", "slow", "fast"}


def test_torch_compile_is_in_the_common_rounds_even_if_it_is_slower() -> None:
    model, x = small()
    strategies = [
        Planted("inductor", planted.right_but_slower),
        Planted("slow", planted.right_but_slower),
    ]
    report = gw.tune(model, (x,), strategies=strategies).report
    compiled, slow, eager = (report.row(name) for name in ("inductor", "slow", "eager"))
    assert compiled is not None
    assert slow is not None
    assert eager is not None
    assert compiled.status is slow.status is Status.SLOWER
    assert slow.final is None
    assert compiled.final is not None
    assert compiled.bare is not None
    assert eager.final is not None
    assert report.ratios(eager, "inductor") == eager.final.ratios(compiled.bare)
    assert report.chosen == "eager"


def test_the_common_rounds_decide_whether_a_finalist_is_slower() -> None:
    figures = {"eager": 1.0, "inductor": 0.5}
    found = {name: Measurement(((s,),) * 5, (s,) * 5) for name, s in figures.items()}
    row = Row("inductor", Status.SLOWER, "1.10 to 1.20 times eager's time")
    judge(row, found["inductor"], found["eager"], "latency")
    assert (row.status, row.reason) == (Status.OK, "")
    judge(row, found["eager"], found["inductor"], "latency")
    assert (row.status, row.reason) == (Status.SLOWER, "2.00 to 2.00 times eager's time")


# ---------------------------------------------------------------- on a busy machine


def rounds_of(*seconds: float) -> Measurement:
    return Measurement(tuple((s,) for s in seconds), seconds)


@pytest.fixture
def wild(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of candidates whose final rounds are planted: unsteady, or 1 ms and steady."""
    names: set[str] = set()

    def rounds(calls: dict[str, object], *_: object, **__: object) -> dict[str, Measurement]:
        unsteady, steady = rounds_of(*[1e-5, 1.0] * 5), rounds_of(*[1e-3] * 10)
        return {name: unsteady if name in names else steady for name in calls}

    monkeypatch.setattr("graphwright.evaluation.measurement.MAX_SPREAD", 1.5)
    monkeypatch.setattr("graphwright.tuning.final_rounds.interleave_until_steady", rounds)
    monkeypatch.setattr("graphwright.tuning.tuner.load_average", lambda: "load average 4.0")
    monkeypatch.setattr("graphwright.tuning.trial.unsteadiness", lambda *_: "")
    monkeypatch.setattr("graphwright.tuning.selection.FINALIST_FACTOR", 1e9)
    monkeypatch.setattr("graphwright.tuning.trial._SLOWER", 1e9)
    return names


def test_what_is_unsteady_and_slow_at_times_is_not_chosen_and_the_verdict_says_it(
    wild: set[str],
) -> None:
    model, x = small()
    wild.add("eager:no_grad")
    tuning = Tuning(model, (x,), strategies=["eager:no_grad", "eager:inference_mode"])
    report = tuning.run().report
    row = report.row("eager:no_grad")
    assert row is not None
    assert row.unsteady == "its rounds disagree by a factor of 100000.0"
    assert report.ratios(row) == []
    assert report.chosen != "eager:no_grad"
    assert report.reason.endswith(
        " The machine was busy (load average 4.0): eager:no_grad stayed unsteady and is not "
        "compared. Tune again when it is idle."
    )
    # What a busy machine decided is not remembered.
    key = tuning._key()
    assert key is not None
    assert choice_cache.recall(key) is None


def test_where_eager_is_unsteady_and_fast_at_times_it_is_kept(wild: set[str]) -> None:
    model, x = small()
    wild.add("eager")
    tuning = Tuning(model, (x,), strategies=["eager:no_grad", "eager:inference_mode"])
    report = tuning.run().report
    assert report.chosen == "eager"
    assert all(report.speedup(row) is None for row in report.rows)
    assert "its own time is unsteady" in report.reason
    assert "The machine was busy" in report.reason


def test_an_unsteady_figure_without_checks_does_not_mark_torch_compile(wild: set[str]) -> None:
    model, x = small()
    wild.add("torch.compile without checks")
    report = gw.tune(model, (x,), strategies=[Planted("inductor", planted.directly)]).report
    compiled = report.row("inductor")
    assert compiled is not None
    assert not compiled.unsteady
    assert compiled.bare is None
    assert report.ratios(compiled) == [1.0] * 10


def rows_of(tuning: Tuning, rounds: Mapping[str, Sequence[float]], wild: str) -> list[str]:
    """Give a tuning rows with final rounds, one of them unsteady; their names, best first."""
    report = tuning.report
    for name, seconds in rounds.items():
        row = Row(name, Status.OK, final=rounds_of(*seconds), complexity=1 - (name == "eager"))
        row.unsteady = "its rounds disagree by a factor of 2.0" * (name == wild)
        report.rows.append(row)
    found = [row.strategy for row in ranked(report, report.rows)]
    tuning._conclude(report.row(found[0]))
    return found


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_what_is_always_faster_than_the_fastest_call_of_an_unsteady_eager_is_chosen(
    objective: str,
) -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=[], objective=objective)
    rounds = {"eager": [4, 8] * 5, "good": [1.0] * 10, "better": [0.5] * 10, "slow": [5] * 10}
    assert rows_of(tuning, rounds, "eager") == ["better", "good", "eager", "slow"]
    assert tuning.report.ratios(tuning.report.rows[1]) == []
    assert "8.00× as fast as eager's fastest call. The machine was busy" in tuning.report.reason


def test_eager_is_as_fast_as_its_fastest_call_in_any_screening() -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=[])
    seen = Row("screened", Status.OK, screening=rounds_of(*[3] * 10))
    seen.baseline = rounds_of(0.9, *[3] * 9)
    tuning.report.rows.append(seen)
    assert rows_of(tuning, {"eager": [4, 8] * 5, "good": [1.0] * 10}, "eager")[0] == "eager"


def test_an_unsteady_candidate_counts_with_its_slowest_round() -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=[])
    rounds = {"eager": [10] * 10, "wild": [1, 4] * 5, "good": [3] * 10, "late": [5] * 10}
    assert rows_of(tuning, rounds, "wild") == ["good", "wild", "late", "eager"]


def test_a_steady_run_says_nothing_of_the_load_and_is_remembered(wild: set[str]) -> None:
    assert not wild
    model, x = small()
    tuning = Tuning(model, (x,), strategies=["eager:no_grad"])
    assert "busy" not in tuning.run().report.reason
    key = tuning._key()
    assert key is not None
    assert choice_cache.recall(key) is not None


def test_screening_is_not_repeated_beyond_a_tenth_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[float] = []

    def rounds(calls: dict[str, object], *_: object, deadline: float, **__: object) -> Any:
        deadlines.append(deadline - time.monotonic())
        return {name: rounds_of(*[1e-3] * 10) for name in calls}

    monkeypatch.setattr("graphwright.tuning.trial.interleave_until_steady", rounds)
    model, x = small()
    for options in ({"budget_s": 1000.0}, {"timeout_s": 200.0}):
        gw.tune(model, (x,), strategies=[], remember=False, **options)
        assert 50 < deadlines.pop() <= 100


def test_what_was_unsteady_when_screened_is_timed_again_with_the_finalists() -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=[])
    figures = {
        "eager": [3] * 5,
        "fast": [1] * 5,
        "beaten": [2] * 5,
        "hopeless": [9, 2, 9, 2, 9],
        "wild": [9, 1.4, 9, 9, 9],
        # Other work held it up, nearly always.
        "late": [1.5, 1.5, 1.05, 1.5, 1.5],
    }
    for name, times in figures.items():
        row = Row(name, Status.OK, screening=rounds_of(*times))
        row.baseline = rounds_of(*[3] * 5)
        row.unsteady = "its rounds disagree" if times[0] == 9 else ""
        tuning.report.rows.append(row)
    assert [row.strategy for row in near_best(tuning.report)] == ["fast", "wild", "late"]
    # Of what is tuned for memory, times decide nothing.
    for row, peak in zip(tuning.report.rows, (9, 1, 9, 9, 9, 9), strict=True):
        row.peak_bytes = peak
    tuning.report.objective = "memory"
    assert [row.strategy for row in near_best(tuning.report)] == ["fast"]


@pytest.mark.parametrize(
    ("left_s", "call_s", "built"),
    [
        (None, 1.0, "best slow quick whole"),
        (70, 1e-3, "slow quick whole"),
        (27, 1e-3, "quick"),
        (20, 1.0, ""),
        (17, 1e-3, "far"),
        (-1, 1e-3, ""),
    ],
)
def test_a_finalist_is_built_if_it_can_be_timed_within_the_budget(
    left_s: float | None, call_s: float, built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is no time for any of those near the best, the fastest that there is time for is.

    Inductor finds what it has compiled on disk, with frozen weights only a part of it; what others
    have done in a worker is done again.
    """
    set_ups = {"eager": 0.0, "best": 500.0, "slow": 30.0, "quick": 30.0, "whole": 30.0}
    set_ups |= {"far": 14.0, "farther": 1.0}
    speeds = {"eager": 3.0, "best": 1.0, "slow": 1.04, "quick": 1.073, "whole": 1.0995}
    speeds |= {"far": 2.0, "farther": 2.5}
    compilers = dict.fromkeys(("whole", "far", "farther"), "torchscript")
    compilers["quick"] = "inductor:freeze"
    candidates = {
        name: parse_candidates([compilers.get(name, "inductor")], ())[0] for name in speeds
    }
    report = Report("Model", [], "latency", [], {})
    for name, speed in speeds.items():
        figures = {"screening": speed, "baseline": 3.0}
        times = {key: rounds_of(*[value * call_s] * 5) for key, value in figures.items()}
        report.rows.append(Row(name, Status.OK, setup_s=set_ups[name], **times))
        report.rows[-1].build_s = 400.0 if name == "slow" else 0.0  # It shares a build there.
    deadline = None if left_s is None else time.monotonic() + left_s
    kept: dict[str, list[Built]] = {"eager": []}
    rounds = FinalRounds(report, Mock(), kept, candidates, Mock(), 1.0, deadline)
    monkeypatch.setattr(
        rounds, "_build_here", lambda row, on_failure: kept.setdefault(row.strategy, [])
    )
    monkeypatch.setattr(rounds, "_time", Mock())
    rounds.run(Mock())
    assert list(kept) == ["eager", *built.split()]
    for name in {"best", "slow", "quick", "whole"} - kept.keys():
        row = report.row(name)
        assert row is not None
        assert row.notes == ["a finalist, but not timed again: the budget left no time"]


def test_the_fastest_finalist_is_built_first_whatever_eager_took_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As measured: eager is slow while others are set up, so that the ratio to it is small."""
    report = Report("Model", [], "latency", [], {})
    for name, mine, its in (
        ("eager", 24e-3, 24e-3),
        ("early", 2.7e-3, 41e-3),
        ("late", 2.1e-3, 24e-3),
    ):
        times = {"screening": rounds_of(*[mine] * 5), "baseline": rounds_of(*[its] * 5)}
        report.rows.append(Row(name, Status.OK, setup_s=15.0, **times))
    candidates = {n: parse_candidates(["torchscript"], ())[0] for n in ("early", "late")}
    kept: dict[str, list[Built]] = {"eager": []}
    rounds = FinalRounds(report, Mock(), kept, candidates, Mock(), 1.0, time.monotonic() + 20)
    monkeypatch.setattr(rounds, "_build_here", lambda row, _: kept.setdefault(row.strategy, []))
    monkeypatch.setattr(rounds, "_time", Mock())
    rounds.run(Mock())
    assert list(kept) == ["eager", "late", "early"]


def test_of_finalists_as_fast_as_each_other_the_one_that_takes_least_is_built_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = Report("Model", [], "latency", [], {})
    figures = {"eager": 9.0, "inductor:freeze": 1.0, "inductor": 1.02, "fused": 1.05}
    for name, seconds in figures.items():
        times = {"screening": rounds_of(*[seconds] * 5), "baseline": rounds_of(*[9.0] * 5)}
        report.rows.append(Row(name, Status.OK, setup_s=1.0 if name == "fused" else 60.0, **times))
    candidates = {each.name: each for each in parse_candidates(list(figures), ())}
    kept: dict[str, list[Built]] = {"eager": []}
    rounds = FinalRounds(report, Mock(), kept, candidates, Mock(), 1.0, None)
    monkeypatch.setattr(rounds, "_build_here", lambda row, _: kept.setdefault(row.strategy, []))
    monkeypatch.setattr(rounds, "_time", Mock())
    rounds.run(Mock())
    assert list(kept) == ["eager", "inductor", "inductor:freeze", "fused"]


def test_the_search_ends_early_enough_to_build_the_best() -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=["inductor:freeze", "inductor", "fused"], budget_s=100)
    ends = tuning._started + 100

    def known(name: str, milliseconds: float, setup_s: float) -> float:
        row = Row(name, Status.OK, setup_s=setup_s, screening=rounds_of(*[milliseconds * 1e-3] * 5))
        row.baseline = rounds_of(*[20e-3] * 5)
        tuning.report.rows.append(row)
        tuning._end_in_time_for_the_best()
        found = tuning._screening.terms.deadline
        assert found is not None
        return ends - found

    assert known("eager", 20.0, 0.0) == pytest.approx(20)
    assert known("fused", 2.0, 9.0) == pytest.approx(20)  # It takes 9 s, which 20 s are enough for.
    assert known("inductor:freeze", 1.0, 50.0) == pytest.approx(0.8 * 50 + 4)
    # For this there is no time at all: others go on.
    assert known("inductor", 0.5, 999.0) == pytest.approx(20)
    # What has ended does not go on.
    tuning._screening.terms.deadline = 0.0
    tuning._end_in_time_for_the_best()
    assert tuning._screening.terms.deadline == 0.0


@pytest.mark.parametrize(
    ("setup_s", "budget_s", "given", "raised_s"),
    [(30.0, None, False, 55 + 4 + 30), (30.0, 60.0, True, 60), (300.0, None, False, 60)],
)
def test_a_default_budget_has_time_to_build_the_best(
    setup_s: float, budget_s: float | None, given: bool, raised_s: float
) -> None:
    """What was found late is not lost, unless that would take too long, or a budget was given."""
    model, x = small()
    tuning = Tuning(model, (x,), budget_s=budget_s)
    assert tuning.asked.limits.budgeted is given
    for name, seconds in (("eager", 1e-3), ("torchscript:freeze", 0.5e-3)):
        times = {"screening": rounds_of(*[seconds] * 5), "baseline": rounds_of(*[1e-3] * 5)}
        tuning.report.rows.append(Row(name, Status.OK, setup_s=setup_s, **times))
    tuning._kept["eager"] = [Built(model)]
    tuning._started -= 55.0
    tuning._screening.terms.deadline = time.monotonic() + 1.0
    tuning._end_in_time_for_the_best()
    assert tuning._budget_s == pytest.approx(raised_s, abs=1.0)
    assert tuning._screening.terms.budget_s == tuning._budget_s
    ends = tuning._screening.terms.deadline
    assert ends is not None
    assert ends - time.monotonic() < 0.5  # The search takes no longer.


@pytest.mark.parametrize("budget_s", [None, 60.0])
def test_the_search_goes_on_for_a_compiler_by_default_alone(
    budget_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = small()
    tuning = Tuning(model, (x,), budget_s=budget_s)
    tuning.report.rows.append(Row("eager", Status.OK, setup_s=0.0))
    terms = tuning._screening.terms
    usual = tuning._started + 0.8 * 60
    assert terms.deadline == pytest.approx(usual)
    for awaited in (True, False):
        monkeypatch.setattr(Search, "awaits_compiler", lambda _, awaited=awaited: awaited)
        tuning._end_in_time_for_the_best()
        most = MOST_BUDGET_S["cpu"] if awaited and budget_s is None else 60.0
        assert terms.budget_s == most
        assert terms.deadline == pytest.approx(tuning._started + 0.8 * most)
    assert tuning._budget_s == 60.0


def test_time_is_kept_for_verifying_here_and_once_more_at_the_end() -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=["torchscript"], budget_s=100)
    for name, seconds in (("eager", 1e-3), ("torchscript", 0.5e-3)):
        times = {"screening": rounds_of(*[seconds] * 5), "baseline": rounds_of(*[1e-3] * 5)}
        row = Row(name, Status.OK, setup_s=5.0, verify_s=20.0, **times)
        tuning.report.rows.append(row)
    tuning._kept["eager"] = [Built(model)]
    tuning._end_in_time_for_the_best()
    ends = tuning._screening.terms.deadline
    assert ends is not None
    assert tuning._started + 100 - ends == pytest.approx(5 + 20 + 20, abs=0.1)
    candidates = {each.name: each for each in parse_candidates(["torchscript"], ())}
    for left_s, fits in ((44.0, False), (46.0, True)):
        deadline = time.monotonic() + left_s
        rounds = FinalRounds(tuning.report, Mock(), tuning._kept, candidates, Mock(), 1.0, deadline)
        assert rounds._fits(row, 0.0) is fits
        assert rounds._rounds_end() == deadline - 20.0


@EITHER_WAY
def test_a_row_has_the_seconds_of_verifying(isolate: bool) -> None:
    model, x = small()
    options: dict[str, Any] = {"strategies": ["eager:no_grad"], "remember": False}
    report = gw.tune(model, (x,), isolate=isolate, **options).report
    assert all(0.0 < row.verify_s < report.seconds for row in report.rows)


def test_the_search_does_not_end_for_what_eager_is_as_good_as() -> None:
    model, x = small()
    tuning = Tuning(model, (x,), strategies=["torchscript"], budget_s=100)
    for name, seconds in (("eager", 1.0), ("torchscript", 1.05)):
        times = {"screening": rounds_of(*[seconds] * 5), "baseline": rounds_of(*[1.0] * 5)}
        tuning.report.rows.append(Row(name, Status.OK, setup_s=50.0, **times))
    tuning._kept["eager"] = [Built(model)]
    tuning._end_in_time_for_the_best()
    assert tuning._screening.terms.deadline == tuning._search_ends()


@pytest.mark.parametrize(
    ("left_s", "grace_s", "built"),
    [(12.0, 0.0, ["onnxruntime"]), (9.0, 0.0, []), (9.0, 9.0, ["onnxruntime"])],
)
def test_one_near_the_best_is_built_before_the_default_of_torch_compile(
    left_s: float, grace_s: float, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is quick to build, and here slower than eager."""
    report = Report("Model", [], "latency", [], {})
    figures = {"eager": (0.4, 0.0), "onnxruntime": (0.2, 6.0), "inductor": (0.45, 40.0)}
    for name, (seconds, setup_s) in figures.items():
        times = {"screening": rounds_of(*[seconds] * 5), "baseline": rounds_of(*[0.4] * 5)}
        status = Status.SLOWER if name == "inductor" else Status.OK
        report.rows.append(Row(name, status, setup_s=setup_s, **times))
    candidates = {each.name: each for each in parse_candidates(list(figures), ())}
    kept: dict[str, list[Built]] = {"eager": []}
    ends = time.monotonic() + left_s
    rounds = FinalRounds(report, Mock(), kept, candidates, Mock(), 1.0, ends, grace_s)
    monkeypatch.setattr(rounds, "_build_here", lambda row, _: kept.setdefault(row.strategy, []))
    monkeypatch.setattr(rounds, "_time", Mock())
    rounds.run(Mock())
    assert list(kept) == ["eager", *built]


def test_the_first_finalist_may_exceed_the_budget_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []
    for grace_s in (0.0, 5.0):
        report = Report("Model", [], "latency", [], {})
        for name, seconds in (("eager", 9e-3), ("fused", 1.05e-3), ("torchscript", 1e-3)):
            times = {"screening": rounds_of(*[seconds] * 5), "baseline": rounds_of(*[9e-3] * 5)}
            setup_s = 12.0 if name == "torchscript" else 1.0
            report.rows.append(Row(name, Status.OK, setup_s=setup_s, **times))
        candidates = {each.name: each for each in parse_candidates(["torchscript", "fused"], ())}
        kept: dict[str, list[Built]] = {"eager": []}
        ends = time.monotonic() + 10
        rounds = FinalRounds(report, Mock(), kept, candidates, Mock(), 1.0, ends, grace_s)
        monkeypatch.setattr(
            rounds, "_build_here", lambda row, _, kept=kept: kept.setdefault(row.strategy, [])
        )
        monkeypatch.setattr(rounds, "_time", Mock())
        rounds.run(Mock())
        built.append([*kept])
    assert built == [["eager", "fused"], ["eager", "torchscript", "fused"]]


def test_within_the_noise_the_simpler_one_is_chosen() -> None:
    model, x = small()
    twins = [Planted(n, lambda m: torch.no_grad()(m), c) for n, c in (("c9", 9), ("c5", 5))]
    tuning = Tuning(model, (x,), strategies=twins)
    tuning.run()
    same = tuning.report.row("c9")
    assert same is not None
    for row in tuning.report.rows:  # Three equal sets of samples leave only complexity.
        row.final = same.final or same.screening
        row.status = Status.OK
        tuning._kept[row.strategy] = [Built(model)]
    assert [row.strategy for row in tuning._ranked()] == ["eager", "c5", "c9"]


def test_a_held_up_round_of_the_best_does_not_make_eager_as_good_as_all() -> None:
    """Two are best; in one round of five the one was held up, and the other never."""
    figures = {
        "eager": ([40.4, 40.1, 43.6, 40.2, 39.6], 0),
        "no_grad": ([39.0, 38.8, 38.8, 38.6, 38.7], 1),
        "script": ([36.3, 35.9, 36.1, 42.1, 36.0], 10),
        "freeze": ([36.3, 36.9, 35.9, 36.1, 36.1], 11),
        "onnx": ([35.9, 36.3, 35.9, 43.1, 36.1], 15),
    }
    report = Report("Model", [], "latency", [], {})
    for name, (times, complexity) in figures.items():
        row = Row(name, Status.OK, complexity=complexity, screening=rounds_of(*times))
        row.baseline = rounds_of(*figures["eager"][0])
        row.final = rounds_of(*times)
        report.rows.append(row)
    # Of the two others, five rounds do not show that they are faster than eager.
    assert ranked(report, report.rows)[0].strategy == "freeze"
    for row in report.rows:  # Of ten rounds, one says nothing.
        times = figures[row.strategy][0]
        row.final = rounds_of(*times, *sorted(times)[:-1], statistics.median(times))
    found = [row.strategy for row in ranked(report, report.rows)]
    assert found[0] == "script"
    assert set(found[:3]) == {"script", "freeze", "onnx"}


def test_a_certain_gain_beats_simplicity_however_noisy_eager_is() -> None:
    def rounds(*times: float) -> Measurement:
        return Measurement(tuple((t,) for t in times), times)

    model, x = small()
    tuning = Tuning(model, (x,), strategies=[])
    figures = {"eager": (3, 9, 3, 9, 3, 9), "simple": (1.1,) * 6, "fast": (1.0,) * 6}
    for rank, (name, times) in enumerate(figures.items()):
        row = Row(name, Status.OK, complexity=rank, final=rounds(*times), screening=rounds(*times))
        row.baseline = rounds(*figures["eager"])
        tuning.report.rows.append(row)
        tuning._kept[name] = [Built(model)]
    assert tuning._ranked()[0].strategy == "fast"


def test_what_seems_slower_than_eager_is_not_chosen_for_being_simple() -> None:
    def rounds(*times: float) -> Measurement:
        return Measurement(tuple((t,) for t in times), times)

    model, x = small()
    tuning = Tuning(model, (x,), strategies=[])
    noisy = (1.0, 1.3, 1.3, 1.0, 1.3, 1.3)
    figures = {"eager": (1.1,) * 6, "simple": noisy, "fast": (1.0,) * 6}
    for rank, (name, times) in enumerate(figures.items()):
        row = Row(name, Status.OK, complexity=rank, final=rounds(*times), screening=rounds(*times))
        row.baseline = rounds(*figures["eager"])
        tuning.report.rows.append(row)
        tuning._kept[name] = [Built(model)]
    assert [row.strategy for row in tuning._ranked()] == ["fast", "eager", "simple"]


def test_eager_three_ways_torchscript_aot_and_inductor_on_the_cpu() -> None:
    model, x = small()
    tuned = gw.tune(model, (x,), budget_s=600)  # Enough, whatever else runs.
    report = tuned.report
    measured = {
        "eager",
        "eager:no_grad",
        "eager:inference_mode",
        "fused",
        "torchscript",
        "torchscript:freeze",
        "torchscript:optimize",
        "aot_autograd",
        "inductor",
        "inductor:freeze",
    }
    missing = {"torchscript:fuser", "inductor:reduce-overhead", "eager+graph"}
    (measured if HAS_ONNX else missing).add("onnxruntime")
    assert {r.strategy for r in report.rows if r.measurement is not None} == measured
    assert {r.strategy for r in report.rows if r.status is Status.UNAVAILABLE} == missing
    assert all(r.reason and r.remedy for r in report.rows if r.status is Status.UNAVAILABLE)
    chosen = report.chosen_row
    assert chosen is not None
    assert chosen.status is Status.OK
    speedup = report.speedup(chosen)
    assert speedup is not None
    assert speedup[0] >= 1 or report.chosen == "eager"
    for row in report.rows:
        if row.measurement is not None:
            assert row.setup_s is not None
            assert row.error is not None
            assert row.screening is not None
            assert len(row.screening.latency) >= 5
    torch.testing.assert_close(tuned(x), model(x).detach())


def test_a_spent_budget_names_what_was_not_tried() -> None:
    model, x = small()
    tuned = gw.tune(model, (x,), strategies=["eager:no_grad", "torchscript"], budget_s=1e-9)
    statuses = {row.strategy: row.status for row in tuned.report.rows}
    assert statuses == {
        "eager": Status.OK,
        "eager:no_grad": Status.NOT_TRIED,
        "torchscript": Status.NOT_TRIED,
    }
    assert "budget" in tuned.report.rows[1].reason


def test_an_interrupted_run_knows_what_was_found_by_then() -> None:
    def interrupt(_: nn.Module) -> Any:
        raise KeyboardInterrupt

    model, x = small()
    strategies: list[Any] = ["eager:no_grad", Planted("stop", interrupt), "torchscript"]
    tuning = Tuning(model, (x,), strategies=strategies)
    with pytest.raises(KeyboardInterrupt):
        tuning.run()
    report = tuning.report
    assert report.interrupted
    assert [row.strategy for row in report.rows] == ["eager", "eager:no_grad"]
    assert report.chosen in ("eager", "eager:no_grad")
    assert tuning._kept == {}


@pytest.fixture
def thawed() -> Iterator[None]:
    """The tests' own objects are not frozen, as they are otherwise."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("fails", [False, True])
def test_collections_pass_over_what_was_there_before(fails: bool) -> None:
    frozen: list[int] = []

    def look(m: nn.Module) -> Any:
        frozen.append(gc.get_freeze_count())
        if fails:
            raise KeyboardInterrupt
        return m

    model, x = small()
    with contextlib.suppress(KeyboardInterrupt):
        gw.tune(model, (x,), strategies=[Planted("look", look)], remember=False)
    assert frozen
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_what_the_program_has_frozen_stays_frozen() -> None:
    model, x = small()
    gc.freeze()
    count = gc.get_freeze_count()
    gw.tune(model, (x,), strategies=["eager:no_grad"], remember=False)
    # A frozen object that dies counts no more.
    assert 0 < gc.get_freeze_count() <= count


def test_a_winner_that_fails_when_verified_again_makes_way_for_the_next() -> None:
    model, x = small()
    good = [True]

    def fickle(m: nn.Module) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return m(x) if good[0] else m(x) * 1.01

        return call

    tuning = Tuning(model, (x,), strategies=[Planted("fickle", fickle)])
    rank = tuning._ranked

    def spoiled() -> Any:
        good[0] = False
        row = tuning.report.row("fickle")
        assert row is not None
        row.status = Status.OK
        return sorted(rank(), key=lambda r: r.strategy != "fickle")

    tuning._ranked = spoiled  # type: ignore[method-assign]
    tuning.run()
    row = tuning.report.row("fickle")
    assert row is not None
    assert tuning.report.chosen == "eager"
    assert row.status is Status.WRONG or row.strategy not in tuning._kept


def test_tuning_leaves_model_and_random_state_as_they_were(device: torch.device) -> None:
    model = Counting().eval().to(device)
    x = torch.randn(4, device=device)
    kept = x.clone()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    gw.tune(model, (x,), strategies=["eager:no_grad"])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert float(model.count) == 0
    assert torch.equal(x, kept)
    assert torch.is_grad_enabled()
    assert not model.training


@pytest.mark.parametrize("objective", ["latency", "throughput", "memory"])
def test_each_objective_chooses_and_says_why(objective: Any) -> None:
    model, x = small()
    report = gw.tune(model, (x,), objective=objective, strategies=["eager:no_grad"]).report
    assert report.objective == objective
    assert report.chosen in ("eager", "eager:no_grad")
    assert report.reason


@pytest.mark.parametrize("sized", [False, True])
def test_another_default_device_changes_nothing(sized: bool) -> None:
    model, x = small()
    buckets = gw.Buckets(batch=[4, 8]) if sized else None
    with torch.device("meta"):
        tuned = gw.tune(
            model,
            (x,),
            strategies=["eager:no_grad"],
            isolate=False,
            remember=False,
            buckets=buckets,
        )
        assert torch.equal(tuned(x), model(x))
    rows = [row.status for row in tuned.report.rows]
    assert Status.FAILED not in rows
    assert tuned.report.left_out == []
    assert not [note for note in tuned.report.notes if "no float64" in note]


def test_a_plain_function_and_keyword_inputs_can_be_tuned(device: torch.device) -> None:
    weight = torch.randn(16, 16, device=device)

    def project(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return torch.tanh(x @ weight) * scale

    x = torch.randn(4, 16, device=device)
    strategies = ["torchscript", "aot_autograd"]
    tuned = gw.tune(project, (x,), {"scale": 2.0}, strategies=strategies)
    assert {row.status for row in tuned.report.rows} <= {Status.OK, Status.SLOWER}
    assert tuned.report.eager_error is not None
    torch.testing.assert_close(tuned(x, scale=2.0), project(x, scale=2.0))
    torch.testing.assert_close(tuned(x, scale=3.0), project(x, scale=3.0))
    assert sum(n for way, n in tuned.calls.items() if way.startswith("eager")) == 1
    assert tuned.module is project


def test_lossy_precision_is_tried_when_allowed_and_bounded(device: torch.device) -> None:
    model, x = small(device)

    def too_lossy(m: nn.Module) -> Any:
        return lambda x: torch.no_grad()(m)(x) * 1.2

    tuned = gw.tune(model, (x,), strategies=["bf16", Planted("far", too_lossy)], allow=("bf16",))
    row = tuned.report.row("bf16")
    assert row is not None
    assert row.status in (Status.OK, Status.SLOWER)
    assert row.error is not None
    assert row.error.rms > 1e-4
    far = tuned.report.row("far")
    assert far is not None
    assert far.status is Status.WRONG


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"args": torch.ones(2)}, r"write \(x,\)"),
        ({"args": (torch.ones(4, 16),), "objective": "speed"}, "objective is 'latency'"),
        ({"args": (torch.ones(4, 16),), "allow": ("int4",)}, "int4"),
        ({"args": (torch.ones(4, 16),), "allow": "bf16"}, r"write allow=\('bf16',\)"),
        ({"args": (torch.ones(4, 16),), "tolerance": -1.0}, "tolerance"),
        ({"args": (torch.ones(4, 16),), "budget_s": 0}, "budget_s"),
        ({"args": (torch.ones(4, 16),), "strategies": ["warp"]}, "Unknown strategy 'warp'"),
        ({"args": (torch.ones(4, 16),), "exclude": ["warp"]}, "Unknown strategy 'warp'"),
        ({"args": (torch.ones(4, 16),), "exclude": ["eager"]}, "eager cannot be left out"),
        ({"args": (torch.ones(4, 16),), "exclude": [7]}, "exclude holds a int"),
        ({"args": (torch.ones(4, 16),), "exclude": 7}, "exclude is a int"),
        ({"args": (), "objective": "x", "allow": ("y",)}, "objective.*allow"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(gw.OptionError, match=text):
        gw.tune(Small().eval(), **options)


def test_training_mode_and_mixed_devices_are_refused() -> None:
    with pytest.raises(gw.OptionError, match=r"model.eval\(\)"):
        gw.tune(Small(), (torch.ones(4, 16),))
    with pytest.raises(gw.SignatureError, match="meta"):
        gw.tune(Small().eval(), (torch.ones(4, 16, device="meta"),))


def test_a_model_that_fails_in_eager_is_refused_with_its_line() -> None:
    with pytest.raises(gw.ModelFailed, match=r"planted\.py"):
        gw.tune(Small().eval(), (torch.ones(4, 17),))


def test_a_strategy_that_is_not_available_is_a_row() -> None:
    class Absent:
        name, complexity = "absent", 1

        def probe(self, device: torch.device) -> Availability:
            return Availability(False, "it is not installed", "pip install absent")

        def build(self, *_: Any) -> Built:
            raise AssertionError("never built")

    model, x = small()
    row = gw.tune(model, (x,), strategies=[Absent()]).report.row("absent")
    assert row is not None
    assert (row.status, row.reason, row.remedy) == (
        Status.UNAVAILABLE,
        "it is not installed",
        "pip install absent",
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_modules_that_compute_otherwise_without_gradients() -> None:
    """nn.TransformerEncoder's fast path zeroes what is padded; its slow path does not."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    kwargs = {"src_key_padding_mask": mask}
    tuned = gw.tune(model, (x,), kwargs, strategies=["eager:no_grad"])
    assert any("no_grad" in note for note in tuned.report.notes)
    for call in (x, x[:, :, :].contiguous()):
        torch.testing.assert_close(tuned(call, **kwargs), model(call, **kwargs).detach())
    other = torch.randn(2, 5, 16).double().float()[:1]
    expected = model(other, src_key_padding_mask=mask[1:])
    result = tuned(other, src_key_padding_mask=mask[1:])
    torch.testing.assert_close(result, expected.detach())
    assert not result.requires_grad
    with torch.no_grad():
        quiet = gw.tune(model, (x,), kwargs, strategies=["eager:no_grad"])
        torch.testing.assert_close(quiet(x, **kwargs), model(x, **kwargs))


def test_tracing_leaves_the_modes_of_submodules_alone() -> None:
    class TestTimeNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, track_running_stats=False)

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return self.norm(args[0])

    model = TestTimeNorm().eval()
    model.norm.train()
    tuned = gw.tune(model, (torch.randn(8, 4),), strategies=["torchscript", "torchscript:freeze"])
    assert model.norm.training
    assert tuned.report.chosen is not None


def test_a_complex_output_can_be_tuned() -> None:
    x = torch.randn(4, 16)
    tuned = gw.tune(torch.fft.rfft, (x,), strategies=["eager:no_grad"])
    assert torch.equal(tuned(x), torch.fft.rfft(x))


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(gw.OptionError, match="weight of the model has no shape"):
        gw.tune(nn.LazyLinear(3).eval(), (torch.ones(2, 2),))


@pytest.mark.parametrize(
    "options",
    [
        {"strategies": [5]},
        {"strategies": 5},
        {"allow": 5},
        {"budget_s": "10"},
        {"tolerance": "1e-3"},
        {"tolerance": float("inf")},
        {"kwargs": {1: torch.ones(1)}},
    ],
)
def test_options_of_a_wrong_type_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(gw.OptionError):
        gw.tune(Small().eval(), (torch.ones(4, 16),), **options)


def test_a_model_that_cannot_be_called_without_gradients_is_tuned_with_them() -> None:
    class Differentiates(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.square().sum(), x)[0]

    tuned = gw.tune(Differentiates().eval(), (torch.randn(4),), strategies=[], remember=False)
    assert tuned.report.chosen == "eager"
    assert any("with gradients off" in note for note in tuned.report.notes)


@EITHER_WAY
def test_a_row_says_where_the_model_itself_differs_with_gradients_off(isolate: bool) -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if torch.is_grad_enabled() else x * 3

    options: dict[str, Any] = {"strategies": ["eager:no_grad"], "remember": False}
    tuned = gw.tune(Asks().eval(), (torch.randn(4),), isolate=isolate, **options)
    row = tuned.report.row("eager:no_grad")
    assert row is not None
    assert row.status is Status.WRONG
    assert row.reason.startswith(
        "your model itself gives other results with gradients off, as it runs here: the sample "
    )
    with torch.no_grad():
        tuned = gw.tune(Asks().eval(), (torch.randn(4),), isolate=False, **options)
    row = tuned.report.row("eager:no_grad")
    assert row is not None
    assert row.status in (Status.OK, Status.SLOWER)
