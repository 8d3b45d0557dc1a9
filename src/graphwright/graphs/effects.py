"""Effects: what a call does to the objects and containers that it was given.

A cache that grew, an attribute that was rebound, a list that got an element: a captured call runs
on copies of the caller's objects, which are compared before and after. What has changed is part of
what the call returns, as an `Outcome`; after each replay it is done to the caller's own objects,
with tensors of that replay.

What a call writes outside of its arguments are values of places, which the walk of `dependencies`
finds. Arguments are other objects in each call: they are taken apart by `objects`, and told by
their position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.objects import (
    Equal,
    GivenNode,
    apart,
    changeable,
    has_objects,
    is_container,
    layout_of,
    one_level,
    same,
)
from ..calls.places import MISSING, Written

_LISTS, _DICTIONARIES = ("list", "deque"), ("dict", "OrderedDict", "defaultdict")


@dataclass(frozen=True)
class ObjectChange:
    """A change of one of the caller's objects; the values that are new stand apart from it.

    Attributes:
        position: of the object among those of the call.
        attributes: whether its attributes have changed, not what it holds as a container.
        removed: names or keys that are gone.
        start: for a list, where it begins to differ.
        added: a name or key, and what is added to the number there.
    """

    position: int
    attributes: bool
    removed: tuple[Any, ...] = ()
    start: int = 0
    added: tuple[Any, int] | None = None


class Outcome:
    """What a call returned, and what it did to the objects that it was given.

    Attributes:
        result: what it returned.
        values: for each change, the new values.
        changes: what has changed.
        counted: counters that Python has added to already, and what they hold then.
    """

    counted: Sequence[tuple[Written, Any]] = ()

    def __init__(
        self, result: Any, values: Sequence[Any], changes: tuple[ObjectChange, ...]
    ) -> None:
        self.result = result
        self.values = values
        self.changes = changes

    def happen(self, given: Sequence[Any]) -> Any:
        """Do to the caller's objects what the call did; returns its result."""
        for change, value in zip(self.changes, self.values, strict=True):
            if change.added is None or not self.counted:
                _do(given[change.position], change, value)
        for place, held in self.counted:
            place.put(held)
        return self.result


def _made(children: list[Any], changes: Any) -> Outcome:
    return Outcome(children[0], children[1], changes)


pytree.register_pytree_node(
    Outcome,
    lambda outcome: ([outcome.result, list(outcome.values)], outcome.changes),
    lambda children, changes: _made(list(children), changes),
    flatten_with_keys_fn=lambda outcome: (
        [
            (pytree.GetAttrKey("result"), outcome.result),
            (pytree.GetAttrKey("changes"), list(outcome.values)),
        ],
        outcome.changes,
    ),
)


class Unrepeatable(Exception):
    """A call changed something in a way that cannot be repeated; says what."""


class GivenObjects:
    """The objects among a call's arguments as they were before it ran.

    Attributes:
        objects: what a call may change in place, in the order of the arguments.
    """

    def __init__(self, arguments: Any) -> None:
        """Remember what the arguments hold."""
        self.objects = changeable(arguments)
        self._before = [(_attributes(each), _content(each)) for each in self.objects]
        self._kinds = [_class_of(each) for each in self.objects]

    def changes(self) -> tuple[list[ObjectChange], list[Any]]:
        """What the call has done to them, and the new values.

        Raises:
            Unrepeatable: it changed a container that is not one of Python's own.
        """
        changes: list[ObjectChange] = []
        values: list[Any] = []
        if self._kinds != [_class_of(each) for each in self.objects]:
            raise Unrepeatable("to be of another class")
        for position, (each, (attributes, content)) in enumerate(
            zip(self.objects, self._before, strict=True)
        ):
            for is_attributes, before, after in (
                (True, attributes, _attributes(each)),
                (False, content, _content(each)),
            ):
                found = _difference(before, after)
                if found is None:
                    continue
                if not is_attributes and _kind(each) is None:
                    raise Unrepeatable(f"a {type(each).__name__}, in a way of its own")
                removed, start, value = found
                changes.append(ObjectChange(position, is_attributes, removed, start))
                values.append(value)
        return changes, values

    def outcome(
        self, result: Any, places: Sequence[Written] = (), owned: Sequence[Any] = ()
    ) -> tuple[Any, bool]:
        """What the call returned and did, taken apart, and whether it has to do with the caller's.

        Args:
            result: what it returned.
            places: outside of the call, to which it has written.
            owned: objects that the module holds, which stay the same.

        Raises:
            Unrepeatable: it changed a container that is not one of Python's own.
            SignatureError: an object holds itself, or there are too many.
        """
        changes, values = self.changes()
        for position, place in enumerate(places, len(self.objects)):
            if place.counts:
                added = place.key, place.step
                changes.append(ObjectChange(position, place.is_attribute, added=added))
                values.append({})
                continue
            value = place.value()
            if value is not MISSING:
                changes.append(ObjectChange(position, place.is_attribute))
                values.append({place.key: value})
        kept = [each for each in owned if not isinstance(each, torch.Tensor | nn.Module)]
        if not changes and not self.objects:
            return apart(result, kept=kept), False
        _refuse_weights(values, owned)
        whole = Outcome(result, values, tuple(changes)) if changes else result
        made = apart(whole, self.objects, kept)
        refers = bool(changes) or _refers(made)
        return (made if refers or has_objects(pytree.tree_leaves(result)) else result), refers


def _refuse_weights(values: Any, owned: Sequence[Any]) -> None:
    """Raise Unrepeatable where a new value is a tensor of the module's: results are aliases."""
    weights = {id(each) for each in owned if isinstance(each, torch.Tensor)}
    if any(id(leaf) in weights for leaf in pytree.tree_leaves(apart(values))):
        raise Unrepeatable("to hold a tensor of the module's")


def _refers(tree: Any) -> bool:
    """Whether a tree that was taken apart has objects of the caller in it."""
    found = pytree.tree_leaves(tree, is_leaf=lambda each: isinstance(each, GivenNode))
    return any(isinstance(each, GivenNode) for each in found)


def _kind(value: Any) -> str | None:
    """What kind of container of Python's own a value is, or holds; None for others."""
    cls = type(value)
    if cls is set:
        return "set"
    if is_container(value):
        name = cls.__name__ if cls.__module__ in ("builtins", "collections") else ""
        return name if name in (*_LISTS, *_DICTIONARIES) else None
    layout = layout_of(cls)
    return None if layout is None or not layout.holds else str(layout.base.__name__)


def _attributes(value: Any) -> dict[str, Any]:
    if is_container(value):
        return dict(vars(value)) if hasattr(value, "__dict__") else {}
    layout = layout_of(type(value))
    return {} if layout is None else layout.attributes(value)


def _content(value: Any) -> Any:
    """What a container holds, in a plain dictionary or list."""
    kind = _kind(value)
    if kind == "set":
        return dict.fromkeys(value)
    if kind in _DICTIONARIES:
        return dict(value)
    if kind in _LISTS:
        return list(value)
    if not is_container(value):
        return []
    children, spec = one_level(value)
    return {"spec": Equal(spec), **dict(enumerate(children))}


def _difference(before: Any, after: Any) -> tuple[tuple[Any, ...], int, Any] | None:
    """What is gone, where a list begins to differ, and what is new; None if nothing is."""
    if isinstance(before, list):
        start = _first_difference(before, after)
        return None if start == len(before) == len(after) else ((), start, after[start:])
    removed = tuple(key for key in before if key not in after)
    new = {k: v for k, v in after.items() if k not in before or not _same(before[k], v)}
    if [*(k for k in before if k in after), *(k for k in new if k not in before)] != [*after]:
        removed, new = tuple(before), after  # In another order.
    return (removed, 0, new) if removed or new else None


def _first_difference(before: list[Any], after: list[Any]) -> int:
    """Where two lists begin to differ."""
    pairs = enumerate(zip(before, after, strict=False))
    shorter = min(len(before), len(after))
    return next((at for at, (mine, its) in pairs if not _same(mine, its)), shorter)


def _same(before: Any, after: Any) -> bool:
    """Whether a value is what it was: the same object, or as good as it."""
    if isinstance(before, list | dict):
        return before is after
    if type(before) is tuple and type(after) is tuple:
        return len(before) == len(after) and all(map(_same, before, after))
    return same(before, after)


def _class_of(value: Any) -> tuple[Any, ...]:
    """An object's class, and what a defaultdict makes values with: no effect changes these."""
    return type(value), getattr(value, "default_factory", None)


def _do(target: Any, change: ObjectChange, value: Any) -> None:
    """Do a change to an object."""
    if change.added is not None:
        key, step = change.added
        if change.attributes:
            setattr(target, key, getattr(target, key) + step)
        else:
            target[key] += step
        return
    if change.attributes:
        layout = layout_of(type(target))
        if layout is None:  # A container with attributes.
            for name in change.removed:
                del vars(target)[name]
            vars(target).update(value)
            return
        for name in change.removed:
            layout.remove(target, name)
        for name, each in value.items():
            layout.set(target, name, each)
        return
    kind = _kind(target)
    if kind == "set":
        target.difference_update(change.removed)
        target.update(value)
    elif kind in _DICTIONARIES:
        # An OrderedDict keeps its order itself; what a subclass makes of writing is its own.
        cls: Any = type(target) if is_container(target) else dict
        for key in change.removed:
            cls.__delitem__(target, key)
        cls.update(target, value)
    elif kind == "deque":
        while len(target) > change.start:
            target.pop()
        target.extend(value)
    else:
        list.__setitem__(target, slice(change.start, None), value)
