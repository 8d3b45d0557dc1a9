"""Calls with objects through fuse() and tune(): compilers see tensors, callers their objects."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.fusion import fused_module

SIZE = 8


@dataclasses.dataclass
class Cache:
    """Grows, counts, and has a buffer that is written in place."""

    rows: torch.Tensor
    table: torch.Tensor
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    y: torch.Tensor
    cache: Cache
    name: str = "result"


class Decoder(nn.Module):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.first = nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.second = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, cache: Cache, scale: float = 1.0) -> Result:
        y = torch.relu(self.first(x)) * scale
        y = self.scale * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
        cache.rows = torch.cat([cache.rows, y])
        cache.seen.append(y * 2)
        if self.in_place:
            cache.table.add_(y.sum(0))
        return Result(self.second(cache.rows).sum(0) + cache.table, cache)


def cache_on(device: torch.device, rows: int = 3) -> Cache:
    return Cache(torch.randn(rows, SIZE, device=device), torch.ones(SIZE, device=device))


def models(device: torch.device, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Decoder(**options).eval().to(device)
    return model, copy.deepcopy(model)


def same_as_eager(made: Any, its: nn.Module, x: torch.Tensor, cache: Cache, **options: Any) -> None:
    other = copy.deepcopy(cache)
    result, expected = made(x, cache, **options), its(x, other, **options)
    assert type(result) is Result
    assert result.cache is cache
    assert result.name == "result"
    assert len(cache.seen) == len(other.seen)
    for mine, theirs in zip(
        (result.y, cache.rows, cache.table, *cache.seen),
        (expected.y, other.rows, other.table, *other.seen),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert not mine.requires_grad


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small a model is never faster than eager with its objects taken apart."""
    monkeypatch.setattr(fused_module._Fusion, "_pays", lambda *given: True)


@pytest.mark.usefixtures("pays")
def test_fuse_takes_objects_apart(device: torch.device) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    fused = gw.fuse(model, (x, cache_on(device)))
    assert any(region.done for region in fused.regions)
    with torch.no_grad():
        for _ in range(3):
            same_as_eager(fused, its, x, cache_on(device))
        held = cache_on(device)
        fused(x, held)
        rows = held.rows.clone()
        fused(x * 3, cache_on(device))
        assert torch.equal(held.rows, rows)
    assert fused.calls == {"fused": 5}


@pytest.mark.usefixtures("pays")
def test_fuse_leaves_the_first_call_with_objects_of_other_shapes(device: torch.device) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    fused, cache = gw.fuse(model), cache_on(device)
    with torch.no_grad():
        for _ in range(6):  # It grows.
            same_as_eager(fused, its, x, cache)
        same_as_eager(fused, its, x, cache_on(device))
    first = "eager: the first call with objects of these shapes"
    assert fused.calls == {first: 6, "fused": 1}


def test_fuse_that_does_not_pay_alone_is_eager_and_fused_in_a_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module._Fusion, "_pays", lambda *given: False)
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    fused = gw.fuse(model, (x, cache_on(device)))
    with torch.no_grad():
        for _ in range(3):
            same_as_eager(fused, its, x, cache_on(device))
        assert fused.calls == {"eager: taking its objects apart takes longer than is won": 3}
        graphed = gw.graph(fused)
        for _ in range(3):
            same_as_eager(graphed, its, x, cache_on(device))
    assert fused.calls["fused, inside of a capture"] >= 1


@pytest.mark.usefixtures("pays")
def test_fuse_takes_few_kinds_with_objects(device: torch.device) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    fused = gw.fuse(model)
    with torch.no_grad():
        for _ in range(3):
            cache = cache_on(device)
            for _ in range(8):
                same_as_eager(fused, its, x, cache)
    assert fused.calls["fused"] == 2 * 4
    assert sum(fused.calls.values()) == 24


@pytest.mark.usefixtures("pays")
def test_a_graph_of_what_was_fused_takes_objects(device: torch.device) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    fused = gw.fuse(model, (x, cache_on(device)))
    graphed = gw.graph(fused)
    with torch.no_grad():
        for _ in range(3):
            same_as_eager(graphed, its, x, cache_on(device))
    assert graphed.statistics.hits == 2
    assert fused.calls["fused, inside of a capture"] >= 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("strategy", ["torchscript", "fused", "aot_autograd", "eager"])
def test_tune_takes_objects_apart(
    device: torch.device, strategy: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, its = models(device, in_place=in_place)
    x, cache = torch.randn(1, SIZE, device=device), cache_on(device)
    before = copy.deepcopy(cache)
    # So small a model is never faster than eager.
    monkeypatch.setattr("graphwright.tuning.tuner._ROUNDS_WITH_OBJECTS", 1)
    monkeypatch.setattr("graphwright.evaluation.measurement.Timer.once", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.evaluation.clock.seconds_of", lambda *given: 1.0)
    with torch.no_grad():
        tuned = gw.tune(
            model,
            (x, cache),
            strategies=[strategy],
            isolate=False,
            remember=False,
            progress=False,
        )
        row = tuned.report.row(strategy)
        assert row is not None
        if row.measurement is None:
            assert in_place
            assert strategy == "fused"
            assert "not the call's own" in row.reason
        assert torch.equal(cache.rows, before.rows)
        assert torch.equal(cache.table, before.table)
        assert not cache.seen
        for _ in range(3):
            same_as_eager(tuned, its, x, cache_on(device))
    assert tuned.module is model
    assert tuned.calls["tuned"] == 3


def chosen(model: nn.Module, x: torch.Tensor, cache: Cache, monkeypatch: Any) -> gw.TunedModule:
    """What torchscript is, however slow it is."""
    monkeypatch.setattr("graphwright.evaluation.measurement.Timer.once", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.evaluation.clock.seconds_of", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.tuning.selection._WORTH_IT", 0.0)
    monkeypatch.setattr("graphwright.report.report.Report.cost", cost_of_eager)
    with torch.no_grad():
        return gw.tune(
            model,
            (x, cache),
            strategies=["torchscript"],
            isolate=False,
            remember=False,
            progress=False,
        )


def cost_of_eager(report: Any, row: Any) -> float:
    return 2.0 if row.strategy == "eager" else 1.0


def test_other_calls_with_objects_go_to_the_model(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    tuned = chosen(model, x, cache_on(device), monkeypatch)
    assert tuned.report.chosen == "torchscript"
    with torch.no_grad():
        same_as_eager(tuned, its, x, cache_on(device))
        same_as_eager(tuned, its, x, cache_on(device), scale=2.0)
        same_as_eager(tuned, its, x, cache_on(device, rows=4))
        counting = cache_on(device)
        counting.steps = 1
        same_as_eager(tuned, its, x, counting)
        model.first.weight.mul_(2)
        its.first.weight.mul_(2)
        same_as_eager(tuned, its, x, cache_on(device))
    assert tuned.calls["tuned"] == 1 + (not tuned._choice.watch.values)
    assert sum(tuned.calls.values()) == 5
    assert "strategy: torchscript" in tuned.explain()


def test_eager_is_chosen_where_taking_apart_costs_more_than_is_won(device: torch.device) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    with torch.no_grad():
        tuned = gw.tune(
            model,
            (x, cache_on(device)),
            strategies=["torchscript"],
            isolate=False,
            remember=False,
            progress=False,
        )
        assert tuned.report.chosen == "eager"
        same_as_eager(tuned, its, x, cache_on(device))
    assert tuned.calls == {"tuned": 1}


class Reads(nn.Module):
    """What it returns and does depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, cache: Cache) -> Any:
        y = self.linear(x)
        total = float(x.sum())
        cache.steps = int(total > 0)
        if total > 0:
            cache.seen.append(y)
        else:
            cache.rows = y
        return torch.relu(y) * 2, total


@pytest.mark.parametrize("strategy", ["torchscript", "fused", "aot_autograd", "inductor"])
def test_what_depends_on_a_value_is_that_of_each_call(
    device: torch.device, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.evaluation.measurement.Timer.once", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.evaluation.clock.seconds_of", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.report.report.Report.cost", cost_of_eager)
    monkeypatch.setattr("graphwright.tuning.selection._WORTH_IT", 0.0)
    torch.manual_seed(0)
    model = Reads().eval().to(device)
    x = torch.ones(2, SIZE, device=device)
    with torch.no_grad():
        tuned = gw.tune(
            model,
            (x, cache_on(device)),
            strategies=[strategy],
            isolate=False,
            remember=False,
            progress=False,
        )
        for scale in (1, -1, 2):
            cache, other = (cache_on(device) for _ in range(2))
            result, expected = tuned(x * scale, cache), model(x * scale, other)
            assert result[1] == expected[1]
            assert cache.steps == other.steps
            assert len(cache.seen) == len(other.seen)
            torch.testing.assert_close(result[0], expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(cache.rows.shape, other.rows.shape)
    if strategy in ("torchscript", "fused"):
        assert tuned.report.chosen == "eager"


def test_a_remembered_choice_may_be_eager_with_objects(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, its = models(device)
    x = torch.randn(1, SIZE, device=device)
    monkeypatch.setattr("graphwright.tuning.selection._WORTH_IT", 0.0)
    monkeypatch.setattr("graphwright.report.report.Report.cost", cost_of_eager)
    # Whatever the machine is doing: taken apart, its calls take twice as long as eager's.
    monkeypatch.setattr("graphwright.tuning.tuner.seconds_with_objects", lambda *given: (2.0, 1.0))
    for _ in range(3):
        with torch.no_grad():
            tuned = gw.tune(
                model,
                (x, cache_on(device)),
                strategies=["torchscript"],
                isolate=False,
                progress=False,
            )
            same_as_eager(tuned, its, x, cache_on(device))
        assert tuned.report.chosen == "eager"
        assert "with the objects taken apart" in tuned.report.reason


class Starts(Decoder):
    """Takes no cache in the first call of a text."""

    def forward(self, x: torch.Tensor, cache: Cache | None = None, scale: float = 1.0) -> Any:
        if cache is None:
            return Result(self.second(x), Cache(x * 2, x[0] + 1, [x]))
        return super().forward(x, cache, scale)


@pytest.mark.parametrize("strategy", ["torchscript", "fused", "eager"])
def test_tune_takes_samples_with_objects(
    device: torch.device, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.evaluation.measurement.Timer.once", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.evaluation.clock.seconds_of", lambda *given: 1.0)
    monkeypatch.setattr("graphwright.report.report.Report.cost", cost_of_eager)
    monkeypatch.setattr("graphwright.tuning.selection._WORTH_IT", 0.0)
    torch.manual_seed(0)
    model = Starts().eval().to(device)
    its = copy.deepcopy(model)
    x, counting = torch.randn(1, SIZE, device=device), cache_on(device)
    counting.steps = 1  # Of the same shapes as the first.
    with torch.no_grad():
        tuned = gw.tune(
            model,
            samples=[(x,), (x, cache_on(device)), (x, cache_on(device, 5)), (x, counting)],
            weights=[1, 2, 2, 1],
            strategies=[strategy],
            isolate=False,
            remember=False,
            progress=False,
        )
        assert tuned.report.chosen == strategy
        assert [shape.weight * 6 for shape in tuned.report.shapes] == pytest.approx([1, 2, 2, 1])
        for rows in (3, 5, 3):
            same_as_eager(tuned, its, x * rows, cache_on(device, rows))
        same_as_eager(tuned, its, x, copy.deepcopy(counting))
        mine, theirs = tuned(x * 3), its(x * 3)
        assert type(mine.cache) is Cache
        torch.testing.assert_close(mine.y, theirs.y, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.cache.seen, theirs.cache.seen)
        assert tuned.calls == {"tuned": 5}
        if strategy != "eager":
            with pytest.warns(RuntimeWarning, match="another signature"):
                same_as_eager(tuned, its, x, cache_on(device, 4))
            assert tuned.calls["eager: another signature"] == 1


def test_samples_with_objects_of_one_kind_are_refused(device: torch.device) -> None:
    model, _ = models(device)
    x = torch.randn(1, SIZE, device=device)
    with pytest.raises(gw.OptionError, match="of the same kind"):
        gw.tune(model, samples=[(x, cache_on(device)), (x * 2, cache_on(device))])
