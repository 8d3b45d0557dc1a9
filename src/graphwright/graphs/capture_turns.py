"""Keep eager calls and captures of one model apart, like a lock with readers and a writer.

A capture runs a model a few times and puts back what that changed. An eager call of another thread
in between would lose its own changes: a counter, a cache. So eager calls that our objects make wait
while that model is being captured, and a capture waits for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..calls.signature import in_backward
from ..errors import CaptureError

# How long a capture waits for eager calls: one of them may be waiting for this very thread.
PATIENCE_S = 1.0
# How long an eager call waits for captures: one of them may be waiting for this very call.
_CALL_PATIENCE_S = 5.0


class Busy(CaptureError):
    """Eager calls of other threads took so long that nothing was captured."""


class Turns:
    """Lets eager calls and captures of one model, or of models that share a part, take turns.

    Captures do not wait for each other here: the lock of their pool guards what they share.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        # By thread: how deep it is in eager calls, and in captures.
        self._calls: dict[int, int] = {}
        self._captures: dict[int, int] = {}
        self._waiting = 0
        # Whether calls no longer wait for captures, since one waited too long.
        self._open = False
        self._calling = _Calling(self)
        _ALL.add(self)

    def calling(self) -> AbstractContextManager[None]:
        """Run an eager call inside the block, after waiting for captures of other threads."""
        if in_backward():
            # In a backward, which a capture may be waiting for in another thread.
            return contextlib.nullcontext()
        return self._calling

    def taking(self, fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """A function that calls another as inside of `calling`, at less cost for each call."""
        # Local names are found faster than attributes.
        calls, captures, me, calling = self._calls, self._captures, _me, self.calling

        def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            thread = me()
            if thread not in calls:
                try:
                    calls[thread] = 1  # As in `_begin_call`.
                    if not (captures or self._waiting):
                        return fn(*args, **kwargs)
                finally:
                    calls.pop(thread, None)
                    if self._waiting:
                        self._end_waiting()
            with calling():
                return fn(*args, **kwargs)

        return call

    def _begin_call(self) -> None:
        me, calls = _me(), self._calls
        if me in calls:  # A call inside another call must not wait: both would deadlock.
            calls[me] += 1
            return
        # Without the lock, as it is nearly always: a capture says that it waits before it looks
        # for calls, and a call says that it is there before it looks for captures.
        calls[me] = 1
        if (self._captures or self._waiting) and me not in self._captures:
            with self._free:
                del calls[me]
                self._free.notify_all()
                self._wait_for_captures()
                calls[me] = 1

    def _end_call(self) -> None:
        _decrement(self._calls, _me())
        if self._waiting:
            self._end_waiting()

    def _end_waiting(self) -> None:
        with self._free:
            self._free.notify_all()

    def _wait_for_captures(self) -> None:
        end = time.monotonic() + _CALL_PATIENCE_S
        while (self._captures or self._waiting) and not self._open:
            if not self._free.wait(max(0.0, end - time.monotonic())):
                # The capture may be waiting for this call; from now on no call waits.
                self._open = True
                self._free.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no eager call of another thread run inside the block.

        Raises:
            Busy: such calls took longer than `PATIENCE_S`.
        """
        me = threading.get_ident()
        with self._free:
            if me not in self._captures:
                # A call that captures does nothing else meanwhile: others need not wait for it.
                mine = self._calls.pop(me, 0)
                self._waiting += 1
                self._free.notify_all()
                try:
                    self._wait_for_calls()
                    self._captures[me] = 0  # Before it no longer waits: see `_begin_call`.
                finally:
                    self._waiting -= 1
                    if mine:
                        self._calls[me] = mine
                    self._free.notify_all()
            self._captures[me] = self._captures.get(me, 0) + 1
        try:
            yield
        finally:
            with self._free:
                _decrement(self._captures, me)
                self._free.notify_all()

    def _wait_for_calls(self) -> None:
        end = time.monotonic() + PATIENCE_S
        # Calls of threads that are now capturing do nothing else. A copy first: others add to it.
        while {*self._calls.copy()} - self._captures.keys() and not self._open:
            if not self._free.wait(max(0.0, end - time.monotonic())):
                raise Busy(
                    f"Other threads were in eager calls of the same model for {PATIENCE_S:g} s.",
                    remedy="Capture while no other thread waits inside of the model for this one.",
                )

    def _forget(self) -> None:
        """Start over in a forked child, which has none of the other threads."""
        self._free = threading.Condition()
        self._calls.clear()
        self._captures.clear()
        self._waiting = 0


class _Calling:
    """An eager call, as a context; a class since this is faster than a generator."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns._begin_call()

    def __exit__(self, *error: object) -> None:
        self._turns._end_call()


_me = threading.get_ident


def _decrement(counts: dict[int, int], me: int) -> None:
    counts[me] = counts.get(me, 1) - 1
    if not counts[me]:
        del counts[me]


_ALL: weakref.WeakSet[Turns] = weakref.WeakSet()
_BY_PART: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def turns_of(module: nn.Module, function: Callable[..., Any] | None = None) -> Turns:
    """The turns of a module: the same for all modules that share a part of it.

    Args:
        module: what is called; a plain function as a FunctionModule.
        function: the plain function, if there is one.
    """
    parts: list[Any] = [part for part in module.modules() if part is not module or not function]
    if function is not None:
        # A method is a new object each time; its owner is not.
        parts.append(getattr(function, "__self__", function))
    with _LOCK:
        keys = [part for part in parts if _can_be_key(part)]
        known = next((_BY_PART[part] for part in keys if part in _BY_PART), None)
        turns = Turns() if known is None else known
        for part in keys:
            _BY_PART.setdefault(part, turns)
    return turns


def _can_be_key(part: Any) -> bool:
    """Whether an object can be a key of a dictionary of weak references."""
    try:
        weakref.ref(part)
        hash(part)
    except TypeError:
        return False
    return True


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    for turns in list(_ALL):
        turns._forget()


os.register_at_fork(after_in_child=_after_fork)
