"""What others learn by asking what stands for a module or function: signature, names, annotations.

`inspect.signature`, `typing.get_type_hints`, documentation tools and libraries that look up which
arguments a model takes are answered as the original would answer. It is found out when somebody
asks, never at a call. There is no `__wrapped__`: libraries follow it to the original, and would
call that from then on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

# Beside public ones, what callers look up of a function; `__getattr__` is asked for no others.
_LOOKED_UP = frozenset(
    ("__annotations__", "__func__", "__globals__", "__name__", "__qualname__", "__self__")
)


# What torch.compile sets on what it returns, and nothing that it is given may have.
_OF_COMPILERS = frozenset(("aot_compile", "get_compiler_config"))
# On a class that a module was given so that something else answers its calls: the one it had, and
# what there was in the new one at first.
ORIGINAL_CLASS, DEFINED = "_graphwright_original", "__graphwright_defined__"


class _Signature:
    """`__signature__` of an object that stands for another; its class has none."""

    def __get__(self, owner: Any, kind: type | None = None) -> inspect.Signature:
        found = None if owner is None else signature_of(owner._graphwright_called)
        if found is None:
            raise AttributeError("__signature__")
        return found


class _Documentation:
    """`__doc__` of a class, and of its objects that of what they stand for."""

    def __init__(self, of_class: str | None) -> None:
        self._of_class = of_class

    def __get__(self, owner: Any, kind: type | None = None) -> str | None:
        if owner is None:
            return self._of_class
        found: str | None = owner._graphwright_called.__doc__
        return found


class _Annotations(dict[str, Any]):
    """`__annotations__` of a class, and of its objects those of what they stand for."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else owner._graphwright_called.__annotations__


class _ModuleName(str):
    """`__module__` of a class, and of its objects that of what they stand for.

    diffusers notes it for each component of a pipeline, and imports the class from there.
    """

    __slots__ = ()

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else owner._graphwright_called.__module__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickle stores a class by this name, and wants a plain string to be read.
        return str, (str(self),)


class StandIn:
    """Stands for a module or function, and computes the same results in another way.

    Attributes:
        _graphwright_trains: whether what was gained counts for training too.
        _graphwright_answerer: what answers its calls, for dispatch/answerer.py; None if nobody
            may ask it.
    """

    __slots__ = ()
    _graphwright_trains = True
    _graphwright_answerer: Any = None

    __signature__ = _Signature()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = _Documentation(cls.__doc__)  # type: ignore[assignment]  # a str, where read
        cls.__module__ = _ModuleName(cls.__module__)
        cls.__annotations__ = _Annotations(inspect.get_annotations(cls))

    @property
    def _graphwright_stands_for(self) -> Any:
        raise NotImplementedError

    @property
    def _graphwright_called(self) -> Any:
        """What is asked about in its place: a module, or a plain function."""
        return self._graphwright_stands_for


def original_of(stand_in: StandIn) -> Any:
    """What something stands for: a module or function, which may stand for another one."""
    return stand_in._graphwright_stands_for


def named_answerer(stand_in: StandIn) -> Any:
    """What answers the calls of something that stands for another; None if nobody may ask it."""
    return stand_in._graphwright_answerer


def stood_for(value: Any) -> Any:
    """What a value stands for in the end; the value itself if it stands for nothing."""
    while isinstance(value, StandIn):
        value = value._graphwright_stands_for
    return value


def without_answers(cls: type) -> type:
    """A class, or the one that a module had before something else answered its calls.

    A class that somebody has written to since is one of its own.
    """
    members = vars(cls)
    if ORIGINAL_CLASS not in members:
        return cls
    defined = members[DEFINED]
    same = all(members.get(name) is value for name, value in defined.items())
    # Python itself adds special ones, such as annotations, when they are looked up.
    added = any(name not in defined and not name.startswith("__") for name in members)
    original: type = members[ORIGINAL_CLASS]
    return original if same and not added else cls


class _OfFunction:
    """An attribute of functions and methods, for objects that stand for one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            raise AttributeError(self._name)
        return attribute_of(owner, owner._graphwright_called, self._name)


class FunctionStandIn(StandIn):
    """Stands for a plain function or method.

    It has no `__getattr__`, which would make each look at one of its own attributes slower.
    """

    __func__ = _OfFunction("__func__")
    __globals__ = _OfFunction("__globals__")
    __self__ = _OfFunction("__self__")

    def _look_like(self, function: Any) -> None:
        """Take over a function's names, and the attributes that were set on it."""
        attributes = vars(self)
        for name in ("__name__", "__qualname__"):
            if hasattr(function, name):
                attributes[name] = getattr(function, name)
        if isinstance(function, types.FunctionType | types.MethodType | functools.partial):
            for name, value in vars(function).items():
                own = name.startswith("_") or name in _OF_COMPILERS
                if not own and not hasattr(self, name):
                    attributes[name] = value


def signature_of(called: Any) -> inspect.Signature | None:
    """The signature of something callable; None if Python knows of none."""
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        return None


def may_be_looked_up(name: str) -> bool:
    """Whether an attribute of a function is shown by what stands for it."""
    return not name.startswith("_") or name in _LOOKED_UP


def attribute_of(stand_in: Any, function: Any, name: str) -> Any:
    """An attribute of a function, for what stands for it."""
    if name == "__func__":
        return unbound(stand_in, function)
    # The names in annotations, which decorators copy, are those of the inner function's file.
    return getattr(inspect.unwrap(function) if name == "__globals__" else function, name)


def unbound(bound: Callable[..., Any], method: types.MethodType) -> Callable[..., Any]:
    """The function of which what stands for a bound method is the method.

    Libraries that wrap a model's forward take it apart: `MethodType(wrapped(m.forward.__func__),
    m)`.

    Args:
        bound: what stands for the method.
        method: the method.
    """
    inner = method.__func__

    def function(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        if stood_for(owner) is method.__self__:
            return bound(*args, **kwargs)
        return inner(owner, *args, **kwargs)

    describe_as(function, inner, signature_of(inner))
    return function


def describe_as(
    function: Callable[..., Any], like: Any, signature: inspect.Signature | None
) -> None:
    """Give a function the names, documentation and annotations of another, and a signature."""
    functools.update_wrapper(function, like, updated=())
    attributes = vars(function)
    del attributes["__wrapped__"]
    if signature is not None:
        attributes["__signature__"] = signature
