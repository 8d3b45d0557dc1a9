"""Progress of long work: a bar on a terminal or in a notebook, lines where stderr is a log."""

from __future__ import annotations

import contextlib
import html
import importlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from ..calls.threads import own_thread
from .result import Row, Status
from .table import duration

# Seconds before anything is shown of what is usually short.
SHORT_S = 2.0
# Seconds between two lines of a log, and between two looks at a bar.
_LINES_S, _BARS_S = 10.0, 0.125
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
_LOGGER = logging.getLogger("graphwright")


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


class Silent:
    """A listener that shows nothing."""

    def start(self, total: int) -> None: ...
    def step(self, what: str) -> None: ...
    def doing(self, what: str) -> None: ...
    def row(self, row: Row) -> None: ...


class _Display(Protocol):
    """Where progress is shown; called from one thread at a time."""

    every_s: float

    def show(self, state: _State) -> None:
        """Show how far it is."""

    def print(self, line: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Take away what does not stay."""


class _State:
    """How far a run is: a listener that a thread of its own shows on a display."""

    def __init__(self, title: str, display: _Display, after_s: float) -> None:
        self.title = title
        self.what = ""
        self.total: int | None = None
        self.complete = -1
        self._display = display
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = own_thread(self._run, "progress", after_s)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def _run(self, after_s: float) -> None:
        wait_s = after_s
        while not self._ended.wait(wait_s):
            with self._lock, contextlib.suppress(Exception):  # What shows it must not end it.
                self._display.show(self)
            wait_s = self._display.every_s

    def end(self) -> None:
        """Show nothing more."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(Exception):
            self._display.close()

    def start(self, total: int) -> None:
        """The run has this many steps."""
        self.total = total

    def step(self, what: str) -> None:
        """A step begins."""
        self.complete += 1
        self.what = what

    def doing(self, what: str) -> None:
        """Something within the step begins."""
        self.what = what

    def row(self, row: Row) -> None:
        """Print the row as one line above the bar."""
        with self._lock, contextlib.suppress(Exception):
            self._display.print(_line_of(row))


class _Terminal:
    """A bar of rich's."""

    every_s = _BARS_S

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            Elapsed(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=None)

    def show(self, state: _State) -> None:
        """Draw the bar; the first time, begin it."""
        self._bar.start()
        self._bar.update(
            self._task,
            description=_short(state.what or state.title),
            total=state.total,
            completed=max(0, state.complete),
            refresh=True,
        )

    def print(self, line: str) -> None:
        """Print above the bar."""
        self._bar.console.print(line, style="dim", markup=False, highlight=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar.live.is_started:  # Else it would print an empty line.
            self._bar.stop()


class _Notebook:
    """A bar of the browser's, in the output of a cell."""

    every_s = 0.5

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, state: _State) -> None:
        """Draw the bar; the first time, make room for it."""
        ipython = importlib.import_module("IPython.display")
        value = "" if state.total is None else f' max="{state.total}" value="{state.complete}"'
        text = html.escape(f"{state.title}: {_short(state.what)}, {state.seconds:.0f} s")
        content = ipython.HTML(f"<progress{value}></progress> {text}")
        if self._handle is None:
            self._handle = ipython.display(content, display_id=True)
        else:
            self._handle.update(content)

    def print(self, line: str) -> None:
        """Print below the bar."""
        _say(line)

    def close(self) -> None:
        """Take the bar away."""
        if self._handle is not None:
            self._handle.update(importlib.import_module("IPython.display").HTML(""))


class _Lines:
    """A line now and then: to the logger where it takes them, else on stderr."""

    every_s = _LINES_S

    def __init__(self, *, rows: bool) -> None:
        self._rows = rows

    def show(self, state: _State) -> None:
        """Write one line."""
        text = state.title
        if state.total is not None and state.complete > 0:
            text += f": {state.complete} of {state.total}"
        if state.what:
            text += f"{', ' if state.complete > 0 else ': '}{_short(state.what)}"
        if state.seconds >= 1:
            text += f", {state.seconds:.0f} s"
        if _LOGGER.isEnabledFor(logging.INFO):
            _LOGGER.info(text)
        else:
            _say(f"graphwright: {text}")

    def print(self, line: str) -> None:
        """Write it only if that was asked for: there may be many."""
        if self._rows:
            _say(line)

    def close(self) -> None:
        """Nothing is there to take away."""


# One at a time: a part of something long is no news of its own.
_SHOWING = threading.Lock()


@contextlib.contextmanager
def progress_shown(
    progress: bool | None, title: str, *, after_s: float = 0.0
) -> Iterator[Progress]:
    """A listener that shows progress on stderr, unless `progress` is False.

    Args:
        progress: whether to show it; None for yes, True for each row in a log too.
        title: what runs.
        after_s: seconds before anything is shown.
    """
    if progress is False or sys.stderr is None or not _SHOWING.acquire(blocking=False):
        yield Silent()
        return
    try:
        state = _State(title, _display(rows=progress is True), after_s)
        try:
            yield state
        finally:
            state.end()
    finally:
        _SHOWING.release()


def _display(*, rows: bool) -> _Display:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return _Notebook()
    return _Terminal() if sys.stderr.isatty() else _Lines(rows=rows)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _short(what: str) -> str:
    return what if len(what) <= _SHOWN else what[: _SHOWN - 1] + "…"


def _line_of(row: Row) -> str:
    """A row in words."""
    mark = _MARKS.get(row.status, "–")
    line = f"{mark} {row.strategy}: "
    if row.measurement is not None and row.status in (Status.OK, Status.SLOWER):
        line += duration(row.measurement.typical().median)
        line += ", unsteady" if row.unsteady else ""
        return f"{line}, set up in {duration(row.setup_s or 0.0)}"
    return f"{line}{row.status}, {row.reason}"
