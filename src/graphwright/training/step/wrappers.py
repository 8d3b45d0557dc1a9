"""Looking through wrappers of optimizers, such as those of accelerate, Lightning and users.

A wrapper holds an optimizer and calls it, perhaps under a condition or after changing gradients. A
graph repeats what its `step` did at the capture; what it holds in Python is watched like all that a
step reaches, so another value means another graph.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...calls.modules import values_behind
from ...errors import CaptureError

_ACCELERATE_LOADERS = frozenset(
    (
        *("_dataloaders", "dataloader_references", "active_dataloader", "in_dataloader"),
        *("end_of_dataloader", "remainder", "gather_for_metrics"),
    )
)
# Attributes in which libraries note what goes on around steps, and the names by which code would
# read them. By what they note the libraries set flags such as `sync_gradients`, which are watched.
_NOTES: dict[str, dict[str, frozenset[str]]] = {
    "accelerate.accelerator.Accelerator": {
        "step": frozenset(("step",)),
        "_dataloaders": _ACCELERATE_LOADERS,
    },
    "accelerate.state.GradientState": {"_dataloader_references_ref": _ACCELERATE_LOADERS},
}
# Packages whose own code does not read them in a step.
_OTHERS = frozenset(("torch", "accelerate", "builtins"))
# How far functions are followed that a step calls.
_MAX_DEPTH = 4


def is_optimizer(value: Any) -> bool:
    """Whether something is an optimizer, or is called as one and may wrap one."""
    if isinstance(value, Optimizer):
        return True
    if isinstance(value, nn.Module | type):
        return False
    kind = type(value)
    return callable(getattr(kind, "step", None)) and callable(getattr(kind, "zero_grad", None))


def wrapped_by(optimizer: Any) -> list[Any]:
    """The optimizers and wrappers that an optimizer holds in its attributes, in lists of it too."""
    found: dict[int, Any] = {}
    for value in list(getattr(optimizer, "__dict__", {}).values()):
        several = value.values() if type(value) is dict else value
        for each in several if isinstance(value, list | tuple | dict) else (value,):
            if each is not optimizer and is_optimizer(each):
                found[id(each)] = each
    return list(found.values())


def with_wrapped(optimizers: Iterable[Any]) -> list[Any]:
    """Optimizers and wrappers with all that they wrap, each once, the inner ones first."""
    found: dict[int, Any] = {}
    visited: set[int] = set()

    def visit(optimizer: Any) -> None:
        if id(optimizer) not in visited:
            visited.add(id(optimizer))
            for inner in wrapped_by(optimizer):
                visit(inner)
            found[id(optimizer)] = optimizer

    for each in optimizers:
        visit(each)
    return list(found.values())


def has_own_step(optimizer: Any) -> bool:
    """Whether an optimizer's step is a user's or a wrapper's, which may read its attributes."""
    return not type(optimizer).__module__.startswith("torch.")


def is_initialized(value: Any) -> bool:
    """Whether something is an optimizer itself: a wrapper may leave out Optimizer.__init__()."""
    return isinstance(value, Optimizer) and "_optimizer_step_pre_hooks" in vars(value)


def scalers_of(optimizers: Iterable[Any]) -> Iterator[GradScaler]:
    """The GradScalers that wrappers hold in their attributes."""
    for optimizer in optimizers:
        for value in list(getattr(optimizer, "__dict__", {}).values()):
            if isinstance(value, GradScaler):
                yield value


def refuse_communicating(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers of torch.distributed.

    Raises:
        CaptureError: one talks to other processes.
    """
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.distributed"):
            inner = [type(each).__name__ for each in wrapped_by(optimizer)]
            name = f"torch.optim.{inner[0]}" if inner else "an optimizer of torch.optim"
            raise CaptureError(
                f"{type(optimizer).__name__} talks to other processes in its step, which "
                "graphwright does not capture so far.",
                remedy=f"Train with {name} in one process.",
            )


def notes_around(step: Callable[..., Any], kind: str) -> frozenset[str]:
    """Attributes of a class in which a library notes what goes on around a step.

    accelerate's `accumulate()`, for one, counts the steps that are run in it.

    Args:
        step: the step; attributes that its code reads are left out.
        kind: the name of the class, with its module.
    """
    notes = _NOTES.get(kind, {})
    return frozenset(key for key, names in notes.items() if not _reads(step, names, 0))


def _reads(function: Callable[..., Any], names: frozenset[str], depth: int) -> bool:
    """Whether a function, or code that it names, may read one of these attributes."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or depth > _MAX_DEPTH:
        return True
    named = [value for _, value in values_behind(function)]
    owners = {type(value) for value in (getattr(function, "__self__", None), *named)}
    methods = [method.__code__ for method in _methods_of(owners)]
    if any(_loads(each, names) for each in (code, *methods)):
        return True
    own = [v for v in named if isinstance(v, types.FunctionType) and v is not function]
    return any(_reads(each, names, depth + 1) for each in own if _is_looked_into(each))


def _methods_of(classes: Iterable[type]) -> list[types.FunctionType]:
    bases = {base for each in classes for base in each.__mro__ if _is_looked_into(base)}
    return [m for base in bases for m in vars(base).values() if isinstance(m, types.FunctionType)]


def _is_looked_into(value: Any) -> bool:
    """Whether a function or class is of a package whose code may read them in a step."""
    return value.__module__.partition(".")[0] not in _OTHERS


def _loads(code: types.CodeType, names: frozenset[str]) -> bool:
    """Whether code names such an attribute, other than to call `step`; inner functions included."""
    if names & {value for value in code.co_consts if isinstance(value, str)}:
        return True  # as in getattr(it, "step")
    if (names - {"step"}) & set(code.co_names):
        return True
    for instruction in dis.get_instructions(code):
        # Since Python 3.12 this loads methods that are called, too.
        is_method = sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)
        if instruction.opname == "LOAD_ATTR" and instruction.argval in names and not is_method:
            return True
    inner = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return any(_loads(each, names) for each in inner)
