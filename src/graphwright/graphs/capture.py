"""capture(), capturing() and predict_memory(): record a call or a block, or see what it would take.

A capture is a transaction: the call is warmed up, rehearsed, admitted to its pool, then recorded.
Whatever these runs changed is put back, and when anything raises, KeyboardInterrupt included,
nothing stays behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..calls.modules import FunctionModule
from ..calls.options import device_problem, flag_problem, names_checked, refuse
from ..calls.split import Args, Kwargs
from ..errors import CaptureError
from .call_spec import device_of
from .captured_call import CapturedCall, Outputs
from .conditions import autocast_cache_apart, capturing_now
from .graph import Graph, GraphState
from .inspection.origins import Observer, Origins, observing
from .memory import MemoryPool, MemoryPrediction, pool_of_one_graph, pool_problem, recording_in
from .transaction import transaction


def capture(
    fn: Callable[..., Any],
    *args: Any,
    pool: MemoryPool | None = None,
    warmup: int = 3,
    outputs: Outputs = "fresh",
    streams: int = 1,
    **kwargs: Any,
) -> Graph:
    """Capture one call as a graph: a CUDA graph on a GPU, a tape of operations on the CPU.

    Args:
        fn: a function or module. It runs a few times here, under `torch.no_grad`; what these runs
            change (buffers, inputs, random numbers, gradients) is put back.
        args: sample arguments: tensors, plain values, and containers and objects of them. Later
            calls must agree with them in everything but the tensors' values. If six or more of
            the tensors are written to, as those of a cache, calls with these very tensors are
            answered without copies, and the graph keeps them alive.
        pool: memory to share with other graphs; by default a new pool.
        warmup: ordinary runs before the capture, in addition to those that observe and rehearse it.
        outputs: "fresh" returns new tensors; "static" returns the graph's own, which the next
            replay overwrites.
        streams: on a GPU, how many streams independent operations are captured on, by the data
            flow. More than one is faster only where branches leave the GPU room; measure it. It
            takes more memory: what another stream uses is not reused in the graph.
        kwargs: sample keyword arguments.

    Returns:
        a graph, which is called like `fn`, or replayed on its static inputs.

    Raises:
        CaptureError: the call cannot be captured; names the operation, the line and the remedy.
        MemoryBudgetExceeded: the graph does not fit under the pool's limit; nothing was captured.
        OptionError: an option is invalid.
    """
    graph = CapturedCall(
        fn, args, kwargs, pool=pool, warmup=warmup, outputs=outputs, streams=streams, in_place=True
    )
    try:
        graph.warm()
        graph.record()
    except BaseException:
        graph.close()
        raise
    return graph


def predict_memory(
    fn: Callable[..., Any], *args: Any, pool: MemoryPool | None = None, **kwargs: Any
) -> MemoryPrediction:
    """Predict the memory that capturing `fn(*args, **kwargs)` would take, without capturing it.

    The call is warmed up outside the pool, and what it changed is put back. Library workspaces
    (cuBLAS) are not counted: there is one per stream, not one per graph.

    Args:
        fn: a function or module.
        args: as for `capture`.
        pool: the pool for the graph; by default an empty one.
        kwargs: as for `capture`.

    Returns:
        the bytes by which the pool would grow, and the largest tensors among them.

    Raises:
        CaptureError: the call cannot be captured.
        OptionError: `fn` cannot be called, or `pool` is no pool.
    """
    graph = CapturedCall(fn, args, kwargs, pool=pool)
    try:
        return graph.warm()
    finally:
        graph.close()


def refusal_of(
    fn: Callable[..., Any], args: Args, kwargs: Kwargs, *, rehearse: bool
) -> CaptureError | None:
    """Why `capture` would refuse a call; None if it would not. What the call changes is put back.

    Args:
        fn: a function or module.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        rehearse: whether to try the recording too, and not only what comes before it.
    """
    graph: CapturedCall | None = None
    try:
        graph = CapturedCall(fn, args, kwargs)
        graph.warm(rehearse=rehearse)
        graph.explain_reads()
    except CaptureError as error:
        return error
    finally:
        if graph is not None:
            graph.close()
    return None


@names_checked
@contextlib.contextmanager
def capturing(
    *,
    pool: MemoryPool | None = None,
    device: torch.device | str | None = None,
    annotate: bool = False,
) -> Iterator[Graph]:
    """Capture what a `with` block does; `replay()` repeats it.

    The block must be warm: run the same code before. Tensors made in the block have no values
    before the first replay. Tensors from outside are read and written where they are.

    Args:
        pool: memory to share with other graphs; by default a new pool.
        device: by default the pool's, else the current CUDA device, else the CPU.
        annotate: note the operation, module and line behind each node, for `Graph.nodes`. It takes
            some microseconds an operation, during the capture only.

    Raises:
        OptionError: an option is invalid.
        CaptureError: something cannot be captured; raised inside the block or when it ends.
    """
    refuse(
        "capturing",
        pool_problem(pool),
        device_problem("device", device),
        flag_problem("annotate", annotate),
    )
    pool = pool_of_one_graph(device) if pool is None else pool
    if capturing_now():
        raise CaptureError("A capture inside another one.", remedy="Capture them one by one.")
    nothing = FunctionModule(_nothing)
    where = device_of((), {}, nothing, pool) if device is None else torch.device(device)
    graph = CapturedBlock(pool, "a block")
    try:
        with graph.recorded(where, Observer(Origins(None)) if annotate else None):
            yield graph
    except BaseException:
        graph.close()
        raise


class CapturedBlock(Graph):
    """The graph of a `with` block."""

    @contextlib.contextmanager
    def recorded(self, device: torch.device, by: Observer | None) -> Iterator[None]:
        """Record the block.

        Args:
            device: where it runs.
            by: is told of its operations.
        """
        self.state = GraphState.CAPTURING
        with recording_in(self.pool, self, device) as admission:
            with transaction(self.pool, FunctionModule(_nothing), lambda: None):
                with autocast_cache_apart(), observing(by), admission.recorder.open() as recorded:
                    yield
                self._take(recorded(), admission.before, 0)
                self._origins = None if by is None else by.recorded
            self.state = GraphState.READY


def _nothing() -> None:
    """Placeholder for the function that a block does not have."""
