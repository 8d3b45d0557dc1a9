"""Predictions beside what tuning then measured: for each remedy the strategy that is it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..report.result import EAGER, Prediction, Results
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


def compared(remedies: Sequence[Remedy], report: Results) -> list[Prediction]:
    """Each remedy's prediction beside the gain of its strategy, where tuning has timed that.

    Args:
        remedies: of a profile of the same model and inputs.
        report: of `tune`.
    """
    found: list[Prediction] = []
    for remedy in remedies:
        alone, graphed = _STRATEGIES.get(remedy.name, (None, None))
        if alone is not None:
            gain = _over_eager(report, alone)
            if gain is not None:
                found.append(Prediction(remedy.name, alone, EAGER, remedy.low, remedy.high, gain))
        if graphed is not None and remedy.under_graph is not None:
            gain, base = _over_eager(report, graphed), _over_eager(report, _GRAPHED)
            if gain is not None and base is not None:
                low, high = remedy.under_graph
                over = gain / base
                found.append(Prediction(remedy.name, graphed, _GRAPHED, low, high, over))
    return found


def _over_eager(report: Results, strategy: str) -> float | None:
    """How many times as fast as eager a strategy is; None where that was not measured."""
    row = report.row(strategy)
    ratios = [] if row is None else report.ratios(row)
    return 1 / statistics.median(ratios) if ratios else None
