"""How many sets of activations a call may have, and why it gets no other one."""

from __future__ import annotations

from typing import NamedTuple

from ...calls.plurals import counted
from ...calls.signature import in_backward
from ...errors import GraphwrightError, MemoryBudgetExceeded
from ...graphs.memory import MemoryPool, closings_of


class Refusal(NamedTuple):
    """Why a forward that finds all sets of activations waiting gets no other one.

    Attributes:
        reason: as it is counted.
        advice: what happened and what to do, in sentences.
    """

    reason: str
    advice: str


_IN_BACKWARD = Refusal(
    "in a backward, where no activation set is added",
    "it is called in a backward while all activation sets wait for their backwards, and none is "
    "added there. Have as many forwards wait outside of a backward once.",
)


class SetLimit:
    """What decides whether a forward that finds all sets waiting gets another one.

    Args:
        most: how many sets there may be.
        pool: where they are.
    """

    def __init__(self, most: int, pool: MemoryPool) -> None:
        self._most = most
        self._pool = pool
        # How often all sets were found waiting since a cycle of garbage was last the cause.
        self._found_waiting = 0
        # Why the last try to add a set failed; if room might help, how many graphs of the pool
        # were closed by then.
        self._refused: tuple[Refusal, int | None] | None = None

    def why_not(self, count: int) -> Refusal | None:
        """Why no set may be added now to so many; None if one may."""
        if count >= self._most:
            return Refusal(
                "all activation sets wait for their backwards",
                f"{counted(count, 'other call')} will still run backward. Give "
                f"make_graphed_callables() activation_sets={count + 1} or more, call backward() "
                "before, or let go of the outputs that need none.",
            )
        if in_backward():
            return _IN_BACKWARD
        if self._refused is not None and self._refused[1] in (None, closings_of(self._pool)):
            return self._refused[0]
        return None

    def refuse(self, error: GraphwrightError) -> Refusal:
        """Add no set from now on, since that has failed; try again if there may be more room."""
        room = isinstance(error, MemoryBudgetExceeded)
        what = "does not fit under the pool's limit" if room else "could not be captured"
        reason = f"another activation set {what}"
        refusal = Refusal(reason, f"all of them wait for their backwards, and {reason}. {error}")
        self._refused = refusal, closings_of(self._pool) if room else None
        return refusal

    def is_worth_a_look(self) -> bool:
        """Whether to look for sets that only garbage holds: ever more rarely if none is found."""
        self._found_waiting += 1
        return self._found_waiting & (self._found_waiting - 1) == 0

    def found_garbage(self) -> None:
        """Note that a set was waiting only since garbage held it."""
        self._found_waiting = 0
