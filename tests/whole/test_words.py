"""Numbers agree with their nouns, wherever they are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.checker.checker import check
from graphwright.checker.summary import summary


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 graphs"), (1, "1 graph"), (2, "2 graphs"), (1234, "1,234 graphs")]
)
def test_a_number_with_its_noun(count: int, said: str) -> None:
    assert counted(count, "graph") == said


def test_a_plural_of_its_own() -> None:
    assert [counted(n, "launch", "launches") for n in (1, 2)] == ["1 launch", "2 launches"]


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        if x.sum() > 100:
            return x
        if times > 1 and x.sum() > 200:
            return -x
        return x + 1


@pytest.mark.parametrize(("times", "said"), [(1, "1 break. "), (2, "2 breaks. ")])
def test_findings_are_counted(times: int, said: str) -> None:
    found = check(Deciding().eval(), (torch.ones(2), times))
    assert summary("net", found).startswith(f"net: {said}")


def test_graphs_are_counted() -> None:
    graphed = gw.graph(torch.sin)
    for size, said in ((2, ": 1 graph in "), (3, ": 2 graphs in ")):
        graphed.prepare([(torch.ones(size),)])
        assert said in repr(graphed.pool)
    graphed.close()


def test_steps_are_counted() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with gw.graph_step(step, (torch.ones(2),)) as graphed:
        assert repr(graphed).endswith(": 1 graph>")
        graphed(torch.ones(2))
        assert "1 step replayed, 1 capture\n" in graphed.explain()
