"""Reports: what they say of the samples, and that they survive being saved."""

from __future__ import annotations

import json
import re

import pytest
import torch
from planted import Planted, Small, off_by_one_per_cent, raises

import graphwright as gw
from graphwright.errors import GraphwrightError
from graphwright.evaluation.accuracy import ErrorMeasure
from graphwright.evaluation.measurement import Measurement
from graphwright.report.markdown import to_markdown
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.report.table import duration, memory
from graphwright.report.terminal import render, to_svg, to_text


def measured(seconds: float) -> Measurement:
    return Measurement(tuple((seconds, seconds) for _ in range(6)), (seconds / 2,) * 6)


def row(name: str, seconds: float, setup_s: float, status: Status = Status.OK) -> Row:
    return Row(
        name,
        status,
        setup_s=setup_s,
        peak_bytes=2**20,
        error=ErrorMeasure(1e-7, 4e-7),
        screening=measured(seconds),
        baseline=measured(2e-3),
    )


@pytest.fixture
def report() -> Report:
    rows = [
        row("eager", 2e-3, 0.0),
        row("inductor", 1e-3, 5.0),
        row("fast", 0.5e-3, 0.1),
        row("slow", 4e-3, 0.1, Status.SLOWER),
        Row("absent", Status.UNAVAILABLE, "it is not here", "pip install absent"),
        Row("also absent", Status.UNAVAILABLE, "it is not here", "pip install absent"),
    ]
    return Report(
        "Model",
        ["args[0]: 4×16 float32"],
        "latency",
        rows,
        {"processor": "a CPU", "torch": "2.13"},
        chosen="fast",
        reason="fast was chosen: it is fast.",
        eager_error=ErrorMeasure(1e-7, 4e-7),
        created="2026-01-01T00:00:00+00:00",
    )


def test_speedups_and_break_even(report: Report) -> None:
    fast, slow, eager = (report.row(n) for n in ("fast", "slow", "eager"))
    assert fast is not None
    assert slow is not None
    assert eager is not None
    assert report.speedup(fast) == pytest.approx((4.0, 4.0, 4.0))
    assert report.speedup(fast, "inductor") == pytest.approx((2.0, 2.0, 2.0))
    assert report.break_even(fast) == 67
    assert report.break_even(fast, "inductor") == 0
    assert report.break_even(slow) is None
    assert report.break_even(eager, "inductor") is None
    absent = report.row("absent")
    assert absent is not None
    assert report.speedup(absent) is None


def test_finalists_are_compared_in_their_common_rounds(report: Report) -> None:
    fast, eager = report.row("fast"), report.row("eager")
    assert fast is not None
    assert eager is not None
    fast.final, eager.final = measured(1e-3), measured(3e-3)
    assert report.speedup(fast) == pytest.approx((3.0, 3.0, 3.0))


def test_torch_compile_is_compared_without_our_checks(report: Report) -> None:
    fast, compiled = report.row("fast"), report.row("inductor")
    assert fast is not None
    assert compiled is not None
    fast.final, compiled.final, compiled.bare = measured(1e-3), measured(3e-3), measured(2e-3)
    assert report.speedup(fast, "inductor") == pytest.approx((2.0, 2.0, 2.0))


def test_json_round_trip_keeps_every_sample(report: Report) -> None:
    text = report.to_json()
    again = Report.from_json(text)
    assert again == report
    assert again.to_json() == text
    assert json.loads(text)["schema_version"] == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[: len(t) // 2], "no JSON"),
        (lambda t: "[]", "no report"),
        (lambda t: t.replace("graphwright.tune", "other"), "no report"),
        (lambda t: t.replace('"schema_version": 2', '"schema_version": 99'), "version 99"),
        (lambda t: t.replace('"rows"', '"columns"'), "damaged"),
        (lambda t: t.replace('"slower"', '"odd"'), "damaged"),
        (lambda t: t.replace('"latency": [', '"delay": ['), "damaged"),
        (lambda t: t.replace('"environment": {', '"environment": null, "x": {'), "damaged"),
        (lambda t: t.replace('"seconds": 0.0', '"seconds": null'), "damaged"),
        (lambda t: re.sub(r'"throughput": \[.*?\]', '"throughput": []', t, flags=re.S), "damaged"),
        (lambda t: re.sub(r"0\.002,", '"a",', t), "damaged"),
        (lambda t: "[" * 100_000, "no JSON|no report"),
    ],
)
def test_a_damaged_report_is_refused(report: Report, damage: object, message: str) -> None:
    with pytest.raises(GraphwrightError, match=message):
        Report.from_json(damage(report.to_json()))  # type: ignore[operator]


def test_an_infinite_error_survives_being_saved(report: Report) -> None:
    report.rows[3].error = ErrorMeasure(float("inf"), float("inf"))
    again = Report.from_json(report.to_json())
    assert again == report
    assert "inf" in str(again)


def test_repayment_agrees_with_the_speed_up(report: Report) -> None:
    """A row that is faster than eager in its own rounds is repaid, whatever later rounds say."""
    eager, fast = report.row("eager"), report.row("fast")
    assert eager is not None
    assert fast is not None
    eager.final = measured(0.4e-3)
    assert report.speedup(fast) == pytest.approx((4.0, 4.0, 4.0))
    assert report.break_even(fast) == 67


def test_the_table_says_what_matters(report: Report) -> None:
    text = to_text(report)
    lines = text.splitlines()
    fast = next(line for line in lines if "fast" in line and "│" in line)
    pieces = ("chosen", "500 µs ± 0%", "4.00×", "2.00×", "4,000", "100 ms", "67 calls", "1.0 MiB")
    assert all(piece in fast for piece in pieces)
    order = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert order == ["fast", "inductor", "eager", "slow", "absent", "also absent"]
    assert "fast was chosen: it is fast." in text
    assert "absent, also absent: it is not here. pip install absent" in text
    assert "eager's own is 1.0e-07" in text
    assert str(report) == text


def test_a_narrow_terminal_names_the_columns_it_leaves_out(report: Report) -> None:
    text = to_text(report, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "No room for" in text
    for heading in ("strategy", "status", "latency", "vs eager"):
        assert heading in text


def test_markdown_and_svg(report: Report) -> None:
    text = to_markdown(report)
    assert "| **fast** | **chosen** |" in text
    assert text.count("| --- |") == 1
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1
    assert "<svg" in to_svg(report)


def test_an_interrupted_report_says_so(report: Report) -> None:
    report.interrupted = True
    assert "Interrupted" in to_text(report)
    assert "Interrupted" in to_markdown(report)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.50 s"),
        (0.0125, "12.5 ms"),
        (1.2345e-4, "123 µs"),
        (4e-7, "0.40 µs"),
        (12, "12.0 s"),
    ],
)
def test_durations_have_three_figures_and_a_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_memory_is_in_mebibytes() -> None:
    assert memory(3 * 2**19) == "1.5 MiB"
    assert memory(None) == "–"


def test_a_real_report_can_be_saved_and_shown() -> None:
    """Saved and read again it is the same to the last digit."""
    strategies = [Planted("off", off_by_one_per_cent), Planted("[bold]", raises), "eager:no_grad"]
    report = gw.tune(Small().eval(), (torch.randn(4, 16),), strategies=strategies).report
    again = Report.from_json(report.to_json())
    assert again == report
    text = to_text(report)
    assert "[bold]" in text
    assert "ValueError: planted failure (at " in text.replace("\n", "")
    assert render(report, 100)
