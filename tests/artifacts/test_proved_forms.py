"""Plain keywords that are proved to make no difference are answered by what was tuned."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from graphwright.artifacts import proved_forms
from graphwright.artifacts.tuned_module import TunedModule
from graphwright.calls.signature import CallSignature
from graphwright.calls.watch import ModuleWatch
from graphwright.report.report import Report

REPORT = Report("Model", [], "latency", [], {}, chosen="planted", reason="planted was chosen.")
SMALL = {"vocab_size": 99, "max_position_embeddings": 32}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SEEN: list[Any] = []


def tuned_for(model: nn.Module, **kwargs: Any) -> TunedModule:
    def winner(*args: Any, **named: Any) -> Any:
        assert not args
        assert named.keys() == kwargs.keys()  # In the form that was tuned.
        with torch.no_grad():
            return model(*args, **named)

    watch = ModuleWatch(model, values=False)
    return TunedModule(model, REPORT, [(CallSignature.of((), kwargs), winner)], watch)


def features(mask: bool = True) -> dict[str, torch.Tensor]:
    found = {"input_ids": torch.randint(0, 99, (2, 8))}
    if mask:
        found["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    return found


@pytest.fixture(params=["Bert", "DistilBert"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    own = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    sizes = own if request.param == "DistilBert" else BERT | {"intermediate_size": 64}
    config = getattr(transformers, f"{request.param}Config")(**SMALL, **sizes)
    made: nn.Module = getattr(transformers, f"{request.param}Model")(config).eval()
    return made


def test_encode_is_answered(model: nn.Module) -> None:
    tuned = tuned_for(model, **features())
    for _ in range(3):
        given = features()
        with torch.no_grad():
            expected = model(**given, return_dict=True)
            result = tuned(**given, return_dict=True)
        assert type(result) is type(expected)
        torch.testing.assert_close(result["last_hidden_state"], expected["last_hidden_state"])
    assert tuned.calls == {"tuned": 3}


def test_other_results_are_not_answered(model: nn.Module) -> None:
    given = features()
    tuned = tuned_for(model, **given)
    with torch.no_grad():
        assert type(tuned(**given, return_dict=False)) is tuple
        assert tuned(**given, output_hidden_states=True).hidden_states is not None
    assert tuned.calls == {"eager: another signature": 2}


def test_a_change_drops_the_proof(model: nn.Module) -> None:
    given = features()
    tuned = tuned_for(model, **given)
    tuned(**given, return_dict=True)
    model.config.return_dict = False
    with torch.no_grad():
        assert type(tuned(**given)) is type(model(**given))
        assert type(tuned(**given, return_dict=True)) is type(model(**given, return_dict=True))
    assert tuned.calls == {"tuned": 1, "eager: the module changed": 2}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return call


@dataclass
class Result:
    y: torch.Tensor
    flag: bool


class Wrapped(nn.Module):
    """What a keyword does here is named by `way`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.seen = way, 0
        self.first, self.second = torch.ones(4), torch.ones(4)

    @wrapped
    def forward(self, x: torch.Tensor, flag: bool = False) -> Any:
        way = self.way
        if way == "appends" and flag:
            SEEN.append(1)
        if way == "counts" and flag:
            self.seen += 1
        if way == "prints" and flag:
            print("flag")
        if way == "draws" and flag:
            torch.rand(())
        if way == "writes":
            self.first.add_(0.0)
        if way == "an order of a sum":
            return (self.first + x if flag else x + self.first) * 2
        if way == "a weight":
            return x * (self.second if flag else self.first)
        if way == "a number":
            return x * (1.0 if flag else 2.0)
        if way == "a value" and x.sum() > 100:
            return x + 1 if flag else x - 1
        if way == "a value in Python" and max(x.tolist()) > 100:
            return x + 1 if flag else x - 1
        if way == "a constant":
            return x + torch.tensor(2.0 if flag else 1.0)
        if way == "a result" and flag:
            return [x * 2]
        if way == "a plain result":
            return Result(x * 2, flag)
        if way == "a shared list":
            one = [x * 2]
            return (one, one) if flag else (one, [one[0]])
        return x * 2


DIFFERENT = (
    "appends", "counts", "prints", "draws", "writes", "an order of a sum", "a weight", "a number",
    "a value", "a value in Python", "a constant", "a result", "a plain result", "a shared list",
)  # fmt: skip


@pytest.mark.parametrize("way", DIFFERENT)
def test_what_makes_a_difference_is_not_answered(way: str) -> None:
    model = Wrapped(way).eval()
    tuned = tuned_for(model, x=torch.ones(4))
    state, seen = torch.get_rng_state(), len(SEEN)
    for count in (1, 2):
        with torch.no_grad():
            tuned(x=torch.ones(4), flag=True)
        # As often as the caller called it: a proof leaves nothing behind.
        assert len(SEEN) - seen == (count if way == "appends" else 0)
        assert model.seen == (count if way == "counts" else 0)
    assert torch.equal(torch.get_rng_state(), state) is (way != "draws")
    assert not tuned.calls["tuned"]


@pytest.mark.parametrize("value", [True, False, None, 1, 0.5, "a"])
def test_a_form_belongs_to_its_values(value: Any) -> None:
    model = Wrapped("a plain result").eval()
    tuned = tuned_for(model, x=torch.ones(4))
    result = tuned(x=torch.ones(4), flag=value)
    assert (type(result.flag), result.flag) == (type(value), value)
    assert tuned.calls["tuned"] == (value is False)


def test_a_keyword_that_lacks_is_added() -> None:
    model = Wrapped("nothing").eval()
    tuned = tuned_for(model, x=torch.ones(4), flag=True)
    x = torch.randn(4)
    assert torch.equal(tuned(x=x), x * 2)
    assert tuned.calls == {"tuned": 1}


def test_each_form_is_tried_once_and_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    is_same_call = proved_forms.is_same_call

    def counting(*call: Any) -> bool:
        tried.append(call)
        return is_same_call(*call)

    monkeypatch.setattr(proved_forms, "is_same_call", counting)
    tuned = tuned_for(Wrapped("a plain result").eval(), x=torch.ones(4))
    for flag in [*range(20), *range(20)]:
        tuned(x=torch.ones(4), flag=flag)
    assert len(tried) == proved_forms._MAX_FORMS


def test_nothing_is_tried_where_gradients_are_wanted_or_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned = tuned_for(Wrapped("nothing").eval(), x=torch.ones(4))
    tuned(x=torch.ones(4, requires_grad=True), flag=True)
    assert tuned.calls == {"eager: gradients are wanted": 1}
    with monkeypatch.context() as patch:
        patch.setattr(proved_forms, "others_run", lambda: True)
        tuned(x=torch.ones(4), flag=True)
        assert not tuned.calls["tuned"]
    tuned(x=torch.ones(4), flag=True)
    assert tuned.calls["tuned"] == 1
    assert sys.getprofile() is None


def test_numbers_that_pytorch_wraps_unseen_are_in_doubt() -> None:
    """MPNet's masks in a capture have one, as an argument of `where`: there is no proof yet."""
    config = transformers.MPNetConfig(**SMALL, **BERT, intermediate_size=64)
    model, given = transformers.MPNetModel(config).eval(), features()
    tuned = tuned_for(model, **given)
    with torch.no_grad():
        expected, result = model(**given), tuned(**given, return_dict=True)
    assert torch.equal(result.last_hidden_state, expected.last_hidden_state)
    assert tuned.calls == {"eager: another signature": 1}
