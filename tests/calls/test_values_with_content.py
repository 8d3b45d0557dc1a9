"""Attributes of plain values whose class is the user's, and items of arrays: changed in place."""

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.dependencies import Dependencies


class Number(float):
    by = 1.0


class Whole(int):
    by = 1.0


class Text(str):
    by = 1.0


class Bits(bytes):
    by = 1.0


class Complex(complex):
    by = 1.0


class Pair(tuple[float, ...]):
    by = 1.0


class Point(NamedTuple):
    x: float
    y: float


class Named(Point):
    by = 1.0


class Listed(list[float]):
    by = 1.0


class SlottedNumber(float):
    __slots__ = ("by",)


class SlottedText(str):
    __slots__ = ("by",)


class SlottedList(list[float]):
    __slots__ = ("by",)


class Call(functools.partial[torch.Tensor]):
    pass


def with_attribute(value: Any) -> Any:
    value.by = 1.0
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "float": lambda: Number(2.0),
    "int": lambda: Whole(2),
    "str": lambda: Text("two"),
    "bytes": lambda: Bits(b"two"),
    "complex": lambda: Complex(2),
    "tuple": lambda: Pair((1.0, 2.0)),
    "named tuple": lambda: Named(1.0, 2.0),
    "list": lambda: Listed((1.0, 2.0)),
    "slotted float": lambda: SlottedNumber(2.0),
    "slotted str": lambda: SlottedText("two"),
    "slotted list": lambda: SlottedList((1.0, 2.0)),
    "partial": lambda: Call(torch.mul, other=2.0),
}


class Holder(nn.Module):
    """Holds a value in an attribute, and another in a list and in a dictionary."""

    def __init__(self, value: Any, where: str) -> None:
        super().__init__()
        self.held = {"attribute": value, "item": [[value]], "key": {"a": value}}[where]
        self.where = where

    def value(self) -> Any:
        held: Any = self.held
        return {"attribute": lambda: held, "item": lambda: held[0][0], "key": lambda: held["a"]}[
            self.where
        ]()


class ByAttribute(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.value().by
        return result


ONCE = pytest.mark.parametrize("checks", ["python"], indirect=True)
WHERE = ("attribute", "item", "key")


def places(kinds: Iterable[str]) -> Any:
    """Each kind of value in one place after another."""
    cases = zip(kinds, itertools.cycle(WHERE), strict=False)
    return pytest.mark.parametrize(("kind", "where"), [*cases])


def check(module: Holder, change: Callable[[], Any], device: torch.device) -> None:
    x = torch.ones(2, device=device)
    with torch.no_grad():
        graphed, fused = gw.graph(module), gw.fuse(module, (x,))
        captured, before = gw.capture(module, x), module(x)
        for made in (graphed, fused, captured):
            torch.testing.assert_close(made(x), before)
        change()
        assert not torch.equal(module(x), before)
        for _ in range(2):
            torch.testing.assert_close(graphed(x), module(x))
            torch.testing.assert_close(fused(x), module(x))
        with pytest.raises(gw.SignatureError):
            captured(x)


@places(VALUES)
def test_a_changed_attribute_of_a_plain_value_is_noticed(
    kind: str, where: str, device: torch.device
) -> None:
    value = with_attribute(VALUES[kind]())
    module = ByAttribute(value, where).eval()
    check(module, lambda: setattr(value, "by", 3.0), device)


@ONCE
@pytest.mark.parametrize("kind", VALUES)
def test_an_equal_value_with_another_attribute_is_noticed(kind: str, device: torch.device) -> None:
    module = ByAttribute(with_attribute(VALUES[kind]()), "attribute").eval()
    other = with_attribute(VALUES[kind]())
    other.by = 3.0
    check(module, lambda: setattr(module, "held", other), device)


@ONCE
@pytest.mark.parametrize("kind", ["float", "str", "tuple", "partial"])
def test_an_equal_value_with_equal_attributes_is_no_change(kind: str, device: torch.device) -> None:
    module = ByAttribute(with_attribute(VALUES[kind]()), "attribute").eval()
    x = torch.ones(2, device=device)
    with torch.no_grad():
        graphed = gw.graph(module)
        graphed(x)
        for _ in range(3):
            module.held = with_attribute(VALUES[kind]())
            graphed(x)
    assert graphed.statistics.captures == 1


def test_the_class_of_a_plain_value_is_watched(device: torch.device) -> None:
    class Other(Number):
        @property
        def by(self) -> float:  # type: ignore[override]  # it is the point
            return 5.0

    value = Number(2.0)
    module = ByAttribute(value, "attribute").eval()
    check(module, lambda: setattr(value, "__class__", Other), device)


class ByItem(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.value()[0])


def _unaligned() -> memoryview:
    return memoryview(bytearray(b"\1\2\3\4\5\6"))[1::2]


ARRAYS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(b"\1\2\3"),
    "array": lambda: array.array("d", [1.0, 2.0]),
    "memoryview": lambda: memoryview(bytearray(b"\1\2\3")),
    "memoryview with steps": _unaligned,
    "numpy": lambda: numpy.array([1.0, 2.0]),
    "numpy with steps": lambda: numpy.arange(6.0)[1::2],
    "numpy of booleans": lambda: numpy.array([True, False]),
}


def _set_first(items: Any) -> None:
    items[0] = 0


@places(ARRAYS)
def test_a_changed_item_of_an_array_is_noticed(kind: str, where: str, device: torch.device) -> None:
    value = ARRAYS[kind]()
    check(ByItem(value, where).eval(), lambda: _set_first(value), device)


@pytest.mark.parametrize("kind", ["bytearray", "array"])
def test_a_longer_array_is_noticed(kind: str, device: torch.device) -> None:
    class ByLength(Holder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * len(self.value())

    value = ARRAYS[kind]()
    check(ByLength(value, "attribute").eval(), lambda: value.append(1), device)


def test_another_shape_of_an_array_is_noticed(device: torch.device) -> None:
    class ByShape(Holder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.value().shape[0]

    value = numpy.ones((4, 1))
    module = ByShape(value, "attribute").eval()
    check(module, lambda: setattr(module, "held", value.reshape(2, 2)), device)


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_with_the_same_content_is_no_change(kind: str, device: torch.device) -> None:
    module, x = ByItem(ARRAYS[kind](), "attribute").eval(), torch.ones(2, device=device)
    with torch.no_grad():
        graphed = gw.graph(module)
        graphed(x)
        for _ in range(3):
            module.held = ARRAYS[kind]()
            graphed(x)
    assert graphed.statistics.captures == 1


def test_an_array_of_a_file_is_watched(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TABLE", bytearray(b"\2"))
    x, before = torch.ones(2, device=device), 2
    graphed = gw.graph(by_table)
    torch.testing.assert_close(graphed(x), x * before)
    TABLE[0] = 3
    torch.testing.assert_close(graphed(x), x * 3)


TABLE = bytearray(b"\2")


def by_table(x: torch.Tensor) -> torch.Tensor:
    return x * TABLE[0]


class Counting(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _set_first(self.held)
        self.held[0] += 9
        return x * torch.randn(2, device="meta").sum().item()  # It cannot be computed.


@ONCE
@pytest.mark.parametrize("kind", [kind for kind in ARRAYS if kind != "numpy of booleans"])
def test_a_failed_capture_puts_the_items_back(kind: str, device: torch.device) -> None:
    value = ARRAYS[kind]()
    before = list(value)
    module = Counting(value, "attribute").eval()
    with pytest.raises(gw.CaptureError), torch.no_grad():
        gw.capture(module, torch.ones(2, device=device))
    assert list(value) == before


def test_a_long_array_is_named(device: torch.device) -> None:
    graphed = gw.graph(ByItem(numpy.ones(5000), "attribute").eval())
    with torch.no_grad():
        graphed(torch.ones(2, device=device))
    assert "not looked into: attribute held" in graphed.explain()


@pytest.mark.parametrize("kind", [bytearray, numpy.asarray])
def test_another_long_array_is_noticed(kind: Callable[[bytes], Any], device: torch.device) -> None:
    module = ByItem(kind(numpy.full(10_000, 2, numpy.uint8)), "attribute").eval()
    other = kind(numpy.full(10_000, 3, numpy.uint8))
    check(module, lambda: setattr(module, "held", other), device)


def test_an_array_of_objects_is_named() -> None:
    found = Dependencies(ByItem(numpy.array([1, "two"], dtype=object), "attribute"))
    assert found.unread == ["attribute held of ByItem (a numpy.ndarray)"]
