"""Who holds something that no walk over the module finds, and whether it still does.

Code can get a tensor from where its names do not lead: a cache of `functools`, a `ContextVar`, a
generator, a dictionary under a computed name. `holders_of` asks the garbage collector who refers to
the tensor, who refers to that, and so on up to a namespace, a class, or something that is watched
already. `Held` then looks at each of these links: as long as all hold what they held, code that
goes through them finds the same tensor.

The collector does not look into all that can hold a tensor: not into an array of NumPy's, nor into
what an extension in C keeps. So the references that it shows, and those of variables of code that
runs, are counted too: where a tensor has more, it is not known where code finds it.

A search looks at every object that the collector knows, some tenths of a second in a large process;
it is made at captures alone, and only if something was read that nobody watches. What the program
has frozen (`gc.freeze`) thaws, since nothing would be found in it.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import gc
import inspect
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .leaves import without_memory

# How far to go up, and how many objects to look at.
_MAX_STEPS = 16
_MAX_HOLDERS = 250
# The collector compares each object in turn with all that are asked for: more are asked for apart.
_TOGETHER = 16
_MISSING: Any = object()
# What holds nothing for code to find: code that runs now, and what the search itself made.
_PASSING = (types.FrameType, types.TracebackType, types.CodeType)
# What always holds what it was made with.
_FIXED = (tuple, frozenset, weakref.ref, weakref.KeyedRef, types.MethodType)
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
    GRADIENT = "the gradient of a tensor"
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
        told = (_Kind.CELL, _Kind.THREAD, _Kind.GRADIENT)
        return kind.value if kind in told else f"what a {of} holds"


class Held:
    """Notices that something is no longer where it was found, or has moved.

    Args:
        things: tensors and others.
        links: through which code may have found them, as `holders_of` gives them.
    """

    def __init__(self, things: Sequence[Any], links: Sequence[_Link]) -> None:
        self._things = set(map(id, things))
        self._tensors = [thing for thing in things if isinstance(thing, torch.Tensor)]
        self._placed = list(map(_placed, self._tensors))
        self._links = [link for link in links if link.kind is not _Kind.FIXED]
        self._checks = [
            functools.partial(_CHECKS[link.kind], link.holder, link.child, link.key)
            for link in self._links
        ]
        self._alive = [*things, *links]

    def covers(self, thing: Any) -> bool:
        """Whether it is one of the things."""
        return id(thing) in self._things

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
    things: Sequence[Any], watched: Iterable[Any], known: Container[int]
) -> tuple[list[_Link], list[bool]]:
    """The links through which code can find some things.

    Args:
        things: tensors and other objects.
        watched: objects that are watched.
        known: their identities, and those of others that are.

    Returns:
        the links, and for each thing whether these are all that lead to it, and one of them does
        from where code can begin.
    """
    found = _Search(known, things)
    found.go_up(things)
    found.look_at_gradients(watched)
    leads = list(map(found.leads_to, things))
    if any(leads):
        unseen = _held_unseen(things)
        leads = [there and id(t) not in unseen for t, there in zip(things, leads, strict=True)]
    return found.links(), leads


def thaw() -> None:
    """Before a search: let the collector see what a program has frozen (`gc.freeze`)."""
    gc.unfreeze()


class _Search:
    """Goes from things to what holds them, until nothing new is found."""

    def __init__(self, known: Container[int], things: Sequence[Any]) -> None:
        self._known = known
        self._skipped = {id(things)}
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
        found = [node for node in self._nodes.values() if issubclass(type(node), threading.local)]
        for key, node in list(self._nodes.items()):
            if type(node) is dict and key not in self._begins:
                self._of_threads(node, found if key in self._links else gc.get_objects())

    def look_at_gradients(self, watched: Iterable[Any]) -> None:
        """Note what is the gradient of a watched tensor, which the collector does not show."""
        for each in watched:
            if not isinstance(each, torch.Tensor) or without_memory(each) is not None:
                continue
            if each.is_leaf and each.grad is not None and id(each.grad) in self._nodes:
                self._begin(_Link(each, each.grad, _Kind.GRADIENT))

    def links(self) -> list[_Link]:
        """The links on all ways from where code can begin."""
        good = self._reachable()
        return [link for links in self._links.values() for link in links if id(link.holder) in good]

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
                if plain or type(reference) is weakref.KeyedRef:
                    self._add(_Link(reference, each, _Kind.FIXED), following)
        for start in range(0, len(level), _TOGETHER):
            part = level[start : start + _TOGETHER]
            self._skipped.add(id(part))
            holders = gc.get_referrers(*part)
            if not all(map(gc.is_tracked, part)):
                holders += _untracked_holders(part)
            self._skipped.add(id(holders))
            for holder in holders:
                if not self._passes(holder):
                    self._link(holder, {id(e): e for e in part}, following)
            del holders
        return following

    def _passes(self, holder: Any) -> bool:
        """Whether an object is none that code could find something in."""
        if id(holder) in self._known:
            return False
        cls = type(holder)  # Not isinstance(), which may ask the object for its class.
        if (
            id(holder) in self._skipped
            or cls in _PASSING
            or str(cls.__module__).partition(".")[0] == _OWN
        ):
            return True
        if cls is contextvars.Context or cls.__name__.startswith("hamt"):
            return True  # Its variables are asked for by name.
        if cls is types.FunctionType:
            return _is_own(holder.__globals__)
        return cls is dict and _is_own(holder)

    def _link(self, holder: Any, wanted: Mapping[int, Any], following: list[Any]) -> None:
        held = {id(each): each for each in gc.get_referents(holder) if id(each) in wanted}
        found: list[_Link] = []
        if issubclass(type(holder), dict):
            for key, value in list(dict.items(holder)):
                if id(value) in held:
                    found.append(_Link(holder, value, _Kind.ITEM, key))
                if id(key) in held:
                    found.append(_Link(holder, key, _Kind.KEY))
        elif issubclass(type(holder), list | deque):
            for index in range(_length(holder)):
                if id(value := _item(holder, index)) in held:
                    found.append(_Link(holder, value, _Kind.INDEX, index))
        for link in found:
            held.pop(id(link.child), None)
        # What a container holds in an attribute is none of its items.
        for link in (*found, *(_link_of_object(holder, child) for child in held.values())):
            self._add(link, following)

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

    def _of_threads(self, attributes: dict[Any, Any], objects: Sequence[Any]) -> None:
        """Note the `threading.local` among objects whose attributes these are on this thread."""
        for each in objects:
            if issubclass(type(each), threading.local) and each.__dict__ is attributes:
                # Instead of what it holds for all threads.
                self._links[id(attributes)] = []
                self._begin(_Link(each, attributes, _Kind.THREAD))
                return

    def _begin(self, link: _Link) -> None:
        self._links.setdefault(id(link.child), []).append(link)
        self._nodes[id(link.holder)] = link.holder
        self._begins.add(id(link.holder))


def _held_unseen(things: Sequence[Any]) -> set[int]:
    """The identities of tensors that more refer to than the collector and running code show."""
    wanted = {id(thing) for thing in things if isinstance(thing, torch.Tensor)}
    shown = dict.fromkeys(wanted, 0)
    for holder in gc.get_referrers(*things):
        for each in gc.get_referents(holder):
            if id(each) in wanted:
                shown[id(each)] += 1
    for frame in sys._current_frames().values():
        _count_variables(frame, shown)
    unseen = set()
    for index in range(len(things)):
        count = sys.getrefcount(things[index]) - _ALONE
        if isinstance(things[index], torch.Tensor):
            by_cpp = _CPP_HOLDS and getattr(things[index], "_use_count", lambda: 2)() > 1
            if count - by_cpp > shown[id(things[index])]:
                unseen.add(id(things[index]))
    return unseen


def _count_variables(frame: types.FrameType | None, shown: dict[int, int]) -> None:
    """Count the variables of a function that runs, and of its callers, that hold something."""
    while frame is not None:
        code = frame.f_code
        if code.co_flags & inspect.CO_OPTIMIZED:
            variables = frame.f_locals
            for name in code.co_varnames:
                if name not in code.co_cellvars and id(variables.get(name)) in shown:
                    shown[id(variables[name])] += 1
            if sys.version_info < (3, 13) and not (sys.gettrace() or sys.getprofile()):
                variables.clear()  # A copy, which lives as long as the frame. Debuggers use it.
        frame = frame.f_back


def _references_of_cpp() -> int:
    """How many references of Python's it takes that C++ refers to a tensor, too."""
    tensor = torch.empty(1)
    before = sys.getrefcount(tensor)
    view = tensor.view(1)
    return sys.getrefcount(tensor) - before if view is not tensor else 0


# References that asking for their number adds, and that C++ adds.
_ALONE = sys.getrefcount([object()][0])
_CPP_HOLDS = _references_of_cpp()


def everything() -> Iterator[Any]:
    """All that the collector sees objects refer to, and what is in dictionaries that it leaves out.

    It leaves out those that hold nothing which could be part of a cycle.
    """
    for holder in gc.get_objects():
        for each in gc.get_referents(holder):
            yield each
            if type(each) is dict and not gc.is_tracked(each):
                yield from list(each.values())


def _untracked_holders(things: Sequence[Any]) -> list[Any]:
    wanted = set(map(id, things))
    found = {
        id(each): each
        for each in everything()
        if type(each) is dict and not gc.is_tracked(each)
        if any(id(value) in wanted for value in list(each.values()))
    }
    return list(found.values())


def _is_beginning(holder: Any) -> bool:
    """Whether code can begin there: in a namespace or a class."""
    if issubclass(type(holder), type | types.ModuleType):
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
    if type(holder) in _FIXED:
        return _Link(holder, child, _Kind.FIXED)
    if type(holder) is types.CellType:
        return _Link(holder, child, _Kind.CELL)
    for key, value in list((_attributes(holder) or {}).items()):
        if value is child:
            return _Link(holder, child, _Kind.ATTRIBUTE, key)
    # The order changes with each use of a cache of functools, and as a set grows.
    if hasattr(type(holder), "cache_info") or issubclass(type(holder), set):
        return _Link(holder, child, _Kind.MEMBER)
    return _Link(holder, child, _Kind.INSIDE, _places(holder, child))


def _length(holder: Any) -> int:
    """The length of a list or deque, whatever its own class makes of that."""
    return (list if issubclass(type(holder), list) else deque).__len__(holder)


def _item(holder: Any, index: int) -> Any:
    return (list if issubclass(type(holder), list) else deque).__getitem__(holder, index)


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
    _Kind.INDEX: lambda holder, child, key: _item(holder, key) is child,
    _Kind.ATTRIBUTE: _has_attribute,
    _Kind.CELL: lambda holder, child, key: holder.cell_contents is child,
    _Kind.CONTEXT: lambda holder, child, key: holder.get(_MISSING) is child,
    _Kind.GRADIENT: lambda holder, child, key: holder.grad is child,
    _Kind.THREAD: lambda holder, child, key: holder.__dict__ is child,
    _Kind.MEMBER: _is_in,
    _Kind.INSIDE: lambda holder, child, key: _places(holder, child) == key,
}
