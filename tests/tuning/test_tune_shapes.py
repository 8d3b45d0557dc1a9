"""tune() over several calls, and over buckets of sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chosen import choosing
from planted import Planted, Roundabout, Small, directly, right_but_slower
from shares import share
from torch import nn
from torch.export import Dim

import graphwright as gw
from graphwright.evaluation.measurement import Measurement
from graphwright.report.markdown import to_markdown
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.shapes.dimensions import within
from graphwright.tuning.bucketed_request import BucketedRequest
from graphwright.tuning.request import Request
from graphwright.tuning.tuner import Tuning


def quick_below(rows: int) -> Callable[[nn.Module], Callable[..., Any]]:
    """Quick for few rows, slower than eager for many."""

    def make(model: nn.Module) -> Callable[..., Any]:
        quick, slow = directly(model), right_but_slower(model)
        return lambda x: quick(x) if len(x) < rows else slow(x)

    return make


SAMPLES = [(torch.randn(2, 16),), (torch.randn(8, 16),)]


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_sample_is_measured_and_answered_by_the_choice(isolate: bool) -> None:
    model = Roundabout().eval()
    strategies = [Planted("quick", directly)]
    tuned = gw.tune(model, samples=SAMPLES, strategies=strategies, isolate=isolate)
    report = tuned.report
    assert report.chosen == "quick"
    names = [shape.name for shape in report.shapes]
    assert names == ["args[0]: 2×16 float32", "args[0]: 8×16 float32"]
    for row in report.rows:
        assert list(row.by_shape) == names
        assert all(part.measurement is not None for part in row.by_shape.values())
    for x in (*SAMPLES[0], *SAMPLES[1], torch.randn(3, 16)):
        torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.calls == {"tuned": 2, "eager: another signature": 1}


@pytest.mark.parametrize(("weights", "chosen"), [((99, 1), "mixed"), ((1, 99), "eager")])
def test_the_choice_is_the_best_by_the_weights(weights: tuple[int, int], chosen: str) -> None:
    model = Roundabout().eval()
    strategies = [Planted("mixed", quick_below(4))]
    report = gw.tune(model, samples=SAMPLES, weights=weights, strategies=strategies).report
    assert report.chosen == chosen
    assert [shape.weight for shape in report.shapes] == [w / 100 for w in weights]


def test_the_mean_is_that_of_the_shapes_by_their_weights() -> None:
    report = gw.tune(Small().eval(), samples=SAMPLES, weights=[3, 1], strategies=[]).report
    eager = report.row("eager")
    assert eager is not None
    assert eager.screening is not None
    parts = [part.screening.rounds("latency") for part in eager.by_shape.values() if part.screening]
    for turn, mean in enumerate(eager.screening.rounds("latency")):
        wanted = 0.75 * parts[0][turn] + 0.25 * parts[1][turn]
        assert mean == pytest.approx(wanted, abs=1e-10)


def test_a_candidate_that_is_wrong_for_one_shape_is_out_and_names_it() -> None:
    def wrong_for_many(model: nn.Module) -> Callable[..., Any]:
        quick = directly(model)
        return lambda x: quick(x) if len(x) < 4 else quick(x) * 1.01

    strategies = [Planted("wrong", wrong_for_many)]
    report = gw.tune(Roundabout().eval(), samples=SAMPLES, strategies=strategies).report
    row = report.row("wrong")
    assert row is not None
    assert row.status is Status.WRONG
    assert row.reason.startswith("args[0]: 8×16 float32: ")
    assert report.chosen == "eager"


def test_a_report_of_shapes_is_shown_and_read_back() -> None:
    tuned = gw.tune(Roundabout().eval(), samples=SAMPLES, strategies=[Planted("quick", directly)])
    again = Report.from_json(tuned.report.to_json())
    assert again == tuned.report
    for text in (str(again), to_markdown(again)):
        assert "args[0]: 8×16 float32" in text
        assert "chosen: quick" in text


BUCKETS = gw.Buckets(batch=[2, 8])


def test_calls_between_the_buckets_are_padded(device: torch.device) -> None:
    model = Roundabout().eval().to(device)
    x = torch.randn(4, 16, device=device)
    tuned = gw.tune(model, (x,), buckets=BUCKETS, strategies=[Planted("quick", directly)])
    assert tuned.report.chosen == "quick"
    assert [shape.name for shape in tuned.report.shapes] == ["batch=2", "batch=8"]
    for n in (1, 2, 3, 3, 5, 8):
        x = torch.randn(n, 16, device=device)
        torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.calls == {"tuned": 2, "tuned, padded to a bucket": 4}
    x = torch.randn(9, 16, device=device)
    torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.calls["eager: no bucket"] == 1
    assert "above the largest bucket" in tuned.explain()
    model.load_state_dict(Roundabout().state_dict(), assign=True)
    model.to(device)
    torch.testing.assert_close(tuned(x[:3]), model(x[:3]).detach())
    assert tuned.calls["eager: the module changed"] == 1


def test_what_depends_on_the_padding_is_not_padded() -> None:
    class Mean(Roundabout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - x.mean(0)

    def quick(model: nn.Module) -> Callable[..., Any]:
        return torch.no_grad()(lambda x: Small.forward(model, x) - x.mean(0))  # type: ignore[arg-type]  # a Small

    model = Mean().eval()
    tuned = gw.tune(
        model, (torch.randn(4, 16),), buckets=BUCKETS, strategies=[Planted("quick", quick)]
    )
    assert tuned.report.chosen == "quick"
    assert any("batch padded from" in note for note in tuned.report.notes)
    for n in (2, 3):
        x = torch.randn(n, 16)
        torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.calls == {"tuned": 1, "eager: no bucket": 1}


def test_another_kind_of_call_is_not_answered_by_a_bucket() -> None:
    model = Roundabout().eval().double()
    tuned = gw.tune(
        model,
        (torch.randn(4, 16).double(),),
        buckets=BUCKETS,
        strategies=[Planted("quick", directly)],
    )
    x = torch.randn(16, 3).double().T
    torch.testing.assert_close(tuned(x), model(x).detach())
    grad = torch.randn(3, 16).double().requires_grad_()
    assert tuned(grad).requires_grad
    with pytest.raises(RuntimeError):
        tuned(torch.randn(3, 16))
    assert not any(way.startswith("tuned") for way in tuned.calls)


class Scaled(nn.Module):
    """Depends on the padding, or not, as an attribute, a mode or its weights say."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0
        self.norm = nn.BatchNorm1d(16)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.share * x.sum(0) + len(x) * self.shift


def between(strategy: str = "eager:no_grad") -> tuple[gw.TunedModule, Scaled]:
    """A model that was tuned for two buckets, when nothing of it depended on the padding."""
    model = Scaled().eval()
    with choosing(strategy):
        tuned = gw.tune(model, (torch.randn(4, 16),), buckets=BUCKETS, strategies=[strategy])
    assert tuned.report.chosen == strategy
    return tuned, model


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "attribute": lambda m: setattr(m, "share", 1.0),
    "mode": lambda m: m.train(),
    "weights": lambda m: m.load_state_dict({**m.state_dict(), "shift": torch.ones(16)}),
    "hook": lambda m: m.register_forward_hook(lambda m, args, y: y + args[0].sum(0)),
    "submodule": lambda m: setattr(m, "norm", nn.BatchNorm1d(16)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", share(["eager:no_grad", "torchscript"]))
def test_no_call_is_padded_after_the_module_changed(strategy: str, change: str) -> None:
    tuned, model = between(strategy)
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(tuned(x), model(x))
        assert tuned.calls == {"tuned, padded to a bucket": 1}
        CHANGES[change](model)
        means = model.norm.running_mean.clone()
        mine = tuned(x)
        moved = model.norm.running_mean - means
        model.norm.running_mean.copy_(means)
        torch.testing.assert_close(mine, model(x))
        torch.testing.assert_close(model.norm.running_mean - means, moved)
    assert tuned.calls["eager: the module changed"] == 1


def test_what_was_learned_of_another_state_is_not_used_when_the_first_returns() -> None:
    tuned, model = between()
    x = torch.randn(3, 16)
    model.share = 1.0
    with torch.no_grad():
        tuned(x)
        model.share = 0.0
        torch.testing.assert_close(tuned(x), model(x))
        model.share = 2.0
        torch.testing.assert_close(tuned(x), model(x))


def test_a_winner_that_fails_on_a_padded_call_makes_way_for_eager() -> None:
    class Wary(Roundabout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def quick(model: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            if not x[-1].any():
                raise RuntimeError("planted: a row of zeros")
            return directly(model)(x)

        return call

    model = Wary().eval()
    tuned = gw.tune(
        model, (torch.randn(4, 16),), buckets=BUCKETS, strategies=[Planted("quick", quick)]
    )
    x = torch.randn(3, 16)
    torch.testing.assert_close(tuned(x), model(x).detach())
    assert tuned.calls == {"eager: no bucket": 1}
    assert "row of zeros" in tuned.explain()


def test_other_plain_values_start_no_proof() -> None:
    calls = []

    class Steps(nn.Module):
        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            calls.append(step)
            return x * step

    model = Steps().eval()
    tuned = gw.tune(
        model, (torch.randn(4, 16), 1), buckets=BUCKETS, strategies=[Planted("quick", no_grad)]
    )
    calls.clear()
    for step in range(2, 8):
        torch.testing.assert_close(tuned(torch.ones(3, 16), step), torch.full((3, 16), float(step)))
    assert len(calls) == 6


def no_grad(model: nn.Module) -> Callable[..., Any]:
    return torch.no_grad()(model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": []}, "samples is"),
        ({"samples": [(torch.ones(1),)], "args": (torch.ones(1),)}, "as well as"),
        ({"samples": [torch.ones(1)]}, "written as a tuple"),
        ({"samples": SAMPLES, "weights": [1]}, "weights is"),
        ({"samples": SAMPLES, "weights": [1, -1]}, "weights is"),
        ({"args": SAMPLES[0], "weights": [1]}, "weights"),
        ({"samples": [SAMPLES[0], SAMPLES[0]]}, "same kind"),
        ({"samples": SAMPLES, "buckets": BUCKETS}, "not both"),
        ({"args": SAMPLES[0], "buckets": BUCKETS, "weights": [1, 2]}, "each bucket"),
        ({"args": SAMPLES[0], "buckets": BUCKETS, "weights": {2: 1}}, "each bucket"),
        ({"samples": SAMPLES, "weights": {2: 1, 8: 1}}, "buckets"),
        ({"args": SAMPLES[0], "dynamic_shapes": ({0: "batch"},)}, "no buckets"),
    ],
)
def test_bad_samples_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(gw.OptionError, match=text):
        gw.tune(Small().eval(), **options)


def test_a_range_asks_no_more_than_the_buckets_do() -> None:
    """Positions for 64 tokens are enough for buckets of 32, whatever `length` may be."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("positions", torch.randn(64, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + self.positions[: x.shape[1]])

    model = Positions().eval()
    with choosing("onnxruntime"):
        tuned = gw.tune(
            model,
            (torch.randn(4, 16, 8),),
            dynamic_shapes=({0: "batch", 1: "length"},),
            buckets=gw.Buckets(batch=[1, 4], length=[16, 32]),
            strategies=["onnxruntime"],
            isolate=False,
            remember=False,
            progress=False,
        )
    assert [(each.low, each.high) for each in tuned._choice.origin.ranges] == [(1, 4), (16, 32)]
    for batch, length in ((1, 17), (3, 31), (4, 32)):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(tuned(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert tuned.calls == {"tuned": 3}


def test_dimensions_within_the_ends_of_buckets() -> None:
    tree = {"x": {0: "batch", 1: 2 * Dim("length", min=2) + 1}, "y": (None, Dim("other"), "one")}
    found = within(tree, {"batch": (1, 8), "length": (16, 32), "one": (4, 4)})
    assert (found["x"][0].min, found["x"][0].max) == (1, 8)
    assert (found["x"][1].min, found["x"][1].max) == (33, 65)
    assert found["y"][0] is None
    assert found["y"][1] is tree["y"][1]
    assert found["y"][2] is None


def test_the_call_that_repeats_a_strategy_has_the_same_buckets() -> None:
    call = Request.of(
        nn.Linear(4, 4).eval(),
        (torch.randn(2, 4),),
        None,
        buckets=gw.Buckets(n=[1, 2]),
        dynamic_shapes=({0: Dim("n", max=2)},),
    ).repeat_call("eager")
    assert call == (
        "graphwright.tune(model, args, buckets=graphwright.Buckets(n=[1, 2]), "
        "dynamic_shapes=dynamic_shapes, strategies=['eager'], remember=False)"
    )


@pytest.mark.parametrize(
    ("buckets", "least"),
    [
        (gw.Buckets(n=[120, 160]), 39),  # All: small sizes are not counted.
        (gw.Buckets.from_points(["n", "m"], [(1, 64), (16, 4)]), 100),
    ],
)
def test_a_range_is_verified_between_its_ends(buckets: gw.Buckets, least: int) -> None:
    dims = [Dim(name, max=200) for name in buckets.names]
    call = BucketedRequest(
        nn.Identity(),
        (torch.randn(*[5] * len(dims)),),
        {},
        buckets,
        (dict(enumerate(dims)),),
        None,
    )
    found = [tuple(one.args[0].shape) for one in call.calls_between()]
    assert len(found) == len({*found}) >= least
    assert not {*found} & {*buckets.points}
    assert len(dims) == 1 or {(1, 4), (16, 64)} <= {*found}  # No bucket holds the latter.


@pytest.mark.parametrize("budget_s", [100.0, None])
def test_padding_is_proved_before_the_search_where_time_is_limited(
    budget_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof takes as long as it takes: after the search it would exceed the budget."""
    rows: list[int] = []
    monkeypatch.setattr(
        BucketedRequest, "unproved", lambda self: rows.append(len(tuning.report.rows))
    )
    tuning = Tuning(
        nn.Linear(4, 4).eval(),
        (torch.randn(4, 4),),
        buckets=gw.Buckets(batch=[2, 4]),
        strategies=["eager:no_grad"],
        budget_s=budget_s,
        isolate=False,
        remember=False,
    )
    tuning.run()
    assert (0 in rows) is (budget_s is not None)


def test_calls_with_objects_are_timed_less_often_when_the_budget_is_spent() -> None:
    tuning = Tuning(nn.Linear(4, 4).eval(), (torch.randn(4, 4),), budget_s=100)
    tuning.report.rows.append(Row("eager", Status.OK, screening=Measurement(((1.0,) * 4,) * 6, ())))
    counts = []
    for spent_s in (0, 80, 99):
        tuning._started = time.monotonic() - spent_s
        counts.append(tuning._rounds_with_objects())
    assert counts[0] == 21
    assert counts[1] in (9, 10)
    assert counts[2] == 3
