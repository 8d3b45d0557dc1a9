"""Each option of tune(): whether a cached choice depends on it. A new one needs a decision here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.tuning.tuner import Tuning

MODEL, X = nn.Linear(4, 4).eval(), torch.rand(2, 4)
SAMPLES = [(X,), (torch.rand(3, 4),)]
SHAPES: dict[str, Any] = {
    "buckets": gw.Buckets(batch=[2, 4]),
    "dynamic_shapes": {"input": {0: "batch"}},
}
# With another value the choice is another one: the value, and other options that it needs.
IN_THE_KEY: dict[str, tuple[Any, dict[str, Any]]] = {
    "args": ((torch.rand(5, 4),), {}),
    "kwargs": ({"input": X}, {"args": ()}),
    "samples": (SAMPLES, {"args": ()}),
    "weights": ([1.0, 3.0], {"args": (), "samples": SAMPLES}),
    "buckets": (gw.Buckets(batch=[2, 8]), SHAPES),
    "strategies": (["torchscript"], {}),
    "exclude": (["torchscript"], {}),
    "exhaustive": (True, {}),
    "objective": ("throughput", {}),
    "tolerance": (0.5, {}),
    "allow": (["bf16"], {}),
    "budget_s": (7.0, {}),
    "timeout_s": (7.0, {}),
    "memory_limit": ("1GiB", {}),
    "audit": (3, {}),
    "checks": ("none", {}),
}
# With another value the choice is the same, for a reason.
NOT_IN_IT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dynamic_shapes": (
        {"input": {0: "rows"}},
        {"buckets": gw.Buckets(rows=[2, 4])},
        "its sizes are those of the calls, which are in the key; how they are named is not",
    ),
    "pad": (
        {"input": 7},
        SHAPES,
        "it fills what is cut off again: no candidate is faster for that, and it is proved anew",
    ),
    "isolate": (False, {}, "where candidates are tried says nothing about which is fastest"),
    "fresh": (True, {}, "the choice is not looked up, and replaces the one of this key"),
    "on_miss": ("error", {}, "what becomes of other calls"),
}
# No options of the search.
OTHERS = {
    "model": "its code and structure are in the key: tests/tuning/test_choices.py",
    "remember": "without it there is no key",
    "progress": "what is shown",
    "background": "the child asks with the same options",
    "profile": "what is told beside the result",
}


def key(**given: Any) -> str | None:
    args = given.pop("args", (X,))
    kwargs = given.pop("kwargs", None)
    found = Tuning(MODEL, args, kwargs, **given)._key()
    return found and found.digest


def test_each_option_has_a_decision() -> None:
    decided = {*IN_THE_KEY, *NOT_IN_IT, *OTHERS}
    assert decided == {*inspect.signature(gw.tune).parameters}
    assert len(decided) == len(IN_THE_KEY) + len(NOT_IN_IT) + len(OTHERS)


@pytest.mark.parametrize("option", IN_THE_KEY)
def test_another_value_is_another_choice(option: str) -> None:
    value, needed = IN_THE_KEY[option]
    assert key(**{**needed, option: value}) != key(**needed)


@pytest.mark.parametrize("option", NOT_IN_IT)
def test_another_value_is_the_same_choice(option: str) -> None:
    value, needed, _ = NOT_IN_IT[option]
    before = SHAPES if "buckets" in needed else {}
    assert key(**{**needed, option: value}) == key(**before)


def test_without_remember_there_is_no_key() -> None:
    assert key(remember=False) is None
