"""Compiling kernels before they are needed: in other processes, while this one does other work.

Triton compiles one kernel after the other, and its compiler holds Python's lock. Here operators are
called without launching anything; the kernels that are not in Triton's cache, and what starts them,
are compiled into it by processes side by side. A process that then launches them finds them there.
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

# Processes at most, and seconds that all may take.
_MOST, _LIMIT_S = 16, 120.0
_PACKAGE = Path(__file__).parents[2]


class _Taken(Exception):
    """The kernel need not be compiled here."""


class Compiling:
    """Kernels that other processes compile."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Note the kernels of our operators in the block, where they return zeros; then start."""
        try:
            from triton.runtime._async_compile import active_mode  # It has no public name.
        except Exception:
            yield  # All of it is for time alone.
            return
        before = active_mode.set(self)
        try:
            with launch_cache.asking():
                yield
        finally:
            active_mode.reset(before)
        with contextlib.suppress(Exception):
            self.start()

    def submit(self, key: str, compile: Callable[[], Any], *_: Any) -> Any:  # noqa: A002  # Triton's
        """What Triton calls instead of compiling, in its asynchronous mode.

        Raises:
            _Taken: in any case; Triton keeps nothing then.
        """
        if key not in self.jobs and not _is_cached(key):
            self.jobs[key] = _job(compile)
        raise _Taken

    def start(self) -> None:
        """Begin to compile, if there are processors for it."""
        jobs = list(self.jobs.values())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        count = min(_MOST, cores - 1, len(jobs))
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
