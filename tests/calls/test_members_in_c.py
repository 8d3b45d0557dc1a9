"""What objects hold in members of a class in C, where neither `__dict__` nor slots show it."""

from __future__ import annotations

import collections
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import ipaddress
import operator
import pathlib
import struct
import types
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw


class OwnError(Exception):
    """An exception of the user's."""


class SlottedError(Exception):
    """Has a slot too."""

    __slots__ = ("more",)


class OwnGroup(ExceptionGroup[Exception]):
    """A group of the user's."""


class OwnDecimal(decimal.Decimal):
    """Has a `__dict__`, and its number elsewhere."""


class OwnDelta(datetime.timedelta):
    """Likewise."""


class OwnFraction(fractions.Fraction):
    """Written in Python."""


class OwnStatic(staticmethod):  # type: ignore[type-arg]
    """A static method of the user's."""


class OwnProperty(property):
    """A property of the user's."""


class OwnBytes(io.BytesIO):
    """A file in memory of the user's."""


class OwnStruct(struct.Struct):
    """A format of the user's."""


class Pair(ctypes.Structure):
    _fields_ = (("one", ctypes.c_double), ("two", ctypes.c_int))


class Holder:
    """Holds a number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def get(self) -> float:
        return self.value


def with_cause(value: float) -> Exception:
    made = ValueError("outer")
    made.__cause__ = ValueError(value)
    return made


def by(value: float) -> Callable[[], float]:
    return lambda: value


def first(held: Any) -> float:
    return float(held.args[0])


def called(held: Any) -> float:
    return float(held())


def as_float(held: Any) -> float:
    return float(held)


# What makes an object that holds a number, and what reads the number from it.
OBJECTS: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "exception": (ValueError, first),
    "exception of a key": (KeyError, first),
    "exception of the user's": (OwnError, first),
    "exception with slots": (SlottedError, first),
    "exception with a tensor": (lambda v: OwnError(torch.tensor(v)), first),
    "exception with a list": (lambda v: OwnError([v]), lambda held: held.args[0][0]),
    "error of the system": (lambda v: OSError(int(v), "text"), lambda held: held.errno),
    "error with a file": (lambda v: OSError(1, "text", str(v)), lambda held: float(held.filename)),
    "end of an iterator": (StopIteration, lambda held: held.value),
    "exit": (SystemExit, lambda held: held.code),
    "error of an import": (lambda v: ImportError("", name=str(v)), lambda held: float(held.name)),
    "error of an attribute": (lambda v: AttributeError("", obj=v), lambda held: held.obj),
    "error in text": (
        lambda v: UnicodeDecodeError("ascii", b"text", int(v), 4, ""),
        lambda held: held.start,
    ),
    "group of exceptions": (
        lambda v: ExceptionGroup("", [ValueError(v)]),
        lambda held: first(held.exceptions[0]),
    ),
    "group of the user's": (
        lambda v: OwnGroup("", [ValueError(v)]),
        lambda held: first(held.exceptions[0]),
    ),
    "cause of an exception": (with_cause, lambda held: first(held.__cause__)),
    "static method": (lambda v: staticmethod(by(v)), called),
    "static method of the user's": (lambda v: OwnStatic(by(v)), called),
    "class method": (lambda v: classmethod(lambda _: v), lambda held: held.__func__(None)),
    "property": (lambda v: property(lambda _: v), lambda held: held.fget(None)),
    "property of the user's": (lambda v: OwnProperty(lambda _: v), lambda held: held.fget(None)),
    "cell": (types.CellType, lambda held: held.cell_contents),
    "bound method": (lambda v: Holder(v).get, called),
    "function with an argument": (lambda v: functools.partial(as_float, v), called),
    "method with an argument": (
        lambda v: operator.methodcaller("__mul__", v),
        lambda held: held(1.0),
    ),
    "getter of an item": (lambda v: operator.itemgetter(int(v)), lambda held: held(range(9))),
    "getter of an attribute": (
        lambda v: operator.attrgetter("real" if v == 2 else "imag"),
        lambda held: held(2 + 3j),
    ),
    "generic": (lambda v: tuple[(int,) * int(v)], lambda held: len(held.__args__)),
    "timedelta": (lambda v: datetime.timedelta(v), lambda held: held.days),
    "timedelta of the user's": (OwnDelta, lambda held: held.days),
    "date": (lambda v: datetime.date(2000, int(v), 1), lambda held: held.month),
    "decimal": (decimal.Decimal, as_float),
    "decimal of the user's": (OwnDecimal, as_float),
    "digits of a decimal": (
        lambda v: decimal.Decimal("1." + "0" * int(v)),
        lambda held: -held.as_tuple().exponent,
    ),
    "fraction": (lambda v: fractions.Fraction(int(v), 7), lambda held: held.numerator),
    "fraction of the user's": (lambda v: OwnFraction(int(v), 7), lambda held: held.numerator),
    "identifier": (lambda v: uuid.UUID(int=int(v)), lambda held: held.int),
    "path": (lambda v: pathlib.Path(str(v)), lambda held: float(str(held))),
    "address": (lambda v: ipaddress.ip_address(int(v)), lambda held: int(held)),
    "file in memory": (lambda v: io.BytesIO(bytes(int(v))), lambda held: len(held.getvalue())),
    "file of the user's": (lambda v: OwnBytes(bytes(int(v))), lambda held: len(held.getvalue())),
    "format": (lambda v: OwnStruct("b" * int(v)), lambda held: held.size),
    "deque with a limit": (lambda v: collections.deque([1], int(v)), lambda held: held.maxlen),
    "number of C": (ctypes.c_double, lambda held: held.value),
    "array of C": (lambda v: (ctypes.c_double * 2)(v), lambda held: held[0]),
    "structure of C": (lambda v: Pair(v, 1), lambda held: held.one),
}
# What changes such an object in place.
CHANGES: dict[str, Callable[[Any], None]] = {
    "exception": lambda held: setattr(held, "args", (3.0,)),
    "exception of the user's": lambda held: setattr(held, "args", (3.0,)),
    "exception with a tensor": lambda held: setattr(held, "args", (torch.tensor(3.0),)),
    "exception with a list": lambda held: held.args[0].__setitem__(0, 3.0),
    "error of the system": lambda held: setattr(held, "errno", 3),
    "end of an iterator": lambda held: setattr(held, "value", 3.0),
    "error in text": lambda held: setattr(held, "start", 3),
    "group of exceptions": lambda held: setattr(held.exceptions[0], "args", (3.0,)),
    "cause of an exception": lambda held: setattr(held.__cause__, "args", (3.0,)),
    "static method of the user's": lambda held: setattr(
        held.__func__.__closure__[0], "cell_contents", 3.0
    ),
    "property": lambda held: setattr(held.fget.__closure__[0], "cell_contents", 3.0),
    "cell": lambda held: setattr(held, "cell_contents", 3.0),
    "bound method": lambda held: setattr(held.__self__, "value", 3.0),
    "number of C": lambda held: setattr(held, "value", 3.0),
    "array of C": lambda held: held.__setitem__(0, 3.0),
    "structure of C": lambda held: setattr(held, "one", 3.0),
}
# What is compared by identity: nothing shows whether another one is equal.
BY_IDENTITY = frozenset(
    (
        *("decimal", "decimal of the user's", "digits of a decimal", "fraction", "identifier"),
        *("timedelta", "timedelta of the user's", "date", "path", "generic", "format"),
        *("file in memory", "file of the user's", "getter of an item", "getter of an attribute"),
        *("method with an argument", "static method", "static method of the user's"),
        *("class method", "property", "property of the user's", "bound method"),
        *("exception with a tensor", "group of exceptions"),
    )
)


class Reads(nn.Module):
    """Multiplies by the number that an object holds."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.held = held
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.held)


def check(module: Reads, change: Callable[[], Any], device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with torch.no_grad():
        graphed, fused = gw.graph(module), gw.fuse(module, (x,))
        for made in (graphed, graphed, fused):
            torch.testing.assert_close(made(x), x * 2)
        assert graphed.statistics.captures == 1
        change()
        torch.testing.assert_close(module(x), x * 3)
        for made in (graphed, graphed, fused, fused):
            torch.testing.assert_close(made(x), x * 3)


@pytest.mark.parametrize("kind", OBJECTS)
def test_another_object_with_other_content_is_noticed(kind: str, device: torch.device) -> None:
    make, read = OBJECTS[kind]
    module = Reads(make(2.0), read).eval()
    check(module, lambda: setattr(module, "held", make(3.0)), device)


@pytest.mark.parametrize("kind", CHANGES)
def test_other_content_of_the_same_object_is_noticed(kind: str, device: torch.device) -> None:
    make, read = OBJECTS[kind]
    module = Reads(make(2.0), read).eval()
    check(module, lambda: CHANGES[kind](module.held), device)


@pytest.mark.parametrize("checks", ["python"], indirect=True)
@pytest.mark.parametrize("kind", sorted(OBJECTS.keys() - BY_IDENTITY))
def test_an_object_with_equal_content_is_no_change(kind: str, device: torch.device) -> None:
    make, read = OBJECTS[kind]
    module, x = Reads(make(2.0), read).eval(), torch.ones(2, device=device)
    graphed = gw.graph(module)
    with torch.no_grad():
        for _ in range(3):
            module.held = make(2.0)
            graphed(x)
    assert graphed.statistics.captures == 1


class Changing(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.args = (9.0,)
        return x * torch.randn(2, device="meta").sum().item()  # It cannot be computed.


def test_a_failed_capture_puts_the_content_back(device: torch.device) -> None:
    module = Changing(OwnError(2.0), first).eval()
    with pytest.raises(gw.CaptureError), torch.no_grad():
        gw.capture(module, torch.ones(2, device=device))
    assert module.held.args == (2.0,)


class Raising(nn.Module):
    """Raises and catches the same exception at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = OwnError(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            try:
                raise ValueError
            except ValueError:
                raise self.stop  # noqa: B904  # its context is the point
        except OwnError as error:
            return x * error.args[0]


def test_an_exception_that_each_call_raises_is_no_change(device: torch.device) -> None:
    graphed, x = gw.graph(Raising().eval()), torch.ones(2, device=device)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(graphed(x), x * 2)
    assert graphed.statistics.captures == 1
