"""Child: another Python process of ours, from its start to its end.

It leads a group of processes of its own, so that all that it starts ends with it. What it prints
goes to a file, whose last line tells why it ended. What both sides say to each other, through files
that the child inherits, is left to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .linux import kill_group, last_line

_PACKAGE = str(Path(__file__).resolve().parents[2])
# Seconds between two looks whether it has ended: at first, and later.
_LOOK_S, _LONGEST_LOOK_S = 1e-3, 0.05
_WITHOUT_REAPING = os.WEXITED | os.WNOHANG | os.WNOWAIT
# Why a process was killed that nobody here has killed.
KILLED = "the system killed its process, as it does where memory runs out"
# What is wrong with a process that says what nobody understands.
GARBLED = "its process sent no valid answer"


class Child:
    """A process that was started here; a context manager that ends it.

    Args:
        words: what follows `python`: "-m", a module and its arguments, or the path of a script.
        handles: of files that it inherits, under the same numbers.
        environment: variables in addition to this process's. It imports graphwright from where
            this one does, and nothing from the current folder.
        pipes: whether it reads what is written to `stdin`, and `stdout` is read here; what it has
            printed is what it says to stderr then.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        handles: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        pipes: bool = False,
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        own = os.environ.get("PYTHONPATH")
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE, own))),
            "PYTHONSAFEPATH": "1",
            **(environment or {}),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                pass_fds=tuple(handles),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else self._log,
                stderr=self._log,
                env=variables,
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        self._status: int | None = None
        self._is_reaped = False

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """What it reads, if it has pipes."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """What it writes, if it has pipes."""
        assert self._process.stdout is not None
        return self._process.stdout

    def printed(self) -> str:
        """All that it has printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def last_line(self) -> str:
        """The last line that it has printed, at most 300 characters of it."""
        return last_line(self._log)

    def status_within(self, timeout_s: float) -> int | None:
        """Its exit status, or minus the number of the signal; None if it runs on.

        Its number stays its own until `end`.

        Args:
            timeout_s: seconds to wait for it to end by itself.
        """
        if self._status is not None:
            return self._status
        deadline, pause = time.monotonic() + timeout_s, _LOOK_S
        while (found := self._ended()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_LOOK_S)
        return found

    def _ended(self) -> int | None:
        """As `status_within`, at once; 0 where nobody can know, as SIGCHLD is ignored here."""
        try:
            found = os.waitid(os.P_PID, self.pid, _WITHOUT_REAPING)
        except ChildProcessError:
            self._is_reaped = True
            return 0
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def end(self, grace_s: float = 0.0) -> int:
        """End it with all that it has started, and close what it printed to.

        Args:
            grace_s: seconds that it has to end by itself.

        Returns:
            its exit status, or minus the number of the signal.
        """
        if self._status is None:
            self.status_within(grace_s)
            if not self._is_reaped:  # What it has started may live on; its number is its own.
                kill_group(self.pid)
            self._status = self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # What was written may be read by nobody.
                        pipe.close()
            self._log.close()
        return self._status

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


def message_of(line: bytes) -> dict[str, Any]:
    """What a process has said: a JSON object.

    Raises:
        ValueError: it is none.
    """
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(GARBLED)
    return found


def ending(status: int | None, printed: str = "") -> str:
    """How a process ended that should have answered, in words.

    Args:
        status: its exit status, or minus the number of the signal; None if it runs on, and has
            closed what it talks through.
        printed: the last line that it has printed.
    """
    last = f": {printed}" if printed else ""
    if status is None:
        return "its process closed what it talks through"
    if status == -signal.SIGKILL:
        return KILLED
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}{last}"
    return f"its process ended with exit status {status}{last}"
