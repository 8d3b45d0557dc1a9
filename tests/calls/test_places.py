"""Kinds of places: what each reads, and that all is put back that a run has changed."""

from __future__ import annotations

import array
import ctypes
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from graphwright.calls.counters import Misused
from graphwright.calls.places import (
    MISSING,
    AttributesPlace,
    ClassPartsPlace,
    ClosurePlace,
    ContentPlace,
    DictionaryPlace,
    GlobalsPlace,
    InheritedPlace,
    LengthPlace,
    Name,
    PartsPlace,
    SequencePlace,
    SetPlace,
    SlotsPlace,
    StatePlace,
    Written,
    emptied,
)

NAME = Name("", "it")
Change = Callable[[], object]


@pytest.fixture(autouse=True)
def checks() -> None:
    """None of this is compiled."""


class Box:
    """An object with attributes."""

    kept = 1

    def __init__(self) -> None:
        self.first, self.second, self.third = 1, 2, 3


class Slotted:
    """An object with slots."""

    __slots__ = ("first", "second", "third")

    def __init__(self) -> None:
        self.first, self.second = 1, 2


def _write(owner: Any) -> Change:
    def change() -> None:
        owner.first, owner.third = 4, 5
        del owner.second

    return change


def _attributes() -> tuple[StatePlace, Change]:
    box = Box()
    return AttributesPlace(NAME, box), _write(box)


def _attributes_of_a_module() -> tuple[StatePlace, Change]:
    module = nn.Module()
    vars(module).update(first=1, second=2)
    return AttributesPlace(NAME, module), _write(module)


def _slots() -> tuple[StatePlace, Change]:
    held = Slotted()
    return SlotsPlace(NAME, held), _write(held)


def _closure() -> tuple[StatePlace, Change]:
    first, second = 1, 2

    def write() -> None:
        nonlocal first, second, third
        first, third = 4, 5
        del second

    def function() -> Any:
        return first, second, third

    if not first:
        third = 3
    return ClosurePlace(NAME, function), write


def _globals() -> tuple[StatePlace, Change]:
    held = {"first": 1, "second": 2, "other": 3}
    names = ("first", "second", "third")
    place = GlobalsPlace(held, names, frozenset(names))

    def write() -> None:
        held.update(first=4, third=5)
        del held["second"]

    return place, write


def _dictionary(kind: type = dict) -> tuple[StatePlace, Change]:
    held = kind(first=1, second=2)

    def write() -> None:
        held.update(third=3)
        del held["first"]
        held["first"] = 1  # The last one now.

    return DictionaryPlace(NAME, held), write


def _row(held: Any) -> tuple[StatePlace, Change]:
    def write() -> None:
        held.append(5)
        held[0] = 4

    return SequencePlace(NAME, held), write


def _set() -> tuple[StatePlace, Change]:
    held = {1, 2}
    return SetPlace(NAME, held), lambda: held.symmetric_difference_update((2, 3))


def _content(held: Any) -> tuple[StatePlace, Change]:
    def write() -> None:
        held[0] = 7

    return ContentPlace(NAME, held), write


def _class(**attributes: Any) -> Any:
    return type("Own", (Box,), attributes)


def _parts_of_a_class() -> tuple[StatePlace, Change]:
    own = _class(scale=2)
    return ClassPartsPlace(NAME, own, ["scale"]), lambda: setattr(own, "scale", 3)


def _parts_of_a_file() -> tuple[StatePlace, Change]:
    file = types.ModuleType("a_file")
    vars(file).update(SCALE=2)
    return PartsPlace(NAME, file, ["SCALE"]), lambda: vars(file).update(SCALE=3)


def _inherited() -> tuple[StatePlace, Change]:
    own = _class()
    return InheritedPlace(NAME, own, ["kept"]), lambda: setattr(own, "kept", 2)


CASES: dict[str, Callable[[], tuple[StatePlace, Change]]] = {
    "attributes": _attributes,
    "attributes of a module": _attributes_of_a_module,
    "slots": _slots,
    "closure": _closure,
    "globals": _globals,
    "dictionary": _dictionary,
    "ordered dictionary": lambda: _dictionary(OrderedDict),
    "list": lambda: _row([1, 2]),
    "deque": lambda: _row(deque([1, 2])),
    "set": _set,
    "bytes": lambda: _content(bytearray(b"abc")),
    "array": lambda: _content(array.array("i", [1, 2])),
    "memory view": lambda: _content(memoryview(bytearray(b"abc"))),
    "ctypes": lambda: _content((ctypes.c_int * 2)(1, 2)),
    "class": _parts_of_a_class,
    "file": _parts_of_a_file,
    "inherited": _inherited,
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_place_held_is_put_back(case: str) -> None:
    place, change = CASES[case]()
    before = place.read()
    change()
    assert [*place.read().items()] != [*before.items()]
    place.put_back()
    assert place.read() == before


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_the_order_of_a_dictionary_is_put_back(kind: type) -> None:
    place, change = _dictionary(kind)
    change()
    place.put_back()
    assert [*place.owner] == ["first", "second"]


def test_globals_that_no_code_stores_are_left_alone() -> None:
    held = {"first": 1}
    place = GlobalsPlace(held, ("first",), frozenset())
    held["first"] = 2
    place.put_back()
    assert held == {"first": 2}


@pytest.mark.parametrize("values", [(1, len), (len, 1), (len, max)])
def test_functions_in_classes_are_left_alone(values: tuple[Any, Any]) -> None:
    before, now = values
    own = _class(scale=before)
    place = ClassPartsPlace(NAME, own, ["scale"])
    own.scale = now
    place.put_back()
    assert vars(own)["scale"] is now


def test_what_is_compared_by_its_length_is_not_put_back() -> None:
    held = [1]
    place = LengthPlace(NAME, held)
    held.append(2)
    place.put_back()
    assert held == [1, 2]


def _owners() -> dict[str, tuple[Any, type[StatePlace]]]:
    """Owners of something under the key `first`, by kind."""
    return {
        "attribute": (Box(), AttributesPlace),
        "item": ({"first": 1}, DictionaryPlace),
        "class": (_class(first=1), ClassPartsPlace),
    }


@pytest.mark.parametrize("kind", ["attribute", "item", "class"])
def test_a_counter_is_put_back_and_its_step_is_checked(kind: str) -> None:
    owner, place = _owners()[kind]
    counter = Written("it", owner, "first", place, counts=True, step=2)
    assert counter.is_attribute is (kind != "item")
    with emptied([counter]):
        counter.put(counter.value() + 2)
    assert counter.value() == 1
    with pytest.raises(Misused), emptied([counter]):
        counter.put(counter.value() + 3)
    assert counter.value() == 1


@pytest.mark.parametrize("kind", ["attribute", "item"])
def test_what_is_written_holds_nothing_while_it_is_emptied(kind: str) -> None:
    owner, place = _owners()[kind]
    written = Written("it", owner, "first", place)
    with emptied([written]):
        assert written.value() is MISSING
        written.put(MISSING)
        written.put(5)
    assert written.value() == 1
