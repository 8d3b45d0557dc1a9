"""How often to capture, and how often to look whether there is a graph: both have to pay off.

A capture costs as much as tens or hundreds of eager calls. Where each call needs another graph,
since an argument, the module or the shape is another one each time, capturing would make a program
slower for ever. So all that captures in a pool asks the pool's budget, whatever makes the graphs
and on whichever thread. The first captures are free, and so is one for each kind of call that comes
back after others. Any further one is paid: it has to wait until it takes a twentieth of the time
since the last one.

To find out that a call has no graph takes a while, too: the module has to be compared. Where that
has been in vain many times, calls are eager without it for a while.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from ..calls import forking

# Captures in a pool that are free.
FREE_CAPTURES = 3
# The share of the time that passes which paid captures may take.
SHARE = 0.05
# Calls that graphs have to answer after a paid capture, or the next one waits twice as long.
WORTH_CALLS = 128
# Looks in vain, in a row, that are free; and the share of the time that further ones may take.
FREE_LOOKS = 16
SHARE_OF_LOOKS = 0.01

# Read in one place, so that tests can have another clock.
CLOCK: Callable[[], float] = time.perf_counter


def now() -> float:
    """Seconds, as budgets count them."""
    return CLOCK()


class Capture:
    """A capture that the budget allows or refuses.

    Attributes:
        allowed: whether it may be made.
        most_s: seconds that it counts at most, for what waited for other threads.
        counts: whether it counts at all.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self.most_s = math.inf
        self.counts = True


class CaptureBudget:
    """Says which captures in a pool may be made now."""

    def __init__(self) -> None:
        # Held for a moment only, never during a capture.
        self._lock = forking.lock()
        # Threads that are capturing: what they ask for is part of that.
        self._capturing: set[int] = set()
        # What had no graph for a call the last time, and how often that was another one.
        self._asker = 0
        self._turns = 0
        self.renew()
        _ALL.add(self)

    def renew(self) -> None:
        """Begin anew, with captures that are free."""
        with self._lock:
            self._free_used = 0
            # When the next paid one may be made, and what the last one had to wait.
            self._at_s = -math.inf
            self._wait_s = 0.0
            # What asked for the last paid one, and how many calls it had answered by then.
            self._last: tuple[weakref.WeakMethod[Callable[[], int]], int] | None = None

    def allows(self) -> bool:
        """Whether a capture would be allowed now that is for no call that comes back."""
        return self._free_used < FREE_CAPTURES or now() >= self._at_s

    def turn_of(self, asker: object) -> int:
        """How often, so far, something else had no graph for a call than the time before.

        Args:
            asker: what has none now.
        """
        with self._lock:
            if id(asker) != self._asker:
                self._asker = id(asker)
                self._turns += 1
            return self._turns

    @contextlib.contextmanager
    def capture(
        self, answered: Callable[[], int], *, comes_back: bool = False
    ) -> Iterator[Capture]:
        """Capture inside the block, if that is allowed; its time counts.

        Args:
            answered: a method that tells how many calls its graphs have answered.
            comes_back: whether it is the first capture for a kind of call that comes back, which is
                free.
        """
        me = threading.get_ident()
        if me in self._capturing:
            yield Capture(allowed=True)
            return
        is_free = self._take(comes_back=comes_back)
        capture = Capture(allowed=is_free is not None)
        if is_free is None:
            yield capture
            return
        self._capturing.add(me)
        began = now()
        try:
            yield capture
        finally:
            self._capturing.discard(me)
            self._settle(capture, min(now() - began, capture.most_s), answered, is_free, comes_back)

    def _take(self, *, comes_back: bool) -> bool | None:
        """Take one capture: whether it is free; None if none is allowed."""
        with self._lock:
            if comes_back:
                return True
            if self._free_used < FREE_CAPTURES:
                self._free_used += 1
                return True
            if now() < self._at_s:
                return None
            self._at_s = math.inf  # Until this one has ended.
            return False

    def _settle(
        self,
        capture: Capture,
        seconds: float,
        answered: Callable[[], int],
        is_free: bool,
        comes_back: bool,
    ) -> None:
        with self._lock:
            if comes_back:
                return
            if is_free:
                if capture.counts:
                    # The first one that is paid keeps to the share, too.
                    self._at_s = max(self._at_s, now() + seconds / SHARE)
                else:
                    self._free_used -= 1
                return
            longer = 0.0 if self._last is None or self._has_paid() else 2 * self._wait_s
            self._wait_s = max(seconds / SHARE, longer) if capture.counts else 0.0
            self._at_s = now() + self._wait_s
            self._last = weakref.WeakMethod(answered), answered()

    def _has_paid(self) -> bool:
        """Whether graphs have answered enough calls since the last paid capture."""
        assert self._last is not None
        answered, before = self._last[0](), self._last[1]
        return answered is not None and answered() - before >= WORTH_CALLS

    def _forget_threads(self) -> None:
        """In a forked child, forget what other threads capture: there, none of it will end."""
        self._capturing &= {threading.get_ident()}
        if self._at_s == math.inf:
            self._at_s = now() + self._wait_s


_ALL: weakref.WeakSet[CaptureBudget] = weakref.WeakSet()


def _after_fork() -> None:
    for budget in list(_ALL):
        budget._forget_threads()


os.register_at_fork(after_in_child=_after_fork)


class Looks:
    """Says whether it is worth while to look for a graph.

    Attributes:
        until_s: when the next look is due.
        in_vain: how many of the last ones, in a row, found no graph for another kind of call.
    """

    def __init__(self, free: int = FREE_LOOKS) -> None:
        """`free`: looks in vain, in a row, after which calls are eager without a look."""
        self._free = free
        self.in_vain = 0
        self.until_s = -math.inf

    @property
    def rests(self) -> bool:
        """Whether the next call is eager without a look."""
        return now() < self.until_s

    @property
    def mostly_in_vain(self) -> bool:
        """Whether no look has found a graph for long."""
        return self.in_vain > self._free

    def failed(self, seconds: float, *, is_new: bool = True) -> None:
        """Count a look that took so long and found no graph.

        Args:
            seconds: that it took.
            is_new: whether the call is of another kind than those before.
        """
        self.in_vain += is_new
        if self.mostly_in_vain:
            self.until_s = now() + seconds / SHARE_OF_LOOKS

    def found(self) -> None:
        """Begin anew: there was a graph."""
        self.in_vain, self.until_s = 0, -math.inf
