"""CarriedState: what a call leaves in attributes for the next one, as arguments and results.

A recurrent layer does `self.h = cell(x, self.h)`. A graph of its forward would read for ever what
the attribute held when it was captured. So a function stands for the forward that is given what
such places hold and returns what they hold then. A graph of it is like any other.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..calls.binding import PASSES_TO
from ..calls.dependencies import Dependencies
from ..calls.places import MISSING, Written
from ..calls.split import Args, Kwargs

# Answers a call with some arguments.
Answer = Callable[[Args, Kwargs], Any]


class _Nothing(enum.Enum):
    """What a place holds that is not there, as an argument."""

    NOTHING = 0


class CarriedState:
    """Attributes and items that a function reads before it gives them other values.

    Attributes:
        places: these.
        function: the function with what they hold before its own arguments; it returns its result
            and what they hold then, and leaves the places themselves as they were.
    """

    def __init__(self, fn: Callable[..., Any], places: Sequence[Written]) -> None:
        self.places = tuple(places)
        count = len(self.places)

        @functools.wraps(fn, updated=())
        def function(*given: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            held = self.held()
            try:
                self._leave(given[:count])
                result = fn(*given[count:], **kwargs)
                return result, self.held()
            except BaseException as error:
                # What it has set by then is for whoever has called it.
                with contextlib.suppress(AttributeError):
                    error._graphwright_carried = self.held()  # type: ignore[attr-defined]  # for `call`
                raise
            finally:
                self._leave(held)

        function.__name__ = getattr(fn, "__name__", type(fn).__name__)
        function._graphwright_carries = self.places  # type: ignore[attr-defined]  # for carried_by
        setattr(function, PASSES_TO, fn)
        self.function: Callable[..., Any] = function

    def call(self, answer: Answer, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call of the function itself.

        Args:
            answer: answers calls of `function`.
            args: of the call.
            kwargs: likewise.
        """
        try:
            result, left = answer((*self.held(), *args), kwargs)
        except BaseException as error:
            left = getattr(error, "__dict__", {}).pop("_graphwright_carried", None)
            if left is not None:
                self._leave(left)
            raise
        self._leave(left)
        return result

    def held(self) -> tuple[Any, ...]:
        """What the places hold, as arguments of `function`."""
        values = [place.value() for place in self.places]
        return tuple([_Nothing.NOTHING if value is MISSING else value for value in values])

    def _leave(self, values: Iterable[Any]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.put(MISSING if value is _Nothing.NOTHING else value)


def reached(fn: Callable[..., Any], places: Iterable[Written]) -> list[Written]:
    """Those of some places whose owner a function still reaches."""
    found = Dependencies(fn, training=True, whole=True)
    owners = {id(place.owner) for place in found.places}
    return [place for place in places if id(place.owner) in owners]
