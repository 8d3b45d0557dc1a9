"""Looking through wrappers of optimizers, such as those of accelerate, Lightning and users.

A wrapper holds an optimizer and calls it, perhaps under a condition or after changing gradients. A
graph repeats what its `step` did at the capture; what it holds in Python is watched like all that a
step reaches, so another value means another graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...errors import CaptureError


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
