"""graph_step(): one whole training iteration as one graph."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...calls.modes import opaque
from ...calls.signature import Args, CallSignature, Kwargs, inside_transform, tensors_of
from ...errors import (
    CaptureError,
    MemoryBudgetExceeded,
    OptionError,
    SignatureError,
    in_words,
    levels_above,
)
from ...graphs.conditions import capturing_now, only_for_inference, under_hooks_for_saved_tensors
from ...graphs.graph import GraphState
from ...graphs.memory import MemoryPool, in_units
from .body import name_of_step, plainly
from .builder import StepBuilder
from .captured_step import GRAPHS, CapturedStep

OnMiss = Literal["capture", "eager", "error"]

_FIRST = "first step of an optimizer"
_REFUSED = "it cannot be captured"
# So often an option of an optimizer that is in the kernels may change.
_MAX_CHANGES = 8
# After so many replays in a row, what has changed before counts no longer.
_SETTLED = 100


@dataclass
class StepStatistics:
    """How the steps went so far.

    Attributes:
        replays: steps that a graph did.
        eager: steps that ran eagerly, by the reason.
        captures: graphs that were captured.
        nbytes: bytes that the pool holds.
    """

    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    captures: int = 0
    nbytes: int = 0


class GraphedStep:
    """A training step that is answered by graphs; made by `graph_step`.

    Attributes:
        pool: the memory that the graphs live in.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        sample: Args,
        *,
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        scheduler: Any,
        pool: MemoryPool,
        on_miss: OnMiss,
        max_graphs: int,
        warmup: int,
    ) -> None:
        """As `graph_step`, which see."""
        self.pool = pool
        self._step = step
        self._scheduler = scheduler
        self._on_miss = on_miss
        self._max_graphs = max_graphs
        self._warmup = warmup
        self._statistics = StepStatistics()
        self._graphs: list[CapturedStep] = []  # the last one used first
        self._warned: set[str] = set()
        self._last_miss = ""
        self._changes = 0
        self._in_a_row = 0
        self._kinds: list[CallSignature] = []  # of batches that had a graph
        self._refused: list[tuple[CallSignature, str]] = []  # kinds of batches, with the reason
        self._closed = False
        self._workings = StepBuilder(step, optimizers, scaler, follow=scheduler is not None)
        if any(tensor.requires_grad for tensor in tensors_of(sample)):
            raise CaptureError(
                "An argument of the step requires grad; a captured step gives it no gradient.",
                remedy="Make what it comes from part of the step.",
            )
        with torch.inference_mode(False):
            self._capture(sample, {})

    @property
    def statistics(self) -> StepStatistics:
        """How the steps went so far."""
        self._statistics.nbytes = self.pool.reserved
        return self._statistics

    @opaque
    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        """Do one step.

        Returns:
            what the step returns; tensors are the caller's own and never require grad. Nothing
            waits for the device.

        Raises:
            SignatureError: with on_miss="error", where no graph fits the batch.
        """
        # Nothing could be trained in inference mode.
        with self.pool.lock, torch.inference_mode(False):
            result = self._answer(batch, kwargs)
        if self._scheduler is not None:
            self._scheduler.step()
        return result

    def explain(self) -> str:
        """What runs now and why, what it costs, and how the steps went so far."""
        now = self.statistics
        lines = [
            f"{name_of_step(self._step)}: {len(self._ready())} graphs, "
            f"{in_units(now.nbytes)} of memory",
            f"{now.replays} steps replayed, {now.captures} captures",
        ]
        lines += [f"  {graph.name}: {graph.nodes} nodes" for graph in self._ready()]
        for rate in self._workings.rates:
            where = "a constant of the graph" if rate.tensor is None else "read from a tensor"
            lines.append(f"learning rate of {rate}: {where}")
        lines += [f"{count} steps eager: {why}" for why, count in now.eager.most_common()]
        if self._last_miss:
            lines.append(f"last miss: {self._last_miss}")
        return "\n".join(lines)

    def release(self) -> None:
        """Close all graphs; the next steps capture theirs again."""
        with self.pool.lock:
            for graph in self._graphs:
                graph.close()
            self._graphs = []
            self._refused = []
            self.pool.trim()

    def close(self) -> None:
        """Close all graphs for good; steps are eager."""
        self._closed = True
        self.release()

    def __enter__(self) -> GraphedStep:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise CaptureError(
            "The graphs of a step are tied to its model and optimizer, and can be neither copied "
            "nor pickled.",
            remedy="Copy the model, and make a step for the copy; save state_dict()s.",
        )

    def __repr__(self) -> str:
        return f"<GraphedStep {name_of_step(self._step)}: {len(self._ready())} graphs>"

    # A step.

    def _answer(self, args: Args, kwargs: Kwargs, *, again: bool = False) -> Any:
        if self._closed or self.pool.closed:
            return self._eagerly("closed", args, kwargs)
        if only_for_inference() or (inside_transform() and not capturing_now()):
            raise CaptureError(
                f"The training step {name_of_step(self._step)} is part of a call that is captured, "
                "fused, tuned, traced or transformed for inference.",
                remedy="Call the step where that call is made.",
            )
        if capturing_now():
            return self._eagerly("inside another capture", args, kwargs)
        if under_hooks_for_saved_tensors():
            return self._eagerly("under hooks for saved tensors", args, kwargs)
        if self._graphs:
            self.pool.order()  # What graphs read may be written to here.
        graph = self._find(args, kwargs)
        if graph is None:
            if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
                return self._eagerly("an argument requires grad", args, kwargs)
            graph, kind, why = self._new(args, kwargs)
            if graph is None:
                return self._missed(kind, why, args, kwargs)
        home = graph.home
        if not home.intact() and not home.bring():
            if not home.lacks():
                self._drop(graph)
                if again:
                    why = "the state of an optimizer is of another kind every time"
                    return self._missed(_REFUSED, why, args, kwargs)
                return self._answer(args, kwargs, again=True)
            if not home.begin():
                # The first step of an optimizer makes its state, which no graph does.
                return self._eagerly(_FIRST, args, kwargs)
        self._workings.refresh()
        try:
            result = graph.step(args, kwargs)
        except SignatureError as error:  # It shares memory with the weights, say.
            return self._missed("an argument is one that no graph takes", error.what, args, kwargs)
        self._statistics.replays += 1
        self._in_a_row += 1
        if self._in_a_row >= _SETTLED:
            self._changes = 0
        return result

    def _find(self, args: Args, kwargs: Kwargs) -> CapturedStep | None:
        """The graph that does just this step."""
        for index, graph in enumerate(self._graphs):
            if (
                graph.state is GraphState.READY
                and graph.signature.fits(args, kwargs)
                and graph.is_current()
                and graph.settings.difference() is None
                and graph.begins_here()
            ):
                if graph.holds():
                    # Somebody has a view of its gradients: the memory is theirs, and from now on
                    # gradients are handed out as copies.
                    self._drop(graph)
                    self._workings.lends = False
                    return None
                if index:
                    self._graphs.insert(0, self._graphs.pop(index))
                return graph
        return None

    def _drop(self, graph: CapturedStep) -> None:
        self._graphs.remove(graph)
        with self._counted():
            graph.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A graph may go on from gradients that another one leaves: that is no view of others."""
        before = [(graph, graph.users()) for graph in list(GRAPHS)]
        yield  # What fails leaves nothing of its own.
        for graph, users in before:
            graph.expect_users(users)

    def _new(self, args: Args, kwargs: Kwargs) -> tuple[CapturedStep | None, str, str]:
        """A graph for a step that none fits; or why there is none."""
        why = self._why(args, kwargs)
        self._drop_stale()
        if self._on_miss != "capture" and not any(k.fits(args, kwargs) for k in self._kinds):
            return None, "no graph fits", why
        if self._changes > _MAX_CHANGES:
            return None, "what it is made of changes again and again", why
        if len(self._graphs) >= self._max_graphs:
            return None, f"there are {self._max_graphs} graphs already", why
        for signature, reason in self._refused:
            if signature.fits(args, kwargs):
                return None, _REFUSED, reason
        try:
            return self._capture(args, kwargs), "", ""
        except (CaptureError, MemoryBudgetExceeded) as error:
            reason = in_words(error)[0]
            with contextlib.suppress(SignatureError):
                self._refused.append((CallSignature.of(args, kwargs), reason))
            return None, _REFUSED, reason

    def _missed(self, kind: str, why: str, args: Args, kwargs: Kwargs) -> Any:
        self._last_miss = why
        if self._on_miss == "error":
            raise SignatureError(
                f"No graph of {name_of_step(self._step)} fits this step: {why}",
                remedy="Make one for this batch with graph_step(), or allow on_miss='capture'.",
            )
        result = self._eagerly(kind, args, kwargs)
        if self._on_miss == "capture" and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"A step runs eagerly, since {kind}: {why}",
                RuntimeWarning,
                stacklevel=levels_above(),
            )
        return result

    def _eagerly(self, kind: str, args: Args, kwargs: Kwargs) -> Any:
        self._statistics.eager[kind] += 1
        return plainly(self._step, args, kwargs)

    # A capture.

    def _capture(self, args: Args, kwargs: Kwargs) -> CapturedStep:
        """Capture the step as it is now; what its runs change is put back."""
        with self.pool.lock, self._counted():
            graph = self._workings.capture(args, kwargs, self.pool, self._warmup)
        self._graphs.insert(0, graph)
        if all(graph.signature != kind for kind in self._kinds):
            self._kinds.append(graph.signature)
        self._statistics.captures += 1
        self._in_a_row = 0
        return graph

    def _drop_stale(self) -> None:
        """Close graphs that no step will fit again; have changing learning rates in tensors."""
        changed = self._graphs[0].settings.difference() if self._graphs else None
        if changed is not None:
            rates = [r for r in self._workings.rates if r.tensor is None and r.can_change]
            if any(rate.option == changed for rate in rates):
                for rate in rates:
                    rate.change()
            else:
                self._changes += 1
        for graph in list(self._graphs):
            other = graph.settings.difference() is not None
            if other or graph.state is not GraphState.READY or graph.is_stale():
                self._drop(graph)

    def _ready(self) -> list[CapturedStep]:
        return [graph for graph in self._graphs if graph.state is GraphState.READY]

    def _why(self, args: Args, kwargs: Kwargs) -> str:
        """What is different about a step that no graph fits."""
        if not self._graphs:
            return "its graphs were closed, or something that they were made of has changed"
        graph = self._graphs[0]
        if not graph.signature.fits(args, kwargs):
            return f"{graph.signature.differences(args, kwargs)}"
        option = graph.settings.difference()
        if option is not None:
            return f"{option[2]} of {type(option[0]).__name__} has changed"
        return graph.what_changed() or "it begins with other gradients"


def graph_step(
    step: Callable[..., Any],
    sample_batch: Any,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None,
    scheduler: Any = None,
    pool: MemoryPool | None = None,
    on_miss: OnMiss = "capture",
    max_graphs: int = 8,
    warmup: int = 3,
) -> GraphedStep:
    """Make one graph of a whole training iteration.

    The step is run a few times here, and all that these runs change is put back: parameters,
    buffers, gradients, random numbers, and the optimizers' states. The first step of an optimizer
    makes its state and is eager; so is a batch that no graph is captured for.

    Args:
        step: does one iteration on a batch: zero_grad, forward, loss, backward, clipping,
            `optimizer.step()`, moving averages; it may go through several micro-batches. What it
            returns, the loss above all, is returned as tensors that do not require grad. It reads
            nothing back from the device, and leaves `scheduler.step()` out.
        sample_batch: the step's arguments: a tuple, or a single one.
        optimizer: those that the step uses; what the step itself names is found. SGD, or whatever
            has the option `capturable` (which is switched on) or `fused=True`; on the CPU SGD or
            `fused=True`.
        scaler: the GradScaler that the step uses; its optimizers have to be fused.
        scheduler: its `step()` is called after each step. One that is not given may be called
            outside; a learning rate that changes is followed in either case.
        pool: memory to share with other graphs; by default a pool of its own.
        on_miss: what a batch of another kind does: "capture" a graph of its own, go "eager", or
            "error".
        max_graphs: graphs to capture; steps that need another one are eager, with a warning.
        warmup: ordinary runs before the capture, beside those that observe and rehearse it.

    Returns:
        a GraphedStep, to be called as the step is.

    Raises:
        CaptureError: the step cannot be captured; names the operation, the line and the remedy.
        MemoryBudgetExceeded: it does not fit under the pool's limit.
        OptionError: an option makes no sense.
    """
    if on_miss not in ("capture", "eager", "error"):
        raise OptionError(f"on_miss is 'capture', 'eager' or 'error', not {on_miss!r}.")
    if not isinstance(max_graphs, int) or max_graphs < 1:
        raise OptionError(f"max_graphs is a number above 0, not {max_graphs!r}.")
    if optimizer is None:
        optimizer = ()
    return GraphedStep(
        step,
        sample_batch if isinstance(sample_batch, tuple) else (sample_batch,),
        optimizers=[optimizer] if isinstance(optimizer, Optimizer) else optimizer,
        scaler=scaler,
        scheduler=scheduler,
        pool=MemoryPool() if pool is None else pool,
        on_miss=on_miss,
        max_graphs=max_graphs,
        warmup=warmup,
    )
