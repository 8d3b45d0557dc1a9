"""How long to go on capturing: captures have to pay off, else calls are eager for a while.

A capture costs as much as tens or hundreds of eager calls. It pays off once graphs have answered
about as many calls. Where each call needs another graph, since an argument, the module or the shape
is another one each time, capturing would make a program slower for ever.
"""

from __future__ import annotations

# Captures for one cause that are tried though the ones before have not paid off.
FREE_CAPTURES = 3
# Calls that graphs have to answer between two captures for one cause.
WORTH_CALLS = 128
# The share of the time of eager calls that captures may take which do not pay off.
SHARE = 0.05
# While calls wait since the module changes, every so many looks whether it is as it was before.
_LOOK_EVERY = 8


class CaptureBudget:
    """Allows captures for one cause as long as they pay off, then ever more rarely.

    Args:
        free: captures that are allowed though the ones before have not paid off.

    Attributes:
        reason: why calls wait.
    """

    def __init__(self, free: int = FREE_CAPTURES) -> None:
        self.reason = ""
        self._free = free
        self._unpaid = 0
        self._answered = 0
        self._cost_s = 0.0
        # Seconds of eager calls to go until the next capture, and those between the last two.
        self._left_s = 0.0
        self._wait_s = 0.0
        self._waiting = 0

    @property
    def waits(self) -> bool:
        """Whether the next call is eager instead of being captured."""
        return self._left_s > 0

    def spend(self, seconds: float, answered: int, reason: str) -> None:
        """Count a capture, or a refused one.

        Args:
            seconds: that it took.
            answered: how many calls graphs have answered so far.
            reason: what a caller is told if calls wait from now on.
        """
        self.pay(answered)
        self._unpaid += 1
        self._answered = answered
        self._cost_s += seconds
        if self._unpaid >= self._free:
            # As long as another capture, too, would stay within the share; and ever longer.
            self._wait_s = max((self._cost_s + seconds) / SHARE, 2 * self._wait_s)
            self._left_s, self.reason = self._wait_s, self.reason or reason

    def pay(self, answered: int) -> None:
        """Begin anew where graphs have answered enough calls since the last capture."""
        if answered - self._answered >= WORTH_CALLS:
            self._unpaid = 0
            self._cost_s = self._wait_s = self._left_s = 0.0

    def looks(self) -> bool:
        """Whether it is this waiting call's turn to look whether there is a graph for it."""
        self._waiting += 1
        return self._waiting % _LOOK_EVERY == 0

    def waited(self, seconds: float) -> None:
        """Count an eager call that waited."""
        self._left_s -= seconds
