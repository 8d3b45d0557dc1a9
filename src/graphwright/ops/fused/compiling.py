"""Compiling kernels before they are needed: in other processes, while this one does other work.

Triton compiles one kernel after the other, and its compiler holds Python's lock. Here operators are
called without launching anything; the kernels that are not in Triton's cache are compiled into it
by processes side by side. A process that then launches them finds them there.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import compile_worker, launch_cache

# Fewer kernels are compiled sooner than processes start.
_WORTH = 3
# Kernels that one process should have, processes at most, and seconds that all may take.
_EACH, _MOST, _LIMIT_S = 2, 8, 120.0
_PACKAGE = Path(__file__).parents[2]


class _Taken(Exception):
    """The kernel need not be compiled here."""


class Compiling:
    """Kernels that other processes compile."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def ask(self, calls: Callable[[], object]) -> None:
        """Note the kernels of some calls, in which nothing is launched."""
        from triton.runtime import _async_compile  # It has no public name.

        before = _async_compile.active_mode.set(self)
        try:
            with launch_cache.not_launching(_Taken):
                calls()
        finally:
            _async_compile.active_mode.reset(before)

    def submit(self, key: str, compile: Callable[[], Any], *_: Any) -> Any:  # noqa: A002  # Triton's
        """What Triton calls instead of compiling, in its asynchronous mode.

        Raises:
            _Taken: in any case; Triton keeps nothing then.
        """
        if key not in self.jobs and not _is_cached(key):
            self.jobs[key] = _job(compile)
        raise _Taken

    def start(self) -> None:
        """Begin to compile, if there is enough to do and there are processors for it."""
        jobs = list(self.jobs.values())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        count = min(_MOST, cores - 1, len(jobs) // _EACH)
        if len(jobs) < _WORTH or count < 2:
            return
        for n in range(count):
            given = pickle.dumps((sys.path, str(_PACKAGE), jobs[n::count]))
            process = subprocess.Popen(
                [sys.executable, str(Path(compile_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # They need no device, and should not look for one.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
            self._processes.append(process)
            assert process.stdin is not None
            with process.stdin as pipe:
                pipe.write(given)

    def wait(self) -> None:
        """Wait until all is compiled."""
        end = time.monotonic() + _LIMIT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()  # It has no effect on one that has ended.
            process.wait()
        self._processes.clear()


@contextlib.contextmanager
def compiling(calls: Callable[[], object]) -> Iterator[Compiling]:
    """Compile what our operators launch in some calls, while the block runs.

    The calls are made with nothing launched: what the operators return has never been written to.
    All of it is for time alone, so what fails is left to be compiled where it is used.
    """
    work = Compiling()
    try:
        with contextlib.suppress(Exception):
            work.ask(calls)
        with contextlib.suppress(Exception):
            work.start()
        yield work
    finally:
        work.close()


def _is_cached(key: str) -> bool:
    """Whether Triton has the kernel of a key in its cache of files."""
    import hashlib

    from triton.runtime.cache import get_cache_manager

    folder = get_cache_manager(hashlib.sha256(key.encode("utf-8")).hexdigest())
    return any(Path(folder.cache_dir).glob("*.json"))


def _job(compile: Callable[[], Any]) -> dict[str, Any]:  # noqa: A002  # Triton's name
    """What another process needs to compile a kernel, from Triton's own function that would."""
    known = inspect.getclosurevars(compile).nonlocals
    source, target = known["src"], known["target"]
    return {
        "module": source.fn.fn.__module__,
        "name": source.fn.fn.__name__,
        "signature": source.signature,
        "constants": source.constants,
        "attributes": source.attrs,
        "target": (target.backend, target.arch, target.warp_size),
        "options": dict(vars(known["options"])),
    }
