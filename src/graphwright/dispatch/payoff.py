"""Payoff: whether another way to answer calls is faster than eager, timed in calls made anyway."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from ..evaluation.clock import timed

# Timed calls of either kind, and the share of eager's time above which the other way does not pay.
_ROUNDS = 5
WORTH = 0.97


class Payoff:
    """Answers calls in another way than eager; after a few of them, in turns with eager, timed.

    Attributes:
        ratio: seconds of a call as a share of eager's; None until that is known.
    """

    def __init__(self, device: torch.device | None, first: int) -> None:
        """Nothing runs yet.

        Args:
            device: what calls have to wait for to be timed.
            first: calls in the other way before any is timed: these may set something up.
        """
        self.ratio: float | None = None
        self._device = device or torch.device("cpu")
        self._first = first
        self._count = 0
        self._seconds: tuple[list[float], list[float]] = [], []

    @property
    def pays(self) -> bool:
        """Whether the other way is faster, as far as is known."""
        return self.ratio is None or self.ratio <= WORTH

    @property
    def share(self) -> str:
        """Its ratio in words."""
        return f"{self.ratio:.2f} of eager's time"

    def call(self, eager: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, bool]:
        """Answer a call.

        Args:
            eager: answers it eagerly.
            other: answers it in the other way.

        Returns:
            the result, and whether it came in the other way.
        """
        self._count += 1
        if self._count <= self._first or self.ratio is not None:
            return other(), True
        in_other_way = self._count % 2 == 0
        result, seconds = timed(other if in_other_way else eager, self._device)
        self._seconds[in_other_way].append(seconds)
        if self.ratio is None and all(len(each) >= _ROUNDS for each in self._seconds):
            its, mine = map(statistics.median, self._seconds)
            self.ratio = mine / its
        return result, in_other_way
