"""Where Python objects hold their values: attributes, slots, members of classes in C, buffers.

Nothing here runs code of the objects' classes, as far as that can be had.
"""

from __future__ import annotations

import array
import ctypes
import sys
import types
from typing import Any

from .leaves import SCALARS

# Values of just these types have no attributes.
BARE = frozenset(SCALARS)
# What holds bytes, beside NumPy's arrays.
OF_CTYPES = ctypes.c_int.__mro__[-2]
BUFFERS = (bytearray, array.array, memoryview, OF_CTYPES)
# CPython's flags of classes whose attributes cannot be set, and of those that are made at run time.
IMMUTABLE, _HEAPTYPE = 1 << 8, 1 << 9
# What classes in C hold in members of their own, by name.
_MEMBERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset", "fdel")),
    (types.CellType, ("cell_contents",)),
)
# Members of exceptions that each raise writes to.
_OF_A_RAISE = frozenset(("__traceback__", "__context__", "__suppress_context__", "__dict__"))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, without running code of its class; None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return found if isinstance(found, dict) else None


def own_slots(cls: type) -> list[str]:
    """The slots that a class itself has, as attributes are called."""
    slots = vars(cls).get("__slots__", ())
    found = []
    for name in (slots,) if isinstance(slots, str) else tuple(slots):
        if name in ("__dict__", "__weakref__"):
            continue
        private = name.startswith("__") and not name.endswith("__")
        found.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return found


def slots_of(cls: type) -> tuple[str, ...]:
    """The slots of a class and of those that it derives from, as attributes are called."""
    bases = [base for base in cls.__mro__ if base.__module__ != "builtins"]
    return tuple(name for base in bases for name in own_slots(base))


def has_attributes(value: Any) -> bool:
    """Whether a value's class gives its instances attributes of their own."""
    return attributes_of(value) is not None or bool(slots_of(type(value)))


def members_of(value: Any) -> tuple[str, ...]:
    """The members of an object of a class in C, as far as they hold what code may read."""
    if not isinstance(value, BaseException):
        names = next((names for kind, names in _MEMBERS if isinstance(value, kind)), ())
    else:
        kinds = types.MemberDescriptorType | types.GetSetDescriptorType
        names = tuple(
            name
            for base in type(value).__mro__
            if not base.__flags__ & _HEAPTYPE
            for name, member in vars(base).items()
            if isinstance(member, kinds) and name not in _OF_A_RAISE
        )
    return tuple(name for name in names if _is_set(value, name))


def _is_set(value: Any, name: str) -> bool:
    try:
        getattr(value, name)
    except Exception:  # An empty cell, say.
        return False
    return True


def base_in_c(cls: type) -> type:
    """The class in C that a class is made of; object, if it adds nothing to that."""
    for base in cls.__mro__:
        new = vars(base).get("__new__")
        in_c = isinstance(new, types.BuiltinFunctionType) and new.__self__ is base
        if in_c or not base.__flags__ & _HEAPTYPE:
            return base
    return object


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def has_objects(value: Any) -> bool:
    """Whether an array holds references instead of numbers."""
    return bool(getattr(getattr(value, "dtype", None), "hasobject", False))


def is_immutable(value: Any) -> bool:
    """Whether a value is one of NumPy's that does not change, such as a number."""
    return type(value).__module__ == "numpy" and not hasattr(value, "__setitem__")
