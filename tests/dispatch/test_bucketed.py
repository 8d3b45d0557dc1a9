"""graph(buckets=…): which calls buckets answer, how, and what statistics and warnings say."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hazards import rand, same
from hazards_of_padding import ACCEPTED, BATCH, REFUSED, WIDTH, Case, as_eager
from shares import share
from torch import nn
from torch.export import Dim

import graphwright as gw
from graphwright.calls.signature import CallSignature
from graphwright.calls.snapshots import layout
from graphwright.graphs import capture_turns
from graphwright.graphs.memory import MemoryPool
from graphwright.shapes import family, output_shapes, symbolic
from graphwright.shapes.dimensions import Dimensions
from graphwright.shapes.dynamic_signature import DynamicSignature
from graphwright.shapes.family import ShapeFamily
from graphwright.shapes.proof import Prover
from graphwright.shapes.sampler import ValueChange
from graphwright.shapes.selection import BucketSelector

TABLE = pytest.mark.parametrize


def rows_model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 3)).to(device).eval()


def sample_of(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    return case.arguments(device, tuple(sizes[-1] for sizes in case.buckets.values()))


@TABLE("name", REFUSED)
def test_what_depends_on_the_padding_is_refused_by_name(name: str, device: torch.device) -> None:
    case = REFUSED[name]
    _, graphed = case.graphed(device)
    with torch.no_grad(), pytest.raises(gw.PaddingError) as refusal:
        graphed.prepare([sample_of(case, device)])
    assert [word for word in case.refused if word not in str(refusal.value)] == []
    assert graphed.statistics.graphs == 0
    assert graphed.pool.reserved == 0


@TABLE("name", REFUSED)
def test_what_depends_on_the_padding_is_eager_with_a_warning(
    name: str, device: torch.device
) -> None:
    case = REFUSED[name]
    _, graphed = case.graphed(device)
    worst = {"a branch at one size": (5,), "a branch on the length": (600,)}.get(name)
    if worst is None:
        alone = (3,) if "norm" in name else (1,)
        if "any row" in name:
            alone = (case.buckets["batch"][0] - 1,)
        worst = (2, 2) if len(case.buckets) == 2 else alone
    arguments = case.arguments(device, worst)
    with torch.no_grad(), pytest.warns(RuntimeWarning) as warned:
        graphed(*arguments)
    assert [word for word in case.refused if word not in str(warned[0].message)] == []
    assert graphed.statistics.eager == {"padding is not harmless": 1}


def test_refused_sizes_are_an_error_where_that_is_asked_for(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("one row")
        return x * 2

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]), on_miss="error")
    with torch.no_grad():
        graphed.prepare([(rand(device, 3, WIDTH),)])
        same(graphed(rand(device, 2, WIDTH)) * 0, rand(device, 2, WIDTH) * 0)
        with pytest.raises(gw.PaddingError, match=r"batch padded from 1 to 4.*eager refuses"):
            graphed(rand(device, 1, WIDTH))


@TABLE("name", share(ACCEPTED))
def test_what_does_not_is_prepared_once_and_never_captured_again(
    name: str, device: torch.device
) -> None:
    case = ACCEPTED[name]
    fn, graphed = case.graphed(device)
    with torch.no_grad():
        graphed.prepare([sample_of(case, device)])
        captured = graphed.statistics.captures
        for sizes in case.sizes():
            arguments = case.arguments(device, sizes)
            mine, theirs = graphed(*arguments), fn(*arguments)
            first = mine[0] if isinstance(mine, tuple) else mine
            same(first, theirs[0] if isinstance(theirs, tuple) else theirs)
    statistics = graphed.statistics
    assert statistics.captures == captured
    assert not statistics.eager
    assert statistics.hits == len(case.sizes())


@TABLE("name", ["rows apart", "masked attention", "masked mean", "2·b+1 rows", "(b·l, d)", "pairs"])
def test_shapes_that_symbols_do_not_give_are_fitted(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise output_shapes.Underivable("no symbols")

    monkeypatch.setattr(symbolic, "_derive", fails)
    statistics = as_eager(ACCEPTED[name], device).statistics
    assert statistics.padded > 0
    assert not statistics.eager


def test_shapes_that_follow_no_rule_leave_sizes_exact_only(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise output_shapes.Underivable("no symbols")

    monkeypatch.setattr(symbolic, "_derive", fails)
    graphed = ACCEPTED["half the length"].graphed(device)[1]
    with torch.no_grad():
        for length in (16, 8):
            x = rand(device, 2, length, WIDTH)
            same(graphed(x), x[:, ::2] * 2)
        x = rand(device, 2, 5, WIDTH)
        with pytest.warns(RuntimeWarning, match="no symbols; no polynomial"):
            result = graphed(x)
        same(result, x[:, ::2] * 2)
    assert graphed.statistics.eager == {"padding is not harmless": 1}


@pytest.mark.filterwarnings("ignore:.*runs eagerly:RuntimeWarning")
@TABLE("in_a_cycle", [False, True])
def test_a_trace_that_stays_in_a_cache_of_the_class_is_refused(
    in_a_cycle: bool, device: torch.device
) -> None:
    class Keeps(nn.Module):
        kept: ClassVar[list[Any]] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = x * 2
            if in_a_cycle:  # Kept by nothing but itself: that is no cache.
                loop: list[Any] = [result]
                loop.append(loop)
            else:
                self.kept.append(result)
            return result

    graphed = gw.graph(Keeps().eval(), buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        x = rand(device, 3, WIDTH)
        same(graphed(x), x * 2)
    assert graphed.statistics.padded == in_a_cycle
    assert ("now holds one without values" in graphed.explain()) is not in_a_cycle


def test_attention_can_be_traced_by_its_shape(device: torch.device) -> None:
    case = ACCEPTED["masked attention"]
    fn, arguments = case.fn(device), case.arguments(device, (4, 8))
    dimensions = Dimensions(fn, ["batch", "length"], case.dynamic_shapes)
    signature = DynamicSignature(dimensions, CallSignature.of(arguments, {}), arguments, {})
    family = ShapeFamily(fn, signature, arguments, {}, pool=gw.MemoryPool())
    with torch.no_grad(), symbolic._AttentionByShape():
        by_shape = symbolic._derive(family.sampler, (4, 8))
        for size in ((4, 8), (3, 5), (2, 1)):
            expected = fn(*case.arguments(device, size))
            shapes = [(tuple(t.shape), t.stride()) for t in expected]
            assert by_shape.of(size) == shapes


def test_a_warning_names_the_caller_s_line_once(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x.mean(0), buckets=gw.Buckets(batch=[4]))
    with pytest.warns(RuntimeWarning, match="padded from") as warned:
        graphed(rand(device, 3, WIDTH))
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphed(rand(device, 3, WIDTH))
    assert graphed.statistics.eager == {"padding is not harmless": 2}


def test_one_dimension_may_be_exact_only(device: torch.device) -> None:
    graphed = gw.graph(
        lambda x: x.flip(1) * 2,
        dynamic_shapes=({0: "batch", 1: "length"},),
        buckets=gw.Buckets(batch=[4], length=[8, 16]),
    )
    with torch.no_grad():
        for batch, length in ((3, 8), (2, 16)):
            x = rand(device, batch, length)
            same(graphed(x), x.flip(1) * 2)
        x = rand(device, 3, 5)
        with pytest.warns(RuntimeWarning, match="length"):
            result = graphed(x)
        same(result, x.flip(1) * 2)
    statistics = graphed.statistics
    assert statistics.padded == 2
    assert statistics.eager == {"padding is not harmless": 1}


def test_statistics_count_sizes_and_waste(device: torch.device) -> None:
    graphed = gw.graph(rows_model(device), buckets=gw.Buckets(batch=[2, 8]))
    with torch.no_grad():
        for batch in (1, 2, 2, 5, 8, 9):
            graphed(rand(device, batch, WIDTH))
    statistics = graphed.statistics
    assert statistics.sizes == gw.shapes.SizesSeen(
        ("batch",), {(1,): 1, (2,): 2, (5,): 1, (8,): 1, (9,): 1}
    )
    assert statistics.buckets == {
        (2,): gw.dispatch.BucketStatistics(exact=2, padded=1, waste=1 / 6),
        (8,): gw.dispatch.BucketStatistics(exact=1, padded=1, waste=3 / 16),
    }
    assert statistics.waste == pytest.approx(4 / 22)
    assert (statistics.hits, statistics.padded, statistics.eager) == (
        5,
        2,
        {"above the largest bucket": 1},
    )
    assert statistics.proof_runs > 0
    assert statistics.proof_s > 0
    better = gw.Buckets.from_sizes(statistics.sizes, max_graphs=3)
    assert better.waste(statistics.sizes) <= gw.Buckets(batch=[2, 8, 9]).waste(statistics.sizes)
    words = graphed.explain()
    assert "padding is 18.2% of what was computed" in words
    assert "1 call eager: above the largest bucket" in words


def test_sizes_are_still_known_after_a_release(device: torch.device) -> None:
    graphed = gw.graph(rows_model(device), buckets=gw.Buckets(batch=[2, 8]))
    x = rand(device, 2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            graphed(x)
            graphed(x[:1])
        graphed.release()
        same(graphed(x[:1]), graphed.module(x[:1]))
    statistics = graphed.statistics
    assert statistics.sizes is not None
    assert statistics.sizes.counts == {(2,): 3, (1,): 4}
    assert statistics.hits == 7


@TABLE("batch", [9, 16, 17, 24, 25])
def test_a_call_above_the_largest_bucket_is_split(batch: int, device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4, 8]), split=True)
    x = rand(device, batch, WIDTH)
    with torch.no_grad():
        same(graphed(x), model(x))
    statistics = graphed.statistics
    assert statistics.split == 1
    assert not statistics.eager
    assert statistics.hits == -(-batch // 8)


def test_rows_that_are_not_independent_are_not_split(device: torch.device) -> None:
    for fn in (lambda x: x - x.mean(0), lambda x: (x * 2, x.sum()), lambda x: x @ x.T):
        graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]), split=True)
        x = rand(device, 9, WIDTH)
        with torch.no_grad():
            mine, theirs = graphed(x), fn(x)
            same(mine[-1], theirs[-1])
        statistics = graphed.statistics
        assert statistics.split == 0
        assert statistics.eager == {"it cannot be split": 1}


def quantised(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax().clamp(min=4.0) / 127
    return (x / scale).round() * scale


def off_if_any(x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return torch.where(flags.any(), x - 1, x)


@TABLE("fn", [quantised, lambda x: torch.where(x.isnan().any(), x - 1, x)])
def test_rows_that_one_odd_row_changes_are_not_split(
    fn: Callable[..., Any], device: torch.device
) -> None:
    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]), split=True)
    x = rand(device, 8, WIDTH) / 2
    with torch.no_grad():
        same(graphed(x), fn(x))
        x[6] = float("nan") if fn is not quantised else 40.0
        same(graphed(x), fn(x))
    assert graphed.statistics.eager == {"it cannot be split": 2}


def test_rows_that_one_flag_changes_are_not_split(device: torch.device) -> None:
    graphed = gw.graph(off_if_any, buckets=gw.Buckets(batch=[4]), split=True)
    x, flags = rand(device, 8, WIDTH), torch.zeros(8, dtype=torch.bool, device=device)
    with torch.no_grad():
        graphed(x, flags)
        flags[6] = True
        same(graphed(x, flags), off_if_any(x, flags))


@TABLE(
    "flag",
    [
        lambda x: x.isnan().any(),
        lambda x: (x > 1e3).sum(),
        lambda x: (x == 1234).any(),
        lambda x: torch.zeros(WIDTH, device=x.device).copy_((x == 1234).any(0)),
    ],
)
def test_what_all_rows_decide_is_not_taken_from_one_chunk(
    flag: Callable[..., Any], device: torch.device
) -> None:
    graphed = gw.graph(lambda x: (x * 2, flag(x)), buckets=gw.Buckets(batch=[4]), split=True)
    x = rand(device, 8, WIDTH)
    with torch.no_grad():
        for value in (0.0, float("nan"), 1234.0):
            x[1::5] = value
            same(graphed(x)[1], flag(x))
    assert graphed.statistics.split == 0


def test_another_size_is_split_after_fewer_trials(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    tried, joints = [], Prover._joints

    def counted(self: Prover, leaves: list[Any], name: str, parts: Any, **rest: Any) -> Any:
        tried.append(sum(parts))
        return joints(self, leaves, name, parts, **rest)

    monkeypatch.setattr(Prover, "_joints", counted)
    graphed = gw.graph(rows_model(device), buckets=gw.Buckets(batch=[4]), split=True)
    with torch.no_grad():
        for batch in (9, 10):
            x = rand(device, batch, WIDTH)
            same(graphed(x), graphed.module(x))
    assert tried.count(9) > 10
    assert tried.count(10) == 2


def test_an_audit_of_a_split_call_compares_all_of_it(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(Prover, "_dependent_output", lambda *given: None)
    fn = lambda x: (x * 2, (x > 1e3).sum())  # noqa: E731
    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]), split=True, audit=1)
    x = rand(device, 8, WIDTH)
    with torch.no_grad():
        same(graphed(x)[0], x * 2)
        assert graphed.statistics.audits == 3  # both chunks and the whole
        x[:, 0] = 2e3
        with pytest.raises(gw.VerificationError, match="in chunks"):
            graphed(x)


def test_sizes_seen_are_those_of_the_calls_and_not_of_chunks(device: torch.device) -> None:
    graphed = gw.graph(rows_model(device), buckets=gw.Buckets(batch=[4]), split=True)
    with torch.no_grad():
        for batch in (11, 4, 3):
            graphed(rand(device, batch, WIDTH))
    statistics = graphed.statistics
    assert statistics.sizes is not None
    assert statistics.sizes.counts == {(11,): 1, (4,): 1, (3,): 1}
    assert statistics.hits == 5


def test_what_is_the_same_for_all_rows_is_handed_out_once_when_split(device: torch.device) -> None:
    weight = rand(device, WIDTH, 2)
    fn = lambda x: {  # noqa: E731
        "rows": x @ weight,
        "weight": weight * 2,
        "width": 2,
        "zeros": x.new_zeros(3) + x.shape[1],
    }
    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]), split=True)
    x = rand(device, 7, WIDTH)
    with torch.no_grad():
        mine, theirs = graphed(x), fn(x)
    same(mine["rows"], theirs["rows"])
    same(mine["weight"], theirs["weight"])
    same(mine["zeros"], theirs["zeros"])
    assert mine["width"] == 2
    assert graphed.statistics.split == 1


def test_an_input_that_is_written_to_is_written_to(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for batch in (3, 4, 1, 3):
            x, y = rand(device, batch, WIDTH), rand(device, batch, WIDTH)
            expected_x = x.clone()
            expected = fn(expected_x, y)
            same(graphed(x, y), expected)
            same(x, expected_x)
    assert graphed.statistics.padded == 3


def test_an_input_that_is_returned_is_the_caller_s(device: torch.device) -> None:
    graphed = gw.graph(lambda x: (x, x * 2), buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            mine, doubled = graphed(x)
            assert mine is x
            same(doubled, x * 2)
    assert graphed.statistics.padded == 2


def test_outputs_that_share_memory_go_on_doing_so(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y[:, 1]

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        whole, column = graphed(x)
        same(column, (x * 2)[:, 1])
        whole.zero_()
        assert not column.any()
    assert graphed.statistics.padded == 1


def test_views_of_an_output_that_is_copied_are_views_of_the_copy(device: torch.device) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        both = x @ y.T
        return {"first": both[1:, 1:], "both": both, "turned": both.T, "again": both}

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4, 8]))
    with torch.no_grad():
        for n in (3, 5, 8, 2, 7):
            x, y = rand(device, n, WIDTH), rand(device, n, WIDTH)
            mine, theirs = graphed(x, y), fn(x, y)
            assert mine["again"] is mine["both"]
            for name, value in theirs.items():
                same(mine[name], value, name)
                assert layout(mine[name]) == layout(value)
            mine["both"].zero_()
            assert not mine["turned"].any()
            assert not mine["first"].any()
    assert graphed.statistics.padded == 4


def test_results_belong_to_the_caller(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[8]))
    x, other = rand(device, 5, WIDTH), rand(device, 6, WIDTH)
    with torch.no_grad():
        first = graphed(x)
        kept = first.clone()
        graphed(other).fill_(7)
        same(first, kept)
        same(graphed(x), kept)


def test_views_of_arguments_are_left_to_eager(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x[:, 1:], buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="a view of the argument"):
        result = graphed(x)
    assert result.data_ptr() == x[:, 1:].data_ptr()


def test_another_order_in_memory_is_not_padded(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x * 2, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for n in (3, 4):
            x = rand(device, WIDTH, n).T
            result = graphed(x)
            same(result, x * 2)
            assert result.stride() == (x * 2).stride()
    statistics = graphed.statistics
    assert statistics.eager == {"another order in memory": 1}
    assert statistics.buckets[4,].exact == 1
    assert statistics.proof_runs == 0


def test_repeated_rows_are_padded(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x * 2, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 1, WIDTH).expand(3, -1)
    with torch.no_grad():
        for _ in range(2):
            result = graphed(x)
            same(result, x * 2)
            assert result.stride() == (x * 2).stride()
    assert graphed.statistics.padded == 2


@TABLE("batch_first", [True, False])
def test_recurrent_layers_take_batches(batch_first: bool, device: torch.device) -> None:
    model = nn.LSTM(WIDTH, 8, batch_first=batch_first).to(device).eval()
    axis = 0 if batch_first else 1
    graphed = gw.graph(model, dynamic_shapes=({axis: "batch"},), buckets=gw.Buckets(batch=[4, 8]))
    with torch.no_grad():
        for n in (3, 1, 8, 5):
            x = rand(device, *((n, 7) if batch_first else (7, n)), WIDTH)
            (mine, _), (theirs, _) = graphed(x), model(x)
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
            assert layout(mine) == layout(theirs)
    assert graphed.statistics.padded == 3


def test_gaps_between_rows_make_no_difference(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x * 2, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for _ in range(2):
            x = rand(device, 3, 2 * WIDTH)[:, :WIDTH]
            same(graphed(x), x * 2)
    assert graphed.statistics.padded == 2


def test_another_layout_of_a_bucket_s_own_sizes_needs_no_graph_of_its_own(
    device: torch.device,
) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[1, 4]))
    with torch.no_grad():
        graphed.prepare([(rand(device, 4, WIDTH),)])
        wide = rand(device, 4, 2 * WIDTH)
        for x in (wide[:, :WIDTH], wide[:1, :WIDTH], wide[:3, WIDTH:]):
            for _ in range(2):
                same(graphed(x), model(x))
    statistics = graphed.statistics
    assert (statistics.captures, statistics.hits, statistics.padded) == (2, 6, 2)
    assert statistics.buckets[4,].exact == 2


def test_channels_last_stays_so(device: torch.device) -> None:
    model = nn.Conv2d(3, 4, 3).to(device, memory_format=torch.channels_last).eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        for form in (torch.channels_last, torch.contiguous_format):
            for _ in range(2):
                x = rand(device, 3, 3, 8, 8).contiguous(memory_format=form)
                mine, theirs = graphed(x), model(x)
                torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
                assert mine.stride() == theirs.stride()


def test_the_common_size_is_the_batch(device: torch.device) -> None:
    def fn(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) @ weight

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4, 8]))
    weight = rand(device, WIDTH, 2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (3, WIDTH, 5, 1, 8, WIDTH):
            x, y = rand(device, batch, WIDTH), rand(device, batch, WIDTH)
            same(graphed(x, weight, y), fn(x, weight, y))
    assert graphed.statistics.padded >= 4


def test_derived_sizes_and_bounds(device: torch.device) -> None:
    batch = Dim("batch", min=2, max=6)

    def fn(x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return x + pairs[:-1].view(-1, 2, WIDTH).sum(1)

    graphed = gw.graph(
        fn, dynamic_shapes=({0: batch}, {0: 2 * batch + 1}), buckets=gw.Buckets(batch=[4, 8])
    )
    with torch.no_grad():
        for n in (2, 3, 4, 6, 1, 7):
            x, pairs = rand(device, n, WIDTH), rand(device, 2 * n + 1, WIDTH)
            same(graphed(x, pairs), fn(x, pairs))
    statistics = graphed.statistics
    assert statistics.padded == 3
    assert statistics.eager == {"outside the declared bounds": 2}


def test_a_dimension_by_name_in_a_tree(device: torch.device) -> None:
    def fn(inputs: dict[str, Any], *, scale: float, names: tuple[str, ...]) -> dict[str, Any]:
        return {"a": inputs["x"] * scale + inputs["more"][0], "n": len(names)}

    graphed = gw.graph(
        fn,
        dynamic_shapes={"inputs": {"x": ("rows", None), "more": [{0: "rows"}]}},
        buckets=gw.Buckets(rows=[4]),
    )
    with torch.no_grad():
        for n in (3, 4, 2):
            inputs = {"x": rand(device, n, WIDTH), "more": [rand(device, n, WIDTH)]}
            mine = graphed(inputs, scale=2.0, names=("a", "b"))
            same(mine["a"], fn(inputs, scale=2.0, names=())["a"])
            assert mine["n"] == 2
    assert graphed.statistics.padded == 2


def test_plain_values_make_another_family(device: torch.device) -> None:
    graphed = gw.graph(lambda x, k: x * k, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        for k in (2, 3, 2.0, True):
            same(graphed(x, k), x * k)
    assert graphed.statistics.padded == 4
    assert graphed.statistics.captures == 4


def test_gradients_are_not_lost(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        graphed(x)
        graphed(x)
    leaf = x.clone().requires_grad_()
    graphed(leaf).sum().backward()
    assert leaf.grad is not None
    assert graphed.statistics.eager == {"gradients are wanted": 1}


def test_new_weights_take_effect_when_padded(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        same(graphed(x), model(x))
        model[0].weight.mul_(2)
        same(graphed(x), model(x))
        model[0].weight.data = rand(device, 16, WIDTH)
        same(graphed(x), model(x))
        same(graphed(x), model(x))
        once = graphed.statistics.proof_runs
        graphed.release()
        assert graphed.statistics.proof_runs == once
    assert not graphed.statistics.eager


def test_autocast_is_part_of_the_family(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        for on in (False, True, False, True):
            with torch.autocast(device.type, torch.bfloat16, enabled=on):
                mine, theirs = graphed(x), model(x)
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert graphed.statistics.padded == 4


def test_audits_compare_with_eager_without_padding(device: torch.device) -> None:
    graphed = gw.graph(rows_model(device), buckets=gw.Buckets(batch=[4]), audit=2)
    with torch.no_grad():
        for _ in range(4):
            graphed(rand(device, 3, WIDTH))
    assert graphed.statistics.audits == 2


def test_only_prepared_buckets_are_used_where_that_is_asked_for(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]), on_miss="error")
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        with pytest.raises(gw.SignatureError, match="No graph"):
            graphed(x)
        graphed.prepare([(x,)])
        same(graphed(x), model(x))
        with pytest.raises(gw.SignatureError, match="above the largest bucket"):
            graphed(rand(device, 5, WIDTH))


def test_a_first_call_that_fails_spoils_nothing(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        wrong = rand(device, 3, WIDTH + 1)
        with pytest.raises(RuntimeError):
            graphed(wrong)
        x = rand(device, 3, WIDTH)
        same(graphed(x), model(x))
    assert graphed.statistics.padded == 1


def test_failures_are_counted_for_each_kind_until_a_release() -> None:
    table = torch.rand(9, WIDTH)
    graphed = gw.graph(lambda ids, k: table[ids] * k, buckets=gw.Buckets(batch=[4]))
    ids, invalid = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 30])

    def fail(k: int, times: int) -> None:
        for _ in range(times):
            with pytest.raises(IndexError):
                graphed(invalid, k)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for k in (2, 3, 4):
            fail(k, 2)
        for k in (2, 3, 4):
            same(graphed(ids, k), table[ids] * k)
        assert graphed.statistics.padded == 3
        for k in (2, 3, 4):
            graphed.release()
            fail(k, 2)
            same(graphed(ids, k), table[ids] * k)
        assert graphed.statistics.padded == 6
        fail(5, 3)
        same(graphed(ids, 5), table[ids] * 5)  # No sample would do, it seems.
    assert graphed.statistics.padded == 6


def test_other_threads_at_work_refuse_nothing_for_good(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(capture_turns, "PATIENCE_S", 0.01)
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    busy, done = threading.Event(), threading.Event()

    def work() -> None:
        with capture_turns.turns_of(model).calling():
            busy.set()
            done.wait(60)

    x = rand(device, 3, WIDTH)
    with torch.no_grad(), warnings.catch_warnings(), ThreadPoolExecutor(1) as other:
        warnings.simplefilter("ignore", RuntimeWarning)
        other.submit(work)
        assert busy.wait(60)
        for _ in range(4):
            same(graphed(x), model(x))
        done.set()
        other.shutdown()
        same(graphed(x), model(x))
    assert graphed.statistics.eager == {"other threads were at work": 4}
    assert graphed.statistics.padded == 1


@TABLE("buckets", [None, gw.Buckets(batch=[2, 4])])
def test_an_eager_call_that_needs_the_pool_does_not_stop_prepare(
    buckets: gw.Buckets | None, device: torch.device
) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=buckets)
    mine, inside = capture_turns.turns_of(model), threading.Event()

    def work() -> None:
        with mine.calling():
            inside.set()
            with mine._free:
                mine._free.wait_for(lambda: mine._waiting, 60)
            with graphed.pool._lock:  # As a graph does that the model calls.
                pass

    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        done = other.submit(work)
        assert inside.wait(60)
        graphed.prepare([(rand(device, 2, WIDTH),)])
        done.result()
    assert graphed.statistics.graphs == (1 if buckets is None else 2)


def test_copies_and_pickles_keep_their_buckets(device: torch.device) -> None:
    model = rows_model(device)
    dim = {"input": {0: "rows"}}
    graphed = gw.graph(model, dynamic_shapes=dim, buckets=gw.Buckets(rows=[4]), split=True)
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        graphed(x)
        for other in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
            same(other(x), model(x))
            assert other.statistics.padded == 1


def test_threads_may_call_at_once(device: torch.device) -> None:
    model = rows_model(device)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[2, 8]))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(25):
                n = int(torch.randint(1, 9, (), generator=generator))
                x = torch.randn(n, WIDTH, generator=generator).to(device)
                same(graphed(x), model(x))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert graphed.statistics.hits == 100


def test_a_limit_on_memory_leaves_calls_eager(device: torch.device) -> None:
    pool = gw.MemoryPool("1KiB")
    graphed = gw.graph(rows_model(device), buckets=gw.Buckets(batch=[4]), pool=pool)
    x = rand(device, 3, WIDTH)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="limit"):
        same(graphed(x), graphed.module(x))
    assert graphed.statistics.eager == {"the pool's limit": 1}


def test_a_call_of_no_rows_is_eager(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x * 2, buckets=gw.Buckets(batch=[4]))
    assert graphed(rand(device, 0, WIDTH)).shape == (0, WIDTH)
    with pytest.raises(gw.CaptureError, match="size 0"):
        graphed.prepare([(rand(device, 0, WIDTH),)])


@TABLE(
    ("options", "said"),
    [
        ({"dynamic_shapes": {"x": {0: "batch"}}}, "there are none"),
        ({"split": True}, "there are none"),
        ({"buckets": [1, 2]}, "Buckets"),
        ({"buckets": gw.Buckets(batch=[4], length=[8])}, "dynamic_shapes"),
        ({"buckets": gw.Buckets(length=[8])}, "dynamic_shapes"),
        ({"buckets": gw.Buckets(b=[4]), "dynamic_shapes": {"x": {0: "batch"}}}, "b"),
        ({"buckets": gw.Buckets(b=[4]), "dynamic_shapes": {"y": {0: "b"}}}, "'y'"),
        ({"buckets": gw.Buckets(b=[4]), "dynamic_shapes": {"x": {0: Dim.AUTO}}}, "names no"),
        ({"buckets": gw.Buckets(b=[4]), "dynamic_shapes": "b"}, "dictionary"),
        ({"buckets": gw.Buckets(batch=[4]), "pad": {"z": 0}}, "'z'"),
        ({"buckets": gw.Buckets(batch=range(1, 40))}, "39 buckets"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(gw.OptionError, match=said):
        gw.graph(fn, **options)


def test_arguments_that_do_not_agree_about_a_size(device: torch.device) -> None:
    graphed = gw.graph(
        lambda x, y: (x * 2, y * 2),
        dynamic_shapes=({0: "n"}, {0: "n"}),
        buckets=gw.Buckets(n=[4]),
        on_miss="error",
    )
    with pytest.raises(gw.SignatureError, match="do not agree"):
        graphed(rand(device, 2, WIDTH), rand(device, 3, WIDTH))


def test_random_functions_are_left_to_eager(device: torch.device) -> None:
    fn: Callable[..., Any] = lambda x: torch.dropout(x, 0.5, train=True)  # noqa: E731
    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[4]))
    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        torch.manual_seed(3)
        with pytest.warns(RuntimeWarning, match="random numbers"):
            mine = graphed(x)
        torch.manual_seed(3)
        same(mine, fn(x))


def test_random_numbers_that_change_nothing_forbid_nothing(device: torch.device) -> None:
    def with_layer_drop(x: torch.Tensor) -> torch.Tensor:
        chance = torch.rand(2, device=x.device)
        return x * 2 + torch.where(chance < 2.0, 0.0, 1.0).sum()

    def with_dropout(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand_like(x) < 0.999)

    x = rand(device, 3, WIDTH)
    with torch.no_grad():
        graphed = gw.graph(with_layer_drop, buckets=gw.Buckets(batch=[4]))
        same(graphed(x), x * 2)
        same(graphed(x), x * 2)
        assert graphed.statistics.padded == 2
        graphed = gw.graph(with_dropout, buckets=gw.Buckets(batch=[4]))
        with pytest.warns(RuntimeWarning, match="random numbers"):
            graphed(x)


def test_proofs_leave_everything_as_it_was(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(device).train()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[8]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seeds = torch.get_rng_state()
    x = rand(device, 5, WIDTH)
    kept = x.clone()
    with torch.no_grad(), pytest.raises(gw.PaddingError):
        graphed.prepare([(x,)])
    for name, value in model.state_dict().items():
        same(value, before[name], name)
    same(x, kept)
    if device.type == "cuda":
        assert torch.equal(torch.get_rng_state(), seeds)


@TABLE("buckets", [[8], [4, 8]])
def test_flags_of_a_whole_batch_are_not_proved_by_luck(buckets: list[int]) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        bound = nn.Linear(8, 1)
        graphed = gw.graph(partial(_is_any_above, bound), buckets=gw.Buckets(batch=buckets))
        with torch.no_grad(), pytest.raises(gw.PaddingError):
            graphed.prepare([(torch.randn(4, 8),)])


def _is_any_above(bound: Any, x: torch.Tensor) -> torch.Tensor:
    return (bound(x) > 0).any(0)


def test_values_that_eager_refuses_prove_nothing(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("a negative value")
        return x.sqrt()

    graphed = gw.graph(torch.sqrt, buckets=gw.Buckets(batch=[4]))
    with torch.no_grad():
        graphed.prepare([(rand(device, 4, WIDTH).abs(),)])
    # Here it raises, where the root of what is negative is NaN.
    sampler = family_of(fn, (rand(device, 4, WIDTH).abs() + 1,)).sampler
    prover = Prover(sampler, (), ())
    with prover._from_now():
        for how in sampler.changes():
            assert bool((prover._run_unpadded((2,), how, None, ()).leaves[0] > 0).all())


@TABLE("valid", [True, 1, 1.0, 0.0])
def test_masks_with_a_declared_value_are_tried_without_padding_and_with_little(
    valid: float, device: torch.device
) -> None:
    pad = -1e9 if valid == 0 else type(valid)(0)
    x, mask = rand(device, 2, 6, WIDTH), torch.full((2, 6), valid, device=device)
    mask[:, 4:] = pad
    shapes = ({0: "batch", 1: "length"},) * 2
    given = {"batch": [2], "length": [6]}, shapes
    sampler = family_of(lambda x, mask: x, (x, mask.clone()), *given, (None, pad)).sampler
    generator = torch.Generator().manual_seed(0)
    seen = {how: sampler.changed((2, 6), how, generator) for how in sampler.changes()}
    assert len({float(leaves[0].sum()) for leaves in seen.values()}) > 3
    for how in (ValueChange.NONE, ValueChange.NEGATED, ValueChange.SCALED):
        assert torch.equal(seen[how][1], mask)
    for how in (ValueChange.FLIPPED, ValueChange.MIXED):
        assert bool((seen[how][1] == valid).all())
    some = seen[ValueChange.SHUFFLED][1] == valid
    assert some.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    # Nothing attends to a row that is masked as a whole.
    assert bool((sampler.changed((2, 1), ValueChange.SHUFFLED, generator)[1] == valid).all())


def test_what_is_padding_in_the_sample_stays_so(device: torch.device) -> None:
    x, ids = rand(device, 4, 6, WIDTH), torch.tensor([[5, 3, 0, 0]] * 4, device=device)
    added = rand(device, 4, 6) - 1e9
    x[:, 4:] = -1.0
    sampler = family_of(
        lambda *given: given, (x, ids, added), dynamic_shapes=BATCH * 3, pad=(-1.0, 0, -1e9)
    ).sampler
    generator = torch.Generator().manual_seed(0)
    for how in sampler.changes():
        for leaves in (
            sampler.changed((4,), how, generator),
            sampler.alike((4,), how, generator, ("batch",), 1),
        ):
            assert torch.equal(leaves[0] == -1, x == -1)
            assert torch.equal(leaves[1], ids)
            assert torch.equal(leaves[2], added)
            assert (how is ValueChange.NONE) or not torch.equal(leaves[0], x)


@TABLE("fn", [lambda x: x.amax(1), lambda x: (x < 0).all(1), lambda x: (x >= 0).any(1)])
def test_a_declared_value_is_proved_for_other_values_than_the_sample_s(
    fn: Callable[..., Any], device: torch.device
) -> None:
    tokens = {"x": {0: "batch", 1: "length"}}
    graphed = gw.graph(
        fn, dynamic_shapes=tokens, buckets=gw.Buckets(batch=[4], length=[8]), pad={"x": 0}
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        graphed(rand(device, 4, 7, WIDTH).abs())
        x = -rand(device, 3, 5, WIDTH).abs()
        same(graphed(x), fn(x))


def test_a_mask_that_is_all_ones_is_not_proved_by_one_that_is_not(device: torch.device) -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask.all(), x, x * 2)

    tokens = {0: "batch", 1: "length"}
    graphed = gw.graph(
        fn,
        dynamic_shapes={"x": tokens, "mask": tokens},
        buckets=gw.Buckets(batch=[4], length=[8]),
        pad={"x": 0, "mask": 0},
    )
    x, mask = rand(device, 4, 6), torch.ones(4, 6, device=device)
    mask[0, 0] = 0
    with torch.no_grad(), pytest.raises(gw.PaddingError):
        graphed.prepare([(x, mask)])


def mixes_few_in_float32(x: torch.Tensor) -> torch.Tensor:
    return x + 1 - x.mean(0) if x.shape[0] < 3 and x.dtype is torch.float32 else x + 1


def writes_and_mixes_in_float32(x: torch.Tensor) -> torch.Tensor:
    result = x - x.mean(0) if x.dtype is torch.float32 else x * 2
    x.add_(1)
    return result


def test_each_case_is_compared_in_the_function_s_own_precision(device: torch.device) -> None:
    graphed = gw.graph(mixes_few_in_float32, buckets=gw.Buckets(batch=[8]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (5, 2, 4, 1):
            x = rand(device, batch, WIDTH)
            same(graphed(x), mixes_few_in_float32(x))
        assert graphed.statistics.padded == 2  # 5 and 4
        again = gw.graph(mixes_few_in_float32, buckets=gw.Buckets(batch=[8]))
        with pytest.raises(gw.PaddingError, match="not eager's"):
            again.prepare([(rand(device, 5, WIDTH),)])


def test_what_writes_to_arguments_is_compared_in_its_own_precision(device: torch.device) -> None:
    graphed = gw.graph(writes_and_mixes_in_float32, buckets=gw.Buckets(batch=[8]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in (5, 2, 4, 1):
            x = rand(device, batch, WIDTH)
            given = x.clone()
            same(graphed(given), writes_and_mixes_in_float32(x))
            same(given, x)
        assert graphed.statistics.padded == 0
        again = gw.graph(writes_and_mixes_in_float32, buckets=gw.Buckets(batch=[8]))
        with pytest.raises(gw.PaddingError, match="with batch padded"):
            again.prepare([(rand(device, 5, WIDTH),)])


def few_by_python(x: torch.Tensor) -> torch.Tensor:
    return x - 1 if 11 <= len(x) <= 13 else x + 1


def one_by_text(x: torch.Tensor) -> torch.Tensor:
    return x - 1 if f"{x.shape[0]}" == "12" else x + 1


@TABLE("prepared", [False, True])
@TABLE("fn", [few_by_python, one_by_text])
def test_each_size_is_tried_where_branches_are_unknown(
    fn: Callable[..., Any], prepared: bool, device: torch.device
) -> None:
    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[32]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if prepared:
            with contextlib.suppress(gw.PaddingError):
                graphed.prepare([(rand(device, 8, WIDTH),)])
        for batch in range(1, 32):
            x = rand(device, batch, WIDTH)
            same(graphed(x), fn(x))
    assert graphed.statistics.eager["padding is not harmless"] <= 3
    assert graphed.statistics.padded >= 28


def test_a_size_is_tried_in_few_runs_where_branches_are_unknown(device: torch.device) -> None:
    graphed = gw.graph(lambda x: x * 2 if len(x) else x, buckets=gw.Buckets(batch=[32]))
    with torch.no_grad():
        graphed(rand(device, 5, WIDTH))
        runs = graphed.statistics.proof_runs
        graphed(rand(device, 11, WIDTH))
        assert graphed.statistics.proof_runs == runs + 2
        graphed(rand(device, 11, WIDTH))
        assert graphed.statistics.proof_runs == runs + 2


def test_integers_stay_in_their_columns() -> None:
    ids = torch.tensor([[1, 10, 100], [2, 20, 200], [3, 30, 300]])
    sampler = family_of(lambda x: x, (ids,)).sampler
    generator = torch.Generator().manual_seed(0)
    seen = [sampler.changed((3,), how, generator)[0] for how in sampler.changes()]
    assert any(not torch.equal(found, ids) for found in seen)
    assert all(
        set(found[:, c].tolist()) <= set(ids[:, c].tolist()) for found in seen for c in range(3)
    )


def family_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    buckets: Any = None,
    dynamic_shapes: Any = BATCH,
    pad: Any = None,
) -> ShapeFamily:
    sizes = gw.Buckets(**(buckets or {"batch": [4]}))
    selector = BucketSelector(
        fn, sizes, dynamic_shapes=dynamic_shapes, pad=pad, split=False, pool=MemoryPool()
    )
    family, _ = selector.family([], CallSignature.of(args, {}), args, {}, None)
    assert family is not None
    return family


def test_padding_is_proved_whatever_the_default_device_is() -> None:
    model, x = rows_model(torch.device("cpu")), torch.randn(3, WIDTH)
    ids, mask = torch.randint(0, 5, (3, WIDTH)), torch.rand(3, WIDTH) < 0.5

    def fn(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return model(x), ids + 1, ~mask, (x[0] - x[0] + 1) * 2

    with torch.no_grad(), torch.device("meta"):
        family = family_of(fn, (x, ids, mask), {"batch": [4, 8]}, BATCH * 3)
        assert family.prove((4,), [(1,), (3,)]) is None
        assert family.prove((8,), [(1,), (5,), (7,)]) is None
        refused = family_of(lambda x: x.mean(0), (x,), {"batch": [8]})
        assert "batch" in str(refused.prove((8,), [(3,)]))


def test_a_proof_that_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    class Slow(Prover):
        def start(self, *args: Any, **options: Any) -> Any:
            started.wait(60.0)
            return super().start(*args, **options)

    class Said(io.StringIO):
        def write(self, text: str) -> int:
            started.set()
            return super().write(text)

    monkeypatch.setattr(family, "Prover", Slow)
    monkeypatch.setattr(family, "SHORT_S", 0.0)
    monkeypatch.setattr(sys, "stderr", said := Said())
    gw.graph(lambda x: x * 2, buckets=gw.Buckets(batch=[4]))(torch.ones(3, 2))
    assert "proving that padding to 4 is safe" in said.getvalue()
