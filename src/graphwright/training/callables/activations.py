"""Sets of activations: the graphs of one forward and its backward, and the memory between them.

A set is in use from its forward until no backward can come any more: autograd has let go of what it
saved, or its node has died. `Replay` is the autograd node that a replayed forward leaves behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import CaptureError
from ...graphs.conditions import THREAD
from ...graphs.recorder import Recording
from ...graphs.static_inputs import CopyPlan, Geometry, StaticInputs, copy
from .backward_outputs import Outputs

# Seconds that a backward waits for a capture on another thread.
_PATIENCE_S = 60.0
# The results of a forward, behind how the caller's are made of them.
Answer = tuple[Outputs, list[Any]]


@dataclass(frozen=True)
class Backward:
    """A recorded backward.

    Attributes:
        recording: its graph.
        given: static gradients of the outputs.
        gradients: geometries of the gradients of the forward's inputs; None for one without.
        reach: for each output, positions of the gradients that depend on its own gradient.
        device: where these tensors are.
    """

    recording: Recording
    given: Sequence[torch.Tensor]
    gradients: Sequence[Geometry | None]
    reach: Sequence[frozenset[int]]
    device: torch.device


@dataclass(eq=False)
class Activations:
    """A recorded forward with its backward, and the memory between them.

    Attributes:
        inputs: the static inputs.
        copies: how arguments are copied into them.
        outputs: what the forward returns.
        forward: its graph.
        backward: its backward; None if there is none.
        saved: parameters and buffers that the backward reads in place.
        held: keeps alive what the forward computes for the backward, so that its memory is not
            used for anything else.
        nbytes: bytes by which the pool grew for what nothing else shares.
        turn: the number of the last forward.
    """

    inputs: StaticInputs
    copies: CopyPlan
    outputs: Outputs
    forward: Recording | None
    backward: Backward | None
    saved: Sequence[torch.Tensor]
    held: list[Any]
    nbytes: int = 0
    turn: int = 0
    _lease: weakref.ref[Lease] | None = field(default=None, repr=False)

    @property
    def free(self) -> bool:
        """Whether no forward is under way, and no backward may still come."""
        lease = None if self._lease is None else self._lease()
        return lease is None or not lease.waiting

    def begin(self, lease: Lease) -> None:
        """Another forward is about to run, for which `lease` is given out."""
        self.turn += 1
        lease.turn = self.turn
        self._lease = weakref.ref(lease)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Replay the forward for a call's arguments; its results, in the order of `outputs`."""
        assert self.forward is not None
        self.forward.order()
        copies, results = self.copies, self.outputs.results
        targets = [torch.empty_like(base) for base in results.bases]
        if self.inputs.hosts:
            self.inputs.send(leaves)
        if copies.is_simple:
            self.forward.run([leaves[slot] for slot in copies.sources], targets)
        else:
            copies.run(self.forward, self.inputs, leaves, targets)
        made: list[Any] = results.build(leaves, targets, apart=True)
        return made

    def recordings(self) -> list[Recording]:
        """Give up the graphs and return them, for the pool to retire.

        A lease may keep this object alive for long, but not the pool's memory.
        """
        found = [] if self.forward is None else [self.forward]
        found += [] if self.backward is None else [self.backward.recording]
        self.forward = self.backward = None
        self.held = []
        for name in ("inputs", "outputs"):
            vars(self).pop(name, None)
        return found


class Lease:
    """The right of one forward to a set, until no backward of it can come any more.

    It lives as long as the forward's autograd node, or as the call if there is none.

    Attributes:
        pair: the graphs that the forward belongs to.
        activations: the set that the forward runs in.
        running: whether the forward is under way.
        turn: the number of the forward.
    """

    def __init__(self, pair: Any, activations: Activations, lock: Any) -> None:
        """`pair` is kept alive, together with its graphs; `lock` is that of its pool."""
        self.pair = pair
        self.activations = activations
        self.running = True
        self.turn = 0
        self._lock = lock
        self._token: StorageWeakRef | None = None

    @property
    def waiting(self) -> bool:
        """Whether the forward is under way, or a backward of it may still come."""
        return self.running or (self._token is not None and not self._token.expired())

    def token(self) -> torch.Tensor:
        """A tensor for autograd to save: once autograd lets go of it, no backward can come.

        Autograd does so after a backward, unless that was called with retain_graph=True.
        """
        made = torch.empty(0, device="cpu")
        self._token = StorageWeakRef(made.untyped_storage())
        return made

    def forward(self, leaves: Sequence[Any], answer: list[Answer]) -> list[torch.Tensor]:
        """Run the forward; its differentiable outputs.

        Args:
            leaves: of the call's arguments.
            answer: gets all its results, and how the caller's are made of them.
        """
        chosen = self.activations
        with self._lock:
            if chosen.forward is None or THREAD.depth:
                self.pair.refuse_unready()
            plan = chosen.outputs
            made = chosen.run(leaves)
            # Autograd did not see these writes: have it notice stale saved tensors.
            torch.autograd.graph.increment_version(self.pair.written)
            answer.append((plan, made))
            return [made[place] for place in plan.differentiable]

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the forward's inputs; the caller owns them.

        Args:
            grads: the gradients of its differentiable outputs.

        Raises:
            CaptureError: another forward has used the memory, the graph is closed, or there is no
                backward.
        """
        lock = self._lock
        # A capture on another thread may hold it and wait for this thread in turn.
        if not lock.acquire(timeout=_PATIENCE_S):
            raise CaptureError(
                f"The backward of {self.pair.name} waits for a capture on another thread, which "
                "may wait for it.",
                remedy="Capture all kinds of calls before threads train at once; "
                "on_miss='error' shows which are missing.",
            )
        try:
            return run_backward(self._ready(), grads)
        finally:
            lock.release()

    def _ready(self) -> Backward:
        """The recorded backward, if what it needs is still there."""
        chosen = self.activations
        if self.pair.no_backward is not None:
            raise CaptureError(
                f"There is no backward for {self.pair.name}: {self.pair.no_backward}",
                remedy="It has none without graphs either, in the mode that it is in.",
            )
        if chosen.backward is None:
            raise CaptureError(
                f"The graph of {self.pair.name} was closed before its backward.",
                remedy="Call backward() before the pool is released or closed.",
            )
        if self.turn != chosen.turn:
            raise CaptureError(
                f"A later forward of {self.pair.name} has overwritten what this backward needs, "
                "since another thread has run it at the same time.",
                remedy="Call a backward in one thread only, or with retain_graph=True.",
            )
        return chosen.backward


def run_backward(
    backward: Backward, grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Replay a backward and return its gradients, which the caller owns."""
    with torch.no_grad():
        backward.recording.order()
        sources = [as_given(g, like) for g, like in zip(grads, backward.given, strict=True)]
        targets = [
            torch.empty_strided(g.size, g.stride, dtype=g.dtype, device=backward.device)
            for g in backward.gradients
            if g is not None
        ]
        backward.recording.run(sources, targets)
    fresh = iter(targets)
    made = [None if g is None else next(fresh) for g in backward.gradients]
    if any(grad is None for grad in grads):
        # As in eager: None rather than zero for inputs that the loss does not depend on.
        used = zip(backward.reach, grads, strict=True)
        reached = frozenset[int]().union(*(places for places, grad in used if grad is not None))
        made = [g if place in reached else None for place, g in enumerate(made)]
    return made


def as_given(grad: torch.Tensor | None, static: torch.Tensor) -> torch.Tensor:
    """A gradient with the strides of the static one; zeros if the output was not used."""
    if grad is None:
        return torch.zeros_like(static)
    plain = grad.layout is torch.strided and not (grad.is_conj() or grad.is_neg())
    if plain and Geometry.of(grad) == Geometry.of(static):
        return grad
    made = torch.empty_like(static)
    copy(grad.to_dense() if grad.layout is not torch.strided else grad, made)
    return made


class Replay(torch.autograd.Function):
    """The autograd function of a graphed callable: both passes are replays."""

    @staticmethod
    def forward(
        ctx: Any,
        lease: Lease,
        leaves: Sequence[Any],
        answer: list[Answer],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward as `Lease.forward`; `tensors` get gradients."""
        outputs = lease.forward(leaves, answer)
        ctx.lease = lease
        # Autograd then notices if these are written to before the backward. Without any saved
        # tensor it would not notice a second backward.
        ctx.save_for_backward(*lease.activations.saved, lease.token())
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the backward."""
        if torch.is_grad_enabled():
            raise CaptureError(
                "Gradients of gradients (create_graph=True) go through a graphed callable, whose "
                "backward is a graph and leaves no history.",
                remedy="Leave create_graph out, or call the callable without graphs for this.",
            )
        if any(g is not None and _is_batched(g) for g in grads):
            raise CaptureError(
                "Batches of gradients (vmap, is_grads_batched=True) go through a graphed callable.",
                remedy="Ask for them one by one, or call the callable without graphs for this.",
            )
        _ = ctx.saved_tensors
        return None, None, None, *ctx.lease.backward(grads)


def _is_batched(grad: torch.Tensor) -> bool:
    """Whether it is a batch of gradients, from vmap or from autograd's older way."""
    return grad.layout is torch.strided and not torch._C._has_storage(grad)
