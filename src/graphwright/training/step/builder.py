"""StepBuilder finds what a training step works with at present, and captures it as a graph."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...calls.modules import values_behind
from ...calls.split import Args, Kwargs
from ...errors import CaptureError, MemoryBudgetExceeded, in_words
from ...graphs.journal import Copies
from ...graphs.memory import MemoryPool, recorder_for
from ...graphs.transaction import let_go
from ..distributed import refuse_distributed
from .body import Body, Usage, grads_of, observe_usage
from .captured_step import CapturedStep
from .components import (
    OptimizersKept,
    SchedulersKept,
    StepModule,
    device_of_training,
    hooks_of,
    optimizers_of,
    parameters_of,
    scaler_of,
)
from .numbers import Number
from .optimizers import NO_OPTIONS, LearningRate, check_scaling, make_capturable, options_of
from .wrappers import (
    has_own_step,
    is_initialized,
    is_optimizer,
    refuse_communicating,
    with_wrapped,
    wrapped_by,
)

# How often a run of a step may show modules or optimizers that were not known.
_ATTEMPTS = 4
# From this change on, an option is read from a tensor. Before, it is a constant of the kernels, so
# that steps equal eager's bit for bit; many options change once or never.
_CONSTANTS = 2


class StepBuilder:
    """Captures a step with the optimizers, parameters and modules that it uses at present.

    Args:
        step: the user's function.
        optimizers: those that the user gave, or wrappers of them; others that the step names or
            uses are found.
        scaler: the GradScaler that the user gave; one that the step names is found.
        follow: whether learning rates are expected to change.

    Attributes:
        parameters: all that the step trains.
        rates: the learning rates of its optimizers.
        lends: whether the caller gets gradients in the graphs' own memory, or as copies.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        optimizers: Iterable[Any],
        scaler: GradScaler | None,
        *,
        follow: bool,
    ) -> None:
        self._step = step
        self._given = list(optimizers)
        self._given_scaler = scaler
        self._follow = follow
        self._ran: list[nn.Module] = []
        self._found: list[Optimizer] = []
        self._by_group: dict[tuple[int, int], LearningRate] = {}
        self._by_option: dict[tuple[int, int, str], Number] = {}
        # How often options have changed, by optimizer and name.
        self._changes: Counter[tuple[int, str]] = Counter()
        self._optimizers: Sequence[Optimizer] = ()
        self._scaler: GradScaler | None = None
        self._named = self._find_named()
        self.lends = True
        self.parameters: Sequence[torch.Tensor] = ()
        self.rates: list[LearningRate] = []
        self.numbers: list[Number] = []
        self._moved: list[Number] = []  # those that are in tensors

    def refresh(self) -> None:
        """Copy learning rates and other numbers that have changed to where graphs read them."""
        for rate in self.rates:
            rate.refresh()
        for number in self._moved:
            number.refresh()

    def follow(self, options: Iterable[tuple[Any, int, str]]) -> bool:
        """Read options that have changed from tensors from now on, if it is time and possible.

        Args:
            options: what `Settings.differences` has returned.

        Returns:
            whether any is read from a tensor that was a constant before.
        """
        rates = [rate for rate in self.rates if rate.tensor is None and rate.can_change]
        moved = False
        changed: set[tuple[int, str]] = set()
        for optimizer, index, key in options:
            if any(rate.option == (optimizer, index, key) for rate in rates):
                for rate in rates:
                    rate.move_to_tensor()
                rates, moved = [], True
            elif (id(optimizer), key) not in changed:  # Once for all groups.
                changed.add((id(optimizer), key))
                self._changes[id(optimizer), key] += 1
                if self._changes[id(optimizer), key] >= _CONSTANTS:
                    moved |= self._move(optimizer, key)
        return moved

    def _move(self, optimizer: Optimizer, key: str) -> bool:
        """Read an option from tensors in all groups of an optimizer; whether one was moved."""
        numbers = [n for n in self.numbers if n.belongs_to(optimizer) and n.key == key]
        moved = [n for n in numbers if n.tensors is None and n.can_change]
        for number in moved:
            number.move_to_tensors()
        self._moved += moved
        return bool(moved)

    def why_constant(self, option: tuple[Any, int, str]) -> str:
        """Why an option that changes again and again is a constant of the graph, in words."""
        number = next((number for number in self.numbers if number.option == option), None)
        why = None if number is None else number.why_constant()
        return "it is a constant of the graph" + ("" if why is None else f", since {why}")

    def options(self) -> list[Any]:
        """The options of the optimizers and the GradScaler at present."""
        return options_of(self._optimizers, self._scaler)

    def _find_named(self) -> list[Any]:
        """The optimizers and GradScalers that the step names."""
        values = [value for _, value in values_behind(self._step)]
        optimizers = with_wrapped(value for value in values if is_optimizer(value))
        return [*optimizers, *(value for value in values if isinstance(value, GradScaler))]

    def capture(self, args: Args, kwargs: Kwargs, pool: MemoryPool, warmup: int) -> CapturedStep:
        """Make a graph of the step as it is now; what its runs change is put back.

        Raises:
            CaptureError: it cannot be captured.
            MemoryBudgetExceeded: it does not fit under the pool's limit.
        """
        while True:
            try:
                graph = self._capture(args, kwargs, pool, warmup)
            except MemoryBudgetExceeded:
                raise
            except Exception as error:
                # Not every optimizer takes tensors in place of its numbers.
                used = [number for number in self._moved if number.in_tensors]
                unproven = [number for number in used if not number.proven]
                if not used:
                    raise
                for number in unproven or used:
                    number.move_to_constant(in_words(error)[0])
                self._moved = [number for number in self._moved if number.tensors is not None]
                let_go(error)
            else:
                for number in self._moved:
                    number.proven = True
                return graph

    def _capture(self, args: Args, kwargs: Kwargs, pool: MemoryPool, warmup: int) -> CapturedStep:
        named = self._find_named()
        if list(map(id, named)) != list(map(id, self._named)):
            # What was found with the former optimizers may be out of use.
            self._ran, self._found, self._named = [], [], named
        for _ in range(_ATTEMPTS):
            body, device = self._body((args, kwargs))
            optimizers = OptimizersKept(body.optimizers)
            schedulers = SchedulersKept(self._step)
            recorder = recorder_for(pool, device)
            copies = Copies(recorder.relieve)
            grads = [None if g is None else g.detach() for g in grads_of(body.parameters)]
            try:
                usage = observe_usage(body, args, kwargs, recorder, copies)
                if self._learn(usage, body):
                    continue
                # The state that a first step makes stays, and lies among its freed activations.
                recorder.resettle(optimizers.made_since())
                return self._record(body, args, kwargs, pool, warmup, usage, copies, grads)
            except BaseException:
                schedulers.put_back()
                raise
            finally:
                optimizers.put_back()
        raise CaptureError(
            "The step uses other modules or optimizers every time.",
            remedy="Make them once, outside of the step.",
        )

    def _record(
        self,
        body: Body,
        args: Args,
        kwargs: Kwargs,
        pool: MemoryPool,
        warmup: int,
        usage: Usage,
        copies: Copies,
        grads: Sequence[torch.Tensor | None],
    ) -> CapturedStep:
        self.refresh()
        # These are our own tensor objects: the caller's must not be held.
        body.start = [g if i in usage.grads_read else None for i, g in enumerate(grads)]
        try:
            graph = CapturedStep(
                body,
                args,
                kwargs,
                pool=pool,
                warmup=warmup,
                usage=usage,
                copies=copies,
                lends=self.lends,
            )
            del copies
            try:
                graph.warm()
                graph.record(share_inputs=True)
            except BaseException:
                graph.close()
                raise
        finally:
            body.start = []
        return graph

    def _learn(self, usage: Usage, body: Body) -> bool:
        """Remember modules and optimizers that were not known; whether there were any."""
        optimizers = [o for o in usage.optimizers if all(o is not k for k in body.optimizers)]
        known = set(body.module.modules())
        modules = [m for m in usage.modules if m not in known and _has_state(m)]
        self._found += optimizers
        self._ran += modules
        return bool(optimizers or modules)

    def _body(self, batch: Any) -> tuple[Body, torch.device]:
        """The step with what it uses at present, and the device of all that."""
        module = StepModule(self._step, self._ran)
        refuse_distributed(module)
        called = optimizers_of(self._step, [*self._given, *self._found])
        refuse_communicating(called)
        scaler = scaler_of(self._step, self._given_scaler, called)
        optimizers = [optimizer for optimizer in called if is_initialized(optimizer)]
        parameters = parameters_of(module, optimizers)
        if not all(parameter.is_leaf for parameter in parameters):
            raise CaptureError(
                "A parameter was computed from other tensors, as functional_call() does it; the "
                "runs of a capture would go back through that more than once.",
                remedy="Call the step with the module's own parameters.",
            )
        device = device_of_training(parameters, batch)
        inner = [optimizer for optimizer in optimizers if not wrapped_by(optimizer)]
        for optimizer in inner:
            make_capturable(optimizer, device)
        if scaler is not None:
            check_scaling(inner)
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(device)
        for hooks in hooks_of(parameters, optimizers):
            module.hold(hooks)
        module.hold(_step_of(optimizer) for optimizer in called if has_own_step(optimizer))
        self._optimizers, self._scaler = optimizers, scaler
        self.parameters, self.rates = parameters, self._rates(inner, device)
        self._list_numbers(inner, device)
        made = Body(self._step, module, parameters, optimizers, self.rates, self.numbers, scaler)
        return made, device

    def _rates(self, optimizers: Sequence[Optimizer], device: torch.device) -> list[LearningRate]:
        known, self._by_group = self._by_group, {}
        for optimizer in optimizers:
            for index in range(len(optimizer.param_groups)):
                key = id(optimizer), index
                rate = known.get(key)
                if rate is None or not rate.belongs_to(optimizer):
                    rate = LearningRate(optimizer, index, device)
                    if (self._follow or rate.is_scheduled) and rate.can_change:
                        rate.move_to_tensor()
                self._by_group[key] = rate
        return list(self._by_group.values())

    def _list_numbers(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """List the options of optimizers that are numbers; some are known to change."""
        known, self._by_option = self._by_option, {}
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for option in set(group) - NO_OPTIONS - {"lr"}:
                    key = id(optimizer), index, option
                    number = known.get(key)
                    if number is None or not number.belongs_to(optimizer):
                        number = Number(optimizer, index, option, device)
                    self._by_option[key] = number
        self.numbers = list(self._by_option.values())
        self._moved = [number for number in self.numbers if number.tensors is not None]
        for optimizer in optimizers:
            # Schedulers that move the momentum against the learning rate leave these notes.
            if any("base_momentum" in group for group in optimizer.param_groups):
                self._move(optimizer, "betas" if "betas" in optimizer.defaults else "momentum")


def _step_of(optimizer: Any) -> Callable[..., Any]:
    """The step of an optimizer's class; a scheduler may have put another one before it."""
    return types.MethodType(type(optimizer).step, optimizer)


def _has_state(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers; one without may be made in every run."""
    return any(True for _ in (*module.parameters(), *module.buffers()))
