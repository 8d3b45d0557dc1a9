"""Making optimizers fit for a graph: their state on the device, in memory that stays the same.

A graph repeats kernels with the arguments of the capture. A step count or learning rate on the host
would stay what it was then. So step counts are kept on the device (PyTorch's option `capturable`),
and a learning rate that changes is read from a tensor.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...errors import CaptureError
from .numbers import Number

Group = dict[str, Any]

# Entries of a group that step() does not read as options: parameters, and notes of schedulers.
NO_OPTIONS = frozenset(
    {
        *("params", "initial_lr", "max_lr", "min_lr", "param_names"),
        *("max_momentum", "base_momentum"),
    }
)
# Methods that check for a capture before a step, by PyTorch's version.
_CAPTURE_CHECKS = (
    "_cuda_graph_capture_health_check",
    "_accelerator_graph_capture_health_check",
)


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Have an optimizer keep its step count on the device.

    Raises:
        CaptureError: that alone does not make it fit for a graph.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "capturable" in group and device.type != "cpu":
            group["capturable"] = True
            continue
        if group.get("fused") or isinstance(optimizer, SGD):
            continue
        if device.type == "cpu" and "fused" in group:
            raise CaptureError(
                f"{name} counts its steps in Python on the CPU; a graph would count none.",
                remedy=f"Pass fused=True to {name}.",
            )
        raise CaptureError(
            f"{name} computes on the host, which a graph does not repeat.",
            remedy="Use SGD, or an optimizer with fused=True or capturable=True, such as AdamW.",
        )
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, torch.Tensor) and step.device != device:
            state["step"] = step.to(device, torch.float32)


@contextlib.contextmanager
def skip_capture_checks(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Switch off the optimizers' own checks for a capture, since `make_capturable` has checked.

    PyTorch 2.11 asks the GPU even if the parameters are on the host.
    """
    for optimizer in optimizers:
        vars(optimizer).update(dict.fromkeys(_CAPTURE_CHECKS, _do_nothing))
    try:
        yield
    finally:
        for optimizer in optimizers:
            for name in _CAPTURE_CHECKS:
                vars(optimizer).pop(name, None)  # Two of them may share one dictionary.


def _do_nothing() -> None:
    pass


def check_scaling(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers for which a GradScaler reads from the device whether to skip a step.

    Raises:
        CaptureError: one is not fused.
    """
    for optimizer in optimizers:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            name = type(optimizer).__name__
            raise CaptureError(
                f"With {name} as it is, GradScaler reads from the device whether to skip a step.",
                remedy=f"Pass fused=True to {name}: it decides that on the device.",
            )


class LearningRate:
    """The learning rate of one parameter group, as a graph reads it.

    Attributes:
        tensor: the tensor that it is read from; None while it is a constant of the kernels.
    """

    def __init__(self, optimizer: Optimizer, index: int, device: torch.device) -> None:
        self._optimizer = optimizer
        self._index = index
        self._device = device
        self._copied: float | None = None
        self.tensor: torch.Tensor | None = None

    @property
    def group(self) -> Group:
        """The parameter group, as it is now."""
        return self._optimizer.param_groups[self._index]

    @property
    def option(self) -> tuple[Optimizer, int, str]:
        """The name that `Settings.difference` has for it."""
        return self._optimizer, self._index, "lr"

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether it is a rate of this optimizer."""
        return self._optimizer is optimizer

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler of PyTorch's is attached to the optimizer."""
        return hasattr(self._optimizer.step, "_wrapped_by_lr_sched")

    def __str__(self) -> str:
        return f"{type(self._optimizer).__name__}, group {self._index}"

    @property
    def can_change(self) -> bool:
        """Whether the optimizer can read it from a tensor."""
        group = self.group
        if not isinstance(group.get("lr"), float | int):
            return False
        if group.get("fused") or group.get("capturable"):
            return True
        # Only the fused kernel reads it from a tensor. On the CPU it is wrong for half precision.
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"])
        return isinstance(self._optimizer, SGD) and not (half and self._device.type == "cpu")

    def move_to_tensor(self) -> None:
        """Have graphs read it from a tensor from now on."""
        with torch.inference_mode(False):
            self.tensor = torch.zeros((), dtype=torch.float32, device=self._device)
        self._copied = None

    def refresh(self) -> None:
        """Copy the group's present number into the tensor."""
        if self.tensor is None or self._index >= len(self._optimizer.param_groups):
            return
        now = self.group["lr"]
        with torch.no_grad():
            if isinstance(now, torch.Tensor):
                self.tensor.copy_(now)
                self._copied = None
            elif now != self._copied:
                self.tensor.fill_(now)
                self._copied = now

    @contextlib.contextmanager
    def as_tensor(self) -> Iterator[None]:
        """Put the tensor, if there is one, into the group in place of the number.

        Raises:
            CaptureError: the step has set the learning rate itself.
        """
        group = self.group
        fused = isinstance(self._optimizer, SGD) and (
            self.tensor is not None or isinstance(group.get("lr"), torch.Tensor)
        )
        new: Group = {} if self.tensor is None else {"lr": self.tensor}
        if fused:
            new |= {"fused": True, "foreach": False}
        before = {key: group.get(key) for key in ("lr", *new)}
        group.update(new)
        lr = group.get("lr")
        version = lr._version if isinstance(lr, torch.Tensor) else 0
        try:
            yield
            if group.get("lr") is not lr or (
                isinstance(lr, torch.Tensor) and lr._version != version
            ):
                raise CaptureError(
                    "The step sets the learning rate, which a graph would not.",
                    remedy="Leave scheduler.step() out of the step: pass the scheduler to "
                    "graph_step(), or call it after each step.",
                )
        finally:
            group.update({key: value for key, value in before.items() if key in new})


class Settings:
    """Options of optimizers and a GradScaler that are no tensors, hence constants of kernels.

    Of a number that is read from a tensor, what an optimizer has asked about it is a constant.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        rates: Sequence[LearningRate],
        numbers: Sequence[Number],
        scaler: GradScaler | None,
    ) -> None:
        in_tensors = {(id(rate.group), "lr") for rate in rates if rate.tensor is not None}
        self._numbers = [number for number in numbers if number.in_tensors]
        self._values = [number.value for number in self._numbers]
        in_tensors |= {(id(number.group), number.key) for number in self._numbers}
        self._groups = [(optimizer, _parameters_of(optimizer)) for optimizer in optimizers]
        self._scaler = scaler
        self._factors = _factors(scaler)
        self._held: list[tuple[Optimizer, int, frozenset[str], list[tuple[str, Any]]]] = []
        for optimizer, index, group in _groups_once(optimizers):
            held = []
            for key, value in group.items():
                variable = (id(group), key) in in_tensors
                if not (key in NO_OPTIONS or variable or isinstance(value, torch.Tensor)):
                    # Lists are the optimizer's own: they may be changed in place.
                    own = copy.copy(value) if isinstance(value, list | dict) else value
                    held.append((key, own))
            self._held.append((optimizer, index, frozenset(group), held))

    def difference(self) -> tuple[Any, int, str] | None:
        """An option that has changed: its owner, the index of its group, and its name; or None."""
        return next(self.differences(), None)

    def differences(self) -> Iterator[tuple[Any, int, str]]:
        """All options that have changed, as `difference` tells one."""
        for optimizer, groups in self._groups:
            if _parameters_of(optimizer) != groups:
                yield optimizer, 0, "params"
                return
        for optimizer, index, keys, held in self._held:
            group = optimizer.param_groups[index]
            if not keys.issuperset(group):  # The step of a user's optimizer may ask for others.
                for key in group.keys() - keys - NO_OPTIONS:
                    yield optimizer, index, key
            for key, value in held:
                now = group.get(key)
                if now is not value and (type(now) is not type(value) or now != value):
                    yield optimizer, index, key
        for position, number in enumerate(self._numbers):
            now, before = number.value, self._values[position]
            if now is not before:
                answers = number.answers(now)
                if answers is None or answers != number.answers(before):
                    yield number.option
                else:
                    self._values[position] = now
        if _factors(self._scaler) != self._factors:
            yield self._scaler, 0, "growth"


def _parameters_of(optimizer: Optimizer) -> list[list[int]]:
    """The identities of an optimizer's parameters, by group."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _once(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Optimizers without those that share the state of an earlier one, as wrappers do."""
    found: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        found.setdefault(id(optimizer.state), optimizer)
    return list(found.values())


def _groups_once(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, int, Group]]:
    """The parameter groups of optimizers, each once, with their owners and indices."""
    found: dict[int, tuple[Optimizer, int, Group]] = {}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            found.setdefault(id(group), (optimizer, index, group))
    return list(found.values())


def options_of(optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> list[Any]:
    """The options of optimizers and a GradScaler, to be compared with those of another moment."""
    options: list[Any] = [
        (id(group), key, id(value) if isinstance(value, torch.Tensor) else repr(value))
        for _, _, group in _groups_once(optimizers)
        for key, value in group.items()
        if key not in NO_OPTIONS
    ]
    return [*options, _factors(scaler)]


def _factors(scaler: GradScaler | None) -> tuple[float, ...]:
    """The numbers that a GradScaler computes with."""
    if scaler is None:
        return ()
    return scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


class OptimizerMemory:
    """The memory of optimizers' states and of a GradScaler that a graph reads and writes.

    Loading a state replaces its tensors; `copy_back` then copies their values to this memory.
    Whoever holds a tensor in this memory, such as one from `state_dict()`, keeps its values.

    Args:
        optimizers: the optimizers that the step uses.
        scaler: the GradScaler that it uses, if any.
        used: storages that the graph uses, by identity; other states do not concern it.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], scaler: GradScaler | None, used: Container[int]
    ) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._states = [
            (optimizer, parameter, dict(state))
            for optimizer in _once(optimizers)
            for parameter, state in optimizer.state.items()
            if any(t.untyped_storage()._cdata in used for t in _tensors(state))
        ]
        self._groups = [
            (optimizer, index, key, value)
            for optimizer, index, group in _groups_once(optimizers)
            for key, value in group.items()
            if isinstance(value, torch.Tensor)
        ]
        attributes = {} if scaler is None else vars(scaler)
        self._scaling = {k: v for k, v in attributes.items() if isinstance(v, torch.Tensor)}
        shown = [t for _, _, state in self._states for t in _tensors(state)]
        shown += [*(value for *_, value in self._groups), *self._scaling.values()]
        # Each tensor that others see, and one of our own in the same memory, which stays there.
        self._memory = {id(tensor): (tensor, tensor.detach()) for tensor in shown}
        self._never_replaced = True
        self._list_expected()

    def _list_expected(self) -> None:
        """List the expected tensors of each optimizer's states, so that `intact` is quick."""
        self._expected: list[tuple[Optimizer, list[Any], list[Any]]] = []
        for optimizer in self._optimizers:
            theirs = [(p, state) for o, p, state in self._states if o is optimizer]
            values = [value for _, state in theirs for value in state.values()]
            self._expected.append((optimizer, [p for p, _ in theirs], values))

    def tensors(self) -> list[torch.Tensor]:
        """One tensor for each piece of it."""
        return [mine for _, mine in self._memory.values()]

    def intact(self) -> bool:
        """Whether all tensors are still in this memory."""
        here = self._intact()
        self._never_replaced = self._never_replaced and not here
        return here

    def _intact(self) -> bool:
        for optimizer, parameters, expected in self._expected:
            states: list[Any] = list(map(optimizer.state.get, parameters))
            if None in states:
                return False
            now = list(itertools.chain.from_iterable(map(dict.values, states)))
            if len(now) != len(expected) or not all(map(operator.is_, now, expected)):
                return False
        for optimizer, index, key, value in self._groups:
            if optimizer.param_groups[index].get(key) is not value:
                return False
        return all(vars(self._scaler).get(key) is value for key, value in self._scaling.items())

    def misses_state(self) -> bool:
        """Whether a parameter's state was removed: its first step is still to come."""
        return any(not o.state.get(p) for o, p, _ in self._states)

    def make_initial_states(self) -> bool:
        """Make the states that are missing, if they are all zeros before the first step.

        False if an optimizer's first step differs from later ones.
        """
        new = [entry for entry in self._states if not entry[0].state.get(entry[1])]
        if not all(_starts_from_zeros(optimizer) for optimizer, _, _ in new):
            return False
        with torch.no_grad():
            for optimizer, parameter, kept in new:
                first = dict(kept)
                for key, value in kept.items():
                    if isinstance(value, torch.Tensor):
                        # Once it was replaced, someone else may hold it, such as a saved state.
                        first[key] = (
                            value.zero_() if self._never_replaced else torch.zeros_like(value)
                        )
                optimizer.state[parameter].update(first)
        return self.intact() or self.copy_back()

    def copy_back(self) -> bool:
        """Copy values of other tensors to this memory; False if states have another structure."""
        if self.misses_state():
            return False
        self._never_replaced = False
        pairs = self._pairs()
        if pairs is None or not all(_alike(h.get(key), value) for h, key, value in pairs):
            return False
        moves: dict[int, torch.Tensor] = {}
        for holder, key, value in pairs:
            if isinstance(value, torch.Tensor):
                now = holder[key]
                if moves.setdefault(id(value), now) is not now:
                    return False  # Groups that shared one learning rate now have two.
        shown = self._move(moves)
        for holder, key, value in pairs:
            holder[key] = shown.get(id(value), value)
        self._show(shown)
        return True

    def _pairs(self) -> list[tuple[Any, Any, Any]] | None:
        """What holds something of this memory now, by which key, and what it has held.

        None if states have other keys, or a group is gone.
        """
        pairs: list[tuple[Any, Any, Any]] = []
        for optimizer, parameter, kept in self._states:
            state = optimizer.state.get(parameter)
            if state is None or state.keys() != kept.keys():
                return None
            pairs += [(state, key, value) for key, value in kept.items()]
        for optimizer, index, key, value in self._groups:
            if index >= len(optimizer.param_groups):
                return None
            pairs.append((optimizer.param_groups[index], key, value))
        return pairs + [(vars(self._scaler), key, value) for key, value in self._scaling.items()]

    def _show(self, shown: Mapping[int, torch.Tensor]) -> None:
        """Expect other tensors in this memory from now on, by the identity of the former ones."""
        self._states = [
            (o, p, {k: shown.get(id(v), v) for k, v in kept.items()}) for o, p, kept in self._states
        ]
        self._groups = [(o, i, k, shown.get(id(v), v)) for o, i, k, v in self._groups]
        self._scaling = {k: shown.get(id(v), v) for k, v in self._scaling.items()}
        self._memory = {id(new): (new, self._memory[old][1]) for old, new in shown.items()}
        for optimizer, parameter, kept in self._states:
            state = optimizer.state[parameter]
            state.clear()  # To restore the order of its entries.
            state.update(kept)
        self._list_expected()

    def _move(self, moves: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copy the values of tensors to this memory; the tensors that replace them."""
        shown: dict[int, torch.Tensor] = {}
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for key, now in moves.items():
                before, memory = self._memory[key]
                if now is before or now.data_ptr() == memory.data_ptr():
                    shown[key] = now  # Another graph has copied it here.
                    continue
                # Clones, since two tensors may have been swapped.
                copied.append((memory, now.clone()))
                if before.data_ptr() == memory.data_ptr():
                    before.data = before.clone()
                shown[key] = memory.detach()
            for memory, values in copied:
                memory.copy_(values)
        return shown


def _tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _starts_from_zeros(optimizer: Optimizer) -> bool:
    if type(optimizer) is SGD:
        # Its first step takes the gradient as the momentum, without dampening.
        return all(group["dampening"] == 0 for group in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW)


def _alike(now: Any, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return type(now) is type(value) and bool(now == value)
    return (
        isinstance(now, torch.Tensor)
        and now.shape == value.shape
        and now.dtype == value.dtype
        and (now.device == value.device or now.numel() == 1)
    )
