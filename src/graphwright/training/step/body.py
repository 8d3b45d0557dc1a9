"""The function of a training step that is captured, and a first look at what it uses."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...calls.binding import PASSES_TO
from ...calls.modes import compilers_off
from ...calls.split import Args, Kwargs, flatten, unflatten
from ...errors import CaptureError
from ...graphs.conditions import as_captured
from ...graphs.journal import Copies, Journal
from ...graphs.python_state import PythonState, grad_of
from ...graphs.recorder import Recorder
from ...graphs.static_inputs import StaticInputs
from .components import Discovery, OptimizersKept
from .numbers import Number, as_tensors
from .optimizers import LearningRate, skip_capture_checks

Grads = Sequence[torch.Tensor | None]


class Body:
    """A step as it is captured: it begins with given gradients and returns those it leaves.

    Args:
        step: the user's function.
        module: holds the modules that it reaches.
        parameters: all that it trains.
        optimizers: those that it uses.
        rates: their learning rates.
        numbers: others of their options that may be in tensors.
        scaler: the GradScaler that it uses, if any.

    Attributes:
        start: the gradients that the step begins with.
        function: `run` as a plain function of the step's arguments.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[Optimizer],
        rates: Sequence[LearningRate],
        numbers: Sequence[Number],
        scaler: GradScaler | None,
    ) -> None:
        self.step = step
        self.module = module
        self.parameters = parameters
        self.optimizers = optimizers
        self.rates = rates
        self.numbers = numbers
        self.scaler = scaler
        self.start: Grads = [None] * len(parameters)

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        function.__name__ = name_of_step(step)
        function.__wrapped__ = step  # type: ignore[attr-defined]  # for ModuleWatch
        setattr(function, PASSES_TO, step)
        self.function: Callable[..., Any] = function

    def run(self, args: Args, kwargs: Kwargs) -> tuple[Any, list[torch.Tensor | None]]:
        """The step's results and the gradients that it leaves.

        Raises:
            CaptureError: it sets an option of an optimizer.
        """
        set_grads(self.parameters, self.start)
        kept = OptimizersKept(self.optimizers)
        try:
            with contextlib.ExitStack() as stack:
                for rate in self.rates:
                    stack.enter_context(rate.as_tensor())
                live = {id(rate.tensor) for rate in self.rates if rate.tensor is not None}
                stack.enter_context(skip_capture_checks(self.optimizers))
                numbers = [number for number in self.numbers if number.in_tensors]
                live |= {id(tensor) for number in numbers for tensor in number.shown}
                if numbers:
                    rates = [rate.tensor for rate in self.rates if rate.tensor is not None]
                    stack.enter_context(as_tensors(numbers, rates))
                result = run_detached(self.step, args, kwargs)
            changed = kept.changed_options()
            if changed:
                raise CaptureError(
                    f"The step sets {changed[0]} of an optimizer, which a graph would not.",
                    remedy="Set it between the steps.",
                )
            result = pytree.tree_map_only(
                torch.Tensor, lambda t: t.clone() if id(t) in live else t, result
            )
            return result, grads_of(self.parameters)
        except BaseException:
            kept.put_back()
            if self.scaler is not None:
                self.scaler._per_optimizer_states.clear()  # They are of the unfinished step.
            raise
        finally:
            set_grads(self.parameters, self.start)


def name_of_step(step: Callable[..., Any]) -> str:
    """The name of a step's function."""
    return getattr(step, "__name__", type(step).__name__)


def run_detached(step: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run a step; its results as tensors that do not require grad."""
    with torch.enable_grad():
        result = step(*args, **kwargs)
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach() if t.requires_grad else t, result
    )


def set_grads(parameters: Sequence[torch.Tensor], grads: Grads) -> None:
    """Set the gradients of parameters."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad_of(parameter) is not grad:
            parameter.grad = grad


def grads_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that parameters have."""
    return [grad_of(parameter) for parameter in parameters]


@dataclass
class Usage:
    """What first runs of a step have shown.

    Attributes:
        grads_read: positions of the parameters whose gradients it begins with, such as to add to
            them.
        grads_untouched: positions of those whose gradients it neither reads nor changes.
        modules: modules that ran.
        optimizers: optimizers that did a step.
    """

    grads_read: frozenset[int] = frozenset()
    grads_untouched: frozenset[int] = frozenset()
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)


def observe_usage(
    body: Body, args: Args, kwargs: Kwargs, recorder: Recorder, copies: Copies
) -> Usage:
    """Run a step once or twice to see what it uses; what the runs change is put back.

    In the first run, expanded tensors of one element stand in for all gradients. They cannot be
    added to, so a step that adds to gradients fails and is run again with tensors of full size.

    Args:
        body: the step.
        args: its arguments.
        kwargs: its keyword arguments.
        recorder: the recorder that will record it.
        copies: holds the values of what it writes to meanwhile.
    """
    usage = Usage(grads_read=frozenset(range(len(body.parameters))))  # Holds if no run succeeds.
    for small in (True, False):
        stand_ins = [_stand_in(p, small=small) for p in body.parameters]
        ends, used = _run_once(body, args, kwargs, recorder, copies, stand_ins, usage)
        if ends is None:
            continue
        usage.grads_read = frozenset(
            i
            for i, s in enumerate(stand_ins)
            if s is not None and s.untyped_storage()._cdata in used
        )
        same = {i for i, (a, b) in enumerate(zip(ends, stand_ins, strict=True)) if a is b}
        usage.grads_untouched = frozenset(same) - usage.grads_read
        if not (small and usage.grads_read):
            break
    return usage


def _stand_in(parameter: torch.Tensor, *, small: bool) -> torch.Tensor | None:
    """A stand-in for a gradient, of frozen parameters too: a step may zero theirs."""
    if not parameter.is_leaf:
        return None
    if not small:
        return torch.zeros_like(parameter)
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return one.expand(parameter.shape)


def _run_once(
    body: Body,
    args: Args,
    kwargs: Kwargs,
    recorder: Recorder,
    copies: Copies,
    start: Grads,
    usage: Usage,
) -> tuple[Grads | None, dict[int, torch.UntypedStorage]]:
    """Run a step: the gradients that it leaves, or None if it fails, and outside memory it used."""
    before, body.start = body.start, start
    leaves, spec = flatten(args, kwargs)
    undo = PythonState(body.module, body.parameters)
    journal = Journal(copies)
    discovery = Discovery(body.parameters, body.optimizers)
    try:
        inputs = StaticInputs(leaves, _allocator(recorder.device))
        args, kwargs = unflatten(inputs.leaves, spec)
        with as_captured(), recorder.warming(pretend=False), compilers_off(), journal:
            with warnings.catch_warnings(), discovery:
                warnings.simplefilter("ignore")  # of gradients with other strides than parameters
                with undo.refusing_advances():
                    _, ends = body.run(args, kwargs)
        return ends, journal.external
    except Exception:
        return None, {}  # If the step itself fails, it will fail again.
    finally:
        body.start = before
        journal.undo()
        discovery.put_gradients_back()
        discovery.put_optimizers_back()
        undo.restore(python=True)
        recorder.tidy()
        usage.modules += discovery.modules
        usage.optimizers += discovery.optimizers


def _allocator(device: torch.device) -> Callable[[int], torch.Tensor]:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
