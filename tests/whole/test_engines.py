"""The other engines on whole models: each is measured and right, or says why it is not here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import graphwright as gw
from graphwright.report.result import Status

ENGINES = ("onnxruntime", "aot_inductor", "xla")


SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
MODELS = {"mlp": SLOW, "cnn": SLOW}
MODELS |= dict.fromkeys(("rnn", "conv_relu_pool", "minilm"), EXHAUSTIVE)


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MODELS.items()])
def test_an_engine_is_measured_or_says_why_not(name: str) -> None:
    from bench import cases

    model, inputs = cases.load(name, torch.device("cpu"))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    quick = mock.patch.multiple("graphwright.tuning.tuner", SCREENING_S=0.1, FINAL_S_EACH=0.1)
    with quick, torch.no_grad():
        tuned = gw.tune(model, args, kwargs, strategies=ENGINES, isolate=False, remember=False)
    for engine in ENGINES:
        row = tuned.report.row(engine)
        assert row is not None
        if engine == "xla" and row.status is Status.UNAVAILABLE:
            assert "not installed" in row.reason or "import" in row.reason
            assert row.remedy
            continue
        assert row.status in (Status.OK, Status.SLOWER), row.reason
        assert row.error is not None
        assert row.measurement is not None
