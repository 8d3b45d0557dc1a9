"""Dependencies: what a call depends on beside its arguments.

`Dependencies` walks from a module or function to everything that its call can reach: modules,
tensors, plain values, and the lists, dictionaries, objects, closures and globals that hold them.
`watch.ModuleWatch` notices that one of them has changed; `graphs.python_state` and `snapshots` put
back what a run has changed.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import enum
import functools
import inspect
import itertools
import operator
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from .code import (
    MACHINERY,
    Read,
    closure,
    function_of,
    global_names,
    is_library,
    is_machinery,
    is_operator,
    names_of,
    package_of,
    read_by,
    stored_names,
)
from .host_generators import draws
from .introspection import StandIn
from .iterators import is_opaque_iterator
from .leaves import SCALARS, describe, without_memory

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOLDERS = ("_parameters", "_buffers", "_modules")
GLOBAL_FORWARD_HOOKS = tuple(f"_global{kind}" for kind in FORWARD_HOOKS)
GLOBAL_HOOKS = (*GLOBAL_FORWARD_HOOKS, *(f"_global{kind}" for kind in BACKWARD_HOOKS))
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
_OF_MODULES = tuple(name for name in vars(nn.Module()) if name not in _HOLDERS)
_MAX_DEPTH = 50
# How many objects and containers are looked into, those near the root first.
_MAX_SOURCES = 3_000
# A container with more items is watched by its length alone.
_MAX_ITEMS = 1_000
# The content of arrays with more bytes is not watched.
_MAX_BYTES = 8 * _MAX_ITEMS
_MISSING: Any = object()
# Classes of tensors that are watched themselves; of others the tensors inside are watched.
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
# Types without state that a call could depend on, or whose state cannot be seen.
_WITHOUT_STATE = (
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
# What a class holds in place of a function.
_WRAPPERS = (property, staticmethod, classmethod)
# Bound methods of C objects are made anew each time that they are read.
_COMPARABLE = (
    range,
    re.Pattern,
    types.CodeType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
)
# Values of just these types have no attributes.
_BARE = frozenset(SCALARS)
# What holds bytes, beside NumPy's arrays.
_OF_CTYPES = ctypes.c_int.__mro__[-2]
_BUFFERS = (bytearray, array.array, memoryview, _OF_CTYPES)
# Attributes of modules that count even if no code names them: a library's functions, which are
# given the module, may read them.
_ALWAYS = (
    *SCALARS,
    *(torch.Tensor, nn.Module, types.FunctionType, types.MethodType),
    *(tuple, frozenset, range, slice),
)
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
# CPython's flags of classes whose attributes cannot be set, and of those that are made at run time.
_IMMUTABLE, _HEAPTYPE = 1 << 8, 1 << 9
# Classes in C that hold nothing beside attributes, which are watched.
_WITHOUT_MEMBERS = (object, types.SimpleNamespace)
# What classes in C hold in members of their own, by name.
_MEMBERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset", "fdel")),
    (types.CellType, ("cell_contents",)),
)
# Members of exceptions that each raise writes to.
_OF_A_RAISE = frozenset(("__traceback__", "__context__", "__suppress_context__", "__dict__"))


class RunsStep:
    """Runs a training step: a step around it depends on what that depends on."""

    __slots__ = ()

    @property
    def _graphwright_step(self) -> Callable[..., Any]:
        raise NotImplementedError


class Name(NamedTuple):
    """A readable name of a place: an attribute, variable or item, and what it belongs to."""

    before: str
    text: str
    after: str = ""

    def attribute(self, key: str) -> Name:
        """The name of an attribute of what is in this place."""
        return self._replace(text=f"{self.text}.{key}")

    def item(self, key: Any) -> Name:
        """The name of an item of the container in this place."""
        shown = repr(key) if isinstance(key, SCALARS) else type(key).__name__
        return self._replace(text=f"{self.text}[{shown:.40}]")

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


class SetSource(Source):
    """The items of a set."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {value: value for value in tuple(self.owner)}

    def put_back(self) -> None:
        if self.owner != self.held.keys():
            set.clear(self.owner)
            set.update(self.owner, self.held)


class LengthSource(Source):
    """A container with so many items that only its length is watched."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {"its length": len(self.owner)}


class ContentSource(Source):
    """The bytes of an array, which change in place."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        owner = self.owner
        if isinstance(owner, bytearray):
            return {"its content": bytes(owner)}
        kind: tuple[Any, ...] = ()
        if isinstance(owner, _OF_CTYPES):
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
        if isinstance(owner, _OF_CTYPES):
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
        for key, value in _without_marks(self.owner).items():
            if key in self._holders:
                now[key] = value
                continue
            if (is_module and key in _IGNORED) or key in self._hidden:
                continue
            named = names is None or key in names
            if not named and not (is_module and isinstance(value, _ALWAYS)):
                continue
            if key == "forward" and isinstance(value, StandIn):
                value = value._graphwright_stands_for
                if getattr(value, "__func__", None) is getattr(type(self.owner), "forward", None):
                    continue
            now[key] = value
        return now

    def put_back(self) -> None:
        attributes = _attributes_of(self.owner)
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
        return self.name._replace(text=str(key))

    def looked_into(self, key: Any) -> bool:
        return key not in self._holders


class SlotsSource(AttributesSource):
    """Attributes of an object that are in slots."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        found = {}
        for key in _slots_of(type(self.owner)):
            with contextlib.suppress(Exception):  # It is not set.
                found[key] = object.__getattribute__(self.owner, key)
        return found

    def put_back(self) -> None:
        now = self.read()
        for key in now.keys() - self.held.keys():
            object.__delattr__(self.owner, key)
        for key, value in self.held.items():
            if now.get(key, _MISSING) is not value:
                object.__setattr__(self.owner, key, value)


class ClosureSource(Source):
    """The variables that a function closes over."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        found = {}
        cells = zip(self.owner.__code__.co_freevars, self.owner.__closure__ or (), strict=True)
        for key, cell in cells:
            try:
                found[key] = cell.cell_contents
            except ValueError:  # The cell is still empty.
                continue
        return found

    def put_back(self) -> None:
        now = self.read()
        cells = zip(self.owner.__code__.co_freevars, self.owner.__closure__ or (), strict=True)
        for key, cell in cells:
            if key in self.held and now.get(key, _MISSING) is not self.held[key]:
                cell.cell_contents = self.held[key]
            elif key in now and key not in self.held:
                del cell.cell_contents

    def key_name(self, key: Any) -> Name:
        return Name("the variable ", str(key))


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
            elif self.owner.get(key, _MISSING) is not self.held[key]:
                self.owner[key] = self.held[key]

    def key_name(self, key: Any) -> Name:
        return Name("the variable ", str(key))


class PartsSource(Source):
    """Some attributes of a function, class or file; of these only data is put back."""

    __slots__ = ("keys",)

    def __init__(self, name: Name, owner: Any, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(name, owner)

    def read(self) -> dict[Any, Any]:
        return {key: getattr(self.owner, key, _MISSING) for key in self.keys}

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
        sources: the places that hold values, in the order in which they were found.
        visits: for each object that was looked into, by identity, its place in the order of visits.
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
        self._hidden = {} if hidden is None else hidden
        while isinstance(root, StandIn):
            root = root._graphwright_stands_for
        self.root = root
        self.sources: list[Source] = []
        self.visits: dict[Any, int] = {}
        self.tensors: list[tuple[Name, torch.Tensor]] = []
        self.empty: list[Any] = []
        self.typed: list[Any] = []
        self.unread: list[str] = []
        self.computed: dict[types.CodeType, str] = {}
        self.optimizers: list[Optimizer] = []
        self.outermost: dict[int, tuple[Name, Any]] = {}
        self.ignores = root.ignores if isinstance(root, Called) else None
        self._training = training
        self._whole = whole
        self._hooks = hooks
        self._alive: list[Any] = []  # So that no identity is reused.
        self._shared: set[int] = set()  # Identities of what was met more than once.
        self._modules: deque[tuple[str, nn.Module]] = deque()
        self._values: deque[tuple[Name, Any, int, bool]] = deque()
        self._seen_globals: set[tuple[int, str]] = set()
        # Functions of PyTorch's that code names, by the names of their files.
        self._of_pytorch: dict[str, set[str]] = {}
        # Names in the call's code, if they tell which attributes it reads; else None.
        self._names: frozenset[str] | None = None
        # Classes of optimizers whose step is among what is called, and the names in their code.
        self._optimizers: set[int] = set()
        self._names_of_optimizers: frozenset[str] | None = None
        # The object that a method belongs to.
        self._owner: Any = None
        self._classes: set[int] = set()
        self._of_modules = 0  # Sources of modules, which do not count towards the limit.
        self._reachable: frozenset[str] = frozenset(_ENTRIES)
        if isinstance(root, nn.Module) and not isinstance(root, Called):
            self._modules.append(("", root))
        else:
            called = root.function_of() if isinstance(root, Called) else root
            self._owner = _owner_of(called)
            self._values.append((Name("", _called_name(called)), called, 0, False))
            if isinstance(root, Called):
                self._modules.extend((k, m) for k, m in root._modules.items() if m is not None)
        self._read_code()
        if whole:
            self._names = self._names_of_optimizers = None
        if given:
            self._modules.clear()
            self._values.clear()
            for cls in given:
                self._named_of_class(cls, self._names, is_made=False)
            self._walk()
        else:
            self._walk()
            for kind in GLOBAL_HOOKS if training else GLOBAL_FORWARD_HOOKS:
                self._held(Name("hook for all modules ", kind), getattr(nn_module, kind))
            self._walk()
        # In one source for each file: that costs next to nothing at a call.
        for file, found in sorted(self._of_pytorch.items()):
            if found:
                self.sources.append(FileSource(Name("", file), sys.modules[file], sorted(found)))

    @property
    def objects(self) -> list[Any]:
        """Everything that was looked into."""
        return list(self._alive)

    def put_back(self) -> None:
        """Restore what every source held."""
        for source in self.sources:
            with contextlib.suppress(Exception):  # If one refuses, the others are still restored.
                source.put_back()
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
        exchanged: dict[int, tuple[list[Any], list[Any]]] = {}
        if not all(self._match(new, old, exchanged) for _, new, old in pairs):
            return False
        if len({id(new) for new, _ in exchanged.values()}) < len(exchanged):
            return False  # One list in several places, where there were several.
        for source in self.sources:
            for key, value in source.held.items():
                if (found := exchanged.get(id(value))) is not None:
                    source.held[key] = found[0]
            if (found := exchanged.get(id(source.owner))) is not None:
                source.owner = found[0]
        for position, value in enumerate(self._alive):
            if (found := exchanged.get(id(value))) is not None:
                self.visits[id(found[0])] = self.visits.pop(id(value))
                self._alive[position] = found[0]
        return True

    def _match(self, new: Any, old: Any, found: dict[int, tuple[list[Any], list[Any]]]) -> bool:
        """Whether a list holds what another one held when it was found; notes both."""
        if type(new) is not list or type(old) is not list or len(new) != len(old):
            return False
        if id(old) in self._shared or id(old) not in self.visits or id(new) in self.visits:
            return False
        source = next((source for source in self.sources if source.owner is old), None)
        if type(source) is not SequenceSource or id(old) in found:
            return False
        found[id(old)] = new, old
        return all(
            a is b or self._match(a, b, found)
            for a, b in zip(new, source.held.values(), strict=True)
        )

    # The walk: modules first, then what they hold, near things before far ones.

    def _walk(self) -> None:
        while self._modules or self._values:
            if self._modules:
                self._module(*self._modules.popleft())
            else:
                self._value(*self._values.popleft())

    def _read_code(self) -> None:
        """Find out which attributes the call's code names."""
        functions: list[Any] = []
        classes: dict[int, type] = {}
        optimizers: dict[int, type] = {}
        for _, root in self._modules:
            for module in root.modules():
                owner = _owner_of(module.function_of()) if isinstance(module, Called) else None
                if isinstance(owner, Optimizer):
                    optimizers[id(type(owner))] = type(owner)
                while isinstance(module, StandIn):
                    module = module._graphwright_stands_for
                classes.setdefault(id(type(module)), type(module))
                kinds = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
                hooks = [h for k in kinds for h in dict(getattr(module, k, None) or ()).values()]
                functions += [*hooks, *(v for v in vars(module).values() if callable(v))]
        functions += [value for _, value, _, _ in self._values]
        if self._owner is not None:
            classes.setdefault(id(type(self._owner)), type(self._owner))
        self._classes = set(classes)
        names, dynamic = closure(list(classes.values()), functions, entries=_ENTRIES)
        self._reachable = names
        self._names = None if dynamic else names
        if optimizers:
            self._optimizers = set(optimizers)
            both = (*classes.values(), *optimizers.values())
            names, dynamic = closure(both, functions, entries=(*_ENTRIES, "step", "zero_grad"))
            self._names_of_optimizers = None if dynamic else names

    def _module(self, path: str, module: nn.Module) -> None:
        while isinstance(module, StandIn):
            module = module._graphwright_stands_for
        if not self._visited(module):
            return
        if isinstance(module, Called):
            function = module.function_of()
            self._values.append((Name("", _called_name(function)), function, 0, True))
            return
        self.typed.append(module)
        before_it = len(self.sources)
        after = f" of {type(module).__name__}{f' ({path})' if path else ''}"
        kinds: tuple[str, ...] = ()
        if not self._training or module is not self.root:
            kinds = (*FORWARD_HOOKS, *BACKWARD_HOOKS) if self._training else FORWARD_HOOKS
        if self._whole:  # In its first run a library may add hooks of any kind.
            kinds = tuple(k for k in _OF_MODULES if isinstance(vars(module).get(k), dict))
        for kind in (*_HOLDERS, *kinds):
            before = "" if kind in _HOLDERS else "hook "
            self._held(Name(before, "", after), getattr(module, kind))
        names = self._names if id(type(module)) in self._classes else None
        holders = frozenset((*_HOLDERS, *kinds))
        source = AttributesSource(
            Name("attribute ", "", after), module, names, self._hidden_of(module), holders
        )
        self._add(source, 1, inside=True)
        self._class(type(module), "forward")
        self._of_modules += len(self.sources) - before_it
        for key, child in module._modules.items():
            if child is not None:
                self._modules.append((f"{path}.{key}" if path else str(key), child))

    def _held(self, name: Name, holder: Any) -> None:
        """Look into a module's dictionary of parameters, buffers, submodules or hooks."""
        if not holder:
            self.empty.append(holder)
            return
        kind = HolderSource if isinstance(holder, dict) else ViewSource
        source = kind(name, holder, self._hidden_of(holder))
        self.sources.append(source)
        if name.before and not self._hooks:
            return
        for key, value in source.held.items():
            if value is not None and not isinstance(value, nn.Module):
                self._values.append((source.key_name(key), value, 1, True))

    def _hidden_of(self, owner: Any) -> frozenset[Any]:
        return self._hidden.get(id(owner), frozenset())

    def _visited(self, value: Any) -> bool:
        """Whether something is visited for the first time; notes the visit."""
        if id(value) in self.visits:
            self._shared.add(id(value))
            return False
        self.visits[id(value)] = len(self.visits)
        self._alive.append(value)
        return True

    def _add(self, source: Source, depth: int, *, inside: bool) -> None:
        """Add a source, and look into what it holds."""
        self.sources.append(source)
        for key, value in source.held.items():
            if type(value) not in _BARE and source.looked_into(key):
                self._values.append((source.key_name(key), value, depth + 1, inside))

    def _value(self, name: Name, value: Any, depth: int, inside: bool) -> None:
        """Look into a value, whatever it is."""
        while isinstance(value, StandIn) and not isinstance(value, nn.Module):
            value = value._graphwright_stands_for
        if self._training and isinstance(value, RunsStep):
            value = value._graphwright_step
        if isinstance(value, nn.Module | torch.Tensor) and not inside:
            self.outermost.setdefault(id(value), (name, value))
        if isinstance(value, nn.Module):
            self._modules.append((f"{name.text}{name.after}", value))
            return
        if isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            value = vars(value)["data"]
        if isinstance(value, types.ModuleType):
            self._namespace(name.text, value, self._names)
        elif isinstance(value, type):
            self._named_of_class(value, frozenset() if self._whole else self._names)
        with_attributes = isinstance(value, SCALARS) and _has_attributes(value)
        if isinstance(value, _WITHOUT_STATE) and not with_attributes:
            return
        if isinstance(value, enum.Enum) and is_library(type(value)):
            return
        if not self._visited(value):
            return
        if isinstance(value, torch.Tensor):
            self._tensor(name, value, inside)
        elif depth > _MAX_DEPTH or len(self.sources) - self._of_modules > _MAX_SOURCES:
            self.unread.append(f"{name} (beyond what is looked at)")
        elif with_attributes:
            self._container_attributes(name, value, depth, inside)
        elif isinstance(value, types.FunctionType):
            self._function(name, value, depth, inside)
        elif isinstance(value, types.MethodType):
            of = name._replace(text=_called_name(value))
            self._values.append((of, value.__self__, depth, inside))
            self._values.append((name, value.__func__, depth, inside))
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = value.__self__  # the container of a bound method, say
            if owner is not None:
                self._values.append((name, owner, depth, inside))
        elif isinstance(value, functools.partial):
            self._add(PartsSource(name, value, ("func", "args", "keywords")), depth, inside=inside)
            self._container_attributes(name, value, depth, inside)
        elif isinstance(value, tuple | frozenset):
            # Its items cannot be replaced, but what these hold can.
            for key, each in enumerate(itertools.islice(value, 10 * _MAX_ITEMS)):
                if type(each) not in _BARE:
                    self._values.append((name.item(key), each, depth + 1, inside))
            self._container_attributes(name, value, depth, inside)
        elif isinstance(value, list | deque | set):
            if len(value) > _MAX_ITEMS and not self._whole:
                self.unread.append(f"{name} ({len(value):,} items)")
                self.sources.append(LengthSource(name, value))
                del self.visits[id(value)]  # Another container in its place is a change.
            else:
                kind = SetSource if isinstance(value, set) else SequenceSource
                self._add(kind(name, value), depth, inside=inside)
            self._container_attributes(name, value, depth, inside)
        elif isinstance(value, dict | types.MappingProxyType):
            source = DictionarySource(name, value, self._hidden_of(value))
            self._add(source, depth, inside=inside)
            if isinstance(value, defaultdict):
                self._add(PartsSource(name, value, ("default_factory",)), depth, inside=inside)
            self._container_attributes(name, value, depth, inside)
        elif isinstance(value, _BUFFERS) or _is_array(value):
            self._content(name, value)
            self._container_attributes(name, value, depth, inside)
        else:
            self._object(name, value, depth, inside)

    def _content(self, name: Name, value: Any) -> None:
        """Look at the bytes of an array."""
        kind = type(value)
        try:
            nbytes = (
                len(value) * value.itemsize if kind is array.array else memoryview(value).nbytes
            )
            if nbytes <= _MAX_BYTES and not _has_objects(value):
                self.sources.append(ContentSource(name, value))
                return
        except (TypeError, ValueError, BufferError):  # Its content cannot be read.
            pass
        if _has_objects(value):  # What draws there has to be put back after a run.
            found = [each for each in itertools.islice(value.flat, _MAX_ITEMS) if draws(each)]
            self._values += [(name, each, 1, False) for each in found]
        self.unread.append(f"{name} (a {kind.__module__}.{kind.__qualname__})")
        del self.visits[id(value)]  # Another array in its place is a change.

    def _tensor(self, name: Name, value: torch.Tensor, inside: bool) -> None:
        wraps = hasattr(type(value), "__tensor_flatten__")
        own = type(value) not in PLAIN and not is_library(type(value))
        if own:
            self._class(type(value), None)
        if _without_marks(value):
            # Of a wrapper and of a user's class, their own methods name them.
            names = None if wraps or own else self._names
            source = AttributesSource(name, value, names, self._hidden_of(value))
            self._add(source, 1, inside=inside)
        if type(value) in PLAIN or (without_memory(value) is None and not wraps):
            self.tensors.append((name, value))
        elif wraps:
            flatten: Any = getattr(value, "__tensor_flatten__")  # noqa: B009  # unknown to mypy
            for inner in flatten()[0]:
                self._values.append((name.attribute(inner), getattr(value, inner), 1, inside))

    def _container_attributes(self, name: Name, value: Any, depth: int, inside: bool) -> None:
        """Look into the attributes of a container or plain value whose class is a user's."""
        kind = type(value)
        if kind.__module__ in ("builtins", "collections", "functools", "array", "numpy"):
            return
        if not _has_attributes(value):
            return
        self.typed.append(value)
        if not is_library(kind):
            self._class(kind, None)
        if _attributes_of(value) is not None:
            self._add(AttributesSource(name, value), depth, inside=inside)
        if _slots_of(kind):
            self._add(SlotsSource(name, value), depth, inside=inside)

    def _object(self, name: Name, value: Any, depth: int, inside: bool) -> None:
        kind: Any = type(value)
        if isinstance(value, operator.methodcaller):  # It is made of these.
            self._values.append((name, value.__reduce__(), depth, inside))
            return
        if members := _members_of(value):
            self._add(PartsSource(name, value, members), depth, inside=inside)
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
        steps = id(kind) in self._optimizers
        if is_machinery(value) and not steps:
            return
        if not is_library(kind):
            self._class(kind, None)
        elif callable(value):
            self._class(kind, "__call__")
        names = self._names if value is self._owner else None
        if steps:
            names = self._names_of_optimizers
        seen = bool(members)
        if _attributes_of(value) is not None:
            seen = True
            self.typed.append(value)
            hidden = self._hidden_of(value)
            if steps:
                hidden |= _OF_OPTIMIZERS
            if isinstance(self.root, Called) and not self._whole:
                hidden |= self.root.unread_of(value)
            source = AttributesSource(name, value, names, hidden)
            self._add(source, depth, inside=inside)
        if _slots_of(kind):
            seen = True
            self._add(SlotsSource(name, value), depth, inside=inside)
        if not seen and not _is_immutable(value):
            self.unread.append(f"{name} (a {kind.__module__}.{kind.__qualname__})")

    def _function(self, name: Name, function: types.FunctionType, depth: int, inside: bool) -> None:
        inner = function.__dict__.get("_torchdynamo_orig_callable")
        if inner is not None and inner is not function:
            self._values.append((name, inner, depth, inside))
            return
        if package_of(function) in MACHINERY:
            # A decorator such as torch.no_grad(), which wraps a function of the user.
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):
                    wrapped = cell.cell_contents
                    if callable(wrapped) and not isinstance(wrapped, type):
                        self._values.append((name, wrapped, depth, inside))
            return
        parts = PartsSource(name, function, ("__code__", "__defaults__", "__kwdefaults__"))
        self._add(parts, depth, inside=inside)
        read = None if is_library(function) else read_by(function)
        if read is not None and function.__dict__:
            hidden = self._hidden_of(function)
            attributes = AttributesSource(name, function, self._names, hidden)
            if attributes.held:
                self._add(attributes, depth, inside=inside)
        if function.__closure__:
            cells = ClosureSource(name, function)
            self._add(cells, depth, inside=inside)
            names = names_of(function.__code__) if read is None else read.names
            for key, value in cells.held.items():
                if isinstance(value, type | types.ModuleType):
                    self._namespace(key, value, names)
        self._globals(function, depth, inside, read)

    def _globals(
        self, function: types.FunctionType, depth: int, inside: bool, read: Read | None
    ) -> None:
        """Look into the globals that a function names.

        Args:
            function: in whose file they are.
            depth: of what they hold.
            inside: whether a module holds it.
            read: what the function reads; None for a library's, of which only plain values,
                tensors, neural modules and random generators count.
        """
        code, found = function.__code__, function.__globals__
        if read is not None:
            for file in read.files:
                self._namespace(file.__name__, file, read.names)
            if "ops" in read.names:  # torch.ops.namespace.name, of an operator in Python.
                for key, definition in list(OPDEFS.items()):
                    if read.names.issuperset(key.split("::")):
                        self._values.append((Name("", key), definition, depth, inside))
            if read.computed is not None and code not in self.computed:
                self.computed[code] = read.computed
                self.unread.append(read.computed)
        plain = (*SCALARS, torch.Tensor, nn.Module)
        names = []
        for name in global_names(code) if read is None else read.globals:
            value = found.get(name, _MISSING)
            # Each function may name others of its attributes.
            if read is not None and isinstance(value, type | types.ModuleType):
                self._namespace(name, value, read.names)
            elif isinstance(value, types.ModuleType):
                self._functions_of_pytorch(value, names_of(code))
            if value is _MISSING or (id(found), name) in self._seen_globals:
                continue
            if read is not None or isinstance(value, plain) or draws(value):
                self._seen_globals.add((id(found), name))
                names.append(name)
        if names:
            self._add(GlobalsSource(found, names, stored_names(code)), depth, inside=inside)

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
        keys = [key for key in keys if (id(value), key) not in self._seen_globals]
        keys = [key for key in keys if _is_watched_part(getattr(value, key, None))]
        if keys:
            self._seen_globals |= {(id(value), key) for key in keys}
            self._add(PartsSource(Name("", name), value, keys), 1, inside=True)

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
        if self._whole or sys.modules.get(file.__name__) is not file:
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

    def _named_of_class(
        self, cls: type, names: frozenset[str] | None, *, is_made: bool = True
    ) -> None:
        """Look into what code names of a class that is a user's, and what its methods name of it.

        Args:
            cls: the class.
            names: that the code names; None for all.
            is_made: whether the code may make instances of it.
        """
        own = [base for base in cls.__mro__ if base is not object and not is_library(base)]
        own = [base for base in own if not base.__flags__ & _IMMUTABLE]
        # Making an instance may count or register it, which is nothing that a call is about.
        is_made = is_made and not self._whole and not issubclass(cls, nn.Module)
        made = _MAKE_INSTANCES if is_made else frozenset()
        members = _members(own, made)
        if type(cls) is not type and not is_library(type(cls)):  # It is read through this one, too.
            meta = [base for base in inspect.getmro(type(cls)) if base not in (type, object)]
            members = _members(meta, frozenset()) | members
            own += meta
        wanted = {k for k in members if names is None or k in names or k in made or is_operator(k)}
        if issubclass(cls, torch.autograd.Function):
            wanted |= members.keys() & _OF_FUNCTIONS
        waiting = list(wanted)
        while waiting:
            function = function_of(members[waiting.pop()])
            if function is not None:
                more = (members.keys() & names_of(function.__code__)) - wanted
                wanted |= more
                waiting += more
        for base in own:
            keys = wanted - self._hidden_of(base)
            self._part_of_class(base, [key for key in vars(base) if key in keys])

    def _class(self, cls: type, entry: str | None) -> None:
        """Look into what calls of its instances use of a class and its bases.

        Args:
            cls: the class.
            entry: the method that is called; None for any.
        """
        inherited: dict[str, None] = {}
        for base in cls.__mro__:
            package = base.__module__.partition(".")[0]
            if base in (object, nn.Module) or package in ("builtins", "typing", "abc", "enum"):
                continue
            keys: list[str]
            if package == "torch":
                keys = [entry] if entry is not None and entry in vars(base) else []
            elif entry is None:
                keys = [] if is_library(base) else list(vars(base))
            else:
                keys = [key for key in vars(base) if key in self._reachable]
            keys = [key for key in keys if key not in self._hidden_of(base)]
            self._part_of_class(base, keys)
            if base is not cls:
                inherited |= dict.fromkeys(keys)
        # The class may come to override what it inherits.
        stable = [key for key in inherited if _is_stable(cls, key)]
        keys = [key for key in stable if key not in vars(cls)]
        keys = [key for key in keys if (id(cls), f"inherited {key}") not in self._seen_globals]
        if keys:
            self._seen_globals |= {(id(cls), f"inherited {key}") for key in keys}
            self.sources.append(InheritedSource(Name("", cls.__qualname__), cls, keys))

    def _part_of_class(self, base: type, keys: Sequence[str]) -> None:
        own, watched = not is_library(base), []
        for key in keys:
            value = vars(base)[key]
            function = function_of(value)
            if function is None and not (
                isinstance(value, SCALARS) or (own and _is_watched_part(value))
            ):
                continue
            if key.startswith("__") and function is None:
                continue
            if (id(base), key) in self._seen_globals:
                continue
            self._seen_globals.add((id(base), key))
            watched.append(key)
            if function is not None and own:
                self._values.append((Name("", base.__qualname__), function, 1, True))
            elif function is not None:
                self._globals(function, 1, True, None)
        if watched:
            source = ClassPartsSource(Name("", base.__qualname__), base, watched)
            self.sources.append(source)
            for key, value in source.held.items():
                code = isinstance(value, _WRAPPERS) or function_of(value) is not None
                if own and not code and type(value) not in _BARE:
                    self._values.append((source.key_name(key), value, 1, True))


class ClassPartsSource(PartsSource):
    """Methods and attributes that a class itself defines."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        held = vars(self.owner)
        return {key: held.get(key, _MISSING) for key in self.keys}


class FileSource(ClassPartsSource):
    """Functions in a file of PyTorch's."""

    __slots__ = ()


class InheritedSource(PartsSource):
    """What a class inherits, and may come to override."""

    __slots__ = ()

    def put_back(self) -> None:
        for key in self.keys:
            if key in vars(self.owner) and _is_data(vars(self.owner)[key]):
                type.__delattr__(self.owner, key)


class HolderSource(DictionarySource):
    """Parameters, buffers, submodules or hooks of a module."""

    __slots__ = ()

    def key_name(self, key: Any) -> Name:
        return self.name._replace(text=str(key))


class ViewSource(HolderSource):
    """Parameters, buffers, submodules or hooks of a ScriptModule."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(self.owner.items())

    def put_back(self) -> None:
        pass


def _members(classes: Iterable[type], made: frozenset[str]) -> dict[str, Any]:
    """What classes define, the first ones first; methods that make instances only if given."""
    found: dict[str, Any] = {}
    for each in classes:
        for key, value in vars(each).items():
            if key in made or key not in _MAKE_INSTANCES:
                found.setdefault(key, value)
    return found


def _is_data(value: Any) -> bool:
    """Whether a value is plain, a tensor or a container, and no code."""
    return isinstance(value, (*SCALARS, torch.Tensor, list, dict, tuple, set))


def same(new: Any, old: Any) -> bool | None:
    """Whether a value equals the one that it replaced; None if only another walk can tell."""
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    if isinstance(new, SCALARS):
        alike = describe(new) == describe(old)
        if alike and type(new) not in _BARE and _has_attributes(new):
            return None if not isinstance(new, enum.Enum) else False
        return alike
    if isinstance(new, frozenset):  # Code can see the order.
        new, old = tuple(new), tuple(old)
    if isinstance(new, slice):
        return same((new.start, new.stop, new.step), (old.start, old.stop, old.step))
    if isinstance(new, _COMPARABLE):
        return _equal(new, old)
    if isinstance(new, types.MethodType):
        return new.__func__ is old.__func__ and new.__self__ is old.__self__
    if isinstance(new, (*_WITHOUT_STATE, torch.Tensor, nn.Module, types.FunctionType)):
        return False
    if isinstance(new, tuple):
        if len(new) != len(old):
            return False
        more = (None,) if type(new) is not tuple and _has_attributes(new) else ()
        return _combined((*(same(a, b) for a, b in zip(new, old, strict=True)), *more))
    if isinstance(new, functools.partial):
        return _combined((same(new.func, old.func), same(new.args, old.args), None))
    if isinstance(new, deque) and new.maxlen != old.maxlen:
        return False
    if isinstance(new, (list, dict, set, deque, *_BUFFERS)) or _is_array(new):
        return None
    if is_machinery(new):
        return False
    if isinstance(new, BaseException) or (_members_of(new) and type(new).__module__ == "builtins"):
        return None
    if _base_in_c(type(new)) not in _WITHOUT_MEMBERS and not _is_immutable(new):
        return False  # It may hold something else that no walk can see.
    if _attributes_of(new) is not None or _slots_of(type(new)):
        return None
    # A number of NumPy's: 0.0 and -0.0 are equal, and NaN is not.
    return _is_immutable(new) and new.dtype == old.dtype and new.tobytes() == old.tobytes()


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # What cannot be compared counts as different.
        return False


def _combined(verdicts: Iterable[bool | None]) -> bool | None:
    found = list(verdicts)
    return False if False in found else None if None in found else True


def difference(
    source: Source, now: Mapping[Any, Any], ignores: Callable[[Any], bool] | None = None
) -> tuple[str | None, list[tuple[Name, Any, Any]]]:
    """How a source differs from what it held, in words, and what another walk has to compare.

    Equal values in other objects are noted as held from now on.
    """
    held = source.held
    if len(now) != len(held) or any(
        not (a is b or (type(a) is type(b) and _equal(a, b)))
        for a, b in zip(now, held, strict=True)
    ):
        return _added_or_removed(source, now), []
    unsure = []
    for (key, new), (mine, old) in zip(list(now.items()), list(held.items()), strict=True):
        if new is old:
            continue
        verdict = same(new, old)
        if verdict is False and ignores is not None and ignores(new) and ignores(old):
            verdict = True
        if verdict is False:
            return _replaced(source.key_name(key), new, old), []
        if verdict is None:
            unsure.append((source.key_name(key), new, old))
        else:
            held[mine] = new
    return None, unsure


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
    for before, now in zip(old.sources, new.sources, strict=False):
        if type(before) is not type(now) or before.name != now.name:
            return f"{before.name} was replaced"
        change, more = difference(before, now.held, old.ignores)
        if change is not None:
            return change
        pairs += more
    for name, value, before_it in pairs:
        # An object that only one walk visited, or visited at another point, is another object.
        places = new.visits.get(id(value)), old.visits.get(id(before_it))
        if places[0] is None or places[0] != places[1]:
            return f"{name} was replaced"
    if len(old.sources) != len(new.sources) or len(old.tensors) != len(new.tensors):
        return "what its attributes hold changed"
    ignores = old.ignores or (lambda tensor: False)
    for (where, a), (_, b) in zip(old.tensors, new.tensors, strict=True):
        if a is not b and not (ignores(a) and ignores(b)):
            return f"{where} was replaced"
    return None


def _added_or_removed(source: Source, now: Mapping[Any, Any]) -> str:
    added = [key for key in now if key not in source.held]
    gone = [key for key in source.held if key not in now]
    if isinstance(source, HolderSource) and source.name.before:
        return f"a forward hook was added or removed{source.name.after}"
    for keys, what in ((added, "was added"), (gone, "was removed")):
        if keys:
            return f"{source.key_name(keys[0])} {what}"
    return f"the order of {source.name} changed"


def _replaced(name: Name, new: Any, old: Any) -> str:
    if isinstance(old, SCALARS) and isinstance(new, SCALARS):
        return f"{name} changed from {old!r:.80} to {new!r:.80}"
    return f"{name} was replaced"


def _slots_of(cls: type) -> tuple[str, ...]:
    """The slots of a class and of those that it derives from, as attributes are called."""
    found = []
    for each in cls.__mro__:
        slots = vars(each).get("__slots__", ()) if each.__module__ != "builtins" else ()
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if private else name)
    return tuple(found)


def _base_in_c(cls: type) -> type:
    """The class in C that a class is made of; object, if it adds nothing to that."""
    for base in cls.__mro__:
        new = vars(base).get("__new__")
        in_c = isinstance(new, types.BuiltinFunctionType) and new.__self__ is base
        if in_c or not base.__flags__ & _HEAPTYPE:
            return base
    return object


def _members_of(value: Any) -> tuple[str, ...]:
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


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, without running code of its class; None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return found if isinstance(found, dict) else None


def _has_attributes(value: Any) -> bool:
    """Whether a value's class gives its instances attributes of their own."""
    return _attributes_of(value) is not None or bool(_slots_of(type(value)))


def _is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_objects(value: Any) -> bool:
    """Whether an array holds references instead of numbers."""
    return bool(getattr(getattr(value, "dtype", None), "hasobject", False))


def _without_marks(owner: Any) -> dict[str, Any]:
    """A copy of an object's own attributes, without a compiler's notes on a tensor or function."""
    attributes = dict(_attributes_of(owner) or ())
    if not isinstance(owner, torch.Tensor | types.FunctionType):
        return attributes
    return {key: value for key, value in attributes.items() if not str(key).startswith(_MARKS)}


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
    value = inspect.getattr_static(cls, key, _MISSING)
    return isinstance(value, (*SCALARS, property, staticmethod, types.FunctionType))


def _is_watched_part(value: Any) -> bool:
    """Whether an attribute of a user's class or file is state or a function, and watched."""
    if function_of(value) is not None:
        return True
    if isinstance(value, types.ModuleType):
        return False
    plain = (*SCALARS, list, tuple, dict, set, deque, torch.Tensor, nn.Module, *_BUFFERS)
    if isinstance(value, (*plain, *_WRAPPERS, type, types.BuiltinFunctionType)):
        return True
    if _is_array(value) or draws(value) or is_opaque_iterator(value):
        return True
    return _attributes_of(value) is not None and type(value).__module__ != "builtins"


def _is_immutable(value: Any) -> bool:
    return type(value).__module__ == "numpy" and not hasattr(value, "__setitem__")


def _called_name(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__
