"""Random programs of our parts in one another, changed between calls, against eager twins.

A `Case` is a model, two of our parts one inside of the other, plain Python around them, and steps:
each changes something and then calls. `check` builds it twice from the same seed, once without our
parts, does the same to both, and raises `Wrong` where they do not agree.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import signal
import tempfile
import threading
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from chosen import choosing
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graphwright as gw
from graphwright.strategies.base import AVAILABLE
from graphwright.strategies.runners import GRAPH

BATCH = 3  # of the sample
Args = tuple[Any, ...]
Named = dict[str, Any]
Program = Callable[..., Any]


class Sample(NamedTuple):
    """Arguments of a call."""

    args: Args
    named: Named


class Wrong(AssertionError):
    """A program of ours did not do what eager does."""


class Hangs(BaseException):
    """A case takes for ever; no handler of errors takes this for one of its own."""


# ---------------------------------------------------------------- models


@dataclass
class World:
    """A model and all around it that a change can reach.

    Attributes:
        model: what the parts are made of.
        tail: the shape of one row of the input.
        slot: the module that holds a linear layer, and its name there.
        knobs: what can be set to a number, by how that reads.
        pure: whether a call leaves everything as it was.
        factors: calls get a plain number too.
        draws: calls draw random numbers.
        more: what calls get beside their tensor, positional and by name, of that tensor, a number
            and a seed.
        optimizer: for training steps.
        handles: of hooks that are there now.
    """

    model: nn.Module
    tail: tuple[int, ...]
    slot: tuple[nn.Module, str]
    knobs: dict[str, Callable[[float], None]] = field(default_factory=dict)
    pure: bool = True
    factors: bool = False
    draws: bool = False
    more: Callable[[torch.Tensor, Any, int], tuple[Args, Named]] | None = None
    optimizer: Any = None
    handles: dict[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> nn.Linear:
        owner, name = self.slot
        return getattr(owner, name)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state(self) -> dict[str, Any]:
        """What the model holds, by name."""
        return {
            **{f"parameter {n}": p.detach() for n, p in self.model.named_parameters()},
            **{f"buffer {n}": b for n, b in self.model.named_buffers()},
        }


KINDS: dict[str, Callable[[], World]] = {}
# Models that take more than a tensor and a number: by name, in any order, and in objects.
NAMED_KINDS: dict[str, Callable[[], World]] = {}


def kind(make: Callable[[], World]) -> Callable[[], World]:
    KINDS[make.__name__] = make
    return make


def named_kind(make: Callable[[], World]) -> Callable[[], World]:
    NAMED_KINDS[make.__name__] = make
    return make


@kind
def linear() -> World:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return World(model, (4,), (model, "2"))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)
        assert self.norm.running_var is not None
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


@kind
def convolutional() -> World:
    model = Convolutional()
    norm = model.norm
    knobs = {
        "norm.running_mean.fill_({})": lambda v: norm.running_mean.fill_(v),
        "norm.eps = {}": lambda v: setattr(norm, "eps", v),
        "norm.running_var = full({})": lambda v: setattr(
            norm, "running_var", torch.full_like(norm.running_var, v)
        ),
    }
    return World(model, (2, 4, 4), (model, "head"), knobs, pure=False)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(4), nn.Linear(4, 4)
        self.gain = 1.5
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.norm(x)) * self.gain + self.shift


@kind
def normed() -> World:
    model = Normed()
    knobs = {
        "model.gain = {}": lambda v: setattr(model, "gain", v),
        "model.shift.fill_({})": lambda v: model.shift.fill_(v),
        "model.shift = full({})": lambda v: setattr(
            model, "shift", torch.full_like(model.shift, v)
        ),
    }
    return World(model, (4,), (model, "first"), knobs)


class Attention(nn.Module):
    """Two heads, fused or written out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.by_hand, self.heads = False, 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.parts(x))
        if self.by_hand:
            found = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v)
        y = self.out(found.transpose(1, 2).flatten(2))
        return y, {"first": y[:, 0]}

    def parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.mixed(x).chunk(3, -1)


@kind
def attention() -> World:
    model = Attention()
    knobs = {"model.heads = {} > 2 ? 4 : 1": lambda v: setattr(model, "heads", 4 if v > 2 else 1)}
    return World(model, (3, 4), (model, "out"), knobs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@kind
def recurrent() -> World:
    model = Recurrent()
    return World(model, (3, 4), (model, "head"))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(4, 4))
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@kind
def parametrized() -> World:
    model = Parametrized()

    def magnitude(value: float) -> None:
        with torch.no_grad():
            model.first.parametrizations.weight.original0.mul_(value)

    return World(model, (4,), (model, "second"), {"weight_norm's g.mul_({})": magnitude})


class Lora(nn.Module):
    """As peft's layers keep it: dictionaries by adapter, a list of what is merged."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down = nn.ModuleDict({"a": nn.Linear(4, 2, False), "b": nn.Linear(4, 2, False)})
        self.up = nn.ModuleDict({"a": nn.Linear(2, 4, False), "b": nn.Linear(2, 4, False)})
        self.scaling = {"a": 2.0, "b": 1.0}
        self.merged: list[str] = []
        self.disabled: set[str] = set()
        self.active = ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for name in self.active:
            if name not in self.merged and name not in self.disabled:
                y = y + self.up[name](self.down[name](x)) * self.scaling[name]
        return y


@kind
def lora() -> World:
    model = Lora()
    knobs = {
        "model.scaling['a'] = {}": lambda v: model.scaling.__setitem__("a", v),
        "model.merged gets 'a' or loses it": lambda v: _toggle_in_list(model.merged, "a"),
        "model.disabled ^= {{'a'}}": lambda v: model.disabled.__ixor__({"a"}),
        "model.active gets 'b' or loses it": lambda v: _toggle_in_list(model.active, "b"),
        "model.scaling = {{'a': {0}, 'b': {0}}}": lambda v: setattr(
            model, "scaling", {"a": v, "b": v}
        ),
    }
    return World(model, (4,), (model, "base"), knobs)


def _toggle_in_list(values: list[str], name: str) -> None:
    if name in values:
        values.remove(name)
    else:
        values.append(name)


class Config:
    """As transformers' PretrainedConfig: plain attributes, lists and dictionaries in them."""

    def __init__(self) -> None:
        self.hidden_act = "relu"
        self.scale = 1.0
        self.layers = [{"scale": 1.0, "skip": False}, {"scale": 0.5, "skip": False}]
        self.rope = {"factors": [1.0, 2.0], "type": "default"}


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        config = self.config
        for layer, its in zip(self.layers, config.layers, strict=False):
            y = layer(x) * its["scale"]
            x = x if its["skip"] else x + (F.relu(y) if config.hidden_act == "relu" else y.tanh())
        last = x * config.scale * config.rope["factors"][0]
        return {"last": last, "pooled": last.mean(-1)}


@kind
def configured() -> World:
    model = Configured()
    config = model.config

    def other_config(value: float) -> None:
        model.config = copy.deepcopy(model.config)
        model.config.scale = value

    knobs = {
        "config.scale = {}": lambda v: setattr(model.config, "scale", v),
        "config.hidden_act = 'tanh'": lambda v: setattr(model.config, "hidden_act", "tanh"),
        "config.layers[0]['scale'] = {}": lambda v: config.layers[0].__setitem__("scale", v),
        "config.layers[-1]['skip'] ^= True": lambda v: config.layers[-1].__setitem__(
            "skip", not config.layers[-1]["skip"]
        ),
        "config.rope['factors'][0] = {}": lambda v: config.rope["factors"].__setitem__(0, v),
        "config.layers.pop() or gets one": lambda v: (
            config.layers.pop()
            if len(config.layers) > 1
            else config.layers.append({"scale": v, "skip": False})
        ),
        "model.config = a copy with scale {}": other_config,
    }
    return World(model, (4,), (model.layers, "0"), knobs)


class Stateful(nn.Module):
    """Reads numbers and a tensor from a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.context = types.SimpleNamespace(scale=1.0, offset=torch.randn(4), inner=[{"bias": 0}])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.context
        y = self.first(x) * context.scale + context.inner[0]["bias"]
        return y + context.offset.to(x.device)


@kind
def stateful() -> World:
    model = Stateful()
    context = model.context
    knobs = {
        "context.scale = {}": lambda v: setattr(context, "scale", v),
        "context.offset.fill_({})": lambda v: context.offset.fill_(v),
        "context.offset = full({})": lambda v: setattr(
            context, "offset", torch.full_like(context.offset, v)
        ),
        "context.inner[0]['bias'] = {}": lambda v: context.inner[0].__setitem__("bias", v),
    }
    return World(model, (4,), (model, "first"), knobs)


_HELPING = """
def helper(x, gain=1.0):
    return x * FACTOR * gain + torch.ones(x.shape[-1], device=x.device)

def closed_over():
    bias = 0.5
    def add(x):
        return helper(x) + bias
    def set_bias(value):
        nonlocal bias
        bias = value
    return add, set_bias
"""


class Helped(nn.Module):
    """Calls a function that reads a global, a default and a closure."""

    def __init__(self, add: Program) -> None:
        super().__init__()
        self.first, self.add = nn.Linear(4, 4), add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(self.first(x))


@kind
def helped() -> World:
    space: dict[str, Any] = {"torch": torch, "FACTOR": 1.0}
    exec(_HELPING, space)  # written above
    add, set_bias = space["closed_over"]()
    model = Helped(add)
    knobs = {
        "the global FACTOR = {}": lambda v: space.__setitem__("FACTOR", v),
        "the closure's bias = {}": set_bias,
        "helper.__defaults__ = ({},)": lambda v: setattr(space["helper"], "__defaults__", (v,)),
        "the global helper is another function": lambda v: space.__setitem__(
            "helper", lambda x, gain=1.0: x * v
        ),
    }
    return World(model, (4,), (model, "first"), knobs)


class Listed(nn.Module):
    """Has modules in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.hidden = [nn.Linear(4, 4), nn.Tanh()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for module in self.hidden:
            x = module(x)
        return x


@kind
def listed() -> World:
    model = Listed()

    def weight(value: float) -> None:
        with torch.no_grad():
            model.hidden[0].weight.mul_(value)

    def other_weight(value: float) -> None:
        model.hidden[0].weight = nn.Parameter(model.hidden[0].weight.detach() * value)

    knobs = {
        "hidden[1] = another module": lambda v: model.hidden.__setitem__(1, Times(v)),
        "hidden.append(Times({}))": lambda v: model.hidden.append(Times(v)),
        "hidden[0].weight.mul_({})": weight,
        "hidden[0].weight = Parameter(… * {})": other_weight,
    }
    return World(model, (4,), (model, "first"), knobs)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return scaled(x, self.factor)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.first(x) * self.count


@kind
def counting() -> World:
    model = Counting()
    knobs = {"model.count.fill_({})": lambda v: model.count.fill_(v)}
    return World(model, (4,), (model, "first"), knobs, pure=False)


class Writing(nn.Module):
    """Writes to its input and returns a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        x.mul_(2).add_(1)
        return y, x[:, :2]


@kind
def writing() -> World:
    model = Writing()
    return World(model, (4,), (model, "first"), pure=False)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.first(x))


@kind
def dropping() -> World:
    model = Dropping()
    knobs = {
        "model.drop.training = {} > 1": lambda v: model.drop.train(v > 1),
        "model.drop.p = {} / 4": lambda v: setattr(model.drop, "p", v / 4),
    }
    return World(model, (4,), (model, "first"), knobs, draws=True)


class Factored(nn.Module):
    """Takes a plain number beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.first(x) * factor


@kind
def factored() -> World:
    model = Factored()
    return World(model, (4,), (model, "first"), factors=True)


def parts_of(x: torch.Tensor, factor: Any, seed: int) -> tuple[Args, Named]:
    """Two tensors and a number by name: what is done with them depends on their order."""
    b = torch.full_like(x.detach(), 0.5 + seed % 3)
    return (), {"b": b, "aa": x.detach().clone() * 2, "c": factor}


class KeywordOnly(nn.Module):
    """No one but Python binds its arguments: in which order they come, it cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, *, b: Any = None, aa: torch.Tensor | None = None, c: Any = 1.5
    ) -> torch.Tensor:
        y = self.first(x if aa is None else x + aa) * c
        return y if b is None else y - b


@named_kind
def keyword_only() -> World:
    model = KeywordOnly()
    return World(model, (4,), (model, "first"), more=parts_of)


def folded(y: Any, named: Named) -> Any:
    """A value that depends on the order of what is named."""
    for name, value in named.items():
        y = y * 1.5 + value * len(name)
    return y


class AnyKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **parts: Any) -> torch.Tensor:
        return folded(self.first(x), parts)


@named_kind
def any_keywords() -> World:
    model = AnyKeywords()
    return World(model, (4,), (model, "first"), more=parts_of)


def watched(forward: Program) -> Program:
    """A decorator that sees the order of keyword arguments, as one that logs them does."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: torch.Tensor, **named: Any) -> Any:
        return folded(forward(self, x, **named), named)

    return wrapper


class Decorated(KeywordOnly):
    forward = watched(KeywordOnly.forward)


@named_kind
def decorated() -> World:
    model = Decorated()
    return World(model, (4,), (model, "first"), more=parts_of)


@named_kind
def hooked() -> World:
    """A hook of the module sees the order of keyword arguments."""
    model = KeywordOnly()
    model.register_forward_hook(lambda m, args, named, y: folded(y, named), with_kwargs=True)
    return World(model, (4,), (model, "first"), more=parts_of)


@named_kind
def hooked_on_and_off() -> World:
    model = KeywordOnly()
    handles: list[Any] = []

    def turn(value: float) -> None:
        if handles:
            handles.pop().remove()
            return
        handles.append(
            model.register_forward_pre_hook(
                lambda m, args, named: ((folded(args[0], named) * value,), named), with_kwargs=True
            )
        )

    knobs = {"a hook with keywords, * {}, comes or goes": turn}
    return World(model, (4,), (model, "first"), knobs, more=parts_of)


@dataclass
class Batch:
    """An argument that holds others."""

    weight: torch.Tensor
    parts: Named
    flags: Any = frozenset()


class OfObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, batch: Batch | None = None, *, again: Batch | None = None
    ) -> torch.Tensor:
        y = self.first(x)
        for each in (batch, again):
            if each is not None:
                y = folded(y, each.parts) * each.weight
                for flag in each.flags:
                    y = y * 1.5 + flag
                y = folded(y, dict.fromkeys(vars(each), 1))
        return y


def batches_of(x: torch.Tensor, factor: Any, seed: int) -> tuple[Args, Named]:
    """Objects in which the order of attributes, of a dictionary and of a set differs."""
    _, parts = parts_of(x, factor, seed)
    one = Batch(x.detach() + 1, in_an_order(parts, seed), {8, 0} if seed % 2 else {0, 8})
    two = Batch(x.detach() - 1, in_an_order(parts, seed // 2), frozenset((16, 0)))
    if seed % 3 == 0:
        two.__dict__["weight"] = two.__dict__.pop("weight")
    return (one,), {"again": two}


@named_kind
def of_objects() -> World:
    model = OfObjects()
    return World(model, (4,), (model, "first"), more=batches_of)


class OfDictionaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, inputs: Named | None = None) -> torch.Tensor:
        return folded(self.first(x), {} if inputs is None else inputs)


@named_kind
def of_dictionaries() -> World:
    def more(x: torch.Tensor, factor: Any, seed: int) -> tuple[Args, Named]:
        _, parts = parts_of(x, factor, seed)
        return (), {"inputs": OrderedDict(in_an_order(parts, seed))}

    model = OfDictionaries()
    return World(model, (4,), (model, "first"), more=more)


def made(name: str, seed: int, device: torch.device) -> World:
    """A world; the same seed makes the same one."""
    torch.manual_seed(seed)
    world = (KINDS | NAMED_KINDS)[name]()
    # A class of its own, so that a change of the class concerns this world alone.
    own = type(world.model)
    world.model.__class__ = type(own.__name__, (own,), {})
    world.model.to(device).eval()
    for value in (*vars(world.model).values(),):
        if isinstance(value, list):
            for module in value:
                if isinstance(module, nn.Module):
                    module.to(device).eval()
    world.optimizer = torch.optim.SGD(world.model.parameters(), lr=0.05, momentum=0.5)
    return world


# ---------------------------------------------------------------- plain Python around parts


def scaled(tree: Any, factor: float) -> Any:
    """All tensors of floats in a tree, times a number; ×1 leaves them as they are."""

    def times(leaf: torch.Tensor) -> torch.Tensor:
        return leaf * factor if leaf.is_floating_point() and factor != 1 else leaf

    return pytree.tree_map_only(torch.Tensor, times, tree)


class Holder:
    """An object that calls what it holds."""

    def __init__(self, inner: Program) -> None:
        self.inner, self.options = inner, {"factor": 1.0}

    def run(self, *args: Any, **named: Any) -> Any:
        return scaled(self.inner(*args, **named), self.options["factor"])

    __call__ = run


class Pipeline:
    """An object with modules and functions in a list."""

    def __init__(self, *stages: Program) -> None:
        self.stages = list(stages)

    def __call__(self, *args: Any, **named: Any) -> Any:
        result = self.stages[0](*args, **named)
        for stage in self.stages[1:]:
            result = stage(result)
        return result


class Shell(nn.Module):
    """A module whose child is the model, and that calls something else."""

    def __init__(self, inner: Program, model: nn.Module) -> None:
        super().__init__()
        self.model, self.inside, self.factor = model, [inner], 1.0

    def forward(self, *args: Any, **named: Any) -> Any:
        return scaled(self.inside[0](*args, **named), self.factor)


Knobs = dict[str, Callable[[float], None]]
WRAPPINGS: dict[str, Callable[[Program, World], tuple[Program, Knobs]]] = {}


def wrapping(
    make: Callable[[Program, World], tuple[Program, Knobs]],
) -> Callable[[Program, World], tuple[Program, Knobs]]:
    WRAPPINGS[make.__name__] = make
    return make


@wrapping
def nothing(inner: Program, world: World) -> tuple[Program, Knobs]:
    return inner, {}


@wrapping
def function(inner: Program, world: World) -> tuple[Program, Knobs]:
    factor = 1.0

    def call(*args: Any, **named: Any) -> Any:
        return scaled(inner(*args, **named), factor)

    def turn(value: float) -> None:
        nonlocal factor
        factor = value

    return call, {"the closure's factor = {}": turn}


@wrapping
def function_of_a_global(inner: Program, world: World) -> tuple[Program, Knobs]:
    space: dict[str, Any] = {"inner": inner, "scaled": scaled, "FACTOR": 1.0}
    exec("def call(*a, **named):\n    return scaled(inner(*a, **named), FACTOR)\n", space)
    return space["call"], {"the global FACTOR = {}": lambda v: space.__setitem__("FACTOR", v)}


@wrapping
def function_with_a_default(inner: Program, world: World) -> tuple[Program, Knobs]:
    call = lambda *a, inner=inner, factor=1.0, **k: scaled(inner(*a, **k), factor)  # noqa: E731
    return call, {"the default factor = {}": lambda v: call.__kwdefaults__.__setitem__("factor", v)}


@wrapping
def partial(inner: Program, world: World) -> tuple[Program, Knobs]:
    return functools.partial(inner), {}


@wrapping
def partial_of_a_function(inner: Program, world: World) -> tuple[Program, Knobs]:
    def call(inner: Program, *args: Any, factor: float, **named: Any) -> Any:
        return scaled(inner(*args, **named), factor)

    found = functools.partial(call, inner, factor=1.0)
    return found, {
        "partial.keywords['factor'] = {}": lambda v: found.keywords.__setitem__("factor", v)
    }


@wrapping
def bound_method(inner: Program, world: World) -> tuple[Program, Knobs]:
    holder = Holder(inner)
    return holder.run, {
        "holder.options['factor'] = {}": lambda v: holder.options.__setitem__("factor", v)
    }


@wrapping
def callable_object(inner: Program, world: World) -> tuple[Program, Knobs]:
    holder = Holder(inner)
    return holder, {
        "holder.options['factor'] = {}": lambda v: holder.options.__setitem__("factor", v)
    }


@wrapping
def list_of_an_object(inner: Program, world: World) -> tuple[Program, Knobs]:
    held = Pipeline(inner, Times(1.0))
    return held, {
        "stages[1] = Times({})": lambda v: held.stages.__setitem__(1, Times(v)),
        "stages[1].factor = {}": lambda v: setattr(held.stages[1], "factor", v),
        "stages.append(Times({}))": lambda v: held.stages.append(Times(v)),
    }


@wrapping
def shell(inner: Program, world: World) -> tuple[Program, Knobs]:
    """A module that has the model as a child, and what it calls in a list."""
    module = Shell(inner, world.model).train(world.model.training)
    return module, {"shell.factor = {}": lambda v: setattr(module, "factor", v)}


@wrapping
def functional(inner: Program, world: World) -> tuple[Program, Knobs]:
    """With other parameters for the length of a call, and a gradient by torch.func."""
    module = Shell(inner, world.model).train(world.model.training)
    options = {"factor": 1.0}

    def call(*args: Any, **named: Any) -> Any:
        own = {n: p * options["factor"] for n, p in module.named_parameters()}
        result = torch.func.functional_call(module, own, args, named)

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return total(torch.func.functional_call(module, parameters, args, named))

        if not world.pure:
            return result
        grads = torch.func.grad(loss)({n: p.detach() for n, p in own.items()})
        return result, grads[min(grads)]

    return call, {"parameters times {}": lambda v: options.__setitem__("factor", v)}


@wrapping
def checkpointed(inner: Program, world: World) -> tuple[Program, Knobs]:
    return lambda *a, **named: checkpoint(inner, *a, use_reentrant=False, **named), {}


@wrapping
def compiled(inner: Program, world: World) -> tuple[Program, Knobs]:
    return torch.compile(inner, backend="eager"), {}


def unseen(inner: Program) -> Program:
    """Hooks for saved tensors see nothing of it."""

    def call(*args: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return inner(*args, **named)

    return call


def total(tree: Any) -> torch.Tensor:
    """A loss of all tensors of floats in a tree."""
    found = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return sum((t.square().mean() for t in found if t.is_floating_point()), torch.zeros(()))


# ---------------------------------------------------------------- parts

STRATEGIES = ("eager+graph", "fused", "torchscript:freeze", "torchscript")
AUDITED = tuple("audit" in inspect.signature(f).parameters for f in (gw.fuse, gw.tune))


@dataclass(frozen=True)
class Part:
    """One of our parts, as it is made of a program and a sample call.

    Attributes:
        name: what it is called in a case.
        make: makes it.
        mode: the mode that the model is in meanwhile; None leaves it.
        copies: it may hold copies of weights. Writes through `.data` leave no trace for it, and are
            drawn only where it looks at the weights themselves (`audit=1`).
        audited: whether it does.
        keeps_grad: whether gradients reach what the model computes with.
    """

    name: str
    make: Callable[[Program, World, Sample, int], Program]
    mode: bool | None = None
    copies: bool = False
    audited: bool = False
    keeps_grad: bool = True


def _graph(target: Program, world: World, sample: Sample, option: int) -> Program:
    if option == 3:
        found = gw.graph(target, on_miss="error")
        found.prepare([sample], progress=False)
        return found
    return gw.graph(target, outputs=("fresh", "static", "fresh")[option])


def _buckets(target: Program, world: World, sample: Sample, option: int) -> Program:
    return gw.graph(target, buckets=gw.Buckets(batch=[2, 4] if option % 2 else [BATCH]))


def _fuse(target: Program, world: World, sample: Sample, option: int) -> Program:
    options: dict[str, Any] = {"audit": 1} if AUDITED[0] else {}
    return gw.fuse(target, *(() if option == 3 else sample), **options)


def _capture(target: Program, world: World, sample: Sample, option: int) -> Program:
    return gw.capture(target, *sample.args, outputs=("fresh", "static")[option % 2], **sample.named)


def _tune(target: Program, world: World, sample: Sample, option: int) -> Program:
    options: dict[str, Any] = {"audit": 1} if AUDITED[1] else {}
    with choosing(STRATEGIES[option]):
        return gw.tune(
            target,
            *sample,
            strategies=[STRATEGIES[option]],
            isolate=False,
            remember=False,
            progress=False,
            **options,
        )


def _load(target: Program, world: World, sample: Sample, option: int) -> Program:
    """Tune, save and load, with the model."""
    found = _tune(target, world, sample, option)
    assert isinstance(found, gw.TunedModule)
    with tempfile.TemporaryDirectory() as folder:
        gw.save(found, Path(folder) / "saved.gw")
        return gw.load(Path(folder) / "saved.gw", target, trust=True)


def _load_alone(target: Program, world: World, sample: Sample, option: int) -> Program:
    """Without the model."""
    found = _tune(target, world, sample, option)
    assert isinstance(found, gw.TunedModule)
    with tempfile.TemporaryDirectory() as folder:
        gw.save(found, Path(folder) / "saved.gw")
        return gw.load(Path(folder) / "saved.gw", trust=True)


def _callables(target: Program, world: World, sample: Sample, option: int) -> Program:
    return gw.make_graphed_callables(
        target, sample.args, sample_kwargs=sample.named, allow_unused_input=True
    )


def step_of(target: Program, world: World, inner_trains: bool) -> Program:
    """A training step of a program."""

    def step(*args: Any, **named: Any) -> torch.Tensor:
        before = target(*args, **named) if inner_trains else None
        world.optimizer.zero_grad()
        loss = total((world.model if inner_trains else target)(*args, **named))
        loss.backward()
        world.optimizer.step()
        return loss.detach() if before is None else loss.detach() + total(before)

    return step


def _step(target: Program, world: World, sample: Sample, option: int) -> Program:
    return gw.graph_step(target, sample.args, optimizer=world.optimizer)


PARTS = {
    part.name: part
    for part in (
        Part("graph", _graph),
        Part("buckets", _buckets),
        Part("fuse", _fuse, mode=False, copies=True, audited=AUDITED[0]),
        Part("capture", _capture, keeps_grad=False),
        Part("tune", _tune, mode=False, copies=True, audited=AUDITED[1]),
        Part("make_graphed_callables", _callables),
        Part("graph_step", _step, mode=True),
        Part("load", _load, mode=False, copies=True),
    )
}


# ---------------------------------------------------------------- changes


@dataclass
class Side:
    """One of the two that are compared.

    Attributes:
        world: its own.
        program: what is called.
        knobs: of the plain Python around parts.
        real: whether it has our parts.
        model_counts: whether it follows the model; what was loaded without it does not.
    """

    world: World
    program: Program
    knobs: Knobs
    real: bool
    model_counts: bool = True


@dataclass(frozen=True)
class Change:
    """Something that is done between calls, to each side.

    Attributes:
        text: how it reads, with {} for a number.
        apply: does it.
        fits: what it can be done to.
        everywhere: it concerns both sides, and is done once.
        unseen: it leaves no trace: values change, and neither version nor address.
    """

    text: str
    apply: Callable[..., None]
    fits: Callable[[World], bool] = lambda world: True
    everywhere: bool = False
    unseen: bool = False


CHANGES: dict[str, Change] = {}


def change(text: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def added(apply: Callable[..., None]) -> Callable[..., None]:
        CHANGES[apply.__name__] = Change(text, apply, **options)
        return apply

    return added


@change("p.data.mul_({}) of all parameters", unseen=True)
def data_mul(side: Side, value: float) -> None:
    for parameter in side.world.model.parameters():
        parameter.data.mul_(value)


@change("p.data += {} of all parameters", unseen=True)
def data_add(side: Side, value: float) -> None:
    for parameter in side.world.model.parameters():
        parameter.data += value


@change("layer.bias.data = layer.bias.data + {}", fits=lambda world: world.layer.bias is not None)
def data_new(side: Side, value: float) -> None:
    side.world.layer.bias.data = side.world.layer.bias.data + value


@change("p.mul_({}) of all parameters, under no_grad")
def weight_mul(side: Side, value: float) -> None:
    with torch.no_grad():
        for parameter in side.world.model.parameters():
            parameter.mul_(value)


def _times(state: dict[str, Any], value: float) -> dict[str, Any]:
    return {n: t * value if t.is_floating_point() else t.clone() for n, t in state.items()}


@change("model.load_state_dict(… * {})")
def load_state_dict(side: Side, value: float) -> None:
    model = side.world.model
    model.load_state_dict(_times(model.state_dict(), value))


@change("model.load_state_dict(… * {}, assign=True)")
def load_assigned(side: Side, value: float) -> None:
    model = side.world.model
    model.load_state_dict(_times(model.state_dict(), value), assign=True)


def _plain_weight(world: World) -> bool:
    return not parametrize.is_parametrized(world.layer)


@change("layer.weight = Parameter(… * {})", fits=_plain_weight)
def other_parameter(side: Side, value: float) -> None:
    layer = side.world.layer
    layer.weight = nn.Parameter(layer.weight.detach() * value)


@change("layer.bias = None", fits=lambda world: world.layer.bias is not None)
def no_bias(side: Side, value: float) -> None:
    side.world.layer.bias = None


@change("layer = another Linear, * {}")
def other_submodule(side: Side, value: float) -> None:
    owner, name = side.world.slot
    fresh = copy.deepcopy(side.world.layer)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(value)
    setattr(owner, name, fresh)


@change("model.__class__ = a subclass whose forward is * {}")
def other_class(side: Side, value: float) -> None:
    _become(side.world.model, value)


@change("layer.__class__ = a subclass whose forward is * {}")
def other_class_of_layer(side: Side, value: float) -> None:
    _become(side.world.layer, value)


def _become(module: nn.Module, value: float) -> None:
    before = type(module)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return scaled(before.forward(self, *args, **named), value)

    module.__class__ = type(f"Scaled{before.__name__}", (before,), {"forward": forward})


@change("type(model).forward = itself * {}")
def class_forward(side: Side, value: float) -> None:
    own = type(side.world.model)
    before = own.forward
    own.forward = lambda self, *a, **named: scaled(before(self, *a, **named), value)


@change("nn.Linear.forward = itself * {}", everywhere=True)
def linear_forward(stack: contextlib.ExitStack, value: float) -> None:
    before = nn.Linear.forward
    stack.callback(setattr, nn.Linear, "forward", before)
    nn.Linear.forward = lambda self, x: before(self, x) * value


@change("model.forward = itself * {}")
def instance_forward(side: Side, value: float) -> None:
    model = side.world.model
    before = model.forward
    model.forward = lambda *a, **named: scaled(before(*a, **named), value)


@change("layer.forward = itself * {}")
def layer_forward(side: Side, value: float) -> None:
    layer = side.world.layer
    before = layer.forward
    layer.forward = lambda x: before(x) * value


def _toggle(side: Side, name: str, register: Callable[[], Any]) -> None:
    handle = side.world.handles.pop(name, None)
    if handle is None:
        side.world.handles[name] = register()
    else:
        handle.remove()


@change("a forward hook of the model, * {}, comes or goes")
def forward_hook(side: Side, value: float) -> None:
    model = side.world.model
    _toggle(side, "hook", lambda: model.register_forward_hook(lambda m, args, y: scaled(y, value)))


@change("a forward hook of the layer, * {}, comes or goes")
def layer_hook(side: Side, value: float) -> None:
    layer = side.world.layer
    _toggle(side, "of layer", lambda: layer.register_forward_hook(lambda m, args, y: y * value))


@change("a forward pre-hook of the layer, * {}, comes or goes")
def pre_hook(side: Side, value: float) -> None:
    layer = side.world.layer
    _toggle(
        side, "pre", lambda: layer.register_forward_pre_hook(lambda m, args: scaled(args, value))
    )


@change("a backward hook of the layer, * {}, comes or goes")
def backward_hook(side: Side, value: float) -> None:
    layer = side.world.layer
    _toggle(
        side,
        "backward",
        lambda: layer.register_full_backward_hook(lambda m, given, _: scaled(given, value)),
    )


@change("a forward hook of all Linear modules, * {}", everywhere=True)
def global_hook(stack: contextlib.ExitStack, value: float) -> None:
    def hook(module: nn.Module, args: Args, y: Any) -> Any:
        return scaled(y, value) if isinstance(module, nn.Linear) else None

    stack.callback(nn.modules.module.register_module_forward_hook(hook).remove)


@change("a forward pre-hook of all Linear modules, * {}", everywhere=True)
def global_pre_hook(stack: contextlib.ExitStack, value: float) -> None:
    def hook(module: nn.Module, args: Args) -> Any:
        return scaled(args, value) if isinstance(module, nn.Linear) else None

    stack.callback(nn.modules.module.register_module_forward_pre_hook(hook).remove)


class Stretched(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


@change("a parametrization of layer.weight, * {}, comes or goes")
def parametrization(side: Side, value: float) -> None:
    layer = side.world.layer
    if parametrize.is_parametrized(layer, "weight"):
        parametrize.remove_parametrizations(layer, "weight")
    else:
        parametrize.register_parametrization(layer, "weight", Stretched(value))


@change("model.train({} > 1)")
def train(side: Side, value: float) -> None:
    side.world.model.train(value > 1)


@change("layer.weight.requires_grad_({} > 1)", fits=_plain_weight)
def freeze(side: Side, value: float) -> None:
    side.world.layer.weight.requires_grad_(value > 1)


@change("a step of an optimizer, eagerly")
def optimizer_step(side: Side, value: float) -> None:
    world = side.world
    world.optimizer.zero_grad()
    with torch.enable_grad():
        # What the weights are is enough: the programs differ in how they are called.
        loss = sum(p.square().sum() for p in world.model.parameters() if p.requires_grad)
        if not isinstance(loss, torch.Tensor):
            return
        loss.backward()
    world.optimizer.step()
    world.optimizer.zero_grad()


@change("the optimizer's lr = {} / 40")
def optimizer_rate(side: Side, value: float) -> None:
    for group in side.world.optimizer.param_groups:
        group["lr"] = value / 40


@change("the optimizer's momentum = {} / 4")
def optimizer_momentum(side: Side, value: float) -> None:
    for group in side.world.optimizer.param_groups:
        group["momentum"] = value / 4


@change("the optimizer's weight_decay = {} / 100")
def optimizer_decay(side: Side, value: float) -> None:
    for group in side.world.optimizer.param_groups:
        group["weight_decay"] = value / 100


@change("model.double() or model.float()")
def precision(side: Side, value: float) -> None:
    model = side.world.model
    wide = next(model.parameters()).dtype is torch.float64
    model.float() if wide else model.double()


@change("autocast to bfloat16 is on", everywhere=True)
def autocast(stack: contextlib.ExitStack, value: float) -> None:
    # It stays on over changes of weights, of which eager would keep stale casts.
    options: dict[str, Any] = {"dtype": torch.bfloat16, "cache_enabled": False}
    stack.enter_context(torch.autocast("cpu", **options))
    if torch.cuda.is_available():
        stack.enter_context(torch.autocast("cuda", **options))


@change("the default dtype is float64", everywhere=True)
def default_dtype(stack: contextlib.ExitStack, value: float) -> None:
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


@change("deterministic algorithms", everywhere=True)
def deterministic(stack: contextlib.ExitStack, value: float) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    stack.callback(torch.use_deterministic_algorithms, before)
    torch.use_deterministic_algorithms(not before, warn_only=True)


@change("attention by the math kernel alone", everywhere=True)
def attention_kernel(stack: contextlib.ExitStack, value: float) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    stack.enter_context(sdpa_kernel(SDPBackend.MATH))


@change("gw.tune(model) once more")
def tuned_again(side: Side, value: float) -> None:
    if side.real and not side.world.model.training:
        with contextlib.suppress(gw.GraphwrightError):
            _tune(side.world.model, side.world, sample_of(side.world), int(value) % 4)


@change("gw.graph(model)(x), and away with it")
def graphed_beside(side: Side, value: float) -> None:
    sample = sample_of(side.world)
    with torch.no_grad(), restored(side.world):
        program = gw.graph(side.world.model) if side.real else side.world.model
        program(*sample.args, **sample.named)


@change("torch.compile(model)(x)", fits=lambda world: world.pure)
def compiled_beside(side: Side, value: float) -> None:
    with torch.no_grad():
        sample = sample_of(side.world)
        torch.compile(side.world.model, backend="eager")(*sample.args, **sample.named)


@change("model.compile()")
def compiled_in_place(side: Side, value: float) -> None:
    side.world.model.compile(backend="eager")


@contextlib.contextmanager
def restored(world: World) -> Iterator[None]:
    """Buffers as they were, whatever runs meanwhile."""
    kept = [(b, b.detach().clone()) for b in world.model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


# Often the first: only some programs hold copies of weights, which these make stale.
IN_PLACE = ["data_mul", "data_add", "weight_mul", "load_state_dict", "optimizer_step"]
# TorchDynamo does not notice these itself, nor does what was loaded without the model.
OF_CODE = {
    "linear_forward",
    "global_hook",
    "global_pre_hook",
    "class_forward",
    "other_class",
    "other_class_of_layer",
    "instance_forward",
    "layer_forward",
}
# What only steps of training see.
OF_TRAINING = {"optimizer_rate", "optimizer_momentum", "optimizer_decay"}
# What torch.compile made of a call with keywords answers one with others in another order, too.
COMPILING = {"compiled_beside", "compiled_in_place"}
SLOW = {*COMPILING, "tuned_again"}


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Asked:
    """How a program is called.

    Attributes:
        batch: rows of the input.
        layout: how it lies in memory: "plain", "turned" or "gapped".
        dtype: of it.
        mode: of gradients: "no_grad", "grad", "input" (the input requires grad) or "inference".
        how: "once", "threads" (eight at once) or "copy" (a deep copy is called).
        factor: the plain number, for models that take one.
        order: which of the orders of keyword arguments.
    """

    batch: int = BATCH
    layout: str = "plain"
    dtype: torch.dtype = torch.float32
    mode: str = "no_grad"
    how: str = "once"
    factor: Any = 1.5
    order: int = 0

    def __str__(self) -> str:
        shown = [f"batch {self.batch}", self.mode]
        shown += [self.layout] * (self.layout != "plain") + [self.how] * (self.how != "once")
        shown += [str(self.dtype)] * (self.dtype is not torch.float32)
        shown += [f"order {self.order}"] * (self.order != 0)
        shown += [f"factor {self.factor!r}"] * (self.factor != 1.5 or self.factor is True)
        return ", ".join(shown)


@dataclass(frozen=True)
class Step:
    """A change, by its name or as the number of a knob, and the call after it."""

    change: str | int | None
    value: float
    asked: Asked


@dataclass(frozen=True)
class Shape:
    """What a program is made of, from the inside out."""

    inside: str
    inner: str
    between: str
    outer: str
    around: str


@dataclass(frozen=True)
class Case:
    """A program and what is done to it."""

    shape: Shape
    kind: str
    seed: int
    options: tuple[int, int]  # of the inner and the outer part
    training: bool  # the mode that parts are made in, where they have no wish of their own
    alone: bool  # what is loaded is loaded without the model
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        shape, lines = self.shape, [f"model = {self.kind} (seed {self.seed})"]
        for name, option in ((shape.inner, self.options[0]), (shape.outer, self.options[1])):
            more = " without the model" if self.alone and name == "load" else ""
            which = STRATEGIES[option] if name in ("tune", "load") else f"option {option}"
            lines.append(f"{name}: {which}{more}")
        text = "model"
        for name in (shape.inside, shape.inner, shape.between, shape.outer, shape.around):
            text = text if name == "nothing" else f"{name}({text})"
        lines.append(f"program = {text}, made in {'train' if self.training else 'eval'} mode")
        for index, step in enumerate(self.steps):
            lines.append(f"{index}. {text_of(step)}; call: {step.asked}")
        return "\n".join(lines)


def text_of(step: Step) -> str:
    if step.change is None:
        return "nothing changes"
    if isinstance(step.change, int):
        return f"knob {step.change} is set to {step.value}"
    return CHANGES[step.change].text.format(step.value)


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    by %= len(values)
    return [*values[by:], *values[:by]]


# Several times what is common.
_BATCHES = (BATCH,) * 5 + (1, 2, 4, 5)
_LAYOUTS = ("plain",) * 6 + ("turned", "gapped")
_DTYPES = (torch.float32,) * 9 + (torch.float64,)
_MODES = ("no_grad",) * 5 + ("grad", "input", "inference")
_HOWS = ("once",) * 10 + ("threads", "copy")
_FACTORS = (1.5, 1.5, 2, 2.0, True, 3.0)


@st.composite
def cases(draw: st.DrawFn, shape: Shape, turn: int = 0, *, named: bool = False) -> Case:
    """Cases of a shape.

    Args:
        draw: Hypothesis's.
        shape: what the program is made of.
        turn: of the choices, so that the simplest case is another one for each shape.
        named: of models that take more than a tensor, by name and in objects.
    """
    # Twice the one whose weights are folded.
    kinds = [*NAMED_KINDS] if named else [*KINDS, "convolutional"]
    name = draw(st.sampled_from(rotated(kinds, turn)))
    trains = "graph_step" in (shape.inner, shape.outer)
    held = [PARTS[part] for part in (shape.inner, shape.outer) if PARTS[part].copies]
    unseen = all(part.audited for part in held)
    left_out = SLOW if trains and named else SLOW | OF_TRAINING
    quick = [n for n, c in CHANGES.items() if n not in left_out and (unseen or not c.unseen)]
    allowed: list[Any] = [*quick, *quick, *sorted(SLOW - COMPILING if named else SLOW)]
    if trains and named:
        allowed += sorted(OF_TRAINING) * 4
    allowed += [index for index in range(12) for _ in range(8)]
    modes = ("grad",) if trains else _MODES
    steps = []
    for place in range(draw(st.integers(2, 5))):
        by = turn * 7 + place * 13
        asked = Asked(
            batch=draw(st.sampled_from(_BATCHES)),
            layout=draw(st.sampled_from(_LAYOUTS)),
            dtype=draw(st.sampled_from(_DTYPES)),
            mode=draw(st.sampled_from(rotated(modes, turn % 3 * 3))),
            how=draw(st.sampled_from(_HOWS)),
            factor=draw(st.sampled_from(_FACTORS)),
            order=draw(st.integers(0, 5)) if named else 0,
        )
        first = place == 0 and draw(st.sampled_from((False, False, False, True)))
        names = [n for n in IN_PLACE if n in quick] if first else allowed
        picked = draw(st.sampled_from(rotated(names, by)))
        steps.append(Step(picked, draw(st.sampled_from((2.0, 0.5, 3.0))), asked))
    return Case(
        shape,
        name,
        draw(st.integers(0, 3)),
        (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        draw(st.sampled_from((False, False, True))),
        not trains and draw(st.sampled_from((False, False, True))),
        tuple(steps),
    )


# ---------------------------------------------------------------- the check


def sample_of(world: World, asked: Asked | None = None, seed: int = 0) -> Sample:
    """Arguments of a call."""
    asked = asked or Asked()
    generator = torch.Generator().manual_seed(seed)
    shape = (asked.batch, *world.tail)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32}
    if asked.layout == "turned":
        x = torch.randn(*world.tail, asked.batch, **options).movedim(-1, 0)
    elif asked.layout == "gapped":
        x = torch.randn(*shape[:-1], 2 * shape[-1], **options)[..., ::2]
    else:
        x = torch.randn(shape, **options)
    model = next(world.model.parameters()).dtype
    dtype = asked.dtype if model is torch.float32 else model
    x = _on(x, world.device, dtype)
    x.requires_grad_(asked.mode == "input")
    if world.more is not None:
        args, named = world.more(x, asked.factor, seed)
        return Sample((x, *args), in_an_order(named, asked.order))
    return Sample((x, asked.factor) if world.factors else (x,), {})


def in_an_order(named: Named, turn: int) -> Named:
    """The same keyword arguments in one of their orders."""
    orders = [*itertools.permutations(named)]
    return {name: named[name] for name in orders[turn % len(orders)]}


def _on(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Elsewhere, with the same strides."""
    if (x.device, x.dtype) == (device, dtype):
        return x
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    found = torch.zeros(size, device=device, dtype=dtype).as_strided(x.shape, x.stride())
    return found.copy_(x)


def build(case: Case, world: World, *, real: bool) -> Side:
    """The program on one side."""
    shape, sample = case.shape, sample_of(world)
    side = Side(world, world.model, {}, real)
    _wrap(side, shape.inside, "inside")
    _part(side, case, shape.inner, case.options[0], sample, inner_trains=False)
    _wrap(side, shape.between, "between")
    trains = shape.inner == "graph_step"
    _part(side, case, shape.outer, case.options[1], sample, inner_trains=trains)
    _wrap(side, shape.around, "around")
    world.model.train("graph_step" in (shape.inner, shape.outer) or case.training)
    if case.alone and "load" in (shape.inner, shape.outer):
        world.model.eval()  # As it was when it was saved.
    return side


def _wrap(side: Side, name: str, where: str) -> None:
    side.program, knobs = WRAPPINGS[name](side.program, side.world)
    side.knobs |= {f"{where}: {text}": turn for text, turn in knobs.items()}


def _part(
    side: Side, case: Case, name: str, option: int, sample: Sample, *, inner_trains: bool
) -> None:
    part, world = PARTS[name], side.world
    world.model.train(case.training if part.mode is None else part.mode)
    target = step_of(side.program, world, inner_trains) if name == "graph_step" else side.program
    if not side.real:
        # To a checkpoint around a graph, even of a step that goes eager, nothing inside is saved.
        side.program = unseen(target) if inner_trains and name in ("graph", "buckets") else target
    elif case.alone and name == "load":
        side.program = _load_alone(target, world, sample, option)
    else:
        kept = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (*sample,))
        arguments = Sample(*kept)
        side.program = part.make(target, world, arguments, option)


@contextlib.contextmanager
def cheap_tuning(device: torch.device) -> Iterator[None]:
    """Nothing is timed for longer than it must be; graphs on the CPU may be chosen."""
    with contextlib.ExitStack() as stack:
        for name, value in {
            "tuning.tuner.SCREENING_S": 0.0,
            "tuning.tuner.FINAL_S_EACH": 0.0,
            "evaluation.measurement.WARMUP_S": 0.0,
            "evaluation.measurement.MAX_CALLS_PER_BLOCK": 1,
            "evaluation.measurement.MIN_ROUNDS": 2,
            "evaluation.measurement.MAX_ROUNDS": 2,
            "evaluation.measurement.BLOCK_S": 1e-4,
        }.items():
            stack.enter_context(mock.patch(f"graphwright.{name}", value))
        # It collects garbage a dozen times, so that its figures are steady.
        stack.enter_context(mock.patch("gc.collect", return_value=0))
        probed = {(id(GRAPH), device.type): (GRAPH, AVAILABLE)}
        stack.enter_context(mock.patch.dict("graphwright.strategies.base._probed", probed))
        yield


@contextlib.contextmanager
def ours_expected(*, real: bool) -> Iterator[None]:
    """All warnings are errors, but for ours that calls run eagerly, and those that eager has."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if real else "ignore")
        warnings.filterwarnings("ignore", "(?s).*runs? eagerly")
        warnings.filterwarnings("ignore", "(?s).*what was gained is lost")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        for told in _EAGER_S_OWN:
            warnings.filterwarnings("ignore", told)
        yield


_EAGER_S_OWN = (
    "Full backward hook is firing when gradients are computed with respect to module outputs",
    ".*not part of single contiguous chunk of memory",
    "Using a non-tuple sequence",
    ".*None of the inputs have requires_grad",
    "(?s).*Dynamo",
    "Using `torch.compile",
    # PyTorch's own look at what functional_call puts into a module, once a process.
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "Attempting to run cuBLAS, but there was no current CUDA context",  # A new thread's first.
)


def check(case: Case, device: torch.device) -> Counter[str]:
    """Do what a case says on both sides.

    Returns:
        how often something was compared, and how often refused, by the error.

    Raises:
        Wrong: they do not agree, or what eager does fails here.
    """
    # Code of other cases that is the same would be compiled with what these left in its cache.
    torch._dynamo.reset()
    with cheap_tuning(device), time_limit(LIMIT_S), contextlib.ExitStack() as stack:
        stack.callback(_back, torch.get_default_dtype())
        # By default TorchDynamo does not notice hooks that come later.
        stack.enter_context(mock.patch("torch._dynamo.config.skip_nnmodule_hook_guards", False))
        run = _Run(case, device, stack)
        try:
            return run.run()
        except Hangs as error:
            raise run.wrong("after what was done last", "an end", _shown(error)) from error


# A case takes a tenth of a second, some half a minute, or more on a busy machine: buckets that see
# new parameters at each call.
LIMIT_S = 300.0


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hangs in the midst of what takes longer."""

    def stop(*_: object) -> None:
        raise Hangs(f"a case took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _back(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)


def _reset_dynamo() -> None:
    import torch._dynamo

    torch._dynamo.reset()


class _Run:
    """One case as it is checked."""

    def __init__(self, case: Case, device: torch.device, stack: contextlib.ExitStack) -> None:
        self.case, self.device, self.stack = case, device, stack
        self.tally: Counter[str] = Counter()
        self.loose = False  # Half precision is at work.
        self.done: list[str] = []
        shape = case.shape
        self.parts = [PARTS[shape.inner], PARTS[shape.outer]]
        self.trains = "graph_step" in (shape.inner, shape.outer)
        self.alone = case.alone and "load" in (shape.inner, shape.outer)
        wraps = {shape.inside, shape.between, shape.around}
        self.compiles = "compiled" in wraps
        self.swaps = "functional" in wraps
        self.static = any(
            (p.name, o % 2) in (("graph", 1), ("capture", 1))
            for p, o in zip(self.parts, case.options, strict=True)
        )
        self.held: tuple[Any, Any] | None = None  # what the last call returned

    def run(self) -> Counter[str]:
        case = self.case
        if self.compiles or any(s.change in SLOW for s in case.steps):
            _reset_dynamo()
        its = self._twin()
        try:
            with ours_expected(real=True):
                mine = build(case, made(case.kind, case.seed, self.device), real=True)
        except gw.GraphwrightError as error:
            self.tally[f"refused when made: {type(error).__name__}"] += 1
            return self.tally
        except Exception as error:
            raise self.wrong("putting it together", "no error", _shown(error)) from error
        mine.model_counts = True
        seed = 0
        for asked in (Asked(mode="grad" if self.trains else "no_grad"),) * 2:
            seed += 1
            if not self._called(mine, its, asked, seed, "before any change"):
                return self.tally
        for step in case.steps:
            text = self._changed(mine, its, step)
            if text is None:
                return self.tally
            for _ in range(2):
                seed += 1
                if not self._called(mine, its, step.asked, seed, text):
                    return self.tally
        return self.tally

    def _twin(self) -> Side:
        world = made(self.case.kind, self.case.seed, self.device)
        with ours_expected(real=False):
            side = build(self.case, world, real=False)
        side.model_counts = not self.alone
        return side

    def wrong(self, where: str, expected: str, got: str) -> Wrong:
        history = "\n".join(f"  {line}" for line in self.done)
        return Wrong(
            f"{self.case}\ndone so far:\n{history}\n{where}:\nexpected: {expected}\ngot: {got}"
        )

    # Changes.

    def _changed(self, mine: Side, its: Side, step: Step) -> str | None:
        """Do a change to both; how it reads, or None where it cannot be done."""
        if step.change is None:
            return "nothing"
        if isinstance(step.change, int):
            return self._knob(mine, its, step.change, step.value)
        it = CHANGES[step.change]
        if not it.fits(mine.world):
            return "nothing"
        if step.change in OF_CODE and (self.compiles or (self.alone and it.everywhere)):
            return "nothing"
        self.compiles |= step.change in ("compiled_beside", "compiled_in_place")
        text = it.text.format(step.value)
        self.done.append(text)
        self.loose |= step.change == "autocast"
        if it.everywhere:
            it.apply(self.stack, step.value)
            return text
        if self.alone and step.change in ("tuned_again", "graphed_beside", "precision"):
            return text
        failed = []
        for side in (its, mine):
            if not side.model_counts:
                continue
            try:
                with ours_expected(real=side.real):
                    it.apply(side, step.value)
                failed.append(None)
            except Exception as error:
                failed.append(error)
        if failed[-1] is not None and (len(failed) == 1 or failed[0] is None):
            if self.alone:
                return None
            raise self.wrong(f"the change itself: {text}", "no error", _shown(failed[-1]))
        return None if any(failed) else text

    def _knob(self, mine: Side, its: Side, index: int, value: float) -> str:
        both = [(mine.knobs, its.knobs, True), (mine.world.knobs, its.world.knobs, False)]
        found = [(text, m[text], i[text], plain) for m, i, plain in both for text in m]
        if not found:
            return "nothing"
        text, turn, other, plain = found[index % len(found)]
        if self.alone and (not plain or not text.startswith(self._outside())):
            turn(value)  # What was saved does not know of it.
        else:
            with torch.no_grad():
                other(value)
                turn(value)
        self.done.append(text.format(value))
        return text.format(value)

    def _outside(self) -> tuple[str, ...]:
        """What is around that which was loaded without the model."""
        return ("around",) if self.case.shape.outer == "load" else ("between", "around")

    # Calls.

    def _called(self, mine: Side, its: Side, asked: Asked, seed: int, after: str) -> bool:
        """Call both and compare; False where the case ends."""
        where = f"call {seed}, after {after} ({asked})"
        self.done.append(f"call {seed}: {asked}")
        with ours_expected(real=False):
            expected = self._outcome(its, asked, seed)
        with ours_expected(real=True):
            got = self._outcome(mine, asked, seed)
        if isinstance(got.error, gw.GraphwrightError):
            self.tally[f"refused: {type(got.error).__name__}"] += 1
            # What eager did to its state was not done here.
            return its.world.pure and not self.trains and mine.world.pure
        if type(got.error).__name__ == "InternalTorchDynamoError":
            # Of the user's own torch.compile, and loud; with functional_call it comes and goes.
            self.tally["TorchDynamo fails"] += 1
            return False
        if self.trains and not mine.world.model.training and "not require grad" in str(got.error):
            # By a graph, a model in eval mode is for inference.
            self.tally["no gradients in eval mode"] += 1
            return False
        if expected.error is not None or got.error is not None:
            if got.error is None:
                raise self.wrong(where, _shown(expected.error), "no error")
            if expected.error is None:
                raise self.wrong(where, "no error", _shown(got.error)) from got.error
            self.tally["fails as eager does"] += 1
            return its.world.pure and not self.trains
        self.tally["compared"] += 1
        # What the call before gave is the caller's own, but where the two share memory in eager.
        if self.held is not None and not self.static:
            self._compare(f"what was held over {where}", *self.held)
        self.held = None if expected.raw is None else (expected.raw, got.raw)
        self._compare(where, expected.found, got.found)
        if not self.alone:
            self._compare(f"what {where} leaves", its.world.state(), mine.world.state())
        return True

    def _threads_fit(self, side: Side) -> bool:
        wraps = {self.case.shape.inside, self.case.shape.between, self.case.shape.around}
        return (
            side.world.pure
            and not side.world.draws
            and not self.trains
            and not self.static
            and not self.loose  # Autocast is a thread's own.
            and not wraps & {"functional", "compiled", "checkpointed"}
            and all(part.name != "make_graphed_callables" for part in self.parts)
        )

    def _outcome(self, side: Side, asked: Asked, seed: int) -> Outcome:
        torch.manual_seed(seed)
        if asked.how == "threads" and self._threads_fit(side) and asked.mode == "no_grad":
            return _in_threads(side, asked, seed)
        program = side.program
        # Gradients of a copy are no gradients of the model.
        copied = asked.how == "copy" and side.world.pure and not self.trains
        if copied and isinstance(program, nn.Module):
            try:
                program = copy.deepcopy(program)
            except Exception as error:
                return Outcome(None, error)
        args, named = sample_of(side.world, asked, seed)
        wanted = self._grad_wanted(side, asked) and not copied
        try:
            with _gradients(asked.mode):
                result = program(*args, **named)
            found: dict[str, Any] = {"result": pytree.tree_map_only(torch.Tensor, _kept, result)}
            found["the input"] = _kept(args[0])
            if wanted:
                found |= self._gradients(side, args, result)
        except Exception as error:
            return Outcome(None, error)
        finally:
            if not self.trains:
                for parameter in side.world.model.parameters():
                    parameter.grad = None
        return Outcome(found, None, None if wanted else result)

    def _grad_wanted(self, side: Side, asked: Asked) -> bool:
        """Whether gradients have to come back: gradients are on, and somebody asks for them."""
        if self.trains or self.alone or asked.mode not in ("grad", "input"):
            return False
        if not all(part.keeps_grad for part in self.parts):
            return False
        return asked.mode == "input" or side.world.model.training

    def _gradients(self, side: Side, args: Args, result: Any) -> dict[str, Any]:
        """Of a loss of the result, for the input and the parameters."""
        loss = total(result)
        found: dict[str, Any] = {"the result requires grad": loss.requires_grad}
        if loss.requires_grad:
            loss.backward()
            found["grad of the input"] = args[0].grad
            for name, parameter in side.world.model.named_parameters():
                found[f"grad of {name}"] = parameter.grad
        return found

    # Comparison.

    def _compare(self, where: str, expected: Any, got: Any) -> None:
        theirs, spec = pytree.tree_flatten_with_path(expected)
        mine, other = pytree.tree_flatten_with_path(got)
        if spec != other:
            raise self.wrong(where, f"a tree {spec}", f"a tree {other}")
        for (path, a), (_, b) in zip(theirs, mine, strict=True):
            why = self._differs(a, b)
            if why is not None:
                name = pytree.keystr(path)
                raise self.wrong(f"{name} of {where}", str(_short(a)), f"{_short(b)}: {why}")

    def _differs(self, a: Any, b: Any) -> str | None:
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            same = type(a) is type(b) and (a is b or a == b)
            return None if same else "another value"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{tuple(b.shape)} {b.dtype} instead of {tuple(a.shape)} {a.dtype}"
        x, y = a.detach().cpu().double(), b.detach().cpu().double()
        if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.isinf(), y.isinf()):
            return "NaN or Inf in other places"
        x, y = x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)
        peak = float(x.abs().max()) if x.numel() else 0.0
        off = float((x - y).abs().max()) if x.numel() else 0.0
        half = self.loose or a.dtype in (torch.bfloat16, torch.float16)
        if off <= (5e-2 if half else 3e-4) * peak + 1e-5:
            return None
        return f"off by {off:.3g} where the largest is {peak:.3g}"


@dataclass
class Outcome:
    """What a call gave: copies of it, or an error; and itself."""

    found: Any
    error: Exception | None
    raw: Any = None


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _gradients(mode: str) -> Any:
    if mode == "inference":
        return torch.inference_mode()
    return torch.set_grad_enabled(mode in ("grad", "input"))


def _in_threads(side: Side, asked: Asked, seed: int) -> Outcome:
    """Eight calls, at once with our parts and one by one without."""
    samples = [sample_of(side.world, asked, 100 * seed + index) for index in range(8)]
    found: list[Any] = [None] * 8
    errors: list[Exception] = []
    start = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            if side.real:
                start.wait()
            with torch.no_grad():
                result = side.program(*samples[index].args, **samples[index].named)
            found[index] = pytree.tree_map_only(torch.Tensor, _kept, result)
        except Exception as error:
            errors.append(error)

    if side.real:
        workers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    else:
        for index in range(8):
            work(index)
    errors.sort(key=lambda error: isinstance(error, gw.GraphwrightError))
    return Outcome({f"thread {i}": f for i, f in enumerate(found)}, errors[0] if errors else None)


def _shown(error: BaseException | None) -> str:
    import traceback

    if error is None:
        return "no error"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}: {str(error)[:400]}{where}"


def _short(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().flatten()[:4].tolist()
    return f"{tuple(value.shape)} {value.dtype} {flat}"


# ---------------------------------------------------------------- the plan

PER_PAIR = 4  # shapes of each pair of parts
EXAMPLES = 9  # of each shape


def examples_of(shape: Shape) -> int:
    """How many cases; few where TorchDynamo goes through our own code, which takes seconds."""
    return 3 if "compiled" in (shape.between, shape.around) else EXAMPLES


def drawn(shape: Shape, turn: int, count: int, *, named: bool = False) -> list[Case]:
    """Random cases of a shape, the same ones each time."""
    found: list[Case] = []

    @seed(turn)
    @settings(
        max_examples=count,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(cases(shape, turn, named=named))
    def run(case: Case) -> None:
        found.append(case)

    run()
    return found


def search(
    shape: Shape, turn: int, examples: int, device: torch.device, *, named: bool = False
) -> int:
    """Check random cases of a shape, the same ones each time; how many.

    Raises:
        Wrong: for the first that is wrong, made as simple as a few tries allow.
    """
    found = drawn(shape, turn, examples, named=named)
    for case in found:
        try:
            check(case, device)
        except Wrong as wrong:
            if isinstance(wrong.__cause__, Hangs):
                raise
            raise simplest(case, wrong, device) from wrong.__cause__
    return len(found)


def simplest(case: Case, wrong: Wrong, device: torch.device) -> Wrong:
    """What is wrong with the simplest case that still is.

    Hypothesis would do so too, but not with the parts, and for as long as minutes.
    """
    simpler = True
    while simpler:
        simpler = False
        for other in simpler_ones(case):
            try:
                check(other, device)
            except Wrong as error:
                if isinstance(error.__cause__, Hangs):
                    continue
                case, wrong, simpler = other, error, True
                break
    return wrong


def simpler_ones(case: Case) -> Iterator[Case]:
    """The same with a step less, with less around, or with plainer calls."""
    for index in range(len(case.steps)):
        yield replace(case, steps=(*case.steps[:index], *case.steps[index + 1 :]))
    for place in ("inside", "between", "around"):
        if getattr(case.shape, place) != "nothing":
            yield replace(case, shape=replace(case.shape, **{place: "nothing"}))
    for index, step in enumerate(case.steps):
        plain = Asked(mode="grad" if step.asked.mode == "grad" else "no_grad")
        if step.asked != plain:
            changed = replace(step, asked=plain)
            yield replace(case, steps=(*case.steps[:index], changed, *case.steps[index + 1 :]))
    if case.training:
        yield replace(case, training=False)


def plan() -> dict[tuple[str, str], list[Shape]]:
    """Shapes for every ordered pair of parts; wrappings go round so that each meets each part."""
    names, found = list(WRAPPINGS), {}
    for i, inner in enumerate(PARTS):
        for j, outer in enumerate(PARTS):
            shapes = []
            for k in range(PER_PAIR):
                a = (j * PER_PAIR + k) % len(names)  # inside: by the outer part, for each inner
                b = ((i + j) * PER_PAIR + k + j // 4) % len(names)
                c = (i * PER_PAIR + k) % len(names)
                shapes.append(Shape(names[a], inner, names[b], outer, names[c]))
            found[inner, outer] = shapes
    return found
