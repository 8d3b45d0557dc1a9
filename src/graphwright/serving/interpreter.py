"""How the interpreter of a server runs: its event loop, its threads' turns, its garbage collector.

Each of these is a setting of the whole process. docs/how-to/serving.md has the measurements.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

# The thread that computes lets go of the GIL in each operation of PyTorch, and takes it back from
# the event loop, which gives it up only after this time: 5 ms by default, several times a batch.
_TURN_S = 1e-4
# How many servers want short turns, and how long turns were before the first of them.
_users, _turn_before = 0, 0.0
_turns_lock = threading.Lock()

_Result = TypeVar("_Result")


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """`asyncio.run`, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        return runner.run(main)


def end_process() -> NoReturn:
    """End the process as at its usual end, but for threads: what they do is not waited for."""
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # There is none for Windows.
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Threads give way to each other soon, as long as this lasts for any server of the process."""
    global _users, _turn_before
    with _turns_lock:
        if not _users:
            _turn_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_turn_before, _TURN_S))
        _users += 1
    try:
        yield
    finally:
        with _turns_lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_turn_before)


def freeze_garbage_collector() -> None:
    """Let the garbage collector look only at what will be made from now on.

    A full collection looks at every object of PyTorch and of the models: a tenth of a second in
    which nothing is answered. Call it again when models have been dropped: it takes in what is left
    of them.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
