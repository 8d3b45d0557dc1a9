"""graph(buckets=…) of calls with objects: a cache's length is a dimension like any other."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.graphs.taken_apart import TakenApart

SIZE = 8


@dataclasses.dataclass
class Cache:
    """Rows that a mask tells from padding."""

    rows: torch.Tensor
    mask: torch.Tensor
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    steps: int = 0
    name: str = "cache"


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    cache: Cache


class Attends(nn.Module):
    """Looks at the rows that the mask names; changes them row by row, and one in place."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, cache: Cache) -> Result:
        rows = torch.relu(self.linear(cache.rows))
        scores = (rows @ x).masked_fill(cache.mask == 0, -1e9)
        y = torch.softmax(scores, 0) @ rows
        cache.seen.append(rows * 2)
        cache.steps += 1
        if self.way == "in place":
            cache.rows.mul_(2)
        else:
            cache.rows = rows
        if self.way == "grows":
            cache.rows = torch.cat([rows, y[None]])
        if self.way == "counts":
            cache.steps = rows.shape[0]
        if self.way == "sums":
            y = y + rows.sum(0)
        return Result(y, cache)


SHAPES = {"cache": {"rows": {0: "length"}, "mask": {0: "length"}}}
OPTIONS: dict[str, Any] = {
    "buckets": gw.Buckets(length=[4, 8]),
    "dynamic_shapes": SHAPES,
    "pad": {"cache": {"mask": 0}},
}


def call_of(length: int, device: torch.device, **options: Any) -> tuple[torch.Tensor, Cache]:
    generator = torch.Generator().manual_seed(length)
    x, rows = (torch.randn(n, SIZE, generator=generator) for n in (1, length))
    mask = torch.ones(length)
    mask[-1:] = 0 if length > 1 else 1
    return x[0].to(device), Cache(rows.to(device), mask.to(device), **options)


def models(device: torch.device, way: str = "") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Attends(way).eval().to(device)
    return model, copy.deepcopy(model)


def same_as_eager(graphed: Any, its: nn.Module, call: tuple[torch.Tensor, Cache]) -> None:
    x, cache = call
    other = copy.deepcopy(cache)
    with torch.no_grad():
        result, expected = graphed(x, cache), its(x, other)
    assert type(result) is Result
    assert result.cache is cache
    assert (cache.steps, cache.name) == (other.steps, other.name)
    assert type(cache.steps) is int
    assert len(cache.seen) == len(other.seen)
    found = result.y, cache.rows, cache.mask, *cache.seen
    wanted = expected.y, other.rows, other.mask, *other.seen
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert not mine.requires_grad


@pytest.mark.parametrize("way", ["", "in place"])
def test_caches_of_other_lengths_are_padded(device: torch.device, way: str) -> None:
    model, its = models(device, way)
    graphed = gw.graph(model, **OPTIONS)
    for length in (3, 4, 5, 8, 2, 7, 1, 3):
        same_as_eager(graphed, its, call_of(length, device))
    now = graphed.statistics
    assert now.hits == 8, graphed.explain()
    assert (now.padded, now.captures, dict(now.eager)) == (6, 2, {})
    assert now.sizes is not None
    assert now.sizes.names == ("length",)
    assert "Attends: 2 graphs" in graphed.explain()


def test_what_a_call_gets_is_its_own(device: torch.device) -> None:
    model, _ = models(device)
    graphed = gw.graph(model, **OPTIONS)
    x, cache = call_of(3, device)
    with torch.no_grad():
        first = graphed(x, cache)
        held = [first.y.clone(), cache.rows.clone(), cache.seen[0].clone()]
        graphed(*call_of(2, device))
        graphed(x * 3, call_of(3, device)[1])
    for mine, theirs in zip((first.y, cache.rows, cache.seen[0]), held, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("way", "why"),
    [("sums", "y|output"), ("grows", "output"), ("counts", "sizes")],
)
def test_caches_whose_padding_matters_are_not_padded(
    device: torch.device, way: str, why: str
) -> None:
    model, its = models(device, way)
    graphed = gw.graph(model, **OPTIONS)
    with pytest.warns(RuntimeWarning, match=why):
        same_as_eager(graphed, its, call_of(3, device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Another bucket, for another reason.
        for length in (5, 7, 3):
            same_as_eager(graphed, its, call_of(length, device))
    assert graphed.statistics.padded == 0
    assert sum(graphed.statistics.eager.values()) == 4
    same_as_eager(graphed, its, call_of(8, device))


def test_without_a_declared_value_the_mask_does_not_help(device: torch.device) -> None:
    model, its = models(device)
    graphed = gw.graph(model, **(OPTIONS | {"pad": None}))
    with pytest.warns(RuntimeWarning, match="padded from"):
        same_as_eager(graphed, its, call_of(3, device))
    assert graphed.statistics.padded == 0


def test_prepared_buckets_answer_all_lengths(device: torch.device) -> None:
    model, its = models(device)
    graphed = gw.graph(model, on_miss="error", **OPTIONS)
    graphed.prepare([call_of(8, device)])
    assert graphed.statistics.captures == 2
    for length in (1, 3, 4, 6, 8):
        same_as_eager(graphed, its, call_of(length, device))
    assert graphed.statistics.hits == 5
    with pytest.raises(gw.SignatureError, match="above the largest bucket"):
        graphed(*call_of(9, device))
    with pytest.raises(gw.SignatureError, match="prepare"):
        graphed(*call_of(3, device, name="other"))
    graphed.release()
    assert graphed.statistics.graphs == 0


def test_prepare_refuses_caches_whose_padding_matters(device: torch.device) -> None:
    model, _ = models(device, "sums")
    with pytest.raises(gw.PaddingError, match="Attends may not be padded"):
        gw.graph(model, **OPTIONS).prepare([call_of(8, device)])


def test_other_plain_values_are_another_kind(device: torch.device) -> None:
    model, its = models(device)
    graphed = gw.graph(model, **OPTIONS)
    for _ in range(2):
        same_as_eager(graphed, its, call_of(3, device))
        same_as_eager(graphed, its, call_of(3, device, steps=2))
    assert graphed.statistics.hits == 4
    for steps in range(10, 16):
        same_as_eager(graphed, its, call_of(3, device, steps=steps))
    assert graphed.statistics.hits == 4 + 6
    with pytest.warns(RuntimeWarning, match="differ in more than their tensors"):
        same_as_eager(graphed, its, call_of(3, device, steps=16))
    assert graphed.statistics.hits == 4 + 6


def test_a_module_that_changes_is_seen(device: torch.device) -> None:
    model, its = models(device)
    graphed = gw.graph(model, **OPTIONS)
    same_as_eager(graphed, its, call_of(3, device))
    for each in (model, its):
        each.linear = nn.Linear(SIZE, SIZE, device=device, bias=False)
        with torch.no_grad():
            each.linear.weight.fill_(0.5)
    same_as_eager(graphed, its, call_of(3, device))


def test_gradients_flow_eagerly(device: torch.device) -> None:
    model, its = models(device)
    graphed = gw.graph(model, **OPTIONS)
    (x, cache), (other_x, other) = call_of(3, device), call_of(3, device)
    for each in (x, other_x):
        each.requires_grad_()
    with pytest.warns(RuntimeWarning, match="gradients"):
        graphed(x, cache).y.sum().backward()
    its(other_x, other).y.sum().backward()
    torch.testing.assert_close(x.grad, other_x.grad)


def test_a_name_that_no_object_has(device: torch.device) -> None:
    model, its = models(device)
    shapes = {"cache": {"row": {0: "length"}}}
    graphed = gw.graph(model, buckets=gw.Buckets(length=[4]), dynamic_shapes=shapes)
    with pytest.warns(RuntimeWarning, match="No tensor of the call has the dimension 'length'"):
        same_as_eager(graphed, its, call_of(3, device))


def test_the_batch_of_a_cache(device: torch.device) -> None:
    """Without `dynamic_shapes` the first dimension that most tensors share."""

    class Rowwise(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.rows = cache.rows + x
            cache.seen.append(cache.rows * cache.mask[:, None])
            return cache.rows.tanh()

    def call(batch: int) -> tuple[torch.Tensor, Cache]:
        rows = torch.randn(batch, SIZE, device=device)
        return rows * 2, Cache(rows, torch.ones(batch, device=device))

    graphed = gw.graph(Rowwise().eval(), buckets=gw.Buckets(batch=[4]))
    for batch in (3, 4, 2):
        x, mine = call(batch)
        its = copy.deepcopy(mine)
        torch.testing.assert_close(graphed(x, mine), Rowwise()(x, its))
        torch.testing.assert_close(mine.rows, its.rows)
        torch.testing.assert_close(mine.seen, its.seen)
    assert graphed.statistics.padded == 2


def test_tune_refuses_buckets_for_objects(device: torch.device) -> None:
    model, _ = models(device)
    with pytest.raises(gw.SignatureError, match="has objects among them") as raised:
        gw.tune(model, call_of(8, device), **OPTIONS)
    assert "samples=" in str(raised.value)


class Gives(nn.Module):
    """Returns an object for what are tensors alone, as decoders return a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, scale: float = 1.0, unused: Any = None) -> Result:
        y = torch.relu(self.linear(x)) * scale
        return Result(y, Cache(y * 2, y[:, 0].clone(), [y + 1]))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_results_that_hold_objects_are_padded_and_split(
    split: bool, prepared: bool, device: torch.device
) -> None:
    model = Gives().eval().to(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[1, 2, 4]), split=split)
    if prepared:
        graphed.prepare([(torch.randn(2, SIZE, device=device),)])
    for count in (2, 2, 3, 4, 1, 7, 4):
        x = torch.randn(count, SIZE, device=device)
        with torch.no_grad():
            found, wanted = graphed(x), model(x)
            assert type(found) is Result
            assert type(found.cache) is Cache
            assert (found.cache.steps, found.cache.name) == (0, "cache")
            mine = found.y, found.cache.rows, found.cache.mask, *found.cache.seen
            its = wanted.y, wanted.cache.rows, wanted.cache.mask, *wanted.cache.seen
            for one, other in zip(mine, its, strict=True):
                torch.testing.assert_close(one, other)
    now = graphed.statistics
    assert now.captures == 3
    if split:
        assert (now.split, dict(now.eager)) == (1, {})
    else:
        assert (now.hits, now.padded, dict(now.eager)) == (6, 1, {"above the largest bucket": 1})
    with torch.no_grad():  # Another kind of call has objects of its own.
        torch.testing.assert_close(graphed(x, scale=2.0).cache.rows, model(x, 2.0).cache.rows)
        opaque = iter([1])
        torch.testing.assert_close(graphed(x, 1.0, opaque).y, model(x, 1.0).y)


def test_what_cannot_be_taken_apart_is_eager_and_tried_once() -> None:
    model = Gives().eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[2, 4]))
    failing = mock.Mock(side_effect=gw.SignatureError("planted"))
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        mock.patch.object(TakenApart, "made", failing),
    ):
        warnings.simplefilter("ignore", gw.FallbackWarning)
        for count in (2, 3, 4, 2):
            x = torch.randn(count, SIZE)
            torch.testing.assert_close(graphed(x).cache.rows, model(x).cache.rows)
    assert failing.call_count == 1
    assert graphed.statistics.hits == 0
    assert "planted" in graphed.explain()
