"""Models and requests that the files in this folder were made of: all numbers follow from formulas.

Files and pickles name these classes by module, so that they must stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.export import Dim

import graphwright as gw

SIZE = 4


def values(*shape: int, shift: int = 0) -> torch.Tensor:
    """A tensor whose values are the same with every version of PyTorch, since nothing is drawn."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + shift) % 11 - 5).to(torch.float32).div(8).reshape(shape)


def filled(model: nn.Module) -> nn.Module:
    """A model in eval mode with weights by that formula."""
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(values(*weight.shape, shift=number))
    return model.eval()


def blank(model: nn.Module) -> nn.Module:
    """A model in eval mode whose weights are all 0, to be given those of a file."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return model.eval()


class Rows(nn.Module):
    """Two linear layers on a batch; returns a dictionary with a plain value in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        return {"y": self.down(torch.relu(self.up(x))) * scale, "n": 3}


@dataclasses.dataclass
class Cache:
    """What a call of `Cached` grows, writes to in place, and counts in."""

    rows: torch.Tensor
    table: torch.Tensor
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    steps: int = 0


class Answer(OrderedDict[str, Any]):
    """Results by key and by attribute, as those of transformers' models."""

    def __init__(self, **results: Any) -> None:
        super().__init__(**results)
        for name, value in results.items():
            object.__setattr__(self, name, value)


class Cached(nn.Module):
    """Goes on with a cache, which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, cache: Cache) -> Answer:
        y = torch.relu(self.first(x))
        cache.rows = torch.cat([cache.rows, y])
        cache.table.add_(1)
        cache.seen.append(y * 2)
        cache.steps += 1
        return Answer(y=self.second(cache.rows).sum(0) + cache.table, cache=cache)


def cache_of(rows: int) -> Cache:
    return Cache(values(rows, SIZE, shift=rows), values(SIZE))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_a_row(x: torch.Tensor) -> list[torch.Tensor]:
    return [doubled(x)]


def like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclasses.dataclass
class Request:
    """What `tune` was asked, and the strategy that had to be chosen."""

    strategy: str
    model: nn.Module
    options: dict[str, Any]

    @property
    def samples(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The calls that were tuned for: positional and keyword arguments."""
        if "samples" in self.options:
            return [(args, {}) for args in self.options["samples"]]
        return [(self.options["args"], self.options.get("kwargs", {}))]


def request(kind: str) -> Request:
    """The request that a kind of file was made of, on a model with its weights."""
    if kind == "objects":
        x = values(1, SIZE)
        samples = [(x, cache_of(2)), (x, cache_of(3))]
        return Request(KINDS[kind], filled(Cached()), {"samples": samples})
    if kind in ("buckets", "range"):
        options = {
            "args": (values(4, SIZE),),
            "buckets": gw.Buckets(batch=[2, 4]),
            "dynamic_shapes": ({0: Dim("batch", min=1, max=4)},),
        }
    else:
        options = {"args": (values(2, SIZE),), "kwargs": {"scale": 3.0}}
    return Request(KINDS[kind], filled(Rows()), options)


# The strategy of each kind of file.
KINDS = {
    "eager": "eager:no_grad",
    "fused": "fused",
    "torchscript": "torchscript:freeze",
    "inductor": "inductor",
    "aot_inductor": "aot_inductor",
    "buckets": "fused",
    "range": "onnxruntime",
    "objects": "torchscript",
}
