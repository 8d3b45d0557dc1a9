"""Predictions beside what tuning then measured: for each remedy the strategy that is it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..report.result import EAGER, Results
from .remedies import FUSION, GRAPH, Remedy
from .trials import BF16, CHANNELS_LAST, TF32

_GRAPHED = "eager+graph"
# The strategies of tune() that are a remedy and nothing else: alone, and under a graph.
_STRATEGIES = {
    GRAPH: (_GRAPHED, None),
    FUSION: ("fused", "fused+graph"),
    CHANNELS_LAST: ("channels_last", "channels_last+graph"),
    BF16: ("bf16", "bf16+graph"),
    TF32: ("tf32", "tf32+graph"),
}


@dataclass(frozen=True)
class Comparison:
    """What was predicted of a remedy, and what tuning measured.

    Attributes:
        remedy: its name.
        strategy: of tune(), that is this remedy and nothing else.
        beside: the strategy that the gain is over.
        low: the lower end of the predicted gain.
        high: the upper end.
        measured: the gain as tuning measured it.
    """

    remedy: str
    strategy: str
    beside: str
    low: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        """Whether what was measured lies inside of what was predicted."""
        return self.low <= self.measured <= self.high

    def __str__(self) -> str:
        said = "inside" if self.inside else "outside"
        return (
            f"{self.strategy} over {self.beside}: {self.low:.2f}–{self.high:.2f}× predicted, "
            f"{self.measured:.2f}× measured, {said}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"inside": self.inside}


def compared(remedies: Sequence[Remedy], report: Results) -> list[Comparison]:
    """Each remedy's prediction beside the gain of its strategy, where tuning has timed that.

    Args:
        remedies: of a profile of the same model and inputs.
        report: of `tune`.
    """
    found: list[Comparison] = []
    for remedy in remedies:
        alone, graphed = _STRATEGIES.get(remedy.name, (None, None))
        if alone is not None:
            gain = _over_eager(report, alone)
            if gain is not None:
                found.append(Comparison(remedy.name, alone, EAGER, remedy.low, remedy.high, gain))
        if graphed is not None and remedy.under_graph is not None:
            gain, base = _over_eager(report, graphed), _over_eager(report, _GRAPHED)
            if gain is not None and base is not None:
                low, high = remedy.under_graph
                over = gain / base
                found.append(Comparison(remedy.name, graphed, _GRAPHED, low, high, over))
    return found


def _over_eager(report: Results, strategy: str) -> float | None:
    """How many times as fast as eager a strategy is; None where that was not measured."""
    row = report.row(strategy)
    ratios = [] if row is None else report.ratios(row)
    return 1 / statistics.median(ratios) if ratios else None
