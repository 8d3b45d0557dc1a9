"""Versions of dictionaries: every write gives another one, and nothing else does."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphwright.calls import dictionaries
from graphwright.calls.watch import ModuleWatch

WRITES: dict[str, Callable[[Any], object]] = {
    "a new value": lambda d: d.update(a=object()),
    "an equal value of another type": lambda d: d.update(a=True),
    "a new key": lambda d: d.setdefault("z", 1),
    "a key less": lambda d: d.pop("a"),
    "another key with the same value": lambda d: d.update(z=d.pop("c")),
    "the last item": lambda d: d.popitem(),
    "nothing left": lambda d: d.clear(),
    "the order": lambda d: d.update(a=d.pop("a")),
    "merged in place": lambda d: d.__ior__({"b": object()}),
}
MOVES: dict[str, Callable[[OrderedDict[str, int]], object]] = {
    "to the end": lambda d: d.move_to_end("b"),
    "to the front": lambda d: d.move_to_end("b", last=False),
    "twice": lambda d: (d.move_to_end("b"), d.move_to_end("c")),
}


class Plain:
    """Has its attributes in a dictionary."""


def made(kind: type) -> dict[str, Any]:
    if kind is Plain:
        found = vars(Plain())
        found.update(a=1, b=2, c=3)
        return found
    return kind(a=1, b=2, c=3)


def among_others(d: dict[Any, Any]) -> Callable[[], Any]:
    """What gives the same version as before, if a dictionary among others still has it."""
    others: list[dict[Any, Any]] = [{"a": 1}, OrderedDict(b=2)]
    readers = [dictionaries.reader(each) for each in (others[0], d, others[1])]
    known: list[tuple[Callable[[], bool], int]] = []

    def version() -> int:
        for same, number in known:
            if same():
                return number
        versions = [dictionaries.read(each) for each in readers]
        read_all, given, before = dictionaries.all_at_once(readers, versions)
        known.append((lambda: bool(read_all(given) == before), len(known)))
        assert known[-1][0]()
        return len(known) - 1

    return version


@pytest.fixture(params=["as it is read here", "by content", "with others"])
def read(request: pytest.FixtureRequest) -> Callable[[dict[Any, Any]], Callable[[], Any]]:
    """Gives what reads a dictionary's version."""
    if request.param == "by content":
        return lambda d: lambda: dictionaries.content(d)
    if request.param == "with others":
        return among_others

    def reading(d: dict[Any, Any]) -> Callable[[], Any]:
        found = dictionaries.reader(d)
        return lambda: dictionaries.read(found)

    return reading


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", [dict, OrderedDict, Plain])
def test_each_write_gives_another_version(read: Any, kind: type, write: Any) -> None:
    dictionary = made(kind)
    version = read(dictionary)
    before = version()
    assert version() == before
    assert dictionary["a"] == 1
    assert [*dictionary] == ["a", "b", "c"]
    assert "z" not in dictionary
    assert version() == before
    write(dictionary)
    assert version() != before


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_another_order_is_another_version(read: Any, move: Any) -> None:
    dictionary = OrderedDict(a=1, b=2, c=3, d=4)
    assert dictionaries.has_version(dictionary)
    version = read(dictionary)
    before = version()
    move(dictionary)
    assert version() != before


def test_a_line_that_writes_often_is_seen_each_time(read: Any) -> None:
    thing: Any = Plain()
    thing.a = None
    version = read(vars(thing))
    seen = [version()]
    for _ in range(300):
        thing.a = object()
        seen.append(version())
        assert seen[-1] != seen[-2]


def test_two_dictionaries_with_the_same_content_differ_where_tags_tell() -> None:
    one, other = {"a": 1}, {"a": 1}
    versions = [dictionaries.read(dictionaries.reader(each)) for each in (one, other)]
    assert (versions[0] != versions[1]) is dictionaries.TAGS


def test_a_reader_keeps_its_dictionary_alive() -> None:
    """Its address would be another object's."""
    reader = dictionaries.reader({"a": 1})
    before = dictionaries.read(reader)
    others = [{"a": n} for n in range(100)]
    assert dictionaries.read(reader) == before
    assert len(others) == 100


class Settings(nn.Module):
    """Reads the first of its settings."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = OrderedDict(a=1.0, b=2.0, c=3.0, d=4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, value in enumerate(self.settings.values()):
            x = x * value + n
        return x


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_watch_notices_another_order(move: Any, checks: str) -> None:
    module = Settings()
    watch = ModuleWatch(module, values=False)
    for _ in range(5):  # The check in C++ is made after a few.
        assert watch.unchanged()
    move(module.settings)
    assert not watch.unchanged()
    assert watch.changed() is not None


def test_attributes_in_another_dictionary_are_noticed(checks: str) -> None:
    module = Settings()
    watch = ModuleWatch(module, values=False)
    for _ in range(5):
        assert watch.unchanged()
    module.__dict__ = {**vars(module), "settings": OrderedDict(a=5.0)}
    assert not watch.unchanged()
    assert watch.changed() is not None


def test_what_has_another_version_already_is_never_the_same() -> None:
    readers = [dictionaries.reader({"a": 1}), dictionaries.reader({"b": 1})]
    versions = [dictionaries.read(readers[0]), None]
    read_all, given, before = dictionaries.all_at_once(readers, versions)
    assert read_all(given) != before


def test_what_is_read_is_kept_alive() -> None:
    watched = [{"a": number} for number in range(100)]
    readers = list(map(dictionaries.reader, watched))
    read_all, given, before = dictionaries.all_at_once(
        readers, list(map(dictionaries.read, readers))
    )
    del watched, readers
    gc.collect()
    others = [{"b": number} for number in range(1000)]
    assert read_all(given) == before
    assert others


def test_to_watch_a_dictionary_is_no_write_to_it(checks: str, device: torch.device) -> None:
    """From Python 3.12 on the check in C++ marks what it watches, in the tag itself."""
    module = Settings().to(device)
    watch = ModuleWatch(module, values=False)
    for _ in range(5):
        assert watch.unchanged()
    assert (watch._compiled is not None) == (checks != "python")
    watches = [ModuleWatch(module, values=False) for _ in range(3)]
    for each in [*watches, watch] * 5:
        assert each.unchanged()
    del watches, each
    gc.collect()
    assert watch._compared.unchanged()
