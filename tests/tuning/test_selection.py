"""The verdict's words: they agree with the figures that the report shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.report.table import ordered
from graphwright.tuning.selection import NO_TIME_LEFT, ranked, reason_for


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
