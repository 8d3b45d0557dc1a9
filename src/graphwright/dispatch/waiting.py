"""WaitingCalls: which calls have no graph as yet, and which are not even looked at.

Captures and looks for a graph have a budget (`capture_budget`). Here is noted what it left without
a graph, and from that is decided, before anything is looked at, whether a call is eager at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..calls.signature import CallSignature
from ..graphs.capture_budget import Looks
from .decision import FIRST, NOT_YET, UNPAID, Miss

# Signatures of which it is remembered that they were refused.
_MAX_REFUSED = 1024
# Kinds of calls with objects that are remembered.
_MAX_SEEN = 4096
# New kinds of calls in a row, of which none comes back, before a caller is told.
_MANY_NEW = 16


@dataclass(eq=False)
class Refused:
    """Calls of a signature that have no graph, as takes a while to find out, and why."""

    signature: CallSignature
    miss: Miss
    looks: Looks = field(default_factory=lambda: Looks(free=0))


class WaitingCalls:
    """Notes which calls have had no graph, and says which are eager without a look.

    Attributes:
        looks: those in vain, in a row.
        resting: why calls at rest are eager: as the last one that was looked at.
        refusal: why the last capture was refused, if that was the last one.
    """

    def __init__(self) -> None:
        self._refused: dict[CallSignature, Refused] = {}
        # Of calls with objects: those that came before.
        self._seen: dict[Any, None] = {}
        self.begin_anew()

    def __repr__(self) -> str:
        rests = f"at rest: {self.resting.category}" if self.looks.rests else "looking"
        return f"{type(self).__name__}({rests}, {len(self._refused)} refused)"

    def begin_anew(self) -> None:
        """Forget which calls have had no graph, but for those that were refused."""
        self.looks = Looks()
        self.refusal: str | None = None
        self.resting = Miss(NOT_YET, way="unexamined")
        # What keeps captures from paying off, in words, by its cause.
        self._unpaid: dict[str, str] = {}
        # New kinds of calls that wait, none of which has come back so far.
        self._new_kinds = 0

    def clear(self) -> None:
        """Forget all calls."""
        self._refused.clear()
        self._seen.clear()
        self.begin_anew()

    def why(self, refused: Refused | None) -> Miss | None:
        """Why a call is eager without a look at it; None if it is looked at.

        Args:
            refused: what is known of calls of its signature, as far as that is known.
        """
        if self.looks.rests:
            return self.resting
        return refused.miss if refused is not None and refused.looks.rests else None

    def refused(self, signature: CallSignature) -> Refused | None:
        """What is known of calls of a signature that were refused."""
        return self._refused.get(signature) if self._refused else None

    def refuse(self, signature: CallSignature, seconds: float, miss: Miss) -> Refused:
        """Have calls of a signature be eager, without a look at the module, for a while.

        Args:
            signature: theirs.
            seconds: that it took to find out that there is no graph for one.
            miss: why there is none.
        """
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        miss = Miss(miss.category, miss.reason, way="unexamined")
        refused = self._refused.get(signature)
        if refused is None or refused.miss.category != miss.category:
            refused = self._refused[signature] = Refused(signature, miss)
        refused.miss = miss
        refused.looks.failed(seconds)
        return refused

    def first(self, key: Any) -> Miss | None:
        """Why the first call with such objects is eager; None for later ones, and for other calls.

        A cache that grows with each call is of another shape each time, and capturing each of them
        would never pay off; the next text may have the same lengths.

        Args:
            key: of the call's objects; None if it has none.
        """
        if key is None or key in self._seen:
            return None
        self.note(key)
        return Miss(FIRST, "the next such call is captured")

    def note(self, key: Any) -> None:
        """Note that a call with such objects has come, or a graph for it; None notes nothing."""
        if key is not None:
            if len(self._seen) >= _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = None

    def came_back(self) -> None:
        """Note that a kind of call that waited has come back."""
        self._new_kinds = 0

    def postpone(
        self,
        signature: CallSignature | None,
        looked_s: float,
        unpaid: Callable[[], tuple[str, str]],
        *,
        is_new: bool,
        no_room: bool,
    ) -> Miss:
        """Why a call is eager that the budget for captures leaves none for.

        Args:
            signature: of the call; None where those that were refused are known elsewhere.
            looked_s: seconds that it took to see that there is no graph.
            unpaid: what makes most calls another kind: a cause, and the reason with what to do.
            is_new: whether its kind is new.
            no_room: whether its graph would take the place of another that may come back.
        """
        self.looks.failed(looked_s, is_new=is_new)
        refused = None if signature is None else self._refused.get(signature)
        if refused is not None:
            refused.looks.failed(looked_s)
            missed = refused.miss
        else:
            self._new_kinds += is_new
            if no_room or self._new_kinds > _MANY_NEW:
                cause, reason = (
                    unpaid() if self.refusal is None else ("it is refused", self.refusal)
                )
                # The same words for each cause.
                missed = Miss(UNPAID, self._unpaid.setdefault(cause, reason))
            else:
                missed = Miss(NOT_YET, "it is captured when it comes back after other calls")
        missed = replace(missed, way="detached")
        self.resting = replace(missed, way="unexamined")
        return missed
