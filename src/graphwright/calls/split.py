"""Calls taken apart: their leaves, and the shape that puts these together again."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..errors import SignatureError
from .leaves import SCALARS, describe, guard_of
from .objects import (
    Again,
    Constant,
    ObjectNode,
    Shared,
    apart,
    build,
    changeable,
    has_objects,
    layout_of,
    matters,
    reached,
)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
_QUICK_VALUES = frozenset((bool, int, float, str, type(None)))


def flatten(
    args: Args, kwargs: Kwargs, *, objects: bool = False
) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a call into its leaves and the tree that puts them back together.

    Keyword arguments keep the caller's order, which a callable that takes any of them sees. For one
    that cannot see it, `binding.in_one_order` makes f(a=1, b=2) and f(b=2, a=1) the same call.

    Args:
        args: of the call.
        kwargs: likewise.
        objects: whether objects are taken apart; else they are leaves.

    Raises:
        SignatureError: an object or container holds itself.
    """
    tree = (tuple(args), dict(kwargs))
    # Without objects and containers, there is nothing to take apart.
    if objects and has_objects((*args, *kwargs.values())):
        tree = apart(tree)
    try:
        return pytree.tree_flatten(tree)
    except RecursionError as error:
        raise SignatureError(
            "A container among the arguments holds itself.",
            remedy="Leave the reference out of what is passed.",
        ) from error


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[Args, dict[str, Any]]:
    """Inverse of `flatten`."""
    args, kwargs = build(leaves, spec)
    return args, kwargs


def leaf_names(tree: Any, root: str) -> list[str]:
    """A readable name for each leaf of a tree, for example `output['logits'][0]`."""
    try:
        paths, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:  # A node type was registered without names for its children.
        return [f"{root}.{index}" for index in range(len(pytree.tree_leaves(tree)))]
    return [root + pytree.keystr(path) for path, _ in paths]


def argument_names(args: Args, kwargs: Kwargs, *, objects: bool = False) -> list[str]:
    """Names of a call's leaves, as `flatten` gives them: positional by index, keywords by name."""
    taken = apart if objects else _as_it_is
    names = leaf_names(taken(tuple(args)), "args")
    for key, value in kwargs.items():
        names += leaf_names(taken(value), key)
    return names


def _as_it_is(tree: Any) -> Any:
    return tree


def container_changes(before: Sequence[str], after: Sequence[str]) -> str:
    """What a call did to the containers among its arguments; empty if the names are the same.

    Args:
        before: names of the arguments' leaves.
        after: the same after the call.
    """
    added = [name for name in after if name not in before]
    removed = [name for name in before if name not in after]
    changes = [("adds", added), ("removes", removed)]
    return " and ".join(f"{verb} {', '.join(names)}" for verb, names in changes if names)


def require_grad(args: Args, kwargs: Kwargs) -> bool:
    """Whether any tensor among the arguments requires grad."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif type(value) not in _QUICK_VALUES and any(t.requires_grad for t in tensors_of(value)):
            return True
    return False


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in a tree, also inside of objects."""
    try:
        leaves = pytree.tree_leaves(tree)
        if has_objects(leaves):
            leaves = pytree.tree_leaves(apart(tree))
    except (SignatureError, RecursionError):  # Something holds itself, or there is too much.
        leaves = reached(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def in_order_of(names: tuple[str, ...], kwargs: Kwargs, any_order: bool) -> Args | None:
    """The values of keyword arguments of these names, in this order; None if they are others.

    Args:
        names: of the arguments.
        kwargs: of a call.
        any_order: whether these may come in another order.
    """
    if (*kwargs,) == names:
        return (*kwargs.values(),)
    if not any_order or len(kwargs) != len(names):
        return None
    try:
        return tuple([kwargs[name] for name in names])
    except KeyError:
        return None


@dataclass(frozen=True)
class MixedArguments:
    """Arguments that are tensors and plain values, without containers.

    Attributes:
        count: how many are positional.
        names: of the keyword arguments, in order.
        plain: the plain values, with their positions.
        places: positions of the tensors.
        guard: PyTorch's own check of the tensors.
        any_order: whether the keyword arguments may come in another order.
    """

    count: int
    names: tuple[str, ...]
    plain: tuple[tuple[int, Any], ...]
    places: tuple[int, ...]
    guard: Callable[..., bool]
    any_order: bool

    @classmethod
    def of(cls, args: Args, kwargs: Kwargs, *, any_order: bool) -> MixedArguments | None:
        """Describe a call; None if it has other arguments, or no tensors."""
        values = (*args, *kwargs.values())
        places = tuple(i for i, v in enumerate(values) if isinstance(v, torch.Tensor))
        plain = tuple((i, v) for i, v in enumerate(values) if isinstance(v, SCALARS))
        if not places or len(places) + len(plain) < len(values):
            return None
        guard = guard_of(tuple(values[i] for i in places))
        if guard is None:
            return None
        return cls(len(args), tuple(kwargs), plain, places, guard, any_order)

    @property
    def template(self) -> Args:
        """The leaves, None for tensors."""
        values = dict(self.plain)
        return tuple(values.get(index) for index in range(len(values) + len(self.places)))

    def values(self, args: Args, kwargs: Kwargs) -> Args | None:
        """A call's arguments as one tuple, if the plain ones are the same objects; else None."""
        if len(args) != self.count or len(kwargs) != len(self.names):
            return None
        if kwargs:
            if (*kwargs,) == self.names:  # Written out, since it is done at each call.
                args = (*args, *kwargs.values())
            elif (named := in_order_of(self.names, kwargs, self.any_order)) is not None:
                args = (*args, *named)
            else:
                return None
        for index, value in self.plain:
            if args[index] is not value:
                return None
        return args

    def tensors(self, values: Sequence[Any]) -> Args:
        """The tensors among them."""
        return tuple([values[index] for index in self.places])


def objects_tree(args: Args, kwargs: Kwargs) -> Any:
    """A call's arguments without the containers that a call makes of them for itself."""
    return tuple(args), tuple(value for _, value in sorted(kwargs.items()))


def objects_of(args: Args, kwargs: Kwargs) -> list[Any]:
    """What a call may change in place of its arguments."""
    return changeable(objects_tree(args, kwargs))


class Split(NamedTuple):
    """A call taken apart.

    Attributes:
        leaves: its tensors and plain values.
        objects: what it may change in place, in the order of `changeable`.
    """

    leaves: Sequence[Any]
    objects: Sequence[Any]


class _Part(NamedTuple):
    """A container or object of a call, and what it holds.

    Attributes:
        slot: where it is among the leaves and parts of the call.
        cls: its class.
        is_object: whether it holds attributes.
        names: of what it holds, in order; None if that stands in a row.
        size: how much it holds.
        plain: where plain values are in it, what they are, and how they are described; None for
            what has to be the same object.
        further: where tensors and parts are in it, and their slots.
    """

    slot: int
    cls: type
    is_object: bool
    names: tuple[Any, ...] | None
    size: int
    plain: tuple[tuple[int, Any, tuple[Any, ...] | None], ...]
    further: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Pattern:
    """A shape of calls, known in advance: others of it are taken apart in one short walk.

    It knows tuples, lists, dictionaries, and objects with a dictionary of attributes.

    Leaves and parts have slots in one row: the leaves first, then the parts, one for each place of
    a part that has several.

    Attributes:
        parts: containers and objects, before what they hold; the first is the pair of positional
            and keyword arguments.
        template: the leaves, None for tensors.
        empty: None for each slot of a part.
        places: slots of the tensors.
        distinct: slots of the parts that have to be different objects.
        again: further slots of parts, and the first slot of each of these.
        changeable: slots of the parts that a call may change in place, in order.
        guard: PyTorch's own check of the tensors.
        names: of the keyword arguments, in order.
        any_order: whether these may come in another order.
    """

    parts: tuple[_Part, ...]
    template: tuple[Any, ...]
    empty: tuple[None, ...]
    places: tuple[int, ...]
    distinct: tuple[int, ...]
    again: tuple[tuple[int, ...], tuple[int, ...]]
    changeable: tuple[int, ...]
    guard: Callable[..., bool]
    names: tuple[str, ...]
    any_order: bool

    @classmethod
    def of(
        cls,
        args: Args,
        kwargs: Kwargs,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        *,
        any_order: bool,
    ) -> Pattern | None:
        """The pattern of a call; None if it has no tensors, or parts of another kind.

        Args:
            args: of the call.
            kwargs: likewise.
            leaves: what `flatten` made of it; no two share memory.
            spec: likewise.
            any_order: as for `CallSignature.of`.
        """
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        guard = guard_of([leaves[place] for place in places])
        if guard is None:
            return None
        reader = _Reader(leaves)
        try:
            reader.look_into((tuple(args), dict(kwargs)), spec)
        except _OtherKind:
            return None
        slots = {id(value): part.slot for value, part in reader.read}
        return cls(
            tuple(part for _, part in reader.read),
            tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            (None,) * (reader.slots - len(leaves)),
            places,
            tuple(part.slot for value, part in reader.read if matters(value)),
            (tuple(reader.again), tuple(reader.again.values())),
            tuple(slots[id(each)] for each in objects_of(args, kwargs)),
            guard,
            tuple(kwargs),
            any_order,
        )

    def split(self, args: Args, kwargs: Kwargs) -> Split | None:
        """Take a call apart; None if it is of another shape, or has other plain values.

        Of the tensors nothing is looked at but where they are.
        """
        if (*kwargs,) != self.names:
            named = in_order_of(self.names, kwargs, self.any_order)
            if named is None:
                return None
            kwargs = dict(zip(self.names, named, strict=True))
        count = len(self.template)
        found = [*self.template, *self.empty]
        found[count] = args, kwargs
        for slot, cls, is_object, names, size, plain, further in self.parts:
            part = found[slot]
            if type(part) is not cls:
                return None
            values: Any = part
            if names is not None:
                held: Any = object.__getattribute__(part, "__dict__") if is_object else part
                if (*held,) != names:
                    return None
                values = (*held.values(),)
            elif len(values) != size:
                return None
            for at, value, described in plain:
                mine = values[at]
                if mine is not value and not _is_described(mine, described):
                    return None
            for at, to in further:
                found[to] = values[at]
        # In C, as it is done at each call.
        in_slot, (again, first) = found.__getitem__, self.again
        if not all(map(operator.is_, map(in_slot, again), map(in_slot, first))):
            return None
        if len({*map(id, map(in_slot, self.distinct))}) != len(self.distinct):
            return None
        return Split(found[:count], [*map(in_slot, self.changeable)])

    def values(self, args: Args, kwargs: Kwargs) -> Sequence[Any] | None:
        """The leaves of a call of this shape; None of another one."""
        found = self.split(args, kwargs)
        return None if found is None else found.leaves

    def tensors(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Those in the places of tensors."""
        return tuple([leaves[place] for place in self.places])


def _is_described(value: Any, described: tuple[Any, ...] | None) -> bool:
    if type(value) is torch.Size:
        return (torch.Size, value) == described
    return type(value) in SCALARS and describe(value) == described


class _OtherKind(Exception):
    """A part of a call is none that a `Pattern` knows."""


class _Reader:
    """Reads what the parts of a call are.

    Attributes:
        read: the parts themselves, and what they are.
        slots: how many there are, of leaves and parts.
        again: for each further slot of a part, its first one.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.read: list[tuple[Any, _Part]] = []
        self.slots = len(leaves)
        self.again: dict[int, int] = {}
        self._leaves = leaves
        self._next = 0
        self._shared: dict[int, int] = {}

    def look_into(self, value: Any, spec: pytree.TreeSpec) -> int:
        """Read a part, and those in it; returns its slot.

        Raises:
            _OtherKind: one is of another kind.
        """
        if spec.type is Again:
            slot = self._new_slot()
            self.again[slot] = self._shared[spec.context]
            return slot
        if spec.type is Shared:
            (inside,) = spec.children()
            self._shared[spec.context[0]] = self.slots
            return self.look_into(value, inside)
        is_object, names, values = _opened(value, spec)
        slot, before = self._new_slot(), len(self.read)
        plain: list[tuple[int, Any, tuple[Any, ...] | None]] = []
        further: list[tuple[int, int]] = []
        for at, (each, inner) in enumerate(zip(values, spec.children(), strict=True)):
            if inner.is_leaf():
                leaf = self._leaves[self._next]
                if isinstance(leaf, torch.Tensor):
                    further.append((at, self._next))
                else:
                    plain.append((at, leaf, describe(leaf)))
                self._next += 1
            elif inner.type is Constant:
                plain.append((at, each, inner.context if type(each) is torch.Size else None))
            else:
                further.append((at, self.look_into(each, inner)))
        found = tuple(plain), tuple(further)
        part = _Part(slot, type(value), is_object, names, len(values), *found)
        self.read.insert(before, (value, part))
        return slot

    def _new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1


def _opened(
    value: Any, spec: pytree.TreeSpec
) -> tuple[bool, tuple[Any, ...] | None, tuple[Any, ...]]:
    """Whether a part is an object, the names in it if it has any, and the values.

    Raises:
        _OtherKind: it is of another kind.
    """
    cls = type(value)
    layout = layout_of(cls) if spec.type is ObjectNode else None
    if layout is not None and not (layout.slots or layout.holds):
        return (True, *_named(object.__getattribute__(value, "__dict__")))
    if spec.type is cls and cls in (dict, OrderedDict):
        return (layout is not None, *_named(value))
    is_plain = spec.type is cls and cls in (tuple, list)
    if is_plain or (isinstance(value, tuple) and spec.context is cls):
        return layout is not None, None, tuple(value)
    raise _OtherKind


def _named(held: Mapping[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(held), tuple(held.values())
