"""Regions of a graph: where it is cut, and which regions are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphwright.fusion.regions import GraphRegion, kinds_of, regions_of
from graphwright.fusion.tracing import trace


class Block(nn.Module):
    def __init__(self, width: int, factor: float = 2.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.factor = nn.Linear(2 * width, width), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * self.factor


def found_in(
    model: nn.Module, x: torch.Tensor
) -> tuple[fx.GraphModule, list[GraphRegion], dict[fx.Node, Any]]:
    with torch.no_grad():
        graph = trace(model.eval(), (x,), {}).graph
        kinds = kinds_of(graph, [x])
    return graph, regions_of(graph, kinds), kinds


def same_result(graph: fx.GraphModule, regions: list[GraphRegion], x: torch.Tensor) -> bool:
    """Whether the regions, one after the other, are the graph."""
    values: dict[Any, torch.Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = x.clone()
        elif node.op == "get_attr":
            values[node] = getattr(graph, str(node.target))
        elif node.op == "output":
            results = node.args[0]
    with torch.no_grad():
        for region in regions:
            before = [values[node].clone() for node in region.inputs]
            found = region.graph()(*(values[node] for node in region.inputs))
            for node, kept in zip(region.inputs, before, strict=True):
                assert torch.equal(values[node], kept), "a region writes to its input"
            values.update(zip(region.outputs, found, strict=True))
        expected = graph(x.clone())
    return all(torch.equal(values[a], b) for a, b in zip(results, expected, strict=True))


def test_layers_are_one_region_each(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(8, 16), *(Block(16) for _ in range(5)), nn.Linear(16, 4))
    x = torch.rand(3, 8, device=device)
    graph, regions, _ = found_in(model.to(device), x)
    keys = [region.key for region in regions]
    assert len(keys) == 7
    assert len({*keys[1:6]}) == 1
    assert len({*keys}) == 3
    assert same_result(graph, regions, x)


@pytest.mark.parametrize("change", ["width", "number", "dtype", "strides"])
def test_what_differs_is_another_region(change: str, device: torch.device) -> None:
    first, second = Block(16), Block(16, 3.0 if change == "number" else 2.0)
    between: nn.Module = nn.Identity()
    if change == "width":
        second, between = Block(8), nn.Linear(16, 8)
    if change == "dtype":
        second = Block(16).double()
    if change == "strides":
        second.up.weight = nn.Parameter(torch.rand(16, 32).t())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between, self.second = first, between, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.between(self.first(x))
            return self.second(x.double() if change == "dtype" else x)

    x = torch.rand(3, 16, device=device)
    graph, regions, _ = found_in(Model().to(device), x)
    assert len({region.key for region in regions}) == len(regions)
    assert same_result(graph, regions, x)


def writes(x: torch.Tensor) -> torch.Tensor:
    whole = x + 1
    view = whole[0]
    y = torch.sin(x) * torch.cos(x)
    view.add_(1)  # Of a tensor that was made long ago.
    return whole * y


def takes_apart(x: torch.Tensor) -> torch.Tensor:
    parts = torch.chunk(x, 3, dim=-1)
    y = torch.sin(parts[0]) * torch.cos(parts[0])
    return y + parts[1] * parts[2]


def keeps(x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for _ in range(4):
        x = x + torch.tanh(torch.sin(x) * torch.cos(x))
        found.append(x)
    return found


@pytest.mark.parametrize("fn", [writes, takes_apart, keeps])
def test_regions_are_the_graph(fn: Callable[..., Any], device: torch.device) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(3):
                made = fn(x)
                x = x + (made[-1] if isinstance(made, list) else made).sum()
            return made

    x = torch.rand(2, 6, device=device)
    graph, regions, kinds = found_in(Model(), x)
    assert same_result(graph, regions, x)
    for region in regions:
        # What is no tensor stays inside.
        assert all(node in kinds for node in (*region.inputs, *region.outputs))
