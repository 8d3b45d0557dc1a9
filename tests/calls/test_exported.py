"""Modules that torch.export made: they say that they are in training mode, and have no other.

Whether they are trained is the caller's to say, by the gradient mode.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from chosen import choosing
from torch import nn

import graphwright as gw


@pytest.fixture
def exported(device: torch.device) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).to(device).eval()
    made = torch.export.export(model, (torch.randn(4, 8, device=device),)).module()
    assert made.training
    with pytest.raises(NotImplementedError):
        made.eval()
    return made


def test_graphs_answer_it_without_gradients(exported: nn.Module, device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    graphed = gw.graph(exported)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graphed(x), exported(x))
    assert graphed.statistics.hits == 3
    head = nn.Linear(8, 1).to(device)
    head(graphed(x)).sum().backward()
    assert all(p.grad is not None for p in exported.parameters())


@pytest.mark.parametrize("name", ["fused", "inductor", "eager+graph"])
def test_it_is_tuned(exported: nn.Module, name: str, device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    with warnings.catch_warnings(), choosing(name), torch.no_grad():
        warnings.simplefilter("ignore")
        tuned = gw.tune(
            exported, (x,), strategies=[name], isolate=False, remember=False, progress=False
        )
        torch.testing.assert_close(tuned(x), exported(x), rtol=1e-4, atol=1e-5)
    assert tuned.calls == {"tuned": 1}


def test_it_may_be_fused(exported: nn.Module, device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    with torch.no_grad():
        torch.testing.assert_close(gw.fuse(exported, (x,))(x), exported(x))


class WithData(nn.Module):
    """Has attributes of the names of methods."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.eval = False  # type: ignore[method-assign, assignment]  # as some models do
        self.training = self.linear.training = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


def test_an_attribute_named_eval_is_no_matter(device: torch.device) -> None:
    model, x = WithData().to(device), torch.randn(4, 8, device=device)
    torch.testing.assert_close(gw.graph(model)(x), model(x).detach())
