"""Which logits processors of a caller's own can run inside of a graph.

One can if all it does follows from the scores and from plain attributes of its own. Its code has to
use PyTorch and Python's math alone, and to catch no errors. A trial run on tensors without data
tells the rest: it must not touch the tokens, read a value of a tensor on the host, copy from the
host, draw random numbers, or change an attribute. What runs is then decided by its attributes and
by shapes, so that one run stands for all.
"""

from __future__ import annotations

import copy
import dis
import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# Builtins without effects, on plain values.
_HARMLESS = {
    *("abs", "bool", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min"),
    *("range", "reversed", "round", "slice", "sorted", "sum", "super", "tuple", "zip"),
}
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_MODULES = ("torch", "math")
# Whether a trial run went well, by all that it depends on: it takes some milliseconds.
_ALLOWED: dict[Any, bool] = {}
_KEPT = 256


# PyTorch counts how often a tensor was written to.
_writes = operator.attrgetter("_version")
_NEVER_CALLED = ("__init__", "__annotate__", "__annotate_func__")
# They add nothing to what a processor does.
_BASES = (
    ("builtins", "object"),
    ("transformers.generation.logits_process", "LogitsProcessor"),
)


class _NotOfScoresAlone(Exception):
    """Something that has no place in a graph, or that a trial run would not see."""


def of_scores_alone(processor: Any, scores: torch.Tensor) -> tuple[tuple[Any, ...], Any] | None:
    """A key and a copy of a processor that follows from scores alone; None if it may not.

    Args:
        processor: any callable of tokens and scores.
        scores: such as it would be given, shape (batch, vocabulary).

    Returns:
        what is equal for two of the same results, as long as their copies live, and a copy that
        stays as it is when the processor changes.
    """
    try:
        code = _code_of(type(processor))
        key = type(processor), _frozen(processor.__dict__)
        whole = key, code, _form(scores)
        if whole not in _ALLOWED:
            while len(_ALLOWED) >= _KEPT:
                del _ALLOWED[next(iter(_ALLOWED))]
            _ALLOWED[whole] = _runs_without_more(processor, scores)
        return (key, _copied(processor, lambda tensor: tensor)) if _ALLOWED[whole] else None
    except _NotOfScoresAlone:
        return None


def _code_of(kind: type) -> Any:
    """All code that a class brings along, and what it names, as something to compare."""
    if not isinstance(kind.__call__, types.FunctionType) or not kind.__dictoffset__:
        raise _NotOfScoresAlone  # such as a function, whose code is no attribute of it
    found = []
    for base in kind.__mro__:
        if (base.__module__, base.__name__) in _BASES:
            continue
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType):
                if name not in _NEVER_CALLED:
                    found.append((name, _function(value)))
            elif not name.startswith("__"):
                found.append((name, _constant(value)))
    return tuple(found)


def _function(function: types.FunctionType) -> Any:
    named = []
    for name in sorted(_globals_of(function.__code__)):
        if name in function.__globals__:
            named.append((name, _constant(function.__globals__[name])))
        elif name not in _HARMLESS:
            raise _NotOfScoresAlone
    defaults = function.__defaults__, *(function.__kwdefaults__ or {}).values()
    return function.__code__, tuple(named), _constant(defaults)


@functools.lru_cache(maxsize=256)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    if set(code.co_freevars) - {"__class__"} or code.co_exceptiontable:
        raise _NotOfScoresAlone
    names = set()
    for each in dis.get_instructions(code):
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            raise _NotOfScoresAlone
        # By __class__, __dict__ and the like code reaches anything.
        if each.opname.endswith(("ATTR", "METHOD")) and _is_hidden(str(each.argval)):
            raise _NotOfScoresAlone
        if each.opname == "LOAD_GLOBAL":
            names.add(str(each.argval))
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(names).union(*map(_globals_of, inner))


def _is_hidden(name: str) -> bool:
    return name.startswith("__") and name not in ("__call__", "__init__")


def _constant(value: Any) -> Any:
    """What others see too, and nobody changes in place, as something to compare."""
    if type(value) is tuple:
        return tuple(map(_constant, value))
    if type(value) in _PLAIN:
        return _frozen(value)
    if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _MODULES:
        return value.__name__
    raise _NotOfScoresAlone


def _frozen(value: Any) -> Any:
    """A plain value as something to compare; a tensor is the same if it is this one."""
    if isinstance(value, torch.Tensor):
        return id(value), type(value), _form(value)
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if type(value) in (list, tuple):
        return type(value), tuple(map(_frozen, value))
    if type(value) is dict:
        return dict, tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    raise _NotOfScoresAlone


def _form(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _copied(processor: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A processor with lists and dictionaries of its own, and with these tensors."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(copied, value))
        if type(value) is dict:
            return {key: copied(each) for key, each in value.items()}
        return value

    own = copy.copy(processor)
    vars(own).update(copied(vars(processor)))
    return own


def _runs_without_more(processor: Any, scores: torch.Tensor) -> bool:
    """Run a processor without tokens and without data; gives whether a graph could repeat it."""
    fakes = FakeTensorMode()
    made = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made.append(fakes.from_tensor(tensor))
        return made[-1]

    try:
        own = _copied(processor, fake)
        before, writes = _frozen(vars(own)), list(map(_writes, made))
        with torch.no_grad(), fakes, _TrialOperations():
            result = own(_Untouchable(), fakes.from_tensor(scores))
        form = result.shape, result.dtype, result.device
        return (
            form == (scores.shape, scores.dtype, scores.device)
            and _frozen(vars(own)) == before
            and list(map(_writes, made)) == writes
        )
    except Exception:
        return False  # whatever is wrong with it, transformers runs it as ever


class _TrialOperations(TorchDispatchMode):
    """Refuses operations that a graph would not repeat."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NotOfScoresAlone
        result = func(*args, **(kwargs or {}))
        # A list that becomes a tensor is copied from the host, which a GPU's graph cannot do.
        if func is torch.ops.aten.lift_fresh.default and result.ndim > 0:
            raise _NotOfScoresAlone
        return result


def _refuse(*args: Any) -> NoReturn:
    raise _NotOfScoresAlone


class _Untouchable:
    """Stands for tokens that nobody looks at."""

    __getattribute__ = __getitem__ = __eq__ = __ne__ = __bool__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
