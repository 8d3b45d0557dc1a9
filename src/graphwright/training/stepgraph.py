"""The graph of a whole training step: what it does to gradients beside what it returns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..graphs.callgraph import CallGraph
from ..graphs.journal import Copies, Journal, compilers_off
from ..graphs.memory import MemoryPool, Prediction
from ..graphs.recorder import Recorder
from ..graphs.told import Comparison, another_result, rounding_of
from ..graphs.transfer import Inputs
from ..signature import Args, Kwargs
from .optimizers import Rate, Settings

Grads = Sequence[torch.Tensor | None]


class Body:
    """A step as it is captured: from given gradients on, with what it leaves in them returned.

    Args:
        step: the user's function.
        parameters: all that it trains.
        rates: the learning rates of its optimizers.
        scaler: the GradScaler that it uses, if it does.

    Attributes:
        start: the gradients that the step begins with.
        written: parameters that it may write to.
        function: the same as a plain function.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        parameters: Sequence[torch.Tensor],
        rates: Sequence[Rate],
        scaler: Any,
    ) -> None:
        self.step = step
        self._scaler = scaler
        self.written = [p for p in parameters if p.requires_grad]
        self.parameters = parameters
        self.start: Grads = [None] * len(parameters)
        self._rates = rates

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        function.__name__ = getattr(step, "__name__", type(step).__name__)
        function.__wrapped__ = step  # type: ignore[attr-defined]  # what is watched is behind it
        self.function: Callable[..., Any] = function

    def run(self, args: Args, kwargs: Kwargs) -> tuple[Any, list[torch.Tensor | None]]:
        """The step's results and the gradients that it leaves."""
        give(self.parameters, self.start)
        try:
            result = self.plainly(args, kwargs)
            return result, grads_of(self.parameters)
        except BaseException:
            if self._scaler is not None:
                self._scaler._per_optimizer_states.clear()  # What it knows of an unfinished step.
            raise
        finally:
            give(self.parameters, self.start)

    def plainly(self, args: Args, kwargs: Kwargs) -> Any:
        """The step as it is, with learning rates where a graph reads them."""
        with contextlib.ExitStack() as stack:
            for rate in self._rates:
                stack.enter_context(rate.in_place())
            with torch.enable_grad():
                result = self.step(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def give(parameters: Sequence[torch.Tensor], grads: Grads) -> None:
    """Give parameters their gradients."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is not grad:
            parameter.grad = grad


def grads_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that parameters have."""
    return [parameter.grad for parameter in parameters]


class StepComparison(Comparison):
    """Compares what steps return; of gradients their lengths, all against that of the whole.

    One alone may be nothing but rounding, such as that of a bias before a softmax.
    """

    def keep(self, result: Any) -> Any:
        """What the step returns, and the lengths."""
        results, grads = result
        return super().keep(results), _lengths(grads)

    def check(self, told: Any, kept: Any, dtypes: Iterable[torch.dtype]) -> None:
        """As for `Comparison`."""
        results, grads = told
        super().check(results, kept[0], dtypes)
        mine, its = _lengths(grads), kept[1]
        if mine.shape != its.shape:
            raise another_result()
        finite = mine.isfinite() & its.isfinite()  # A scale that is too high may overflow in one.
        error = (mine - its)[finite].norm()
        if error > rounding_of(dtypes) * its[finite].norm():
            raise another_result()


def _lengths(grads: Grads) -> torch.Tensor:
    """The norm of each gradient, in float64 on the host; -1 for none."""
    there = [g.detach() for g in grads if g is not None]
    norms = iter(torch.stack(torch._foreach_norm(there)).double().tolist() if there else ())
    return torch.tensor([-1.0 if g is None else next(norms) for g in grads], dtype=torch.float64)


def begins_anew(body: Body, args: Args, kwargs: Kwargs, recorder: Recorder, copies: Copies) -> bool:
    """Run a step once: does it do the same whatever gradients there were before?

    It does where it never looks at them. They are stood in for by tensors that cannot be added to,
    so that a step that does fails. What the run writes to is put back.

    Args:
        body: the step.
        args: of the step.
        kwargs: likewise.
        recorder: what the step will be recorded by.
        copies: where that is kept meanwhile.
    """
    stand_ins = [
        torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape) if p.requires_grad else None
        for p in body.parameters
    ]
    before, body.start = body.start, stand_ins
    journal = Journal(copies)
    try:
        with recorder.warming(told=False), compilers_off(), journal:
            body.run(args, kwargs)
        used = journal.external
        return not any(s is not None and s.untyped_storage()._cdata in used for s in stand_ins)
    except Exception:
        return False  # If it is another failure, it will come again.
    finally:
        body.start = before
        journal.undo()


class StepGraph(CallGraph):
    """A graph of a step.

    Attributes:
        start: gradients that it goes on from; None where it never looks at them.
        ends: gradients that it leaves, by parameter: memory of its own, or None. Parameters whose
            gradients it only adds to are left out.
        settings: options of the optimizers that are in its kernels.
    """

    def __init__(
        self,
        body: Body,
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool,
        warmup: int,
        settings: Settings,
        start: Grads | None,
        copies: Copies,
    ) -> None:
        with torch.no_grad():  # The step turns gradients on itself.
            super().__init__(body.function, args, kwargs, pool=pool, warmup=warmup)
        self._body = body
        self._trained = body.parameters
        self._comparison = StepComparison()
        self._copies: Copies | None = copies
        self.settings = settings
        self.start = start
        self.ends: list[torch.Tensor | None] = []
        self._ending: list[torch.Tensor] = []

    @property
    def nodes(self) -> int:
        """How many operations it repeats."""
        return 0 if self._recording is None else self._recording.nodes

    def is_current(self) -> bool:
        """Whether the modules are what they were."""
        return self._watch is not None and self._watch.unchanged()

    def is_stale(self) -> bool:
        """Whether they never will be again."""
        return self._watch is None or self._watch.rebound()

    def what_changed(self) -> str | None:
        """What has changed about the modules, in words."""
        return None if self._watch is None else self._watch.changed()

    def warm(self) -> Prediction:
        """As `CallGraph.warm`; what was kept of the state is given up."""
        try:
            return super().warm()
        finally:
            self._copies = None

    def _drains(self, inputs: Inputs, tree: Any) -> list[torch.Tensor]:
        results, ends = tree
        start = [None] * len(ends) if self.start is None else self.start
        left = [i for i, g in enumerate(ends) if g is None or g is not start[i]]
        self._ending = [self._body.parameters[i] for i in left]
        # Each as an object of our own: from that it can be told whether others hold it too.
        self.ends = [None if ends[i] is None else ends[i].detach() for i in left]
        return super()._drains(inputs, results)

    def begins_here(self, grads: Callable[[], Grads]) -> bool:
        """Whether it goes on from the gradients that there are."""
        if self.start is None:
            return True
        return all(map(_same_place, self.start, grads()))

    def step(self, args: Args, kwargs: Kwargs) -> Any:
        """Replay; the parameters have the gradients that it leaves."""
        self._let_holders_keep_theirs()
        result = self.run(args, kwargs)
        give(self._ending, self.ends)
        # Written to behind autograd's back: what was saved of them for a backward is stale.
        torch.autograd.graph.increment_version(self._body.written)
        return result

    def _let_holders_keep_theirs(self) -> None:
        """Whoever holds a gradient of the last step keeps it: the replay writes to another one."""
        for index in _held(self.ends):
            grad = self.ends[index]
            if grad is not None:
                self.ends[index] = grad.detach()
                grad.data = grad.clone()

    def _forget(self) -> None:
        super()._forget()
        self.ends, self._ending = [], []


def _held(grads: Grads) -> list[int]:
    """Which gradients somebody holds beside the list and their parameters."""
    return [
        i for i, n in enumerate(map(sys.getrefcount, grads)) if n > _UNHELD and grads[i] is not None
    ]


def _unheld() -> int:
    parameter = torch.nn.Parameter(torch.empty(1))
    grads: list[torch.Tensor | None] = [torch.empty(1)]
    parameter.grad = grads[0]
    return next(map(sys.getrefcount, grads))


# What sys.getrefcount says of a gradient that nobody else holds; that depends on the version.
_UNHELD = _unheld()


def _same_place(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    )
