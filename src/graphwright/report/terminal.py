"""A report and lists of strategies on a terminal, and in output that no terminal shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import GraphwrightError
from .result import Results, Row, Status
from .table import (
    Column,
    closing,
    columns,
    explanations,
    footnotes,
    ordered,
    shapes,
    timed,
    title,
    tried,
)

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


def render(report: Results, width: int, *, details: bool = True) -> RenderableType:
    """A report of a given width; without `details`, what matters on one screen."""
    parts: list[RenderableType] = []
    if report.rows:
        parts.append(Text(title(report), style="bold"))
    parts += _detailed_tables(report, width) if details else _short_table(report, width)
    headings, *cells_by_shape = shapes(report) or [[]]
    if cells_by_shape:
        by_shape = Table()
        for index, heading in enumerate(headings):
            by_shape.add_column(heading, justify="right" if 0 < index < 5 else "left")
        for cells in cells_by_shape:
            by_shape.add_row(*map(escape, cells))
        parts.append(by_shape)
    if report.interrupted:
        parts.append(Text("Interrupted: these are the results so far.", style="yellow"))
    if report.reason:
        parts.append(Text(report.reason, style="bold"))
    if details:
        for name, text in explanations(report):
            parts.append(Padding(Text.assemble((name, "bold"), ": ", text), (0, 0, 0, 2)))
        parts += [Text(line, style="dim") for line in closing(report)]
    else:
        parts += _short_notes(report, width)
    return Group(*parts)


def _detailed_tables(report: Results, width: int) -> Iterator[RenderableType]:
    """All columns, in several tables where one has no room for them."""
    rows = tried(report)
    rest = columns(report, rows)
    while rows and rest:
        shown = _fitting(report, rows, rest, width)
        yield _table(report, rows, shown)
        others = [column for column in rest if column not in shown]
        rest = [rest[0], *others] if others else []
    yield from (Text(line, style="dim") for line in footnotes(report, rows))


def _short_table(report: Results, width: int) -> Iterator[RenderableType]:
    """The rows with figures, and the columns that there is room for."""
    rows = timed(report)
    if rows:
        found = columns(report, rows)
        if all(row.status in (Status.OK, Status.SLOWER) and not row.unsteady for row in rows):
            found = [column for column in found if column.heading != "status"]
        yield _table(report, rows, _fitting(report, rows, found, width))
    yield from (Text(line, style="dim") for line in footnotes(report, rows))


def _short_notes(report: Results, width: int) -> Iterator[RenderableType]:
    """A line for each row that went wrong, one for all that did not run, then the notes."""
    absent: dict[Status, list[str]] = {}
    for row in ordered(report):
        if row.status in (Status.UNAVAILABLE, Status.NOT_TRIED):
            absent.setdefault(row.status, []).append(row.strategy)
        elif row.status not in (Status.OK, Status.SLOWER):
            text = Text.assemble("  ", (row.strategy, "bold"), f" {row.status}: ", row.reason)
            text.truncate(width, overflow="ellipsis")
            yield text
    for status, names in absent.items():
        yield Text(f"{str(status).capitalize()}: {', '.join(names)}.", style="dim")
    for note in (*report.notes, *(f"Profile: {each}." for each in report.predictions)):
        yield Text(note, style="dim")


def _fitting(report: Results, rows: list[Row], found: list[Column], width: int) -> list[Column]:
    """As many columns as there is room for, the most important ones; never none."""
    shown = list(found)
    while _width(report, rows, shown) > width and len(shown) > 2:
        shown.remove(max(shown[1:], key=lambda column: column.priority))
    return shown


def _table(report: Results, rows: list[Row], shown: list[Column]) -> Table:
    table = Table()
    for column in shown:
        text = column.heading in ("strategy", "status")
        table.add_column(column.heading, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        chosen = row.strategy == report.chosen
        cells = [escape(column.cell(report, row)) for column in shown]
        table.add_row(*cells, style="bold green" if chosen else _STYLES[row.status])
    return table


def _width(report: Results, rows: list[Row], shown: list[Column]) -> int:
    total = 1
    for column in shown:
        cells = [len(column.cell(report, row)) for row in rows]
        total += max([len(column.heading), *cells]) + 3
    return total


def _unseen_width(*needed: int) -> int:
    """Columns where there is no terminal: as COLUMNS says, or else so many that all is shown."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) else max(_WIDE, *needed, 0)


def show(report: Results, console: Console | None = None, *, details: bool = True) -> None:
    """Print a report; without a terminal and COLUMNS, at a width that holds all columns."""
    console = console or Console()
    if not console.is_terminal:
        rows = tried(report)
        needed = _width(report, rows, columns(report, rows))
        console = Console(file=console.file, width=_unseen_width(needed))
    console.print(render(report, console.width, details=details))


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Print to stdout: it is no failure that its reader has gone.

    Raises:
        GraphwrightError: it cannot be written, as where a disk is full.
    """
    try:
        yield
        sys.stdout.flush()
    except SystemExit:  # What rich makes of a closed pipe, after it has done as `_mute` does.
        pass
    except BrokenPipeError:
        _mute(sys.stdout)
    except OSError as error:
        _mute(sys.stdout)
        raise GraphwrightError(
            f"The results cannot be printed: {error.strerror or error}.",
            remedy="Free some space, or redirect stdout.",
        ) from error


class Unheard:
    """A text stream of which nothing need be heard, such as progress: what fails is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError:
            _mute(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _mute(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _mute(stream: Any) -> None:
    """Lead a stream nowhere, or Python would try to write the rest of it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_strategies(
    kinds: Mapping[str, Sequence[tuple[Sequence[str], str]]], closing: Sequence[str]
) -> None:
    """Print strategies, their explanations and some closing lines.

    Args:
        kinds: by their names, the parts: name, whether it runs here, what it loads with and what
            tuning tries it for; and an explanation.
        closing: lines to end with.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_unseen_width(), highlight=False)
    table = Table("strategy", "here", "loads with", "only if")
    table.columns[0].no_wrap = True
    explained: dict[str, list[str]] = {}
    for kind, parts in kinds.items():
        table.add_section()
        table.add_row(kind, style="bold")
        for cells, text in parts:
            table.add_row(*cells, style="dim" if cells[1] == "no" else None)
            if text:
                explained.setdefault(text, []).append(cells[0])
    console.print(table)
    # A line each where nobody reads them on a screen: a command is there to be copied.
    whole = not console.is_terminal
    for text, names in explained.items():
        console.print(Text.assemble((", ".join(names), "bold"), ": ", text), soft_wrap=whole)
    for text in closing:
        console.print(Text(text, style="dim"), soft_wrap=whole)


def to_text(report: Results, width: int | None = None) -> str:
    """A report as plain text, by default as wide as the terminal, or 160 without one."""
    if width is None:
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size((_WIDE, 24)).columns if on_terminal else _WIDE
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(report, width))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def to_svg(report: Results, width: int = 100) -> str:
    """A picture of the table as a terminal shows it."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(render(report, width, details=False))
    # Its fonts would be fetched from elsewhere.
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="graphwright tune", code_format=template)
