"""Turns on a GPU: of graphwright's processes and threads, one at a time has it to itself.

A GPU divides its time between processes that use it at once: what is timed then seems two or three
times as slow, and something else is chosen.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

# Seconds after which a process goes on although another one has the device.
PATIENCE_S = 10.0
_POLL_S = 0.001
_HELD: contextvars.ContextVar[bool] = contextvars.ContextVar("held", default=False)


@contextlib.contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Have a GPU to itself for the block, as far as other processes ask for it in the same way.

    One that has it for over ten seconds is no longer waited for. On the CPU nothing is done:
    nothing is set up beside what is timed there.

    Args:
        device: the GPU.
    """
    if device.type != "cuda" or _HELD.get():
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    with turn_of(f"graphwright-{os.getuid()}-{uuid}.lock"):
        token = _HELD.set(True)
        try:
            yield
        finally:
            _HELD.reset(token)


@contextlib.contextmanager
def turn_of(name: str) -> Iterator[None]:
    """Hold the lock of a file for the block; without it where the file cannot be locked.

    Args:
        name: of the file, in the folder for temporary files.
    """
    try:
        path = Path(tempfile.gettempdir()) / name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # There is no such folder, say, or the file is another user's.
        yield
        return
    try:
        _lock(file)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # Closing is not enough where a child was forked.
        os.close(file)


def _lock(file: int) -> None:
    """Lock a file, as soon as nobody else has; the end of the process unlocks it."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            return  # A file system without locks.
