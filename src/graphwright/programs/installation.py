"""Something else answers a module's calls, while the module stays the very same object.

The module gets a class of its own, which differs from its old one in the methods that are answered
by something else. Its dictionary is not touched: parameters, hooks, `state_dict()`, `.to()` and
`isinstance` are as they were. A copy, a pickle, and what `torch.save` writes are of the old class.

What answers is made of a twin: another object with the same dictionary, whose calls run `forward`
of the old class and nothing around it. So it sees every change of the module, and whatever it runs
eagerly does not come back to it: hooks, and what somebody has put around `forward`, run once.

Only the module itself is answered for: not another object of the new class, nor the module once it
has got a class on top of that, as parametrizations give it.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..calls.introspection import DEFINED, ORIGINAL_CLASS
from ..calls.modules import ModuleProxy
from ..errors import OptionError

Answer = Callable[..., Any]
# Classes of modules that are installed, changed by one thread at a time.
_LOCK = threading.RLock()
_ANSWERS = "_graphwright_answers"


def takes_installations(module: nn.Module) -> bool:
    """Whether a module can have a class of its own: not what is scripted, or graphwright's own."""
    return not issubclass(type(module), (ModuleProxy, torch.jit.ScriptModule))


def twin_of(module: nn.Module) -> nn.Module:
    """Another object with the module's state, of the class that it has without installations.

    A call of it is one of its `forward` alone, without hooks.

    Raises:
        OptionError: the module's state does not lie in a dictionary alone.
    """
    cls = original_class(module)
    slots = [name for base in cls.__mro__ for name in vars(base).get("__slots__", ())]
    if {*slots} - {"__dict__", "__weakref__"}:
        raise OptionError(
            f"{cls.__name__} has __slots__: what they hold cannot be shared.",
            remedy="Leave this module out.",
        )
    twin = _new_twin(cls)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def _new_twin(cls: type[nn.Module]) -> nn.Module:
    """An object without state whose calls are of `forward` alone."""
    made: nn.Module = object.__new__(_twin_class(cls))  # type: ignore[arg-type]  # it has no hash in PyTorch's stub
    return made


@functools.lru_cache(maxsize=256)
def _twin_class(cls: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return _new_twin, (cls,), self.__dict__

    return _derived(cls, {"__call__": call, "__reduce_ex__": reduced, ORIGINAL_CLASS: cls})


def original_class(module: nn.Module) -> type[nn.Module]:
    """A module's class without what is installed, where that is what it got last."""
    cls = type(module)
    found: type[nn.Module] = vars(cls).get(ORIGINAL_CLASS, cls)
    return found


def install(module: nn.Module, answers: Mapping[str, Answer]) -> None:
    """Have methods of a module answered by something else, until that is uninstalled.

    Of several, the last one answers. Calls that are under way on other threads end as they began.

    Args:
        module: the module.
        answers: what answers, by the names of methods.
    """
    with _LOCK:
        found = _all_of(module)
        for method, answer in answers.items():
            found[method] = (*found.get(method, ()), answer)
        _have(module, found)


def uninstall(module: nn.Module, answers: Mapping[str, Answer]) -> None:
    """Take out what was installed; what is there no more is no error, and others stay.

    Args:
        module: the module.
        answers: the very objects that were installed, by the names of methods.
    """
    with _LOCK:
        found = _all_of(module)
        for method, answer in answers.items():
            found[method] = tuple(each for each in found.get(method, ()) if each is not answer)
        _have(module, found)


def _all_of(module: nn.Module) -> dict[str, tuple[Answer, ...]]:
    """All that is installed on a module, the last one last."""
    return dict(vars(type(module)).get(_ANSWERS, {}))


def _have(module: nn.Module, answers: Mapping[str, tuple[Answer, ...]]) -> None:
    """Give a module the class with these answers; its own where there are none."""
    left = {method: found for method, found in answers.items() if found}
    cls = original_class(module)
    module.__class__ = _class_with(cls, left, module) if left else cls


def _class_with(
    cls: type[nn.Module], answers: Mapping[str, tuple[Answer, ...]], module: nn.Module
) -> type[nn.Module]:
    """A class like another one, some of whose methods are answered by something else."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        plain = object.__new__(cls)
        object.__setattr__(plain, "__dict__", self.__dict__)
        found = plain.__reduce_ex__(protocol)
        # For another class than the object's, Python takes the older form alone.
        return plain.__reduce_ex__(1) if found[0] is copyreg.__newobj__ else found  # type: ignore[attr-defined]  # not in its stub

    members: dict[str, Any] = {"__reduce_ex__": reduced}
    members |= {_ANSWERS: dict(answers), ORIGINAL_CLASS: cls}
    owner = weakref.ref(module)
    for name, found in answers.items():
        members[name] = _method(getattr(cls, name), found[-1], owner)
    return _derived(cls, members)


def _derived(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """A class below another one that looks like it, and that nobody is told of."""
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members["__doc__"] = cls.__doc__
    made = _class_below(cls, members)
    setattr(made, DEFINED, dict(vars(made)))
    return made


def _class_below(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    metaclass: Any = type(cls)
    if any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1]):
        made: type[nn.Module] = metaclass(cls.__name__, (nn.Module,), members)
        with contextlib.suppress(TypeError):  # Objects of it may lie in memory in another way.
            made.__bases__ = (cls,)  # Not from the start: it would be registered.
            return made
    direct: type[nn.Module] = metaclass(cls.__name__, (cls,), members)
    return direct


def _method(
    original: Callable[..., Any], answer: Answer, owner: weakref.ref[nn.Module]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is owner() and _ANSWERS in vars(type(self)):
            return answer(*args, **kwargs)
        return original(self, *args, **kwargs)

    return method
