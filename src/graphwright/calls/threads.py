"""Threads of our own, which call no model and draw no random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_PREFIX = "graphwright: "


def own_thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Start a thread of ours; the process does not wait for it at its end."""
    thread = threading.Thread(target=target, args=args, name=f"{_PREFIX}{name}", daemon=True)
    thread.start()
    return thread


def others_run() -> bool:
    """Whether threads beside this one, our own and the monitor of tqdm's bars are there."""
    idle = sum(
        # tqdm's is there for good after the first bar, and only looks at bars.
        thread.name.startswith(_PREFIX) or type(thread).__module__ == "tqdm._monitor"
        for thread in threading.enumerate()
    )
    return threading.active_count() - idle > 1
