"""Functions that build a step from others; what they close over, a graph of the step watches."""

from __future__ import annotations

from collections.abc import Callable

Step = Callable[[], None]


def repeated(step: Step, times: int) -> Step:
    """The step, several times in a row."""
    if times == 1:
        return step

    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def in_turn(first: Step, second: Step) -> Step:
    """One step of two."""

    def both() -> None:
        first()
        second()

    return both
