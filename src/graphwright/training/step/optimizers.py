"""What a graph asks of optimizers: all that they compute with on the device, and where it was.

A graph repeats kernels. What an optimizer keeps on the host, a step count or a learning rate, goes
into the kernels' arguments and stays what it was at capture; so the count is kept on the device
(PyTorch's option `capturable`), and a learning rate that changes is read from a tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...errors import CaptureError

Group = dict[str, Any]

# Not read by step(): the parameters, and what schedulers keep for themselves.
_NO_OPTIONS = frozenset({"params", "initial_lr", "max_lr", "min_lr", "param_names"})


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Have an optimizer keep its step count on the device, where that is all that it needs.

    Raises:
        CaptureError: it needs more than that.
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


# What an optimizer asks before a step, by PyTorch's version.
_HEALTH = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")


@contextlib.contextmanager
def unasked(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Keep optimizers from asking for a capture: `make_capturable` has seen to it.

    PyTorch 2.11 asks about the GPU where the parameters are on the host.
    """
    for optimizer in optimizers:
        vars(optimizer).update(dict.fromkeys(_HEALTH, _nothing))
    try:
        yield
    finally:
        for optimizer in optimizers:
            for name in _HEALTH:
                del vars(optimizer)[name]


def _nothing() -> None:
    pass


def check_scaling(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers for which a GradScaler asks the device whether to skip a step.

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


class Rate:
    """The learning rate of one group as a graph reads it.

    Attributes:
        tensor: where it is read from; None while it is a constant of the kernels.
    """

    def __init__(self, optimizer: Optimizer, index: int, device: torch.device) -> None:
        self._optimizer = optimizer
        self._index = index
        self._device = device
        self._filled: float | None = None
        self.tensor: torch.Tensor | None = None

    @property
    def group(self) -> Group:
        """Its group, as it is now."""
        return self._optimizer.param_groups[self._index]

    @property
    def option(self) -> tuple[Optimizer, int, str]:
        """What `Settings.difference` calls it."""
        return self._optimizer, self._index, "lr"

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether it is one of this optimizer's."""
        return self._optimizer is optimizer

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler of PyTorch's has been attached to its optimizer."""
        return hasattr(self._optimizer.step, "_wrapped_by_lr_sched")

    def __str__(self) -> str:
        return f"{type(self._optimizer).__name__}, group {self._index}"

    @property
    def can_change(self) -> bool:
        """Whether the optimizer can read it from a tensor."""
        group = self.group
        if not isinstance(group.get("lr"), float | int):
            return False
        fused = bool(group.get("fused")) or isinstance(self._optimizer, SGD)
        return fused or bool(group.get("capturable"))

    def change(self) -> None:
        """From now on it is read from a tensor."""
        with torch.inference_mode(False):
            self.tensor = torch.zeros((), dtype=torch.float32, device=self._device)
        self._filled = None

    def refresh(self) -> None:
        """Copy the number in that the group has now."""
        if self.tensor is None or self._index >= len(self._optimizer.param_groups):
            return
        now = self.group["lr"]
        with torch.no_grad():
            if isinstance(now, torch.Tensor):
                self.tensor.copy_(now)
                self._filled = None
            elif now != self._filled:
                self.tensor.fill_(now)
                self._filled = now

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the optimizer see the tensor.

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
    """What of optimizers and a GradScaler is in kernels as an argument: what is no tensor."""

    def __init__(
        self, optimizers: Sequence[Optimizer], rates: Sequence[Rate], scaler: GradScaler | None
    ) -> None:
        free = {(id(r._optimizer), r._index) for r in rates if r.tensor is not None}
        self._groups = [
            (o, [list(map(id, group["params"])) for group in o.param_groups]) for o in optimizers
        ]
        self._scaler = scaler
        self._factors = _factors(scaler)
        self._held: list[tuple[Optimizer, int, str, Any]] = []
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    variable = key == "lr" and (id(optimizer), index) in free
                    if not (key in _NO_OPTIONS or variable or isinstance(value, torch.Tensor)):
                        self._held.append((optimizer, index, key, value))

    def difference(self) -> tuple[Any, int, str] | None:
        """Which option is another one by now: whose, of which group, and the option's name."""
        for optimizer, groups in self._groups:
            if [list(map(id, group["params"])) for group in optimizer.param_groups] != groups:
                return optimizer, 0, "params"
        for optimizer, index, key, value in self._held:
            now = optimizer.param_groups[index].get(key)
            if now is not value and (type(now) is not type(value) or now != value):
                return optimizer, index, key
        if _factors(self._scaler) != self._factors:
            return self._scaler, 0, "growth"
        return None


def _factors(scaler: GradScaler | None) -> tuple[float, ...]:
    """What a GradScaler has as numbers."""
    if scaler is None:
        return ()
    return scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


class OptimizerMemory:
    """Where the tensors of optimizers and of a GradScaler are that a graph works on.

    Loading a state puts other tensors in their place; their values are brought home. Whoever keeps
    a tensor that was at home, as `state_dict()` does, keeps its values.

    Args:
        optimizers: that the step uses.
        scaler: likewise.
        used: storages that the graph uses, by identity; states elsewhere are not its own.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], scaler: GradScaler | None, used: Container[int]
    ) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._states = [
            (optimizer, parameter, dict(state))
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            if any(t.untyped_storage()._cdata in used for t in _tensors(state))
        ]
        self._groups = [
            (optimizer, index, key, value)
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, torch.Tensor)
        ]
        attributes = {} if scaler is None else vars(scaler)
        self._scale = {k: v for k, v in attributes.items() if isinstance(v, torch.Tensor)}
        shown = [t for _, _, state in self._states for t in _tensors(state)]
        shown += [*(value for *_, value in self._groups), *self._scale.values()]
        # The memory itself, whatever becomes of the tensors that others see of it.
        self._memory = {id(tensor): (tensor, tensor.detach()) for tensor in shown}
        self._unseen = True
        self._index()

    def _index(self) -> None:
        """What states hold, by optimizer, for a quick look."""
        self._expected: list[tuple[Optimizer, list[Any], list[Any]]] = []
        for optimizer in self._optimizers:
            theirs = [(p, state) for o, p, state in self._states if o is optimizer]
            values = [value for _, state in theirs for value in state.values()]
            self._expected.append((optimizer, [p for p, _ in theirs], values))

    def intact(self) -> bool:
        """Whether all of them are where they were."""
        here = self._intact()
        self._unseen = self._unseen and not here
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
        return all(vars(self._scaler).get(key) is value for key, value in self._scale.items())

    def lacks(self) -> bool:
        """Whether something has no state that had one: its first step is to come."""
        return any(not o.state.get(p) for o, p, _ in self._states)

    def begin(self) -> bool:
        """Make the state that optimizers have before their first step, where that is all zeros.

        False where an optimizer's first step is another one than those that follow.
        """
        new = [entry for entry in self._states if not entry[0].state.get(entry[1])]
        if not all(_starts_from_zeros(optimizer) for optimizer, _, _ in new):
            return False
        with torch.no_grad():
            for optimizer, parameter, kept in new:
                first = dict(kept)
                for key, value in kept.items():
                    if isinstance(value, torch.Tensor):
                        # Once somebody has seen it, it may be in a state that was saved.
                        first[key] = value.zero_() if self._unseen else torch.zeros_like(value)
                optimizer.state[parameter].update(first)
        return self.intact() or self.bring()

    def bring(self) -> bool:
        """Copy what is elsewhere home; False if there is something else than there was."""
        if self.lacks():
            return False
        self._unseen = False
        pairs: list[tuple[Any, Any, Any]] = []
        for optimizer, parameter, kept in self._states:
            state = optimizer.state.get(parameter)
            if state is None or state.keys() != kept.keys():
                return False
            pairs += [(state, key, value) for key, value in kept.items()]
        for optimizer, index, key, value in self._groups:
            if index >= len(optimizer.param_groups):
                return False
            pairs.append((optimizer.param_groups[index], key, value))
        pairs += [(vars(self._scaler), key, value) for key, value in self._scale.items()]
        if not all(_alike(holder.get(key), value) for holder, key, value in pairs):
            return False
        moves: dict[int, torch.Tensor] = {}
        for holder, key, value in pairs:
            if isinstance(value, torch.Tensor):
                now = holder[key]
                if moves.setdefault(id(value), now) is not now:
                    return False  # Groups that shared one learning rate have two by now.
        shown = self._move(moves)
        for holder, key, value in pairs:
            holder[key] = shown.get(id(value), value)
        self._states = [
            (o, p, {k: shown.get(id(v), v) for k, v in kept.items()}) for o, p, kept in self._states
        ]
        self._groups = [(o, i, k, shown.get(id(v), v)) for o, i, k, v in self._groups]
        self._scale = {k: shown.get(id(v), v) for k, v in self._scale.items()}
        self._memory = {id(new): (new, self._memory[old][1]) for old, new in shown.items()}
        for optimizer, parameter, kept in self._states:
            state = optimizer.state[parameter]
            state.clear()  # In the order that they had.
            state.update(kept)
        self._index()
        return True

    def _move(self, moves: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Have the memory hold what these tensors hold; what is seen of it from now on."""
        shown: dict[int, torch.Tensor] = {}
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for key, now in moves.items():
                before, memory = self._memory[key]
                if now is before or now.data_ptr() == memory.data_ptr():
                    shown[key] = now  # Another graph has brought it here.
                    continue
                # Clones: two may have changed places.
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
        # Its first step takes the gradient for the momentum as it is.
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
