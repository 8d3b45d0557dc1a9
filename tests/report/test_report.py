"""Reports: what they say of the samples, and that they survive being saved."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from html.parser import HTMLParser

import pandas
import pytest
import torch
from planted import Planted, Small, off_by_one_per_cent, raises
from rich.console import Console

import graphwright as gw
from graphwright.errors import GraphwrightError
from graphwright.evaluation.accuracy import ErrorMeasure
from graphwright.evaluation.measurement import Measurement
from graphwright.report.markdown import to_markdown
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.report.table import columns, duration, memory, ordered, tried
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


@pytest.fixture
def finished(report: Report) -> Report:
    """The same report after common rounds, in which inductor's screening proves too good."""
    for name, seconds in (("eager", 2e-3), ("inductor", 1.05e-3), ("fast", 0.6e-3)):
        found_row(report, name).final = measured(seconds)
    found_row(report, "inductor").screening = measured(0.3e-3)
    found_row(report, "inductor").bare = measured(1e-3)
    report.rows.insert(3, row("also", 0.55e-3, 0.2))
    return report


def found_row(report: Report, name: str) -> Row:
    found = report.row(name)
    assert found is not None
    return found


def names(text: str) -> list[list[str]]:
    """The strategies that each table shows, from the top; of text for a terminal or Markdown."""
    tables: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("┏", "| strategy")):
            tables.append([])
        elif line.startswith(("│", "| ")) and not line.startswith("| ---"):
            tables[-1].append(re.split("[│|]", line)[1].strip(" *"))
    return tables


def cells_of(text: str, strategy: str) -> dict[str, str]:
    """The cells of a strategy's row by their headings, in the first table that has it."""
    headings: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in re.split("[┃│|]", line)[1:-1]]
        if line.startswith(("┃", "| strategy")):
            headings = cells
        elif headings and cells and cells[0] == strategy:
            return dict(zip(headings, cells, strict=True))
    raise AssertionError(f"no row of {strategy}")


def test_speedups_and_break_even(report: Report) -> None:
    fast, slow, eager = (report.row(n) for n in ("fast", "slow", "eager"))
    assert fast is not None
    assert slow is not None
    assert eager is not None
    assert report.speedup(fast) == pytest.approx((4.0, 4.0, 4.0))
    assert report.break_even(fast) == 67
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


def test_a_finalist_is_never_compared_with_a_screening(finished: Report) -> None:
    fast, also, compiled = (found_row(finished, n) for n in ("fast", "also", "inductor"))
    assert finished.speedup(fast) == pytest.approx((2 / 0.6,) * 3)
    assert finished.speedup(fast, "inductor") == pytest.approx((1 / 0.6,) * 3)
    assert finished.speedup(also) == pytest.approx((2 / 0.55,) * 3)
    # Its own screening, and torch.compile's common rounds or screening, are of different moments.
    assert finished.speedup(also, "inductor") is None
    assert finished.break_even(also, "inductor") is None
    compiled.final = compiled.bare = None
    assert finished.speedup(fast, "inductor") is None
    assert finished.speedup(also, "inductor") is None
    eager = found_row(finished, "eager")
    eager.final = None
    assert finished.speedup(fast) is None


def test_what_was_only_screened_is_marked_and_stands_by_its_factor(finished: Report) -> None:
    text = to_text(finished, 160)
    assert all(len(line) <= 160 for line in text.splitlines())
    for shown in (text, to_markdown(finished), short(finished, 160)):
        assert names(shown) == [["fast", "also", "inductor", "eager", "slow"]]
        assert cells_of(shown, "fast")["latency"] == "600 µs ± 0%"
        assert cells_of(shown, "also")["latency"] == "~550 µs ± 0%"
        assert cells_of(shown, "also")["calls/s"] == "~3,636"
        assert cells_of(shown, "also")["vs eager"] == "3.64×"
        assert "300 µs" not in shown
        note = "Rows marked ~ were timed only against eager: compare their factor, not their"
        assert " ".join(shown.split()).count(note) == 1
    # What is said of torch.compile agrees with its row: 1.05 ms with the checks, 1 ms without.
    for shown in (text, to_markdown(finished)):
        assert "without per-call checks, 1.00 ms" in shown
        cells = cells_of(shown, "inductor")
        assert [cells[name] for name in ("latency", "vs eager", "vs compile")] == [
            "1.05 ms ± 0%",
            "1.90×",
            "0.95×",
        ]


def test_rows_are_in_the_order_of_their_ratios(finished: Report) -> None:
    """Absolute times of other moments are in no order; the choice is first in any case."""
    other = row("beside a slow eager", 0.9e-3, 0.1)
    other.baseline = measured(9e-3)
    finished.rows.append(other)
    assert names(to_text(finished))[0][:3] == ["fast", "beside a slow eager", "also"]


def test_beside_an_unsteady_eager_finalists_are_in_the_order_of_their_times(
    finished: Report,
) -> None:
    found_row(finished, "eager").unsteady = "its rounds disagree by a factor of 2.0"
    found = names(to_text(finished))[0]
    assert found == ["fast", "inductor", "also", "eager", "slow"]


def test_the_choice_is_first_though_others_are_a_little_faster(finished: Report) -> None:
    finished.chosen = "inductor"
    assert names(to_text(finished))[0] == ["inductor", "also", "fast", "eager", "slow"]


def test_the_objective_s_figure_comes_first(finished: Report) -> None:
    headings = {"memory": "peak memory", "throughput": "calls/s", "latency": "latency"}
    for finished.objective, heading in headings.items():
        found = [column.heading for column in columns(finished, finished.rows)]
        assert found[:2] == ["strategy", heading]
        assert found[-1] == "status"
        assert len({*found}) == len(found)


def test_eager_has_one_error_in_all_that_is_shown(finished: Report) -> None:
    """The error that limits follow from counts all inputs together, and is no row's."""
    found_row(finished, "eager").error = ErrorMeasure(3.1e-7, 4e-7)
    finished.eager_error = ErrorMeasure(2.2e-7, 4e-7)
    for shown in (to_text(finished), to_markdown(finished), finished._repr_html_()):
        assert "3.1e-07" in shown
        assert "2.2e-07" not in shown
    found_row(finished, "eager").error = None  # It was not verified yet.
    assert "2.2e-07" in to_text(finished)


def test_a_set_up_is_what_it_takes_alone(finished: Report) -> None:
    """As the calls to the break-even count it."""
    fast = found_row(finished, "fast")
    fast.build_s = 5.0
    assert cells_of(to_markdown(finished), "fast")["set-up"] == "5.10 s"
    assert finished.break_even(fast) == math.ceil(5.1 / 1.4e-3)


def test_an_unsteady_row_is_marked_and_takes_part_in_no_ratio(finished: Report) -> None:
    compiled = found_row(finished, "inductor")
    compiled.unsteady = "its rounds disagree by a factor of 3.0"
    fast = found_row(finished, "fast")
    assert finished.speedup(compiled) is None
    assert finished.speedup(fast, "inductor") is None
    assert finished.speedup(fast) is not None
    assert finished.break_even(fast, "inductor") is None
    for shown in (to_text(finished), to_markdown(finished)):
        cells = cells_of(shown, "inductor")
        assert cells["status"] == "unsteady"
        assert cells["vs eager"] == "–"
        assert "vs compile" not in shown
        assert "unsteady, so not compared: its rounds disagree" in shown
    assert Report.from_json(finished.to_json()) == finished
    found_row(finished, "eager").unsteady = "its rounds disagree by a factor of 2.0"
    assert finished.speedup(fast) is None
    assert {cells_of(to_markdown(finished), name)["vs eager"] for name in ("fast", "eager")} == {
        "–"
    }


def test_a_repr_is_one_short_line(finished: Report) -> None:
    text = "<Report of Model on a CPU: fast chosen, 600 µs, 3.33× eager; 7 rows>"
    assert repr(finished) == text
    assert text in repr(finished.row)
    finished.rows.clear()
    assert repr(finished) == "<Report of Model on a CPU; 0 rows>"
    assert len(repr(measured(1e-3))) < 50


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
        (lambda t: t[: len(t) // 2], "not valid JSON"),
        (lambda t: "[]", "not a report"),
        (lambda t: t.replace("graphwright.tune", "other"), "not a report"),
        (lambda t: t.replace('"schema_version": 2', '"schema_version": 99'), "version 99"),
        (lambda t: t.replace('"rows"', '"columns"'), "damaged"),
        (lambda t: t.replace('"slower"', '"odd"'), "damaged"),
        (lambda t: t.replace('"latency": [', '"delay": ['), "damaged"),
        (lambda t: t.replace('"environment": {', '"environment": null, "x": {'), "damaged"),
        (lambda t: t.replace('"seconds": 0.0', '"seconds": null'), "damaged"),
        (lambda t: re.sub(r'"throughput": \[.*?\]', '"throughput": []', t, flags=re.S), "damaged"),
        (lambda t: re.sub(r"0\.002,", '"a",', t), "damaged"),
        (lambda t: "[" * 100_000, "not valid JSON|not a report"),
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
    """A row that is faster than eager beside it is repaid, whatever later rounds say of eager."""
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
    pieces = ("chosen", "500 µs ± 0%", "4.00×", "4,000", "100 ms", "67", "1.0 MiB")
    assert all(piece in fast for piece in pieces)
    assert names(text) == [["fast", "inductor", "eager", "slow"]]
    assert "vs compile" not in text
    assert "fast was chosen: it is fast." in text
    assert "absent, also absent: unavailable, it is not here. pip install absent" in text
    assert "eager's own is 1.0e-07" in text
    assert str(report) == text


def test_a_narrow_terminal_has_the_other_columns_in_a_second_table(report: Report) -> None:
    text = to_text(report, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    wide = to_text(report, 160)
    headings = re.findall(r"[a-z][a-z /-]+", wide[wide.index("┏") : wide.index("┡")])
    assert {"strategy", "status", "peak memory", "break-even calls"} <= set(
        map(str.strip, headings)
    )
    for heading in headings:
        assert heading in text
    first, *others = names(text)
    assert others
    assert all(rows == first for rows in others)


def short(report: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(report, width, details=False))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_at_80_columns_one_short_table_shows_what_matters(finished: Report) -> None:
    finished.rows.append(Row("broken", Status.FAILED, "ValueError: " + "it broke " * 20))
    text = short(finished)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert names(text) == [["fast", "also", "inductor", "eager", "slow"]]
    head = text[text.index("┏") : text.index("┡")]
    for heading in ("strategy", "latency", "vs eager", "set-up", "error"):
        assert heading in head
    assert "status" not in head
    # A figure of a screening is marked, and a line says what the mark means.
    assert cells_of(text, "also")["latency"].startswith("~550 µs")
    assert cells_of(text, "fast")["latency"].startswith("600 µs")
    assert " ".join(text.split()).count("compare their factor, not their latency") == 1
    # What went wrong is one line, what did not run another.
    assert sum("broken" in line for line in text.splitlines()) == 1
    assert "broken failed: ValueError" in text
    assert "Unavailable: absent, also absent." in text
    assert "fast was chosen: it is fast." in text
    assert "peak memory" in short(finished, 160)


def test_without_finalists_nothing_is_marked(report: Report) -> None:
    assert "~" not in short(report)


def test_rows_that_are_unsteady_bring_their_status(finished: Report) -> None:
    found_row(finished, "inductor").unsteady = "its rounds disagree by a factor of 3.0"
    assert "unsteady" in short(finished)


@pytest.mark.parametrize(
    ("objective", "heading"), [("memory", "peak memory"), ("throughput", "calls/s")]
)
def test_the_figure_that_was_asked_for_is_always_shown(
    finished: Report, objective: str, heading: str
) -> None:
    finished.objective = objective
    assert heading in short(finished, 60)


def test_markdown_and_svg(report: Report) -> None:
    text = to_markdown(report)
    assert "| **fast** | 500 µs" in text
    assert cells_of(text, "fast")["status"] == "chosen"
    assert text.count("| --- | ---: |") == 1
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1
    picture = to_svg(report)
    assert "<svg" in picture
    assert "url(http" not in picture


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


class _Cells(HTMLParser):
    """The cells of tables; refuses what is opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert not attrs
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.tables[-1][-1][-1] += data


def test_html_has_the_tables_that_the_terminal_has(finished: Report) -> None:
    found = _Cells(finished._repr_html_()).tables
    rows = tried(finished)
    shown = columns(finished, rows)
    assert found == [
        [[column.heading for column in shown]]
        + [[column.cell(finished, row) for column in shown] for row in rows]
    ]


def test_what_a_model_is_called_is_no_html(finished: Report) -> None:
    finished.model, finished.reason = "<script>alert(1)</script>", "a < b & c"
    text = finished._repr_html_()
    assert "<script>" not in text
    assert "a &lt; b &amp; c" in text
    _Cells(text)


def test_a_frame_has_a_row_for_each_strategy_in_the_order_of_the_tables(
    finished: Report,
) -> None:
    frame = finished.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["strategy"]) == [row.strategy for row in ordered(finished)]
    [chosen] = frame[frame["chosen"]].to_dict("records")
    row = finished.chosen_row
    assert row is not None
    assert row.measurement is not None
    assert chosen["strategy"] == finished.chosen
    assert chosen["latency_s"] == row.measurement.typical().median
    speed = finished.speedup(row)
    assert speed is not None
    assert chosen["vs_eager"] == speed[0]


def test_without_pandas_the_remedy_is_named(
    finished: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(gw.GraphwrightError, match="pip install pandas"):
        finished.to_frame()


def test_a_dictionary_is_what_the_json_is(finished: Report) -> None:
    assert finished.to_dict() == json.loads(finished.to_json())
