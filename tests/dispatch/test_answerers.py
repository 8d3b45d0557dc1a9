"""Serving and the command line ask one protocol, whichever function made what answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_artifacts import Rows, tuned_with
from torch import nn

import graphwright as gw
from graphwright.dispatch.answerer import SizesAnswered, answerer_of

QUICK: dict[str, Any] = {"strategies": ["torchscript"], "isolate": False, "remember": False}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def _sample() -> tuple[torch.Tensor]:
    return (torch.randn(4, 8),)


def _function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def _loaded(model: nn.Module, folder: Path) -> Any:
    gw.save(gw.tune(model, _sample(), **QUICK), folder / "made.gw")
    return gw.load(folder / "made.gw", model, trust=True)  # Any may be chosen.


MAKERS: dict[str, Callable[[Any, Path], Any]] = {
    "graph": lambda model, _: gw.graph(model),
    "graph of a function": lambda model, _: gw.graph(_function),
    "buckets": lambda model, _: gw.graph(model, buckets=gw.Buckets(batch=[2, 4])),
    "fuse": lambda model, _: gw.fuse(model, _sample()),
    "tune": lambda model, _: gw.tune(model, _sample(), **QUICK),
    "eager chosen": lambda model, _: gw.tune(
        model, _sample(), **{**QUICK, "strategies": ["eager"]}
    ),
    "load": _loaded,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_each_maker_s_answerer_speaks_the_protocol(maker: str, tmp_path: Path) -> None:
    model = _model()
    made = MAKERS[maker](model, tmp_path)
    answerer = answerer_of(made)
    assert answerer is not None
    (x,) = _sample()
    before = sum(answerer.counts().values())
    with torch.no_grad():
        result = made(x)
        reference = answerer.reference()
        assert reference is not None
        torch.testing.assert_close(result, reference(x), rtol=1e-4, atol=1e-5)
        odd = torch.randn(3, 8)
        torch.testing.assert_close(made(odd), reference(odd), rtol=1e-4, atol=1e-5)
    assert sum(answerer.counts().values()) == before + 2
    # What its looks cost is measured anew each time.
    assert answerer.explain().splitlines()[0] == made.explain().splitlines()[0]
    assert isinstance(answerer.sizes(), SizesAnswered)


def test_sizes_are_those_of_the_maker() -> None:
    model = _model()

    def sizes(made: Any) -> SizesAnswered:
        answerer = answerer_of(made)
        assert answerer is not None
        return answerer.sizes()

    assert sizes(gw.graph(model)) == SizesAnswered()
    buckets = gw.Buckets(batch=[2, 4])
    assert sizes(gw.graph(model, buckets=buckets)).buckets == buckets
    assert sizes(gw.fuse(model, _sample())).all_sizes
    tuned = sizes(gw.tune(model, _sample(), **QUICK))
    assert len(tuned.samples) == 1
    assert tuned.samples[0].args[0].shape == (4, 8)


def test_a_file_without_its_model_has_no_reference(tmp_path: Path) -> None:
    x = torch.ones(2, 16)
    gw.save(tuned_with("fused", Rows().eval(), (x,)), tmp_path / "made.gw")
    answerer = answerer_of(gw.load(tmp_path / "made.gw"))
    assert answerer is not None
    assert answerer.reference() is None
    assert answerer.sizes().argument_names == ("x",)


def test_a_search_in_the_background_counts_from_its_beginning() -> None:
    with gw.tune(_model(), _sample(), background=True, strategies=["torchscript"]) as made:
        answerer = answerer_of(made)
        assert answerer is not None
        made(*_sample())
        made.wait(60)
        made(*_sample())
        assert sum(answerer.counts().values()) == 2
        assert "strategy" in answerer.explain()


@pytest.mark.parametrize("other", [_function, nn.Linear(2, 2), None, 3])
def test_nothing_else_has_an_answerer(other: Any) -> None:
    assert answerer_of(other) is None
