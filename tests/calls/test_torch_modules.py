"""Every attribute of every module of PyTorch's own: changed after the capture, it is never ignored.

The cases are made from the attributes themselves (`support/torch_modules.py`); one counts if eager
notices the change: by another result, or by raising.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_modules import MODULES, WITHOUT, Change, changes, classes, differ, run

import graphwright as gw

PYTHON = pytest.mark.parametrize("checks", ["python"], indirect=True)


def _tuned(model: nn.Module, args: tuple[Any, ...]) -> Any:
    return gw.tune(model, args, strategies=["torchscript"], isolate=False, remember=False)


WAYS: dict[str, Callable[[nn.Module, tuple[Any, ...]], Any]] = {
    "graph": lambda model, args: gw.graph(model),
    "fuse": lambda model, args: gw.fuse(model, args),
    "capture": lambda model, args: gw.capture(model, *args),
    "make_graphed_callables": lambda model, args: gw.make_graphed_callables(model, args),
    "tune": _tuned,
}
# Of each kind of state: numbers, words, lists, tuples, callables, tensors, packed weights.
SOME = [
    *("nn.Upsample", "nn.AvgPool2d", "nn.Fold", "nn.ReLU", "nn.Softplus", "nn.MSELoss"),
    *("nn.TripletMarginWithDistanceLoss", "nn.TransformerEncoderLayer", "nn.GRU"),
    *("quantized.Linear", "quantized.Conv2d", "quantized.PReLU", "dynamic.Linear", "dynamic.LSTM"),
]
TUNED = [
    *("nn.Linear", "nn.Conv2d", "nn.Upsample", "nn.MaxPool2d", "nn.AvgPool2d", "nn.LayerNorm"),
    *("nn.BatchNorm2d", "nn.ELU", "nn.Softplus", "nn.GELU", "nn.Softmax", "nn.GroupNorm"),
    *("nn.LeakyReLU", "nn.ConstantPad2d", "nn.PixelShuffle", "nn.Flatten", "nn.GRU"),
    *("dynamic.Linear", "quantized.Linear", "nn.MSELoss", "nn.CosineSimilarity", "nn.Hardtanh"),
]


@pytest.fixture(autouse=True)
def plain_attention() -> Any:
    """The fast path of the attention modules, in C++, ignores some attributes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def outcome(way: str, change: Change) -> str:
    """What comes of a change of a module that a graph or another fast form was made of."""
    built = MODULES[change.module]
    model, twin, args = built.model(), built.model(), built.args()
    before = run(twin, args)
    try:
        fast = WAYS[way](model, copy.deepcopy(args))
    except gw.GraphwrightError:
        return "refused at once"
    now = run(fast, args)
    if isinstance(now, gw.GraphwrightError):
        return "refused at once"
    if isinstance(now, Exception) or differ(now, before):
        return f"wrong before the change: {now!r:.200}"
    change.apply(twin)
    change.apply(model)
    expected = run(twin, args)
    now = run(fast, args)
    if isinstance(now, gw.GraphwrightError):
        return "refused"
    if isinstance(expected, Exception) or isinstance(now, Exception):
        both = isinstance(expected, Exception) and isinstance(now, Exception)
        return "raises" if both else f"eager {expected!r:.200}, ours {now!r:.200}"
    return "wrong" if differ(now, expected) else "right"


def check(way: str, name: str) -> Counter[str]:
    found = [(change, outcome(way, change)) for change in changes(name)]
    good = ("right", "raises", "refused", "refused at once")
    assert not [f"{change}: {what}" for change, what in found if what not in good]
    return Counter(what for _, what in found)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", ["graph", "fuse", "capture", "make_graphed_callables"])
@PYTHON
def test_a_changed_attribute_is_noticed_by_some(way: str, name: str) -> None:
    found = check(way, name)
    assert found["refused at once"] < found.total() or name in UNGRAPHED


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", ["graph", "fuse", "capture", "make_graphed_callables"])
@PYTHON
def test_a_changed_attribute_is_noticed(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TUNED)
@PYTHON
def test_a_changed_attribute_is_noticed_by_a_tuned_model(name: str) -> None:
    check("tune", name)
