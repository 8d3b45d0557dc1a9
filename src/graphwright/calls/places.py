"""Places that each run of a call writes to: attributes of modules, items of dictionaries.

`self.last = h` in a forward gives the attribute another tensor at each call. Such a place is no
state that the call depends on, as long as it does not read what the place held before: it does the
same where the place holds nothing. `self.calls += 1` counts: the call does the same where the place
holds what can be added to and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import SignatureError
from .counters import Counter, Misused, added
from .leaves import describe
from .objects import apart

MISSING: Any = object()


@dataclass(eq=False)
class Place:
    """An attribute of an object, or an item of a dictionary, to which each run writes.

    Attributes:
        name: in words.
        owner: the object or dictionary.
        key: the attribute's name, or the item's key.
        is_attribute: whether it is an attribute.
        counts: whether each run adds to a number there.
        step: what it adds, once that is known.
    """

    name: str
    owner: Any
    key: Any
    is_attribute: bool
    counts: bool = False
    step: int = 0

    @property
    def _holder(self) -> dict[Any, Any]:
        found: dict[Any, Any] = vars(self.owner) if self.is_attribute else self.owner
        return found

    @property
    def is_plain(self) -> bool:
        """Whether it is an attribute of the object's own, or an item."""
        return not self.is_attribute or self.key in getattr(self.owner, "__dict__", ())

    def same_as(self, other: Place) -> bool:
        """Whether both are one place."""
        return self.owner is other.owner and self.key == other.key

    def value(self) -> Any:
        """What it holds; `MISSING` if there is no such attribute or item."""
        return self._holder.get(self.key, MISSING)

    def empty(self) -> None:
        """Let it hold nothing, or what can be added to and nothing else."""
        self.put(Counter(self) if self.counts else MISSING)

    def added(self) -> int:
        """What a run has added to the counter that `empty` has put there.

        Raises:
            Misused: it did something else with it, or put something else in its place.
        """
        return added(self.value(), self)

    def put(self, value: Any) -> None:
        """Let it hold a value, or nothing if that is `MISSING`."""
        if isinstance(self.owner, type):  # Whatever its metaclass makes of setting an attribute.
            type.__setattr__(self.owner, self.key, value)
        elif value is not MISSING:
            self._holder[self.key] = value
        elif self.key in self._holder:
            del self._holder[self.key]


@contextlib.contextmanager
def emptied(places: Sequence[Place]) -> Iterator[None]:
    """Let places hold nothing at the beginning of the block, and what they held at its end.

    Raises:
        Misused: the block does something else with a counter than is known.
    """
    held = [(place, place.value()) for place in places]
    try:
        for place in places:
            place.empty()
        yield
        if any(place.counts and place.added() != place.step for place in places):
            raise Misused("The call adds another number to a counter than before.")
    finally:
        for place, value in held:
            place.put(value)


def kind_of(value: Any) -> Any:
    """What two values share that differ in the values of tensors alone; None if it is unknown."""
    if value is MISSING:
        return MISSING
    if value is None:
        return "None"
    try:
        leaves, spec = pytree.tree_flatten(apart(value))
        return spec, [describe(leaf) for leaf in leaves]
    except SignatureError:
        return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that `kind_of` knows."""
    leaves = [] if value is MISSING else pytree.tree_leaves(apart(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def carried_by(function: Any) -> tuple[Place, ...]:
    """Places that a function is given as an argument: what they hold is not what it depends on."""
    found: tuple[Place, ...] = getattr(function, "_graphwright_carries", ())
    return found


def hidden(places: Iterable[Place]) -> Mapping[int, frozenset[Any]]:
    """The keys of places by the identity of their owners, for `Dependencies`."""
    found: dict[int, frozenset[Any]] = {}
    for place in places:
        found[id(place.owner)] = found.get(id(place.owner), frozenset()) | {place.key}
    return found
