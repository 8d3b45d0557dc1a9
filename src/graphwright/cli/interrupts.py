"""What Ctrl-C does to the command.

While the command is being imported, Ctrl-C ends it at once, since foreign code may swallow what is
raised during its import. After that, the first Ctrl-C raises KeyboardInterrupt, so that a command
ends in order and shows what it knows by then; the second ends it at once. Each way, one sentence is
printed and the status is 130.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

EXIT_INTERRUPTED = 130
_SHOW_CURSOR = "\x1b[?25h"  # A progress bar hides it.


class CtrlC:
    """The handler of SIGINT in a process that is a command."""

    def __init__(self) -> None:
        self._taken, self._at_once, self._told = False, True, False

    def take(self) -> None:
        """Handle SIGINT, unless it is ignored here, as in a job in the background."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._taken = True

    def end_at_once(self) -> None:
        """Let the next Ctrl-C end the process, also where others have handled it."""
        self._at_once = True
        if self._taken:
            self.take()

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Let the first Ctrl-C in a block raise KeyboardInterrupt; the imports are done."""
        self._at_once = False
        try:
            yield
        finally:
            self._at_once = True

    def tell(self, more: str = "") -> None:
        """Say that the command was interrupted, the only time."""
        self._told = True
        sys.stderr.write(f"graphwright: interrupted{more}.\n")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._at_once:
            self._at_once = True
            raise KeyboardInterrupt
        if not self._told:
            cursor = _SHOW_CURSOR if os.isatty(2) else ""
            os.write(2, f"{cursor}graphwright: interrupted.\n".encode())
        os._exit(EXIT_INTERRUPTED)


CTRL_C = CtrlC()
