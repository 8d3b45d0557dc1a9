"""Independent operations on streams of their own: where each goes, and what it waits for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.graphs.cuda.side_streams import StreamPlacement, StreamPlan


class Plan:
    """Places operations that each read some results, by name, and make one."""

    def __init__(self, count: int = 4) -> None:
        self.plan = StreamPlan(count)

    def add(self, name: str, *reads: str, writes: tuple[str, ...] = (), begins: bool = False):  # type: ignore[no-untyped-def]
        placed = self.plan.place(reads, writes, begins=begins)
        self.plan.made(placed.number, [name])
        return placed


def test_a_chain_stays_on_the_main_stream() -> None:
    plan = Plan()
    assert plan.add("a", "x", begins=True) == StreamPlacement(0, 0, ())
    assert plan.add("b", "a", "weight") == StreamPlacement(1, 0, ())
    assert plan.add("c", "b", "a") == StreamPlacement(2, 0, ())


def test_branches_go_to_streams_of_their_own_and_meet() -> None:
    plan = Plan()
    plan.add("trunk", "x", begins=True)
    plan.add("a1", "trunk")
    assert plan.add("a2", "a1").stream == 0
    assert plan.add("b1", "trunk") == StreamPlacement(3, 1, (0,))
    assert plan.add("b2", "b1") == StreamPlacement(4, 1, ())
    assert plan.add("c1", "trunk") == StreamPlacement(5, 2, (0,))
    assert plan.add("cat", "a2", "b2", "c1") == StreamPlacement(6, 0, (4, 5))


def test_branches_of_the_arguments_begin_side_by_side() -> None:
    plan = Plan(2)
    assert plan.add("a", "x", begins=True).stream == 0
    assert plan.add("b", "x", begins=True).stream == 1
    # No stream is left: the one that has rested longest.
    assert plan.add("c", "x", begins=True) == StreamPlacement(2, 0, ())


def test_what_needs_nothing_goes_where_the_last_one_went() -> None:
    plan = Plan()
    plan.add("a", "x", begins=True)
    plan.add("b", "x", begins=True)
    assert plan.add("zeros").stream == 1
    assert plan.add("cast", "weight").stream == 1


def test_a_write_waits_for_all_that_read() -> None:
    plan = Plan()
    plan.add("a", "x", begins=True)
    plan.add("r1", "a")
    plan.add("r2", "a")  # on stream 1
    assert plan.add("w", "a", writes=("a",)) == StreamPlacement(3, 0, (2,))
    assert plan.add("after", "a") == StreamPlacement(4, 0, ())


def test_a_read_waits_for_the_last_write_to_memory_from_outside() -> None:
    plan = Plan()
    plan.add("a", "x", "statistics", writes=("statistics",), begins=True)
    assert plan.add("b", "x", "statistics", begins=True) == StreamPlacement(1, 0, ())


def test_a_stream_waits_for_an_operation_once() -> None:
    plan = Plan()
    plan.add("a", "x", begins=True)
    plan.add("a2", "a")
    assert plan.add("b", "a") == StreamPlacement(2, 1, (0,))
    assert plan.add("b2", "b", "a") == StreamPlacement(3, 1, ())
    assert plan.add("b3", "b2", "a2") == StreamPlacement(4, 0, (3,))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 16, 3, padding=1)
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, size, padding=size // 2), nn.BatchNorm2d(16), nn.ReLU(True)
            )
            for size in (1, 3, 5, 7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        y = torch.cat([tower(x) for tower in self.towers], 1)
        return y.add_(1).mean((2, 3))


def test_a_capture_on_several_streams_is_eager_s(device: torch.device) -> None:
    """On the CPU there are no streams: the option changes nothing."""
    model, x = Towers().eval().to(device), torch.randn(2, 3, 16, 16, device=device)
    with torch.no_grad(), gw.capture(model, x, streams=4) as graph:
        for _ in range(20):
            y = torch.randn_like(x)
            assert torch.allclose(graph(y), model(y), atol=2e-3)
        # cuDNN's kernels bring nodes of their own.
        assert graph.branches >= 4
        modules = {n.module for n in graph.nodes() if n.branch and n.operation}
        assert any((module or "").startswith("towers.") for module in modules)


@pytest.mark.gpu
def test_graphs_on_several_streams_share_a_pool() -> None:
    pool = gw.MemoryPool()
    model = Towers().eval().cuda()
    inputs = [torch.randn(n, 3, 16, 16, device="cuda") for n in (4, 2, 1)]
    with torch.no_grad():
        graphs = [gw.capture(model, x, streams=4, pool=pool) for x in inputs]
        for _ in range(10):
            for graph, x in zip(graphs, inputs, strict=True):
                assert torch.allclose(graph(x), model(x), atol=2e-3)
    pool.close()


def test_streams_must_be_a_count() -> None:
    with pytest.raises(gw.OptionError, match="streams"):
        gw.capture(torch.sin, torch.ones(3), streams=0)
