"""A step inside of a checkpoint is run once more by its own backward, in a thread of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backward_thread import in_another_thread, within
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphwright as gw
from graphwright.training.step import graphed_step

Step = Callable[[torch.Tensor], torch.Tensor]


def made(device: torch.device) -> tuple[nn.Module, Any, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def plainly(step: Step) -> Step:
    return step


def twice(step: Step) -> Step:
    return lambda x: checkpoint(step, x, use_reentrant=False)


@pytest.mark.parametrize("around", [plainly, twice])
@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("closed", [False, True])
def test_a_step_in_a_checkpoint_does_what_eager_does(
    closed: bool, rows: int, around: Callable[[Step], Step], device: torch.device
) -> None:
    x = torch.randn(rows, 4).to(device)
    model, optimizer, step = made(device)
    its, _, its_step = made(device)
    graphed = gw.graph_step(step, (torch.randn(3, 4).to(device),), optimizer=optimizer)
    if closed:
        graphed.close()
    mine, other = around(twice(graphed)), around(twice(its_step))
    with in_another_thread():
        for _ in range(3):
            torch.testing.assert_close(within(60, lambda: mine(x)), other(x))
    for a, b in zip(model.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert sum(graphed.statistics.eager.values()) == 3  # Those of backwards are parts of these.


def test_it_hangs_without_the_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a GPU: the thread that hangs there is the only one for all its backwards."""
    monkeypatch.setattr(graphed_step, "in_backward", lambda: False)
    x = torch.randn(3, 4)
    _, optimizer, step = made(x.device)
    mine = twice(gw.graph_step(step, (x,), optimizer=optimizer))
    with in_another_thread(), pytest.raises(AssertionError, match="it hangs"):
        within(2, lambda: mine(x))
