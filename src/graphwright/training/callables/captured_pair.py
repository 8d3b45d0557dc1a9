"""The graphs of one call signature: its forward and backward, once for each set of activations.

There is one set at first. More are recorded where a forward comes while all others wait for their
backwards. What a forward computes for its backward has memory of its own, which nothing else in the
pool uses.
So forwards and backwards may run in any order. (torch.cuda.make_graphed_callables lets backwards
use the memory of activations, and is silently wrong in any order but that of the captures.)
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...calls.binding import sees_order
from ...calls.dependencies import BACKWARD_HOOKS, FORWARD_HOOKS
from ...calls.modules import FunctionModule
from ...calls.signature import CallSignature
from ...calls.split import Args, Kwargs, flatten
from ...calls.watch import ModuleWatch
from ...calls.weights import refuse_weights
from ...errors import CaptureError, GraphwrightError, SignatureError
from ...graphs.call_spec import device_of, name_of
from ...graphs.composition import Parts
from ...graphs.conditions import refuse_hooks_for_saved_tensors
from ...graphs.graph import Graph, GraphState
from ...graphs.memory import (
    GraphMemory,
    MemoryPool,
    MemoryPrediction,
    exceeded,
    note_growth,
    predict,
    recorder_for,
    recording_in,
    retire,
    sweep,
    trim,
)
from ...graphs.python_state import PythonState, place_of
from ...graphs.reads import OutsideRead, explain
from ...graphs.recorder import Interrupted
from ...graphs.static_inputs import hosts_among
from ...graphs.transaction import let_go, transaction
from ...graphs.warmup import Warmed, warm
from .activation_set_limit import Refusal, SetLimit
from .activations import Activations, Answer, Lease, Replay
from .forward_backward import Passes
from .pair_recorder import PairRecorder

# Pools, by id, in which a pair is being captured.
BUSY: set[int] = set()
# How often a recording is tried that other threads interrupt.
_ATTEMPTS = 5


class CapturedPair(Graph):
    """The graphs of a call's forward and backward.

    Attributes:
        signature: the call's.
        grad: whether gradients were on.
        written: parameters and buffers that it writes to.
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
        sets: int,
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
            sets: the most sets of activations.

        Raises:
            CaptureError: a call with such arguments cannot be captured.
        """
        try:
            refuse_weights(owner)
            any_order = not sees_order(forward)
            self.signature = CallSignature.of(args, kwargs, any_order=any_order, lasts=True)
        except SignatureError as error:
            raise CaptureError(error.what, where=error.where, remedy=error.remedy) from error
        self._sample, _ = flatten(args, kwargs)
        self._sets: list[Activations] = []
        self._limit = SetLimit(sets, pool)
        self.grad = torch.is_grad_enabled()
        self._passes = Passes(forward, owner, args, kwargs, grad=self.grad, strict=not allow_unused)
        self._device = device_of(args, kwargs, owner, pool)
        on_host = set(hosts_among(self._sample, self._device)) & {*self._passes.wanted}
        if on_host:
            raise CaptureError(
                f"{self._passes.names[min(on_host)]} requires grad and is on the host, and the "
                f"call runs on {self._device}.",
                remedy="Pass it on the device; a copy there passes its gradient on to the host.",
            )
        # What it reads beside what its module reaches.
        self._parts = Parts()
        named = owner.function_of() if isinstance(owner, FunctionModule) else owner
        super().__init__(pool, name_of(named, self._sample))
        self._owner = owner
        self._runs = warmup
        self._watched: list[torch.Tensor] = []
        self._trained: list[bool] = []
        self._warmed: Warmed | None = None
        self._watch: ModuleWatch | None = None
        self._outside: set[int] = set()
        self.written: list[torch.Tensor] = []

    @property
    def no_backward(self) -> str | None:
        return self._passes.no_backward

    @property
    def in_use(self) -> bool:
        """Whether a backward may still come."""
        return not all(chosen.free for chosen in self._sets)

    def refuse_unready(self) -> None:
        """Raise what is wrong, if it cannot be replayed now."""
        self._ready()

    def replay(self) -> None:
        """Raise CaptureError: a pair is called, not replayed."""
        raise CaptureError(
            f"{self.name} has a graph for its forward and one for its backward.",
            remedy="Call what make_graphed_callables() has returned.",
        )

    def watch(self) -> None:
        """Begin to notice changes that make the graphs outdated."""
        self._watch = ModuleWatch(self._owner, values=False, training=True)
        if self._parts.watches:
            self._watch.join(self._parts)
        self._outside |= {s.data_ptr() for s in self._watch.memory if s.nbytes()}
        known = {id(p): p for p in (*self._owner.parameters(), *self._passes.trained)}
        self._watched = list(known.values())
        self._trained = [p.requires_grad for p in self._watched]
        assert self._warmed is not None
        announced = self._warmed.announced
        tensors = (*self._watched, *self._owner.buffers())
        self.written = [t for t in tensors if t.untyped_storage()._cdata in announced]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The tensors that get gradients in addition to arguments."""
        return list(self._passes.trained)

    def also_watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fit calls only while `requires_grad` of these tensors is what it is now."""
        known = {id(parameter) for parameter in self._watched}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        self._watched += new
        self._trained += [tensor.requires_grad for tensor in new]

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether it can answer a call, with the module as it is now."""
        grad = torch.is_grad_enabled()
        if self.state is not GraphState.READY or (grad and not self.grad):
            return False
        watch = self._watch
        assert watch is not None
        return (
            self.signature.fits(args, kwargs)
            and [p.requires_grad for p in self._watched] == self._trained
            and watch.changed() is None
        )

    def changed(self) -> str | None:
        """What has changed in the module since the capture, in words."""
        watch = self._watch
        assert watch is not None
        return watch.changed()

    def is_stale(self, held: set[int] | None = None) -> bool:
        """Whether it can never answer a call again.

        Args:
            held: identities of the tensors that the module holds now, if they are known.
        """
        return self.state is not GraphState.READY or (
            self._watch is not None and self._watch.rebound(held)
        )

    # Capture.

    def warm(self) -> None:
        """Warm up the call.

        Raises:
            CaptureError: it cannot be captured.
        """
        with self._lock:
            self.state = GraphState.WARMING
            self._warmed = self._warm(self._sample)

    def _warm(self, sample: Sequence[Any]) -> Warmed:
        refuse_hooks_for_saved_tensors()
        recorder = recorder_for(self.pool, self._device)
        with self._transaction() as undo:
            names = self._passes.names
            warmed = warm(self._passes.both, sample, recorder, undo, self._runs, names=names)
            self._passes.check_writes(warmed.mutated)
        self._outside |= {s.data_ptr() for s in warmed.external if s.nbytes()}
        return warmed

    def record(self) -> None:
        """Record the call in the pool, after `warm`, with one set of activations.

        Raises:
            MemoryBudgetExceeded: it does not fit under the pool's limit.
            CaptureError: it cannot be captured.
        """
        warmed = self._warmed
        assert warmed is not None
        try:
            with recording_in(self.pool, self, self._device) as admission:
                prediction = predict(self.pool, warmed.segments, warmed.contributors)
                admission.admit(prediction)
                self.state = GraphState.CAPTURING
                self._sets.append(self._record_set(self._sample, warmed))
                if not admission.fits():
                    raise admission.exceeded()
                self._explain_reads(warmed)
                forward = self._sets[0].forward
                assert forward is not None
                self._held = [warmed.external]
                self._take(forward, admission.before, prediction.nbytes)
                self._sample = []
                self.state = GraphState.READY
        except BaseException as error:
            let_go(error)
            raise

    def _explain_reads(self, warmed: Warmed) -> None:
        """Have what the call reads from outside be watched, as `reads.explain`."""
        own = [*self._owner.parameters(), *self._owner.buffers()]
        known = set(map(id, own))
        # Stand-ins took the places of these while the call ran.
        others = [t for t in self._passes.trained if id(t) not in known]
        places = {place_of(t) for t in (*own, *others) if t.layout is torch.strided}
        read = [OutsideRead(tensor, "the call", None) for tensor in others]
        for each in warmed.read:
            if not isinstance(each.value, torch.Tensor) or place_of(each.value) not in places:
                read.append(each)
        if read:
            watch = ModuleWatch(self._owner, values=False, training=True)
            explain(read, watch, self._parts, self._device)
        self._warmed = replace(warmed, read=())

    def _record_set(self, sample: Sequence[Any], warmed: Warmed) -> Activations:
        recorder = recorder_for(self.pool, self._device)
        pair_recorder = PairRecorder(self._passes, warmed, recorder, self.pool)
        recorder.order()  # A replay may still use the memory of the inputs.
        with self._transaction():
            for left in reversed(range(_ATTEMPTS)):
                try:
                    return pair_recorder.record(sample)
                except Interrupted as error:
                    if not left:
                        raise
                    let_go(error)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[PythonState]:
        # Sets that are there already stay: forwards may wait in them.
        BUSY.add(id(self.pool))
        try:
            with transaction(self.pool, _with_hooks(self._owner), self._passes.forget) as undo:
                yield undo
        finally:
            BUSY.discard(id(self.pool))

    # More sets of activations.

    def why_no_more_sets(self) -> Refusal | None:
        """Why no set may be added now; None if one may."""
        return self._limit.why_not(len(self._sets))

    def reserve_garbage(self) -> Lease | None:
        """A set that waits only since a cycle holds outputs that were dropped.

        To collect garbage takes long. It is worth it before a set is added; where none may be, it
        is tried ever more rarely.
        """
        if not self._limit.is_worth_a_look() and self.why_no_more_sets() is not None:
            return None
        gc.collect()
        lease = self.reserve()
        if lease is not None:
            self._limit.found_garbage()
        return lease

    def add_set(self, args: Args, kwargs: Kwargs) -> None:
        """Record another set of activations for a call that fits; the pool's lock is held.

        Raises:
            MemoryBudgetExceeded: it does not fit under the pool's limit.
            CaptureError: it cannot be captured.
        """
        # Autograd's thread for the device may be in a backward that waits for the pool's lock.
        self._passes.on_this_thread = True
        try:
            self._add_set(self.signature.taken_apart(args, kwargs).leaves)
        except GraphwrightError as error:
            let_go(error)
            self.refuse_sets(error)
            raise

    def refuse_sets(self, error: GraphwrightError) -> Refusal:
        """Add no set from now on, since that has failed; try again if there may be more room."""
        return self._limit.refuse(error)

    def _add_set(self, sample: Sequence[Any]) -> None:
        assert self._warmed is not None
        pool, trained = self.pool, len(self._passes.trained)
        # Unlike the first set: nothing gives way for it, and its backward's memory is there.
        needed = self._sets[0].nbytes
        prediction = MemoryPrediction(needed, (needed,), self._warmed.contributors)
        trim(pool)
        before = pool.reserved
        if pool.limit is not None and before + needed > pool.limit:
            raise exceeded(pool, self, prediction)
        made = None
        try:
            # As thoroughly as for the first one: this may be another thread.
            warmed = self._warm(sample)
            made = self._record_set(sample, warmed)
            self._passes.refuse_others_than(trained)
            self._ready()
            if not note_growth(pool, before):
                raise exceeded(pool, self, prediction)
        except BaseException as error:
            for recording in [] if made is None else made.recordings():
                retire(pool, recording)
            let_go(error)
            del made
            sweep(pool)
            trim(pool)
            raise
        self._sets.append(made)
        self._held.append(warmed.external)
        known = self.memory
        self.memory = GraphMemory(
            self.name, known.nbytes + pool.reserved - before, known.predicted + needed
        )

    # Calls.

    def reserve(self) -> Lease | None:
        """A free set of activations for the next forward; None if there is none."""
        with self._lock:
            for chosen in self._sets:
                if chosen.free:
                    lease = Lease(self, chosen, self._lock)
                    chosen.begin(lease)
                    return lease
        return None

    def call(self, lease: Lease, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call that fits, in a set of activations that was reserved for it."""
        try:
            leaves = self.signature.taken_apart(args, kwargs).leaves
            if self._warmed is not None and self._warmed.mutates:
                self._check_overlap(leaves)
            passes = self._passes
            # `Replay` must not hold its own outputs: the node would keep itself alive.
            answer: list[Answer] = []
            if torch.is_grad_enabled() and passes.differentiable:
                given = [leaves[slot] for slot in passes.wanted]
                outputs = Replay.apply(lease, leaves, answer, *given, *passes.trained)  # type: ignore[no-untyped-call]
            else:
                outputs = None
                with torch.no_grad():
                    lease.forward(leaves, answer)
            plan, made = answer[0]
            return plan.finish(made, outputs)
        finally:
            lease.running = False

    def _check_overlap(self, leaves: Sequence[Any]) -> None:
        """Refuse arguments in memory that a call which writes uses by itself."""
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
                retire(self.pool, recording)
        self._sets = []
        self._held = []
        self._passes.forget()

    def _retire(self) -> None:
        self._recording = None
        super()._retire()
        self._forget()
        self._parts.let_go()
        self._sample = []


def _with_hooks(owner: nn.Module) -> nn.Module:
    """A module that also holds what its submodules' hooks reach, so that their state is seen."""
    holder = nn.Module()
    holder._modules[""] = owner
    for child in owner.modules():
        if child is owner:
            continue
        for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
            for hook in getattr(child, kind, {}).values():
                holder._modules[f"hook {len(holder._modules)}"] = FunctionModule(hook)
    return holder
