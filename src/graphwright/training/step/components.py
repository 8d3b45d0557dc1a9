"""Finding a step's parameters, device, modules and optimizers, and putting their state back.

Some are given or named by the step; others show only in a run (`Discovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...calls.leaves import SCALARS
from ...calls.modules import FunctionModule, values_behind
from ...calls.split import tensors_of
from ...errors import CaptureError
from .wrappers import is_optimizer, notes_around, scalers_of, with_wrapped

# Attributes in which schedulers of PyTorch's note that an optimizer was called.
_NOTES = frozenset(("_opt_called", "_step_count"))


def optimizers_of(step: Callable[..., Any], given: Iterable[Any]) -> list[Any]:
    """The optimizers that were given, and those that a function names.

    Wrappers are among them, after what they wrap.
    """
    named = [value for _, value in values_behind(step) if is_optimizer(value)]
    return with_wrapped([*given, *named])


def scaler_of(
    step: Callable[..., Any], given: GradScaler | None, optimizers: Iterable[Any]
) -> GradScaler | None:
    """The GradScaler that was given or that a function or wrapper names; None if none scales."""
    named = [value for _, value in values_behind(step) if isinstance(value, GradScaler)]
    scaler = next(iter((*named, *scalers_of(optimizers))), None) if given is None else given
    return scaler if scaler is not None and scaler.is_enabled() else None


def parameters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The parameters of a module and of optimizers, without duplicates."""
    found = {id(parameter): parameter for parameter in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {id(parameter): parameter for parameter in group["params"]}
    return list(found.values())


def device_of_training(parameters: Sequence[torch.Tensor], batch: Any) -> torch.device:
    """The one device of parameters and batch; tensors of the batch may be on the host.

    Raises:
        CaptureError: there are several devices, or none.
    """
    devices = {p.device for p in parameters}
    theirs = {t.device for t in tensors_of(batch)}
    found = devices | theirs
    if any(device.type != "cpu" for device in found):
        found = devices | {device for device in theirs if device.type != "cpu"}
    if len(found) > 1:
        raise CaptureError(
            f"The parameters are on {_names(devices)}, the batch on {_names(theirs)}.",
            remedy="Move the batch to the parameters' device before the step.",
        )
    if not found:
        raise CaptureError(
            "The step has neither parameters nor tensors as arguments.",
            remedy="Pass the optimizer, or let the step name the model.",
        )
    return next(iter(found))


def _names(devices: Iterable[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices))) or "none"


def hooks_of(
    parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]
) -> list[list[Callable[..., Any]]]:
    """The hooks of each parameter, and those of each optimizer."""
    holders: list[Any] = []
    for parameter in parameters:
        holders += [parameter._backward_hooks]
        holders += [getattr(parameter, "_post_accumulate_grad_hooks", None)]
    for optimizer in optimizers:
        holders += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return [list((holder or {}).values()) for holder in holders]


class StepModule(FunctionModule):
    """A step as a module: it holds the modules that the step names, and those that ran in it."""

    def __init__(self, step: Callable[..., Any], ran: Iterable[nn.Module]) -> None:
        super().__init__(step)
        # Storages that a graph uses, by identity; other tensors may be replaced.
        self.used: Container[int] | None = None
        self._unread: dict[str, frozenset[str]] = {}
        known = set(self.modules())
        for module in ran:
            if module not in known:
                self._modules[f"ran {len(self._modules)}"] = module
                known |= set(module.modules())

    def hold(self, functions: Iterable[Callable[..., Any]]) -> None:
        """Hold what functions reach, too, such as hooks."""
        for function in functions:
            self._modules[f"function {len(self._modules)}"] = FunctionModule(function)

    def ignores(self, value: Any) -> bool:
        """Whether a value that the step names may be replaced: a tensor that no graph uses."""
        if not isinstance(value, torch.Tensor) or self.used is None:
            return False
        return value.untyped_storage()._cdata not in self.used

    def unread_of(self, value: Any) -> frozenset[str]:
        """Attributes in which a library notes what goes on around steps; see `wrappers`."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind not in self._unread:
            self._unread[kind] = notes_around(self._function, kind)
        return self._unread[kind]


class Discovery:
    """Notes the modules and optimizers that run inside its block, with their former state.

    Args:
        known: parameters whose gradients the caller puts back.
        optimizers: those whose states and options it puts back.

    Attributes:
        modules: in the order of their first calls.
        optimizers: in the order of their first steps.
    """

    def __init__(self, known: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]) -> None:
        self._known = {id(each) for each in (*known, *optimizers)}
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._kept = OptimizersKept(())
        self._grads: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._seen: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Discovery:
        self._handles = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._stepped),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def put_gradients_back(self) -> None:
        """Put back the gradients of parameters that were not known."""
        for parameter, grad in self._grads:
            parameter.grad = grad

    def put_optimizers_back(self) -> None:
        """Put back the states and options of the optimizers that were not known."""
        self._kept.put_back()

    def _called(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.modules.append(module)
            own = module._parameters.values()
            new = [p for p in own if p is not None and id(p) not in self._known]
            self._grads += [(p, p.grad) for p in new]

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
            if id(optimizer) not in self._known:
                self._kept.add(optimizer)


class OptimizersKept:
    """The states and options of optimizers, to put back later; values of tensors are not kept.

    So are the plain attributes of optimizers whose class is a user's: its `step()` may count.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._kept: list[tuple[Optimizer, dict[Any, dict[str, Any]], list[dict[str, Any]]]] = []
        self._attributes: list[tuple[Optimizer, dict[str, Any]]] = []
        for optimizer in optimizers:
            self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Keep those of one more optimizer."""
        states = {p: dict(state) for p, state in optimizer.state.items()}
        self._kept.append((optimizer, states, [dict(group) for group in optimizer.param_groups]))
        self._attributes.append((optimizer, _own_attributes(optimizer)))

    def changed_options(self) -> list[str]:
        """Names of options that have changed since, and of plain values beside them."""
        options = [
            key
            for optimizer, _, groups in self._kept
            for group, before in zip(optimizer.param_groups, groups, strict=False)
            for key, value in before.items()
            if group.get(key) is not value
        ]
        values = [
            str(key)
            for optimizer, states, _ in self._kept
            for parameter, before in states.items()
            for key, value in before.items()
            if isinstance(value, SCALARS) and optimizer.state[parameter].get(key) != value
        ]
        attributes = [
            key
            for optimizer, before in self._attributes
            for key, value in before.items()
            if vars(optimizer).get(key) != value
        ]
        return [*options, *values, *attributes]

    def made_since(self) -> list[torch.Tensor]:
        """Tensors of states that were made since."""
        return [
            value
            for optimizer, states, _ in self._kept
            for parameter, state in optimizer.state.items()
            if parameter not in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]

    def put_back(self) -> None:
        """Put states and options back."""
        for optimizer, states, groups in self._kept:
            for parameter in list(optimizer.state):
                if parameter not in states:
                    del optimizer.state[parameter]
            for parameter, state in states.items():
                now = optimizer.state[parameter]
                if now.keys() != state.keys() or any(now[k] is not v for k, v in state.items()):
                    now.clear()
                    now.update(state)
            for group, before in zip(optimizer.param_groups, groups, strict=False):
                group.update(before)
        for optimizer, attributes in self._attributes:
            vars(optimizer).update(attributes)


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The plain attributes of an optimizer whose class is a user's."""
    if type(optimizer).__module__.startswith("torch."):
        return {}
    return {
        key: value
        for key, value in vars(optimizer).items()
        if isinstance(value, SCALARS) and key not in _NOTES
    }


class SchedulersKept:
    """The state of the schedulers that a function names, to put back later."""

    def __init__(self, function: Any) -> None:
        found = [v for _, v in values_behind(function) if isinstance(v, LRScheduler)]
        self._kept = [(scheduler, dict(vars(scheduler))) for scheduler in found]

    def put_back(self) -> None:
        """Put it back."""
        for scheduler, before in self._kept:
            vars(scheduler).clear()
            vars(scheduler).update(before)
