"""Random interventions in a model: what the checks in Python notice, those in C++ notice too."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphwright.calls import watch
from graphwright.calls.watch import ModuleWatch

COUNT = 1000
GLOBAL = 1.0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Part(nn.Module):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 1.0
        self.items: list[Any] = [1.0, torch.ones(4)]
        self.table: dict[str, Any] = {"a": 1.0, "b": torch.ones(4)}
        self.ordered = OrderedDict(a=1.0, b=2.0)
        self.names = {"a", "b"}
        self.history = deque([1.0, 2.0])
        self.space = types.SimpleNamespace(deep=[1.0], flag=False)
        self.slotted = Slotted()
        self.pair = (1.0, [2.0])
        self.optimizer = torch.optim.Adam(self.linear.parameters(), lr=0.5)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0, **more: float) -> torch.Tensor:
        x = x * gain * self.optimizer.param_groups[0]["lr"] + len(more)
        x = self.norm(self.linear(x)) * self.scale + self.items[0] + self.items[1] + self.offset
        x = x * self.table["a"] * self.table["b"] + self.ordered["a"] + self.history[0] + GLOBAL
        if "a" in self.names and not self.space.flag:
            x = x + self.space.deep[0] * self.slotted.value * self.pair[0] + self.pair[1][0]
        return x


class Other(Part):
    pass


def move_to_the_end(table: dict[str, Any]) -> None:
    first = next(iter(table))
    table[first] = table.pop(first)


def move_default(part: Part) -> None:
    defaults = Part.forward.__kwdefaults__
    defaults["gain"] += 1.0


def new_defaults(part: Part) -> None:
    Part.forward.__kwdefaults__ = dict(Part.forward.__kwdefaults__)


def forward_of_another(self: Part, x: torch.Tensor) -> torch.Tensor:
    return x


def swap_class(part: Part) -> None:
    part.__class__ = Part if type(part) is Other else Other


def move_class_attribute(part: Part) -> None:
    Part.offset += 1.0


def move_global(part: Part) -> None:
    globals()["GLOBAL"] += 1.0


# Whether the checks see it depends on `values`, for some; that both see the same is asserted.
INTERVENTIONS: list[Callable[[Part], object]] = [
    lambda part: part.linear.weight.data.mul_(2),
    lambda part: part.linear.weight.detach().mul_(2),
    lambda part: setattr(part.linear, "weight", nn.Parameter(torch.randn(4, 4))),
    lambda part: setattr(part.linear.weight, "data", torch.randn(4, 4)),
    lambda part: setattr(part.linear, "bias", None),
    lambda part: part.linear.register_buffer("more", torch.ones(2)),
    lambda part: part.norm.running_mean.add_(1),  # type: ignore[union-attr]  # it tracks them
    lambda part: setattr(part.norm, "running_mean", torch.ones(4)),
    lambda part: part.norm.train(not part.norm.training),
    lambda part: setattr(part, "scale", part.scale + 1),
    lambda part: setattr(part, "scale", float(part.scale)),
    lambda part: setattr(part, "unused_by_anyone", object()),
    lambda part: part.items.__setitem__(0, part.items[0] + 1),
    lambda part: part.items.append(None),
    lambda part: part.items[1].add_(1),
    lambda part: part.table.update(a=part.table["a"] + 1),
    lambda part: part.table.update(c=1),
    lambda part: part.table["b"].mul_(2),
    lambda part: part.ordered.move_to_end("a"),
    lambda part: part.ordered.update(a=part.ordered["a"] + 1),
    lambda part: part.names.add("c"),
    lambda part: part.history.append(3.0),
    lambda part: part.history.rotate(1),
    lambda part: part.space.deep.append(2.0),
    lambda part: setattr(part.space, "flag", not part.space.flag),
    lambda part: setattr(part.slotted, "value", part.slotted.value + 1),
    lambda part: part.pair[1].append(3.0),
    lambda part: part.add_module("another", nn.ReLU()),
    lambda part: part.linear.register_forward_hook(lambda *given: None),
    lambda part: part.linear.register_forward_pre_hook(lambda *given: None),
    lambda part: setattr(part, "forward", types.MethodType(forward_of_another, part)),
    lambda part: part.linear.weight.requires_grad_(not part.linear.weight.requires_grad),
    lambda part: part.half() if part.linear.weight.dtype is torch.float32 else part.float(),
    lambda part: vars(part).update(scale=part.scale),
    lambda part: setattr(part, "__dict__", dict(vars(part))),
    lambda part: None,
    lambda part: move_to_the_end(part.table),
    lambda part: move_to_the_end(vars(part.space)),
    lambda part: move_to_the_end(part.linear._parameters),
    lambda part: part.optimizer.param_groups[0].update(lr=0.25),
    lambda part: part.optimizer.param_groups[0].update(betas=(0.5, 0.5)),
    lambda part: part.optimizer.add_param_group({"params": [torch.ones(2)]}),
    lambda part: part.register_forward_pre_hook(lambda *given: None, with_kwargs=True),
    move_default,
    new_defaults,
    swap_class,
    move_class_attribute,
    move_global,
]


@pytest.mark.parametrize("values", [pytest.param(False, marks=pytest.mark.slow), True])
def test_both_checks_notice_the_same(
    values: bool, checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checks == "python":
        pytest.skip("the other case compares both")
    compiled, draw = list(watch.COMPILED), random.Random(values)
    model = part = differing = None
    noticed = compared = 0
    for n in range(COUNT):
        if n % 20 == 0:
            parts = [Part() for _ in range(3)]
            model = nn.Sequential(*parts).eval()
        assert model is not None
        slow, fast = (ModuleWatch(model, values=values) for _ in range(2))
        monkeypatch.setattr(watch, "COMPILED", [])
        assert slow.changed() is None
        monkeypatch.setattr(watch, "COMPILED", compiled)
        assert fast.changed() is None
        compared += fast._compiled is not None and fast.unchanged()
        part = draw.choice(list(model.children()))
        assert isinstance(part, Part)
        for differing in draw.sample(INTERVENTIONS, draw.choice((1, 1, 1, 2))):
            differing(part)
        monkeypatch.setattr(watch, "COMPILED", [])
        expected = slow.changed()
        monkeypatch.setattr(watch, "COMPILED", compiled)
        assert fast.changed() == expected
        assert fast.changed() == expected
        noticed += expected is not None
    assert compared == COUNT
    assert COUNT // 2 < noticed < COUNT
