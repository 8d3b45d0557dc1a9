"""graph(), and GraphedModule, which it returns for modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, Unpack, overload

from torch import nn

from ..calls.modes import opaque
from ..calls.modules import ModuleProxy
from ..calls.options import flag_problem, names_checked, refuse
from ..calls.signature import Call
from ..calls.watch import Checks
from ..errors import OptionError
from ..graphs.captured_call import Breaks, Outputs
from ..graphs.graph import Graph
from ..graphs.memory import MemoryPool
from ..shapes.buckets import Buckets
from .carried_state import Answer
from .graphed_callable import GraphedCallable, OnMiss, answer_of, name_of
from .statistics import CallStatistics, to_html


class GraphedModule(ModuleProxy):
    """A module whose calls are answered by graphs; made by `graph()`.

    It shares the module's attributes: parameters(), state_dict(), to(), train(), hooks and
    everything else read and change the module itself.
    """

    __slots__ = ("_answer", "_graphs")
    _graphwright_maker = "graph"

    _answer: Answer
    _graphs: GraphedCallable

    def __init__(self, graphs: GraphedCallable) -> None:
        assert isinstance(graphs.fn, nn.Module)
        super().__init__(graphs.fn)
        object.__setattr__(self, "_graphs", graphs)
        object.__setattr__(self, "_answer", answer_of(graphs))

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call; as `GraphedCallable.__call__`."""
        return self._answer(args, kwargs)

    @property
    def _graphwright_answerer(self) -> GraphedCallable:
        return self._graphs

    @property
    def pool(self) -> MemoryPool:
        """The memory that the graphs live in."""
        return self._graphs.pool

    @property
    def statistics(self) -> CallStatistics:
        """How the calls went so far."""
        return self._graphs.statistics

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that answer calls now, those of parts of the module too."""
        return self._graphs.graphs

    def prepare(self, calls: Iterable[Call], *, progress: bool | None = None) -> GraphedModule:
        """Capture graphs for calls now, as `GraphedCallable.prepare`; returns itself."""
        self._graphs.prepare(calls, progress=progress)
        return self

    def explain(self) -> str:
        """What runs now and why, what it costs, and how the calls went so far."""
        return self._graphs.explain()

    def release(self) -> None:
        """Close all graphs; the next calls capture theirs again."""
        self._graphs.release()

    def close(self) -> None:
        """Close all graphs for good; calls then run the module itself."""
        self._graphs.close()

    def __repr__(self) -> str:
        return repr(self._graphs).replace("GraphedCallable", "GraphedModule", 1)

    def _repr_html_(self) -> str:
        return to_html(type(self).__name__, name_of(self._graphs.fn), self.statistics)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModule:
        return GraphedModule(copy.deepcopy(self._graphs, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedModule, (self._graphs,)


def graphs_of(made: Any) -> GraphedCallable | None:
    """What answers the calls of something that `graph()` made; None for anything else."""
    if isinstance(made, GraphedModule):
        return made._graphs
    return made if isinstance(made, GraphedCallable) else None


class _Options(TypedDict, total=False):
    """The options of `graph()`, for its overloads."""

    pool: MemoryPool | None
    outputs: Outputs
    on_miss: OnMiss
    max_graphs: int
    audit: int | None
    breaks: Breaks
    checks: Checks
    dynamic_shapes: Any
    buckets: Buckets | None
    pad: Any
    split: bool


@overload
def graph(  # type: ignore[overload-overlap]  # a module is callable, and the more special case
    fn: nn.Module, **options: Unpack[_Options]
) -> GraphedModule: ...
@overload
def graph(fn: Callable[..., Any], **options: Unpack[_Options]) -> GraphedCallable: ...
@names_checked
def graph(
    fn: Callable[..., Any],
    *,
    pool: MemoryPool | None = None,
    outputs: Outputs = "fresh",
    on_miss: OnMiss = "capture",
    max_graphs: int = 32,
    audit: int | None = None,
    breaks: Breaks = "auto",
    checks: Checks = "full",
    dynamic_shapes: Any = None,
    buckets: Buckets | None = None,
    pad: Any = None,
    split: bool = False,
) -> GraphedModule | GraphedCallable:
    """Answer calls by graphs: one graph is captured per input signature, and replayed from then on.

    A graph belongs to one signature (shapes, dtypes, strides, devices, plain values, autocast and
    backend switches) and one state of the module (train or eval, attributes, addresses of weights).
    A call that fits no graph is captured, runs eagerly, or raises; a graph is never replayed for a
    call that it was not captured for.

    Args:
        fn: a module or function, for inference.
        pool: memory to share with other graphs; by default a new pool.
        outputs: "fresh" returns new tensors; "static" returns the graphs' own, which the next call
            overwrites.
        on_miss: what to do with a call that has no graph: "capture", "eager" (count it and call
            `fn`) or "error". With the last two, only `prepare()` captures graphs.
        max_graphs: graphs to keep; the least recently used one is closed for a new one.
        audit: every `audit` calls, run `fn` beside the graph and compare, if the call changes
            nothing and draws no random numbers.
        breaks: what to do with a call that copies from the host, or lets the host read values from
            the device, so that one graph cannot hold it. "auto" keeps such constants on the device
            and divides the call into segments at such reads, whose values decide which segment
            follows. A module that cannot be captured as a whole is answered in parts, if that is
            faster. "never" runs the call eagerly.
        checks: what is checked before a graph answers: "full" checks the call and the module;
            "signature" only the call, for a module that never changes; "none" only the number of
            arguments, for calls that are all alike: other calls, and calls that want gradients,
            then get silently wrong results. `explain()` reports what the checks cost.
        dynamic_shapes: which dimensions of the arguments vary, as for `torch.export`: a dictionary
            by argument, or a tuple for the positional ones, that has for each tensor a dictionary
            from axis to `Dim` (or its name), or a tuple with one entry per dimension, or None.
        buckets: sizes of these dimensions to capture graphs for. Inputs are padded to the smallest
            bucket that holds them and outputs are sliced, once it is proved that this changes
            nothing; otherwise the call is eager. Without `dynamic_shapes`,
            `Buckets(batch=[1, 4, 16])` refers to dimension 0 of every tensor whose dimension 0 has
            the most common size.
        pad: the values that tensors are padded with, mirroring the arguments:
            `{"attention_mask": 0}`. By default zeros; for integers the smallest one of the first
            call.
        split: answer calls above the largest bucket in chunks, if it is proved that rows do not
            depend on each other; otherwise they are eager.

    Returns:
        a GraphedModule, which differs from the module only in how it is called; for a plain
        function a GraphedCallable. Both have `prepare`, `statistics`, `explain`, `release` and
        `close`.

    Raises:
        OptionError: an option is invalid.
    """
    options: dict[str, Any] = {
        "pool": pool,
        "outputs": outputs,
        "on_miss": on_miss,
        "max_graphs": max_graphs,
        "audit": audit,
        "breaks": breaks,
        "checks": checks,
    }
    shapes: dict[str, Any] = {"dynamic_shapes": dynamic_shapes, "pad": pad, "split": split}
    refuse("graph", flag_problem("split", split))
    graphs: GraphedCallable
    if buckets is not None:
        # Symbolic shapes take a second to import.
        from .bucketed_callable import BucketedCallable

        graphs = BucketedCallable(fn, buckets=buckets, **shapes, **options)
    elif given := [
        name for name, value in shapes.items() if value is not None and value is not False
    ]:
        raise OptionError(
            f"{' and '.join(given)} say how calls are padded to buckets, and there are none.",
            remedy="Pass buckets too, for example Buckets(batch=[1, 4, 16]).",
        )
    else:
        graphs = GraphedCallable(fn, **options)
    return GraphedModule(graphs) if isinstance(fn, nn.Module) else graphs
