"""Progress of a run on stderr: the present step, and each row when it is complete."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from .result import Row, Status
from .table import duration

_SHOWN = 60  # characters
_MARKS = {
    Status.OK: "✓",
    Status.SLOWER: "·",
    Status.WRONG: "✗",
    Status.FAILED: "!",
    Status.CRASHED: "!",
    Status.TIMED_OUT: "!",
    Status.MEMORY_EXCEEDED: "!",
}


class Progress(Protocol):
    """A listener for the progress of a run; its methods are called from the thread that tunes."""

    def start(self, total: int) -> None:
        """The run has this many steps."""

    def step(self, what: str) -> None:
        """A step begins."""

    def doing(self, what: str) -> None:
        """Something within the step begins."""

    def row(self, row: Row) -> None:
        """A row is complete."""


class _Shown:
    """Drives a rich progress bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._steps = -1

    def start(self, total: int) -> None:
        """The run has this many steps."""
        self._bar.update(self._task, total=total)

    def step(self, what: str) -> None:
        """A step begins."""
        self._steps += 1
        self._bar.update(self._task, description=what, completed=self._steps)

    def doing(self, what: str) -> None:
        """Something within the step begins."""
        short = what if len(what) <= _SHOWN else what[: _SHOWN - 1] + "…"
        self._bar.update(self._task, description=short)

    def row(self, row: Row) -> None:
        """Print the row as one line above the bar."""
        mark = _MARKS.get(row.status, "–")
        line = f"{mark} {row.strategy}: "
        if row.measurement is not None and row.status in (Status.OK, Status.SLOWER):
            line += duration(row.measurement.typical().median)
            line += ", unsteady" if row.unsteady else ""
            line += f", set up in {duration(row.setup_s or 0.0)}"
        else:
            line += f"{row.status}, {row.reason}"
        self._bar.console.print(line, style="dim", markup=False, highlight=False)


class Silent:
    """A listener that shows nothing."""

    def start(self, total: int) -> None: ...
    def step(self, what: str) -> None: ...
    def doing(self, what: str) -> None: ...
    def row(self, row: Row) -> None: ...


@contextlib.contextmanager
def shown(progress: bool | None) -> Iterator[Progress]:
    """A listener that shows progress on stderr; None shows it where stderr is a terminal."""
    if progress is None:
        progress = sys.stderr.isatty()
    if not progress:
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Elapsed(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield _Shown(bar)
