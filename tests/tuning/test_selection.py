"""The verdict's words: they agree with the figures that the report shows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.report.table import ordered
from graphwright.tuning.selection import NO_TIME_LEFT, ranked, reason_for, undecided


def rounds(*milliseconds: float) -> Measurement:
    seconds = [each * 1e-3 for each in milliseconds]
    return Measurement(tuple((each, each) for each in seconds), tuple(seconds))


def finalist(name: str, complexity: int, times: Sequence[float]) -> Row:
    measured = rounds(*times)
    return Row(name, Status.OK, complexity=complexity, screening=measured, final=measured)


def run_of(*rows: Row, objective: str = "latency") -> Report:
    """A finished run: its best row is chosen, and the reason is given."""
    report = Report("Model", [], objective, list(rows), {})
    for row in rows:
        row.baseline = row.baseline or rows[0].screening
    finalists = [row for row in rows if row.final is not None and row.status is Status.OK]
    chosen = ranked(report, finalists or list(rows))[0]
    report.chosen = chosen.strategy
    report.reason = reason_for(report, chosen, finalists)
    return report


EAGER = (40.0, 40.4, 39.8, 40.2, 40.0, 40.1)


def test_eager_is_not_called_the_fastest_where_there_was_no_time_for_another() -> None:
    late = Row("torchscript", Status.OK, notes=[NO_TIME_LEFT], screening=rounds(20.0, 20.1, 19.9))
    eager = Row("eager", Status.OK, screening=rounds(40.0, 40.1, 39.9))
    late.baseline = eager.baseline = eager.screening
    report = Report("Model", [], "latency", [eager, late], {})
    assert reason_for(report, eager, []) == (
        "eager was chosen: torchscript seemed faster when screened, but the budget left no time to "
        "build it here. Give a larger one."
    )


def test_of_equal_ones_the_simplest_is_chosen_and_first() -> None:
    report = run_of(
        finalist("eager", 0, EAGER),
        finalist("torchscript:freeze", 11, (23.9, 24.4, 24.0, 23.8, 24.1, 24.0)),
        finalist("torchscript", 10, (24.2, 24.0, 24.3, 24.1, 24.0, 24.2)),
        finalist("onnxruntime", 15, (24.0, 23.9, 24.5, 24.0, 23.9, 24.1)),
    )
    gain = report.speedup(ordered(report)[0])
    assert gain is not None
    assert report.reason == (
        f"torchscript was chosen, {gain[0]:.2f}× as fast as eager ({gain[1]:.2f} to "
        f"{gain[2]:.2f}): two others are as fast within the noise, and it is the simplest."
    )
    # Another one has the lowest time: the table begins with the choice all the same.
    assert [row.strategy for row in ordered(report)] == [
        "torchscript",
        "onnxruntime",
        "torchscript:freeze",
        "eager",
    ]


def test_one_other_that_is_as_fast_is_named() -> None:
    rows = [
        finalist("eager", 0, [2.0] * 6),
        finalist("torchscript", 10, [1.0] * 6),
        finalist("torchscript:freeze", 11, [0.999] * 6),
        finalist("inductor", 15, [1.5] * 6),
    ]
    assert run_of(*rows).reason == (
        "torchscript was chosen, 2.00× as fast as eager (2.00 to 2.00): torchscript:freeze is as "
        "fast within the noise, and torchscript is simpler."
    )
    rows[2].complexity = 10
    assert run_of(*rows).reason.endswith(": torchscript is as fast within the noise.")


def test_what_beats_all_others_is_called_the_fastest() -> None:
    rows = [
        finalist("eager", 0, [3.0] * 6),
        finalist("fused", 5, [1.5] * 6),
        finalist("inductor", 15, [1.0] * 6),
    ]
    text = "inductor was chosen, 3.00× as fast as eager (3.00 to 3.00)"
    assert run_of(*rows).reason == f"{text}: the fastest of the 3 that agree with float64."
    rows.append(Row("off", Status.WRONG, "it is wrong"))
    rows.append(finalist("slow", 1, [4.0] * 6))
    rows[-1].status = Status.SLOWER
    assert run_of(*rows).reason == f"{text}: the fastest of the 4 that agree with float64."


def test_a_larger_factor_of_another_moment_is_explained() -> None:
    """Eager was slower beside it: without a word, the table would contradict the verdict."""
    alone = finalist("alone", 9, [1.2] * 6)
    alone.final, alone.baseline = None, rounds(*[4.8] * 6)
    report = run_of(finalist("eager", 0, [3.0] * 6), finalist("fused", 5, [1.0] * 6), alone)
    assert report.reason == (
        "fused was chosen, 3.00× as fast as eager (3.00 to 3.00). The 4.00× of alone was measured "
        "at another moment, and without per-call checks."
    )
    report.rows[1].screening, report.rows[1].baseline = rounds(*[0.7] * 6), rounds(*[3.0] * 6)
    assert reason_for(report, report.rows[1], report.rows[:2]).endswith(
        " The 4.00× of alone is of its screening, in which fused did better still."
    )
    alone.baseline = rounds(*[3.0] * 6)
    assert "alone" not in reason_for(report, report.rows[1], report.rows[:2])


def test_what_seemed_faster_and_was_not_built_is_named() -> None:
    late = finalist("inductor", 15, [1.0] * 6)
    late.final, late.notes = None, [NO_TIME_LEFT]
    eager, fused = finalist("eager", 0, [20.0] * 6), finalist("fused", 5, [1.4] * 6)
    report = run_of(eager, fused, late)
    assert report.chosen == "fused"
    assert "When screened, inductor seemed 1.40× as fast as fused, but" in report.reason
    assert report.reason.endswith("give a larger one.")
    late.screening = rounds(*[1.38] * 6)  # Finalists are within 10 %.
    assert "seemed" not in reason_for(report, fused, report.rows[:2])
    late.screening, late.notes = rounds(*[1.0] * 6), []  # Never near.
    assert "seemed" not in reason_for(report, fused, report.rows[:2])


@pytest.mark.parametrize("chosen", ["eager", "fused"])
def test_what_the_budget_was_too_small_for_is_counted(chosen: str) -> None:
    """What cannot win was not tried either, and a larger budget would not try it."""
    eager, fused = finalist("eager", 0, [2.0] * 6), finalist("fused", 5, [1.0] * 6)
    rows = [eager, fused] if chosen == "fused" else [eager]
    late = [Row(n, Status.NOT_TRIED, "the budget of 45 s left no time to measure it") for n in "ab"]
    hopeless = Row("c", Status.NOT_TRIED, "cannot win: it runs the same kernels as a")
    report = run_of(*rows, *late, hopeless)
    assert report.chosen == chosen
    assert report.reason.endswith(" The budget was too small for 2 more.")
    assert "budget" not in run_of(*rows, hopeless).reason


def test_memory_is_said_of_what_was_tuned_for_it() -> None:
    eager, fused = finalist("eager", 0, [2.0] * 6), finalist("fused", 5, [1.0] * 6)
    eager.peak_bytes, fused.peak_bytes = 8 << 20, 3 << 20
    assert run_of(eager, fused, objective="memory").reason == (
        "fused was chosen: it needs 3.0 MiB at its peak, eager 8.0 MiB; it is 2.00× as fast as "
        "eager (2.00 to 2.00)."
    )


def test_a_few_unsteady_ones_are_named_and_many_are_counted() -> None:
    rows = [finalist(name, rank, [2.0] * 6) for rank, name in enumerate(("eager", *"abcd"))]
    for row in rows[1:4]:
        row.unsteady = "its rounds disagree"
    assert "busy: a, b, c stayed unsteady and are not compared." in run_of(*rows).reason
    rows[4].unsteady = "its rounds disagree"
    assert "busy: 4 strategies stayed unsteady and are not compared." in run_of(*rows).reason


def noisy(seed: int, factor: float, noise: float, count: int = 15) -> list[float]:
    """Milliseconds of rounds around a value, as other work on the machine varies them."""
    draw = random.Random(seed)
    return [40 / factor * (1 + noise * draw.uniform(-1, 1)) for _ in range(count)]


def run_with_noise(noise: float, **speeds: float) -> Report:
    """A run in which strategies have these speeds; the first of them is the simplest."""
    rows = [
        finalist(name, rank, noisy(rank, factor, noise))
        for rank, (name, factor) in enumerate({"eager": 1.0, **speeds}.items())
    ]
    return run_of(*rows)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3])
def test_noise_does_not_choose_the_simplest(noise: float) -> None:
    """That it may be as fast as the best is not enough: it must not look far slower."""
    report = run_with_noise(noise, no_grad=1.04, script=1.2, freeze=1.2)
    rows = {row.strategy: row for row in report.rows}
    assert report.chosen in ("script", "freeze")
    chosen = rows[report.chosen]
    assert chosen.final is not None
    assert rows["no_grad"].final is not None
    if noise == 0.3:  # Noise does hide whether the simplest is slower.
        assert undecided(report)
        assert min(rows["no_grad"].final.ratios(chosen.final)) < 0.9
    else:
        assert report.chosen == "script"
        assert not undecided(report)


def test_a_simpler_one_that_noise_left_out_is_named() -> None:
    rows = [
        finalist("eager", 0, [40.0] * 6),
        finalist("no_grad", 1, [30.0, 45.0, 37.0, 45.0, 30.0, 38.0]),
        finalist("freeze", 11, [32.0] * 6),
    ]
    assert run_of(*rows).reason == (
        "freeze was chosen, 1.25× as fast as eager (1.25 to 1.25): no_grad is simpler, but seems "
        "to take 1.17× as long (0.94 to 1.41)."
    )


@pytest.mark.parametrize(("loss", "chosen"), [(0.99, "simple"), (1.005, "simple"), (1.015, "best")])
def test_on_a_quiet_machine_simplicity_is_worth_one_percent(loss: float, chosen: str) -> None:
    report = run_of(
        finalist("eager", 0, [40.0] * 15),
        finalist("simple", 5, [20.0 * loss, 20.02 * loss, 19.99 * loss] * 5),
        finalist("best", 15, [20.0, 20.01, 20.0] * 5),
    )
    assert report.chosen == chosen
    assert not undecided(report)


@pytest.mark.parametrize(("loss", "chosen"), [(1.015, "simple"), (1.05, "best")])
def test_where_noise_hides_a_loss_the_simplest_may_seem_two_percent_slower(
    loss: float, chosen: str
) -> None:
    simple = [20.0 * loss * factor for factor in (0.9, 1.0, 1.1)] * 5
    best = finalist("best", 15, [20.0] * 15)
    eager = finalist("eager", 0, [40.0] * 15)
    assert run_of(eager, finalist("simple", 5, simple), best).chosen == chosen


def test_eager_loses_to_nothing_that_is_not_faster_for_sure() -> None:
    unsure = [30.0, 42.0, 36.0, 41.5, 31.0, 35.0]
    report = run_of(finalist("eager", 0, [40.0] * 6), finalist("freeze", 11, unsure))
    assert report.chosen == "eager"
    assert undecided(report)
    assert report.reason == (
        "eager was chosen: the only other strategy timed is not faster beyond the noise. freeze "
        "seems 1.13× as fast (0.95 to 1.33): a larger budget or an idle machine may show it."
    )
    # What is faster for sure is chosen, although another one looks faster still.
    sure = finalist("fused", 5, [38.0] * 6)
    report = run_of(*report.rows[:1], sure, finalist("freeze", 11, unsure))
    assert report.chosen == "fused"
    assert [row.strategy for row in ranked(report, report.rows)] == ["fused", "eager", "freeze"]
    # What is hardly faster is not worth a word.
    same = run_of(finalist("eager", 0, [40.0] * 6), finalist("freeze", 11, [39.9] * 6))
    assert same.reason.endswith("is not faster beyond the noise.")
    assert not undecided(same)


def test_eager_and_a_slower_one_are_decided_at_once() -> None:
    report = run_of(finalist("eager", 0, [40.0] * 6), finalist("freeze", 11, [60.0] * 6))
    assert report.chosen == "eager"
    assert not undecided(report)
    assert not undecided(run_of(finalist("eager", 0, [40.0] * 6)))


def test_noise_of_times_leaves_nothing_open_where_memory_decides() -> None:
    rows = [finalist("eager", 0, [40.0] * 6), finalist("freeze", 11, [30.0, 42.0, 36.0] * 2)]
    rows[0].peak_bytes, rows[1].peak_bytes = 8 << 20, 3 << 20
    report = run_of(*rows, objective="memory")
    assert report.chosen == "freeze"
    assert not undecided(report)
