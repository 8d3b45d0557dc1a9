"""What answers a call gets each tensor in its place, whatever stands between the tensors.

Calls of a tuned module reach what was built by a shorter way than verification does.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from chosen import choosing
from torch import nn

import graphwright as gw

STRATEGIES = ("torchscript", "torchscript:freeze", "fused", "onnxruntime", "eager+graph")
SEEDS = 6


class Uses(nn.Module):
    """Uses some of its arguments, each in its own way; the others change nothing."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.layer = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        total = torch.zeros(3, 4)
        for number, (kind, value) in enumerate(
            zip(self.kinds, (*args, *(kwargs[name] for name in sorted(kwargs))), strict=True)
        ):
            if kind == "tensor":
                total = total + (number + 1) * self.layer(value)
            elif kind == "number":
                total = total * value
        return total


def arguments(kinds: list[str]) -> list[Any]:
    made = {"none": None, "number": 2, "flag": True, "text": "exact"}
    return [torch.randn(3, 4) if kind in ("tensor", "unused") else made[kind] for kind in kinds]


def drawn(seed: int) -> list[str]:
    chance = random.Random(seed)
    kinds = ["tensor", "unused", "none", "number", "flag", "text"]
    found = [chance.choice(kinds) for _ in range(chance.randint(2, 5))] + ["tensor", "tensor"]
    chance.shuffle(found)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_tensor_is_in_its_place(strategy: str, by_name: bool, seed: int) -> None:
    kinds = drawn(seed)
    model, given = Uses(kinds).eval(), arguments(kinds)
    split = seed % len(kinds) if by_name else len(kinds)

    def call(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {f"x{number}": value for number, value in enumerate(values[split:])}
        return tuple(values[:split]), named

    args, kwargs = call(given)
    options: dict[str, Any] = {"remember": False, "isolate": False, "budget_s": 600.0}
    with torch.no_grad(), choosing(strategy):
        tuned = gw.tune(model, args, kwargs, strategies=[strategy], progress=False, **options)
        if tuned.report.chosen != strategy:
            row = tuned.report.row(strategy)
            assert row is not None
            assert row.status == "unavailable", f"{row.status}: {row.reason}"
            pytest.skip(row.reason)
    with torch.no_grad():
        for _ in range(3):
            args, kwargs = call(arguments(kinds))
            for order in itertools.islice(itertools.permutations(kwargs), 3):
                named = {name: kwargs[name] for name in order}
                torch.testing.assert_close(tuned(*args, **named), model(*args, **named))
