"""A training step as it is captured, and what one run of it shows."""

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

from ...calls.modes import compilers_off
from ...calls.signature import Args, Kwargs, flatten, unflatten
from ...errors import CaptureError
from ...graphs.conditions import as_captured
from ...graphs.journal import Copies, Journal
from ...graphs.python_state import PythonState, grad_of
from ...graphs.recorder import Recorder
from ...graphs.static_tensors import StaticInputs
from .components import Discovery, OptimizersKept
from .optimizers import Rate, unasked

Grads = Sequence[torch.Tensor | None]


class Body:
    """A step as it is captured: from given gradients on, with what it leaves in them returned.

    Args:
        step: the user's function.
        module: what it reaches.
        parameters: all that it trains.
        optimizers: that it uses.
        rates: their learning rates.
        scaler: the GradScaler that it uses, if it does.

    Attributes:
        start: the gradients that the step begins with.
        function: the same as a plain function.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[Optimizer],
        rates: Sequence[Rate],
        scaler: GradScaler | None,
    ) -> None:
        self.step = step
        self.module = module
        self.parameters = parameters
        self.optimizers = optimizers
        self.rates = rates
        self.scaler = scaler
        self.start: Grads = [None] * len(parameters)

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        function.__name__ = name_of_step(step)
        function.__wrapped__ = step  # type: ignore[attr-defined]  # what is watched is behind it
        self.function: Callable[..., Any] = function

    def run(self, args: Args, kwargs: Kwargs) -> tuple[Any, list[torch.Tensor | None]]:
        """The step's results and the gradients that it leaves.

        Raises:
            CaptureError: it sets an option of an optimizer.
        """
        give(self.parameters, self.start)
        kept = OptimizersKept(self.optimizers)
        try:
            with contextlib.ExitStack() as stack:
                for rate in self.rates:
                    stack.enter_context(rate.in_place())
                stack.enter_context(unasked(self.optimizers))
                result = plainly(self.step, args, kwargs)
            changed = kept.changed_options()
            if changed:
                raise CaptureError(
                    f"The step sets {changed[0]} of an optimizer, which a graph would not.",
                    remedy="Set it between the steps.",
                )
            live = {id(rate.tensor) for rate in self.rates if rate.tensor is not None}
            result = pytree.tree_map_only(
                torch.Tensor, lambda t: t.clone() if id(t) in live else t, result
            )
            return result, grads_of(self.parameters)
        except BaseException:
            kept.put_back()
            if self.scaler is not None:
                self.scaler._per_optimizer_states.clear()  # What it knows of an unfinished step.
            raise
        finally:
            give(self.parameters, self.start)


def name_of_step(step: Callable[..., Any]) -> str:
    """What a step is called."""
    return getattr(step, "__name__", type(step).__name__)


def plainly(step: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """What a step returns, as tensors that do not require grad."""
    with torch.enable_grad():
        result = step(*args, **kwargs)
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach() if t.requires_grad else t, result
    )


def give(parameters: Sequence[torch.Tensor], grads: Grads) -> None:
    """Give parameters their gradients."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad_of(parameter) is not grad:
            parameter.grad = grad


def grads_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that parameters have."""
    return [grad_of(parameter) for parameter in parameters]


@dataclass
class Look:
    """What first runs of a step have shown.

    Attributes:
        goes_on: positions of the parameters whose gradients it goes on from.
        untouched: of those whose gradients it leaves alone.
        modules: that ran.
        optimizers: that did a step.
    """

    goes_on: frozenset[int] = frozenset()
    untouched: frozenset[int] = frozenset()
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)


def look_at(body: Body, args: Args, kwargs: Kwargs, recorder: Recorder, copies: Copies) -> Look:
    """Run a step once or twice, to see what it uses; what the runs change is put back.

    Gradients that a step never looks at make no difference to it. In the first run all are stood
    in for by tensors of one element, which cannot be added to, so that a step that does fails.

    Args:
        body: the step.
        args: of the step.
        kwargs: likewise.
        recorder: what it will be recorded by.
        copies: where what it writes to is kept meanwhile.
    """
    look = Look(goes_on=frozenset(range(len(body.parameters))))  # If no run comes to its end.
    for small in (True, False):
        stand_ins = [_stand_in(p, small=small) for p in body.parameters]
        ends, used = _run_once(body, args, kwargs, recorder, copies, stand_ins, look)
        if ends is None:
            continue
        look.goes_on = frozenset(
            i
            for i, s in enumerate(stand_ins)
            if s is not None and s.untyped_storage()._cdata in used
        )
        same = {i for i, (a, b) in enumerate(zip(ends, stand_ins, strict=True)) if a is b}
        look.untouched = frozenset(same) - look.goes_on
        if not (small and look.goes_on):
            break
    return look


def _stand_in(parameter: torch.Tensor, *, small: bool) -> torch.Tensor | None:
    """Frozen parameters too: a step may zero the gradients that they have."""
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
    look: Look,
) -> tuple[Grads | None, dict[int, torch.UntypedStorage]]:
    """The gradients that a run leaves, None if it fails, and memory from outside that it used."""
    before, body.start = body.start, start
    leaves, spec = flatten(args, kwargs)
    undo = PythonState(body.module, body.parameters)
    journal = Journal(copies)
    seen = Discovery(body.parameters)
    failed = True
    try:
        inputs = StaticInputs(leaves, _ordinary(recorder.device))
        args, kwargs = unflatten(inputs.leaves, spec)
        with as_captured(), recorder.warming(told=False), compilers_off(), journal:
            with warnings.catch_warnings(), seen:
                warnings.simplefilter("ignore")  # of gradients with other strides than parameters
                _, ends = body.run(args, kwargs)
        failed = False
        return ends, journal.external
    except Exception:
        return None, {}  # If it is a failure of its own, it will come again.
    finally:
        body.start = before
        journal.undo()
        known = {id(optimizer) for optimizer in body.optimizers}
        seen.put_gradients_back()
        if failed or any(id(optimizer) not in known for optimizer in seen.optimizers):
            seen.put_optimizers_back()
        undo.restore(python=True)
        recorder.tidy()
        look.modules += seen.modules
        look.optimizers += seen.optimizers


def _ordinary(device: torch.device) -> Callable[[int], torch.Tensor]:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
