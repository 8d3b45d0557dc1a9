"""Dependencies: what a call depends on beside its arguments.

`Dependencies` walks from a module or function to everything that its call can reach: modules,
tensors, plain values, and the lists, dictionaries, objects, closures and globals that hold them.
`watch.ModuleWatch` notices that one of them has changed; `graphs.python_state` and `snapshots` put
back what a run has changed. The kinds of places are in `places`.
"""

from __future__ import annotations

import array
import contextlib
import enum
import functools
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from .attributes import (
    BARE,
    BUFFERS,
    IMMUTABLE,
    attributes_of,
    has_attributes,
    has_objects,
    is_array,
    is_immutable,
    members_of,
    slots_of,
)
from .code import (
    MACHINERY,
    Read,
    cells,
    closure,
    function_of,
    global_names,
    is_library,
    is_machinery,
    is_machinery_s,
    is_operator,
    names_of,
    read_by,
    stored_names,
)
from .differences import WITHOUT_STATE, difference, same
from .host_generators import draws
from .introspection import StandIn, original_of, stood_for, without_answers
from .iterators import is_opaque_iterator
from .leaves import SCALARS, without_memory
from .places import (
    HOLDERS,
    MISSING,
    AttributesPlace,
    ClassPartsPlace,
    ClosurePlace,
    ContentPlace,
    DictionaryPlace,
    FilePlace,
    GlobalsPlace,
    HolderPlace,
    InheritedPlace,
    LengthPlace,
    Name,
    PartsPlace,
    SequencePlace,
    SetPlace,
    SlotsPlace,
    StatePlace,
    ViewPlace,
    without_marks,
)

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_FORWARD_HOOKS = tuple(f"_global{kind}" for kind in FORWARD_HOOKS)
GLOBAL_HOOKS = (*GLOBAL_FORWARD_HOOKS, *(f"_global{kind}" for kind in BACKWARD_HOOKS))
_OF_MODULES = tuple(name for name in vars(nn.Module()) if name not in HOLDERS)
_MAX_DEPTH = 50
# How many objects and containers are looked into, those near the root first.
_MAX_PLACES = 3_000
# A container with more items is watched by its length alone.
_MAX_ITEMS = 1_000
# The content of arrays with more bytes is not watched.
_MAX_BYTES = 8 * _MAX_ITEMS
# Classes of tensors that are watched themselves; of others the tensors inside are watched.
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
# What a class holds in place of a function.
_WRAPPERS = (property, staticmethod, classmethod)
# Attributes of optimizers that are compared elsewhere (options, states, hooks), or in which
# schedulers of PyTorch's and its profiler leave notes.
_OF_OPTIMIZERS = frozenset(
    (
        *("state", "param_groups", "defaults", "step", "_step_count", "_opt_called"),
        *(f"_optimizer_step_{when}_hooks" for when in ("pre", "post")),
        *(f"_optimizer_state_dict_{when}_hooks" for when in ("pre", "post")),
        *(f"_optimizer_load_state_dict_{when}_hooks" for when in ("pre", "post")),
        *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    )
)
# Methods that run without being named by the call's code.
_ENTRIES = ("forward", "__call__", "__getattr__")
# Methods of an autograd.Function that run without being named.
_OF_FUNCTIONS = frozenset(("forward", "backward", "setup_context", "jvp", "vmap"))
_MAKE_INSTANCES = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__"))
# Files of PyTorch's whose functions call others of its functions by their names.
_CALL_OTHERS = frozenset(("torch.nn.functional", "torch.functional"))
# Packages whose classes have attributes that are no user's.
_OF_CONTAINERS = ("builtins", "collections", "functools", "array", "numpy")


class RunsStep:
    """Runs a training step: a step around it depends on what that depends on."""

    __slots__ = ()

    @property
    def _graphwright_step(self) -> Callable[..., Any]:
        raise NotImplementedError


class Called(nn.Module):
    """A plain function as a module; `modules.FunctionModule` is its subclass."""

    def function_of(self) -> Callable[..., Any]:
        """The function."""
        raise NotImplementedError

    def ignores(self, value: Any) -> bool:
        """Whether something that the function names may be replaced without a consequence."""
        return False

    def unread_of(self, value: Any) -> frozenset[str]:
        """Attributes of an object that the function is known not to read."""
        return frozenset()


class Dependencies:
    """What a call of a module or function depends on beside its arguments, as it is now.

    Attributes:
        places: the places that hold values, in the order in which they were found.
        visits: for each object that was looked into, by identity, its turn among the visits.
        tensors: the tensors, each once, with their names.
        empty: dictionaries of modules that hold nothing: hooks, parameters, buffers.
        typed: modules and objects whose class matters.
        unread: names of objects that cannot be looked into, and what code looks up by names that
            it computes.
        computed: the latter, by the code.
        optimizers: optimizers among the objects.
        outermost: the modules and tensors that no other module holds.
        ignores: whether a tensor may take the place of another one without a consequence.
    """

    def __init__(
        self,
        root: Any,
        *,
        training: bool = False,
        whole: bool = False,
        hooks: bool = True,
        hidden: Mapping[int, frozenset[Any]] | None = None,
        given: Sequence[type] = (),
    ) -> None:
        """Walk from a root to everything that its call can reach.

        Args:
            root: a module, or any callable.
            training: also look at hooks for the backward, but not at the root's own hooks.
            whole: also look at what a watch need not see but a run may change: hooks of all kinds,
                attributes that no code names, long lists.
            hooks: also look at what hooks reach; not needed where they run at every call.
            hidden: attributes and items to leave out, by the identity of their owners.
            given: classes of the call's arguments; then only these are looked into.
        """
        self.root = stood_for(root)
        self.places: list[StatePlace] = []
        self.visits: dict[Any, int] = {}
        self._meetings: Counter[int] = Counter()  # How often each list was met.
        self.tensors: list[tuple[Name, torch.Tensor]] = []
        self.empty: list[Any] = []
        self.typed: list[Any] = []
        self.unread: list[str] = []
        self.computed: dict[types.CodeType, str] = {}
        self.optimizers: list[Optimizer] = []
        self.outermost: dict[int, tuple[Name, Any]] = {}
        self.ignores = self.root.ignores if isinstance(self.root, Called) else None
        self._alive: list[Any] = []  # So that no identity is reused.
        walk = _Walker(self, _Rules(training, whole, hooks, {} if hidden is None else hidden))
        if given:
            walk.look_at_classes(given)
        else:
            walk.look_around()

    @property
    def objects(self) -> list[Any]:
        """Everything that was looked into."""
        return list(self._alive)

    def visit(self, value: Any) -> bool:
        """Whether something is visited for the first time; notes the visit."""
        if type(value) is list:
            self._meetings[id(value)] += 1
        if id(value) in self.visits:
            return False
        self.visits[id(value)] = len(self.visits)
        self._alive.append(value)
        return True

    def put_back(self) -> None:
        """Restore what every place held."""
        for place in self.places:
            with contextlib.suppress(Exception):  # If one refuses, the others are still restored.
                place.put_back()
        for holder in self.empty:
            if holder and isinstance(holder, dict):
                holder.clear()

    def exchange(self, pairs: Sequence[tuple[Name, Any, Any]]) -> bool:
        """Let lists take the place of others that held the very same things.

        Code that runs `self.parts = [part.to(device) for part in self.parts]` makes such lists
        again and again.

        Args:
            pairs: of a name, the new list and the old one, as `difference` returns them.

        Returns:
            whether all of them are such lists; if not, nothing is exchanged.
        """
        exchange = _Exchange(self._lists(), self.visits)
        if not all(exchange.match(new, old) for _, new, old in pairs):
            return False
        if not exchange.is_complete(self._meetings):
            return False
        exchanged = exchange.lists
        for place in self.places:
            for key, value in place.held.items():
                if (found := exchanged.get(id(value))) is not None:
                    place.held[key] = found[0]
            if (found := exchanged.get(id(place.owner))) is not None:
                place.owner = found[0]
                place.held = dict(enumerate(found[2]))
        for position, value in enumerate(self._alive):
            if (found := exchanged.get(id(value))) is not None:
                self.visits[id(found[0])] = self.visits.pop(id(value))
                self._meetings[id(found[0])] = self._meetings.pop(id(value))
                self._alive[position] = found[0]
        return True

    def surely_replaced(self, pairs: Sequence[tuple[Name, Any, Any]]) -> str | None:
        """How a list differs from the one whose place it took, in words.

        Args:
            pairs: as for `exchange`.

        Returns:
            None where only another walk can tell.
        """
        lists = self._lists()
        for _, new, old in pairs:
            if id(old) in lists:
                change, _ = difference(lists[id(old)], dict(enumerate(new)), self.ignores)
                if change is not None:
                    return change
        return None

    def _lists(self) -> dict[int, SequencePlace]:
        """The places of lists, by the lists' identity."""
        return {
            id(place.owner): place
            for place in self.places
            if type(place) is SequencePlace and type(place.owner) is list
        }


class _Exchange:
    """Pairs lists with those that took their place and hold the very same things.

    Attributes:
        lists: the new list, the old one, and what the new one held when it was compared, by the
            identity of the old one.

    Args:
        places: of lists, by the lists' identity.
        visits: what was found before, by identity.
    """

    def __init__(self, places: Mapping[int, SequencePlace], visits: Mapping[int, int]) -> None:
        self.lists: dict[int, tuple[list[Any], list[Any], tuple[Any, ...]]] = {}
        self._places, self._visits = places, visits
        self._matches: dict[int, int] = {}

    def match(self, new: Any, old: Any) -> bool:
        """Whether a list holds what another one held when it was found; notes both."""
        place = self._places.get(id(old))
        if place is None or type(new) is not list:
            return False
        self._matches[id(old)] = self._matches.get(id(old), 0) + 1
        known = self.lists.get(id(old))
        if known is not None:
            return known[0] is new
        items = tuple(new)  # Another thread may write to it.
        if id(new) in self._visits or len(items) != len(place.held):
            return False
        self.lists[id(old)] = new, old, items
        return all(
            a is b or _is_same_scalar(a, b) or self.match(a, b)
            for a, b in zip(items, place.held.values(), strict=True)
        )

    def is_complete(self, meetings: Mapping[int, int]) -> bool:
        """Whether each old list has a new one of its own, in all places that held the old one.

        Args:
            meetings: how often each list was met: tuples and others that nobody can write to hold
                some, and are no places.
        """
        if len({id(new) for new, _, _ in self.lists.values()}) < len(self.lists):
            return False  # One list in several places, where there were several.
        return all(meetings[old] == self._matches[old] for old in self.lists)


def _is_same_scalar(a: Any, b: Any) -> bool:
    return type(a) is type(b) and type(a) in SCALARS and same(a, b) is True


class _Rules(NamedTuple):
    """Which places a walk looks at; see `Dependencies`."""

    training: bool
    whole: bool
    hooks: bool
    hidden: Mapping[int, frozenset[Any]]

    def hidden_of(self, owner: Any) -> frozenset[Any]:
        """Attributes or items of an object that are left out."""
        return self.hidden.get(id(owner), frozenset())


class _Named(NamedTuple):
    """What the code of a call names.

    Attributes:
        methods: names by which it may reach methods.
        names: those that tell which attributes it reads; None if they do not.
        classes: identities of the classes of its modules, whose code it is.
        optimizers: identities of classes of optimizers whose step is among what is called.
        of_optimizers: as `names`, with the code of these.
    """

    methods: frozenset[str]
    names: frozenset[str] | None
    classes: frozenset[int]
    optimizers: frozenset[int]
    of_optimizers: frozenset[str] | None


class _Met(NamedTuple):
    """A value that a walk has come to.

    Attributes:
        name: of the place that holds it.
        value: the value.
        depth: how many objects and containers are around it.
        inside: whether a module holds it.
    """

    name: Name
    value: Any
    depth: int = 1
    inside: bool = True

    def beside(self, value: Any, name: Name | None = None) -> _Met:
        """Another value in the same place."""
        return _Met(name or self.name, value, self.depth, self.inside)

    def below(self, name: Name, value: Any) -> _Met:
        """A value that this one holds."""
        return _Met(name, value, self.depth + 1, self.inside)


class _Walker:
    """Walks to everything that a call can reach: modules first, near things before far ones.

    Args:
        found: takes what is found.
        rules: which places count.
    """

    def __init__(self, found: Dependencies, rules: _Rules) -> None:
        self._found = found
        self._rules = rules
        self._parts: deque[tuple[str, nn.Module]] = deque()
        self._values: deque[_Met] = deque()
        self._seen: set[tuple[int, str]] = set()
        # Functions of PyTorch's that code names, by the names of their files.
        self._of_pytorch: dict[str, set[str]] = {}
        self._of_parts = 0  # Places of modules, which do not count towards the limit.
        # The object that a method belongs to.
        self._owner: Any = None
        root = found.root
        if isinstance(root, nn.Module) and not isinstance(root, Called):
            self._parts.append(("", root))
        else:
            called = root.function_of() if isinstance(root, Called) else root
            self._owner = _owner_of(called)
            self._values.append(_Met(Name("", _called_name(called)), called, 0, False))
            if isinstance(root, Called):
                self._parts.extend((k, m) for k, m in root._modules.items() if m is not None)
        named = self._read_code()
        if rules.whole:
            named = _Named(named.methods, None, named.classes, named.optimizers, None)
        self._code = named

    def look_around(self) -> None:
        """Look into the root, into hooks for all modules, and into what they reach."""
        self._walk()
        for kind in GLOBAL_HOOKS if self._rules.training else GLOBAL_FORWARD_HOOKS:
            self._held(Name("hook for all modules ", kind), getattr(nn_module, kind))
        self._walk()
        self._end()

    def look_at_classes(self, classes: Iterable[type]) -> None:
        """Look into what the code names of some classes instead."""
        self._parts.clear()
        self._values.clear()
        for cls in classes:
            self._named_of_class(cls, self._code.names, is_made=False)
        self._walk()
        self._end()

    def _end(self) -> None:
        # In one place for each file: that costs next to nothing at a call.
        for file, keys in sorted(self._of_pytorch.items()):
            if keys:
                place = FilePlace(Name("", file), sys.modules[file], sorted(keys))
                self._found.places.append(place)

    def _walk(self) -> None:
        while self._parts or self._values:
            if self._parts:
                self._module(*self._parts.popleft())
            else:
                self._value(self._values.popleft())

    def _read_code(self) -> _Named:
        """Find out which attributes the call's code names."""
        functions: list[Any] = []
        classes: dict[int, type] = {}
        optimizers: dict[int, type] = {}
        for module in [each for _, part in self._parts for each in part.modules()]:
            owner = _owner_of(module.function_of()) if isinstance(module, Called) else None
            if isinstance(owner, Optimizer):
                optimizers[id(type(owner))] = type(owner)
            module = stood_for(module)
            classes.setdefault(id(without_answers(type(module))), without_answers(type(module)))
            functions += _functions_on(module)
        functions += [met.value for met in self._values]
        if self._owner is not None:
            classes.setdefault(id(type(self._owner)), type(self._owner))
        methods, dynamic = closure(list(classes.values()), functions, entries=_ENTRIES)
        names = of_optimizers = None if dynamic else methods
        if optimizers:
            both = (*classes.values(), *optimizers.values())
            entries = (*_ENTRIES, "step", "zero_grad")
            known, dynamic = closure(both, functions, entries=entries)
            of_optimizers = None if dynamic else known
        return _Named(methods, names, frozenset(classes), frozenset(optimizers), of_optimizers)

    # Modules.

    def _module(self, path: str, module: nn.Module) -> None:
        module = stood_for(module)
        if not self._found.visit(module):
            return
        if isinstance(module, Called):
            function = module.function_of()
            self._values.append(_Met(Name("", _called_name(function)), function, 0))
            return
        cls = without_answers(type(module))
        self._found.typed.append(module)
        before_it = len(self._found.places)
        after = f" of {cls.__name__}{f' ({path})' if path else ''}"
        kinds = self._kinds_of_hooks(module)
        for kind in (*HOLDERS, *kinds):
            before = "" if kind in HOLDERS else "hook "
            self._held(Name(before, "", after), getattr(module, kind))
        place = AttributesPlace(
            Name("attribute ", "", after),
            module,
            self._code.names if id(cls) in self._code.classes else None,
            self._rules.hidden_of(module),
            frozenset((*HOLDERS, *kinds)),
        )
        self._add(place, 1, inside=True)
        self._class(cls, "forward")
        self._of_parts += len(self._found.places) - before_it
        for key, child in module._modules.items():
            if child is not None:
                self._parts.append((f"{path}.{key}" if path else str(key), child))

    def _kinds_of_hooks(self, module: nn.Module) -> tuple[str, ...]:
        """The dictionaries of hooks of a module that count."""
        if self._rules.whole:  # In its first run a library may add hooks of any kind.
            return tuple(k for k in _OF_MODULES if isinstance(vars(module).get(k), dict))
        if not self._rules.training:
            return FORWARD_HOOKS
        return () if module is self._found.root else (*FORWARD_HOOKS, *BACKWARD_HOOKS)

    def _held(self, name: Name, holder: Any) -> None:
        """Look into a module's dictionary of parameters, buffers, submodules or hooks."""
        if not holder:
            self._found.empty.append(holder)
            return
        kind = HolderPlace if isinstance(holder, dict) else ViewPlace
        place = kind(name, holder, self._rules.hidden_of(holder))
        self._found.places.append(place)
        if name.before and not self._rules.hooks:
            return
        for key, value in place.held.items():
            if value is not None and not isinstance(value, nn.Module):
                self._values.append(_Met(place.key_name(key), value))

    def _add(self, place: StatePlace, depth: int, *, inside: bool) -> None:
        """Add a place, and look into what it holds."""
        self._found.places.append(place)
        for key, value in place.held.items():
            if type(value) not in BARE and place.looked_into(key):
                self._values.append(_Met(place.key_name(key), value, depth + 1, inside))

    # Values, by kind.

    def _value(self, met: _Met) -> None:
        """Look into a value, whatever it is."""
        value = self._behind(met.value)
        if isinstance(value, nn.Module | torch.Tensor) and not met.inside:
            self._found.outermost.setdefault(id(value), (met.name, value))
        if isinstance(value, nn.Module):
            self._parts.append((f"{met.name.text}{met.name.after}", value))
            return
        if isinstance(value, types.ModuleType):
            self._namespace(met.name.text, value, self._code.names)
        elif isinstance(value, type):
            names = frozenset() if self._rules.whole else self._code.names
            self._named_of_class(value, names)
        if _is_without_state(value) or not self._found.visit(value):
            return
        if isinstance(value, torch.Tensor):
            self._tensor(met.beside(value))
        elif met.depth > _MAX_DEPTH or len(self._found.places) - self._of_parts > _MAX_PLACES:
            self._found.unread.append(f"{met.name} (beyond what is looked at)")
        else:
            look = next(look for kind, look in _LOOKS.items() if isinstance(value, kind))
            look(self, met.beside(value))

    def _behind(self, value: Any) -> Any:
        """What is looked into in a value's place."""
        while isinstance(value, StandIn) and not isinstance(value, nn.Module):
            value = original_of(value)
        if self._rules.training and isinstance(value, RunsStep):
            value = value._graphwright_step
        if isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            value = vars(value)["data"]
        return value

    def _method(self, met: _Met) -> None:
        method = met.value
        self._values.append(met.beside(method.__self__, met.name.renamed(_called_name(method))))
        self._values.append(met.beside(method.__func__))

    def _method_in_c(self, met: _Met) -> None:
        owner = met.value.__self__  # the container of a bound method, say
        if owner is not None:
            self._values.append(met.beside(owner))

    def _method_caller(self, met: _Met) -> None:
        self._values.append(met.beside(met.value.__reduce__()))  # It is made of these.

    def _partial(self, met: _Met) -> None:
        parts = PartsPlace(met.name, met.value, ("func", "args", "keywords"))
        self._add(parts, met.depth, inside=met.inside)
        self._container_attributes(met)

    def _fixed(self, met: _Met) -> None:
        """Look into a tuple or frozenset: its items cannot be replaced, but what these hold can."""
        for key, each in enumerate(itertools.islice(met.value, 10 * _MAX_ITEMS)):
            if type(each) not in BARE:
                self._values.append(met.below(met.name.item(key), each))
        self._container_attributes(met)

    def _items(self, met: _Met) -> None:
        """Look into a list, deque or set."""
        name, value = met.name, met.value
        if len(value) > _MAX_ITEMS and not self._rules.whole:
            self._found.unread.append(f"{name} ({len(value):,} items)")
            self._found.places.append(LengthPlace(name, value))
            del self._found.visits[id(value)]  # Another container in its place is a change.
        else:
            kind = SetPlace if isinstance(value, set) else SequencePlace
            self._add(kind(name, value), met.depth, inside=met.inside)
        self._container_attributes(met)

    def _dictionary(self, met: _Met) -> None:
        name, value = met.name, met.value
        place = DictionaryPlace(name, value, self._rules.hidden_of(value))
        self._add(place, met.depth, inside=met.inside)
        if isinstance(value, defaultdict):
            factory = PartsPlace(name, value, ("default_factory",))
            self._add(factory, met.depth, inside=met.inside)
        self._container_attributes(met)

    def _buffer(self, met: _Met) -> None:
        self._content(met.name, met.value)
        self._container_attributes(met)

    def _content(self, name: Name, value: Any) -> None:
        """Look at the bytes of an array."""
        kind = type(value)
        try:
            nbytes = (
                len(value) * value.itemsize if kind is array.array else memoryview(value).nbytes
            )
            if nbytes <= _MAX_BYTES and not has_objects(value):
                self._found.places.append(ContentPlace(name, value))
                return
        except (TypeError, ValueError, BufferError):  # Its content cannot be read.
            pass
        if has_objects(value):  # What draws there has to be put back after a run.
            found = [each for each in itertools.islice(value.flat, _MAX_ITEMS) if draws(each)]
            self._values += [_Met(name, each, 1, False) for each in found]
        self._found.unread.append(f"{name} (a {kind.__module__}.{kind.__qualname__})")
        del self._found.visits[id(value)]  # Another array in its place is a change.

    def _tensor(self, met: _Met) -> None:
        name, value = met.name, met.value
        wraps = hasattr(type(value), "__tensor_flatten__")
        own = type(value) not in PLAIN and not is_library(type(value))
        if own:
            self._class(type(value), None)
        if without_marks(value):
            # Of a wrapper and of a user's class, their own methods name them.
            names = None if wraps or own else self._code.names
            place = AttributesPlace(name, value, names, self._rules.hidden_of(value))
            self._add(place, 1, inside=met.inside)
        if type(value) in PLAIN or (without_memory(value) is None and not wraps):
            self._found.tensors.append((name, value))
        elif wraps:
            for inner in value.__tensor_flatten__()[0]:
                part = getattr(value, inner)
                self._values.append(_Met(name.attribute(inner), part, 1, met.inside))

    def _container_attributes(self, met: _Met) -> None:
        """Look into the attributes of a container or plain value whose class is a user's."""
        value, kind = met.value, type(met.value)
        if kind.__module__ in _OF_CONTAINERS or not has_attributes(value):
            return
        self._found.typed.append(value)
        if not is_library(kind):
            self._class(kind, None)
        if attributes_of(value) is not None:
            self._add(AttributesPlace(met.name, value), met.depth, inside=met.inside)
        if slots_of(kind):
            self._add(SlotsPlace(met.name, value), met.depth, inside=met.inside)

    def _object(self, met: _Met) -> None:
        name, value, kind = met.name, met.value, type(met.value)
        if is_array(value):
            self._buffer(met)
            return
        if members := members_of(value):
            self._add(PartsPlace(name, value, members), met.depth, inside=met.inside)
        if isinstance(value, Optimizer):
            self._found.optimizers.append(value)
        if is_machinery(value) and id(kind) not in self._code.optimizers:
            return
        if not is_library(kind):
            self._class(kind, None)
        elif callable(value):
            self._class(kind, "__call__")
        seen = bool(members)
        if attributes_of(value) is not None:
            seen = True
            self._found.typed.append(value)
            self._add(self._attributes_of(name, value), met.depth, inside=met.inside)
        if slots_of(kind):
            seen = True
            self._add(SlotsPlace(name, value), met.depth, inside=met.inside)
        if not seen and not is_immutable(value):
            self._found.unread.append(f"{name} (a {kind.__module__}.{kind.__qualname__})")

    def _attributes_of(self, name: Name, value: Any) -> AttributesPlace:
        """The attributes of an object that count."""
        names = self._code.names if value is self._owner else None
        hidden, root = self._rules.hidden_of(value), self._found.root
        if id(type(value)) in self._code.optimizers:
            names = self._code.of_optimizers
            hidden |= _OF_OPTIMIZERS
        if isinstance(root, Called) and not self._rules.whole:
            hidden |= root.unread_of(value)
        return AttributesPlace(name, value, names, hidden)

    # Functions and what they name.

    def _function(self, met: _Met) -> None:
        function = met.value
        inner = function.__dict__.get("_torchdynamo_orig_callable")
        if inner is not None and inner is not function:
            self._values.append(met.beside(inner))
            return
        if is_machinery_s(function):
            # A decorator such as torch.no_grad(), which wraps a function of the user.
            for _, wrapped in cells(function):
                if callable(wrapped) and not isinstance(wrapped, type):
                    self._values.append(met.beside(wrapped))
            return
        parts = PartsPlace(met.name, function, ("__code__", "__defaults__", "__kwdefaults__"))
        self._add(parts, met.depth, inside=met.inside)
        read = None if is_library(function) else read_by(function)
        if read is not None and function.__dict__:
            hidden = self._rules.hidden_of(function)
            attributes = AttributesPlace(met.name, function, self._code.names, hidden)
            if attributes.held:
                self._add(attributes, met.depth, inside=met.inside)
        if function.__closure__:
            self._closure(met, names_of(function.__code__) if read is None else read.names)
        self._globals(met, read)

    def _closure(self, met: _Met, names: frozenset[str]) -> None:
        """Look into what a function closes over, whose code has these names."""
        place = ClosurePlace(met.name, met.value)
        self._add(place, met.depth, inside=met.inside)
        for key, value in place.held.items():
            if isinstance(value, type | types.ModuleType):
                self._namespace(key, value, names)

    def _globals(self, met: _Met, read: Read | None) -> None:
        """Look into the globals that a function names.

        Args:
            met: the function, in whose file they are.
            read: what the function reads; None for a library's, of which only plain values,
                tensors, neural modules and random generators count.
        """
        code, found = met.value.__code__, met.value.__globals__
        if read is not None:
            self._read_elsewhere(met, read)
        names = []
        for name in global_names(code) if read is None else read.globals:
            value = found.get(name, MISSING)
            # Each function may name others of its attributes.
            if read is not None and isinstance(value, type | types.ModuleType):
                self._namespace(name, value, read.names)
            elif isinstance(value, types.ModuleType):
                self._functions_of_pytorch(value, names_of(code))
            if value is not MISSING and (read is not None or _counts_in_library(value)):
                names.append(name)
        names = self._unseen(found, names)
        if names:
            place = GlobalsPlace(found, names, stored_names(code))
            self._add(place, met.depth, inside=met.inside)

    def _read_elsewhere(self, met: _Met, read: Read) -> None:
        """Look into what a function reads of other files, and into operators that it calls."""
        for file in read.files:
            self._namespace(file.__name__, file, read.names)
        if "ops" in read.names:  # torch.ops.namespace.name, of an operator in Python.
            for key, definition in list(OPDEFS.items()):
                if read.names.issuperset(key.split("::")):
                    self._values.append(met.beside(definition, Name("", key)))
        code = met.value.__code__
        if read.computed is not None and code not in self._found.computed:
            self._found.computed[code] = read.computed
            self._found.unread.append(read.computed)

    def _unseen(self, owner: Any, keys: Iterable[str], before: str = "") -> list[str]:
        """Those keys of an owner that no place has yet; notes them."""
        found = [key for key in keys if (id(owner), before + key) not in self._seen]
        self._seen |= {(id(owner), before + key) for key in found}
        return found

    def _namespace(
        self,
        name: str,
        value: Any,
        names: frozenset[str] | None,
        around: tuple[types.ModuleType, ...] = (),
    ) -> None:
        """Look into what code names of a user's file or class: `settings.SCALE`.

        Args:
            name: of the file or class.
            value: the file or class.
            names: that the code names; None for all.
            around: packages that it was found in.
        """
        if isinstance(value, type):
            self._named_of_class(value, names)
            return
        self._functions_of_pytorch(value, names or frozenset())
        if value.__name__.partition(".")[0] in MACHINERY or is_library(value):
            return
        keys = [key for key in vars(value) if names is None or key in names]
        for key in keys:
            inner = vars(value)[key]
            if isinstance(inner, types.ModuleType) and inner not in (value, *around):
                self._namespace(f"{name}.{key}", inner, names or frozenset(), (*around, value))
        keys = [key for key in keys if _is_watched_part(getattr(value, key, None))]
        keys = self._unseen(value, keys)
        if keys:
            self._add(PartsPlace(Name("", name), value, keys), 1, inside=True)

    def _functions_of_pytorch(
        self,
        file: types.ModuleType,
        names: frozenset[str],
        around: tuple[types.ModuleType, ...] = (),
    ) -> None:
        """Note the functions that code names of a file of PyTorch's: `F.gelu` may be replaced.

        Args:
            file: the file.
            names: that the code names.
            around: files that it was found in.
        """
        if self._rules.whole or sys.modules.get(file.__name__) is not file:
            return
        package, *inner = file.__name__.split(".")
        if package != "torch" or file in around or any(n.startswith("_") for n in inner):
            return
        found = self._of_pytorch.setdefault(file.__name__, set())
        for key in (names & vars(file).keys()) - found:
            value = vars(file)[key]
            if isinstance(value, types.ModuleType):
                self._functions_of_pytorch(value, names, (*around, file))
            elif isinstance(value, types.FunctionType | types.BuiltinFunctionType):
                found.add(key)
                if isinstance(value, types.FunctionType) and value.__module__ in _CALL_OTHERS:
                    calls = names_of(value.__code__)
                    self._functions_of_pytorch(sys.modules[value.__module__], calls)

    # Classes.

    def _named_of_class(
        self, cls: type, names: frozenset[str] | None, *, is_made: bool = True
    ) -> None:
        """Look into what code names of a class that is a user's, and what its methods name of it.

        Args:
            cls: the class.
            names: that the code names; None for all.
            is_made: whether the code may make instances of it.
        """
        own = list(filter(_is_users, cls.__mro__))
        # Making an instance may count or register it, which is nothing that a call is about.
        is_made = is_made and not self._rules.whole and not issubclass(cls, nn.Module)
        made = _MAKE_INSTANCES if is_made else frozenset()
        members = _members(own, made)
        if type(cls) is not type and not is_library(type(cls)):  # It is read through this one, too.
            meta = [base for base in inspect.getmro(type(cls)) if base not in (type, object)]
            members = _members(meta, frozenset()) | members
            own += meta
        wanted = _with_what_they_name(_named_among(members, names, made), members)
        if issubclass(cls, torch.autograd.Function):
            wanted |= _with_what_they_name(members.keys() & _OF_FUNCTIONS, members)
        for base in own:
            keys = wanted - self._rules.hidden_of(base)
            self._part_of_class(base, [key for key in vars(base) if key in keys])

    def _class(self, cls: type, entry: str | None) -> None:
        """Look into what calls of its instances use of a class and its bases.

        Args:
            cls: the class.
            entry: the method that is called; None for any.
        """
        if not self._unseen(cls, [entry or "any method"], "calls of "):
            return
        inherited: dict[str, None] = {}
        for base in cls.__mro__:
            hidden = self._rules.hidden_of(base)
            keys = [key for key in self._used_of_class(base, entry) if key not in hidden]
            self._part_of_class(base, keys)
            if base is not cls:
                inherited |= dict.fromkeys(keys)
        # The class may come to override what it inherits.
        keys = [key for key in inherited if _is_stable(cls, key) and key not in vars(cls)]
        keys = self._unseen(cls, keys, "inherited ")
        if keys:
            self._found.places.append(InheritedPlace(Name("", cls.__qualname__), cls, keys))

    def _used_of_class(self, base: type, entry: str | None) -> list[str]:
        """What calls of an instance may use of what one class defines."""
        package = base.__module__.partition(".")[0]
        if base in (object, nn.Module) or package in ("builtins", "typing", "abc", "enum"):
            return []
        if package == "torch":
            return [entry] if entry is not None and entry in vars(base) else []
        if entry is None:
            return [] if is_library(base) else list(vars(base))
        return [key for key in vars(base) if key in self._code.methods]

    def _part_of_class(self, base: type, keys: Sequence[str]) -> None:
        own = not is_library(base)
        keys = self._unseen(base, [k for k in keys if _counts_in_class(k, vars(base)[k], own)])
        if not keys:
            return
        for key in keys:
            function = function_of(vars(base)[key])
            if function is None:
                continue
            if own:
                self._values.append(_Met(Name("", base.__qualname__), function))
            else:
                self._globals(_Met(Name("", base.__qualname__), function), None)
        place = ClassPartsPlace(Name("", base.__qualname__), base, keys)
        self._found.places.append(place)
        for key, value in place.held.items():
            code = isinstance(value, _WRAPPERS) or function_of(value) is not None
            if own and not code and type(value) not in BARE:
                self._values.append(_Met(place.key_name(key), value))


# How each kind of value is looked into; the first kind that fits counts.
_LOOKS: dict[Any, Callable[[_Walker, _Met], None]] = {
    SCALARS: _Walker._container_attributes,
    types.FunctionType: _Walker._function,
    types.MethodType: _Walker._method,
    (types.BuiltinFunctionType, types.MethodWrapperType): _Walker._method_in_c,
    functools.partial: _Walker._partial,
    (tuple, frozenset): _Walker._fixed,
    (list, deque, set): _Walker._items,
    (dict, types.MappingProxyType): _Walker._dictionary,
    BUFFERS: _Walker._buffer,
    operator.methodcaller: _Walker._method_caller,
    object: _Walker._object,
}


def _functions_on(module: nn.Module) -> list[Any]:
    """Hooks of a module, and other functions among its attributes."""
    kinds = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
    hooks = [hook for k in kinds for hook in dict(getattr(module, k, None) or ()).values()]
    return [*hooks, *(value for value in vars(module).values() if callable(value))]


def _is_without_state(value: Any) -> bool:
    """Whether a value has no state that a call could depend on, or none that can be seen."""
    if isinstance(value, enum.Enum) and is_library(type(value)):
        return True
    with_attributes = isinstance(value, SCALARS) and has_attributes(value)
    return isinstance(value, WITHOUT_STATE) and not with_attributes


def _is_users(cls: type) -> bool:
    """Whether a class is a user's, and its attributes may be set."""
    return not is_library(cls) and not cls.__flags__ & IMMUTABLE


def _named_among(
    members: Iterable[str], names: frozenset[str] | None, made: frozenset[str]
) -> set[str]:
    """Those members of a class that run if code names it, or makes an instance of it.

    Args:
        members: of the class.
        names: that the code names; None for all.
        made: those that run when an instance is made.
    """
    if names is None:
        return set(members)
    return {key for key in members if key in names or key in made or is_operator(key)}


def _with_what_they_name(wanted: set[str], members: Mapping[str, Any]) -> set[str]:
    """Some members of a class, and those that their code names."""
    found, waiting = set(wanted), list(wanted)
    while waiting:
        function = function_of(members[waiting.pop()])
        if function is not None:
            more = (members.keys() & names_of(function.__code__)) - found
            found |= more
            waiting += more
    return found


def _counts_in_class(key: str, value: Any, own: bool) -> bool:
    """Whether what a class defines is watched.

    Args:
        key: its name.
        value: what it is.
        own: whether the class is a user's.
    """
    if function_of(value) is not None:
        return True
    if key.startswith("__"):
        return False
    return isinstance(value, SCALARS) or (own and _is_watched_part(value))


def _counts_in_library(value: Any) -> bool:
    """Whether a global that a library's function names is watched."""
    return isinstance(value, (*SCALARS, torch.Tensor, nn.Module)) or draws(value)


def _members(classes: Iterable[type], made: frozenset[str]) -> dict[str, Any]:
    """What classes define, the first ones first; methods that make instances only if given."""
    found: dict[str, Any] = {}
    for each in classes:
        for key, value in vars(each).items():
            if key in made or key not in _MAKE_INSTANCES:
                found.setdefault(key, value)
    return found


def compare_walks(
    old: Dependencies, new: Dependencies, unsure: list[tuple[Name, Any, Any]]
) -> str | None:
    """How two walks from the same root differ, in words; None if they found the same.

    Args:
        old: the first walk.
        new: the later one.
        unsure: values that may differ from those that they replaced, as `difference` returns them.
    """
    pairs = list(unsure)
    for before, now in zip(old.places, new.places, strict=False):
        if type(before) is not type(now) or before.name != now.name:
            return f"{before.name} was replaced"
        change, more = difference(before, now.held, old.ignores)
        if change is not None:
            return change
        pairs += more
    for name, value, before_it in pairs:
        # An object that only one walk visited, or visited at another point, is another object.
        turns = new.visits.get(id(value)), old.visits.get(id(before_it))
        if turns[0] is None or turns[0] != turns[1]:
            return f"{name} was replaced"
    if len(old.places) != len(new.places) or len(old.tensors) != len(new.tensors):
        return "what its attributes hold changed"
    ignores = old.ignores or (lambda tensor: False)
    for (where, a), (_, b) in zip(old.tensors, new.tensors, strict=True):
        if a is not b and not (ignores(a) and ignores(b)):
            return f"{where} was replaced"
    return None


def _owner_of(called: Any) -> Any:
    """The object that a method belongs to, or that is called."""
    while isinstance(called, functools.partial):
        called = called.func
    if isinstance(called, types.MethodType):
        return called.__self__
    return None if isinstance(called, (types.FunctionType, nn.Module)) else called


def _is_stable(cls: type, key: Any) -> bool:
    """Whether a class returns the same object each time that an attribute is read."""
    if not isinstance(key, str) or key.startswith("__"):
        return False
    value = inspect.getattr_static(cls, key, MISSING)
    return isinstance(value, (*SCALARS, property, staticmethod, types.FunctionType))


def _is_watched_part(value: Any) -> bool:
    """Whether an attribute of a user's class or file is state or a function, and watched."""
    if function_of(value) is not None:
        return True
    if isinstance(value, types.ModuleType):
        return False
    plain = (*SCALARS, list, tuple, dict, set, deque, torch.Tensor, nn.Module, *BUFFERS)
    if isinstance(value, (*plain, *_WRAPPERS, type, types.BuiltinFunctionType)):
        return True
    if is_array(value) or draws(value) or is_opaque_iterator(value):
        return True
    return attributes_of(value) is not None and type(value).__module__ != "builtins"


def _called_name(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__
