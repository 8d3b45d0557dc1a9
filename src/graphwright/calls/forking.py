"""What a forked child finds as if nothing had been under way in its parent.

A child has only the thread that forked: a lock that another one held would never be let go of.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> Any:
    """A new `threading.RLock`, which is free in a forked child."""
    made = threading.RLock()
    _LOCKS.add(made)
    return made


def _free() -> None:
    for each in list(_LOCKS):
        each._at_fork_reinit()


os.register_at_fork(after_in_child=_free)
