"""Configurations of transformers that change after a capture: right, recaptured or refused.

Each boolean and numeric field is set to other values on the very objects that the modules read, and
is put back. Some values make no sense for a model: then both raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import difference
from chosen import choosing
from huggingface_hub.errors import StrictDataclassError
from tiny_architectures import CASES, T5, Case, Inputs, case, text
from torch import nn
from transformers import PreTrainedConfig

import graphwright as gw
from graphwright.strategies.base import AVAILABLE
from graphwright.strategies.runners import GRAPH

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {
    "BertModel",
    "RobertaModel",
    "DistilBertModel",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "ViTModel",
    "SwinModel",
    "ConvNextModel",
    "T5EncoderModel",
    "CLIPModel",  # with configurations inside of its own
}
ARCHITECTURES = [each for each in [*CASES, case("T5EncoderModel", text, T5)] if each.model in NAMES]
# The first call that asks for these puts hooks on the layers, which stay there.
HOOKING = ["output_hidden_states", "_output_attentions"]
# Each is tried, whether the architecture heeds it or not.
FLAGS = [*HOOKING, "return_dict", "use_cache", "is_decoder"]


def build(case: Case) -> nn.Module:
    # Attention that is written out can be returned.
    config = case.config | {"attn_implementation": "eager", "use_cache": False}
    return Case(case.model, case.inputs, config).build()


def call_of(case: Case, step: int) -> Inputs:
    """Whether keys and values are kept is left to the configuration."""
    return {name: value for name, value in case.inputs(step).items() if name != "use_cache"}


# Fields, and what they are set to.


@dataclass(frozen=True, eq=False)  # Configurations have no hash.
class Field:
    config: PreTrainedConfig
    name: str

    def __str__(self) -> str:
        return f"{type(self.config).__name__}.{self.name}"

    @property
    def value(self) -> Any:
        return vars(self.config)[self.name]

    def others(self) -> list[Any]:
        """Values of its type that the configuration takes."""
        value = self.value
        if isinstance(value, bool):
            return [not value]
        wanted = {value + 1, value - 1, value * 2} if isinstance(value, int) else {value + 0.5}
        if isinstance(value, float):
            wanted |= {value / 2 + 0.25}
        return [other for other in sorted(wanted - {value}) if self._takes(other)]

    def _takes(self, other: Any) -> bool:
        kept = self.value
        try:
            setattr(self.config, self.name, other)
        except StrictDataclassError:
            return False
        finally:
            setattr(self.config, self.name, kept)
        return True


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """All that modules hold, and those inside of them."""
    found: dict[int, PreTrainedConfig] = {}

    def take(value: Any) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for inner in vars(value).values():
                take(inner)

    for module in model.modules():
        for value in vars(module).values():
            take(value)
    return list(found.values())


def fields(model: nn.Module) -> list[Field]:
    return [
        Field(config, name)
        for config in configurations(model)
        for name, value in vars(config).items()
        if isinstance(value, bool | int | float)
    ]


# Calls, and whether two went alike.

Part = Callable[..., Any]


def outcome(call: Part, given: Inputs) -> Any:
    """What a call returns or raises."""
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What cannot be captured runs eagerly with a warning.
        try:
            return call(**given)
        except Exception as error:
            return error


def unlike(found: Any, expected: Any) -> str | None:
    """How one outcome differs from eager's, in words.

    What eager raises may be raised, or refused by an error of graphwright.
    """
    if isinstance(expected, Exception):
        if isinstance(found, gw.GraphwrightError | type(expected)):
            return None
        what = type(found).__name__ if isinstance(found, Exception) else "an answer"
        return f"{what} where eager raises {expected!r}"
    if isinstance(found, Exception):
        return f"raises {found!r}"
    return difference(found, expected)


def matters(model: nn.Module, field: Field, given: Inputs) -> tuple[bool, bool]:
    """Whether eager's answer depends on a field: by another answer, or by an error."""
    first, kept = outcome(model, given), field.value
    another = raises = False
    for value in field.others():
        setattr(field.config, field.name, value)
        now = outcome(model, given)
        raises |= isinstance(now, Exception)
        another |= not isinstance(now, Exception) and difference(now, first) is not None
    setattr(field.config, field.name, kept)
    assert difference(outcome(model, given), first) is None
    return another, raises


def mistakes(
    part: Part, model: nn.Module, given: Inputs, tried: Sequence[Field], *, may_refuse: bool
) -> Iterator[str]:
    """Where a part goes another way than eager does, with a field changed and with it put back."""
    first = outcome(model, given)
    for field in tried:
        kept = field.value
        for value in field.others():
            setattr(field.config, field.name, value)
            for _ in range(2):
                found, expected = outcome(part, given), outcome(model, given)
                if not (may_refuse and isinstance(found, gw.SignatureError)):
                    what = unlike(found, expected)
                    if what is not None:
                        yield f"{field} = {value!r} in place of {kept!r}: {what}"
                        break
            setattr(field.config, field.name, kept)
            found = outcome(part, given)
            hooked = may_refuse and field.name in HOOKING and isinstance(found, gw.SignatureError)
            what = unlike(found, first)
            if what is not None and not hooked:
                yield f"{field} = {kept!r} again, after {value!r}: {what}"


# The ways to run a model, and how many calls they have answered themselves.


def captured(model: nn.Module, sample: Inputs) -> tuple[Part, Callable[[], int]]:
    with torch.no_grad():
        graph, replays = gw.capture(model, **sample), [0]

    def call(**given: Any) -> Any:
        result = graph(**given)
        replays[0] += 1
        return result

    return call, lambda: replays[0]


def graphed(model: nn.Module, sample: Inputs) -> tuple[Part, Callable[[], int]]:
    part = gw.graph(model)
    return part, lambda: part.statistics.hits


def fused(model: nn.Module, sample: Inputs) -> tuple[Part, Callable[[], int]]:
    part = gw.fuse(model, (), sample, verify=False)
    return part, lambda: part.calls["fused"]


def tuned(model: nn.Module, sample: Inputs) -> tuple[Part, Callable[[], int]]:
    # Graphs on the CPU are for tests: tune() does not offer them.
    probed = {(id(GRAPH), "cpu"): (GRAPH, AVAILABLE)}
    with choosing("eager+graph"), mock.patch("graphwright.strategies.base._probed", probed):
        part = gw.tune(
            model,
            (),
            sample,
            strategies=["eager+graph"],
            isolate=False,
            remember=False,
            progress=False,
        )
    assert part.report.chosen == "eager+graph"
    return part, lambda: part.calls["tuned"]


WAYS = {"graph": graphed, "capture": captured, "fuse": fused, "tune": tuned}


def stays_right(way: str, case: Case, *, all_fields: bool) -> None:
    model, probe = build(case), build(case)
    sample, given = call_of(case, 0), call_of(case, 1)
    depends = [matters(probe, field, given) for field in fields(probe)]
    # Else nothing could go wrong.
    assert len([found for found in depends if any(found)]) >= 2
    assert any(another for another, _ in depends)
    tried = [
        field
        for field, found in zip(fields(model), depends, strict=True)
        if all_fields or any(found) or field.name in FLAGS
    ]
    tried.sort(key=lambda field: field.name in HOOKING)
    part, answered = WAYS[way](model, sample)
    for _ in range(2):
        assert unlike(outcome(part, given), outcome(model, given)) is None
    before = answered()
    assert before >= 2
    wrong = list(mistakes(part, model, given, tried, may_refuse=way == "capture"))
    assert not wrong, "\n".join(wrong)
    # It answered again with each field put back that leaves no hooks behind.
    assert answered() >= before + len([field for field in tried if field.name not in HOOKING])


SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
# Every architecture goes one way in CI, and most go two.
QUICK = {
    "graph": {"BertModel", "DistilBertModel", "GPT2LMHeadModel", "OPTForCausalLM", "ViTModel"},
    "capture": {
        *("BertModel", "MistralForCausalLM", "RobertaModel", "SwinModel"),
        "T5EncoderModel",
    },
    "fuse": {"BertModel", "MistralForCausalLM", "SwinModel"},
    "tune": {"ConvNextModel"},
}


def marks_of(way: str, case: Case) -> Any:
    if case.model in QUICK[way]:
        return ()
    turn = [*WAYS].index(way) + ARCHITECTURES.index(case)
    due = turn % 6 == 0 or (way == "graph" and case.model in ("CLIPModel", "LlamaForCausalLM"))
    return SLOW if due else EXHAUSTIVE


@pytest.mark.parametrize(
    ("way", "case"),
    [pytest.param(way, case, marks=marks_of(way, case)) for way in WAYS for case in ARCHITECTURES],
    ids=str,
)
def test_a_field_that_the_model_heeds_is_heeded(way: str, case: Case) -> None:
    stays_right(way, case, all_fields=False)


@pytest.mark.parametrize(
    ("way", "case"),
    [
        # Every other architecture goes one way in CI.
        pytest.param(way, case, marks=SLOW if (2 * m + n) % (2 * len(WAYS)) == 0 else EXHAUSTIVE)
        for m, way in enumerate(WAYS)
        for n, case in enumerate(ARCHITECTURES)
    ],
    ids=str,
)
def test_any_field_of_a_configuration_may_change(way: str, case: Case) -> None:
    stays_right(way, case, all_fields=True)


@pytest.mark.parametrize("way", WAYS)
def test_another_implementation_of_attention_is_heeded(way: str) -> None:
    (llama,) = [case for case in ARCHITECTURES if case.model == "LlamaForCausalLM"]
    model, sample, given = build(llama), call_of(llama, 0), call_of(llama, 1)
    model.config.output_attentions = True
    part, answered = WAYS[way](model, sample)
    assert len(outcome(part, given).attentions) == 2
    assert answered()
    model.config._attn_implementation = "sdpa"  # gives no attentions
    found, expected = outcome(part, given), outcome(model, given)
    assert not expected.attentions
    assert isinstance(found, gw.SignatureError) or unlike(found, expected) is None


def test_there_are_ten_architectures() -> None:
    assert len(ARCHITECTURES) >= 10
