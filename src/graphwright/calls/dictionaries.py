"""Versions of dictionaries: whether one was written to, without a look at what it holds.

CPython 3.11 and 3.12 give each dictionary a new tag at every write (PEP 509), and an OrderedDict
counts the changes of its order. Neither can be read by an interface of Python's, so they are read
where CPython has them, once that was seen to work. Elsewhere the version is the content.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# From 3.12 on the lowest byte of a tag says who watches the dictionary, which is no write to it.
_WATCHERS = sys.version_info >= (3, 12)
_TAG_SIZE = ctypes.sizeof(ctypes.c_uint64) - _WATCHERS
# Where a dictionary has its tag: behind what all objects have and the number of its items.
_TAG = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)
_TAG += _WATCHERS and sys.byteorder == "little"
# Where an OrderedDict counts: behind the dictionary and five fields (`struct _odictobject`).
_ORDER = dict.__basicsize__ + 5 * ctypes.sizeof(ctypes.c_void_p)
# Writes after which CPython has specialised the instruction that writes.
_OFTEN = 64


class _Tag(ctypes.c_char * _TAG_SIZE):  # type: ignore[misc]  # an array
    """The bytes of a dictionary's tag, which keep it alive."""

    of: dict[Any, Any]
    raw: bytes


class _Order(ctypes.c_char * ctypes.sizeof(ctypes.c_size_t)):  # type: ignore[misc]  # an array
    """The bytes of the count of changes of an OrderedDict's order, which keep it alive."""

    of: OrderedDict[Any, Any]
    raw: bytes


class _OrderedTag:
    """The tag of an OrderedDict and the count of changes of its order."""

    __slots__ = ("places",)

    def __init__(self, dictionary: OrderedDict[Any, Any]) -> None:
        self.places = _tag(dictionary), _order(dictionary)

    @property
    def raw(self) -> bytes:
        return b"".join(self.places)


def _tag(dictionary: dict[Any, Any]) -> _Tag:
    found: _Tag = _Tag.from_address(id(dictionary) + _TAG)
    found.of = dictionary
    return found


def _order(dictionary: OrderedDict[Any, Any]) -> _Order:
    found: _Order = _Order.from_address(id(dictionary) + _ORDER)
    found.of = dictionary
    return found


def content(dictionary: dict[Any, Any]) -> tuple[int, ...]:
    """A version that takes longer to read: the identities of keys and values, in their order."""
    return tuple(map(id, itertools.chain(dictionary, dictionary.values())))


def _can_look() -> bool:
    """Whether the interpreter is one whose objects lie where they are read here."""
    with_lock: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.implementation.name == "cpython" and with_lock


def _tags_tell() -> bool:
    """Whether a dictionary's tag changes at each write, and at nothing else."""

    class Tried:
        pass

    if not _can_look():
        return False
    tried: Any = Tried()
    tried.a = None
    tag = _tag(vars(tried))
    seen = [tag.raw]

    def written_often() -> None:
        # CPython takes other ways to write once a line has run some times.
        for _ in range(_OFTEN):
            tried.a = object()
            seen.append(tag.raw)

    written_often()
    for write in (
        lambda: vars(tried).update(a=object()),
        lambda: vars(tried).setdefault("b", 1),
        lambda: setattr(tried, "c", 2),
        lambda: delattr(tried, "c"),
        lambda: vars(tried).pop("b"),
        lambda: vars(tried).clear(),
    ):
        write()
        seen.append(tag.raw)
    if len(set(seen)) < len(seen):
        return False
    # Whatever else changes there would be taken for a write.
    return [*vars(tried)] == [] and vars(tried).get("a") is None and tag.raw == seen[-1]


def _order_tells() -> bool:
    """Whether the count of an OrderedDict changes when its order does, and at nothing else."""
    if not _can_look():
        return False
    tried = OrderedDict.fromkeys("abcd")
    count = _order(tried)
    seen = [count.raw]
    for key, last in (("a", True), ("d", False), ("b", True)):
        tried.move_to_end(key, last)
        seen.append(count.raw)
    if len(set(seen)) < len(seen):
        return False
    return [*tried] == ["d", "c", "a", "b"] and count.raw == seen[-1]


TAGS = _tags_tell()
ORDER = _order_tells()
# Reads the version from what `reader` gives; in C, as it is done for each dictionary at each call.
read: Callable[[Any], Any] = operator.attrgetter("raw") if TAGS else content


def has_version(holder: Any) -> bool:
    """Whether something is a dictionary whose changes its version tells."""
    return isinstance(holder, dict) and (ORDER or not isinstance(holder, OrderedDict))


def reader(dictionary: dict[Any, Any]) -> Any:
    """What `read` takes. No other content of this dictionary, and no other one, has its version."""
    if not TAGS:
        return dictionary
    return _OrderedTag(dictionary) if isinstance(dictionary, OrderedDict) else _tag(dictionary)


def all_at_once(
    readers: Sequence[Any], versions: Sequence[Any]
) -> tuple[Callable[[list[Any]], Any], list[Any], Any]:
    """How to read the versions of dictionaries at once: in a quarter of the time, where tags tell.

    Args:
        readers: what `reader` gave for each.
        versions: what `read` gave for each; None where it has another one already.

    Returns:
        a function, what it is given, and what it gives while all versions are these.
    """
    known = list(versions)
    if not TAGS or None in known:
        return _each, list(readers), known
    join = b"".join
    return join, [place for each in readers for place in _places(each)], join(known)


def _places(reader: _Tag | _OrderedTag) -> Iterator[memoryview]:
    """The bytes of a version; they keep the dictionary alive."""
    return map(memoryview, (reader,) if isinstance(reader, _Tag) else reader.places)


def _each(readers: list[Any]) -> list[Any]:
    return list(map(read, readers))
