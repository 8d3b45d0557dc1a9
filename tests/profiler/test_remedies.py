"""What remedies can give, predicted from planted figures."""

from __future__ import annotations

import html
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_verdict import CPU, GPU, US, cpu, gpu, operation, threads
from torch import nn

import graphwright as gw
from graphwright.evaluation.measurement import Measurement
from graphwright.profiler.comparison import compared
from graphwright.profiler.remedies import Known, Remedy, for_cpu, for_gpu, removable_by_fusion
from graphwright.profiler.roofs import Roofs
from graphwright.profiler.trials import FormTrial
from graphwright.profiler.verdict import Cause, CpuFigures
from graphwright.report.result import Results, Row, Status
from graphwright.tuning import tuner


def known(*operations: object, roofs: Roofs = GPU, **others: object) -> Known:
    seconds = others.pop("seconds", {})
    trials = others.pop("trials", {})
    return Known(operations, seconds, roofs, trials, **others)  # type: ignore[arg-type]


def named(remedies: list[Remedy]) -> dict[str, Remedy]:
    return {remedy.name: remedy for remedy in remedies}


def test_a_graph_takes_the_device_s_time_and_one_launch() -> None:
    figures = gpu(1000, 980, 300)
    found = named(for_gpu(figures, known(queued_s=300 * US, kernels=100, inputs=[1 << 14])))
    graph = found["graph"]
    assert graph.likely is not None
    assert graph.low < graph.likely < graph.high
    assert graph.high == pytest.approx(1000 / (300 + 12))


def test_reads_leave_no_single_graph() -> None:
    graph = named(for_gpu(gpu(1000, 980, 300), known(reads=3)))["graph"]
    assert graph.likely is None
    assert "3 places" in graph.why


def test_ranges_are_no_wider_than_promised() -> None:
    chain = [operation(), operation(), operation(flops=10**9, pointwise=False), operation()]
    seconds = dict(enumerate([200 * US, 200 * US, 100 * US, 400 * US]))
    trials = {"bf16": FormTrial(100 * US, 20 * US, 0.0)}
    figures = gpu(1000, 100, 900, parts={Cause.MEMORY: 800 * US, Cause.ARITHMETIC: 100 * US})
    remedies = for_gpu(
        figures, known(*chain, seconds=seconds, trials=trials, queued_s=900 * US, kernels=4)
    )
    for name in ("fusion", "bf16"):
        remedy = named(remedies)[name]
        assert 1 < remedy.low < remedy.high <= 1.5 * remedy.low
        assert remedy.under_graph is not None
        assert remedy.under_graph[1] <= 1.5 * remedy.under_graph[0]


def test_what_the_host_takes_is_not_gained_on_the_device() -> None:
    """A launch-bound call is no faster with faster kernels, but its graph is."""
    trials = {"bf16": FormTrial(250 * US, 50 * US, 0.0)}
    remedy = named(for_gpu(gpu(1000, 990, 300), known(trials=trials, queued_s=300 * US)))["bf16"]
    assert remedy.high == pytest.approx(1000 / 990)
    assert remedy.under_graph is not None
    assert remedy.under_graph[1] > 2


def test_chains_end_at_products() -> None:
    add, product = operation(), operation(flops=1, pointwise=False)
    seconds = dict.fromkeys(range(5), 10 * US)
    saved, kernels = removable_by_fusion(known(add, add, product, seconds=seconds))
    assert saved == pytest.approx(10 * US + 0.03 * 10 * US)
    assert kernels == 1
    # Behind a product, a part of the chain goes into it.
    saved, kernels = removable_by_fusion(known(product, add, add, seconds=seconds))
    assert saved == pytest.approx(12.5 * US + 0.03 * 10 * US)
    assert kernels == pytest.approx(1.25)


def test_a_batch_norm_behind_a_convolution_is_folded() -> None:
    convolution = operation(name="aten::convolution", flops=1, pointwise=False)
    norm, relu = operation(name="aten::cudnn_batch_norm"), operation()
    seconds = dict.fromkeys(range(3), 10 * US)
    saved, kernels = removable_by_fusion(known(convolution, norm, relu, seconds=seconds))
    assert saved == pytest.approx((10 + 5) * US)
    assert kernels == pytest.approx(1.5)
    saved, _ = removable_by_fusion(known(norm, convolution, seconds=seconds))
    assert saved == 0


def test_a_graph_of_kernels_that_follow_each_other_sooner_is_faster() -> None:
    roofs = replace(GPU, node_s=1 * US)
    many = known(queued_s=300 * US, kernels=100, roofs=roofs)
    likely = named(for_gpu(gpu(1000, 980, 300), many))["graph"].likely
    slower = named(for_gpu(gpu(1000, 980, 300), replace(many, roofs=GPU)))["graph"].likely
    assert likely is not None
    assert slower is not None
    assert likely > slower


def test_bf16_is_what_the_call_takes_in_it() -> None:
    figures = gpu(1000, 990, 300)
    given = known(queued_s=300 * US, bf16_s=100 * US, kernels=10)
    remedy = named(for_gpu(figures, given))["bf16"]
    assert remedy.under_graph is not None
    low, high = remedy.under_graph
    assert low < (300 + 12) / (100 + 12) < high <= 1.5 * low
    assert remedy.high == pytest.approx(1000 / 990)  # The host is no faster.
    assert "measured" in remedy.why


def test_pinned_transfers_gain_what_copies_take() -> None:
    figures = gpu(1000, 990, 950, parts={Cause.TRANSFERS: 800 * US, Cause.MEMORY: 150 * US})
    remedy = named(for_gpu(figures, known()))["pinned, overlapped transfers"]
    assert remedy.low == pytest.approx(1000 / (200 + 160))
    assert remedy.high == pytest.approx(1000 / 200)


def test_a_larger_batch_gains_at_most_twofold() -> None:
    small = named(for_gpu(gpu(1000, 990, 100, parts={Cause.CHAIN: 100 * US}), known()))
    assert small["twice the batch"].high == pytest.approx(2)
    full = named(for_gpu(gpu(1000, 100, 990), known()))["twice the batch"]
    assert full.high < 1.25


def test_threads_are_measured() -> None:
    measured = threads(1, *[{1: 2.0, 2: 1.0}] * 9)
    figures = CpuFigures(2.0, parts={Cause.MEMORY: 2.0}, threads=measured)
    remedy = named(for_cpu(figures, known(roofs=CPU)))["threads"]
    assert (remedy.low, remedy.likely, remedy.high) == (2, 2, 2)


def test_what_does_not_apply_says_why() -> None:
    found = named(for_cpu(cpu(1000, dispatch_s=900, python_s=100), known(roofs=CPU)))
    assert not found["channels_last"].applies
    assert "no convolutions" in found["channels_last"].why
    assert found["bf16"].why == "no products in float32"
    assert not found["threads"].applies


def test_products_that_do_not_run_by_themselves_are_named() -> None:
    fused = operation(name="aten::_transformer_encoder_layer_fwd", flops=10**6, pointwise=False)
    found = named(for_cpu(cpu(1000, arithmetic=900), known(fused, roofs=CPU)))
    assert found["bf16"].why == (
        "products in float32 that do not run by themselves in bf16: "
        "aten::_transformer_encoder_layer_fwd"
    )
    fused = operation(name="aten::_cudnn_rnn", flops=10**6, pointwise=False)
    why = named(for_gpu(gpu(1000, 300, 900), known(fused)))["TF32"].why
    assert why == "products in float32 that do not run by themselves in TF32: aten::_cudnn_rnn"


def test_nothing_is_merged_with_products_inside_of_an_operator() -> None:
    def saved(name: str) -> float:
        product = operation(name=name, flops=10**6, pointwise=False)
        seconds = dict(enumerate([100 * US, 40 * US]))
        return removable_by_fusion(known(product, operation(), seconds=seconds))[0]

    assert saved("aten::addmm") > 0
    assert saved("aten::_transformer_encoder_layer_fwd") == 0


def measured(seconds: float) -> Measurement:
    return Measurement(((seconds,) * 3,) * 5, (seconds,) * 5)


def tuned(**others: float) -> Results:
    """A report in which eager takes 1 s and strategies take what is said."""
    times = {"eager": 1.0, **others}
    rows = [
        Row(name, Status.OK, screening=measured(spent), baseline=measured(1.0))
        for name, spent in times.items()
    ]
    return Results("Net", [], "latency", rows, {})


def test_predictions_stand_beside_what_tuning_measured() -> None:
    remedies = [
        Remedy("graph", 3.0, 5.0, ""),
        Remedy("bf16", 1.0, 1.1, "", under_graph=(1.5, 2.0)),
        Remedy("twice the batch", 1.0, 2.0, ""),
        Remedy("fusion", 1.0, 1.2, "", under_graph=(1.1, 1.3)),
    ]
    report = tuned(**{"eager+graph": 0.25, "bf16": 0.5, "bf16+graph": 0.1})
    graph, alone, graphed = compared(remedies, report)
    assert (graph.strategy, graph.measured, graph.inside) == ("eager+graph", 4.0, True)
    assert (alone.beside, alone.measured, alone.inside) == ("eager", 2.0, False)
    assert (graphed.beside, graphed.measured, graphed.inside) == ("eager+graph", 2.5, False)
    assert "3.00–5.00× predicted, 4.00× measured, inside" in str(graph)


def test_tune_says_what_was_predicted_beside_what_was_measured() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    tuned = gw.tune(
        model,
        (torch.randn(4, 16),),
        strategies=["fused"],
        isolate=False,
        remember=False,
        progress=False,
        profile=True,
    )
    (prediction,) = tuned.report.predictions
    assert (prediction.remedy, prediction.strategy) == ("fusion", "fused")
    assert prediction.measured > 0
    assert f"Profile: {prediction}." in str(tuned.report)
    again = gw.Report.from_json(tuned.report.to_json())
    assert again.predictions == tuned.report.predictions
    assert f"Profile: {prediction}." in html.unescape(again.to_html())


def test_what_cannot_be_profiled_is_tuned_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise gw.GraphwrightError("Another profiler runs.")

    monkeypatch.setattr(tuner, "profile_of", refuses)
    options: dict[str, Any] = {"isolate": False, "remember": False, "progress": False}
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    tuned = gw.tune(model, (x,), strategies=["fused"], profile=True, **options)
    assert tuned.report.predictions == []
    assert "Nothing is predicted: Another profiler runs." in tuned.report.notes
    with pytest.raises(gw.OptionError, match="foreground"):
        gw.tune(model, (x,), profile=True, background=True)
