"""Numbers in attributes and dictionaries that each call adds to: replays add to them too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw


class Model(nn.Module):
    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.does = does
        self.n, self.k = 0, 5
        self.seen = {"a": 1}
        self.register_buffer("rows", torch.zeros(64, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.does(self, x)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gw.FallbackWarning)
        yield


def counts(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x * 2


def counts_thrice(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    self.n = 2 + self.n
    self.seen["a"] = self.seen["a"] - 1
    return x * 2


def asks_for_its_type(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x * 2 if isinstance(self.n, int) else x * 3


def counts_before_a_read(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x if x.sum() > 0 else x * 3


def multiplies(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x * self.n


def every_seventh(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x * 2 if self.n % 7 else x * 3


def writes_a_row(self: Model, x: torch.Tensor) -> Any:
    self.rows[self.n] = x[0]
    self.n += 1
    return x + 1


def catches(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    try:
        many = self.n > 10
    except Exception:
        many = False
    return x * 3 if many else x + 0


def repeats(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    for _ in range(self.n % 3):
        x = x + 1
    return x * 1


def returns(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x * 2, self.n


def copies(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    self.k = self.n
    return x * 2


def starts_over(self: Model, x: torch.Tensor) -> Any:
    self.n = self.n + 1 if self.n < 5 else 0
    return x * 2


def prints(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    self.seen[f"{self.n}"] = 1
    return x * 2


def adds_a_fraction(self: Model, x: torch.Tensor) -> Any:
    self.n += 0.5  # type: ignore[assignment]  # that is the point
    return x * 2


def adds_more_on_one_path(self: Model, x: torch.Tensor) -> Any:
    if x.sum() > 0:
        self.n += 1
        return x + 0
    self.n += 2
    return x * 3


def reads_on_one_path(self: Model, x: torch.Tensor) -> Any:
    self.n += 1
    return x + 0 if x.sum() > 0 else x * self.n


REPEATED = [counts, counts_thrice, asks_for_its_type, counts_before_a_read]
REFUSED = [
    multiplies,
    every_seventh,
    writes_a_row,
    catches,
    repeats,
    returns,
    copies,
    starts_over,
    prints,
    adds_a_fraction,
    adds_more_on_one_path,
    reads_on_one_path,
]


@pytest.mark.parametrize("first", [1.0, -1.0])
@pytest.mark.parametrize("does", [*REPEATED, *REFUSED])
def test_numbers_and_results_are_eager_s(does: Any, first: float, device: torch.device) -> None:
    model = Model(does).eval().to(device)
    eager = copy.deepcopy(model)
    graphed = gw.graph(model)
    for n in range(30):
        x = torch.full((2, 4), (n + 1.0) * (first if n % 3 else -first), device=device)
        mine, its = graphed(x), eager(x)
        mine, its = (each if isinstance(each, tuple) else (each, 0) for each in (mine, its))
        torch.testing.assert_close(mine[0], its[0], rtol=0, atol=0)
        assert mine[1] == its[1]
        assert (model.n, model.k, model.seen) == (eager.n, eager.k, eager.seen)
        assert type(model.n) is type(eager.n)
        torch.testing.assert_close(model.rows, eager.rows)
    if does in REPEATED:
        assert graphed.statistics.hits == 30
        assert "sets attribute n of Model" in graphed.explain()


def test_the_caller_may_set_the_number(device: torch.device) -> None:
    model = Model(counts).eval().to(device)
    graphed, x = gw.graph(model), torch.ones(2, 4, device=device)
    for n in (0, 100, -3, 2**70):
        model.n = n
        graphed(x)
        graphed(x)
        assert model.n == n + 2
    model.n = torch.tensor(1.0, device=device)  # type: ignore[assignment]  # that is the point
    graphed(x)
    assert torch.equal(torch.as_tensor(model.n), torch.tensor(2.0, device=device))
    assert graphed.statistics.captures == 1


def test_a_call_of_another_kind_may_not_read_it(device: torch.device) -> None:
    def either(self: Model, x: torch.Tensor) -> Any:
        if x.shape[0] > 2:
            return x * self.n
        self.n += 1
        return x * 2

    model = Model(either).eval().to(device)
    graphed = gw.graph(model)
    for _ in range(4):
        small, large = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
        graphed(small)
        torch.testing.assert_close(graphed(large), large * model.n)


def test_a_captured_call_counts(device: torch.device) -> None:
    model = Model(counts).eval().to(device)
    graph = gw.capture(model, torch.ones(2, 4, device=device))
    assert model.n == 0
    for n in range(3):
        torch.testing.assert_close(
            graph(torch.full((2, 4), float(n), device=device)),
            torch.full((2, 4), 2.0 * n, device=device),
        )
    assert model.n == 3
