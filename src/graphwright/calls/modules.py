"""Modules behind a call: functions as modules, proxies of modules, and what a function reaches."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..errors import OptionError
from .code import cells
from .dependencies import Called, Dependencies
from .introspection import StandIn, attribute_of, describe_as, may_be_looked_up, signature_of
from .methods import Methods
from .modes import opaque
from .split import Args, Kwargs

# What torch.compile keeps on the module that it returns. A proxy must not show it: another
# torch.compile would take the proxy for compiled, or refuse it.
_OF_TORCH_COMPILE = ("_torchdynamo_orig_callable", "_torchdynamo_wrapper_id", "get_compiler_config")
# What a proxy must have of its own, or not at all, before it is complete.
_OWN = ("_original", "_innermost", "_described", "_graphwright_methods")
_OUR_PACKAGE = f"{__name__.partition('.')[0]}."
# Methods of nn.Module that look up the module's attributes by name, where a proxy has some of its
# own; and those that make a call, which are the proxy's.
_BY_NAME = frozenset(("get_submodule", "set_submodule", "get_parameter", "get_buffer"))
_OF_CALLS = frozenset(("_call_impl", "_slow_forward", "_wrapped_call_impl", "forward"))
# Special methods that every object has and a module may define anew.
_OF_OBJECTS = frozenset(
    (
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__str__",
        "__format__",
    )
)
# Special methods that are the proxy's: how it is made, copied, called and shown.
_OF_PROXIES = frozenset(
    (
        *("__del__", "__copy__", "__getattribute__", "__getnewargs__", "__getnewargs_ex__"),
        *("__class_getitem__", "__init_subclass__", "__set_name__", "__get__", "__set__"),
        *("__delete__", "__instancecheck__", "__subclasscheck__", "__post_init__", "__prepare__"),
    )
)
# Classes of proxies with operators, by the class without them and that of the module.
_CLASSES: weakref.WeakValueDictionary[tuple[type, weakref.ref[type]], type] = (
    weakref.WeakValueDictionary()
)
# The class of an object, whatever it says that it is.
_CLASS: Any = vars(object)["__class__"]


class _HiddenAttribute:
    """An attribute that the module may have and its proxy must not have."""

    def __get__(self, owner: object, of: type | None = None) -> Any:
        raise AttributeError

    def __set__(self, owner: object, value: Any) -> None:
        raise AttributeError


@opaque
def _forward(self: ModuleProxy, /, *args: Any, **kwargs: Any) -> Any:
    """Same as calling the proxy."""
    # Nothing is looked up in globals: a proxy runs this code with those of the module's forward.
    return self._forwarded(args, kwargs)


class _Forward:
    """`forward` of proxies: a method that looks like that of the module."""

    def __get__(self, proxy: ModuleProxy | None, kind: type | None = None) -> Any:
        return _forward if proxy is None else types.MethodType(proxy._looking_alike(), proxy)


class ModuleProxy(nn.Module, StandIn):
    """Shares a module's attributes; subclasses define how it is called.

    parameters(), state_dict(), to(), train(), hooks and everything else read and change the module
    itself. For `isinstance` a proxy is of the module's class, too. A subclass keeps its own state
    in slots, set by `object.__setattr__`.
    """

    __slots__ = _OWN

    _original: nn.Module
    # The module in the end, whatever proxies are between.
    _innermost: nn.Module
    # The forward of the module, and a function that looks like it.
    _described: tuple[Any, types.FunctionType] | None
    # The methods of the module, once one was looked up.
    _graphwright_methods: Methods | None
    # The function of graphwright that made it.
    _graphwright_maker = ""

    def __init__(self, module: nn.Module) -> None:
        # Both share one dictionary: whatever is set on one is set on the other.
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "_original", module)
        inner = module._innermost if isinstance(module, ModuleProxy) else module
        object.__setattr__(self, "_innermost", inner)
        object.__setattr__(self, "_described", None)
        object.__setattr__(self, "_graphwright_methods", None)
        _CLASS.__set__(self, _with_operators(type(self), type(inner)))
        if isinstance(inner, FunctionModule) and isinstance(inner._function, types.MethodType):
            _watch_assignments()

    @property
    def _graphwright_stands_for(self) -> Any:
        return self._original

    @property
    def _graphwright_called(self) -> Any:
        inner = self._innermost
        return inner._function if isinstance(inner, FunctionModule) else inner

    @property  # type: ignore[misc]  # a class of ours for type(), the module's for isinstance()
    def __class__(self) -> type:
        # diffusers saves a component by its class, Trainer asks it for the names of labels.
        kind: type = self._innermost.__class__
        return type(self) if kind.__module__.startswith(_OUR_PACKAGE) else kind

    @property
    def module(self) -> Any:
        """What this stands for: a module, or a plain function."""
        original = self._original
        return original._function if isinstance(original, FunctionModule) else original

    forward: Any = _Forward()

    @opaque
    def _forwarded(self, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call of `forward`."""
        original = self._original
        if "forward" in vars(original):  # Somebody has wrapped this proxy and set the wrapper.
            return forward_of_class(original)(*args, **kwargs)
        return self(*args, **kwargs)

    def _looking_alike(self) -> types.FunctionType:
        """A function that does what `forward` does, and looks like that of the module."""
        inner, known = self._innermost, self._described
        found = getattr(type(inner), "forward", None)
        if known is None or known[0] is not found:
            function = inner._function if isinstance(inner, FunctionModule) else inner.forward
            object.__setattr__(self, "_described", (found, _like(function)))
        return self._described[1]  # type: ignore[index]  # it has just been set

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module itself in place, as `torch.nn.Module.compile` does."""
        self._original.compile(*args, **kwargs)

    # Subclasses of nn.Module may override any of these; then their version has to run.

    def train(self, mode: bool = True) -> ModuleProxy:
        """Set the module's mode, as `torch.nn.Module.train` does."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ModuleProxy:
        self._original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state_dict, without a prefix."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the module; weights that were copied are noticed."""
        return self._original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for `_original` before it is set.
        if name in _OWN or name in _OF_TORCH_COMPILE:
            raise AttributeError(name)
        inner = self._innermost
        try:
            if isinstance(inner, FunctionModule) and name.startswith("__"):
                raise AttributeError(name)  # A module has it, too.
            found = getattr(self._original, name)
        except AttributeError:
            if not isinstance(inner, FunctionModule) or not may_be_looked_up(name):
                raise
            found = attribute_of(self, inner._function, name)
        if torch.compiler.is_compiling() or not isinstance(found, types.MethodType):
            return found
        return self._graphwright_bound(name, found)

    def _graphwright_bound(self, name: str, method: types.MethodType) -> types.MethodType:
        """A method of the module, or of a part, whose calls of the module reach this object."""
        inner = self._innermost
        if type(inner).__module__.startswith(_OUR_PACKAGE):
            return method
        if not isinstance(method.__self__, nn.Module) or isinstance(method.__self__, StandIn):
            return method
        if self._graphwright_methods is None:
            object.__setattr__(
                self, "_graphwright_methods", Methods(self, inner, self._graphwright_maker)
            )
        return self._graphwright_methods.bound(name, method)  # type: ignore[union-attr]  # just set

    def __setattr__(self, name: str, value: Any) -> None:
        # By the module's own class, which may have a property of that name.
        setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._graphwright_called), *dir(self._original)})

    @property
    def _version(self) -> int:  # type: ignore[override]  # nn.Module's is a number of the class
        return self._original._version

    _torchdynamo_orig_callable = _torchdynamo_wrapper_id = get_compiler_config = _HiddenAttribute()


def _with_operators(cls: type, kind: type) -> type:
    """A class of proxies with the operators of a module's class: `in`, `iter`, `len`, `==`, `+`.

    Python looks for these in classes alone. If proxies of all modules had them, each would count as
    iterable.
    """
    key = cls, weakref.ref(kind)
    known = _CLASSES.get(key)
    if known is not None:
        return known
    operators = _operators_of(kind)
    if not operators:
        return cls
    as_named = {"__slots__": (), "__qualname__": cls.__qualname__, "__module__": cls.__module__}
    made = _CLASSES[key] = type(cls.__name__, (cls,), as_named | operators)
    return made


def _operators_of(kind: type) -> dict[str, Any]:
    """The operators that a module's class defines, for its proxies."""
    own = {name for base in (ModuleProxy, nn.Module, object) for name in vars(base)} - _OF_OBJECTS
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base in (object, nn.Module) or base.__module__.startswith(_OUR_PACKAGE):
            continue
        for name, value in vars(base).items():
            special = name.startswith("__") and name.endswith("__") and name not in _OF_PROXIES
            if special and name not in own and name not in found:
                if hasattr(value, "__get__"):
                    found[name] = _operator(name)
                elif value is None:  # Which says that there is none.
                    found[name] = None
    return found


def _operator(name: str) -> Callable[..., Any]:
    """An operator of proxies: that of the module, with the proxy in its place as the result."""

    def method(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        inner = self._innermost
        kind = type(inner)
        found = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        result = found.__get__(inner, kind)(*args, **kwargs)
        return self if result is inner else result

    method.__name__ = name
    return method


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """A module's forward as its class defines it, whatever has been set on the module."""
    kind = type(module)
    defined = next(vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each))
    found: Callable[..., Any] = defined.__get__(module, kind)  # It may be a static method.
    return found


def _refuse_assignment(owner: nn.Module, name: str, value: nn.Module | None) -> None:
    """Raise OptionError where what stands for a method is assigned to the module of the method.

    nn.Module keeps it among its submodules, where no call finds it: the class has the method.
    """
    if not isinstance(value, ModuleProxy) or not hasattr(type(owner), name):
        return
    inner = value._innermost
    if isinstance(inner, FunctionModule) and owner in inner._modules.values():
        kind = type(owner).__name__
        raise OptionError(
            f"{name} of {kind} cannot be replaced by a {type(value).__name__}, a module: PyTorch "
            "would register it as a submodule, and calls would not find it.",
            remedy=f"Use the {kind} itself (model = graphwright.fuse(model), say) in its place, or "
            f"assign a graph of it: model.{name} = graphwright.graph(model.{name}).",
        )


@functools.cache
def _watch_assignments() -> None:
    """Let such assignments be refused; only programs that could make one pay for it."""
    nn_module.register_module_module_registration_hook(_refuse_assignment)


def _like(function: Callable[..., Any]) -> types.FunctionType:
    """A `forward` of proxies that looks like a function."""
    seen = getattr(inspect.unwrap(function), "__globals__", globals())
    made = types.FunctionType(_forward.__code__, seen)
    made.__dict__.update(vars(_forward))
    signature = signature_of(function)
    if signature is not None:
        taken = signature.parameters
        name = "self" if "self" not in taken else "_"
        own = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
        signature = signature.replace(parameters=[own, *taken.values()])
    describe_as(made, function, signature)
    return made


def _of_the_module(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of nn.Module for proxies: where the module's class has its own, that one."""

    @functools.wraps(plain)
    def method(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        inner = self._innermost
        if name not in _BY_NAME and getattr(type(inner), name, plain) is plain:
            return plain(self, *args, **kwargs)
        result = getattr(inner, name)(*args, **kwargs)
        return self if result is inner else result

    return method


for _name, _method in vars(nn.Module).items():
    if isinstance(_method, types.FunctionType) and not (
        _name.startswith("__") or _name in _OF_CALLS or _name in vars(ModuleProxy)
    ):
        setattr(ModuleProxy, _name, _of_the_module(_name, _method))


def in_training(module: nn.Module) -> bool:
    """Whether a module is in training mode; a frozen ScriptModule has no mode."""
    return bool(getattr(module, "training", False))


def should_be_in_eval_mode(module: nn.Module) -> bool:
    """Whether a module is in training mode and could be in another.

    What torch.export made says that it is in training mode, whatever it was exported in; what it
    computes is fixed, and its eval() raises.
    """
    replaced = module.__dict__.get("eval")
    exported = str(getattr(replaced, "__module__", "")).startswith("torch.export")
    return in_training(module) and not exported


def any_in_training(module: nn.Module) -> bool:
    """Whether a module or one inside of it is in training mode."""
    return first_in_training(module) is not None


def first_in_training(module: nn.Module) -> nn.Module | None:
    """The first of a module and those inside of it that is in training mode."""
    # Faster than to go through `modules()`.
    waiting, seen = [module], {id(module)}
    while waiting:
        part = waiting.pop()
        if in_training(part):
            return part
        for inner in part._modules.values():
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)
    return None


def innermost(module: nn.Module) -> nn.Module:
    """What a module is in the end: the one that a fused, graphed or tuned module stands for."""
    while True:
        called = module._function if isinstance(module, FunctionModule) else module
        if not isinstance(called, StandIn):
            return module
        stood_for = called._graphwright_stands_for
        module = stood_for if isinstance(stood_for, nn.Module) else FunctionModule(stood_for)


class FunctionModule(Called):
    """A plain function as a module; what it reaches becomes its submodules and buffers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.training = False
        self._function = function
        for name, value in modules_behind(function):
            if isinstance(value, nn.Module):
                self._modules[name] = value
                self.training |= in_training(value)
            else:
                self._buffers[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def function_of(self) -> Callable[..., Any]:
        """The function."""
        return self._function

    def reached(self) -> list[nn.Module | torch.Tensor]:
        """The modules and tensors that it reaches now."""
        return [value for _, value in modules_behind(self._function)]


def modules_behind(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Modules and tensors that a plain function reaches in any way, by name.

    Modules and tensors inside these modules are left out.
    """
    found: dict[str, nn.Module | torch.Tensor] = {}
    for where, value in Dependencies(function).outermost.values():
        name = where.text.replace(".", "_")
        found[name if name not in found else f"{name}_{len(found)}"] = value
    yield from found.items()


def values_behind(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a plain function names itself, by closure, default, global or method.

    A function that a decorator or torch.compile has wrapped is looked into as well. What the values
    hold is not: for a step, an optimizer that an object holds may be another step's. Of that,
    `Dependencies` tells.
    """
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    inner = getattr(function, "__wrapped__", None) if inner is None else inner
    if isinstance(inner, nn.Module) and not isinstance(function, nn.Module):
        yield "wrapped", inner
    elif inner is not None and not isinstance(function, nn.Module):
        yield from ((f"wrapped_{name}", value) for name, value in values_behind(inner))
    while isinstance(function, functools.partial):
        for index, value in enumerate((*function.args, *function.keywords.values())):
            yield f"partial_{index}", value
        function = function.func
    owner = getattr(function, "__self__", None)
    if not isinstance(function, types.FunctionType | types.MethodType):
        owner = function  # An object with __call__, a module among them.
    if isinstance(owner, nn.Module):
        yield "self", owner
    elif hasattr(owner, "__dict__") and not isinstance(owner, types.ModuleType):
        for name, value in vars(owner).items():
            yield f"self_{name}", value
        function = getattr(function, "__call__", function)  # noqa: B004  # fetched, not asked for
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        yield from _values_named(function)


def _values_named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reaches by global, closure or default, by name."""
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from cells(function)
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default_{index}", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default_{name}", value
