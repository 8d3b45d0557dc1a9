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
import types
from collections.abc import Callable, Iterator
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


# They add nothing to what a processor does.
_BASES = (
    ("builtins", "object"),
    ("transformers.generation.logits_process", "LogitsProcessor"),
)


class _Refused(Exception):
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
    kind = type(processor)
    try:
        for function in _functions(kind):
            _check_names(function)
        key = kind, _frozen(vars(processor))
        _try(processor, scores)
        return key, _copied(processor, lambda tensor: tensor)
    except Exception:
        # Whatever is wrong with it, transformers runs it as ever.
        return None


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """All code that a class brings along."""
    if not isinstance(kind.__call__, types.FunctionType):
        raise _Refused  # such as a function, whose code is no attribute of it
    for base in kind.__mro__:
        if (base.__module__, base.__name__) in _BASES:
            continue
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType):
                if name != "__init__":
                    yield value
            elif not name.startswith("__"):
                _check_constant(value)


def _check_names(function: types.FunctionType) -> None:
    for name in _globals_of(function.__code__):
        value = function.__globals__.get(name, _Refused)
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in ("torch", "math"):
                raise _Refused
        elif value is not _Refused:
            _check_constant(value)
        elif name not in _HARMLESS:
            raise _Refused


@functools.lru_cache(maxsize=256)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    if set(code.co_freevars) - {"__class__"} or code.co_exceptiontable:
        raise _Refused
    names = set()
    for each in dis.get_instructions(code):
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            raise _Refused
        # By __class__, __dict__ and the like code reaches anything.
        if each.opname.endswith(("ATTR", "METHOD")) and _is_hidden(str(each.argval)):
            raise _Refused
        if each.opname == "LOAD_GLOBAL":
            names.add(str(each.argval))
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(names).union(*map(_globals_of, inner))


def _is_hidden(name: str) -> bool:
    return name.startswith("__") and name not in ("__call__", "__init__")


def _check_constant(value: Any) -> None:
    """Raises _Refused unless a value that others see too is one that nobody changes in place."""
    if type(value) is tuple:
        for each in value:
            _check_constant(each)
    elif type(value) not in _PLAIN:
        raise _Refused


def _frozen(value: Any) -> Any:
    """A plain value as something to compare; a tensor is the same if it is this one."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if type(value) in (list, tuple):
        return type(value), tuple(map(_frozen, value))
    if type(value) is dict:
        return dict, tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    raise _Refused


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


def _try(processor: Any, scores: torch.Tensor) -> None:
    """Run a processor without tokens and without data; raises if a graph could not repeat it."""
    fakes = FakeTensorMode()
    made = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made.append(fakes.from_tensor(tensor))
        return made[-1]

    own = _copied(processor, fake)
    before, versions = _frozen(vars(own)), [each._version for each in made]
    with torch.no_grad(), fakes, _Trial():
        result = own(_Untouchable(), fakes.from_tensor(scores))
    form = scores.shape, scores.dtype, scores.device
    if (
        not isinstance(result, torch.Tensor)
        or (result.shape, result.dtype, result.device) != form
        or _frozen(vars(own)) != before
        or [each._version for each in made] != versions
    ):
        raise _Refused


class _Trial(TorchDispatchMode):
    """Refuses operations that a graph would not repeat."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Refused
        result = func(*args, **(kwargs or {}))
        # A list that becomes a tensor is copied from the host, which a GPU's graph cannot do.
        if func is torch.ops.aten.lift_fresh.default and result.ndim > 0:
            raise _Refused
        return result


def _refuse(*args: Any) -> NoReturn:
    raise _Refused


class _Untouchable:
    """Stands for tokens that nobody looks at."""

    __getattribute__ = __getitem__ = __eq__ = __ne__ = __bool__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
