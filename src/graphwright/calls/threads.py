"""Threads that call no model and draw no random numbers: our own, and some of libraries'."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

_PREFIX = "graphwright: "
# Reads what processes that compile for TorchInductor answer.
_READS = "InductorSubproc"


def own_thread(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Start a thread of ours; the process does not wait for it at its end."""
    thread = threading.Thread(target=target, args=args, name=f"{_PREFIX}{name}", daemon=True)
    thread.start()
    return thread


def running() -> int:
    """How many threads may run code of the user's, this one among them."""
    compiling = _compiling()
    return sum(
        not (
            thread.name.startswith(_PREFIX)
            or thread.name == _READS
            # tqdm's is there for good after the first bar, and only looks at bars.
            or type(thread).__module__ == "tqdm._monitor"
            or thread in compiling
        )
        for thread in threading.enumerate()
    )


def others_run() -> bool:
    """Whether threads beside this one may run code of the user's."""
    return running() > 1


def _compiling() -> frozenset[threading.Thread]:
    """The threads in which TorchInductor compiles kernels; once started, they stay."""
    pool = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    made = getattr(pool, "pool", None)
    if made is None or not made.cache_info().currsize:
        return frozenset()
    return frozenset(vars(made()).get("_threads", ()))
