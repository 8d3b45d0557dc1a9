"""The highest rate that a server keeps up with."""

from __future__ import annotations

import time
from collections.abc import Callable


def highest(
    keeps_up: Callable[[float], bool],
    first: float,
    *,
    runs: int,
    seconds: float,
    lowest: float = 0.0,
    precision: float = 1.1,
) -> tuple[float, float | None]:
    """The highest rate that passed and the lowest that did not, 0 and None where there is none.

    Args:
        keeps_up: tries a rate.
        first: rate to try. It is doubled or halved until one passes and one does not; then the
            middle is tried.
        runs: rates to try at most.
        seconds: after which no further one is tried.
        lowest: rate to try: there are too few requests to judge below it.
        precision: factor between the two rates that is close enough.
    """
    began = time.monotonic()
    passed, failed = 0.0, None
    rate = first
    for _ in range(runs):
        if rate < lowest or time.monotonic() - began >= seconds:
            break
        if keeps_up(rate):
            passed = rate
        else:
            failed = rate
        if failed is None:
            rate = 2 * passed
        elif not passed:
            rate = failed / 2
        elif failed / passed <= precision:
            break
        else:
            rate = (passed * failed) ** 0.5
    return passed, failed
