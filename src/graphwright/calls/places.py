"""Places: what holds the values that a call depends on or writes, by kind.

Each kind knows how its values are read, put back and named, and how a watch reads them fast. Which
places count, `dependencies` decides.

A run may write to one value of a place, which is `Written`: `self.last = h` in a forward gives the
attribute another tensor at each call. That is no state that the call depends on, as long as it does
not read what the place held before: it does the same where the place holds nothing.
`self.calls += 1` counts: the call does the same where the place holds what can be added to and
nothing else.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import enum
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import SignatureError
from .attributes import OF_CTYPES, attributes_of, slots_of
from .code import cells
from .counters import Counter, Misused, added
from .dictionaries import has_version
from .introspection import StandIn, original_of
from .leaves import SCALARS, describe
from .objects import apart

# Where a module keeps its tensors, and all that is registered.
OF_TENSORS = ("_parameters", "_buffers")
HOLDERS = (*OF_TENSORS, "_modules")
MISSING: Any = object()
# Attributes that are not watched. Every module has the first ones, and no inference depends on
# them. PyTorch, transformers and accelerate attach the others when they compile, trace, load or
# prepare a module.
_IGNORED = {
    *vars(nn.Module()),
    "_is_hf_initialized",
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
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


class StatePlace:
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

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        """What the owner of such a place holds under a key; `MISSING` if there is nothing."""
        raise NotImplementedError

    @staticmethod
    def put(owner: Any, key: Any, value: Any) -> None:
        """Let the owner of such a place hold a value, or nothing if that is `MISSING`."""
        raise NotImplementedError

    def read(self) -> dict[Any, Any]:
        """What it holds now."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Restore what it held."""
        now, held = self.read(), self.held
        for key in {**now, **held}:
            value, before = now.get(key, MISSING), held.get(key, MISSING)
            if value is not before and self.is_put_back(key, value, before):
                self.put(self.owner, key, before)

    def is_put_back(self, key: Any, now: Any, before: Any) -> bool:
        """Whether a value that has changed is put back."""
        return True

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


class DictionaryPlace(StatePlace):
    """The content of a dictionary, without hidden keys."""

    __slots__ = ("_hidden",)

    def __init__(self, name: Name, owner: Any, hidden: frozenset[Any] = frozenset()) -> None:
        self._hidden = hidden
        super().__init__(name, owner)

    def read(self) -> dict[Any, Any]:
        if not self._hidden:
            return dict(self.owner)
        return {key: value for key, value in dict(self.owner).items() if key not in self._hidden}

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return owner.get(key, MISSING)

    @staticmethod
    def put(owner: Any, key: Any, value: Any) -> None:
        if value is not MISSING:
            owner[key] = value
        elif key in owner:
            del owner[key]

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


class HolderPlace(DictionaryPlace):
    """Parameters, buffers, submodules or hooks of a module."""

    __slots__ = ()

    def key_name(self, key: Any) -> Name:
        return self.name.renamed(str(key))


class ViewPlace(HolderPlace):
    """Parameters, buffers, submodules or hooks of a ScriptModule."""

    __slots__ = ()

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return dict(owner.items()).get(key, MISSING)

    def read(self) -> dict[Any, Any]:
        return dict(self.owner.items())

    def put_back(self) -> None:
        pass


class SequencePlace(StatePlace):
    """The items of a list, deque or tuple."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(enumerate(self.owner))

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return owner[key] if key < len(owner) else MISSING

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


class SetPlace(StatePlace):
    """The items of a set."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {value: value for value in tuple(self.owner)}

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return key if key in owner else MISSING

    def put_back(self) -> None:
        if self.owner != self.held.keys():
            set.clear(self.owner)
            set.update(self.owner, self.held)

    def way(self) -> FastWay:
        return FastWay.ITEMS


class LengthPlace(StatePlace):
    """A container with so many items that only its length is watched."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {"its length": len(self.owner)}

    def put_back(self) -> None:
        pass

    def way(self) -> FastWay:
        return FastWay.LENGTH


class ContentPlace(StatePlace):
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


class AttributesPlace(StatePlace):
    """Attributes of a module or an object, without those that no call depends on.

    Of attributes that the call's code does not name, only modules, tensors and plain values count.
    The dictionaries in which a module has its parameters, submodules and hooks are places of their
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

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return object.__getattribute__(owner, "__dict__").get(key, MISSING)

    @staticmethod
    def put(owner: Any, key: Any, value: Any) -> None:
        attributes = object.__getattribute__(owner, "__dict__")
        if value is not MISSING:
            attributes[key] = value
        elif key in attributes:
            del attributes[key]

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


class SlotsPlace(AttributesPlace):
    """Attributes of an object that are in slots."""

    __slots__ = ()

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        with contextlib.suppress(Exception):  # It is not set.
            return object.__getattribute__(owner, key)
        return MISSING

    def read(self) -> dict[Any, Any]:
        values = {key: self.get(self.owner, key) for key in slots_of(type(self.owner))}
        return {key: value for key, value in values.items() if value is not MISSING}

    @staticmethod
    def put(owner: Any, key: Any, value: Any) -> None:
        if value is MISSING:
            object.__delattr__(owner, key)
        else:
            object.__setattr__(owner, key, value)

    def way(self) -> FastWay:
        return FastWay.VALUES  # Slots have no version.


class ClosurePlace(StatePlace):
    """The variables that a function closes over."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(cells(self.owner))

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return dict(cells(owner)).get(key, MISSING)

    @staticmethod
    def put(owner: Any, key: Any, value: Any) -> None:
        cell = dict(_cells_of(owner))[key]
        if value is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def key_name(self, key: Any) -> Name:
        return Name("the variable ", str(key))

    def getters(self) -> list[Getter]:
        # Given twice, since for one name it would return no tuple.
        get, held = operator.attrgetter("cell_contents", "cell_contents"), self.held
        return [(get, cell, (held[n], held[n])) for n, cell in _cells_of(self.owner) if n in held]


class GlobalsPlace(StatePlace):
    """The globals that code names."""

    __slots__ = ("names", "stored")

    def __init__(self, owner: dict[str, Any], names: Sequence[str], stored: frozenset[str]) -> None:
        self.names = tuple(names)
        self.stored = stored  # Only these can be changed by the code itself.
        super().__init__(Name("", ""), owner)

    def read(self) -> dict[Any, Any]:
        return {key: self.owner[key] for key in self.names if key in self.owner}

    get, put = staticmethod(DictionaryPlace.get), staticmethod(DictionaryPlace.put)

    def is_put_back(self, key: Any, now: Any, before: Any) -> bool:
        return key in self.stored

    def key_name(self, key: Any) -> Name:
        return Name("the variable ", str(key))

    def getters(self) -> list[Getter]:
        return _by(operator.itemgetter, self.owner, self)


class PartsPlace(StatePlace):
    """Some attributes of a function, class or file; of these only data is put back."""

    __slots__ = ("keys",)

    def __init__(self, name: Name, owner: Any, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(name, owner)

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return getattr(owner, key, MISSING)

    def read(self) -> dict[Any, Any]:
        return {key: self.get(self.owner, key) for key in self.keys}

    @staticmethod
    def put(owner: Any, key: Any, value: Any) -> None:
        # Whatever a class's own class makes of setting an attribute.
        setting = type.__setattr__ if isinstance(owner, type) else setattr
        setting(owner, key, value)

    def is_put_back(self, key: Any, now: Any, before: Any) -> bool:
        return _is_data(now) and _is_data(before)

    def key_name(self, key: Any) -> Name:
        return self.name.attribute(str(key))

    def getters(self) -> list[Getter]:
        return _by(operator.attrgetter, self.owner, self)


class ClassPartsPlace(PartsPlace):
    """Methods and attributes that a class itself defines."""

    __slots__ = ()

    @staticmethod
    def get(owner: Any, key: Any) -> Any:
        return vars(owner).get(key, MISSING)

    def way(self) -> FastWay:
        return FastWay.FORWARD if [*self.held] == ["forward"] else FastWay.VALUES

    def getters(self) -> list[Getter]:
        return _by(operator.itemgetter, vars(self.owner), self)


class FilePlace(ClassPartsPlace):
    """Functions in a file of PyTorch's."""

    __slots__ = ()

    def way(self) -> FastWay:
        return FastWay.FILE


class InheritedPlace(PartsPlace):
    """What a class inherits, and may come to override."""

    __slots__ = ()

    def put_back(self) -> None:
        for key in self.keys:
            if key in vars(self.owner) and _is_data(vars(self.owner)[key]):
                type.__delattr__(self.owner, key)


def registered(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Parameters and buffers of a module itself, by name; a ScriptModule has no dictionaries."""
    return {name: tensor for kind in OF_TENSORS for name, tensor in getattr(module, kind).items()}


def _cells_of(function: Any) -> Iterator[tuple[str, types.CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _both(place: StatePlace) -> list[Any]:
    now = place.read()
    return [*now, *now.values()]


def _as_before(place: StatePlace) -> list[Any]:
    """The very things that a place held, if what it holds now is equal."""
    held, now = place.held, place.read()
    return [*held, *held.values()] if now == held else [*now, *now.values()]


def _by(getter: Callable[..., Any], of: Any, place: StatePlace) -> list[Getter]:
    """How the keys of a place are read in C from what holds them."""
    if not place.held:
        return [(_both, place, ())]
    first, *more = place.held.values()
    # The first one is given twice, since for one key it would return no tuple.
    return [(getter(next(iter(place.held)), *place.held), of, (first, first, *more))]


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


@dataclass(eq=False)
class Written:
    """A value of a place, to which each run of a call writes: an attribute, or a dictionary's item.

    Attributes:
        name: in words.
        owner: the object or dictionary.
        key: the attribute's name, or the item's key.
        kind: of the place.
        counts: whether each run adds to a number there.
        step: what it adds, once that is known.
    """

    name: str
    owner: Any
    key: Any
    kind: type[StatePlace]
    counts: bool = False
    step: int = 0

    @property
    def is_attribute(self) -> bool:
        """Whether it is an attribute."""
        return not issubclass(self.kind, DictionaryPlace)

    @property
    def is_plain(self) -> bool:
        """Whether it is an attribute of the object's own, or an item."""
        return not self.is_attribute or self.key in getattr(self.owner, "__dict__", ())

    def same_as(self, other: Written) -> bool:
        """Whether both are one."""
        return self.owner is other.owner and self.key == other.key

    def value(self) -> Any:
        """What is there; `MISSING` if nothing is."""
        return self.kind.get(self.owner, self.key)

    def empty(self) -> None:
        """Let there be nothing, or what can be added to and nothing else."""
        self.put(Counter(self) if self.counts else MISSING)

    def added(self) -> int:
        """What a run has added to the counter that `empty` has put there.

        Raises:
            Misused: it did something else with it, or put something else in its place.
        """
        return added(self.value(), self)

    def put(self, value: Any) -> None:
        """Let a value be there, or nothing if that is `MISSING`."""
        self.kind.put(self.owner, self.key, value)


@contextlib.contextmanager
def emptied(places: Sequence[Written]) -> Iterator[None]:
    """Let places hold nothing at the beginning of the block, and what they held at its end.

    Raises:
        Misused: the block does something else with a counter than is known.
    """
    held = [(place, place.value()) for place in places]
    try:
        for place in places:
            place.empty()
        yield
        if any(place.counts and place.added() != place.step for place in places):
            raise Misused("The call adds another number to a counter than before.")
    finally:
        for place, value in held:
            place.put(value)


def kind_of(value: Any) -> Any:
    """What two values share that differ in the values of tensors alone; None if it is unknown."""
    if value is MISSING:
        return MISSING
    if value is None:
        return "None"
    try:
        leaves, spec = pytree.tree_flatten(apart(value))
        return spec, [describe(leaf) for leaf in leaves]
    except SignatureError:
        return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that `kind_of` knows."""
    leaves = [] if value is MISSING else pytree.tree_leaves(apart(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def carried_by(function: Any) -> tuple[Written, ...]:
    """Places that a function is given as an argument: what they hold is not what it depends on."""
    found: tuple[Written, ...] = getattr(function, "_graphwright_carries", ())
    return found


def hidden(places: Iterable[Written]) -> Mapping[int, frozenset[Any]]:
    """The keys of places by the identity of their owners, for `Dependencies`."""
    found: dict[int, frozenset[Any]] = {}
    for place in places:
        found[id(place.owner)] = found.get(id(place.owner), frozenset()) | {place.key}
    return found
