"""The columns of a report's table as text, for both terminal and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from .result import COMPILE_DEFAULT, EAGER, Results, Row, Status

# What a cell shows that has nothing to show.
NO_FIGURE = "–"
SCREENED = "Rows marked ~ were timed only against eager: compare their factor, not their latency."
_ORDER = list(Status)


@dataclass(frozen=True)
class Column:
    """One column: its heading, how to fill it, and which columns go first when room is short."""

    heading: str
    cell: Callable[[Results, Row], str]
    priority: int


def ordered(report: Results) -> list[Row]:
    """All rows as they are shown: the choice first, then by status, the best figure first.

    Times are compared by their ratio to eager, which is all that can be compared between rows that
    were timed at different moments. Beside an unsteady eager the finalists' times come first.
    """
    eager = report.row(EAGER)
    no_ratios = eager is None or not report.ratios(eager)

    def key(row: Row) -> tuple[bool, int, bool, bool, float]:
        apart = no_ratios and row.final is None
        status = _ORDER.index(row.status)
        return row.strategy != report.chosen, status, bool(row.unsteady), apart, _cost(report, row)

    return sorted(report.rows, key=key)


def _cost(report: Results, row: Row) -> float:
    if report.objective == "memory":
        return float(row.peak_bytes or 0)
    if report.objective == "cold_start":
        return math.inf if row.cold_start_s is None else row.cold_start_s
    if ratios := report.ratios(row):
        return statistics.median(ratios)
    # Beside an unsteady eager there are only the times.
    return math.inf if row.measurement is None else row.measurement.typical(report.figure).median


def timed(report: Results) -> list[Row]:
    """The rows that have figures, as they are shown."""
    return [row for row in ordered(report) if row.measurement or row.cold_start_s is not None]


def tried(report: Results) -> list[Row]:
    """The rows of a detailed table: all but those of which there is only a reason to tell."""
    absent = (Status.UNAVAILABLE, Status.NOT_TRIED)
    return [row for row in ordered(report) if row.status not in absent or not row.reason]


def footnotes(report: Results, rows: list[Row]) -> list[str]:
    """What the marks in a table of some rows mean."""
    return [SCREENED] if any(_is_marked(report, row) for row in rows) else []


def _is_marked(report: Results, row: Row) -> bool:
    """Whether a row's figures are of its screening, and others' are not."""
    screened = row.final is None and row.measurement is not None
    return screened and any(other.final is not None for other in report.rows)


def columns(report: Results, rows: list[Row]) -> list[Column]:
    """The columns that some rows fill, in the order they are shown."""
    best = {"memory": "peak memory", "throughput": "calls/s"}.get(report.objective)
    found = [
        Column("strategy", lambda report, row: row.strategy, 0),
        Column("first answer", lambda report, row: _seconds(row.cold_start_s), 0),
        Column("latency", _latency, 1),
        Column("vs eager", lambda report, row: _speedup(report, row, EAGER), 1),
        Column("vs compile", lambda report, row: _speedup(report, row, COMPILE_DEFAULT), 5),
        Column("calls/s", _throughput, 6),
        Column("set-up", lambda report, row: _seconds(row.setup_alone_s), 2),
        Column("break-even calls", lambda report, row: _break_even(report, row, EAGER), 8),
        Column(
            "break-even vs compile",
            lambda report, row: _break_even(report, row, COMPILE_DEFAULT),
            9,
        ),
        Column("peak memory", lambda report, row: memory(row.peak_bytes), 7),
        Column("error", _error, 3),
        Column("status", _status, 4),
    ]
    if best is not None:  # What was asked for is the first figure of a row.
        first = next(c for c in found if c.heading == best)
        found.remove(first)
        found.insert(1, replace(first, priority=0))
    return [c for c in found if any(c.cell(report, row) != NO_FIGURE for row in rows)]


def duration(seconds: float) -> str:
    """Seconds with three figures and a unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            value = seconds * factor
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    raise AssertionError("unreachable: the last unit takes all")


def memory(count: int | None) -> str:
    """Bytes as MiB; a dash where there is no figure."""
    return NO_FIGURE if count is None else f"{count / 2**20:.1f} MiB"


def ratio(value: float) -> str:
    """How many times as fast, with two decimals or, below a hundredth, one figure."""
    return f"{value:.2f}×" if value >= 0.01 else f"{value:.1g}×"


def _status(report: Results, row: Row) -> str:
    if row.strategy == report.chosen:
        return "chosen"
    return "unsteady" if row.unsteady and row.status is Status.OK else str(row.status)


def _latency(report: Results, row: Row) -> str:
    if row.measurement is None:
        return NO_FIGURE
    samples = row.measurement.typical()
    return f"{mark(report, row)}{duration(samples.median)} ± {samples.spread / samples.median:.0%}"


def mark(report: Results, row: Row) -> str:
    """What stands before the times of a row that cannot be compared with those of the others."""
    return "~" if _is_marked(report, row) else ""


def _speedup(report: Results, row: Row, other: str) -> str:
    found = report.speedup(row, other)
    if found is None:
        return NO_FIGURE
    # With its checks, torch.compile's default is compared with itself without.
    same = row.strategy == other and (row.final is None or row.bare is None)
    return "1×" if same else ratio(found[0])


def _throughput(report: Results, row: Row) -> str:
    return NO_FIGURE if row.measurement is None else mark(report, row) + calls_per_second(row)


def calls_per_second(row: Row) -> str:
    """Calls a second of a row that has been timed, issued back to back."""
    assert row.measurement is not None
    rate = 1 / row.measurement.back_to_back.median
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _seconds(value: float | None) -> str:
    return NO_FIGURE if value is None else duration(value)


def _break_even(report: Results, row: Row, other: str) -> str:
    if row.strategy == other or not report.ratios(row, other):
        return NO_FIGURE
    calls = report.break_even(row, other)
    if calls is None:
        return "never"
    return f"{max(calls, 1):,}"


def _error(report: Results, row: Row) -> str:
    return NO_FIGURE if row.error is None else f"{row.error.rms:.1e}"


def explanations(report: Results) -> list[tuple[str, str]]:
    """Reasons with their remedies, then notes, each with the rows that share it."""
    reasons: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for row in ordered(report):
        again = f"To repeat: {row.repeat}" if row.repeat else ""
        status = "" if row.status is Status.OK else f"{row.status}, "
        text = ". ".join(part.rstrip(".") for part in (row.reason, row.remedy, again) if part)
        if text:
            text = status + text
            reasons.setdefault(text, []).append(row.strategy)
        if row.unsteady:
            notes.setdefault(f"unsteady, so not compared: {row.unsteady}", []).append(row.strategy)
        for note in row.notes:
            notes.setdefault(note, []).append(row.strategy)
    items = (*reasons.items(), *notes.items())
    return [(", ".join(names), text) for text, names in items]


def closing(report: Results) -> list[str]:
    """The lines below the table: notes, the cost of the checks, eager's error, the machine."""
    lines = list(report.notes)
    lines += [f"Profile: {each}." for each in report.predictions]
    if report.recalled:
        lines.append(f"From the choice cache: measured at {report.recalled}, verified again now.")
    peer = report.row(COMPILE_DEFAULT)
    if peer is not None and peer.bare is not None and not peer.unsteady:
        bare = duration(peer.bare.typical().median)
        lines.append(
            f"vs compile: against torch.compile's default without per-call checks, {bare}."
        )
    if any(row.cold_start_s is not None for row in report.rows):
        lines.append(
            "First answer: from the start of a fresh process to its first right answer, the "
            "shortest of several; compilers started with empty caches."
        )
    if len(report.curve) > 1:
        steps = [f"{step.strategy} after {step.seconds:.0f} s" for step in report.curve]
        lines.append(f"Best so far during the search: {', '.join(steps)}.")
    if report.own_error is not None:
        lines.append(
            f"Error: root mean square relative to float64; eager's own is "
            f"{report.own_error.rms:.1e}."
        )
    kept = ("gpu", "processor", "threads", "torch", "cuda", "driver")
    machine = [f"{k} {report.environment[k]}" for k in kept if k in report.environment]
    if machine:
        lines.append(", ".join(machine) + f"; {report.created}, {report.seconds:.0f} s.")
    return lines


def shapes(report: Results) -> list[list[str]]:
    """A table with a row for each shape, its headings first; empty where there is one shape."""
    chosen, eager = report.chosen_row, report.row(EAGER)
    if not report.shapes or chosen is None or eager is None:
        return []
    heading = f"chosen: {chosen.strategy}"
    found = [["shape", "weight", "eager", heading, "vs eager", "fastest there"]]
    for shape in report.shapes:
        # One shape at a time, as if it had been the only one.
        rows = [
            row.by_shape[shape.name]
            for row in report.rows
            if row.status is Status.OK and shape.name in row.by_shape
        ]
        alone = replace(report, rows=rows, shapes=[])
        timed = [row for row in rows if row.final is not None] or rows
        mine, theirs = chosen.by_shape[shape.name], eager.by_shape[shape.name]
        fastest = min(timed, key=lambda row: statistics.median(alone.ratios(row) or [math.inf]))
        found.append(
            [
                shape.name,
                f"{shape.weight:.0%}",
                _latency(alone, theirs),
                _latency(alone, mine),
                _speedup(alone, mine, EAGER),
                fastest.strategy,
            ]
        )
    return found


def title(report: Results) -> str:
    """What was tuned, for which inputs and objective."""
    if report.shapes:
        return f"{report.model}, {report.objective}: {len(report.shapes)} shapes by their weights"
    return f"{report.model}, {report.objective}: {'; '.join(report.inputs)}"
