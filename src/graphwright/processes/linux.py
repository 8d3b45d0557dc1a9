"""Helpers for processes on Linux: end them, outlive none, read their output and memory use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import IO

# Options of prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Killing a process hands its own children on: how often to look again.
_MAX_GENERATIONS = 50


def kill_group(pid: int) -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def last_line(log: IO[bytes]) -> str:
    """The last line that a process printed, at most 300 characters of it that can be shown."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - 4096))
    lines = log.read().decode(errors="replace").split("\n")
    shown = ("".join(filter(str.isprintable, line)).strip() for line in reversed(lines))
    return next(filter(None, shown), "")[:300]


def resident_bytes(pid: int) -> int:
    """Bytes of private and shared memory that a process holds; 0 if that cannot be read.

    Pages of files are not counted.
    """
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            counted = ("RssAnon:", "RssShmem:")
            return sum(int(line.split()[1]) for line in status if line.startswith(counted)) * 1024
    return 0


def children_of(pid: int) -> list[int]:
    """Process numbers of the children of all threads of a process, except for ended ones."""
    return [child for child in _all_children_of(pid) if not _has_ended(child)]


def kill_children(spared: Collection[int] = ()) -> None:
    """Kill the children of this process and wait for them, and for those that it adopts thereby.

    Signal handlers may call it.

    Args:
        spared: numbers of children that live on.
    """
    for _ in range(_MAX_GENERATIONS):
        children = set(_all_children_of(os.getpid())).difference(spared)
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _all_children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            # As bytes: decoding may import a codec, which no signal handler can do while the code
            # that it interrupts is importing it.
            found += map(int, (thread / "children").read_bytes().split())
    return found


def _has_ended(pid: int) -> bool:
    """Whether of a process only its number is left."""
    try:
        # Its name, in brackets, may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def end_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send this process a signal when its parent ends, even if that was killed.

    Args:
        parent: the parent's process number; this process exits if it has already ended.
        signum: the signal to send.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2), if the C library has it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value)
