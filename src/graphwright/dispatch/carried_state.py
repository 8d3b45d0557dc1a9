"""CarriedState: what a call leaves in attributes for the next one, as an argument and a result.

A recurrent layer does `self.h = cell(x, self.h)`. A graph of its forward would read for ever what
the attribute held when it was captured. So a function stands for the forward that is given what
such places hold, and leaves there what is new: a dictionary, which the call changes. A graph of
that function is like any other of a call that changes an object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..calls.places import MISSING, Place
from ..calls.signature import Args, Kwargs

# Answers a call with some arguments.
Answer = Callable[[Args, Kwargs], Any]


class State(dict[int, Any]):
    """What places hold, by their positions: an object, so that one that grows is known as such."""


class CarriedState:
    """Attributes and items that a function reads before it gives them other values.

    Attributes:
        places: these.
        function: the function with the state as its first argument, by the positions of places; it
            leaves the places themselves as they were.
    """

    def __init__(self, fn: Callable[..., Any], places: Sequence[Place]) -> None:
        self.places = tuple(places)

        @functools.wraps(fn, updated=())
        def function(state: State, *args: Any, **kwargs: Any) -> Any:
            held = self._held()
            try:
                self._leave(state)
                return fn(*args, **kwargs)
            finally:
                state.clear()
                state.update(self._held())
                self._leave(held)

        function.__name__ = getattr(fn, "__name__", type(fn).__name__)
        function._graphwright_carries = self.places  # type: ignore[attr-defined]  # for carried_by
        self.function: Callable[..., Any] = function

    def call(self, answer: Answer, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call of the function itself.

        Args:
            answer: answers calls of `function`.
            args: of the call.
            kwargs: likewise.
        """
        state = self._held()
        try:
            return answer((state, *args), kwargs)
        finally:
            self._leave(state)

    def with_state(self, args: Args) -> Args:
        """Arguments of `function` for a call of the function itself that is not to be answered."""
        return (self._held(), *args)

    def _held(self) -> State:
        """What the places hold."""
        values = enumerate(place.value() for place in self.places)
        return State({n: value for n, value in values if value is not MISSING})

    def _leave(self, state: State) -> None:
        for n, place in enumerate(self.places):
            place.put(state.get(n, MISSING))
