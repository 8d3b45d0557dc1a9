"""Binding: one call with its arguments passed in another call's form.

`m(x, mask)` and `m(mask=mask, x=x)` are the same call of a plain Python function, and so are `m(x)`
and `m(x, None)` where None is the default. What was built for one form answers the others, where
nothing but Python binds the arguments. `sees_order` says who may see even the order of keywords.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as nn_module

from .dependencies import BACKWARD_HOOKS, FORWARD_HOOKS, GLOBAL_HOOKS, Called
from .introspection import StandIn, original_of
from .split import Args, Kwargs

# How a call passes its arguments: how many by position, and the names of the others in order.
Form = tuple[int, tuple[str, ...]]
# Types of which equal values are the same object.
_SINGLETONS = (type(None), bool, torch.dtype)
_NO_DEFAULT = object()
_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
# The attribute of a function of ours that passes its keyword arguments on as they are: to what.
PASSES_TO = "_graphwright_passes_to"


def form_of(args: Args, kwargs: Kwargs) -> Form:
    """How a call passes its arguments."""
    return len(args), tuple(kwargs)


def sees_order(function: Callable[..., Any]) -> bool:
    """Whether a callable may see in which order the keyword arguments of a call come.

    It cannot where nothing but Python binds them, each to a parameter of its own.
    """
    while True:
        if isinstance(function, StandIn):
            function = original_of(function)
        elif isinstance(function, Called):
            function = function.function_of()
        elif isinstance(function, nn.Module):
            if _has_hooks(function):
                return True
            if isinstance(function, torch.jit.ScriptModule):
                return False  # A schema binds them.
            function = _forward_of(function)
        elif type(function) is types.MethodType:
            function = function.__func__
        elif type(function) is functools.partial:
            function = function.func
        elif hasattr(function, PASSES_TO):
            function = getattr(function, PASSES_TO)
        elif type(function) is types.FunctionType:
            return bool(function.__code__.co_flags & inspect.CO_VARKEYWORDS)
        else:
            return not isinstance(function, torch.jit.ScriptFunction)


def in_one_order(
    function: Callable[..., Any],
    kwargs: Kwargs,
    known: dict[frozenset[str], tuple[str, ...]] | None = None,
) -> Kwargs:
    """The keyword arguments of a call, in an order that all calls share which are the same call.

    The same dictionary, if they are in it or the callable may see their order.

    Args:
        function: what is called.
        kwargs: of the call.
        known: the first order in which calls had these arguments, which is taken and noted; without
            it, they are sorted.
    """
    if len(kwargs) < 2:
        return kwargs
    names = tuple(sorted(kwargs)) if known is None else known.get(frozenset(kwargs))
    if names == (*kwargs,) or sees_order(function):
        return kwargs
    if names is None:
        assert known is not None
        known[frozenset(kwargs)] = (*kwargs,)
        return kwargs
    return {name: kwargs[name] for name in names}


@dataclass(frozen=True)
class Parameters:
    """What the arguments of a call are bound to.

    Attributes:
        positional: names of those that may be passed by position, in this order.
        named: names of those that may be passed by keyword.
        defaults: by name.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Parameters | None:
        """The parameters of what a call of a module runs, if Python alone binds arguments to them.

        None where something may see in which form a call came: a hook, an override of `__call__`,
        a wrapper, or a function that takes any arguments.
        """
        own = 0 if isinstance(module, Called) else 1
        function = module.function_of() if isinstance(module, Called) else _forward_of(module)
        if _has_hooks(module) or not isinstance(function, types.FunctionType):
            return None
        # The code, not the signature: a wrapper shows that of another function.
        code = function.__code__
        if code.co_flags & _VARIABLE:
            return None
        positional = code.co_varnames[own : code.co_argcount]
        count = code.co_argcount + code.co_kwonlyargcount
        by_keyword = code.co_varnames[max(own, code.co_posonlyargcount) : count]
        # From behind: the module itself may have a default, too.
        last = zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False)
        defaults = dict(last) | (function.__kwdefaults__ or {})
        return cls(positional, frozenset(by_keyword), defaults)

    def in_form(self, form: Form, args: Args, kwargs: Kwargs) -> tuple[Args, dict[str, Any]] | None:
        """The same call in another form; None if no call in that form is the same.

        Args:
            form: of a call that is known to be taken.
            args: of the call.
            kwargs: likewise.
        """
        if len(args) > len(self.positional) or not self.named.issuperset(kwargs):
            return None
        given = dict(zip(self.positional, args, strict=False))
        if given.keys() & kwargs.keys():
            return None
        given.update(kwargs)
        count, keywords = form
        positional = self.positional[:count]
        wanted = {*positional, *keywords}
        # Of what a call leaves out, and of what its form does, only the default may be the value;
        # and that by identity, by which functions tell a default from a value that is equal.
        for name in wanted ^ given.keys():
            default = self.defaults.get(name, _NO_DEFAULT)
            if type(default) not in _SINGLETONS or given.get(name, default) is not default:
                return None
        if len(positional) < count:
            return None
        values = self.defaults | given
        return tuple(values[n] for n in positional), {name: values[name] for name in keywords}


def _forward_of(module: nn.Module) -> Any:
    """What a call of a module runs with the module itself; None if it is another one's."""
    kind, attributes = type(module), vars(module)
    # A GraphModule's class is its own, and its call that of a module.
    above = kind.__mro__[1 if isinstance(module, fx.GraphModule) else 0 :]
    call = next(vars(each)["__call__"] for each in above if "__call__" in vars(each))
    plain = (
        call is nn.Module.__call__
        and kind._call_impl is nn.Module._call_impl
        and kind.__getattribute__ is nn.Module.__getattribute__
        and attributes.keys().isdisjoint(("forward", "_call_impl"))
        and attributes.get("_compiled_call_impl") is None
    )
    if not plain:
        return None
    # As the class holds it: that of a static method is called without the module.
    return next(vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each))


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks run around the module's forward."""
    own, everywhere = vars(module), vars(nn_module)
    names = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
    return any(own.get(name) for name in names) or any(everywhere[n] for n in GLOBAL_HOOKS)
