"""Each comparison alone: behind it there is mostly another one that sees the same difference."""

from __future__ import annotations

import contextvars
import enum
import functools
import io
import logging
import operator
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphwright as gw
from graphwright.calls import argument_sharing, holders, leaves, split, switches, watch
from graphwright.calls.differences import difference, same
from graphwright.calls.holders import _CHECKS, Held, _Kind, _Link, _places
from graphwright.calls.iterators import _position, _steady, is_opaque_iterator
from graphwright.calls.leaves import describe, without_memory
from graphwright.calls.places import DictionaryPlace, Name
from graphwright.calls.signature import CallSignature, inside_func, inside_transform
from graphwright.calls.split import require_grad
from graphwright.calls.watch import ModuleWatch
from graphwright.calls.weights import refuse_weights
from graphwright.errors import SignatureError
from graphwright.graphs.effects import _difference

X = torch.linspace(-1, 1, 32).view(4, 8)
Y = X + 1
COMPLEX = torch.complex(X, Y)


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested tensors:UserWarning", "ignore:.*quantize_per_tensor:UserWarning"
)


@pytest.fixture(autouse=True)
def checks() -> None:
    """None of this is compiled."""


class Sub(torch.Tensor):
    """A tensor of another class."""


class Dispatching(torch.Tensor):
    """One whose operations are its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def freed() -> torch.Tensor:
    tensor = X.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)


def seen_inside(transform: Callable[..., Any], ask: Callable[[torch.Tensor], Any]) -> list[Any]:
    """What a question gives for the tensor that a transform passes on."""
    found: list[Any] = []

    def asks(x: torch.Tensor) -> torch.Tensor:
        found.append(ask(x))
        return x.sum()

    transform(asks)(X)
    return found


# Tensors that are like X but for one thing.
UNLIKE: dict[str, Callable[[], torch.Tensor]] = {
    "shape": lambda: X[:3],
    "strides": lambda: torch.zeros(8, 4).t(),
    "dtype": X.int,
    "device": lambda: X.to("meta"),
    "requires_grad": lambda: X.clone().requires_grad_(),
}
# Tensors whose memory does not hold their values, or that others compute with.
UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "class": lambda: X.as_subclass(Sub),
    "sparse": X.to_sparse,
    "nested": lambda: torch.nested.nested_tensor([X, X]),
    "negated": lambda: torch._neg_view(X),
    "conjugated": COMPLEX.conj,
    "zeros": lambda: torch._efficientzerotensor((4, 8)),
    "functional": lambda: torch._to_functional_tensor(X),
    "freed": freed,
}
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": torch.vmap,
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("name", [*UNLIKE, *UNUSUAL])
def test_a_tensor_matches_its_like_alone(name: str) -> None:
    first = COMPLEX if name == "conjugated" else X
    # No assertion is given a tensor without memory, which it could not show.
    itself = leaves.matches(first.clone(), describe(first))
    other = leaves.matches((UNLIKE | UNUSUAL)[name](), describe(first))
    assert (itself, other) == (True, False)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_tensor_of_a_transform_matches_none(name: str) -> None:
    like = X[0] if name == "vmap" else X
    expected = describe(like.clone())
    assert seen_inside(TRANSFORMS[name], lambda x: leaves.matches(x, expected)) == [False]
    assert seen_inside(TRANSFORMS[name], leaves.is_plain) == [False]
    assert seen_inside(TRANSFORMS[name], lambda x: without_memory(x) is None) == [False]


@pytest.mark.parametrize("name", [*UNUSUAL, "quantized"])
def test_an_unusual_tensor_is_not_plain(name: str) -> None:
    plain = leaves.is_plain((UNUSUAL | {"quantized": quantized})[name]())
    assert (leaves.is_plain(X), plain) == (True, False)


@pytest.mark.parametrize("name", ["class", "sparse", "nested"])
def test_pytorch_s_guard_is_never_given_an_unusual_tensor(name: str) -> None:
    given: list[Any] = []

    def guard(*values: Any) -> bool:
        given.append(values)
        return True

    assert leaves.fitting(guard, (X, Y))
    assert not leaves.fitting(guard, (X, UNUSUAL[name]()))
    assert len(given) == 1


def test_a_guard_decides() -> None:
    assert not leaves.fitting(lambda *values: False, (X, Y))
    found = [leaves.fitting(lambda *values: True, row) for row in ((freed(),), (X, freed()))]
    assert found == [False, False]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.LazyLinear(2).weight, "lazy module"),
        (lambda: X.as_subclass(Dispatching), "a Dispatching, a subclass"),
        (UNUSUAL["zeros"], "zeros without memory"),
        (freed, "memory was freed"),
    ],
)
def test_what_has_no_memory_is_named(make: Callable[[], torch.Tensor], kind: str) -> None:
    assert kind in str(without_memory(make()))
    assert without_memory(X) is None


def test_only_what_has_elements_can_be_freed() -> None:
    assert not leaves.was_freed(torch.zeros(0))
    assert not leaves.was_freed(X.to_sparse())
    assert not leaves.was_freed(UNUSUAL["nested"]())


# How a signature compares: by PyTorch's guard, by descriptions, and by making another one.
WAYS: dict[str, Callable[[CallSignature], CallSignature]] = {
    "guard": lambda made: made,
    "descriptions": lambda made: replace(made, guard=None, mixed=None),
    "anew": lambda made: replace(made, guard=None, mixed=None, flat=None),
}
_MEMORY = numpy.zeros(64, numpy.float32)
# Calls, and others for which what was built for them is not.
CALLS: dict[str, tuple[Any, Any]] = {
    "shape": (((X,), {}), ((X[:3],), {})),
    "fewer": (((X, Y), {}), ((X,), {})),
    "more": (((X,), {}), ((X, Y), {})),
    "one memory": (((X, Y), {}), ((X, X), {})),
    "two memories": (((X, X), {}), ((X, Y), {})),
    "other bytes apart": (((X[:2], X[1:3]), {}), ((X[:2], X[2:]), {})),
    "overlapping": (
        ((X[:, 0].contiguous(), X[:, 1].contiguous()), {}),
        ((torch.from_numpy(_MEMORY[:4]), torch.from_numpy(_MEMORY[2:6])), {}),
    ),
    "name": (((X,), {"a": Y}), ((X,), {"b": Y})),
    "one name more": (((X,), {"a": Y}), ((X,), {"a": Y, "b": Y + 1})),
    "one name less": (((X,), {"a": Y, "b": Y + 1}), ((X,), {"a": Y})),
    "order of names": (((), {"a": X, "b": Y}), ((), {"b": X, "a": Y})),
    "in a list": (((X,), {}), (([X],), {})),
    "order of a dictionary": ((({"a": X, "b": Y},), {}), (({"b": X, "a": Y},), {})),
    "type of a number": (((X, 1), {}), ((X, 1.0), {})),
    "a bool": (((X, 1), {}), ((X, True), {})),
    "class of a float": (((X, 1.0), {}), ((X, numpy.float64(1.0)), {})),
    "class of a complex": (((X, 1j), {}), ((X, numpy.complex128(1j)), {})),
    "bits of a float": (((X, 0.0), {}), ((X, -0.0), {})),
    "bits of a complex": (((X, 0j), {}), ((X, -0j), {})),
    "text": (((X, "a"), {}), ((X, "b"), {})),
    "a dtype": (((X, torch.float32), {}), ((X, torch.float64), {})),
    "a number in a keyword": (((X,), {"a": 1}), ((X,), {"a": 2})),
    "a shape beside a number": (((X, 1), {}), ((X[:3], 1), {})),
}


CALLS |= {name: (((X,), {}), ((make(),), {})) for name, make in UNLIKE.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_another_call_does_not_fit(name: str, way: str) -> None:
    (args, kwargs), other = CALLS[name]
    made = WAYS[way](CallSignature.of(args, kwargs))
    assert made.fits(args, kwargs)
    assert not made.fits(*other)


@pytest.mark.parametrize("way", WAYS)
def test_no_call_fits_under_another_switch(way: str) -> None:
    made = WAYS[way](CallSignature.of((X,), {}))
    mixed = WAYS[way](CallSignature.of((X, 1), {}))
    with torch.device("meta"):
        assert not made.fits((X,), {})
        assert not mixed.fits((X, 1), {})


@pytest.mark.parametrize("way", WAYS)
def test_where_the_order_is_free_names_and_their_number_still_count(way: str) -> None:
    made = WAYS[way](CallSignature.of((), {"a": X, "b": Y}).in_any_order())
    assert made.fits((), {"b": Y, "a": X})
    assert not made.fits((), {"b": Y, "c": X})
    assert not made.fits((), {"b": Y, "a": X, "c": X + 2})
    assert not made.fits((), {"b": Y})
    assert split.in_order_of(("a", "b"), {"b": 2, "a": 1}, True) == (1, 2)
    assert split.in_order_of(("a", "b"), {"b": 2, "a": 1, "c": 3}, True) is None
    assert split.in_order_of(("a", "b"), {"b": 2, "a": 1}, False) is None


def test_a_graph_is_not_given_memory_that_overlaps() -> None:
    def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 1

    def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
        memory = numpy.zeros(8, numpy.float32)
        return torch.from_numpy(memory[:4]), torch.from_numpy(memory[2:6])

    graphed = gw.graph(adds)
    for _ in range(2):
        graphed(torch.zeros(4), torch.zeros(4))
        assert torch.equal(graphed(*overlapping()), adds(*overlapping()))


def test_memory_that_overlaps_is_refused() -> None:
    with pytest.raises(SignatureError, match="share memory"):
        CallSignature.of(*CALLS["overlapping"][1])
    first, second = CALLS["overlapping"][1][0]
    assert argument_sharing.overlapping([first, second])
    assert not argument_sharing.overlapping([X, Y, torch.zeros(0), torch.zeros(0)])
    assert not argument_sharing.overlapping([first, torch.from_numpy(_MEMORY)])  # They begin alike.
    assert argument_sharing.own_storages([X, Y])
    assert not argument_sharing.own_storages([X, X[1:]])
    assert not argument_sharing.own_storages([first, second])
    assert not argument_sharing.own_storages([X, torch.zeros(0)])
    whole = torch.from_numpy(_MEMORY)
    assert CallSignature.of((whole[:4], whole[2:6]), {}).aliases == ((0, 1, 8),)


class Looks(TorchFunctionMode):
    """A function mode of a user's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sees(TorchDispatchMode):
    """A dispatch mode of a user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under(mode: Any) -> Callable[..., Any]:
    def transform(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> Any:
            with mode:
                return function(x)

        return run

    return transform


def _forward_ad(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return function(x)

    return run


# What looks on, and whether torch.func or forward AD does.
ONLOOKERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "vmap": (torch.vmap, True),
    "forward AD": (_forward_ad, True),
    "make_fx": (make_fx, False),
    "make_fx before dispatch": (lambda f: make_fx(f, pre_dispatch=True), False),
    "a dispatch mode": (_under(Sees()), False),
    "a function mode": (_under(Looks()), False),
    "torch.jit.trace": (lambda f: lambda x: torch.jit.trace(f, x, check_trace=False), False),
}


@pytest.mark.parametrize("name", ONLOOKERS)
def test_whoever_looks_on_is_seen(name: str) -> None:
    transform, of_func = ONLOOKERS[name]
    assert seen_inside(transform, lambda x: inside_transform()) == [True]
    assert seen_inside(transform, lambda x: inside_func()) == [of_func]
    assert not inside_transform()
    with torch.device("cpu"):
        assert not inside_transform()


@pytest.mark.parametrize(
    "name", ["forward AD", "make_fx", "make_fx before dispatch", "a dispatch mode"]
)
def test_no_call_fits_where_someone_looks_on(name: str) -> None:
    made = CallSignature.of((X,), {})
    assert seen_inside(ONLOOKERS[name][0], lambda x: made.fits((X,), {})) == [False]


@dataclass
class Box:
    """An object that holds a tensor."""

    value: Any


def test_a_tensor_that_requires_grad_is_found_wherever_it_is() -> None:
    y = X.clone().requires_grad_()
    for args, kwargs in [((X, y), {}), ((X,), {"a": y}), (([X, y],), {}), ((Box(y),), {})]:
        assert require_grad(args, kwargs)
    assert not require_grad((X, [X], Box(X), 1), {"a": X})


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1
    BLUE = 2


class Word(enum.StrEnum):
    """An enumeration whose members are text."""

    RED = "red"
    BLUE = "blue"


class Lazy(property):
    """A property of a class that may hold more."""


class Wrong(ValueError):
    """An exception with attributes."""


class Stream(io.BytesIO):
    """An object with attributes whose class derives from one in C."""


class Text(str):
    """Text with attributes."""


class Bare(str):
    """Text of another class, without attributes."""

    __slots__ = ()


class Pair(tuple[Any, ...]):
    """A tuple with attributes."""


class Group(frozenset[Any]):
    """A frozenset with attributes."""


class Named(NamedTuple):
    """A tuple of another class, without attributes."""

    value: Any


class Slotted:
    """An object with slots alone."""

    __slots__ = ("value",)


class Asks:
    """What cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError

    def __hash__(self) -> int:
        return id(self)

    def method(self) -> None:
        """A method that is made anew at each look."""


ASKS, ITEMS = Asks(), [1]


def pattern(text: str) -> re.Pattern[str]:
    re.purge()  # Else both are one object.
    return re.compile(text)


def nothing() -> None:
    """A function."""


# Two values, and whether the second may take the first one's place; None: another walk has to tell.
VALUES: dict[str, tuple[Any, Any, bool | None]] = {
    "an equal number": (10**30, int("1" + "0" * 30), True),
    "another number": (1, 2, False),
    "another type": (1, True, False),
    "minus zero": (0.0, -0.0, False),
    "equal text with attributes": (Text("a"), Text("a"), None),
    "equal text of another class": (Bare("a"), Bare("a"), True),
    "other text with attributes": (Text("a"), Text("b"), False),
    "another member": (Colour.RED, Colour.BLUE, None),
    "another member of text": (Word.RED, Word.BLUE, False),
    "an equal frozenset": (frozenset((1000, 2000)), frozenset((1000, 2000)), True),
    "a frozenset in another order": (frozenset((0, 8)), frozenset((8, 0)), False),
    "another frozenset": (frozenset((1,)), frozenset((2,)), False),
    "a frozenset with attributes": (Group((1,)), Group((1,)), None),
    "a frozenset of another type": (frozenset((1,)), frozenset((1.0,)), False),
    "an equal slice": (slice(1000, 2000), slice(1000, 2000), True),
    "another slice": (slice(1, 2), slice(1, 3), False),
    "an equal range": (range(1000), range(1000), True),
    "another range": (range(1), range(2), False),
    "an equal pattern": (pattern("a"), pattern("a"), True),
    "the same method": (ASKS.method, ASKS.method, True),
    "a method of another": (ASKS.method, Asks().method, False),
    "a method that was replaced": (ASKS.method, nothing.__get__(ASKS), False),
    "the same method in C": (ITEMS.append, ITEMS.append, True),
    "a method in C of another": (ITEMS.append, ITEMS.pop, False),
    "another tensor": (X, X.clone(), False),
    "another module": (nn.ReLU(), nn.ReLU(), False),
    "another function": (nothing, lambda: None, False),
    "an equal tuple": ((1000, "a b"), (1000, "".join(("a ", "b"))), True),
    "another tuple": ((1, 2), (1, 3), False),
    "a longer tuple": ((1,), (1, 2), False),
    "an equal named tuple": (Named(1), Named(1), True),
    "a tuple of another class": ((1,), Named(1), False),
    "a tuple with a list": ((1, [1]), (1, [1]), None),
    "a tuple with attributes": (Pair((1,)), Pair((1,)), None),
    "a partial": (functools.partial(nothing), functools.partial(nothing), None),
    "a partial of another": (functools.partial(nothing), functools.partial(print), False),
    "a partial with others": (functools.partial(nothing, 1), functools.partial(nothing, 2), False),
    "a list": ([1], [1], None),
    "a deque": (deque([1]), deque([1]), None),
    "a deque of another length": (deque([1], 1), deque([1], 2), False),
    "an exception": (ValueError(1), ValueError(1), None),
    "an exception of the user's": (Wrong(1), Wrong(1), None),
    "a bare object": (object(), object(), False),
    "a property": (property(len), property(len), None),
    "a property of another class": (Lazy(len), Lazy(len), False),
    "a subclass of what is in C": (Stream(b"a"), Stream(b"a"), False),
    "bytes that change": (bytearray(b"a"), bytearray(b"a"), None),
    "an array": (numpy.ones(2), numpy.ones(2), None),
    "an object": (Box(1), Box(1), None),
    "an object with slots": (Slotted(), Slotted(), None),
    "machinery": (logging.getLogger("one"), logging.getLogger("other"), False),
    "an object of C": (operator.itemgetter(1), operator.itemgetter(1), False),
    "an equal number of NumPy's": (numpy.int32(7), numpy.int32(7), True),
    "another number of NumPy's": (numpy.int32(7), numpy.int32(8), False),
    "minus zero of NumPy's": (numpy.float32(0.0), numpy.float32(-0.0), False),
    "another unit": (numpy.datetime64(1, "D"), numpy.datetime64(1, "h"), False),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_may_take_the_place_of_a_value(name: str) -> None:
    old, new, expected = VALUES[name]
    assert same(new, old) is expected
    assert same(old, old) is True


def test_what_cannot_be_compared_is_another_key() -> None:
    place = DictionaryPlace(Name("", "it"), {ASKS: 1})
    assert difference(place, {ASKS: 1})[0] is None
    assert difference(place, {Asks(): 1})[0] is not None


def test_a_tensor_that_moves_is_seen_where_it_is_held() -> None:
    tensor = X.clone()
    held = Held([tensor], [])
    assert held.unchanged()
    tensor.data = X.clone()
    assert not held.unchanged()
    assert "has moved" in str(held.changed())


def links(old: torch.Tensor, new: torch.Tensor) -> dict[_Kind, tuple[_Link, Callable[[], Any]]]:
    """For each way to hold something a link to it, and what puts something else there."""
    by_name, as_key, row, box = {"a": old}, {old: 1}, [old], Box(old)
    cell, variable, member = types.CellType(old), contextvars.ContextVar("variable"), {old}
    variable.set(old)
    weight, hidden = nn.Parameter(X.clone()), [old]
    weight.grad, inside = old, iter(hidden)

    def replace_cell() -> None:
        cell.cell_contents = new

    return {
        _Kind.ITEM: (_Link(by_name, old, _Kind.ITEM, "a"), lambda: by_name.update(a=new)),
        _Kind.KEY: (_Link(as_key, old, _Kind.KEY), as_key.clear),
        _Kind.INDEX: (_Link(row, old, _Kind.INDEX, 0), lambda: row.insert(0, new)),
        _Kind.ATTRIBUTE: (
            _Link(box, old, _Kind.ATTRIBUTE, "value"),
            lambda: setattr(box, "value", new),
        ),
        _Kind.CELL: (_Link(cell, old, _Kind.CELL), replace_cell),
        _Kind.CONTEXT: (_Link(variable, old, _Kind.CONTEXT), lambda: variable.set(new)),
        _Kind.GRADIENT: (
            _Link(weight, old, _Kind.GRADIENT),
            lambda: setattr(weight, "grad", new),
        ),
        _Kind.MEMBER: (_Link(member, old, _Kind.MEMBER), member.clear),
        _Kind.INSIDE: (
            _Link(inside, hidden, _Kind.INSIDE, _places(inside, hidden)),
            lambda: list(inside),
        ),
    }


@pytest.mark.parametrize("kind", [k for k in _CHECKS if k not in (_Kind.FIXED, _Kind.THREAD)])
def test_a_link_holds_until_something_else_is_there(kind: _Kind) -> None:
    link, put_other = links(X.clone(), X.clone())[kind]
    assert link.holds()
    put_other()
    assert not link.holds()


def test_each_thread_has_attributes_of_its_own() -> None:
    local = threading.local()
    link = _Link(local, local.__dict__, _Kind.THREAD)
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(link.holds()))
    other.start()
    other.join()
    assert (link.holds(), found) == (True, [False])


def test_keys_count_where_the_values_are_the_same() -> None:
    def changed(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
        return difference(DictionaryPlace(Name("", "it"), old), new)[0] is not None

    assert changed({"a": 1}, {"a": 2})
    assert changed({"a": 1}, {"b": 1})
    assert changed({1: "x"}, {True: "x"})
    assert changed({"a": 1, "b": 2}, {"b": 1, "a": 2})
    assert not changed({(1000, "a"): 1}, {(1000, "".join("a")): 1})
    nan = float("nan")
    assert not changed({nan: 1}, {nan: 1})


def test_what_may_be_replaced_is_so_on_both_sides() -> None:
    old, new = X.clone(), X.clone()
    place = DictionaryPlace(Name("", "it"), {"a": old})
    assert difference(place, {"a": new}, lambda it: it is old)[0] is not None
    assert difference(place, {"a": new}, lambda it: it is new)[0] is not None
    assert difference(place, {"a": new}, lambda it: True) == (None, [])
    lists = DictionaryPlace(Name("", "it"), {"a": [1]})
    assert len(difference(lists, {"a": [1]}, lambda it: True)[1]) == 1


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.mark.parametrize("ask", ["unchanged", "changed"])
def test_a_parameter_that_is_frozen_is_noticed_where_it_is_trained(ask: str) -> None:
    for training in (True, False):
        model: Any = _linear()
        model.scale = float("0.5")
        watch = ModuleWatch(model, values=False, training=training)
        as_it_was = {"unchanged": True, "changed": None}[ask]
        assert getattr(watch, ask)() is as_it_was
        model.weight.requires_grad_(False)
        assert (getattr(watch, ask)() == as_it_was) is not training
        model.scale = float("0.5")  # Each value is compared.
        assert (watch.changed() is None) is not training


def test_an_audit_looks_at_each_nth_check_and_then_until_the_values_are_back() -> None:
    model: Any = _linear()
    watch = ModuleWatch(model, values=True, audit=3)
    before = model.weight.detach().clone()
    model.weight.data.add_(1)
    assert [watch.unchanged() for _ in range(4)] == [True, True, False, False]
    model.weight.data.copy_(before)
    assert watch.unchanged()


@pytest.mark.parametrize("of", [watch._geometry, holders._placed])
def test_where_a_tensor_is_and_how_it_lies_there(of: Callable[[torch.Tensor], Any]) -> None:
    square = torch.zeros(4, 4)
    assert of(square) == of(square.detach())
    for other in (square[:2], square.t(), square[:, 1:], square.view(torch.int32)):
        assert of(square) != of(other)
    if of is watch._geometry:
        assert of(COMPLEX) != of(COMPLEX.conj())
        assert of(square) != of(torch._neg_view(square))
    else:
        assert of(square) != of(square.clone())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_of_each_device_is_compared_with_its_dtype(device: str) -> None:
    found = {switches.autocast()}
    dtype = torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, True)
        for each in (torch.bfloat16, torch.float16):
            torch.set_autocast_dtype(device, each)
            found.add(switches.autocast())
    finally:
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, False)
    assert len(found) == 3


def test_values_that_change_in_place_are_noticed_where_they_count() -> None:
    model: Any = _linear()
    with_values, without = (ModuleWatch(model, values=each) for each in (True, False))
    with torch.no_grad():
        model.weight.add_(1)
    assert without.unchanged()
    assert not with_values.unchanged()
    assert "changed in place" in str(with_values.changed())


class _Other:
    """What a watch was joined with."""

    same = True

    def unchanged(self) -> bool:
        return self.same

    def changed(self) -> str | None:
        return None if self.same else "it was replaced"


REBINDS: dict[str, Callable[[Any], object]] = {
    "replaced": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(4, 4))),
    "moved": lambda model: setattr(model.weight, "data", torch.zeros(4, 4)),
    "another shape": lambda model: setattr(model.weight, "data", model.weight.data.view(2, 8)),
}


@pytest.mark.parametrize("name", REBINDS)
def test_what_is_bound_anew_is_noticed(name: str) -> None:
    model = _linear()
    watch = ModuleWatch(model, values=False)
    unwatched = ModuleWatch(model, values=False, checks="none")
    assert not watch.rebound()
    REBINDS[name](model)
    assert watch.rebound()
    assert not watch.unchanged()
    assert watch.changed() is not None
    assert not unwatched.rebound()
    assert unwatched.unchanged()


def test_what_a_watch_was_joined_with_counts() -> None:
    watch, other = ModuleWatch(_linear(), values=False), _Other()
    watch.join(other)
    assert watch.unchanged()
    assert not watch.rebound()
    other.same = False
    assert not watch.unchanged()
    assert watch.rebound()
    assert watch.changed() == "it was replaced"


def test_a_value_more_is_noticed_though_the_others_are_the_same() -> None:
    watch, held = ModuleWatch(_linear(), values=False), list[int]()
    compared = watch._compared
    compared.getters.append((lambda it: it, held, ()))
    unchanged = compared._in_python()
    assert unchanged()
    held.append(1)
    assert not unchanged()


def test_a_slot_that_is_set_later_and_a_long_list_that_grows_are_noticed() -> None:
    model: Any = _linear()
    model.forward = lambda x: x * model.slotted.value * len(model.long)
    model.slotted, model.long = Slotted(), [0] * 2000
    watch = ModuleWatch(model, values=False)
    assert watch.unchanged()
    model.long.append(0)
    assert not watch.unchanged()
    model.long.pop()
    assert watch.unchanged()
    model.slotted.value = 1
    assert not watch.unchanged()


def test_a_tensor_of_another_class_is_compared_in_its_shape_too() -> None:
    model: Any = _linear()
    model.register_buffer("other", X.clone().as_subclass(Sub))
    watch = ModuleWatch(model, values=False)
    assert watch.unchanged()
    model.other.data = model.other.data.view(8, 4)
    assert not watch.unchanged()


class Answering(Dispatching):
    """One whose functions are its own, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_weight_that_answers_functions_is_refused_where_it_has_to_be_copied() -> None:
    model: Any = _linear()
    model.register_buffer("other", X.clone().as_subclass(Answering))
    refuse_weights(model)
    with pytest.raises(SignatureError, match="other is a Answering"):
        refuse_weights(model, subclasses=True)


def test_a_weight_without_values_is_named_by_what_else_it_is() -> None:
    model: Any = _linear()
    model.register_buffer("other", X.to("meta").as_subclass(Dispatching))
    with pytest.raises(SignatureError, match="other is a Dispatching"):
        refuse_weights(model)


class Counted(map):  # type: ignore[type-arg]  # of anything
    """An iterator with attributes."""


def test_where_an_iterator_stands_is_seen() -> None:
    generator = (n for n in range(2))
    seen = [_position(generator)]
    for _ in generator:
        seen.append(_position(generator))
    assert seen[0] != seen[1] != seen[2]
    assert _position(generator) is None
    held: Any = Counted(str, [1])
    held.tensor = X
    before = _steady(held)
    held.tensor = Y
    assert _steady(held) == before
    held.count = 1
    assert _steady(held) != before
    assert is_opaque_iterator(held)
    assert not is_opaque_iterator(weakref.proxy(held))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1, 2], [1, 3], ((), 1, [3])),
        ([1, 2], [1, 2, 3], ((), 2, [3])),
        ([1, 2], [1], ((), 1, [])),
        ([1, 2], [1, 2], None),
        ({"a": 1, "b": 2}, {"b": 2}, (("a",), 0, {})),
        ({"a": 1}, {"a": 2}, ((), 0, {"a": 2})),
        ({"a": 1}, {"a": 1, "b": 2}, ((), 0, {"b": 2})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, (("a", "b"), 0, {"b": 2, "a": 1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 3}, (("a", "b"), 0, {"b": 2, "a": 3})),
        ({"a": 1}, {"a": 1}, None),
    ],
)
def test_what_a_call_did_to_a_container(before: Any, after: Any, expected: Any) -> None:
    assert _difference(before, after) == expected
