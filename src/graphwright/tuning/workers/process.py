"""Processes: how they end, what they have said last, how much memory they hold."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import IO


def kill(pid: int) -> None:
    """Kill a process and all of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def last_line(log: IO[bytes]) -> str:
    """The last line that a process printed."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - 4096))
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]


def resident(pid: int) -> int:
    """Bytes of memory of its own that a process holds; 0 where that cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/status", encoding="ascii") as handle:
            kept = ("RssAnon:", "RssShmem:")
            return sum(int(line.split()[1]) for line in handle if line.startswith(kept)) * 1024
    return 0


# Options of prctl(2).
_PDEATHSIG = 1


_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value)


def when_parent_ends(signum: int, parent: int) -> None:
    """Let the kernel send a signal to this process then, also where the parent was killed."""
    _prctl(_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)
