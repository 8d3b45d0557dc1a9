"""A step inside of a checkpoint is run once more by its own backward, in a thread of the device."""

from __future__ import annotations

import contextlib
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


class Around(nn.Module):
    """Calls a block, maybe in a checkpoint."""

    def __init__(self, block: Any, *, checkpointed: bool) -> None:
        super().__init__()
        self.block, self.checkpointed = block, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=False)


def of_callables(block: nn.Module, x: torch.Tensor, pool: gw.MemoryPool) -> Any:
    return gw.make_graphed_callables(block, (x,), pool=pool)


def of_graph(block: nn.Module, x: torch.Tensor, pool: gw.MemoryPool) -> Any:
    graphed = gw.graph(block, pool=pool)
    with torch.no_grad():
        graphed(x), graphed(x)
    return graphed


def of_buckets(block: nn.Module, x: torch.Tensor, pool: gw.MemoryPool) -> Any:
    return gw.graph(block, pool=pool, buckets=gw.Buckets(batch=[2, 4]))


MAKERS = [of_callables, of_graph, of_buckets]


def graphed_within(
    device: torch.device, make: Any, *, checkpointed: bool
) -> tuple[Step, torch.Tensor, Any, Step]:
    """A step that is eager, of a model whose block has graphs of the step's own pool; its twin."""
    model, _, _ = made(device)
    its, _, its_step = made(device)
    x, pool = torch.randn(3, 4).to(device), gw.MemoryPool(device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    around = Around(make(model, x, pool), checkpointed=checkpointed)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = around(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = gw.graph_step(step, (x,), optimizer=optimizer, pool=pool)
    graphed.close()
    return graphed, x, zip(model.parameters(), its.parameters(), strict=True), its_step


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_graphs_of_the_same_pool_answer_in_an_eager_step(
    make: Any, checkpointed: bool, device: torch.device
) -> None:
    mine, x, weights, its_step = graphed_within(device, make, checkpointed=checkpointed)
    with in_another_thread():
        for _ in range(3):
            torch.testing.assert_close(within(60, lambda: mine(x)), its_step(x))
    for a, b in weights:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("made_by", ["checkpoint", "pool"])
def test_they_hang_without_the_protection(made_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a GPU: the thread that hangs there is the only one for all its backwards."""
    cpu = torch.device("cpu")
    if made_by == "pool":
        mine, x, _, _ = graphed_within(cpu, of_callables, checkpointed=False)
    else:
        x = torch.randn(3, 4)
        _, optimizer, step = made(cpu)
        mine = twice(gw.graph_step(step, (x,), optimizer=optimizer))
    monkeypatch.setattr(graphed_step, "in_backward", lambda: False)
    monkeypatch.setattr(
        torch.autograd, "set_multithreading_enabled", lambda _: contextlib.nullcontext()
    )
    with in_another_thread(), pytest.raises(AssertionError, match="it hangs"):
        within(2, lambda: mine(x))
