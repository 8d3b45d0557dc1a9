"""What code reads of the classes, functions and enums that it names or holds.

A class whose instances a call makes counts with all that runs then: `Gain()` runs `__init__`,
`with Gain()` runs `__enter__`. Each place has a function that reads it and a change of it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.differences import same

SCALE: Any = 2.0
STORED = {"by": 2.0}


class Made:
    def __init__(self, value: float = 2.0) -> None:
        self.value = SCALE * value


class MadeAnew:
    value: float

    def __new__(cls) -> MadeAnew:
        made = object.__new__(cls)
        made.value = SCALE
        return made


class Entered:
    def __enter__(self) -> float:
        return STORED["by"]

    def __exit__(self, *exc: object) -> None:
        pass


class Added:
    def __add__(self, other: torch.Tensor) -> torch.Tensor:
        return other + SCALE


@dataclasses.dataclass
class WithFactory:
    values: list[float] = dataclasses.field(default_factory=lambda: [SCALE])


class Kind(type):
    by = 2.0

    @property
    def stored(cls) -> float:
        return STORED["by"]


class OfKind(metaclass=Kind):
    pass


class Mode(enum.Enum):
    ONE = "one"

    def factor(self) -> float:
        return {"one": SCALE}[self.value]


class Whole(nn.Module):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        Whole.made += 1


class Keeper:
    """A descriptor with a value for each object."""

    values: ClassVar[weakref.WeakKeyDictionary[Any, float]] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: type) -> float:
        return self.values.get(owner, 1.0)


class Kept:
    value = Keeper()


def helper(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = x * helper.by  # type: ignore[attr-defined]  # set below
    return result


helper.by = 2.0  # type: ignore[attr-defined]  # code may set any
kept = Kept()
mode = Mode.ONE
table: defaultdict[str, Any] = defaultdict(lambda: 2.0)
fixed = frozenset([Made()])


class OwnTensor(torch.Tensor):
    by = 2.0

    def scaled(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor) * self.by


own = torch.ones(()).as_subclass(OwnTensor)


@torch.library.custom_op("graphwright_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * STORED["by"]


def by_init(x: torch.Tensor) -> Any:
    return x * Made().value


def by_new(x: torch.Tensor) -> Any:
    return x * MadeAnew().value


def by_enter(x: torch.Tensor) -> Any:
    with Entered() as value:
        return x * value


def by_operator(x: torch.Tensor) -> Any:
    return Added() + x


def by_default_factory(x: torch.Tensor) -> Any:
    return x * WithFactory().values[0]


def by_metaclass(x: torch.Tensor) -> Any:
    return x * OfKind.by


def by_property_of_metaclass(x: torch.Tensor) -> Any:
    return x * OfKind.stored


def by_method_of_enum(x: torch.Tensor) -> Any:
    return x * mode.factor()


def by_weak_dictionary(x: torch.Tensor) -> Any:
    return x * kept.value


def by_factory_of_dictionary(x: torch.Tensor) -> Any:
    return x * table.default_factory()  # type: ignore[misc]  # it has one


def by_frozenset(x: torch.Tensor) -> Any:
    return x * next(iter(fixed)).value


def by_class_of_tensor(x: torch.Tensor) -> Any:
    return x * own.scaled()


def by_operator_of_library(x: torch.Tensor) -> Any:
    return scaled(x)


def by_operator_of_pytorch(x: torch.Tensor) -> Any:
    return torch.ops.graphwright_tests.scaled(x)


def scale(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "SCALE", 3.0)


def stored(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(STORED, "by", 3.0)


def setting(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


PLACES: dict[str, tuple[Callable[..., Any], Callable[[pytest.MonkeyPatch], None]]] = {
    "global that __init__ names": (by_init, scale),
    "default of __init__": (by_init, setting(Made.__init__, "__defaults__", (3.0,))),
    "__init__": (by_init, setting(Made, "__init__", lambda made: setattr(made, "value", 5.0))),
    "global that __new__ names": (by_new, scale),
    "item that __enter__ reads": (by_enter, stored),
    "global that __add__ names": (by_operator, scale),
    "global of a default factory": (by_default_factory, scale),
    "attribute of a metaclass": (by_metaclass, setting(Kind, "by", 3.0)),
    "item that a metaclass reads": (by_property_of_metaclass, stored),
    "global that a method of an enum names": (by_method_of_enum, scale),
    "attribute of a function": (helper, setting(helper, "by", 3.0)),
    "item of a weak dictionary": (
        by_weak_dictionary,
        lambda patch: patch.setitem(Keeper.values, kept, 3.0),  # type: ignore[arg-type]  # likewise
    ),
    "factory of a dictionary": (
        by_factory_of_dictionary,
        setting(table, "default_factory", lambda: 3.0),
    ),
    "object in a frozenset": (by_frozenset, setting(next(iter(fixed)), "value", 3.0)),
    "attribute of a tensor's class": (by_class_of_tensor, setting(OwnTensor, "by", 3.0)),
    "item that a custom operator reads": (by_operator_of_library, stored),
    "item that an operator of torch.ops reads": (by_operator_of_pytorch, stored),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_noticed(
    place: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, change = PLACES[place]
    x = torch.ones(2, device=device)
    with torch.no_grad():
        graphed, captured, before = gw.graph(function), gw.capture(function, x), function(x)
        for made in (graphed, captured):
            torch.testing.assert_close(made(x), before)
        change(monkeypatch)
        assert not torch.equal(function(x), before)
        for _ in range(2):
            torch.testing.assert_close(graphed(x), function(x))
        with pytest.raises(gw.SignatureError):
            captured(x)


class ByAttribute(nn.Module):
    """Reads an attribute of a class that it holds, by a name that it does not spell."""

    def __init__(self, held: Any, name: str) -> None:
        super().__init__()
        self.held, self.name = held, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * getattr(self.held, self.name)
        return result


@pytest.mark.parametrize("held", [OfKind, helper], ids=["class", "function"])
def test_an_attribute_under_a_computed_name_is_watched(
    held: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "by", 2.0, raising=False)
    module, x = ByAttribute(held, "by").eval(), torch.ones(2, device=device)
    with torch.no_grad():
        graphed = gw.graph(module)
        torch.testing.assert_close(graphed(x), module(x))
        monkeypatch.setattr(held, "by", 3.0)
        torch.testing.assert_close(graphed(x), module(x))


def test_a_backward_of_a_custom_operator_is_watched(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled.register_autograd(lambda context, grad: grad * SCALE)
    module = nn.Sequential(nn.Linear(2, 2), Called(scaled)).to(device)
    graphed = gw.make_graphed_callables(module, (torch.ones(2, 2, device=device),))
    for value in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        module.zero_grad()
        graphed(torch.ones(2, 2, device=device)).sum().backward()
        expected = torch.full((2,), 2 * value, device=device)
        torch.testing.assert_close(module[0].bias.grad, expected)


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("old", "new", "alike"),
    [
        ((8, 0), (8, 0), True),
        ((8, 0), (0, 8), False),  # It iterates in another order.
        ((1,), (True,), False),
        (((1, "a"),), ((1, "a"),), True),
    ],
)
def test_frozensets_are_the_same_in_the_same_order(
    old: tuple[Any, ...], new: tuple[Any, ...], alike: bool
) -> None:
    assert same(frozenset(new), frozenset(old)) is alike


class Counted:
    made = 0
    entered = 0

    def __init__(self) -> None:
        Counted.made += 1

    def __enter__(self) -> None:
        Counted.entered += 1

    def __exit__(self, *exc: object) -> None:
        pass


class Counts(nn.Module):
    total = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Counted():
            Counts.total += 2
            return x * 2


def test_classes_may_count(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "entered", 0)
    monkeypatch.setattr(Counts, "total", 0)
    graphed, x = gw.graph(Counts().eval()), torch.ones(2, device=device)
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(graphed(x), x * 2)
    assert graphed.statistics.captures == 1
    assert (Counted.entered, Counts.total) == (5, 10)


class ByTotal(nn.Module):
    total = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ByTotal.total += 1
        return x * ByTotal.total


def test_a_counter_of_a_class_that_is_read_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByTotal, "total", 0)
    x = torch.ones(2, device=device)
    with pytest.raises(gw.CaptureError, match=r"ByTotal\.total"), torch.no_grad():
        gw.capture(ByTotal().eval(), x)
    assert ByTotal.total == 0


def test_modules_that_are_made_elsewhere_are_no_change(device: torch.device) -> None:
    def by_class(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if isinstance(x, Whole) else 3)

    x = torch.ones(2, device=device)
    captured = gw.capture(by_class, x)
    Whole()
    torch.testing.assert_close(captured(x), x * 3)


def test_what_decorators_attach_to_functions_is_no_change(device: torch.device) -> None:
    @functools.wraps(helper)
    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    x = torch.ones(2, device=device)
    captured = gw.capture(wrapped, x)
    torch._dynamo.disable(wrapped)
    wrapped.note = "unread"  # type: ignore[attr-defined]  # code may set any
    torch.testing.assert_close(captured(x), x * 2)


class Given:
    """Of the class of an argument, all counts that the call's code or its methods name."""

    by = 2.0
    made = 0

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        Given.made += 1

    def scaled(self) -> torch.Tensor:
        return self.x * SCALE

    @property
    def twice(self) -> torch.Tensor:
        return self.x * STORED["by"]


class GivenInRow(NamedTuple):
    x: torch.Tensor

    def scaled(self) -> torch.Tensor:
        return self.x * SCALE


def by_method_of_argument(batch: Any) -> Any:
    return batch.scaled()


def by_property_of_argument(batch: Given) -> Any:
    return batch.twice


def by_class_of_argument(batch: Given) -> Any:
    return batch.x * batch.by


@pytest.mark.parametrize("kind", [Given, GivenInRow])
@pytest.mark.parametrize(
    ("function", "change"),
    [
        (by_method_of_argument, scale),
        (by_method_of_argument, None),
        (by_property_of_argument, stored),
        (by_class_of_argument, setting(Given, "by", 3.0)),
    ],
)
def test_the_class_of_an_argument_is_watched(
    kind: Any,
    function: Callable[..., Any],
    change: Callable[[pytest.MonkeyPatch], None] | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind is GivenInRow and function is not by_method_of_argument:
        pytest.skip("it has no such attribute")
    batch = kind(torch.ones(2, device=device))
    with torch.no_grad():
        graphed, captured = gw.graph(function), gw.capture(function, batch)
        for _ in range(3):
            before = function(batch)
            torch.testing.assert_close(graphed(batch), before)
        torch.testing.assert_close(captured(batch), before)
        if change is None:
            monkeypatch.setattr(kind, "scaled", lambda self: self.x * 5)
        else:
            change(monkeypatch)
        assert not torch.equal(function(batch), before)
        for _ in range(2):
            torch.testing.assert_close(graphed(batch), function(batch))
        with pytest.raises(gw.SignatureError):
            captured(batch)


def test_new_arguments_of_a_class_that_counts_its_own_are_no_change(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    captured = gw.capture(by_method_of_argument, Given(x))
    for _ in range(3):
        torch.testing.assert_close(captured(Given(x)), x * SCALE)
