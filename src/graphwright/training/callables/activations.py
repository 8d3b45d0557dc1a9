"""Sets of activations: the memory of one forward, from when it runs until its backward has.

The node of autograd that a replayed forward leaves behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import CaptureError
from ...graphs.recorder import Recording
from ...graphs.static_tensors import Geometry, StaticInputs, copy, is_dense
from .outputs import Outputs

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Backward:
    """A backward that was recorded.

    Attributes:
        recording: it.
        given: static gradients of the outputs.
        gradients: shapes of the gradients of what the forward was given, None where there is none.
        reach: for each output, positions of the gradients that depend on its own.
        device: where they are.
    """

    recording: Recording
    given: Sequence[torch.Tensor]
    gradients: Sequence[Geometry | None]
    reach: Sequence[frozenset[int]]
    device: torch.device


@dataclass(frozen=True)
class Copies:
    """How arguments get into static inputs, and back where the call writes to them; by position.

    Attributes:
        sources: those that are copied in as bytes.
        by_element: those that are copied in element by element.
        back: those that are copied back as bytes.
        back_by_element: likewise, element by element.
    """

    sources: Sequence[int]
    by_element: Sequence[int]
    back: Sequence[int]
    back_by_element: Sequence[int]

    @classmethod
    def of(cls, inputs: StaticInputs, mutated: Sequence[int]) -> Copies:
        """Those of a call that writes to some of its arguments."""
        sources = [slot for slot in inputs.slots if inputs.in_one_range(slot)]
        back = [slot for slot in mutated if is_dense(inputs.tensor(slot))]
        return cls(
            sources,
            [slot for slot in inputs.slots if slot not in sources],
            back,
            [slot for slot in mutated if slot not in back],
        )


@dataclass(eq=False)
class Activations:
    """A recorded forward with its backward, and the memory between them.

    Attributes:
        inputs: its static inputs.
        copies: how they are filled.
        outputs: what it returns.
        forward: its graph.
        backward: that of its backward; None where there is none.
        saved: parameters and buffers that the backward reads where they are.
        held: what the forward computes and the backward may read: nothing else may lie there.
        turn: counts the forwards.
    """

    inputs: StaticInputs
    copies: Copies
    outputs: Outputs
    forward: Recording | None
    backward: Backward | None
    saved: Sequence[torch.Tensor]
    held: list[Any]
    turn: int = 0
    _lease: weakref.ref[Lease] | None = field(default=None, repr=False)

    @property
    def free(self) -> bool:
        """Whether no backward is to come."""
        lease = self.lease
        return lease is None or lease.done

    @property
    def lease(self) -> Lease | None:
        """The last forward that a backward may come for."""
        return None if self._lease is None else self._lease()

    def begin(self, lease: Lease | None) -> None:
        """Another forward is about to run."""
        self.turn += 1
        self._lease = None
        if lease is not None:
            lease.turn = self.turn
            self._lease = weakref.ref(lease)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Replay the forward for a call's arguments; what it returns, as `outputs` plans it."""
        assert self.forward is not None
        self.forward.order()
        copies, results = self.copies, self.outputs.results
        targets = [torch.empty_like(base) for base in results.bases]
        for slot in copies.by_element:
            copy(leaves[slot], self.inputs.tensor(slot))
        self.forward.run(
            [leaves[slot] for slot in copies.sources],
            [*targets, *(leaves[slot] for slot in copies.back)],
        )
        for slot in copies.back:
            # Written to behind autograd's back: what was saved of it for a backward is stale.
            torch.autograd.graph.increment_version(leaves[slot])
        for slot in copies.back_by_element:
            copy(self.inputs.tensor(slot), leaves[slot])
        made: list[Any] = results.build(leaves, targets)
        return made

    def recordings(self) -> list[Recording]:
        """Its graphs, which are given up."""
        found = [] if self.forward is None else [self.forward]
        found += [] if self.backward is None else [self.backward.recording]
        self.forward = self.backward = None
        self.held = []
        return found


class Lease:
    """A forward whose backward may come; it lives as long as its node of autograd.

    Attributes:
        done: whether the backward has run.
        turn: which forward it was.
    """

    def __init__(self, pair: Any, activations: Activations) -> None:
        """`pair` is kept alive, with its graphs."""
        self.pair = pair
        self.activations = activations
        self.done = False
        self.turn = 0

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of what the forward was given; the caller owns them.

        Args:
            grads: of its differentiable outputs.

        Raises:
            CaptureError: another forward has used the memory, the graph is closed, or there is no
                backward.
        """
        lock = self.pair.pool.lock
        # A capture on another thread has it, and may need the thread that this one is on.
        if not lock.acquire(timeout=_PATIENCE_S):
            raise CaptureError(
                f"The backward of {self.pair.name} waits for a capture on another thread, which "
                "may wait for it.",
                remedy="Capture all kinds of calls before threads train at once; "
                "on_miss='error' shows which are missing.",
            )
        try:
            made = run_backward(self._ready(), grads)
        finally:
            lock.release()
        self.done = True
        return made

    def _ready(self) -> Backward:
        """The graph of the backward, if what it needs is there."""
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
                f"A later forward of {self.pair.name} has overwritten what this backward, "
                "which has run before, needs.",
                remedy="Give make_graphed_callables() more activation_sets, or call the "
                "second backward before the next forward.",
            )
        return chosen.backward


def run_backward(
    backward: Backward, grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Replay a backward; its gradients are in memory of the caller's own."""
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
        # As in eager: None, not zero, for what the loss does not depend on.
        used = zip(backward.reach, grads, strict=True)
        reached = frozenset[int]().union(*(places for places, grad in used if grad is not None))
        made = [g if place in reached else None for place, g in enumerate(made)]
    return made


def as_given(grad: torch.Tensor | None, static: torch.Tensor) -> torch.Tensor:
    """A gradient with the strides of the static one; zero where the output was not used."""
    if grad is None:
        return torch.zeros_like(static)
    plain = grad.layout is torch.strided and not (grad.is_conj() or grad.is_neg())
    if plain and Geometry.of(grad) == Geometry.of(static):
        return grad
    made = torch.empty_like(static)
    copy(grad.to_dense() if grad.layout is not torch.strided else grad, made)
    return made


# Runs the forward: what is differentiable of its outputs, who waits for the backward, and what that
# reads where it is.
Forward = Callable[[], tuple[Sequence[torch.Tensor], Lease | None, Sequence[torch.Tensor]]]


class Replay(torch.autograd.Function):
    """Forward and backward of a graphed callable, by replay."""

    @staticmethod
    def forward(ctx: Any, run: Forward, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the forward; `tensors` is what gradients are for."""
        outputs, ctx.lease, saved = run()
        # Autograd sees whether these are written to before the backward. With nothing saved it
        # would not see a second backward either.
        ctx.save_for_backward(*saved, torch.empty(0, device="cpu"))
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
        return None, *ctx.lease.backward(grads)


def _is_batched(grad: torch.Tensor) -> bool:
    """Whether it stands for many, of vmap as it is now or as autograd still uses it."""
    return grad.layout is torch.strided and not torch._C._has_storage(grad)
