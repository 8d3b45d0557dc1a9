"""The graph of a whole training step: what it does to gradients beside what it returns."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ...calls.signature import Args, Kwargs
from ...calls.watch import ModuleWatch
from ...graphs.captured_call import CapturedCall
from ...graphs.journal import Copies, users_of
from ...graphs.memory import MemoryPool, MemoryPrediction
from ...graphs.static_tensors import StaticInputs
from ...graphs.warmup import Comparison, another_result, rounding_of
from .body import Body, Grads, Look, give
from .components import StepModule
from .optimizers import OptimizerMemory, Settings


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
    norms = iter([float(norm) for norm in torch._foreach_norm(there)] if there else ())
    return torch.tensor([-1.0 if g is None else next(norms) for g in grads], dtype=torch.float64)


class CapturedStep(CapturedCall):
    """A graph of a step.

    Attributes:
        start: gradients that it goes on from, by position of the parameter.
        ends: gradients that it leaves, by parameter: memory of its own, or None. Parameters whose
            gradients it only adds to, or leaves alone, are left out.
        settings: options of the optimizers that are in its kernels.
        home: where the tensors of optimizers are that it works on.
    """

    home: OptimizerMemory

    def __init__(
        self,
        body: Body,
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool,
        warmup: int,
        look: Look,
        copies: Copies,
        lends: bool,
    ) -> None:
        with torch.no_grad():  # The step turns gradients on itself.
            super().__init__(body.function, args, kwargs, pool=pool, warmup=warmup)
        self._module = body.module
        self._body = body
        self._trained = body.parameters
        self._comparison = StepComparison()
        self._copies: Copies | None = copies
        self.settings = Settings(body.optimizers, body.rates, body.scaler)
        self.start = {i: body.start[i] for i in look.goes_on}
        self._lends = lends
        self.ends: list[torch.Tensor | None] = []
        self._ending: list[torch.Tensor] = []
        self._users: list[int] = []
        self._untouched = look.untouched
        self._written: list[torch.Tensor] = []
        self._alone = _of_their_own(body)
        self._seen = self._look()

    @property
    def nodes(self) -> int:
        """How many operations it repeats."""
        return 0 if self._recording is None else self._recording.nodes

    # Whether it does a step.

    def is_current(self) -> bool:
        """Whether modules, parameters and hooks are what they were."""
        watch = self._watch
        return watch is not None and watch.changed() is None and self._look() == self._seen

    def is_stale(self) -> bool:
        """Whether they never will be again."""
        if self._watch is None or self._watch.rebound():
            return True
        return bool([p.data_ptr() for p in self._alone] != self._seen[0])

    def what_changed(self) -> str | None:
        """What has changed about them, in words."""
        if self._watch is None:
            return None
        another = "a parameter moved or was frozen, or a hook was added or removed"
        return self._watch.changed() or (another if self._look() != self._seen else None)

    def begins_here(self) -> bool:
        """Whether it goes on from the gradients that there are."""
        parameters = self._body.parameters
        return all(_same_place(grad, parameters[i].grad) for i, grad in self.start.items())

    def _look(self) -> tuple[Any, ...]:
        """What `ModuleWatch` does not see: parameters of optimizers, and hooks."""
        parameters = self._body.parameters
        return (
            [p.data_ptr() for p in self._alone],
            [p.requires_grad for p in parameters],
            [len(p._backward_hooks or ()) for p in parameters],
            [len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in parameters],
            [
                (len(o._optimizer_step_pre_hooks), len(o._optimizer_step_post_hooks))
                for o in self._body.optimizers
            ],
        )

    # A step.

    def users(self) -> list[int]:
        """How many tensors there are in the memory of each gradient that it leaves."""
        return [0 if grad is None else users_of(grad) for grad in self.ends]

    def holds(self) -> bool:
        """Whether others have views of these gradients, which a replay would overwrite."""
        return any(map(operator.gt, self.users(), self._users))

    def expect_users(self, before: list[int]) -> None:
        """Since there were so many, those that came or went were of our own making."""
        now = self.users()
        if len(now) == len(before):
            self._users = [k + n - b for k, n, b in zip(self._users, now, before, strict=True)]

    def step(self, args: Args, kwargs: Kwargs) -> Any:
        """Replay; the parameters have the gradients that it leaves."""
        self._let_holders_keep_theirs()
        result = self.run(args, kwargs)
        ends: Grads = self.ends
        if not self._lends:
            ends = [None if grad is None else grad.clone() for grad in ends]
        give(self._ending, ends)
        # Written to behind autograd's back: what was saved of them for a backward is stale.
        torch.autograd.graph.increment_version(self._written)
        return result

    def _let_holders_keep_theirs(self) -> None:
        """Whoever holds a gradient of the last step keeps it: the replay writes to another one."""
        for index, count in enumerate(map(sys.getrefcount, self.ends)):
            grad = self.ends[index]
            if grad is None:
                continue
            python, native = _UNHELD if self._ending[index].grad is grad else _ALONE
            if count > python or _native_count(grad) > native:
                self.ends[index] = grad.detach()
                grad.data = grad.clone()

    # A capture.

    def warm(self) -> MemoryPrediction:
        """As `CallGraph.warm`; what was kept of the state is given up."""
        try:
            prediction = super().warm()
        finally:
            self._copies = None
        assert self._warmed is not None
        external = {storage._cdata for storage in self._warmed.external}
        announced = self._warmed.announced
        if isinstance(self._module, StepModule):
            self._module.used = external
        self.home = OptimizerMemory(self._body.optimizers, self._body.scaler, external)
        tensors = {id(t): t for t in (*self._body.parameters, *self._module.buffers())}
        self._written = [t for t in tensors.values() if t.untyped_storage()._cdata in announced]
        return prediction

    def record(self, *, share_inputs: bool = False) -> None:
        """As `CallGraph.record`."""
        if not self.pool.graphs:
            super().record(share_inputs=share_inputs)
        else:
            # What others compute must not come to lie where gradients wait.
            with self.pool.recorder(self._device).apart():
                super().record()
        self._watch = ModuleWatch(self._module, values=False, training=True)
        self._seen = self._look()
        self._users = self.users()
        GRAPHS.add(self)

    def _drains(self, inputs: StaticInputs, tree: Any) -> list[torch.Tensor]:
        results, ends = tree
        left = [
            i
            for i, g in enumerate(ends)
            if i not in self._untouched and (g is None or g is not self.start.get(i))
        ]
        self._ending = [self._body.parameters[i] for i in left]
        # Each as an object of our own: from that it can be told whether others hold it too.
        self.ends = [None if ends[i] is None else ends[i].detach() for i in left]
        return super()._drains(inputs, results)

    def _forget(self) -> None:
        super()._forget()
        self.ends, self._ending, self._users = [], [], []


def _of_their_own(body: Body) -> list[torch.Tensor]:
    """Parameters that no module has: a watch of modules does not see them."""
    theirs = {id(parameter) for parameter in body.module.parameters()}
    return [p for p in body.parameters if id(p) not in theirs]


def _same_place(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    )


def _native_count(tensor: torch.Tensor) -> int:
    """How many hold it beside Python, autograd among them; 0 where PyTorch does not tell."""
    count = getattr(tensor, "_use_count", None)
    return 0 if count is None else int(count())


def _unheld(*, with_parameter: bool) -> tuple[int, int]:
    parameter = torch.nn.Parameter(torch.empty(1))
    grads: list[torch.Tensor | None] = [torch.empty(1)]
    if with_parameter:
        parameter.grad = grads[0]
    assert grads[0] is not None
    return next(map(sys.getrefcount, grads)), _native_count(grads[0])


# What both say of a gradient that nobody holds beside its parameter, and not even that.
_UNHELD = _unheld(with_parameter=True)
_ALONE = _unheld(with_parameter=False)

# All that there are: one may go on from what another one leaves.
GRAPHS: weakref.WeakSet[CapturedStep] = weakref.WeakSet()
