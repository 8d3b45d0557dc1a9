"""What a training function is made of: its parameters, device, optimizers and scaler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..errors import CaptureError
from ..signature import tensors_of
from ..watch import values_behind

# Of torch.distributed, which is not imported for the question.
_SHARDED = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.tensor", "DTensor"),
)


def refuse_distributed(module: nn.Module) -> None:
    """Refuse what talks to other GPUs in its backward.

    Raises:
        CaptureError: a module is wrapped for several GPUs, or a parameter is divided among them.
    """
    kinds: list[type] = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    for name, kind in _SHARDED:
        found = getattr(sys.modules.get(name), kind, None)
        if isinstance(found, type):
            kinds.append(found)
    for part in (*module.modules(), *module.parameters()):
        if isinstance(part, tuple(kinds)):
            raise CaptureError(
                f"{type(part).__name__} talks to other GPUs while gradients are computed, which "
                "graphwright does not capture yet.",
                remedy="Train the plain module on one GPU, or leave this one ungraphed.",
            )


def optimizers_of(step: Callable[..., Any], given: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers that were given, and those that a function names."""
    found = {id(optimizer): optimizer for optimizer in given}
    for _, value in values_behind(step):
        if isinstance(value, Optimizer):
            found.setdefault(id(value), value)
    return list(found.values())


def scaler_of(step: Callable[..., Any], given: GradScaler | None) -> GradScaler | None:
    """The GradScaler that was given, or that a function names; None where none scales."""
    named = (value for _, value in values_behind(step) if isinstance(value, GradScaler))
    scaler = next(named, None) if given is None else given
    return scaler if scaler is not None and scaler.is_enabled() else None


def parameters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The parameters of a module and of optimizers, each once."""
    found = {id(parameter): parameter for parameter in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {id(parameter): parameter for parameter in group["params"]}
    return list(found.values())


def device_of_training(parameters: Sequence[torch.Tensor], batch: Any) -> torch.device:
    """Where it all is.

    Raises:
        CaptureError: on several devices.
    """
    devices = {p.device for p in parameters}
    theirs = {t.device for t in tensors_of(batch)}
    if len(devices | theirs) > 1:
        raise CaptureError(
            f"The parameters are on {_names(devices)}, the batch on {_names(theirs)}.",
            remedy="Move the batch to the parameters' device before the step.",
        )
    if not devices | theirs:
        raise CaptureError(
            "The step has neither parameters nor tensors as arguments.",
            remedy="Pass the optimizer, or let the step name the model.",
        )
    return next(iter(devices | theirs))


def _names(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices))) or "none"
