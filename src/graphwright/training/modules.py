"""What a training function is made of: its parameters, device, optimizers and scaler."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..errors import CaptureError
from ..signature import tensors_of
from ..watch import FunctionModule, values_behind

# What talks to other GPUs around forward and backward, by name, so that none has to be imported.
_DISTRIBUTED = frozenset(
    {
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "FSDPModule",
        "DTensor",
    }
)


def refuse_distributed(module: nn.Module) -> None:
    """Refuse what talks to other GPUs around forward and backward.

    Raises:
        CaptureError: a module is wrapped for several GPUs, or a parameter is divided among them.
    """
    for path, part in (*module.named_modules(), *module.named_parameters()):
        kinds = [cls for cls in type(part).__mro__ if cls.__module__.startswith("torch.")]
        kind = next((cls.__name__ for cls in kinds if cls.__name__ in _DISTRIBUTED), None)
        if kind is not None:
            raise CaptureError(
                f"{kind}{f' ({path})' if path else ''} talks to other GPUs around forward and "
                "backward, which graphwright does not capture so far.",
                remedy="Train the plain module on one GPU, or graph parts of it that need no "
                "communication.",
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


class StepModule(FunctionModule):
    """A step as a module that holds what the step names, and modules that ran in it."""

    def __init__(self, step: Callable[..., Any], ran: Iterable[nn.Module]) -> None:
        super().__init__(step)
        # Memory that a graph uses, by identity: other tensors may come and go.
        self.used: Container[int] | None = None
        known = set(self.modules())
        for module in ran:
            if module not in known:
                self._modules[f"ran {len(self._modules)}"] = module
                known |= set(module.modules())

    def ignores(self, value: Any) -> bool:
        """Whether something that the step names may be replaced: a tensor that no graph uses."""
        if not isinstance(value, torch.Tensor) or self.used is None:
            return False
        return value.untyped_storage()._cdata not in self.used
