"""Locks that are free in a forked child.

A child has only the thread that forked: a lock that another thread held would never be released.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> Any:
    """Make a `threading.RLock` that is free in a forked child."""
    made = threading.RLock()
    _LOCKS.add(made)
    return made


def _free() -> None:
    for each in list(_LOCKS):
        each._at_fork_reinit()


os.register_at_fork(after_in_child=_free)
