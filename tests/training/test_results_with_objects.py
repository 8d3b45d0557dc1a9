"""make_graphed_callables of forwards whose results hold objects, such as a cache."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls.objects import apart

SIZE = 8


@dataclasses.dataclass
class Hidden:
    rows: list[torch.Tensor]
    name: str = "hidden"
    again: Any = None


class Options:
    factor = 2.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.options = Options()

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.first(x)) * self.options.factor
        hidden = Hidden([x, h, h[:1]])
        hidden.again = hidden.rows
        return self.second(h), hidden, self.options


def tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(apart(result)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("used", [False, True])
def test_objects_among_results_give_gradients(device: torch.device, used: bool) -> None:
    model = Model().to(device)
    its = copy.deepcopy(model)
    graphed = gw.make_graphed_callables(
        model, (torch.randn(4, SIZE, device=device),), allow_unused_input=True
    )
    held = []
    for _ in range(3):
        x = torch.randn(4, SIZE, device=device)
        for called in (graphed, its):
            y, hidden, options = called(x)
            assert type(hidden) is Hidden
            assert hidden.again is hidden.rows
            assert hidden.name == "hidden"
            assert options is (its if called is its else model).options
            loss = y.square().sum()
            if used:
                loss = loss + hidden.rows[1].sum() + 3 * hidden.rows[2].sum()
            loss.backward()
            held.append(((y, hidden), [t.detach().clone() for t in tensors((y, hidden))]))
    assert graphed.forward.statistics.replays == 3
    for (mine, _), (expected, values) in zip(held[::2], held[1::2], strict=True):
        torch.testing.assert_close(tensors(mine), values)
        torch.testing.assert_close(tensors(mine), tensors(expected))
    for (name, p), q in zip(model.named_parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_a_language_model_in_training_returns_its_cache(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).to(device).train()
    its = copy.deepcopy(model)
    ids = torch.randint(0, 50, (2, 6), device=device)
    graphed = gw.make_graphed_callables(model, (ids,), allow_unused_input=True)
    for _ in range(3):
        ids = torch.randint(0, 50, (2, 6), device=device)
        for called in (graphed, its):
            called(ids).logits.square().mean().backward()
    mine, expected = graphed(ids), its(ids)
    assert graphed.forward.statistics.replays == 4
    assert type(mine.past_key_values) is type(expected.past_key_values)
    for a, b in zip(tensors(mine), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
