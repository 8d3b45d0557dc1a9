"""Sources: the places that hold what a call depends on, by kind.

Each kind knows how its values are read, put back and named, and how a watch reads them fast. What
is in the places, and which count, `dependencies` decides.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import enum
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .attributes import OF_CTYPES, attributes_of, slots_of
from .code import cells
from .dictionaries import has_version
from .introspection import StandIn, original_of
from .leaves import SCALARS

HOLDERS = ("_parameters", "_buffers", "_modules")
MISSING: Any = object()
# Attributes that are not watched. Every module has the first ones, and no inference depends on
# them. PyTorch, transformers and accelerate attach the others when they compile, trace, load or
# prepare a module.
_IGNORED = {
    *vars(nn.Module()),
    "_is_hf_initialized",
    "_is_accelerate_prepared",
    "_compiled_call_impl",
    "_is_torch_compile",
    "__jit_unused_properties__",
    "__overloads__",
    "_jit_override_qualname",
    "_graphwright_stands_for",
} - {"training"}
# So begin the names of what PyTorch's compiler attaches to tensors and functions: what it may
# assume of them. Nothing that was built before depends on it.
_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_torchdynamo_")
# Attributes of modules that count even if no code names them: a library's functions, which are
# given the module, may read them.
_ALWAYS = (
    *SCALARS,
    *(torch.Tensor, nn.Module, types.FunctionType, types.MethodType),
    *(tuple, frozenset, range, slice),
)
_ATTRIBUTES = operator.attrgetter("__dict__")
# A function, what it reads, and what it gave: a tuple, or a list.
Getter = tuple[Callable[[Any], Any], Any, tuple[Any, ...]]


class FastWay(enum.Enum):
    """How a watch sees fast whether what a place holds is what it held."""

    ATTRIBUTES = "the version of an object's dictionary"
    DICTIONARY = "the version of a dictionary"
    ITEMS = "the identities of items in a row"
    FORWARD = "the one method of a class"
    LENGTH = "the length"
    VALUES = "what getters give"
    FILE = "what getters give, or the version of a file's variables"


class Name(NamedTuple):
    """A readable name of a place: an attribute, variable or item, and what it belongs to."""

    before: str
    text: str
    after: str = ""

    def attribute(self, key: str) -> Name:
        """The name of an attribute of what is in this place."""
        return self.renamed(f"{self.text}.{key}")

    def item(self, key: Any) -> Name:
        """The name of an item of the container in this place."""
        shown = repr(key) if isinstance(key, SCALARS) else type(key).__name__
        return self.renamed(f"{self.text}[{shown:.40}]")

    def renamed(self, text: str) -> Name:
        """Another name, of what belongs to the same."""
        return Name(self.before, text, self.after)

    def __str__(self) -> str:
        return f"{self.before}{self.text}{self.after}"


class Source:
    """One place that holds values: a container, an object's attributes, a closure.

    Attributes:
        name: of the place.
        owner: the container or object itself.
        held: what it held when it was found, by key.
    """

    __slots__ = ("held", "name", "owner")

    def __init__(self, name: Name, owner: Any) -> None:
        self.name = name
        self.owner = owner
        self.held: dict[Any, Any] = self.read()

    def read(self) -> dict[Any, Any]:
        """What it holds now."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Restore what it held."""

    def key_name(self, key: Any) -> Name:
        """The name of one of its values."""
        return self.name.item(key)

    def looked_into(self, key: Any) -> bool:
        """Whether what one of its values holds counts here."""
        return True

    def way(self) -> FastWay:
        """How a watch sees fast whether it holds the same."""
        return FastWay.VALUES

    def getters(self) -> list[Getter]:
        """How it is read fast, and what that gave; equal values in other objects may differ."""
        return [(_both, self, (*self.held, *self.held.values()))]

    def holds_the_same(self) -> bool:
        """Whether it holds the very things that it held."""
        now, held = self.read(), self.held
        return len(now) == len(held) and all(
            map(operator.is_, (*now, *now.values()), (*held, *held.values()))
        )


class DictionarySource(Source):
    """The content of a dictionary, without hidden keys."""

    __slots__ = ("_hidden",)

    def __init__(self, name: Name, owner: Any, hidden: frozenset[Any] = frozenset()) -> None:
        self._hidden = hidden
        super().__init__(name, owner)

    def read(self) -> dict[Any, Any]:
        if not self._hidden:
            return dict(self.owner)
        return {key: value for key, value in dict(self.owner).items() if key not in self._hidden}

    def put_back(self) -> None:
        owner, held = self.owner, self.held
        if len(owner) == len(held) and all(
            a is b and owner[b] is held[b] for a, b in zip(owner, held, strict=True)
        ):
            return
        # By methods of the base class: a user's override may count, refuse or write to disk.
        if isinstance(owner, OrderedDict):
            OrderedDict.clear(owner)
            for key, value in held.items():
                OrderedDict.__setitem__(owner, key, value)
        else:
            dict.clear(owner)
            dict.update(owner, held)

    def way(self) -> FastWay:
        # What writes to hidden keys gives the dictionary another version, too.
        versioned = not self._hidden and has_version(self.owner)
        return FastWay.DICTIONARY if versioned else FastWay.VALUES


class HolderSource(DictionarySource):
    """Parameters, buffers, submodules or hooks of a module."""

    __slots__ = ()

    def key_name(self, key: Any) -> Name:
        return self.name.renamed(str(key))


class ViewSource(HolderSource):
    """Parameters, buffers, submodules or hooks of a ScriptModule."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(self.owner.items())

    def put_back(self) -> None:
        pass


class SequenceSource(Source):
    """The items of a list, deque or tuple."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self.owner))

    def put_back(self) -> None:
        owner, held = self.owner, list(self.held.values())
        if isinstance(owner, tuple):
            return
        if len(owner) == len(held) and all(map(operator.is_, owner, held)):
            return
        if isinstance(owner, deque):
            deque.clear(owner)
            deque.extend(owner, held)
        else:
            list.__setitem__(owner, slice(None), held)

    def way(self) -> FastWay:
        return FastWay.ITEMS


class SetSource(Source):
    """The items of a set."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {value: value for value in tuple(self.owner)}

    def put_back(self) -> None:
        if self.owner != self.held.keys():
            set.clear(self.owner)
            set.update(self.owner, self.held)

    def way(self) -> FastWay:
        return FastWay.ITEMS


class LengthSource(Source):
    """A container with so many items that only its length is watched."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {"its length": len(self.owner)}

    def way(self) -> FastWay:
        return FastWay.LENGTH


class ContentSource(Source):
    """The bytes of an array, which change in place."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        owner = self.owner
        if isinstance(owner, bytearray):
            return {"its content": bytes(owner)}
        kind: tuple[Any, ...] = ()
        if isinstance(owner, OF_CTYPES):
            owner = memoryview(owner)  # type: ignore[arg-type]  # its classes give a buffer
        if isinstance(owner, memoryview):
            kind = (owner.shape, owner.format)
        elif not isinstance(owner, array.array):
            kind = (owner.shape, str(owner.dtype))
        return {"its content": (owner.tobytes(), kind)}

    def put_back(self) -> None:
        if self.read() == self.held:
            return
        owner, held = self.owner, self.held["its content"]
        if isinstance(owner, bytearray):
            owner[:] = held
            return
        content, _ = held
        if isinstance(owner, OF_CTYPES):
            ctypes.memmove(ctypes.addressof(owner), content, len(content))  # type: ignore[arg-type]
        elif isinstance(owner, array.array):
            del owner[:]
            owner.frombytes(content)
        elif isinstance(owner, memoryview) and owner.contiguous:
            owner.cast("B")[:] = content
        elif isinstance(owner, memoryview):
            owner[:] = memoryview(content).cast(owner.format)  # type: ignore[call-overload]  # any
        else:
            owner[...] = type(owner)(owner.shape, owner.dtype, content)

    def key_name(self, key: Any) -> Name:
        return Name("the content of ", str(self.name))

    def getters(self) -> list[Getter]:
        return [(_as_before, self, (*self.held, *self.held.values()))]


class AttributesSource(Source):
    """Attributes of a module or an object, without those that no call depends on.

    Of attributes that the call's code does not name, only modules, tensors and plain values count.
    The dictionaries in which a module has its parameters, submodules and hooks are sources of their
    own; here it counts whether others take their place.
    """

    __slots__ = ("_hidden", "_holders", "_names")

    def __init__(
        self,
        name: Name,
        owner: Any,
        names: frozenset[str] | None = None,
        hidden: frozenset[Any] = frozenset(),
        holders: frozenset[str] = frozenset(),
    ) -> None:
        self._names = names
        self._hidden = hidden
        self._holders = holders
        super().__init__(name, owner)

    def read(self) -> dict[Any, Any]:
        names, now = self._names, {}
        is_module = isinstance(self.owner, nn.Module)
        for key, value in without_marks(self.owner).items():
            if key in self._holders:
                now[key] = value
                continue
            if (is_module and key in _IGNORED) or key in self._hidden:
                continue
            named = names is None or key in names
            if not named and not (is_module and isinstance(value, _ALWAYS)):
                continue
            if key == "forward" and isinstance(value, StandIn):
                value = original_of(value)
                if getattr(value, "__func__", None) is getattr(type(self.owner), "forward", None):
                    continue
            now[key] = value
        return now

    def put_back(self) -> None:
        attributes = attributes_of(self.owner)
        now = self.read()
        if attributes is None:
            return
        for key in now.keys() - self.held.keys():
            del attributes[key]
        for key, value in self.held.items():
            if key not in now or now[key] is not value:
                attributes[key] = value

    def key_name(self, key: Any) -> Name:
        if self.name.text:
            return self.name.attribute(str(key))
        return self.name.renamed(str(key))

    def looked_into(self, key: Any) -> bool:
        return key not in self._holders

    def way(self) -> FastWay:
        # What writes to hidden attributes gives them another version, too.
        versioned = not self._hidden and _has_plain(self.owner)
        return FastWay.ATTRIBUTES if versioned else FastWay.VALUES


class SlotsSource(AttributesSource):
    """Attributes of an object that are in slots."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        found = {}
        for key in slots_of(type(self.owner)):
            with contextlib.suppress(Exception):  # It is not set.
                found[key] = object.__getattribute__(self.owner, key)
        return found

    def put_back(self) -> None:
        now = self.read()
        for key in now.keys() - self.held.keys():
            object.__delattr__(self.owner, key)
        for key, value in self.held.items():
            if now.get(key, MISSING) is not value:
                object.__setattr__(self.owner, key, value)

    def way(self) -> FastWay:
        return FastWay.VALUES  # Slots have no version.


class ClosureSource(Source):
    """The variables that a function closes over."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(cells(self.owner))

    def put_back(self) -> None:
        now = self.read()
        for key, cell in self._cells():
            if key in self.held and now.get(key, MISSING) is not self.held[key]:
                cell.cell_contents = self.held[key]
            elif key in now and key not in self.held:
                del cell.cell_contents

    def key_name(self, key: Any) -> Name:
        return Name("the variable ", str(key))

    def getters(self) -> list[Getter]:
        # Given twice, since for one name it would return no tuple.
        get, held = operator.attrgetter("cell_contents", "cell_contents"), self.held
        return [(get, cell, (held[n], held[n])) for n, cell in self._cells() if n in held]

    def _cells(self) -> Iterator[tuple[str, types.CellType]]:
        function = self.owner
        return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


class GlobalsSource(Source):
    """The globals that code names."""

    __slots__ = ("names", "stored")

    def __init__(self, owner: dict[str, Any], names: Sequence[str], stored: frozenset[str]) -> None:
        self.names = tuple(names)
        self.stored = stored  # Only these can be changed by the code itself.
        super().__init__(Name("", ""), owner)

    def read(self) -> dict[Any, Any]:
        return {key: self.owner[key] for key in self.names if key in self.owner}

    def put_back(self) -> None:
        for key in self.stored.intersection(self.names):
            if key not in self.held:
                self.owner.pop(key, None)
            elif self.owner.get(key, MISSING) is not self.held[key]:
                self.owner[key] = self.held[key]

    def key_name(self, key: Any) -> Name:
        return Name("the variable ", str(key))

    def getters(self) -> list[Getter]:
        return _by(operator.itemgetter, self.owner, self)


class PartsSource(Source):
    """Some attributes of a function, class or file; of these only data is put back."""

    __slots__ = ("keys",)

    def __init__(self, name: Name, owner: Any, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(name, owner)

    def read(self) -> dict[Any, Any]:
        return {key: getattr(self.owner, key, MISSING) for key in self.keys}

    def put_back(self) -> None:
        for key, value in self.read().items():
            held = self.held[key]
            if value is held or not (_is_data(value) and _is_data(held)):
                continue
            # Whatever a class's own class makes of setting an attribute.
            setting = type.__setattr__ if isinstance(self.owner, type) else setattr
            setting(self.owner, key, held)

    def key_name(self, key: Any) -> Name:
        return self.name.attribute(str(key))

    def getters(self) -> list[Getter]:
        return _by(operator.attrgetter, self.owner, self)


class ClassPartsSource(PartsSource):
    """Methods and attributes that a class itself defines."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        held = vars(self.owner)
        return {key: held.get(key, MISSING) for key in self.keys}

    def way(self) -> FastWay:
        return FastWay.FORWARD if [*self.held] == ["forward"] else FastWay.VALUES

    def getters(self) -> list[Getter]:
        return _by(operator.itemgetter, vars(self.owner), self)


class FileSource(ClassPartsSource):
    """Functions in a file of PyTorch's."""

    __slots__ = ()

    def way(self) -> FastWay:
        return FastWay.FILE


class InheritedSource(PartsSource):
    """What a class inherits, and may come to override."""

    __slots__ = ()

    def put_back(self) -> None:
        for key in self.keys:
            if key in vars(self.owner) and _is_data(vars(self.owner)[key]):
                type.__delattr__(self.owner, key)


def _both(source: Source) -> list[Any]:
    now = source.read()
    return [*now, *now.values()]


def _as_before(source: Source) -> list[Any]:
    """The very things that a source held, if what it holds now is equal."""
    held, now = source.held, source.read()
    return [*held, *held.values()] if now == held else [*now, *now.values()]


def _by(getter: Callable[..., Any], of: Any, source: Source) -> list[Getter]:
    """How the keys of a source are read in C from what holds them."""
    if not source.held:
        return [(_both, source, ())]
    first, *more = source.held.values()
    # The first one is given twice, since for one key it would return no tuple.
    return [(getter(next(iter(source.held)), *source.held), of, (first, first, *more))]


def _has_plain(owner: Any) -> bool:
    """Whether an object has its attributes where it says that they are."""
    try:
        return _ATTRIBUTES(owner) is object.__getattribute__(owner, "__dict__")
    except Exception:
        return False


def _is_data(value: Any) -> bool:
    """Whether a value is plain, a tensor or a container, and no code."""
    return isinstance(value, (*SCALARS, torch.Tensor, list, dict, tuple, set))


def without_marks(owner: Any) -> dict[str, Any]:
    """A copy of an object's own attributes, without a compiler's notes on a tensor or function."""
    attributes = dict(attributes_of(owner) or ())
    if not isinstance(owner, torch.Tensor | types.FunctionType):
        return attributes
    return {key: value for key, value in attributes.items() if not str(key).startswith(_MARKS)}
