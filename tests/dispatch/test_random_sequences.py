"""Random sequences of calls and changes: results are eager's, and captures keep to their budget.

Whatever makes the graphs, each call is a hit or is eager. Captures are three that are free, one for
each kind of call that comes back after others, and those that are paid for by the time.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.graphs.capture_budget import SHARE

FREE_CAPTURES = 3
CALLS = 60
QUICK, SLOW, ALL = range(2), range(2, 16), range(16, 200)
BUCKETS = (3, 6)


def seeds() -> list[Any]:
    return [
        *QUICK,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW),
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in ALL),
    ]


class Model(nn.Module):
    """Something of everything that programs change between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.norm = nn.LayerNorm(8)
        self.active, self.scale, self.extra = 0, 1.0, 0
        self.options = {"shift": 0}
        self.keeps_table = False
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, value: float = 1.0) -> torch.Tensor:
        y = self.norm(self.heads[self.active](x)) * (self.scale * value) + self.options["shift"]
        if self.keeps_table:
            if self.table is None or len(self.table) != len(x):
                self.table = torch.arange(len(x), device=x.device).float().unsqueeze(1)
            y = y + self.table
        return y


class Kinds:
    """Kinds of calls.

    Attributes:
        back: those that came back after other calls.
    """

    def __init__(self) -> None:
        self.back: set[Any] = set()
        self._seen: dict[Any, int] = {}
        self._calls = 0

    def note(self, kind: Any) -> None:
        """Note a call."""
        self._calls += 1
        if kind in self._seen and self._calls - self._seen[kind] > 1:
            self.back.add(kind)
        self._seen[kind] = self._calls


class Sequence:
    """One sequence of changes and calls, for a model and for another that is called eagerly.

    Attributes:
        models: both.
        kinds: of the calls so far.
    """

    def __init__(self, seed: int, device: torch.device, *, tables: bool = True) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        model = Model().to(device).eval()
        model.keeps_table = tables and seed % 4 == 3
        self.models = model, copy.deepcopy(model)
        self.device = device
        # How many heads, sizes and values there are; and how likely what never comes back is.
        self.heads = self.random.choice([1, 2, 3, 5])
        self.sizes = self.random.choice([1, 2, 6])
        self.new = self.random.choice([0.0, 0.1, 0.5])
        self.each = self.random.choice([1, 2, 10])
        self.kinds = Kinds()
        self._fresh = 0

    def calls(self) -> Iterator[tuple[torch.Tensor, float]]:
        """The arguments of each call, before which the models are changed."""
        for index in range(CALLS):
            if index % self.each == 0:
                self._change()
                size = 1 + self.random.randrange(self.sizes)
                value = float(self.random.randrange(2))
                if self.random.random() < self.new / 2:
                    self._fresh += 1
                    value = 10.0 + self._fresh
            self._note((size, value))
            yield torch.randn(size, 8, device=self.device), value

    def _change(self) -> None:
        active = self.random.randrange(self.heads)
        fresh = self.random.random() < self.new
        kind = self.random.randrange(5)
        self._fresh += fresh
        new = torch.randn(8, 8, device=self.device)
        for model in self.models:
            model.active = active
            if not fresh:
                model.extra = 0
            elif kind == 0:
                model.extra = self._fresh
            elif kind == 1:
                model.options["shift"] = self._fresh
            elif kind == 2:
                model.heads[active].weight.data = new.clone()
            elif kind == 3:
                model.heads[active].weight = nn.Parameter(new.clone())
            else:
                with torch.no_grad():
                    model.heads[active].weight.copy_(new)

    def _note(self, call: Any) -> None:
        """Note whether this kind of call comes back after others."""
        model = self.models[0]
        weights = tuple((id(p), p.data_ptr()) for p in model.parameters())
        table = None if model.table is None else id(model.table)
        options = model.active, model.extra, model.options["shift"]
        self.kinds.note((call, options, weights, table))


def most(sequence: Sequence, clock: Any) -> float:
    """How many captures the budget allows."""
    return FREE_CAPTURES + len(sequence.kinds.back) + SHARE * clock.now_s / clock.capture_s


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("buckets", [None, gw.Buckets(batch=list(BUCKETS))], ids=["", "buckets"])
@pytest.mark.parametrize("seed", seeds())
def test_graph(seed: int, buckets: Any, device: torch.device, clock: Any) -> None:
    sequence = Sequence(seed, device, tables=buckets is None)
    model, reference = sequence.models
    graphed = gw.graph(model, buckets=buckets)
    with torch.no_grad():
        for args in sequence.calls():
            clock.now_s += sequence.random.choice([1e-4, 1e-2])
            torch.testing.assert_close(graphed(*args), reference(*args))
    found = graphed.statistics
    assert found.hits + sum(found.eager.values()) + found.in_parts == CALLS
    # A family of sizes has a graph for each of its buckets, which the caller has named.
    each = 1 if buckets is None else len(BUCKETS)
    assert found.captures <= each * most(sequence, clock)
    assert found.graphs <= found.captures
    if not sequence.new and sequence.each == 1 and not model.keeps_table:
        assert found.hits > CALLS / 3


@pytest.mark.parametrize("seed", seeds())
def test_make_graphed_callables(seed: int, device: torch.device, clock: Any) -> None:
    sequence = Sequence(seed, device, tables=False)
    model, reference = (each.train() for each in sequence.models)
    gw.make_graphed_callables(model, (torch.randn(1, 8, device=device),), allow_unused_input=True)
    for args in sequence.calls():
        clock.now_s += sequence.random.choice([1e-4, 1e-2])
        results = [each(*args) for each in (model, reference)]
        torch.testing.assert_close(*results)
        for each, result in zip((model, reference), results, strict=True):
            each.zero_grad()
            result.square().sum().backward()
        grads = [[p.grad for p in each.parameters()] for each in (model, reference)]
        torch.testing.assert_close(*grads)
    found = model.forward.statistics
    assert found.replays + found.eager.total() == CALLS
    assert found.captures <= 1 + most(sequence, clock)


@pytest.mark.parametrize("seed", seeds())
def test_graph_step(seed: int, device: torch.device, clock: Any) -> None:
    sequence = Sequence(seed, device, tables=False)
    steps = []
    for model in sequence.models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

        def step(x: torch.Tensor, value: float, model: Any = model, o: Any = optimizer) -> Any:
            o.zero_grad()
            loss = model(x, value).tanh().square().mean()
            loss.backward()
            o.step()
            return loss

        steps.append((step, optimizer))
    (step, optimizer), (eager, other) = steps
    graphed = gw.graph_step(step, (torch.randn(1, 8, device=device), 1.0))
    kinds = Kinds()
    for index, args in enumerate(sequence.calls()):
        clock.now_s += sequence.random.choice([1e-4, 1e-2])
        if sequence.random.random() < sequence.new:
            for each in (optimizer, other):
                each.param_groups[0]["lr"] = 0.05 / (1 + index % 7)
        kinds.note((len(args[0]), args[1], optimizer.param_groups[0]["lr"]))
        torch.testing.assert_close(graphed(*args), eager(*args))
        torch.testing.assert_close(*(list(m.parameters()) for m in sequence.models))
    found = graphed.statistics
    assert found.replays + found.eager.total() == CALLS
    # One more reads the learning rate from a tensor.
    assert found.captures <= 2 + len(kinds.back) + most(sequence, clock)
