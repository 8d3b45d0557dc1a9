"""graph_step(): run a whole training iteration as one graph."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...calls.binding import sees_order
from ...calls.dependencies import RunsStep
from ...calls.modes import opaque
from ...calls.options import (
    callable_problem,
    choice_problem,
    count_problem,
    in_brief,
    kind_problem,
    names_checked,
    refuse,
)
from ...calls.plurals import counted
from ...calls.signature import (
    CallSignature,
    in_backward,
    inside_transform,
    under_hooks_for_saved_tensors,
)
from ...calls.split import Args, Kwargs, require_grad, tensors_of
from ...dispatch.decision import CAPTURED, CLOSED, UNCAPTURED, UNDER_HOOKS, UNFITTING, UNPAID
from ...dispatch.fallback import Fallback, Words
from ...errors import (
    CaptureError,
    MemoryBudgetExceeded,
    SignatureError,
    in_a_row,
    in_words,
)
from ...graphs.conditions import capturing_now, only_for_inference
from ...graphs.graph import GraphState
from ...graphs.memory import (
    MemoryPool,
    budget_of,
    format_bytes,
    lock_of,
    order,
    pool_problem,
    trim,
)
from ...graphs.transaction import let_go
from .body import name_of_step, run_detached
from .builder import StepBuilder
from .captured_step import ALL_STEPS, CapturedStep
from .wrappers import is_initialized, with_wrapped

OnMiss = Literal["capture", "eager", "error"]

# Reasons for eager steps, as the statistics count them.
_FIRST = "first step of an optimizer"
# Steps until a refused capture is tried again; what made the step fail may be gone.
_RETRY = 16
# Kinds of steps without a graph that are remembered, in case they come back.
_MAX_SEEN = 256
# How many graphs are kept whose options are others than at present: these may come back.
_MAX_KEPT = 3


@dataclass
class StepStatistics:
    """How the steps went so far.

    Attributes:
        replays: steps that were replayed.
        eager: steps that ran eagerly, by reason.
        captures: graphs that were captured.
        nbytes: bytes that the pool holds.
    """

    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    captures: int = 0
    nbytes: int = 0


@dataclass
class _Refused:
    """A kind of batch for which there is no graph; it is tried again, ever more rarely.

    Attributes:
        signature: of the batch.
        reason: why there is none.
        waits: how many steps until the next try.
        times: how often it was tried again.
    """

    signature: CallSignature
    reason: str
    waits: int = _RETRY
    times: int = 0


@dataclass
class _SeenStep:
    """A kind of step without a graph.

    Attributes:
        signature: of its batch.
        options: of the optimizers.
        steps: how many steps there were when it was seen last.
        graph: whether it has had a graph since it came back.
    """

    signature: CallSignature
    options: list[Any]
    steps: int
    graph: bool = False


class GraphedStep(RunsStep):
    """A training step that is answered by graphs; made by `graph_step`.

    Attributes:
        pool: the memory that the graphs live in.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        sample: Args,
        *,
        optimizers: Sequence[Any],
        scaler: GradScaler | None,
        scheduler: Any,
        pool: MemoryPool,
        on_miss: OnMiss,
        max_graphs: int,
        warmup: int,
    ) -> None:
        """The arguments are those of `graph_step`."""
        self.pool = pool
        self._lock, self._budget = lock_of(pool), budget_of(pool)
        self._step = step
        self._scheduler = scheduler
        self._max_graphs = max_graphs
        self._warmup = warmup
        self._statistics = StepStatistics()
        self._graphs: list[CapturedStep] = []  # most recently used first
        self._fallback = Fallback(self._words, on_miss, self._count_eager)
        self._options: list[Any] = []  # those of the optimizers when no graph fitted last
        self._seen: list[_SeenStep] = []  # most recently seen first
        self._captured: list[CallSignature] = []  # signatures that had a graph
        self._refused: list[_Refused] = []
        self._closed = False
        self._eager_thread: int | None = None  # the one that is in an eager step
        self._builder = StepBuilder(step, optimizers, scaler, follow=scheduler is not None)
        if any(tensor.requires_grad for tensor in tensors_of(sample)):
            raise CaptureError(
                "An argument of the step requires grad; a captured step gives it no gradient.",
                remedy="Make what it comes from part of the step.",
            )
        with torch.inference_mode(False):
            self._capture(sample, {})

    def _words(self) -> Words:
        """How it is said that no graph answers a step."""
        name = name_of_step(self._step)
        return Words(
            f"The step {name}",
            "Its statistics and explain() count them.",
            f"No graph of {name} fits this step",
            "Make one for this batch with graph_step(), or allow on_miss='capture'.",
        )

    def _count_eager(self, reason: str) -> None:
        self._statistics.eager[reason] += 1

    @property
    def _graphwright_step(self) -> Callable[..., Any]:
        return self._step

    @property
    def statistics(self) -> StepStatistics:
        """How the steps went so far."""
        self._statistics.nbytes = self.pool.reserved
        return self._statistics

    @opaque
    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        """Do one step.

        Returns:
            The step's results. Tensors belong to the caller and do not require grad. Nothing waits
            for the device.

        Raises:
            SignatureError: no graph fits the batch, and on_miss is "error".
        """
        if self._eager_thread == threading.get_ident() and in_backward():
            # A checkpoint around a step runs it once more; that is a part of its first run.
            return run_detached(self._step, batch, kwargs)
        # Inference mode would forbid training.
        with self._lock, torch.inference_mode(False):
            result = self._answer(batch, kwargs)
        if self._scheduler is not None:
            self._scheduler.step()
        return result

    def explain(self) -> str:
        """The graphs and their memory, learning rates, and how the steps went so far, in words."""
        now = self.statistics
        lines = [
            f"{name_of_step(self._step)}: {counted(len(self._ready()), 'graph')}, "
            f"{format_bytes(now.nbytes)} of memory",
            f"{counted(now.replays, 'step')} replayed, {counted(now.captures, 'capture')}",
        ]
        lines += [f"  {graph.name}: {counted(graph.node_count, 'node')}" for graph in self._ready()]
        for rate in self._builder.rates:
            where = "a constant of the graph" if rate.tensor is None else "read from a tensor"
            lines.append(f"learning rate of {rate}: {where}")
        for number in self._builder.numbers:
            if number.tensors is not None:
                lines.append(f"{number}: read from a tensor")
        lines += [
            f"{counted(count, 'step')} eager: {why}" for why, count in now.eager.most_common()
        ]
        if self._fallback.last:
            lines.append(f"last miss: {self._fallback.last}")
        return "\n".join(lines)

    def release(self) -> None:
        """Close all graphs; the next steps capture them again."""
        with self._lock:
            for graph in self._graphs:
                graph.close()
            self._graphs = []
            self._refused = []
            self._seen = []
            self._budget.renew()
            trim(self.pool)

    def close(self) -> None:
        """Close all graphs for good; later steps are eager."""
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
        return f"<GraphedStep {name_of_step(self._step)}: {counted(len(self._ready()), 'graph')}>"

    # A step.

    def _answer(self, args: Args, kwargs: Kwargs, *, again: bool = False) -> Any:
        why_eager = self._why_eager()
        if why_eager is not None:
            return self._run_eagerly(why_eager, args, kwargs)
        if self._graphs:
            order(self.pool)  # Code here may write to what graphs read.
        graph = self._find(args, kwargs)
        if graph is None:
            if require_grad(args, kwargs):
                return self._run_eagerly("an argument requires grad", args, kwargs)
            graph, reason, why = self._capture_if_allowed(args, kwargs)
            if graph is None:
                return self._fall_back(reason, why, args, kwargs)
        memory = graph.optimizer_memory
        if not memory.intact() and not memory.copy_back():
            if not memory.misses_state():
                return self._answer_without(graph, args, kwargs, again=again)
            if not memory.make_initial_states():
                # The first step of an optimizer makes its state, which a graph cannot do.
                return self._run_eagerly(_FIRST, args, kwargs)
        self._builder.refresh()
        try:
            result = graph.step(args, kwargs)
        except SignatureError as error:  # For example, an argument shares memory with weights.
            return self._fall_back(
                "an argument is one that no graph takes", in_a_row(error), args, kwargs
            )
        self._statistics.replays += 1
        return result

    def _why_eager(self) -> str | None:
        """Why a step is eager whatever its batch is; None if a graph may answer it.

        Raises:
            CaptureError: it is part of what may not train.
        """
        if self._closed or self.pool.closed:
            return CLOSED
        if only_for_inference() or (inside_transform() and not capturing_now()):
            raise CaptureError(
                f"The training step {name_of_step(self._step)} is part of a call that is captured, "
                "fused, tuned, traced or transformed for inference.",
                remedy="Call the step where that call is made.",
            )
        if capturing_now():
            return CAPTURED
        if under_hooks_for_saved_tensors():
            return UNDER_HOOKS
        # It looks at each gradient on the host.
        return "under anomaly detection" if torch.is_anomaly_enabled() else None

    def _answer_without(
        self, graph: CapturedStep, args: Args, kwargs: Kwargs, *, again: bool
    ) -> Any:
        """Answer a step by another graph: the state of an optimizer is of another kind now."""
        self._drop(graph)
        if again:
            why = "the state of an optimizer is of another kind every time"
            return self._fall_back(UNCAPTURED, why, args, kwargs)
        return self._answer(args, kwargs, again=True)

    def _find(self, args: Args, kwargs: Kwargs) -> CapturedStep | None:
        """The graph that fits this step; None if there is none."""
        for index, graph in enumerate(self._graphs):
            if (
                graph.state is GraphState.READY
                and graph.signature.fits(args, kwargs)
                and graph.is_current()
                and graph.settings.difference() is None
                and graph.begins_here()
            ):
                if graph.is_viewed():
                    gc.collect()  # The frames of an error may hold views, and nobody holds them.
                if graph.is_viewed():
                    # Someone holds a view of its gradients: leave them that memory, and from now
                    # on give the caller copies of gradients.
                    self._drop(graph)
                    self._builder.lends = False
                    return None
                if index:
                    self._graphs.insert(0, self._graphs.pop(index))
                return graph
        return None

    def _drop(self, graph: CapturedStep) -> None:
        self._graphs.remove(graph)
        with self._recount_users():
            graph.close()

    @contextlib.contextmanager
    def _recount_users(self) -> Iterator[None]:
        """Count uses of gradients that graphs gain or lose in the block as our own.

        A graph may begin with gradients that another one leaves.
        """
        before = [(graph, graph.users()) for graph in list(ALL_STEPS)]
        yield  # A failure leaves no uses behind.
        for graph, users in before:
            graph.expect_users(users)

    def _capture_if_allowed(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[CapturedStep | None, str, str]:
        """A new graph for a step that no graph fits; or the reason why not, and the details."""
        why = self._difference(args, kwargs)
        changed = list(self._graphs[0].settings.differences()) if self._graphs else []
        followed = self._drop_stale(changed)
        if self._fallback.on_miss != "capture" and not self._had_graph(args, kwargs):
            return None, UNFITTING, why
        if not self._has_room():
            return None, f"max_graphs={self._max_graphs} allows no more graphs", why
        known = next((each for each in self._refused if each.signature.fits(args, kwargs)), None)
        if known is not None:
            known.waits -= 1
            if known.waits > 0:
                return None, UNCAPTURED, known.reason
        try:
            # There are only so many numbers that can be followed, each once.
            comes_back = self._sight(args, kwargs) or followed
            with self._budget.capture(self._answered, comes_back=comes_back) as capture:
                graph = self._capture_in_limit(args, kwargs) if capture.allowed else None
        except (CaptureError, MemoryBudgetExceeded) as error:
            let_go(error)  # Its frames hold gradients.
            reason = in_words(error)[0]
            self._note_refusal(known, reason, args, kwargs)
            return None, UNCAPTURED, reason
        if graph is None:
            if changed:
                why += f"; {self._builder.why_constant(changed[0])}. Change it more rarely"
            return None, UNPAID, why
        if known is not None:
            self._refused.remove(known)
        return graph, "", ""

    def _had_graph(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether there was a graph for such steps."""
        return any(each.fits(args, kwargs) for each in self._captured)

    def _has_room(self) -> bool:
        """Whether one more graph may be captured; those that have to make room are dropped."""
        if len(self._graphs) >= self._max_graphs:
            self._drop_others(keep=self._max_graphs - 1)
        return len(self._graphs) < self._max_graphs

    def _note_refusal(
        self, known: _Refused | None, reason: str, args: Args, kwargs: Kwargs
    ) -> None:
        """Wait ever longer before a capture of such steps is tried again."""
        if known is not None:
            known.reason, known.times = reason, known.times + 1
            known.waits = _RETRY * 4**known.times
            return
        with contextlib.suppress(SignatureError):
            signature = CallSignature.of(args, kwargs, any_order=not sees_order(self._step))
            self._refused.append(_Refused(signature, reason))

    def _answered(self) -> int:
        """How many steps graphs have answered."""
        return self._statistics.replays

    def _sight(self, args: Args, kwargs: Kwargs) -> bool:
        """Note a step that has no graph; whether such steps come back after others."""
        steps = self._statistics.replays + self._statistics.eager.total()
        for seen in self._seen:
            if seen.options == self._options and seen.signature.fits(args, kwargs):
                others, seen.steps = steps - seen.steps > 1, steps
                comes_back = others and not seen.graph
                seen.graph = seen.graph or comes_back
                return comes_back
        with contextlib.suppress(SignatureError):
            signature = CallSignature.of(args, kwargs, any_order=not sees_order(self._step))
            seen = _SeenStep(signature, self._options, steps)
            self._seen = [seen, *self._seen[: _MAX_SEEN - 1]]
        return False

    def _fall_back(self, reason: str, why: str, args: Args, kwargs: Kwargs) -> Any:
        self._fallback.last = why
        self._fallback.refuse(why)
        result = self._run_eagerly(reason, args, kwargs)
        self._fallback.tell(reason, why, kind=reason)
        return result

    def _run_eagerly(self, reason: str, args: Args, kwargs: Kwargs) -> Any:
        self._fallback.count(reason)
        before, self._eager_thread = self._eager_thread, threading.get_ident()
        try:
            # Backwards of a GPU run in another thread by default, and this one has the lock: what
            # they call could not take it, a checkpoint around this step or a graph of this pool.
            with torch.autograd.set_multithreading_enabled(False):
                return run_detached(self._step, args, kwargs)
        finally:
            self._eager_thread = before

    # A capture.

    def _capture(self, args: Args, kwargs: Kwargs) -> CapturedStep:
        """Capture the step as it is now; what the runs change is put back."""
        with self._lock, self._recount_users():
            graph = self._builder.capture(args, kwargs, self.pool, self._warmup)
        self._graphs.insert(0, graph)
        if all(graph.signature != known for known in self._captured):
            self._captured.append(graph.signature)
        self._statistics.captures += 1
        return graph

    def _capture_in_limit(self, args: Args, kwargs: Kwargs) -> CapturedStep:
        """Capture; for want of memory, graphs that may never fit again give way."""
        try:
            return self._capture(args, kwargs)
        except MemoryBudgetExceeded as error:
            if not self._drop_others(keep=0):
                raise
            let_go(error)
        return self._capture(args, kwargs)

    def _drop_stale(self, changed: list[tuple[Any, int, str]]) -> bool:
        """Close graphs that will never fit again, and read numbers that change from tensors.

        Args:
            changed: options that are others than in the graph that was used last.

        Returns:
            whether a number is read from a tensor from now on.
        """
        options = self._builder.options()
        followed = False
        if options != self._options:
            self._options = options
            if changed:
                followed = self._builder.follow(changed)
        for graph in list(self._graphs):
            if graph.state is not GraphState.READY or graph.is_stale():
                self._drop(graph)
        self._drop_others(keep=0 if followed else _MAX_KEPT)
        return followed

    def _drop_others(self, keep: int) -> bool:
        """Close graphs with other options than at present but those used last; whether any was.

        Args:
            keep: how many of them are kept.
        """
        others = [g for g in self._graphs if g.settings.difference() is not None]
        for graph in others[keep:]:
            self._drop(graph)
        return len(others) > keep

    def _ready(self) -> list[CapturedStep]:
        return [graph for graph in self._graphs if graph.state is GraphState.READY]

    def _difference(self, args: Args, kwargs: Kwargs) -> str:
        """How a step differs from what the last graph was captured for, in words."""
        if not self._graphs:
            return "its graphs were closed, or something that they were made of has changed"
        graph = self._graphs[0]
        if not graph.signature.fits(args, kwargs):
            return f"{graph.signature.differences(args, kwargs, 'captured')}"
        option = graph.settings.difference()
        if option is not None:
            return f"{option[2]} of {type(option[0]).__name__} has changed"
        return graph.what_changed() or "it begins with other gradients"


@names_checked
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
    """Capture a whole training iteration as one graph.

    The step is run a few times here. All that these runs change is put back: parameters, buffers,
    gradients, random numbers, and the optimizers' states. The first step of an optimizer makes its
    state and is eager, as are steps on batches that no graph is captured for.

    Args:
        step: does one iteration on a batch: zero_grad, forward, loss, backward, clipping,
            `optimizer.step()`, moving averages; it may use several micro-batches. Its results,
            above all the loss, are returned as tensors that do not require grad. It must not read
            anything back from the device, nor call `scheduler.step()`.
        sample_batch: the step's arguments: a tuple, or a single argument.
        optimizer: the optimizers that the step uses; those that the step itself names are found.
            SGD, or an optimizer with the option `capturable` (which is switched on) or with
            `fused=True`; on the CPU SGD or `fused=True`. Wrappers such as accelerate's are looked
            through.
        scaler: the GradScaler that the step uses; its optimizers must be fused.
        scheduler: its `step()` is called after each step. A scheduler that is not given may be
            called outside; changes of learning rates take effect in both cases.
        pool: memory to share with other graphs; by default a new pool.
        on_miss: what to do if no graph fits a batch: "capture" another graph, run it "eager", or
            raise an "error".
        max_graphs: how many graphs to capture; steps that need more are eager, with a warning.
        warmup: ordinary runs before the capture, in addition to those that observe and rehearse it.

    Returns:
        A GraphedStep, which is called like the step.

    Raises:
        CaptureError: the step cannot be captured; it names the operation, the line and the remedy.
        MemoryBudgetExceeded: it does not fit under the pool's limit.
        OptionError: an option makes no sense.
    """
    refuse(
        "graph_step",
        callable_problem("step", step),
        _optimizers_problem(optimizer),
        kind_problem("scaler", scaler, GradScaler, "write torch.amp.GradScaler(…)", optional=True),
        _scheduler_problem(scheduler),
        pool_problem(pool),
        choice_problem("on_miss", on_miss, get_args(OnMiss)),
        count_problem("max_graphs", max_graphs),
        count_problem("warmup", warmup),
    )
    return GraphedStep(
        step,
        sample_batch if isinstance(sample_batch, tuple) else (sample_batch,),
        optimizers=_listed(optimizer),
        scaler=scaler,
        scheduler=scheduler,
        pool=MemoryPool() if pool is None else pool,
        on_miss=on_miss,
        max_graphs=max_graphs,
        warmup=warmup,
    )


def _optimizers_problem(optimizers: Any) -> str | None:
    """What is wrong with one or several optimizers, in words."""
    listed = _listed(optimizers)
    for each in listed:
        if not any(map(is_initialized, with_wrapped([each]))):
            what = "which is not a torch.optim.Optimizer and wraps none"
            return f"optimizer is {in_brief(each)}, {what}"
    return None


def _listed(optimizers: Any) -> list[Any]:
    """Optimizers in a list, whether there are none, one or several."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, tuple | list) else [optimizers]


def _scheduler_problem(scheduler: Any) -> str | None:
    """What is wrong with a scheduler, in words."""
    if scheduler is None or callable(getattr(scheduler, "step", None)):
        return None
    return (
        f"scheduler is {in_brief(scheduler)}, which has no step(): pass a learning-rate scheduler"
    )
