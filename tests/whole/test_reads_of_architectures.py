"""No architecture is refused for what its operations read."""

from __future__ import annotations

import re

import pytest
import torch
from tiny_architectures import CASES, Case

import graphwright as gw
from graphwright.graphs import reads


def verdict_of(case: Case) -> str:
    """What becomes of an architecture's call."""
    torch.manual_seed(0)
    model = case.build()
    with torch.no_grad():
        model(**case.inputs(0))  # Some set themselves up in their first call.
        call = gw.graph(model)
        call(**case.inputs(0))
        if call.statistics.captures:
            return "captured"
        problem = next(line for line in call.explain().splitlines() if "without a graph" in line)
        return re.sub(r"0x[0-9a-f]+", "", problem)


# Every third architecture, or all of them.
@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.filterwarnings("ignore")
def test_no_architecture_is_refused_for_what_it_reads(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = list(map(verdict_of, CASES[::step]))
    monkeypatch.setattr(reads, "_unseen", lambda read, watch, used: [])
    before = list(map(verdict_of, CASES[::step]))
    assert now == before
    assert now.count("captured") >= 70 // step
