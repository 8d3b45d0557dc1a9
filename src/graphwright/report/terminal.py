"""A report as a table on the terminal."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .result import Report, Row, Status
from .table import closing, columns, explanations, ordered, shapes, title

_STYLES = {
    Status.OK: "",
    Status.SLOWER: "dim",
    Status.WRONG: "red",
    Status.FAILED: "yellow",
    Status.CRASHED: "red",
    Status.TIMED_OUT: "yellow",
    Status.MEMORY_EXCEEDED: "yellow",
    Status.UNAVAILABLE: "dim",
    Status.NOT_TRIED: "dim",
}
_WIDE = 160


def render(report: Report, width: int) -> RenderableType:
    """The table with what belongs below it; columns that find no room are named there."""
    shown = columns(report)
    left_out: list[str] = []
    rows = ordered(report)
    while _width(report, rows, [c.heading for c in shown]) > width and len(shown) > 4:
        last = max(shown, key=lambda column: column.priority)
        if last.priority == 0:
            break
        left_out.append(last.heading)
        shown.remove(last)
    table = Table(title=escape(title(report)), title_justify="left", title_style="bold")
    for index, column in enumerate(shown):
        left = index < 2
        table.add_column(column.heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        cells = [escape(column.cell(report, row)) for column in shown]
        style = _STYLES[row.status]
        if row.strategy == report.chosen:
            style, cells[1] = "bold green", "chosen"
        table.add_row(*cells, style=style)
    parts: list[RenderableType] = [table]
    headings, *cells_by_shape = shapes(report) or [[]]
    if cells_by_shape:
        by_shape = Table()
        for index, heading in enumerate(headings):
            by_shape.add_column(heading, justify="right" if 0 < index < 5 else "left")
        for cells in cells_by_shape:
            by_shape.add_row(*map(escape, cells))
        parts.append(by_shape)
    if report.interrupted:
        parts.append(Text("Interrupted: this is what was known by then.", style="yellow"))
    if report.reason:
        parts.append(Text(report.reason, style="bold"))
    for name, text in explanations(report):
        parts.append(Padding(Text.assemble((name, "bold"), ": ", text), (0, 0, 0, 2)))
    parts += [Text(line, style="dim") for line in closing(report)]
    if left_out:
        text = f"No room for: {', '.join(left_out)}. A wider terminal shows them."
        parts.append(Text(text, style="dim"))
    return Group(*parts)


def _width(report: Report, rows: list[Row], headings: list[str]) -> int:
    total = 1
    for column in columns(report):
        if column.heading in headings:
            cells = [len(column.cell(report, row)) for row in rows]
            total += max([len(column.heading), *cells]) + 3
    return total


def show(report: Report, console: Console | None = None) -> None:
    """Print a report; where there is no terminal, at a width that holds all columns."""
    console = console or Console()
    if not console.is_terminal:
        rows = ordered(report)
        needed = _width(report, rows, [column.heading for column in columns(report)])
        console = Console(file=console.file, width=max(_WIDE, needed))
    console.print(render(report, console.width))


def to_text(report: Report, width: int = _WIDE) -> str:
    """A report as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(report, width))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def to_svg(report: Report, width: int = 132) -> str:
    """A picture of the table as a terminal shows it."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(render(report, width))
    return console.export_svg(title="graphwright tune")
