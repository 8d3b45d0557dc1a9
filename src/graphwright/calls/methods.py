"""Methods of a module, called on what stands for it: `graphed.encode(x)`.

A method that calls its own module (`self(x)`, `self.forward(x)`) is to reach what was made of the
module. It is given another `self`: an object of a class below the module's, which shares the
module's attributes and differs in what its calls run. So nothing is written into the module, and
whoever calls the module itself, or is in another thread, sees nothing of it. It holds for
generators too, however late they run. A method that never calls its module gets the module.

A method that runs parts of the module, and nothing that was made, has lost what was made for. Its
first calls are watched for that, by Python's profiling of the thread, and it is told once, with the
line to write.
"""

from __future__ import annotations

import abc
import copy
import dis
import functools
import inspect
import itertools
import operator
import sys
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import is_own, warn_of_fallback
from .code import codes, function_of
from .dependencies import BACKWARD_HOOKS, FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from .modes import opaque
from .signature import inside_transform

# Attributes by which a method calls its own module.
_CALLS = frozenset(("__call__", "forward", "_call_impl", "_wrapped_call_impl", "_slow_forward"))
_OF_ATTRIBUTES = frozenset(
    ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR")
)
_NO_STEPS = frozenset(("CACHE", "EXTENDED_ARG", "PRECALL", "COPY"))
# What a call of any module runs first.
_CALL_OF_MODULES = getattr(nn.Module.__call__, "__code__", None)
# Calls of a method that are watched, if they show nothing; and Python's events of each.
_WATCHED_CALLS = 3
_MAX_EVENTS = 200_000
# Of methods that are watched no more, with None; of others, how often they were.
_SEEN: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Classes of what methods get as `self`, by that of the module.
_CLASSES: weakref.WeakValueDictionary[weakref.ref[type], type] = weakref.WeakValueDictionary()
# The class of an object, whatever it says that it is.
_CLASS: Any = vars(object)["__class__"]
# In which these keep what answers, and what the function of a method is known by.
_ANSWERS, _FUNCTION = "_graphwright_answers", "_graphwright_function"


class Methods:
    """The methods of a module, for what stands for it.

    Args:
        stand_in: what stands for the module, and answers its calls.
        module: the module in the end.
        maker: the function of graphwright that made it: "graph".
    """

    def __init__(self, stand_in: Any, module: nn.Module, maker: str) -> None:
        self._stand_in, self._module, self._maker = stand_in, module, maker
        self._self: nn.Module | None = None
        self._bound: dict[str, tuple[tuple[Any, ...], types.MethodType]] = {}

    def bound(self, name: str, method: types.MethodType) -> types.MethodType:
        """A method that was looked up, as it is to be called.

        Args:
            name: by which it was looked up.
            method: of the module, or of a part.
        """
        # A parametrization changes the class of a module.
        key = method.__func__, method.__self__, type(self._module)
        known = self._bound.get(name)
        if known is None or any(map(operator.is_not, known[0], key)):
            known = self._bound[name] = key, self._made(name, method)
        return known[1]

    def _made(self, name: str, method: types.MethodType) -> types.MethodType:
        owner: Any = method.__self__
        function: Any = method.__func__
        given = owner
        if owner is self._module:
            function = getattr(function, _FUNCTION, function)  # As another stand-in gives it.
            if calls_itself(function, type(owner)):
                given = self._self_of_methods() or owner
        run = self._watched(name, function) if self._is_new(name) else function
        if given is owner and run is function:
            return types.MethodType(function, owner)

        def call(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            result = run(given, *args, **kwargs)
            return owner if result is given else result

        functools.update_wrapper(call, function)
        setattr(call, _FUNCTION, function)
        return types.MethodType(call, owner)

    def _watched(self, name: str, function: Any) -> Any:
        """A method's function that watches what its first calls run."""

        @opaque
        def run(given: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not self._may_watch(name):
                return function(given, *args, **kwargs)
            parts = _RunningParts(self._module)
            sys.setprofile(parts)
            try:
                result = function(given, *args, **kwargs)
            finally:
                parts.stop()
            self._note(name, parts)
            return result

        return run

    def _is_new(self, name: str) -> bool:
        """Whether calls of a method are still to be watched."""
        return _SEEN.get(self._module, {}).get(name, 0) is not None

    def _may_watch(self, name: str) -> bool:
        """Whether to watch a call: not if nothing can be lost, or somebody else looks."""
        return (
            self._is_new(name)
            and sys.getprofile() is None
            and not (torch.is_grad_enabled() and getattr(self._module, "training", False))
            and not inside_transform()
        )

    def _note(self, name: str, parts: _RunningParts) -> None:
        """Note what a call has run, and warn if nothing that was made was among it."""
        seen = _SEEN.setdefault(self._module, {})
        if not (parts.ran or parts.answered):
            times = (seen.get(name) or 0) + 1
            seen[name] = times if times < _WATCHED_CALLS else None
        else:
            seen[name] = None
        if seen[name] is None:
            self._bound.pop(name, None)
        if parts.ran and not parts.answered:
            self._warn(name, parts.ran)

    def _warn(self, name: str, ran: dict[str, nn.Module]) -> None:
        kind = type(self._module)
        if "" in ran:
            why = f"it calls the model where {self._maker}() cannot answer"
            remedy = "Write model.forward = graphwright.graph(model.forward)."
            if name == "generate" and hasattr(self._module, "generation_config"):
                remedy = "Write graphwright.graph_generate(model).generate(...), token for token."
        else:
            paths = [*ran][:3]
            one = len(ran) == 1
            named = f"{', '.join(paths)}{' and others' if len(ran) > 3 else ''}"
            why = (
                f"it calls {'a part' if one else 'parts'} of the model ({named}) and not the model "
                f"itself, which is what {self._maker}() answers"
            )
            line = _assignment(self._module, max(ran, key=lambda path: _size(ran[path])))
            sample = ", (x,)" if self._maker == "tune" else ""
            remedy = f"Write {line} = graphwright.{self._maker}({line}{sample})."
        warn_of_fallback(f"{name}() of {kind.__name__}", why, remedy)

    def _self_of_methods(self) -> nn.Module | None:
        """What methods that call the module get as `self`; None where there can be none."""
        kind, known = _class_below(type(self._module)), self._self
        if kind is not None and (known is None or _CLASS.__get__(known) is not kind):
            known = self._self = object.__new__(kind)
            object.__setattr__(known, "__dict__", self._module.__dict__)
            object.__setattr__(known, _ANSWERS, (self._stand_in, self._module))
        return None if kind is None else known


class _RunningParts:
    """Sees which parts of a module are called on this thread; a function for `sys.setprofile`.

    Attributes:
        ran: those that were called, without what they call, by their paths.
        answered: whether something that was made was called; nothing is looked for after that.
    """

    def __init__(self, module: nn.Module) -> None:
        self.ran: dict[str, nn.Module] = {}
        self.answered = False
        self._paths = {id(part): path for path, part in nn.Module.named_modules(module)}
        self._events = _MAX_EVENTS
        self._inside: types.FrameType | None = None

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        self._events -= 1
        if event == "call":
            self._enter(frame)
        elif frame is self._inside and event == "return":
            self._inside = None
        if self.answered or self._events <= 0:
            self.stop()

    def _enter(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if code.co_name == "__call__" and is_own(code.co_filename):
            self.answered = True
        elif code is _CALL_OF_MODULES and self._inside is None:
            part = frame.f_locals.get("self")
            path = self._paths.get(id(part))
            if path is not None and isinstance(part, nn.Module):
                self.ran[path], self._inside = part, frame

    def stop(self) -> None:
        """Look at nothing more."""
        self._inside = None
        if sys.getprofile() is self:
            sys.setprofile(None)


def calls_itself(function: Any, kind: type) -> bool:
    """Whether a method may call its own module or hand it to others, itself or by another method.

    What compares its module, or its type, by identity says no: `self` has to be the module there.

    Args:
        function: of the method.
        kind: the class of the module.
    """
    waiting, seen, found = [function], set(), False
    while waiting:
        each = inspect.unwrap(waiting.pop())
        code = getattr(each, "__code__", None)
        if code is None:
            found = True
            continue
        if code in seen:
            continue
        seen.add(code)
        uses = _SelfUses(code)
        if uses.compared:
            return False
        found = found or uses.bare or not _CALLS.isdisjoint(uses.attributes)
        for base in kind.__mro__:
            if base not in (nn.Module, object):
                named = [vars(base)[name] for name in uses.attributes if name in vars(base)]
                waiting += filter(None, map(function_of, named))
    return found


class _SelfUses:
    """How the code of a method uses its first argument.

    Attributes:
        attributes: that it looks up or sets, by name.
        bare: whether it is used as such: called, passed on, stored.
        compared: whether it is compared by its identity.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.attributes: set[str] = set()
        self.bare = code.co_argcount == 0  # It is one of `*args`.
        self.compared = False
        if code.co_argcount:
            for each in codes(code):
                if "super" in each.co_names:
                    self.attributes.update(each.co_names)
                self._look(code.co_varnames[0], _steps(each))

    def _look(self, name: str, steps: list[dis.Instruction]) -> None:
        for index, step in enumerate(steps):
            if not _loads(step, name):
                continue
            after = [each.opname for each in steps[index + 1 : index + 3]]
            if after[:1] and after[0] in _OF_ATTRIBUTES:
                self.attributes.add(str(steps[index + 1].argval))
                continue
            self.bare = True
            is_left = after[1:] == ["IS_OP"] and after[0].startswith("LOAD_")
            before = steps[index - 1] if index else None
            of = before.argval if before is not None and before.opname == "LOAD_GLOBAL" else None
            if (
                after[:1] == ["IS_OP"]
                or is_left
                or of == "id"
                or (of == "type" and _compares(steps))
            ):
                self.compared = True


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]


def _compares(steps: list[dis.Instruction]) -> bool:
    """Whether code compares something by its identity, other than with None."""
    return any(
        step.opname == "IS_OP" and (before.opname, before.argval) != ("LOAD_CONST", None)
        for before, step in itertools.pairwise(steps)
    )


def _loads(step: dis.Instruction, name: str) -> bool:
    """Whether an instruction puts a variable on the stack, alone or as the last of two."""
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    given = step.argval
    return name in given if isinstance(given, tuple) else given == name


class _Alike(type):
    """The class of classes of what methods get as `self`: these pass for the module's class."""

    @property
    def of_module(cls) -> Any:
        return cls.__bases__[0]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.of_module(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.of_module

    def __hash__(cls) -> int:
        return hash(cls.of_module)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.of_module)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, cls.of_module)


class _ForwardOfSelf:
    """`forward` of what methods get as `self`: what was made, where that is what a call runs."""

    def __get__(self, given: Any, kind: Any = None) -> Any:
        if given is None:
            return kind.of_module.forward
        stand_in, module = given._graphwright_answers
        return stand_in.forward if _only_forward(module) else module.forward


def _only_forward(module: nn.Module) -> bool:
    """Whether a call of a module runs its forward and nothing else, such as hooks."""
    attributes = vars(module)
    return (
        type(module).__call__ is nn.Module.__call__
        and module._compiled_call_impl is None
        and not any(attributes.get(name) for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS))
        and not any(getattr(nn_module, name) for name in GLOBAL_FORWARD_HOOKS)
    )


class _SelfOfMethods(nn.Module):
    """What methods get as `self`, for a class below the module's to take over.

    It is copied, compared and pickled as the module.
    """

    _graphwright_answers: tuple[Any, nn.Module]
    forward: Any = _ForwardOfSelf()

    @opaque
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._graphwright_answers[0](*args, **kwargs)

    @property  # The module's, for isinstance() and super().
    def __class__(self) -> type:
        return self._graphwright_answers[1].__class__

    @__class__.setter
    def __class__(self, kind: type) -> None:
        setattr(self._graphwright_answers[1], "__class__", kind)  # noqa: B010  # mypy refuses the other

    def __new__(cls) -> Any:  # As DataParallel makes its replicas.
        kind = cls.of_module  # type: ignore[attr-defined]  # of its metaclass
        return kind.__new__(kind)

    def __eq__(self, other: object) -> Any:
        return other is self or other is self._graphwright_answers[1] or NotImplemented

    def __hash__(self) -> int:
        return hash(self._graphwright_answers[1])

    def __copy__(self) -> Any:
        return copy.copy(self._graphwright_answers[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._graphwright_answers[1], memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The module itself, for whoever reads it without graphwright too.
        return operator.getitem, ((self._graphwright_answers[1],), 0)

    def __del__(self) -> None:
        """Nothing ends with it, whatever the module's class does."""


_ATTRIBUTES = {
    name: value
    for name, value in vars(_SelfOfMethods).items()
    if name not in ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__")
}


def _class_below(kind: Any) -> Any:
    """A class below a module's whose objects may be answered by something else; None if none can.

    Its objects share another's attributes, so that there must be no memory beside these.
    """
    key = weakref.ref(kind)
    known = _CLASSES.get(key)
    if known is not None:
        return known
    if (
        kind.__basicsize__ != nn.Module.__basicsize__  # It has slots.
        or type(kind) not in (type, abc.ABCMeta)
        or issubclass(kind, torch.jit.ScriptModule)
        or kind.__getattribute__ is not object.__getattribute__
    ):
        return None
    own = dict(_ATTRIBUTES)
    if kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__:
        del own["__eq__"], own["__hash__"]
    names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
    made = _Alike(kind.__name__, (nn.Module,), own | names | {"__slots__": (_ANSWERS,)})
    try:
        # Not by inheriting: the class would be told of one below it, which it may list.
        made.__bases__ = (kind,)
    except TypeError:
        return None
    _CLASSES[key] = made
    return made


def _assignment(module: nn.Module, path: str) -> str:
    """A part of a module as Python writes it: `model.layers[0]`."""
    line, around = "model", module
    for name in path.split("."):
        if name.isidentifier():
            line += f".{name}"
        elif name.isdigit() and hasattr(type(around), "__setitem__"):
            line += f"[{name}]"
        else:
            line += f"[{name!r}]"
        around = around._modules[name] or around
    return line


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in nn.Module.parameters(module))
