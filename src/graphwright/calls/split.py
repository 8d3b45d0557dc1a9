"""Calls taken apart: their leaves, and the shape that puts these together again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import SignatureError
from .leaves import SCALARS, guard_of
from .objects import apart, build, has_objects

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
        SignatureError: an object holds itself.
    """
    tree = (tuple(args), dict(kwargs))
    # Without objects and containers, there is nothing to take apart.
    if objects and has_objects((*args, *kwargs.values())):
        tree = apart(tree)
    return pytree.tree_flatten(tree)


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
    leaves = pytree.tree_leaves(tree)
    if has_objects(leaves):
        with contextlib.suppress(SignatureError):  # One holds itself.
            leaves = pytree.tree_leaves(apart(tree))
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

    def tensors(self, values: Args) -> Args:
        """The tensors among them."""
        return tuple([values[index] for index in self.places])
