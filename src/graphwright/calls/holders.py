"""Who holds something that no walk over the module finds, and whether it still does.

Code can get a tensor from where its names do not lead: a cache of `functools`, a `ContextVar`, a
generator, a dictionary under a computed name. `holders_of` asks the garbage collector who refers to
the tensor, who refers to that, and so on up to a namespace, a class, or something that is watched
already. `Held` then looks at each of these links: as long as all hold what they held, code that
goes through them finds the same tensor.

A search looks at every object that the collector knows, some tenths of a second in a large process;
it is made at captures alone, and only if something was read that nobody watches.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import gc
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# How far to go up, and how many objects to look at.
_MAX_STEPS = 16
_MAX_HOLDERS = 500
# The collector compares each object in turn with all that are asked for: more are asked for apart.
_TOGETHER = 16
_MISSING: Any = object()
# What holds nothing for code to find: code that runs now, and what the search itself made.
_PASSING = (types.FrameType, types.TracebackType, types.CodeType)
# What always holds what it was made with.
_FIXED = (tuple, frozenset, weakref.ref, types.MethodType)
_OWN = "graphwright"


class _Kind(enum.Enum):
    """How one object holds another."""

    FIXED = "what it was made with"
    ITEM = "an item of a dictionary"
    KEY = "a key of a dictionary"
    INDEX = "an item of a list"
    ATTRIBUTE = "an attribute"
    CELL = "a variable of a closure"
    CONTEXT = "a context variable"
    THREAD = "what a threading.local holds on this thread"
    MEMBER = "in no order that matters"
    INSIDE = "inside of it, where only the collector sees it"


@dataclass(frozen=True, eq=False, slots=True)
class _Link:
    """One object that holds another.

    No function: the search would take its closure for another holder.
    """

    holder: Any
    child: Any
    kind: _Kind
    key: Any = None

    def holds(self) -> bool:
        """Whether it still does."""
        return bool(_CHECKS[self.kind](self.holder, self.child, self.key))

    @property
    def name(self) -> str:
        """The place in words."""
        kind, holder, key = self.kind, self.holder, self.key
        of = type(holder).__qualname__
        if kind is _Kind.ITEM and "__builtins__" in holder:
            return f"the variable {holder.get('__name__')}.{key}"
        if kind is _Kind.ITEM:
            shown = repr(key) if isinstance(key, str | int) else type(key).__name__
            return f"the attribute or item {shown:.60}"
        if kind is _Kind.ATTRIBUTE:
            return f"the attribute {key} of a {of}"
        if kind is _Kind.CONTEXT:
            return f"the context variable {holder.name}"
        if kind is _Kind.INDEX:
            return f"item {key} of a {of}"
        return kind.value if kind in (_Kind.CELL, _Kind.THREAD) else f"what a {of} holds"


class Held:
    """Notices that something is no longer where it was found, or has moved.

    Args:
        things: tensors and others.
        links: through which code may have found them, as `holders_of` gives them.
    """

    def __init__(self, things: Sequence[Any], links: Sequence[_Link]) -> None:
        self._tensors = [thing for thing in things if isinstance(thing, torch.Tensor)]
        self._placed = list(map(_placed, self._tensors))
        self._links = [link for link in links if link.kind is not _Kind.FIXED]
        self._checks = [
            functools.partial(_CHECKS[link.kind], link.holder, link.child, link.key)
            for link in self._links
        ]
        self._alive = [*things, *links]

    def unchanged(self) -> bool:
        """Whether all are where they were."""
        try:
            if not all(check() for check in self._checks):
                return False
        except Exception:  # A holder has become something else.
            return False
        return list(map(_placed, self._tensors)) == self._placed

    def changed(self) -> str | None:
        """What has changed, in words, or None."""
        for link in self._links:
            try:
                same = link.holds()
            except Exception:
                same = False
            if not same:
                return f"{link.name}, from where the call takes a tensor, was replaced"
        if list(map(_placed, self._tensors)) != self._placed:
            return "a tensor that the call takes from elsewhere has moved"
        return None


def _placed(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def holders_of(
    things: Sequence[Any], known: Container[int], ours: Iterable[Any] = ()
) -> tuple[list[_Link], list[bool]]:
    """The links through which code can find some things.

    Args:
        things: tensors and other objects.
        known: identities of objects that are watched.
        ours: lists and others of the caller's that hold the things.

    Returns:
        the links, and for each thing whether any of them leads to it from where code can begin.
    """
    found = _Search(known, [*ours, things])
    found.go_up(things)
    return found.links(), [found.leads_to(thing) for thing in things]


class _Search:
    """Goes from things to what holds them, until nothing new is found."""

    def __init__(self, known: Container[int], ours: Iterable[Any]) -> None:
        self._known = known
        self._skipped = {id(each) for each in ours}
        self._links: dict[int, list[_Link]] = {}  # by what is held
        self._nodes: dict[int, Any] = {}
        self._skipped.add(id(self._nodes))
        self._begins: set[int] = set()  # where code can begin
        self._good: set[int] | None = None

    def go_up(self, things: Sequence[Any]) -> None:
        """Find the holders of some things, the holders of these, and so on."""
        level = [thing for thing in things if id(thing) not in self._nodes]
        self._nodes.update((id(thing), thing) for thing in level)
        for _ in range(_MAX_STEPS):
            level = self._above(level)
            if not level or len(self._nodes) > _MAX_HOLDERS:
                break
        for node in [node for key, node in self._nodes.items() if key not in self._links]:
            if type(node) is dict and id(node) not in self._begins:
                self._of_threads(node)

    def links(self) -> list[_Link]:
        """The links on all ways from where code can begin."""
        good = self._reachable()
        return [
            link for links in self._links.values() for link in links if id(link.holder) in good
        ]

    def leads_to(self, thing: Any) -> bool:
        """Whether there is a way from where code can begin."""
        return id(thing) in self._reachable()

    def _reachable(self) -> set[int]:
        if self._good is None:
            held: dict[int, list[int]] = {}
            for key, links in self._links.items():
                for link in links:
                    held.setdefault(id(link.holder), []).append(key)
            good, waiting = set(self._begins), list(self._begins)
            while waiting:
                for key in held.get(waiting.pop(), ()):
                    if key not in good:
                        good.add(key)
                        waiting.append(key)
            self._good = good
        return self._good

    def _above(self, level: list[Any]) -> list[Any]:
        """What holds the objects of a level and is to be looked at in its turn."""
        wanted = {id(each): each for each in level}
        self._skipped |= {id(level), id(wanted)}
        following: list[Any] = []
        for each in level:
            self._in_context(each)
            for reference in weakref.getweakrefs(each) if _has_weakrefs(each) else ():
                # Others belong to caches that look at what they refer to and do not hand it out.
                plain = type(reference) is weakref.ref and reference.__callback__ is None
                if plain or isinstance(reference, weakref.KeyedRef):
                    self._add(_Link(reference, each, _Kind.FIXED), following)
        for start in range(0, len(level), _TOGETHER):
            part = level[start : start + _TOGETHER]
            self._skipped.add(id(part))
            holders = gc.get_referrers(*part)
            self._skipped.add(id(holders))
            for holder in holders:
                if not self._passes(holder):
                    self._link(holder, {id(e): e for e in part}, following)
            del holders
        return following

    def _passes(self, holder: Any) -> bool:
        """Whether an object is none that code could find something in."""
        if id(holder) in self._skipped or isinstance(holder, _PASSING):
            return True
        cls = type(holder)
        if cls in (_Link, _Search) or cls.__module__.partition(".")[0] == _OWN:
            return True
        if cls.__module__ == "_contextvars" or cls.__name__.startswith("hamt"):
            return True  # Its variables are asked for by name.
        if cls is types.FunctionType:
            return _is_own(holder.__globals__)
        return cls is dict and _is_own(holder)

    def _link(self, holder: Any, wanted: Mapping[int, Any], following: list[Any]) -> None:
        if type(holder) is dict:
            for key, value in list(holder.items()):
                if id(value) in wanted:
                    self._add(_Link(holder, value, _Kind.ITEM, key), following)
                if id(key) in wanted:
                    self._add(_Link(holder, key, _Kind.KEY), following)
            return
        if isinstance(holder, list | deque):
            for index, value in enumerate(list(holder)):
                if id(value) in wanted:
                    self._add(_Link(holder, value, _Kind.INDEX, index), following)
            return
        held = gc.get_referents(holder)
        self._skipped.add(id(held))
        for child in {id(each): each for each in held if id(each) in wanted}.values():
            self._add(_link_of_object(holder, child), following)

    def _add(self, link: _Link, following: list[Any]) -> None:
        """Note a link, and look at its holder, unless code can begin there."""
        holder = link.holder
        self._links.setdefault(id(link.child), []).append(link)
        if id(holder) in self._nodes:
            return
        self._nodes[id(holder)] = holder
        if id(holder) in self._known or _is_beginning(holder):
            self._begins.add(id(holder))
        else:
            following.append(holder)

    def _in_context(self, thing: Any) -> None:
        """Note the context variables that hold something."""
        for variable, value in contextvars.copy_context().items():
            if value is thing:
                self._begin(_Link(variable, thing, _Kind.CONTEXT))

    def _of_threads(self, attributes: dict[Any, Any]) -> None:
        """Note the `threading.local` whose attributes these are on this thread."""
        for each in gc.get_objects():
            if isinstance(each, threading.local) and each.__dict__ is attributes:
                self._begin(_Link(each, attributes, _Kind.THREAD))
                return

    def _begin(self, link: _Link) -> None:
        self._links.setdefault(id(link.child), []).append(link)
        self._nodes[id(link.holder)] = link.holder
        self._begins.add(id(link.holder))


def _is_beginning(holder: Any) -> bool:
    """Whether code can begin there: in a namespace or a class."""
    if isinstance(holder, type | types.ModuleType):
        return True
    return type(holder) is dict and "__builtins__" in holder


def _is_own(namespace: dict[Any, Any]) -> bool:
    """Whether these are the globals of a file of ours."""
    name = namespace.get("__name__") if "__builtins__" in namespace else None
    return isinstance(name, str) and name.partition(".")[0] == _OWN


def _has_weakrefs(value: Any) -> bool:
    return bool(getattr(type(value), "__weakrefoffset__", 0))


def _link_of_object(holder: Any, child: Any) -> _Link:
    """The link of something that is neither a dictionary nor a list."""
    if isinstance(holder, _FIXED):
        return _Link(holder, child, _Kind.FIXED)
    if isinstance(holder, types.CellType):
        return _Link(holder, child, _Kind.CELL)
    for key, value in list((_attributes(holder) or {}).items()):
        if value is child:
            return _Link(holder, child, _Kind.ATTRIBUTE, key)
    if hasattr(type(holder), "cache_info"):  # Of functools: each use changes the order.
        return _Link(holder, child, _Kind.MEMBER)
    return _Link(holder, child, _Kind.INSIDE, _places(holder, child))


def _attributes(holder: Any) -> dict[Any, Any] | None:
    try:
        found = object.__getattribute__(holder, "__dict__")
    except Exception:
        return None
    return found if type(found) is dict else None


def _places(holder: Any, child: Any) -> list[int]:
    """Where an object holds another, in the order in which the collector goes through it."""
    return [index for index, each in enumerate(gc.get_referents(holder)) if each is child]


def _has_attribute(holder: Any, child: Any, key: Any) -> bool:
    return (_attributes(holder) or {}).get(key, _MISSING) is child


def _is_in(holder: Any, child: Any, key: Any) -> bool:
    return any(each is child for each in gc.get_referents(holder))


_CHECKS: Mapping[_Kind, Callable[[Any, Any, Any], object]] = {
    _Kind.FIXED: lambda holder, child, key: True,
    _Kind.ITEM: lambda holder, child, key: dict.get(holder, key, _MISSING) is child,
    _Kind.KEY: lambda holder, child, key: dict.__contains__(holder, child),
    _Kind.INDEX: lambda holder, child, key: len(holder) > key and holder[key] is child,
    _Kind.ATTRIBUTE: _has_attribute,
    _Kind.CELL: lambda holder, child, key: holder.cell_contents is child,
    _Kind.CONTEXT: lambda holder, child, key: holder.get(_MISSING) is child,
    _Kind.THREAD: lambda holder, child, key: holder.__dict__ is child,
    _Kind.MEMBER: _is_in,
    _Kind.INSIDE: lambda holder, child, key: _places(holder, child) == key,
}
