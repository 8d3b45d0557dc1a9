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
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...processes.child import GARBLED, Child, ending
from . import compile_worker, launch_cache

# Processes at most, seconds that all may take, and those that one takes to end.
_MOST, _LIMIT_S, _END_S = 16, 120.0, 1.0
# What a process answers to a list of kernels.
_DONE = b"."
# With fewer processors, one that begins early takes time from other work.
_EARLY = 4
_PACKAGE = Path(__file__).parents[2]


class _Taken(Exception):
    """The kernel need not be compiled here."""


class Compiling:
    """Kernels that other processes compile, until the block ends. It is for time alone.

    Attributes:
        jobs: what was asked for, by Triton's keys.
        problem: why kernels that were waited for are not in Triton's cache; "" if they are.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.problem = ""
        self._sent, self._awaited = 0, 0
        self._child: Child | None = None

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *error: object) -> None:
        """End what still runs."""
        child, self._child = self._child, None
        self._awaited = 0
        if child is not None:
            child.end()

    @property
    def running(self) -> bool:
        """Whether kernels are being compiled."""
        return self._awaited > 0

    def begin(self) -> None:
        """Let a process import Triton, if there are processors for it."""
        if _processors() >= _EARLY:
            self._start()

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Note the kernels of our operators in the block, where they return zeros; then start."""
        try:
            from triton.runtime._async_compile import active_mode  # It has no public name.
        except Exception:
            yield
            return
        before = active_mode.set(self)
        try:
            with launch_cache.asking():
                yield
        finally:
            active_mode.reset(before)
        self._send()

    def submit(self, key: str, compile: Callable[[], Any], *_: Any) -> Any:  # noqa: A002  # Triton's
        """What Triton calls instead of compiling, in its asynchronous mode.

        Raises:
            _Taken: in any case; Triton keeps nothing then.
        """
        if key not in self.jobs and not _is_cached(key):
            self.jobs[key] = _job(compile)
        raise _Taken

    def wait(self) -> None:
        """Wait until all is compiled."""
        end = time.monotonic() + _LIMIT_S
        while self._child is not None and self.running:
            pipe = self._child.stdout
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            answer = os.read(pipe.fileno(), 1) if ready else b""
            if answer != _DONE:
                # Where it has closed its pipe, it is about to end.
                self.problem = GARBLED if answer else self._problem(_END_S if ready else 0.0)
                self.__exit__()
                return
            self._awaited -= 1
        if self._child is not None and not all(map(_is_cached, self.jobs)):
            self.problem = self._problem(0.0)

    def _problem(self, timeout_s: float) -> str:
        """Why kernels are not compiled, in words.

        Args:
            timeout_s: seconds to wait for its process to end.
        """
        assert self._child is not None
        status, last = self._child.status_within(timeout_s), self._child.last_line()
        if status is not None:
            return ending(status, last)
        return last or f"they were not compiled within {_LIMIT_S:g} s, or under other names"

    def _start(self) -> None:
        """Start the process that compiles, by forks of itself."""
        if self._child is not None or not hasattr(os, "fork"):
            return
        # It needs no device, and should not look for one.
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        self._child = Child([compile_worker.__file__], environment=environment, pipes=True)
        self._give((sys.path, str(_PACKAGE)))

    def _send(self) -> None:
        """Have what was asked for compiled, if there are processors for it."""
        jobs = list(self.jobs.values())[self._sent :]
        others = min(_MOST, _processors() - 1)
        if not jobs or others < 1:
            return
        self._start()
        self._sent += len(jobs)
        self._awaited += 1
        self._give((jobs, others))

    def _give(self, values: Any) -> None:
        if self._child is None:
            return
        pipe = self._child.stdin
        try:
            pipe.write(pickle.dumps(values))
            pipe.flush()
        except OSError:  # It has ended.
            self.problem = self._problem(_END_S)
            self.__exit__()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _is_cached(key: str) -> bool:
    """Whether Triton has the kernel of a key in its cache of files."""
    import hashlib

    from triton.runtime.cache import get_cache_manager

    folder = get_cache_manager(hashlib.sha256(key.encode("utf-8")).hexdigest())
    return any(Path(folder.cache_dir).glob("*.json"))


def _job(compile: Callable[[], Any]) -> dict[str, Any]:  # noqa: A002  # Triton's name
    """What another process needs to compile a kernel, from Triton's own function that would."""
    from triton.compiler.compiler import make_backend

    known = inspect.getclosurevars(compile).nonlocals
    source, target = known["src"], known["target"]
    return {
        # Part of the key. Triton asks its assembler once in a process, Inductor names another one.
        "backend": make_backend(target).hash(),
        "module": source.fn.fn.__module__,
        "name": source.fn.fn.__name__,
        "signature": source.signature,
        "constants": source.constants,
        "attributes": source.attrs,
        "target": (target.backend, target.arch, target.warp_size),
        "options": dict(vars(known["options"])),
    }
