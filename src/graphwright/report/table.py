"""The columns of a report's table as text, for both terminal and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from .result import COMPILE_DEFAULT, EAGER, Results, Row, Status

_ORDER = list(Status)


@dataclass(frozen=True)
class Column:
    """One column: its heading, how to fill it, and which columns go first when room is short."""

    heading: str
    cell: Callable[[Results, Row], str]
    priority: int


def ordered(report: Results) -> list[Row]:
    """Rows by status, the best by the report's objective first."""

    def key(row: Row) -> tuple[int, float]:
        cost = 0.0
        if row.measurement is not None:
            cost = row.measurement.latencies.median
            if report.objective == "throughput":
                cost = row.measurement.back_to_back.median
        if report.objective == "memory":
            cost = float(row.peak_bytes or 0)
        if report.objective == "cold_start":
            cost = math.inf if row.cold_start_s is None else row.cold_start_s
        return _ORDER.index(row.status), cost

    return sorted(report.rows, key=key)


def columns(report: Results) -> list[Column]:
    """All columns that a report fills, in the order they are shown."""
    timed = any(row.cold_start_s is not None for row in report.rows)
    first = Column("first answer", lambda report, row: _seconds(row.cold_start_s), 0)
    return [
        Column("strategy", lambda report, row: row.strategy, 0),
        Column("status", lambda report, row: str(row.status), 0),
        *([first] if timed else []),
        Column("latency", _latency, 0),
        Column("vs eager", lambda report, row: _speedup(report, row, EAGER), 0),
        Column("vs compile", lambda report, row: _speedup(report, row, COMPILE_DEFAULT), 1),
        Column("calls/s", _throughput, 3),
        Column("set-up", lambda report, row: _seconds(row.setup_s), 2),
        Column("repaid vs eager", lambda report, row: _break_even(report, row, EAGER), 4),
        Column(
            "repaid vs compile", lambda report, row: _break_even(report, row, COMPILE_DEFAULT), 7
        ),
        Column("peak memory", lambda report, row: memory(row.peak_bytes), 5),
        Column("error", _error, 6),
    ]


def duration(seconds: float) -> str:
    """Seconds with three figures and a unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            value = seconds * factor
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    raise AssertionError("unreachable: the last unit takes all")


def memory(count: int | None) -> str:
    """Bytes as MiB; a dash where there is no figure."""
    return "–" if count is None else f"{count / 2**20:.1f} MiB"


def _latency(report: Results, row: Row) -> str:
    if row.measurement is None:
        return "–"
    samples = row.measurement.latencies
    timed_apart = row.final is None and any(other.final is not None for other in report.rows)
    mark = "~" if timed_apart else ""
    return f"{mark}{duration(samples.median)} ± {samples.spread / samples.median:.0%}"


def _speedup(report: Results, row: Row, other: str) -> str:
    if row.strategy == other:
        return "–" if row.measurement is None else "1×"
    found = report.speedup(row, other)
    if found is None:
        return "–"
    return f"{found[0]:.2f}×" if found[0] >= 0.01 else f"{found[0]:.1g}×"


def _throughput(report: Results, row: Row) -> str:
    if row.measurement is None:
        return "–"
    rate = 1 / row.measurement.back_to_back.median
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else duration(value)


def _break_even(report: Results, row: Row, other: str) -> str:
    peer = report.row(other)
    if peer is None or peer is row or row.measurement is None or peer.measurement is None:
        return "–"
    calls = report.break_even(row, other)
    if calls is None:
        return "never"
    return "at once" if calls <= 1 else f"{calls:,} calls"


def _error(report: Results, row: Row) -> str:
    return "–" if row.error is None else f"{row.error.rms:.1e}"


def explanations(report: Results) -> list[tuple[str, str]]:
    """Reasons with their remedies, then notes, each with the rows that share it."""
    reasons: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for row in ordered(report):
        again = f"Repeat it with: {row.repeat}" if row.repeat else ""
        text = ". ".join(part.rstrip(".") for part in (row.reason, row.remedy, again) if part)
        if text:
            reasons.setdefault(text, []).append(row.strategy)
        for note in row.notes:
            notes.setdefault(note, []).append(row.strategy)
    items = (*reasons.items(), *notes.items())
    return [(", ".join(names), text) for text, names in items]


def closing(report: Results) -> list[str]:
    """The lines below the table: notes, the cost of the checks, eager's error, the machine."""
    lines = list(report.notes)
    if report.recalled:
        lines.append(
            f"Remembered from {report.recalled}, when this was measured; verified again now."
        )
    finalists = [row.strategy for row in report.rows if row.final is not None]
    apart = [row for row in report.rows if row.final is None and row.measurement is not None]
    if finalists:
        lines.append(
            f"Timed again in common rounds, with the checks of every call: {', '.join(finalists)}."
            + (" What has a ~ was timed at another moment, without." if apart else "")
        )
    peer = report.row(COMPILE_DEFAULT)
    if peer is not None and peer.bare is not None:
        bare = duration(peer.bare.latencies.median)
        lines.append(f"torch.compile's default is compared without those checks: {bare}.")
    if any(row.cold_start_s is not None for row in report.rows):
        lines.append(
            "First answer: from the start of a fresh process until it was right, the least of "
            "some; what compiles found empty caches."
        )
    saved = _saved(report)
    if saved:
        lines.append(f"Time that is saved against eager: {', '.join(saved)}.")
    if report.eager_error is not None:
        lines.append(
            f"Error: root mean square, relative to float64; eager's own is "
            f"{report.eager_error.rms:.1e}."
        )
    kept = ("gpu", "processor", "threads", "torch", "cuda", "driver")
    machine = [f"{k} {report.environment[k]}" for k in kept if k in report.environment]
    if machine:
        lines.append(", ".join(machine) + f"; {report.created}, {report.seconds:.0f} s.")
    return lines


def _saved(report: Results) -> list[str]:
    """The share of eager's time that rows do without, the quickest first."""
    found = []
    for row in ordered(report):
        faster = report.speedup(row, EAGER)
        if row.status is Status.OK and faster is not None and faster[0] > 1.005:
            found.append(f"{row.strategy} {1 - 1 / faster[0]:.0%}")
    return found


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
