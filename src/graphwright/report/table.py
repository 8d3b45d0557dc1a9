"""The columns of a report's table as text, for both terminal and Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from .result import COMPILE_DEFAULT, EAGER, Results, Row, Status

# What a cell shows that has nothing to show.
NO_FIGURE = "–"
SCREENED = (
    "Rows marked ~ are screening results without per-call checks; do not compare them directly."
)
_ORDER = list(Status)


@dataclass(frozen=True)
class Column:
    """One column: its heading, how to fill it, and which columns go first when room is short."""

    heading: str
    cell: Callable[[Results, Row], str]
    priority: int


@dataclass(frozen=True)
class Block:
    """Rows whose figures can be compared with each other, best first."""

    heading: str
    rows: list[Row]


def blocks(report: Results) -> list[Block]:
    """The finalists, timed together; then all others, whose figures are of their screening."""
    finalists = [row for row in report.rows if row.final is not None]
    others = [row for row in report.rows if row.final is None]
    found = []
    if finalists:
        heading = "Finalists: timed together, in turns, with per-call checks"
        found.append(Block(heading, _sorted(report, finalists)))
    if others:
        heading = ""
        if finalists:
            heading = "Screening only: each timed in turns with eager, without per-call checks"
            if not any(row.measurement for row in others):
                heading = "Not timed"
        found.append(Block(heading, _sorted(report, others)))
    return found


def ordered(report: Results) -> list[Row]:
    """All rows as they are shown."""
    return [row for block in blocks(report) for row in block.rows]


def timed(report: Results) -> list[Row]:
    """The rows that have figures, as they are shown."""
    return [row for row in ordered(report) if row.measurement or row.cold_start_s is not None]


def _sorted(report: Results, rows: list[Row]) -> list[Row]:
    """Rows by status, the best by the report's objective first, unsteady ones last."""

    def key(row: Row) -> tuple[int, bool, float]:
        cost = math.inf
        if report.objective == "memory":
            cost = float(row.peak_bytes or 0)
        elif report.objective == "cold_start":
            cost = math.inf if row.cold_start_s is None else row.cold_start_s
        elif row.final is not None:
            cost = row.final.typical(report.figure).median
        elif ratios := report.ratios(row):
            # Their times are of different moments: only the ratios can be compared.
            cost = statistics.median(ratios)
        return _ORDER.index(row.status), bool(row.unsteady), cost

    return sorted(rows, key=key)


def columns(report: Results, rows: list[Row]) -> list[Column]:
    """The columns that some rows fill, in the order they are shown."""
    best = {"memory": "peak memory", "throughput": "calls/s"}.get(report.objective)
    found = [
        Column("strategy", lambda report, row: row.strategy, 0),
        Column("status", _status, 4),
        Column("first answer", lambda report, row: _seconds(row.cold_start_s), 0),
        Column("latency", _latency, 1),
        Column("vs eager", lambda report, row: _speedup(report, row, EAGER), 1),
        Column("vs compile", lambda report, row: _speedup(report, row, COMPILE_DEFAULT), 5),
        Column("calls/s", _throughput, 6),
        Column("set-up", lambda report, row: _seconds(row.setup_s), 2),
        Column("break-even calls", lambda report, row: _break_even(report, row, EAGER), 8),
        Column(
            "break-even vs compile",
            lambda report, row: _break_even(report, row, COMPILE_DEFAULT),
            9,
        ),
        Column("peak memory", lambda report, row: memory(row.peak_bytes), 7),
        Column("error", _error, 3),
    ]
    found = [replace(c, priority=0) if c.heading == best else c for c in found]
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
    return f"{duration(samples.median)} ± {samples.spread / samples.median:.0%}"


def _speedup(report: Results, row: Row, other: str) -> str:
    found = report.speedup(row, other)
    if found is None:
        return NO_FIGURE
    # With its checks, torch.compile's default is compared with itself without.
    same = row.strategy == other and (row.final is None or row.bare is None)
    return "1×" if same else ratio(found[0])


def _throughput(report: Results, row: Row) -> str:
    if row.measurement is None:
        return NO_FIGURE
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
        text = ". ".join(part.rstrip(".") for part in (row.reason, row.remedy, again) if part)
        if text:
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
    saved = _saved(report)
    if saved:
        lines.append(f"Time saved against eager: {', '.join(saved)}.")
    if len(report.curve) > 1:
        steps = [
            f"{step.strategy} {ratio(step.speedup)} after {step.seconds:.0f} s"
            for step in report.curve
        ]
        lines.append(f"Best so far during the search: {', '.join(steps)}.")
    if report.eager_error is not None:
        lines.append(
            f"Error: root mean square relative to float64; eager's own is "
            f"{report.eager_error.rms:.1e}."
        )
    kept = ("gpu", "processor", "threads", "torch", "cuda", "driver")
    machine = [f"{k} {report.environment[k]}" for k in kept if k in report.environment]
    if machine:
        lines.append(", ".join(machine) + f"; {report.created}, {report.seconds:.0f} s.")
    return lines


def _saved(report: Results) -> list[str]:
    """The share of eager's time that the first block's rows do without, the quickest first."""
    found = []
    for row in blocks(report)[0].rows if report.rows else []:
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
