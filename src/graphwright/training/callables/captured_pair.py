"""The graphs of one call signature: its forward and backward, once for each set of activations.

What a forward computes for its backward has memory of its own, which nothing else in the pool uses.
So forwards and backwards may run in any order. (torch.cuda.make_graphed_callables lets backwards
use the memory of activations, and is silently wrong in any order but that of the captures.)
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...calls.modules import FunctionModule
from ...calls.signature import Args, CallSignature, Kwargs, flatten, refuse_weights
from ...calls.watch import ModuleWatch
from ...errors import CaptureError, SignatureError
from ...graphs.captured_call import device_of, name_of
from ...graphs.conditions import refuse_hooks_for_saved_tensors
from ...graphs.graph import Graph, GraphState
from ...graphs.memory import MemoryPool, MemoryPrediction
from ...graphs.python_state import PythonState
from ...graphs.recorder import Interrupted
from ...graphs.transaction import let_go, transaction
from ...graphs.warmup import Warmed, warm
from .activations import Activations, Lease, Replay
from .forward_backward import Passes
from .outputs import Outputs
from .pair_recorder import PairRecorder

# Pools, by id, in which a pair is being captured.
BUSY: set[int] = set()
# How often a recording is tried that other threads interrupt.
_ATTEMPTS = 5
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CapturedPair(Graph):
    """The graphs of a call's forward and backward.

    Attributes:
        signature: the call's.
        grad: whether gradients were on.
        no_backward: why there is no backward although results are differentiable; else None.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        owner: nn.Module,
        args: Args,
        kwargs: Kwargs,
        pool: MemoryPool,
        *,
        warmup: int,
        allow_unused: bool,
    ) -> None:
        """Check the arguments; nothing runs yet.

        Args:
            forward: what is called.
            owner: its module; a FunctionModule for a plain function.
            args: sample arguments.
            kwargs: sample keyword arguments.
            pool: the memory that the graphs will live in.
            warmup: how many runs are not observed.
            allow_unused: whether tensors that require grad may get no gradient.

        Raises:
            CaptureError: a call with such arguments cannot be captured.
        """
        try:
            refuse_weights(owner)
            self.signature = CallSignature.of(args, kwargs)
        except SignatureError as error:
            raise CaptureError(error.what, where=error.where, remedy=error.remedy) from error
        self._sample, _ = flatten(args, kwargs)
        self._keywords = sorted(kwargs)
        self._sets: list[Activations] = []
        self.grad = torch.is_grad_enabled()
        self._passes = Passes(forward, owner, args, kwargs, grad=self.grad, strict=not allow_unused)
        named = owner._function if isinstance(owner, FunctionModule) else owner
        super().__init__(pool, name_of(named, self._sample))
        self._device = device_of(args, kwargs, owner, pool)
        self._owner = owner
        self._runs = warmup
        self._parameters: list[torch.Tensor] = []
        self._trained: list[bool] = []
        self._warmed: Warmed | None = None
        self._watch: ModuleWatch | None = None
        self._outside: set[int] = set()
        self._written: list[torch.Tensor] = []

    @property
    def no_backward(self) -> str | None:
        return self._passes.no_backward

    @property
    def in_use(self) -> bool:
        """Whether a backward may still come."""
        return not all(chosen.free for chosen in self._sets)

    def replay(self) -> None:
        """Raise CaptureError: a pair is called, not replayed."""
        raise CaptureError(
            f"{self.name} has a graph for its forward and one for its backward.",
            remedy="Call what make_graphed_callables() has returned.",
        )

    def watch(self) -> None:
        """Begin to notice changes that make the graphs outdated."""
        self._watch = ModuleWatch(self._owner, values=False, training=True)
        self._outside |= {s.data_ptr() for s in self._watch.memory if s.nbytes()}
        known = {id(p): p for p in (*self._owner.parameters(), *self._passes.trained)}
        self._parameters = list(known.values())
        self._trained = [p.requires_grad for p in self._parameters]
        assert self._warmed is not None
        announced = self._warmed.announced
        tensors = (*self._parameters, *self._owner.buffers())
        self._written = [t for t in tensors if t.untyped_storage()._cdata in announced]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The tensors that get gradients in addition to arguments."""
        return list(self._passes.trained)

    def also_watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fit calls only while `requires_grad` of these tensors is what it is now."""
        known = {id(parameter) for parameter in self._parameters}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        self._parameters += new
        self._trained += [tensor.requires_grad for tensor in new]

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether it can answer a call, with the module as it is now."""
        grad = torch.is_grad_enabled()
        if self.state is not GraphState.READY or (grad and not self.grad):
            return False
        return (
            self.signature.fits(args, kwargs)
            and [p.requires_grad for p in self._parameters] == self._trained
            and self.changed() is None
        )

    def changed(self) -> str | None:
        """What has changed in the module since the capture, in words."""
        watch = self._watch
        assert watch is not None
        return watch.changed()

    @property
    def stale(self) -> bool:
        """Whether it can never answer a call again."""
        return self.state is not GraphState.READY or (
            self._watch is not None and self._watch.rebound()
        )

    # Capture.

    def warm(self) -> None:
        """Warm up the call.

        Raises:
            CaptureError: it cannot be captured.
        """
        refuse_hooks_for_saved_tensors()
        with self.pool.lock:
            recorder = self.pool.recorder(self._device)
            with self._transaction(GraphState.WARMING) as undo:
                self._warmed = warm(self._passes.both, self._sample, recorder, undo, self._runs)
                self._passes.check_writes(self._warmed.mutated)
            self._outside = {s.data_ptr() for s in self._warmed.external if s.nbytes()}

    def record(self, sets: int) -> None:
        """Record the call in the pool, after `warm`.

        Args:
            sets: how many sets of activations.

        Raises:
            MemoryBudgetExceeded: it does not fit under the pool's limit.
            CaptureError: it cannot be captured.
        """
        warmed = self._warmed
        assert warmed is not None
        with self.pool.lock:
            # At least this much: several sets take more, but their backwards share memory.
            predicted = self.pool.predicted(warmed.segments)
            prediction = MemoryPrediction(predicted, warmed.segments, warmed.contributors)
            try:
                self.pool.admit(self, prediction)
                recorder = self.pool.recorder(self._device)
                before = recorder.reserved
                recorder.order()  # A replay may still use the memory of the inputs.
                with self._transaction(GraphState.CAPTURING):
                    pair_recorder = PairRecorder(self._passes, warmed, recorder, self.pool)
                    for _ in range(sets):
                        self._sets.append(self._record_set(pair_recorder))
                if self.pool.over_limit(before):
                    raise self.pool.exceeded(self, prediction)
            except BaseException as error:
                self._retire()
                let_go(error)
                self.pool.sweep()
                raise
            forward = self._sets[0].forward
            assert forward is not None
            self._held = [warmed.external]
            self._set_recording(forward, before, predicted)
            self._sample = []
            self.state = GraphState.READY
            self.pool.add(self)

    def _record_set(self, pair_recorder: PairRecorder) -> Activations:
        for left in reversed(range(_ATTEMPTS)):
            try:
                return pair_recorder.record(self._sample)
            except Interrupted as error:
                if not left:
                    raise
                let_go(error)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _transaction(self, state: GraphState) -> Iterator[PythonState]:
        self.state = state
        BUSY.add(id(self.pool))
        try:
            with transaction(self.pool, _with_hooks(self._owner), self._forget) as undo:
                yield undo
        finally:
            BUSY.discard(id(self.pool))

    # Calls.

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call that fits.

        Raises:
            CaptureError: all activations wait for their backwards.
        """
        if self.signature.flat is not None:
            # All arguments are tensors; keyword arguments come sorted by name.
            leaves: Sequence[Any] = (*args, *[kwargs[name] for name in self._keywords])
        else:
            leaves, _ = flatten(args, kwargs)
        self._check_overlap(leaves)
        passes = self._passes
        answer: list[tuple[Outputs, list[Any]]] = []
        if torch.is_grad_enabled() and passes.differentiable:
            run = functools.partial(self._run, leaves, answer, with_backward=True)
            given = [leaves[slot] for slot in passes.wanted]
            # `Replay` must not hold its own outputs: the node would keep itself alive.
            outputs = Replay.apply(run, *given, *passes.trained)  # type: ignore[no-untyped-call]
        else:
            outputs = None
            with torch.no_grad():
                self._run(leaves, answer, with_backward=False)
        plan, made = answer[0]
        return plan.finish(made, outputs)

    def _run(
        self, leaves: Sequence[Any], answer: list[tuple[Outputs, list[Any]]], *, with_backward: bool
    ) -> tuple[list[torch.Tensor], Lease | None, Sequence[torch.Tensor]]:
        """Run a forward; `answer` gets its results, and how the caller's are made of them."""
        with self.pool.lock:
            self._ready()
            chosen = self._choose()
            lease = Lease(self, chosen) if with_backward else None
            chosen.begin(lease)
            made = chosen.run(leaves)
            # Autograd did not see these writes: have it notice stale saved tensors.
            torch.autograd.graph.increment_version(self._written)
            answer.append((chosen.outputs, made))
            return [made[p] for p in chosen.outputs.differentiable], lease, chosen.saved

    def _choose(self) -> Activations:
        """A set of activations that no backward will need, preferably one without a live lease."""
        for attempt in range(2):
            free = [chosen for chosen in self._sets if chosen.free]
            if free:
                return min(free, key=lambda chosen: chosen.lease is not None)
            if not attempt:
                gc.collect()  # Outputs that were dropped may be held by a cycle.
        raise CaptureError(
            f"{self.name} is called while {len(self._sets)} of its forwards wait for their "
            "backwards; one more would overwrite what they need.",
            remedy=f"Give make_graphed_callables() activation_sets={len(self._sets) + 1} or more, "
            "call backward() before, or let go of the outputs that need none.",
        )

    def _check_overlap(self, leaves: Sequence[Any]) -> None:
        if self._warmed is None or not self._warmed.mutates:
            return
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            if leaf.untyped_storage().data_ptr() in self._outside:
                raise SignatureError(
                    "An argument shares memory with a tensor that the call uses by itself, and "
                    "one of them is written to.",
                    remedy="Pass a clone().",
                )

    def _forget(self) -> None:
        """Give up the recordings."""
        self._recording = None
        for chosen in self._sets:
            for recording in chosen.recordings():
                self.pool.retire(recording)
        self._sets = []
        self._held = []
        self._passes.forget()

    def _retire(self) -> None:
        self._recording = None
        super()._retire()
        self._forget()
        self._sample = []


def _with_hooks(owner: nn.Module) -> nn.Module:
    """A module that also holds what its submodules' hooks reach, so that their state is seen."""
    holder = nn.Module()
    holder._modules[""] = owner
    for child in owner.modules():
        if child is owner:
            continue
        for kind in _HOOKS:
            for hook in getattr(child, kind, {}).values():
                holder._modules[f"hook {len(holder._modules)}"] = FunctionModule(hook)
    return holder
