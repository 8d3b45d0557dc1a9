"""Differences between what places hold and what they held.

A value that took the place of another one counts as the same if it is equal and nothing else can
be told apart: in type and bits, with its order, without what no walk can see.
"""

from __future__ import annotations

import enum
import functools
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .attributes import (
    BARE,
    BUFFERS,
    attributes_of,
    base_in_c,
    has_attributes,
    is_array,
    is_immutable,
    members_of,
    slots_of,
)
from .code import is_machinery
from .leaves import SCALARS, describe
from .places import HolderPlace, Name, StatePlace

# Types without state that a call could depend on, or whose state cannot be seen.
WITHOUT_STATE = (
    *SCALARS,
    type,
    types.ModuleType,
    types.CodeType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    weakref.ref,
    range,
    slice,
    re.Pattern,
    type(Ellipsis),
    type(NotImplemented),
)
# Bound methods of C objects are made anew each time that they are read.
_COMPARABLE = (
    range,
    re.Pattern,
    types.CodeType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
)
# Classes in C that hold nothing beside attributes, which are watched.
_WITHOUT_MEMBERS = (object, types.SimpleNamespace)


def same(new: Any, old: Any) -> bool | None:
    """Whether a value equals the one that it replaced; None if only another walk can tell."""
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    return next(tell(new, old) for kind, tell in _SAME.items() if isinstance(new, kind))


def _same_scalars(new: Any, old: Any) -> bool | None:
    alike = describe(new) == describe(old)
    if alike and type(new) not in BARE and has_attributes(new):
        return None if not isinstance(new, enum.Enum) else False
    return alike


def _same_items(new: Any, old: Any) -> bool | None:
    """Of a tuple or frozenset, of which code can see the order."""
    if len(new) != len(old):
        return False
    more = (None,) if has_attributes(new) else ()
    return _combined((*(same(a, b) for a, b in zip(new, old, strict=True)), *more))


def _same_slices(new: Any, old: Any) -> bool | None:
    return same((new.start, new.stop, new.step), (old.start, old.stop, old.step))


def _same_methods(new: Any, old: Any) -> bool:
    return new.__func__ is old.__func__ and new.__self__ is old.__self__


def _same_partials(new: Any, old: Any) -> bool | None:
    return _combined((same(new.func, old.func), same(new.args, old.args), None))


def _same_deques(new: Any, old: Any) -> bool | None:
    return None if new.maxlen == old.maxlen else False


def _same_objects(new: Any, old: Any) -> bool | None:
    if is_array(new):
        return None
    if is_machinery(new):
        return False
    if isinstance(new, BaseException) or (members_of(new) and type(new).__module__ == "builtins"):
        return None
    if base_in_c(type(new)) not in _WITHOUT_MEMBERS and not is_immutable(new):
        return False  # It may hold something else that no walk can see.
    if attributes_of(new) is not None or slots_of(type(new)):
        return None
    # A number of NumPy's: 0.0 and -0.0 are equal, and NaN is not.
    return is_immutable(new) and new.dtype == old.dtype and new.tobytes() == old.tobytes()


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # What cannot be compared counts as different.
        return False


def _combined(verdicts: Iterable[bool | None]) -> bool | None:
    found = list(verdicts)
    return False if False in found else None if None in found else True


# How each kind of value is compared with another of its type; the first kind that fits counts.
_SAME: dict[Any, Callable[[Any, Any], bool | None]] = {
    SCALARS: _same_scalars,
    frozenset: _same_items,
    slice: _same_slices,
    _COMPARABLE: _equal,
    types.MethodType: _same_methods,
    (*WITHOUT_STATE, torch.Tensor, nn.Module, types.FunctionType): lambda new, old: False,
    tuple: _same_items,
    functools.partial: _same_partials,
    deque: _same_deques,
    (list, dict, set, *BUFFERS): lambda new, old: None,
    object: _same_objects,
}


def difference(
    place: StatePlace, now: Mapping[Any, Any], ignores: Callable[[Any], bool] | None = None
) -> tuple[str | None, list[tuple[Name, Any, Any]]]:
    """How a place differs from what it held, in words, and what another walk has to compare.

    Equal values in other objects are noted as held from now on.
    """
    held = place.held
    if len(now) != len(held) or any(
        not (a is b or (type(a) is type(b) and _equal(a, b)))
        for a, b in zip(now, held, strict=True)
    ):
        return _added_or_removed(place, now), []
    unsure = []
    for (key, new), (mine, old) in zip(list(now.items()), list(held.items()), strict=True):
        if new is old:
            continue
        verdict = same(new, old)
        if verdict is False and ignores is not None and ignores(new) and ignores(old):
            verdict = True
        if verdict is False:
            return _replaced(place.key_name(key), new, old), []
        if verdict is None:
            unsure.append((place.key_name(key), new, old))
        else:
            held[mine] = new
    return None, unsure


def _added_or_removed(place: StatePlace, now: Mapping[Any, Any]) -> str:
    added = [key for key in now if key not in place.held]
    gone = [key for key in place.held if key not in now]
    if isinstance(place, HolderPlace) and place.name.before:
        return f"a forward hook was added or removed{place.name.after}"
    for keys, what in ((added, "was added"), (gone, "was removed")):
        if keys:
            return f"{place.key_name(keys[0])} {what}"
    return f"the order of {place.name} changed"


def _replaced(name: Name, new: Any, old: Any) -> str:
    if isinstance(old, SCALARS) and isinstance(new, SCALARS):
        return f"{name} changed from {old!r:.80} to {new!r:.80}"
    return f"{name} was replaced"
