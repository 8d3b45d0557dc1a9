"""Counters: what stands for a number while it is found out whether a call only adds to it."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import CaptureError


class Misused(CaptureError):
    """A call does something else with a counter than to add to it."""


class Counter:
    """Stands for a number that a call adds to; all else raises, and is remembered."""

    __slots__ = ("_added", "_misuse", "_source")

    def __init__(self, source: object, added: int = 0, misuse: list[str] | None = None) -> None:
        """Stand for the number of a source, to which something was added."""
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_added", added)
        object.__setattr__(self, "_misuse", [] if misuse is None else misuse)

    def __add__(self, other: Any) -> Counter:
        if type(other) is not int:
            _refuse(self, "__add__")
        source, added, misuse = _inside(self)
        return Counter(source, added + other, misuse)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Counter:
        return self + (-other if type(other) is int else other)

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            _refuse(self, name)
        return int  # Modules ask for the class when an attribute is set.


def _refuse(counter: Counter, name: str) -> NoReturn:
    _inside(counter)[2].append(name)
    raise Misused(f"The call reads a counter: {name}.")


def _refusing(name: str) -> Any:
    return lambda counter, *_: _refuse(counter, name)


# What is special is looked up on the class, past __getattribute__.
_SPECIAL = """
    abs and bool call ceil complex contains delattr dir divmod eq float floor floordiv format ge
    getitem gt hash index int invert iter le len lshift lt matmul mod mul ne neg or pos pow rand
    rdivmod repr rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv
    rxor setattr setitem str truediv trunc xor
"""
for _name in _SPECIAL.split():
    setattr(Counter, f"__{_name}__", _refusing(f"__{_name}__"))


def _inside(counter: Counter) -> tuple[object, int, list[str]]:
    read = object.__getattribute__
    return read(counter, "_source"), read(counter, "_added"), read(counter, "_misuse")


def added(value: Any, source: object) -> int:
    """What a run has added to the counter of a source, of which this is left.

    Raises:
        Misused: it did something else with it, or put something else in its place.
    """
    if type(value) is not Counter:
        raise Misused("The call replaces a counter.")
    its, found, misuse = _inside(value)
    if misuse:
        raise Misused(f"The call reads a counter: {misuse[0]}.")
    if its is not source:
        raise Misused("The call copies a counter.")
    return found
