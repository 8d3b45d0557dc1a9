"""Calls of another kind than was made for: what differs is named, with both values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from test_artifacts import tuned_with
from torch import nn

import graphwright as gw
from graphwright.calls.signature import CallSignature

X = torch.arange(8.0).reshape(2, 4)


class Scaled(nn.Module):
    """Multiplies by a number, and by how many other keywords there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0, **other: Any) -> torch.Tensor:
        return self.linear(x) * (scale * (1 + len(other)))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def told(call: Callable[[], Any]) -> str:
    """The texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return " ".join(str(each.message) for each in found)


DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "one keyword more": (
        ((X,), {}),
        ((X,), {"return_dict": True}),
        "return_dict=True; tuned without it",
    ),
    "two more": (
        ((X,), {}),
        ((X,), {"a": None, "b": "c"}),
        "a=None, b='c'; tuned without them",
    ),
    "one less": (
        ((X,), {"return_dict": True}),
        ((X,), {}),
        "no return_dict; tuned with return_dict=True",
    ),
    "a tensor more": (
        ((X,), {}),
        ((X,), {"mask": X > 0}),
        "mask, a tensor (2, 4) bool; tuned without it",
    ),
    "another value": (
        ((X,), {"flag": True}),
        ((X,), {"flag": False}),
        "flag is bool False, tuned for bool True",
    ),
    "another number": (
        ((X, 0.5), {}),
        ((X, 2.0), {}),
        "args[1] is float 2.0, tuned for float 0.5; a number that changes from call to call is "
        "better passed as a tensor",
    ),
    "another container": (
        ((X,), {"many": [X + 1]}),
        ((X,), {"many": (X + 1,)}),
        "many: other containers than tuned for, or in another order",
    ),
    "a longer list": (
        (([1],), {}),
        (([1, 2],), {}),
        "args[0][1]=2; tuned without it",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named_with_both_values(name: str) -> None:
    one, other, text = DIFFERENCES[name]
    assert CallSignature.of(*one).differences(*other, "tuned") == text


def test_many_differences_are_counted() -> None:
    text = CallSignature.of((), {}).differences((), {f"a{n}": n for n in range(9)})
    assert text == "a0=0, a1=1, a2=2, a3=3, a4=4, a5=5 and 3 more; built without them"


def test_tune_names_the_argument() -> None:
    tuned = tuned_with("fused", Scaled().eval(), (X,))
    text = told(lambda: tuned(X, return_dict=True))
    assert "return_dict=True; tuned without it" in text
    assert "last call that did not match: return_dict=True; tuned without it" in tuned.explain()


def test_tune_names_the_argument_where_eager_was_chosen() -> None:
    tuned = tuned_with("eager", Scaled().eval(), (X,))
    tuned(X)
    assert "did not match" not in tuned.explain()
    tuned(X, return_dict=True)
    assert "last call that did not match: return_dict=True; tuned without it" in tuned.explain()
    with torch.enable_grad():
        tuned(X, other=1)
    assert "last call that did not match: other=1; tuned without it" in tuned.explain()


def test_the_nearest_call_is_the_one_with_the_fewest_other_arguments() -> None:
    samples = [((X,), {}), ((X,), {"a": 1, "b": 2})]
    tuned = tuned_with("fused", Scaled().eval(), (), samples=samples)
    assert "c=3; tuned without it" in told(lambda: tuned(X, a=1, b=2, c=3))


def test_graph_names_the_argument() -> None:
    graphed = gw.graph(Scaled().eval(), on_miss="eager")
    graphed.prepare([(X,)])
    graphed(X)
    assert "return_dict=True; captured without it" in told(lambda: graphed(X, return_dict=True))


def test_buckets_name_the_argument_and_not_the_sizes() -> None:
    graphed = gw.graph(
        Scaled().eval(),
        on_miss="eager",
        buckets=gw.Buckets(batch=[2, 4]),
        dynamic_shapes={"x": {0: "batch"}},
    )
    graphed.prepare([(X,)])
    text = told(lambda: graphed(X[:1], 2.0))
    assert "prepare() was not called for this kind: args[1]=2.0; prepared without it" in text
    assert "tensor" not in text


def test_fuse_says_how_a_call_beyond_the_limit_differs() -> None:
    fused = gw.fuse(Scaled().eval(), max_kinds=2, verify=False)
    for scale in (0.5, 1.5):
        fused(X, scale)
    text = told(lambda: fused(X, 2.5))
    assert "max_kinds=2 allows no more kinds of calls to be fused" in text
    assert "args[1] is float 2.5, fused for float 1.5; a number that changes" in text
    assert "is better passed as a tensor; raise max_kinds=, or pad to a few sizes" in text
    assert "it could not be fused" not in fused.explain()


def test_beyond_sixteen_kinds_one_is_fused_when_it_comes_again() -> None:
    fused = gw.fuse(nn.Linear(4, 4).eval(), verify=False, measure=False)
    sizes = [torch.ones(n, 4) for n in range(1, 20)]
    text = told(lambda: [fused(x) for x in sizes])
    assert "many kinds of calls are fused, and one more only when it comes again" in text
    assert "args[0] is (17, 4) float32" in text
    assert fused.calls["fused"] == 16
    for x in sizes:
        fused(x)
    assert fused.calls["fused"] == 35


def test_many_kinds_are_found_in_any_order_of_keywords() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, a: float, b: float) -> torch.Tensor:
            return x * a + b

    fused = gw.fuse(Adds().eval(), verify=False, measure=False)
    for n in range(1, 8):
        fused(torch.ones(n, 4), a=2.0, b=1.0)
    assert torch.equal(fused(torch.ones(3, 4), b=1.0, a=2.0), torch.full((3, 4), 3.0))
    assert len(fused._fusion.table) == 7


def test_explain_says_what_was_answered_for_each_kind() -> None:
    fused = gw.fuse(nn.Linear(4, 4).eval(), (X,), verify=False, measure=False)
    for _ in range(3):
        fused(X)
    fused(X[:1])
    lines = fused.explain().splitlines()
    assert "fused for 2×4 float32: 3 calls answered, 0 changes" in lines
    assert "fused for 1×4 float32: 1 call answered, 0 changes" in lines
    for n in range(3, 12):
        fused(torch.ones(n, 4))
    assert "fused for 3 more kinds: 3 calls answered" in fused.explain()
    assert max(map(len, fused.explain().splitlines())) <= 80


ARRAYS = {
    "array": (
        numpy.ones(4, numpy.float32),
        "args[1] is a NumPy array, and no graph would see its values change. "
        "Pass a tensor: torch.from_numpy(args[1])",
    ),
    "float": (
        numpy.float32(2),
        "args[1] is a NumPy scalar of type float32. Pass float(args[1]), or a tensor if it "
        "changes from call to call",
    ),
    "int": (numpy.int64(2), "args[1] is a NumPy scalar of type int64. Pass int(args[1])"),
    "bool": (numpy.bool_(True), "Pass bool(args[1])"),
    "date": (numpy.datetime64("2026-01-01"), "Pass a plain value: args[1].item()"),
}


class Takes(nn.Module):
    """Takes anything beside a tensor."""

    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("name", ARRAYS)
def test_what_numpy_made_is_named_with_what_to_pass_instead(name: str) -> None:
    value, text = ARRAYS[name]
    graphed, fused = gw.graph(Takes().eval()), gw.fuse(Takes().eval())
    assert text in told(lambda: graphed(X, value))
    assert text in graphed.explain()
    assert text in told(lambda: [fused(X, value) for _ in range(2)])
    with pytest.raises(gw.CaptureError) as caught:
        gw.capture(Takes().eval(), X, value)
    assert text in str(caught.value).replace("\n", " ")
    with pytest.raises(gw.SignatureError) as refused:
        gw.tune(Takes().eval(), (X, value), strategies=["eager"])
    assert text in str(refused.value).replace("\n", " ")


def test_explain_counts_a_call_that_is_captured_once() -> None:
    graphed = gw.graph(nn.Linear(4, 4).eval())
    for _ in range(3):
        graphed(X)
    assert "3 calls answered by graphs, 1 capture (in 1 of these calls)" in graphed.explain()
    graphed.prepare([(X[:1],)])
    assert "3 calls answered by graphs, 2 captures (in 1 of these calls)" in graphed.explain()
    assert graphed.statistics.after_capture == 1


def test_a_padded_call_that_is_captured_is_counted_once() -> None:
    buckets = gw.Buckets(batch=[2, 4])
    shapes = {"input": {0: "batch"}}
    graphed = gw.graph(nn.Linear(4, 4).eval(), buckets=buckets, dynamic_shapes=shapes)
    for n in (1, 1, 2):
        graphed(X[:n])
    assert "3 calls answered by graphs, 1 capture (in 1 of these calls)" in graphed.explain()


class Cache:
    """Holds a tensor, as a cache of keys and values does."""

    def __init__(self, size: int) -> None:
        self.keys = torch.ones(size, 4)


class StaticCache(Cache):
    """Is of one size for good."""


class Reads(nn.Module):
    """Reads from a cache."""

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return x + cache.keys.sum()


def calls_of(kind: type[Cache], *, grows: bool) -> str:
    """What is said of calls whose cache, or else the other argument, is of another size in each."""
    graphed = gw.graph(Reads().eval())
    calls = []
    for n in range(1, 40):
        x = X if grows else torch.ones(n, 4)
        calls += [(x, kind(n if grows else 3))] * 2
    return told(lambda: [graphed(*call) for call in calls])


def test_a_static_cache_is_named_only_to_those_who_pass_none(clock: Any) -> None:
    grows = "objects among the arguments are of other shapes in most calls"
    assert f"{grows}; pass a cache whose tensors keep their shapes" in calls_of(Cache, grows=True)
    static = calls_of(StaticCache, grows=True)
    assert f"{grows}; pass one of the same size in each call" in static
    assert "such as transformers' StaticCache" not in static
    for kind in (Cache, StaticCache):
        text = calls_of(kind, grows=False)
        assert "StaticCache" not in text
        assert "args[0] is" in text


class Passes(nn.Module):
    """Passes messages along the edges of a graph."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


class Bags(nn.Module):
    """Sums the rows of each bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(16, 4, mode="sum")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(ids, offsets)


EDGES = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
TOGETHER: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "edges": (
        Passes,
        {"x": None, "edge_index": {1: "n"}},
        (torch.randn(3, 4), EDGES),
        "edge_index holds indices into x",
    ),
    "bags": (
        Bags,
        {"ids": {0: "n"}, "offsets": None},
        (torch.tensor([3, 1, 4, 5]), torch.tensor([0, 2])),
        "offsets holds indices into ids",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_buckets_name_what_moves_with_a_padded_argument(name: str) -> None:
    make, shapes, call, text = TOGETHER[name]
    named = dict(zip(shapes, call, strict=True))
    graphed = gw.graph(make().eval(), buckets=gw.Buckets(n=[8]), dynamic_shapes=shapes)
    with pytest.raises(gw.PaddingError) as refused:
        graphed.prepare([named])
    assert text in str(refused.value)
    assert "No pad value can help" in str(refused.value)
    assert "mask" not in str(refused.value)
    assert text in told(lambda: graphed(**named))


def test_other_models_are_still_told_of_masks() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(0)

    graphed = gw.graph(Mean(), buckets=gw.Buckets(n=[8]), dynamic_shapes={"x": {0: "n"}})
    with pytest.raises(gw.PaddingError, match="If a mask could tell padding from data"):
        graphed.prepare([(X,)])
