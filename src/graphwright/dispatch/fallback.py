"""Fallback: what becomes of calls that nothing answers: counted, told of once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RUNS_EAGERLY, SignatureError, warn_of_fallback
from ..shapes.buckets import PADDING
from .decision import FIRST, FIRST_CARRIED, LIMIT, NOT_YET, UNCAPTURED, UNPAID

# Nobody is told of these: a graph will answer such a call soon.
_PASSING = frozenset({FIRST, FIRST_CARRIED, NOT_YET})
# Calls of these kinds are told apart by their reasons, others by their kind alone.
_TOLD_BY_REASON = frozenset({UNCAPTURED, LIMIT, PADDING, UNPAID})


@dataclass(frozen=True)
class Words:
    """How it is said that nothing answers a call.

    Attributes:
        what: what was called.
        counted: where such calls are counted, as a sentence.
        refused: begins the error of a call that is refused; its reason follows.
        remedy: of that error.
    """

    what: str
    counted: str
    refused: str
    remedy: str


class Fallback:
    """Counts calls that nothing answers, tells of each kind once, and refuses them where asked to.

    Attributes:
        on_miss: what is done with a call that nothing answers; "error" refuses it.
        count: counts an eager call by its reason.
        last: why the last one had no answer.
    """

    def __init__(
        self, words: Callable[[], Words] | None, on_miss: str, count: Callable[[str], object]
    ) -> None:
        """Nothing has fallen back yet.

        Args:
            words: makes them when they are needed; with None nobody is told of anything.
            on_miss: as the attribute.
            count: counts an eager call by its reason.
        """
        self.on_miss = on_miss
        self.count = count
        self.last: str | None = None
        self._words = words
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on_miss={self.on_miss!r}, last={self.last!r})"

    def refuse(self, reason: str) -> None:
        """Raise SignatureError for a call that nothing answers, if that is asked for."""
        if self.on_miss == "error" and self._words is not None:
            words = self._words()
            raise SignatureError(f"{words.refused}: {reason}", remedy=words.remedy)

    def tell(
        self, category: str, reason: str = "", how: str = RUNS_EAGERLY, *, kind: str | None = None
    ) -> None:
        """Warn of calls that nothing answers, once for each kind.

        Args:
            category: why, as it is counted.
            reason: why, in detail.
            how: what such calls do instead.
            kind: what is told of once; by default the category, or the reason of some.
        """
        if kind is None:
            kind = reason if category in _TOLD_BY_REASON else category
        if self._words is None or category in _PASSING or kind in self._told:
            return
        self._told.add(kind)
        words = self._words()
        why = f"{category}: {reason}" if reason else category
        warn_of_fallback(words.what, why, words.counted, how)
