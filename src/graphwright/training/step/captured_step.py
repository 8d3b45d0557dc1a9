"""CapturedStep: the graph of a whole training step, with the gradients that it reads and leaves."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...calls.split import Args, Kwargs
from ...calls.watch import ModuleWatch
from ...graphs.as_eager import CaptureMode
from ...graphs.captured_call import CapturedCall
from ...graphs.comparison import Comparison, different_result, rounding_of
from ...graphs.journal import Copies, users_of
from ...graphs.memory import MemoryPool, MemoryPrediction, recorder_for
from ...graphs.reads import OutsideRead, explain
from .body import Body, Grads, Usage, set_grads
from .components import StepModule, hooks_of
from .optimizers import OptimizerMemory, Settings


class StepComparison(Comparison):
    """Compares the results of steps, and the norms of their gradients.

    Differences of norms count relative to the norm of all gradients, since a single gradient may be
    nothing but rounding, such as that of a bias before a softmax.
    """

    def keep(self, result: Any) -> Any:
        """Copies of the step's results, and the norms of its gradients."""
        results, grads = result
        return super().keep(results), _norms(grads)

    def check(self, told: Any, kept: Any, dtypes: Iterable[torch.dtype]) -> None:
        """See `Comparison`."""
        results, grads = told
        self.compare((pytree.tree_leaves(results), _norms(grads)), kept, dtypes)

    def compare(self, kept: Any, eager: Any, dtypes: Iterable[torch.dtype]) -> None:
        """See `Comparison`."""
        super().compare(kept[0], eager[0], dtypes)
        mine, its = kept[1], eager[1]
        if mine.shape != its.shape:
            raise different_result()
        finite = (
            mine.isfinite() & its.isfinite()
        )  # A too large loss scale may overflow in one run only.
        error = (mine - its)[finite].norm()
        if error > rounding_of(dtypes) * its[finite].norm():
            raise different_result()


def _norms(grads: Grads) -> torch.Tensor:
    """The norm of each gradient, in float64 on the host; -1 for none."""
    there = [g.detach() for g in grads if g is not None]
    norms = iter([float(norm) for norm in torch._foreach_norm(there)] if there else ())
    return torch.tensor([-1.0 if g is None else next(norms) for g in grads], dtype=torch.float64)


class CapturedStep(CapturedCall):
    """The graph of a step.

    Attributes:
        start: gradients that it begins with, by position of the parameter.
        ends: gradients that it leaves, in memory of its own, or None; not of parameters whose
            gradients it only adds to or leaves alone.
        settings: the optimizers' options that are constants of its kernels.
        optimizer_memory: the memory of the optimizers' states that it works on.
    """

    optimizer_memory: OptimizerMemory
    # Optimizers and others have to know that they are captured.
    _mode = CaptureMode.CAPTURED

    def __init__(
        self,
        body: Body,
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool,
        warmup: int,
        usage: Usage,
        copies: Copies,
        lends: bool,
    ) -> None:
        with torch.no_grad():  # The body turns gradients on itself.
            super().__init__(body.function, args, kwargs, pool=pool, warmup=warmup, objects=False)
        self._specify(
            replace(
                self.spec,
                module=body.module,
                trained=body.parameters,
                comparison=StepComparison(),
            )
        )
        self._body = body
        self._copies: Copies | None = copies
        self.settings = Settings(body.optimizers, body.rates, body.numbers, body.scaler)
        self.start = {i: body.start[i] for i in usage.grads_read}
        self._lends = lends
        self.ends: list[torch.Tensor | None] = []
        self._ending: list[torch.Tensor] = []
        self._users: list[int] = []
        self._untouched = usage.grads_untouched
        self._written: list[torch.Tensor] = []
        self._outside_modules = _outside_modules(body)
        self._seen = self._unwatched()

    # Whether it fits.

    def is_current(self) -> bool:
        """Whether modules, parameters and hooks are as they were at the capture."""
        watch = self._watch
        return watch is not None and watch.changed() is None and self._unwatched() == self._seen

    def is_stale(self) -> bool:
        """Whether they can never be so again."""
        if self._watch is None or self._watch.rebound():
            return True
        return bool([p.data_ptr() for p in self._outside_modules] != self._seen[0])

    def what_changed(self) -> str | None:
        """What has changed in them, in words."""
        if self._watch is None:
            return None
        another = "a parameter moved or was frozen, or a hook was added or removed"
        return self._watch.changed() or (another if self._unwatched() != self._seen else None)

    def begins_here(self) -> bool:
        """Whether the parameters have the gradients that it begins with."""
        parameters = self._body.parameters
        return all(_same_place(grad, parameters[i].grad) for i, grad in self.start.items())

    def _unwatched(self) -> tuple[Any, ...]:
        """What `ModuleWatch` does not watch: parameters outside of modules, and hooks."""
        parameters = self._body.parameters
        return (
            [p.data_ptr() for p in self._outside_modules],
            [p.requires_grad for p in parameters],
            [hook for hooks in hooks_of(parameters, self._body.optimizers) for hook in hooks],
        )

    # A step.

    def users(self) -> list[int]:
        """How many tensors use the memory of each gradient that it leaves."""
        return [0 if grad is None else users_of(grad) for grad in self.ends]

    def is_viewed(self) -> bool:
        """Whether others hold views of these gradients, which a replay would overwrite.

        Another library holds a view by a tensor that it got through DLPack.
        """
        if any(map(operator.gt, self.users(), self._users)):
            return True
        ends = zip(self.ends, self._ending, strict=True)
        return any(
            grad is not None
            and _native_count(grad) > (_WITH_PARAMETER if p.grad is grad else _ALONE)[1]
            for grad, p in ends
        )

    def expect_users(self, before: list[int]) -> None:
        """Take users that came or went since there were `before` for our own, not for others."""
        now = self.users()
        if len(now) == len(before):
            self._users = [k + n - b for k, n, b in zip(self._users, now, before, strict=True)]

    def step(self, args: Args, kwargs: Kwargs) -> Any:
        """Replay, and set the parameters' gradients."""
        self._let_holders_keep_theirs()
        result = self.run(args, kwargs)
        ends: Grads = self.ends
        if not self._lends:
            ends = [None if grad is None else grad.clone() for grad in ends]
        set_grads(self._ending, ends)
        # Autograd did not see these writes: have it notice stale saved tensors.
        torch.autograd.graph.increment_version(self._written)
        return result

    def _let_holders_keep_theirs(self) -> None:
        """Move gradients that someone holds to other memory, since the replay overwrites theirs."""
        for index, count in enumerate(map(sys.getrefcount, self.ends)):
            grad = self.ends[index]
            if grad is None:
                continue
            python, _ = _WITH_PARAMETER if self._ending[index].grad is grad else _ALONE
            if count > python:
                self.ends[index] = grad.detach()
                grad.data = grad.clone()

    # A capture.

    def warm(self, *, rehearse: bool = True) -> MemoryPrediction:
        """See `CapturedCall.warm`; the copies of what the step writes to are given up."""
        try:
            prediction = super().warm(rehearse=rehearse)
        finally:
            self._copies = None
        assert self._warmed is not None
        external = {storage._cdata for storage in self._warmed.external}
        announced = self._warmed.announced
        module = self.spec.module
        if isinstance(module, StepModule):
            module.used = external
        self.optimizer_memory = OptimizerMemory(self._body.optimizers, self._body.scaler, external)
        tensors = {id(t): t for t in (*self._body.parameters, *module.buffers())}
        self._written = [t for t in tensors.values() if t.untyped_storage()._cdata in announced]
        return prediction

    def record(self, *, share_inputs: bool = False) -> None:
        """See `CapturedCall.record`."""
        if not self.pool.graphs:
            super().record(share_inputs=share_inputs)
        else:
            # Other graphs must not use the memory that this one's gradients lie in.
            with recorder_for(self.pool, self.device).apart():
                super().record()
        self._watch = self._new_watch()
        if self.parts.watches:
            self._watch.join(self.parts)
        self._seen = self._unwatched()
        self._users = self.users()
        ALL_STEPS.add(self)

    def _new_watch(self) -> ModuleWatch:
        return ModuleWatch(self.spec.module, values=False, training=True)

    def _explain_reads(self, read: Sequence[OutsideRead], watch: ModuleWatch) -> None:
        """As for a call; gradients and what is the optimizers' are looked at by the step itself."""
        grads = [grad for grad in self.start.values() if grad is not None]
        seen = [*self._body.parameters, *grads, *self.optimizer_memory.tensors()]
        seen += [rate.tensor for rate in self._body.rates if rate.tensor is not None]
        for number in self._body.numbers:
            seen += [*(number.tensors or ()), *number.shown]
        used = {tensor.untyped_storage()._cdata for tensor in seen}
        explain(read, watch, self.parts, self.device, used)

    def _results_of(self, tree: Any) -> Any:
        results, ends = tree
        left = [
            i
            for i, g in enumerate(ends)
            if i not in self._untouched and (g is None or g is not self.start.get(i))
        ]
        self._ending = [self._body.parameters[i] for i in left]
        # Tensor objects of our own, so that their reference counts show who else holds them.
        self.ends = [None if ends[i] is None else ends[i].detach() for i in left]
        return results

    def _forget(self) -> None:
        super()._forget()
        self.ends, self._ending, self._users = [], [], []


def _outside_modules(body: Body) -> list[torch.Tensor]:
    """Parameters that no module has, which `ModuleWatch` does not watch."""
    of_modules = {id(parameter) for parameter in body.module.parameters()}
    return [p for p in body.parameters if id(p) not in of_modules]


def _same_place(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    )


def _native_count(tensor: torch.Tensor) -> int:
    """How many references C++ holds, such as autograd's; 0 if this PyTorch does not tell."""
    count = getattr(tensor, "_use_count", None)
    return 0 if count is None else int(count())


def _counts_when_unheld(*, with_parameter: bool) -> tuple[int, int]:
    """The reference counts, in Python and in C++, of a gradient that no one else holds."""
    parameter = torch.nn.Parameter(torch.empty(1))
    grads: list[torch.Tensor | None] = [torch.empty(1)]
    if with_parameter:
        parameter.grad = grads[0]
    assert grads[0] is not None
    return next(map(sys.getrefcount, grads)), _native_count(grads[0])


# These counts of a gradient that its parameter holds, and of one that it does not.
_WITH_PARAMETER = _counts_when_unheld(with_parameter=True)
_ALONE = _counts_when_unheld(with_parameter=False)

# All captured steps: one may begin with the gradients that another one leaves.
ALL_STEPS: weakref.WeakSet[CapturedStep] = weakref.WeakSet()
