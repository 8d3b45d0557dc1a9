"""Objects in calls: taken apart into tensors, plain values and structure, and built again.

PyTorch's trees stop at objects of classes that nobody has registered. `apart` puts a registered
node in the place of each such object, with the object's attributes as children. `build` makes a
tree with real objects of it again, without calling `__init__`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import SignatureError
from .attributes import own_slots
from .code import is_library

# Leaves that need no look: everything else may be an object.
PLAIN_TYPES = frozenset(
    (
        torch.Tensor, nn.Parameter, bool, int, float, complex, str, bytes, type(None),
        torch.dtype, torch.device,
    )
)  # fmt: skip
# Values of a set that its spec can hold.
_SET_VALUES = (bool, int, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
# Objects of a call, beyond which it is refused: it may reach all of a program.
_MOST = 10_000
# Objects inside of one another, likewise.
_DEEPEST = 100
# Values in a key of a call with objects: a cache of many layers is told by its first ones.
_LONGEST_KEY = 10
# Never taken apart: they are more than their attributes.
_WHOLE = (torch.Tensor, nn.Module, type, torch.SymInt, torch.SymFloat, torch.SymBool)
# Ways in which a set is made again, until it iterates in the wanted order: orders of its values,
# and sizes of its table, which values that are taken away again bring about.
_TURNS = 16
_TABLES = (8, 16, 32, 64, 128, 256, 512)
_OTHERS = [object() for _ in range(256)]
# Packages whose objects are the machinery of tracers and compilers.
_MACHINERY = ("torch._", "torch.fx", "torch.jit")


# What the attributes of a class's objects are.


@dataclass(frozen=True)
class _Layout:
    """Where objects of a class keep their attributes, and what container they are too."""

    slots: tuple[tuple[str, Any], ...]
    has_dict: bool
    base: Any

    def attributes(self, of: Any) -> dict[str, Any]:
        """The attributes of an object by name, those of its slots first."""
        found: dict[str, Any] = {}
        for name, slot in self.slots:
            with contextlib.suppress(AttributeError):  # It has not been set.
                found.setdefault(name, slot.__get__(of))
        if self.has_dict:
            found |= object.__getattribute__(of, "__dict__")
        return found

    def content(self, of: Any) -> Any:
        """What an object holds that is also a dictionary or list, in a plain one."""
        if not self.holds:
            return []
        return dict(of) if self.base is dict else list(of)

    @property
    def holds(self) -> bool:
        """Whether objects are also dictionaries or lists."""
        return self.base in (dict, list)

    def set(self, of: Any, name: str, value: Any) -> None:
        """Set an attribute, whatever the class makes of assignments."""
        for slot_name, slot in self.slots:
            if slot_name == name:
                slot.__set__(of, value)
                return
        object.__getattribute__(of, "__dict__")[name] = value

    def remove(self, of: Any, name: str) -> None:
        """Remove an attribute."""
        for slot_name, slot in self.slots:
            if slot_name == name:
                slot.__delete__(of)
                return
        del object.__getattribute__(of, "__dict__")[name]


_LAYOUTS: weakref.WeakKeyDictionary[type, _Layout | None] = weakref.WeakKeyDictionary()


def layout_of(cls: type) -> _Layout | None:
    """How objects of a class can be taken apart; None where they cannot."""
    try:
        return _LAYOUTS[cls]
    except KeyError:
        found = _LAYOUTS[cls] = _examine(cls)
        return found


def _examine(cls: type) -> _Layout | None:
    if issubclass(cls, _WHOLE) or hasattr(cls, "__del__") or cls is object:
        return None
    if cls.__module__.startswith(_MACHINERY):
        return None
    bases: tuple[Any, ...] = (dict, list, types.SimpleNamespace)
    base = next((each for each in bases if issubclass(cls, each)), object)
    try:
        # As CPython does, it refuses where objects of the class are more than Python's own.
        base.__new__(cls)
    except TypeError:
        return None
    slots = [(each, name) for each in cls.__mro__ for name in own_slots(each)]
    if any(name not in vars(each) for each, name in slots):
        return None  # Something has replaced it.
    has_dict = any("__dict__" in vars(each) for each in cls.__mro__ if each is not type)
    members = tuple((name, vars(each)[name]) for each, name in slots)
    return _Layout(members, has_dict, base)


# Nodes that stand for objects in a tree.


@dataclass(frozen=True)
class Kind:
    """What an object is, its attributes' values aside: the context of its node.

    Attributes:
        cls: its class.
        names: of its attributes.
        holds: whether it is also a dictionary or list, whose content is the last child.
    """

    cls: type
    names: tuple[str, ...]
    holds: bool


@dataclass(frozen=True)
class SetKind:
    """What a set of plain values is, and in which order it iterates: the context of its node.

    Attributes:
        cls: set or frozenset.
        values: with their types, in order.
        like: the frozenset itself, or a copy of the set; None for what was read from a file.
    """

    cls: type
    values: tuple[tuple[type, Any], ...]
    like: Any = field(compare=False, repr=False, default=None)

    @classmethod
    def of(cls, value: set[Any] | frozenset[Any]) -> SetKind:
        """Describe a set.

        Raises:
            SignatureError: no set can be made that iterates in the same order.
        """
        made = cls(type(value), tuple([(type(each), each) for each in value]), value.copy())
        if made._in_order() is None:
            raise SignatureError(
                f"A {type(value).__name__} of {len(value)} values iterates in an order that no "
                "copy of it can be given.",
                remedy="Pass a list, a dictionary or a frozenset.",
            )
        return made

    def build(self) -> Any:
        """A set of these values that iterates in their order, wherever one can be made.

        That of text depends on the process: a set from a file may iterate in another order.
        """
        found = self._in_order()
        return self.cls(value for _, value in self.values) if found is None else found

    def _in_order(self) -> Any:
        if self.cls is frozenset and self.like is not None:
            return self.like
        values = [value for _, value in self.values]
        if self.like is not None and [*(made := self.like.copy())] == values:
            return made
        way = _way_to_make(self.cls, self.values)
        return None if way is None else next(islice(_made_in_all_ways(self.cls, values), way, None))


@functools.lru_cache(256)
def _way_to_make(cls: type, typed: tuple[tuple[type, Any], ...]) -> int | None:
    """By which of many ways to make a set it iterates in the order of these values, if by any."""
    values = [value for _, value in typed]
    ways = _made_in_all_ways(cls, values)
    return next((way for way, made in enumerate(ways) if [*made] == values), None)


def _made_in_all_ways(cls: type, values: list[Any]) -> Iterator[Any]:
    """The same set, made in one way after another.

    CPython keeps the values in a table. Its size depends on what a set has held before, and in
    which order the values are found depends on the size, and on which came first to their places.
    """
    for start in range(min(len(values), _TURNS) or 1):
        turned = [*values[start:], *values[:start]]
        for given in (turned, turned[::-1]):
            yield cls(given)
            yield cls(set(given))
            for table in _TABLES:
                others = _OTHERS[: max(0, table // 2 - 1 - len(values))]
                made = set(given)
                made.update(set(others))
                deque(map(made.discard, others), maxlen=0)
                yield made if cls is set else cls(made)


class _Node:
    """A node of a tree; flattened it is its children, and its context."""

    def __init__(self, children: list[Any], context: Any) -> None:
        self.children = children
        self.context = context

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        """What the node stands for."""
        raise NotImplementedError

    def keys(self) -> list[Any]:
        """What its children are called."""
        return [_NoKey()] * len(self.children)


class _NoKey:
    """The key of a child that has the name of its parent."""

    def __str__(self) -> str:
        return ""


class ObjectNode(_Node):
    """An object: its children are the values of its attributes, its context is a `Kind`."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        layout = layout_of(context.cls)
        assert layout is not None
        values = list(children)
        made = layout.base.__new__(context.cls)
        if context.holds:
            content = values.pop()
            dict.update(made, content) if layout.base is dict else list.extend(made, content)
        for name, value in zip(context.names, values, strict=True):
            layout.set(made, name, value)
        return made

    def keys(self) -> list[Any]:
        names = [pytree.GetAttrKey(name) for name in self.context.names]
        return [*names, *[_NoKey()] * (len(self.children) - len(names))]


class Shared(_Node):
    """An object or container that has several places; its context is a number and their count."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        number, places = context
        (made,) = children
        _BUILDING.shared[number] = [made, places - 1]
        return made


class Again(_Node):
    """Another place of what is shared; its context is the number."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        waiting = _BUILDING.shared[context]
        waiting[1] -= 1
        if not waiting[1]:
            del _BUILDING.shared[context]
        return waiting[0]


class GivenNode(_Node):
    """An object that the caller has; its context is the position among those of the call."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        return _BUILDING.given[context]


class Constant(_Node):
    """A value that is always the same; its context is its type and the value."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        return context[1]


class SetNode(_Node):
    """A set of plain values; its context is a `SetKind`."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        return context.build()


class _Kept(_Node):
    """An object that something outside of the call holds; its context is that object."""

    @classmethod
    def build(cls, children: list[Any], context: Any) -> Any:
        return context.value


class _Same:
    """A context that is equal only for the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


NODES: tuple[type[_Node], ...] = (
    ObjectNode, Shared, Again, GivenNode, Constant, SetNode, _Kept,
)  # fmt: skip


class _Building(threading.local):
    """How this thread builds trees.

    Attributes:
        is_on: whether nodes become what they stand for; else trees keep the nodes.
        given: the caller's objects.
        shared: what further places wait for, by number, with how many.
    """

    is_on = False
    given: Sequence[Any] = ()

    def __init__(self) -> None:
        self.shared: dict[int, list[Any]] = {}


_BUILDING = _Building()


@contextlib.contextmanager
def giving(objects: Sequence[Any]) -> Iterator[None]:
    """Inside the block, trees are built with these objects in the places of the caller's."""
    before, _BUILDING.given = _BUILDING.given, objects
    try:
        yield
    finally:
        _BUILDING.given = before


def given_now() -> Sequence[Any]:
    """The objects of the innermost block of `giving`."""
    return _BUILDING.given


def build(leaves: Iterable[Any], spec: pytree.TreeSpec) -> Any:
    """A tree with real objects, of its leaves and the spec of a tree that was taken apart."""
    before, _BUILDING.is_on = _BUILDING.is_on, True
    try:
        return pytree.tree_unflatten(leaves, spec)
    finally:
        _BUILDING.is_on = before


def has_nodes(spec: pytree.TreeSpec) -> bool:
    """Whether a tree has nodes in the place of objects."""
    return spec.type in NODES or any(map(has_nodes, spec.children()))


def classes_in(spec: pytree.TreeSpec) -> list[type]:
    """The classes of users' objects in a tree that was taken apart: a call runs their methods."""
    return [cls for cls in every_class_in(spec) if not is_library(cls)]


def every_class_in(spec: pytree.TreeSpec) -> list[type]:
    """The classes of objects in a tree that was taken apart, those of libraries too."""
    found: dict[type, None] = {}
    waiting = [spec]
    while waiting:
        each = waiting.pop()
        context = each.context
        if each.type is ObjectNode:
            found[context.cls] = None
        elif each.type is Constant:
            found[context[0]] = None
        elif isinstance(context, type):  # A named tuple's.
            found[context] = None
        waiting += each.children()
    return [*found]


def _register(cls: type[_Node]) -> None:
    def made(children: Iterable[Any], context: Any) -> Any:
        return (cls.build if _BUILDING.is_on else cls)(list(children), context)

    pytree.register_pytree_node(
        cls,
        lambda node: (node.children, node.context),
        made,
        flatten_with_keys_fn=lambda node: (
            list(zip(node.keys(), node.children, strict=True)),
            node.context,
        ),
    )


for _each in NODES:
    _register(_each)


# Taking apart.


def has_objects(leaves: Sequence[Any]) -> bool:
    """Whether any leaf is neither a plain tensor nor a plain value."""
    return any(type(leaf) not in PLAIN_TYPES for leaf in leaves)


def apart(tree: Any, given: Sequence[Any] = (), kept: Sequence[Any] = ()) -> Any:
    """A tree with nodes in the place of objects; what cannot be seen into stays as it is.

    Args:
        tree: containers, objects, tensors and plain values.
        given: objects of the caller: each becomes a node that `building_with` gives a value.
        kept: objects that stay the same: each becomes a node that holds it.

    Raises:
        SignatureError: an object holds itself, or there are too many.
    """
    walk = _Walk(given, kept)
    walk.count(tree, (), {})
    if not (given or walk.shares() or has_objects(pytree.tree_leaves(tree))):
        return tree
    return walk.convert(tree)


def flatten_result(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of what a call returned, objects taken apart; the inverse is `build`.

    Raises:
        SignatureError: an object holds itself.
    """
    leaves, spec = pytree.tree_flatten(result)
    return pytree.tree_flatten(apart(result)) if has_objects(leaves) else (leaves, spec)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """What a call returned with other tensors in the places of its own, in objects too."""
    leaves, spec = flatten_result(result)
    return build([change(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def objects_key(values: Iterable[Any]) -> Any:
    """A key of a call's types, shapes and plain values, made quickly; None if it has no objects.

    Calls with other signatures may have the same key: only the first values are in it.
    """
    found: list[type] = []
    key: list[Any] = []
    try:
        for value in values:
            _note_key(value, key, found, 0)
        made = tuple(key)
        hash(made)
    except (TypeError, RuntimeError):  # A nested tensor has no shape; or it is too deep.
        return None
    return made if found else None


def _note_key(value: Any, key: list[Any], found: list[type], depth: int) -> None:
    """Add to a key what tells a value, and the classes of objects to `found`."""
    cls = type(value)
    if cls is torch.Tensor or cls is nn.Parameter:
        key.append(value.shape)
        return
    if cls in PLAIN_TYPES:
        key.append(value)
        return
    if depth > _DEEPEST:
        raise RecursionError
    key.append(cls)
    inside: Iterable[Any] = ()
    if cls is list or cls is tuple:
        inside = value
    elif cls is dict:
        key.extend(value)
        inside = value.values()
    elif cls not in pytree.SUPPORTED_NODES and (layout := layout_of(cls)) is not None:
        found.append(cls)
        inside = layout.attributes(value).values()
        if layout.holds:
            inside = (*inside, *layout.content(value))
    for each in inside:
        if len(key) >= _LONGEST_KEY:
            return
        _note_key(each, key, found, depth + 1)


class _Walk:
    """One walk through a tree: first to count the places of each object, then to convert it."""

    def __init__(self, given: Sequence[Any] = (), kept: Sequence[Any] = ()) -> None:
        self._known: dict[int, _Node] = {id(each): _Kept([], _Same(each)) for each in kept}
        self._known |= {id(each): GivenNode([], place) for place, each in enumerate(given)}
        self._places: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        # Alive until the end, so that no identity is used twice.
        self._alive: list[Any] = []
        self.changeable: list[Any] = []

    def count(self, value: Any, path: tuple[str, ...], above: dict[int, str]) -> None:
        """Count the places of all objects and containers in a tree.

        Args:
            value: the tree.
            path: the names that led to it.
            above: objects that hold it, with their names.
        """
        if type(value) in PLAIN_TYPES or id(value) in self._known:
            return
        parts = _parts_of(value)
        if parts is None:
            return
        identity = id(value)
        if identity in above:
            raise SignatureError(
                f"{''.join(path) or 'An object'} refers back to {above[identity] or 'itself'}; "
                "objects that hold themselves cannot be taken apart.",
                remedy="Leave the reference out of what is passed and returned.",
            )
        self._places[identity] = self._places.get(identity, 0) + 1
        if self._places[identity] > 1 and matters(value):
            return
        self._alive.append(value)
        if len(self._alive) > _MOST or len(path) > _DEEPEST:
            raise SignatureError(
                f"The call reaches more than {_MOST:,} objects through its arguments or results, "
                f"or more than {_DEEPEST} inside of one another.",
                remedy="Pass and return what is needed, not what holds it.",
            )
        if _is_changeable(value):
            self.changeable.append(value)
        inside = {**above, identity: "".join(path)}
        for name, child in parts:
            self.count(child, (*path, name), inside)

    def shares(self) -> bool:
        """Whether anything that a call may change has several places."""
        return any(self._places[id(each)] > 1 for each in self._alive if matters(each))

    def convert(self, value: Any) -> Any:
        """A tree that was counted, with nodes in the place of objects."""
        if type(value) in PLAIN_TYPES:
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known
        constant = _constant_of(value)
        if constant is not None and type(value) is not set:
            return constant
        if id(value) in self._numbers:
            return Again([], self._numbers[id(value)])
        made = self._convert_inside(value) if constant is None else constant
        places = self._places.get(id(value), 1)
        if places == 1 or not matters(value):
            return made
        number = self._numbers[id(value)] = len(self._numbers)
        return Shared([made], (number, places))

    def _convert_inside(self, value: Any) -> Any:
        """A container with what it holds converted, or an object's node."""
        if is_container(value):
            children, spec = one_level(value)
            return spec.unflatten([self.convert(child) for child in children])
        layout = layout_of(type(value))
        if layout is None:
            return value
        attributes = layout.attributes(value)
        children = [self.convert(child) for child in attributes.values()]
        if layout.holds:
            children.append(self._convert_inside(layout.content(value)))
        return ObjectNode(children, Kind(type(value), tuple(attributes), layout.holds))


def changeable(tree: Any) -> list[Any]:
    """The objects and containers of a tree that a call may change, in the order of the tree."""
    walk = _Walk()
    walk.count(tree, (), {})
    return walk.changeable


def reached(tree: Any) -> list[Any]:
    """What containers and objects hold that is neither, also where one of them holds itself."""
    found, waiting, seen = [], [tree], set()
    while waiting:
        each = waiting.pop()
        parts = None if type(each) in PLAIN_TYPES else _parts_of(each)
        if parts is None:
            found.append(each)
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += [part for _, part in parts]
    return found


def is_container(value: Any) -> bool:
    """Whether PyTorch's trees look into a value."""
    children, _ = one_level(value)
    return len(children) != 1 or children[0] is not value


def one_level(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """What a container holds, and how it is built again."""
    # Only what is asked first is no leaf, since a list may hold itself. PyTorch keeps what this
    # refers to in a cycle, until garbage is collected: not the value.
    asked = iter((False,))
    return pytree.tree_flatten(value, is_leaf=lambda each: next(asked, True))


def _parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """What a container or object holds, with names; None for anything else."""
    if type(value) is set and _is_plain_set(value):
        return []
    if _is_constant(value):
        return None
    if is_container(value):
        children, _ = one_level(value)
        return [(f"[{place}]", child) for place, child in enumerate(children)]
    layout = layout_of(type(value))
    if layout is None:
        return None
    found = [(f".{name}", child) for name, child in layout.attributes(value).items()]
    content = layout.content(value)
    values = content.values() if isinstance(content, dict) else content
    return found + [(f"[{place}]", child) for place, child in enumerate(values)]


def _is_plain_set(value: Any) -> bool:
    """Whether a value is a set whose values its spec can hold."""
    return type(value) in (set, frozenset) and all(isinstance(v, _SET_VALUES) for v in value)


def _is_constant(value: Any) -> bool:
    """Whether `_constant_of` gives a node for a value."""
    constants = enum.Enum | type | torch.layout | torch.memory_format
    return isinstance(value, constants) or type(value) is torch.Size or _is_plain_set(value)


def _constant_of(value: Any) -> _Node | None:
    """A node for a value without tensors that its spec can hold; None for others."""
    if isinstance(value, enum.Enum | type | torch.layout | torch.memory_format):
        return Constant([], (type(value), value))
    if type(value) is torch.Size:
        return Constant([], (torch.Size, value))
    if _is_plain_set(value):
        return SetNode([], SetKind.of(value))
    return None


def _is_changeable(value: Any) -> bool:
    """Whether a call may change it in place, and not only what it holds."""
    if isinstance(value, tuple) or type(value) is frozenset:
        return False
    return type(value) is set or is_container(value) or layout_of(type(value)) is not None


def matters(value: Any) -> bool:
    """Whether it matters that two places hold the same object: not for a tuple of plain values."""
    if isinstance(value, tuple):
        return any(type(each) not in PLAIN_TYPES for each in value)
    return _is_changeable(value)


def detached(tree: Any) -> Any:
    """A tree whose tensors are detached; objects in it stay the same, and hold detached tensors."""
    for each in changeable(tree) if has_objects(pytree.tree_leaves(tree)) else []:
        layout = None if is_container(each) else layout_of(type(each))
        if layout is not None:
            for name, value in layout.attributes(each).items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    layout.set(each, name, value.detach())
        elif type(each) is list:
            each[:] = [v.detach() if isinstance(v, torch.Tensor) else v for v in each]
        elif type(each) is dict:
            each |= {k: v.detach() for k, v in each.items() if isinstance(v, torch.Tensor)}
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


@dataclass(frozen=True)
class Equal:
    """Is the same as what is equal to it."""

    value: Any


def same(before: Any, after: Any) -> bool:
    """Whether a value is what it was: the same object, or plain values in containers alike."""
    if before is after:
        return True
    if type(before) is not type(after) or isinstance(before, torch.Tensor):
        return False
    if type(before) in PLAIN_TYPES:
        return repr(before) == repr(after)  # Which tells -0.0 from 0.0, and NaN is NaN.
    if type(before) in (list, tuple):
        return len(before) == len(after) and all(map(same, before, after))
    if type(before) is dict:
        return [*before] == [*after] and all(map(same, before.values(), after.values()))
    return isinstance(before, Equal | torch.Size) and bool(before == after)
