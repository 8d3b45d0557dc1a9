"""Calls of a known shape are taken apart as others are, or not at all."""

from __future__ import annotations

import contextlib
import copy
import enum
import gc
import math
import random
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from graphwright.calls.signature import CallSignature
from graphwright.calls.split import Pattern, flatten, objects_of

Pair = namedtuple("Pair", ["first", "second"])
Call = tuple[tuple[Any, ...], dict[str, Any]]
SEEDS = range(90)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Held:
    """An object with attributes."""


class Other(Held):
    """One of another class."""


class WithSlots:
    __slots__ = ("x",)


@dataclass
class Layer:
    keys: torch.Tensor = field(default_factory=lambda: torch.randn(2, 3))
    length: int = 1000
    scale: float = 0.5


PLAIN: list[Callable[[random.Random], Any]] = [
    lambda dice: dice.choice([0, 1, 5, 1000, 10**20]),
    lambda dice: dice.choice([0.0, -0.0, 0.5, math.nan]),
    lambda dice: dice.choice([True, False, None, "text", b"bytes"]),
    lambda dice: dice.choice([torch.float16, torch.device("cpu"), 2j]),
]
# What a pattern does not know, so that each call is taken apart in full.
UNKNOWN: list[Callable[[], Any]] = [
    lambda: {1, 2},
    WithSlots,
    lambda: type("Row", (list,), {})([1]),
]


def tree(dice: random.Random, depth: int, shared: list[Any]) -> Any:
    """A random argument; `shared` are objects that may have several places."""
    kind = dice.randrange(10 if depth else 3)
    if kind == 0:
        return torch.randn(dice.choice([1, 2, 3]), 2)
    if kind <= 2:
        return dice.choice(PLAIN)(dice)
    inner = [tree(dice, depth - 1, shared) for _ in range(dice.randrange(4))]
    if kind == 3:
        made: Any = inner
    elif kind == 4:
        made = tuple(inner)
    elif kind == 5:
        made = {dice.choice(["a", "b", "c", 1, "d"]): each for each in inner}
    elif kind == 6:
        made = OrderedDict((str(place), each) for place, each in enumerate(inner))
    elif kind == 7:
        made = Pair(inner, dice.choice([Colour.RED, torch.Size([2]), torch.strided]))
    elif kind == 8 and shared:
        return dice.choice(shared)
    else:
        made = dice.choice([Held, Other, Layer])()
        for place, each in enumerate(inner):
            setattr(made, f"at{place}", each)
    if not isinstance(made, tuple):
        shared.append(made)
    return made


def call_of(seed: int) -> Call:
    dice, shared = random.Random(seed), []
    torch.manual_seed(seed)
    args = tuple(tree(dice, 3, shared) for _ in range(dice.randrange(1, 4)))
    named = {name: tree(dice, 3, shared) for name in dice.sample(["x", "y", "z"], 2)}
    return (*args, torch.randn(2)), named


def parts_of(call: Call) -> list[Any]:
    """The containers and objects of a call that something may be changed in."""
    found, waiting, seen = [], [*call[0], call[1]], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, torch.Tensor | enum.Enum | torch.Size):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif not hasattr(each, "__dict__") or isinstance(each, type):
            continue
        else:
            waiting += vars(each).values()
        if not isinstance(each, tuple):
            found.append(each)
    return found


def changed(call: Call, dice: random.Random) -> Call:
    """Another call: something in a copy of one is changed."""
    args, kwargs = copy.deepcopy(call)
    parts = parts_of((args, kwargs))
    part = dice.choice(parts)
    held: Any = part if isinstance(part, list | dict) else vars(part)
    value = dice.choice(
        [
            lambda: dice.choice(PLAIN)(dice),
            lambda: torch.randn(2, 2),
            lambda: torch.nn.Parameter(torch.randn(2)),
            lambda: dice.choice(parts) if dice.random() < 0.5 else Held(),
            dice.choice(UNKNOWN),
        ]
    )()
    if isinstance(held, list):
        how = dice.randrange(4) if held else 0
        if how == 0:
            held.append(value)
        elif how == 1:
            held.pop()
        elif how == 2:
            held.reverse()
        else:
            held[dice.randrange(len(held))] = value
    else:
        names = [*held]
        how = dice.randrange(5) if names else 0
        if how == 0:
            held["new"] = value
        elif how == 1:
            del held[dice.choice(names)]
        elif how == 2:
            held[names[0]] = held.pop(names[0])
        elif how == 3 and not isinstance(part, dict):
            part.__class__ = dice.choice([Held, Other, Layer])
        else:
            held[dice.choice(names)] = value
    return args, kwargs


def pattern_of(call: Call, *, any_order: bool = False) -> tuple[CallSignature, Pattern | None]:
    signature = CallSignature.of(*call, objects=True, any_order=any_order, lasts=True)
    return signature, signature.pattern


def assert_as_in_full(pattern: Pattern, call: Call, spec: Any) -> bool:
    """Whether a call is of the pattern; then it is what taking it apart in full gives."""
    found = pattern.split(*call)
    if found is None:
        return False
    leaves, other = flatten(*call, objects=True)
    assert other == spec
    assert len(found.leaves) == len(leaves)
    for place, (mine, its) in enumerate(zip(found.leaves, leaves, strict=True)):
        # Plain values are those of the pattern, which are as good.
        same = mine is its or (place not in pattern.places and repr(mine) == repr(its))
        assert same, place
    objects = objects_of(*call)
    assert len(found.objects) == len(objects)
    assert all(mine is its for mine, its in zip(found.objects, objects, strict=True))
    return True


def test_calls_are_taken_apart_as_in_full() -> None:
    known = fitting = 0
    for seed in SEEDS:
        call = call_of(seed)
        try:
            signature, pattern = pattern_of(call)
        except Exception:  # An object holds itself, or is refused.
            continue
        if pattern is None:
            continue
        known += 1
        assert assert_as_in_full(pattern, call, signature.spec)
        assert assert_as_in_full(pattern, copy.deepcopy(call), signature.spec)
        dice = random.Random(seed)
        for _ in range(20):
            other = changed(call, dice)
            try:
                expected = CallSignature.of(*other, objects=True) == signature
            except Exception:
                expected = False
            assert_as_in_full(pattern, other, signature.spec) if expected else None
            found = signature.split(*other)
            assert expected or found is None, seed
            assert signature.fits(*other) is expected, seed
            fitting += expected
    assert known > len(SEEDS) // 4
    assert fitting > known  # Some changes are none.


def cache(layers: int = 3) -> Held:
    made = Held()
    vars(made).update(layers=[Layer() for _ in range(layers)], dtype=torch.float32)
    vars(made).update(table={name: torch.randn(2, 3) for name in "ab"}, size=torch.Size([2]))
    vars(made).update(notes=[Held(), Held()])
    return made


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another number": lambda c: setattr(c.layers[1], "length", 1001),
    "a negative zero": lambda c: setattr(c.layers[1], "scale", -0.0),
    "an int for a float": lambda c: setattr(c.layers[1], "scale", 0),
    "another attribute": lambda c: setattr(c.layers[1], "more", None),
    "one attribute less": lambda c: delattr(c.layers[1], "scale"),
    "another order": lambda c: setattr(c.layers[1], "keys", vars(c.layers[1]).pop("keys")),
    "another key": lambda c: c.table.update(c=c.table.pop("b")),
    "another size": lambda c: setattr(c, "size", torch.Size([3])),
    "one note twice": lambda c: c.notes.__setitem__(1, c.notes[0]),
    "another class": lambda c: setattr(c.layers[1], "__class__", Other),
    "one layer more": lambda c: c.layers.append(Layer()),
    "a tuple for a list": lambda c: setattr(c, "layers", tuple(c.layers)),
    "one layer twice": lambda c: c.layers.__setitem__(1, c.layers[0]),
    "no tensor": lambda c: setattr(c.layers[1], "keys", 3),
    "another shape": lambda c: setattr(c.layers[1], "keys", torch.randn(3, 2)),
    "one tensor twice": lambda c: setattr(c.layers[1], "keys", c.layers[0].keys),
    "a view of another": lambda c: setattr(c.layers[1], "keys", c.layers[0].keys[:]),
    "a subclass of Tensor": lambda c: setattr(
        c.layers[1], "keys", torch.randn(2, 3).as_subclass(type("Sub", (torch.Tensor,), {}))
    ),
    "another dtype": lambda c: setattr(c, "dtype", torch.float16),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_call_is_not_of_the_pattern(name: str) -> None:
    made = cache()
    if name == "a negative zero":
        made.layers[1].scale = 0.0
    signature, pattern = pattern_of(((made, torch.randn(2)), {}))
    assert pattern is not None
    assert signature.split((made, torch.randn(2)), {}) is not None
    CHANGES[name](made)
    assert signature.split((made, torch.randn(2)), {}) is None
    assert not signature.fits((made, torch.randn(2)), {})


def test_numbers_that_are_equal_are_the_same() -> None:
    signature, _ = pattern_of(((cache(),), {}))
    other = cache()
    other.layers[1].length = int("1000")
    assert signature.split((other,), {}) is not None


def test_what_has_two_places_has_two_in_each_call() -> None:
    one = Layer()
    signature, pattern = pattern_of(((one, [one]), {}))
    assert pattern is not None
    other = Layer()
    found = signature.split((other, [other]), {})
    assert found is not None
    assert found.objects[0] is other
    assert signature.split((other, [Layer()]), {}) is None


def test_keyword_arguments_come_in_any_order_where_nobody_sees_it() -> None:
    given = {"a": cache(), "b": [torch.randn(2)]}
    _, strict = pattern_of(((), given))
    _, free = pattern_of(((), given), any_order=True)
    assert strict is not None
    assert free is not None
    turned = {"b": given["b"], "a": given["a"]}
    assert strict.split((), turned) is None
    found, expected = free.split((), turned), strict.split((), given)
    assert found is not None
    assert expected is not None
    assert all(a is b for a, b in zip(found.leaves, expected.leaves, strict=True))
    assert free.split((), {"a": given["a"], "c": given["b"]}) is None


def test_only_a_signature_that_lasts_takes_calls_apart() -> None:
    call = (cache(),), {}
    assert CallSignature.of(*call, objects=True).split(*call) is None


def test_a_pattern_holds_nothing_of_the_callers() -> None:
    made = cache()
    signature, pattern = pattern_of(((made,), {}))
    assert pattern is not None
    waiting = [weakref.ref(made), weakref.ref(made.layers[0]), weakref.ref(made.layers[0].keys)]
    del made
    gc.collect()
    assert [each() for each in waiting] == [None, None, None]
    assert signature.split((cache(),), {}) is not None


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def other_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


LOOKING_ON: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "forward AD": forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu"),
    "another default dtype": other_default,
    "a dispatch mode": Logging,
}


@pytest.mark.parametrize("name", LOOKING_ON)
def test_what_looks_on_takes_no_call_apart(name: str) -> None:
    made = cache()
    signature, pattern = pattern_of(((made,), {}))
    assert pattern is not None
    with LOOKING_ON[name]():
        split = signature.split((made,), {})
    assert split is None
