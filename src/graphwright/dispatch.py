"""A callable that captures a graph for each kind of call and replays it for the next ones.

A call is known by its signature and by the state of the module. The common case, the same kind of
call as last time, has a path of its own: check the arguments, launch, and look over the module
while the device works.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .audit import compare
from .errors import (
    CaptureError,
    GraphwrightError,
    MemoryBudgetExceeded,
    OptionError,
    SignatureError,
)
from .graphs.capture import CallGraph, Outputs
from .graphs.graph import GraphClosed, State
from .graphs.memory import MemoryPool, in_units
from .graphs.transaction import capturing_now
from .report.progress import shown
from .signature import (
    Args,
    CallSignature,
    Kwargs,
    fitting,
    inside_transform,
    lasting_switches,
    tensors_of,
)
from .watch import FunctionModule, ModuleWatch, in_training

OnMiss = Literal["capture", "eager", "error"]
Call = tuple[Any, ...] | Mapping[str, Any] | tuple[tuple[Any, ...], Mapping[str, Any]]

_MAX_STATES = 4
_MISS = object()
# These take another path, with other numbers in padded places, when gradients are off.
_DEPEND_ON_GRAD_MODE = (
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)


@dataclass(frozen=True)
class GraphStatistics:
    """How the calls of a graphed callable went so far.

    Attributes:
        hits: calls that a graph answered, the first one after its capture included.
        captures: graphs that were captured, those captured again included.
        eager: eager calls, by reason.
        audits: calls that were run eagerly beside the graph, and agreed.
        graphs: graphs that are ready now.
        nbytes: bytes by which they grew their pool.
    """

    hits: int
    captures: int
    eager: Mapping[str, int]
    audits: int
    graphs: int
    nbytes: int


@dataclass(eq=False)
class _State:
    """One state of the module, and the graphs that were captured in it."""

    watch: ModuleWatch
    training: bool
    # By the call's signature and, where numbers depend on it, the gradient mode.
    entries: dict[tuple[CallSignature, bool | None], _Entry] = field(default_factory=dict)


@dataclass(eq=False)
class _Entry:
    """One kind of call in one state: its graph, or why there is none."""

    signature: CallSignature
    state: _State
    graph: CallGraph | None
    # Whether a result may be dropped without a trace.
    pure: bool
    grad: bool | None
    error: GraphwrightError | None = None
    pool_version: int = 0

    @property
    def ready(self) -> bool:
        return self.graph is not None and self.graph.state is State.READY


class GraphedCallable:
    """A function or module whose calls are answered by graphs; made by `graph()`.

    Graphs are captured at the first call of each kind, or at once by `prepare()`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        pool: MemoryPool | None = None,
        outputs: Outputs = "fresh",
        on_miss: OnMiss = "capture",
        max_graphs: int = 32,
        audit: int | None = None,
    ) -> None:
        wrong = []
        if outputs not in ("fresh", "static"):
            wrong.append(f"outputs is 'fresh' or 'static', not {outputs!r}")
        if on_miss not in ("capture", "eager", "error"):
            wrong.append(f"on_miss is 'capture', 'eager' or 'error', not {on_miss!r}")
        for name, value in (("max_graphs", max_graphs), ("audit", audit)):
            optional = name == "audit" and value is None
            if not optional and (not isinstance(value, int) or value < 1):
                wrong.append(f"{name} is a number above 0, not {value!r}")
        if not callable(fn):
            wrong.append(f"a {type(fn).__name__} cannot be called")
        if wrong:
            raise OptionError("; ".join(wrong) + ".")
        self.fn = fn
        self.pool = MemoryPool() if pool is None else pool
        self.on_miss = on_miss
        self._outputs = outputs
        self._max_graphs = max_graphs
        self._audit_every = audit
        self._states: list[_State] = []
        self._order: dict[CallGraph, _Entry] = {}  # least recently used first
        self._recent: _Entry | None = None
        self._fast: Callable[[Args, Kwargs], Any] | None = None
        self._quick: dict[Any, _Entry] = {}
        self._hits = 0
        self._captures = 0
        self._audits = 0
        self._eager: Counter[str] = Counter()
        self._last_miss: str | None = None
        self._warned: set[str] = set()
        self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call by a graph, or eagerly where none fits or may be captured.

        Outputs never require grad, unless gradients are wanted: the module is in training mode, or
        an input requires grad, while gradients are on. Then the call is eager.

        Raises:
            SignatureError: with on_miss="error", when no graph fits.
            VerificationError: an audit found that a graph's result is not eager's.
        """
        return self.call(args, kwargs)

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """The same, with the arguments as they are."""
        fast = self._fast
        if fast is not None:
            result = fast(args, kwargs)
            if result is not _MISS:
                return result
        entry = self._recent
        if entry is None or not entry.signature.fits(args, kwargs):
            entry = self._quick.get(_quick_key(args, kwargs))
            if entry is None or not entry.signature.fits(args, kwargs):
                return self._find(args, kwargs)
        if entry.grad is not None and torch.is_grad_enabled() is not entry.grad:
            return self._find(args, kwargs)
        return self._answer(entry, args, kwargs)

    def _shortcut(self, entry: _Entry) -> Callable[[Args, Kwargs], Any] | None:
        """The common case in one function, in which every name and attribute counts.

        It answers calls whose arguments are all tensors, by a graph that mutates nothing, and says
        `_MISS` to whatever needs a closer look.
        """
        signature, graph = entry.signature, entry.graph
        guard, flat = signature.guard, signature.flat
        launch = None if graph is None else graph.launcher()
        if guard is None or flat is None or launch is None or not entry.pure:
            return None
        if entry.grad is not None or self._audit_every is not None:
            return None
        quiet = not (entry.state.training or signature.wants_grad)
        if any(signature.switches[:2]):  # Autocast is on, and its dtype might change.
            return None
        expected, unchanged = signature.switches[2:], entry.state.watch.unchanged
        count, names = len(flat[0]), tuple(flat[1])
        grad_is_on = torch.is_grad_enabled

        def fast(args: Args, kwargs: Kwargs) -> Any:
            if len(args) != count or len(kwargs) != len(names):
                return _MISS
            if kwargs:
                try:
                    args = (*args, *[kwargs[name] for name in names])
                except KeyError:
                    return _MISS
            if not fitting(guard, args) or lasting_switches() != expected:
                return _MISS
            if not quiet and grad_is_on():
                return _MISS
            try:
                result = launch(args)
            except GraphClosed:
                return _MISS
            if not unchanged():
                return _MISS
            self._hits += 1
            return result

        return fast

    def _answer(self, entry: _Entry, args: Args, kwargs: Kwargs) -> Any:
        """A graph that fits. Nothing is lost where it turns out not to."""
        graph = entry.graph
        if graph is None or capturing_now() or (entry.state.training and torch.is_grad_enabled()):
            return self._find(args, kwargs)
        if (
            self._audit_every is not None
            and entry.pure
            and (self._hits + 1) % self._audit_every == 0
        ):
            return self._audited(entry, graph, args, kwargs)
        try:
            if entry.pure:
                # The device works while the module is looked over.
                result = graph.run(args, kwargs)
                if entry.state.watch.changed() is not None:
                    return self._find(args, kwargs)
            else:
                if entry.state.watch.changed() is not None:
                    return self._find(args, kwargs)
                result = graph.run(args, kwargs)
        except GraphClosed:
            return self._find(args, kwargs)
        except SignatureError as error:
            kind = "an argument shares memory with a tensor of the call's own"
            return self._missed(kind, error.what, args, kwargs)
        self._hits += 1
        if entry is not self._recent:
            self._used(entry, args, kwargs)
        return result

    def _used(self, entry: _Entry, args: Args, kwargs: Kwargs) -> None:
        """Remember what was used last, for the quick path and for eviction."""
        self._recent = entry
        self._fast = self._shortcut(entry)
        key = _quick_key(args, kwargs)
        if key is not None:
            self._quick[key] = entry
        graph = entry.graph
        if graph is not None:
            with self.pool.lock:
                if self._order.pop(graph, None) is not None:
                    self._order[graph] = entry
                self.pool.touch(graph)

    def _find(self, args: Args, kwargs: Kwargs) -> Any:
        """Everything but the common case."""
        if self._closed:
            return self._run_eagerly("closed", args, kwargs)
        if capturing_now():
            return self._run_eagerly("inside another capture", args, kwargs)
        if inside_transform():
            self._eager["traced or transformed"] += 1
            return self.fn(*args, **kwargs)
        state = self._state()
        if torch.is_grad_enabled() and (
            state.training or any(t.requires_grad for t in tensors_of((args, dict(kwargs))))
        ):
            self._eager["gradients are wanted"] += 1
            return self.fn(*args, **kwargs)
        try:
            signature = CallSignature.of(args, kwargs)
        except SignatureError as error:
            return self._missed("an argument that cannot be captured", error.what, args, kwargs)
        grad = self._grad_mode()
        entry = state.entries.get((signature, grad))
        if entry is not None:
            if entry.ready:
                return self._answer(entry, args, kwargs)
            if entry.error is not None and entry.pool_version == self.pool.version:
                kind = _kind(entry.error)
                return self._missed(kind, entry.error.what, args, kwargs)
        if self.on_miss != "capture":
            return self._missed("no graph fits", self._why(signature, args, kwargs), args, kwargs)
        try:
            entry = self._capture(signature, state, args, kwargs)
        except (CaptureError, MemoryBudgetExceeded) as error:
            failed = _Entry(signature, state, None, False, grad, error, self.pool.version)
            state.entries[signature, grad] = failed
            return self._missed(_kind(error), error.what, args, kwargs)
        return self._answer(entry, args, kwargs)

    def _missed(self, kind: str, why: str, args: Args, kwargs: Kwargs) -> Any:
        """No graph answers this call: raise, or go eager, as the policy says."""
        self._last_miss = why
        if self.on_miss == "error":
            raise SignatureError(
                f"No graph of {_name(self.fn)} fits this call: {why}",
                remedy="Prepare one with prepare(), or allow on_miss='capture' or 'eager'.",
            )
        result = self._run_eagerly(kind, args, kwargs)  # It may raise what the function raises.
        if kind in ("it cannot be captured", "the pool's limit") and why not in self._warned:
            self._warned.add(why)
            warnings.warn(
                f"{_name(self.fn)} runs eagerly for this kind of call, since {kind}: {why}",
                RuntimeWarning,
                stacklevel=5,
            )
        return result

    def _run_eagerly(self, kind: str, args: Args, kwargs: Kwargs) -> Any:
        self._eager[kind] += 1
        return self._quietly(args, kwargs)

    def _quietly(self, args: Args, kwargs: Kwargs) -> Any:
        """Eager's answer, not requiring grad."""
        if self._grad_mode():
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.fn(*args, **kwargs))
        with torch.no_grad():
            return self.fn(*args, **kwargs)

    def _module(self) -> nn.Module:
        return self.fn if isinstance(self.fn, nn.Module) else FunctionModule(self.fn)

    def _grad_mode(self) -> bool | None:
        """The gradient mode, where the module's numbers depend on it."""
        if any(isinstance(m, _DEPEND_ON_GRAD_MODE) for m in self._module().modules()):
            return torch.is_grad_enabled()
        return None

    def _state(self) -> _State:
        """The module's state as it is now; graphs of weights that are gone are closed."""
        with self.pool.lock:
            for state in self._states:
                if state.watch.changed() is None:
                    return state
            for state in [s for s in self._states if s.watch.rebound()]:
                self._drop(state)
            if len(self._states) >= _MAX_STATES:
                self._drop(self._states[0])
            module = self._module()
            training = any(map(in_training, module.modules()))
            self._states.append(_State(ModuleWatch(module, values=False), training))
            return self._states[-1]

    def _drop(self, state: _State) -> None:
        self._states.remove(state)
        for entry in list(state.entries.values()):
            self._discard(entry)

    def _discard(self, entry: _Entry) -> None:
        if entry.graph is not None:
            self._order.pop(entry.graph, None)
            entry.graph.close()
        if self._recent is entry:
            self._recent = self._fast = None
        self._quick = {key: e for key, e in self._quick.items() if e is not entry}
        entry.state.entries.pop((entry.signature, entry.grad), None)

    def _capture(
        self, signature: CallSignature, state: _State, args: Args, kwargs: Kwargs
    ) -> _Entry:
        with self.pool.lock:
            entry = state.entries.get((signature, self._grad_mode()))
            if entry is not None and entry.ready:
                return entry  # Another thread was faster.
            graph = self._new(args, kwargs)
            graph.warm()
            return self._record(graph, signature)

    def _new(self, args: Args, kwargs: Kwargs) -> CallGraph:
        return CallGraph(
            self.fn, args, kwargs, pool=self.pool, outputs=self._outputs, evictable=True
        )

    def _record(self, graph: CallGraph, signature: CallSignature) -> _Entry:
        for old in list(self._order)[: max(0, len(self._order) + 1 - self._max_graphs)]:
            self._discard(self._order[old])
        graph.record(share_inputs=self._outputs == "fresh")
        # A first run may have set something up for good; the graph belongs to what is now.
        state = self._state()
        entry = _Entry(
            signature,
            state,
            graph,
            pure=not (graph.mutates or graph.random),
            grad=self._grad_mode(),
        )
        state.entries[signature, entry.grad] = entry
        self._order = {g: e for g, e in self._order.items() if g.state is State.READY}
        self._order[graph] = entry
        self._captures += 1
        return entry

    def prepare(self, calls: Iterable[Call], *, progress: bool | None = None) -> None:
        """Capture graphs for these calls now: all are warmed up, then captured largest first.

        Args:
            calls: arguments of each call: a tuple of positional ones, a dictionary of keyword ones,
                or a pair of both.
            progress: show progress on stderr; None shows it where stderr is a terminal.

        Raises:
            CaptureError: one cannot be captured; none of them is then.
            MemoryBudgetExceeded: they do not fit under the pool's limit.
        """
        wanted = [_arguments(call) for call in calls]
        made: list[_Entry] = []
        waiting: list[tuple[CallGraph, CallSignature]] = []
        with shown(progress) as bar, self.pool.lock:
            bar.start(2 * len(wanted))
            try:
                state = self._state()
                for args, kwargs in wanted:
                    graph = self._new(args, kwargs)
                    bar.step(f"warming up {graph.name}")
                    known = state.entries.get((graph.signature, self._grad_mode()))
                    if known is not None and known.ready:
                        continue
                    if all(graph.signature != signature for _, signature in waiting):
                        graph.warm()
                        waiting.append((graph, graph.signature))
                waiting.sort(key=lambda pair: sum(pair[0].prediction.segments), reverse=True)
                for graph, signature in waiting:
                    bar.step(f"capturing {graph.name}")
                    made.append(self._record(graph, signature))
            except BaseException:
                for entry in made:
                    self._discard(entry)
                for graph, _ in waiting:
                    graph.close()
                self.pool.trim()
                raise

    def _audited(self, entry: _Entry, graph: CallGraph, args: Args, kwargs: Kwargs) -> Any:
        """Run a call eagerly beside its graph and compare."""
        if entry.state.watch.changed() is not None:
            return self._find(args, kwargs)
        try:
            result = graph.run(args, kwargs)
        except GraphClosed:
            return self._find(args, kwargs)
        self._hits += 1
        # A pure call has changed nothing, its arguments included.
        expected = self._quietly(args, kwargs)
        compare(result, expected, graph.name)
        self._audits += 1
        return result

    @property
    def statistics(self) -> GraphStatistics:
        """How the calls went so far."""
        ready = [graph for graph in list(self._order) if graph.state is State.READY]
        return GraphStatistics(
            hits=self._hits,
            captures=self._captures,
            eager=dict(self._eager),
            audits=self._audits,
            graphs=len(ready),
            nbytes=sum(graph.nbytes for graph in ready),
        )

    def explain(self) -> str:
        """What runs now and why, what it costs, and how the calls went so far."""
        now = self.statistics
        lines = [
            f"{_name(self.fn)}: {now.graphs} graphs, {in_units(now.nbytes)} of "
            f"{in_units(self.pool.reserved)} in their pool",
            f"{now.hits} calls answered by graphs, {now.captures} captures",
        ]
        lines += [f"{count} calls eager: {why}" for why, count in self._eager.most_common()]
        if self._last_miss is not None:
            lines.append(f"last call without a graph: {self._last_miss}")
        for graph in list(self._order):
            if graph.state is State.READY:
                kind = "writes to tensors from outside" if graph.mutates else "pure"
                kind += ", draws random numbers" if graph.random else ""
                lines.append(f"  {graph.name}: {in_units(graph.nbytes)}, {kind}")
        return "\n".join(lines)

    def release(self) -> None:
        """Close all graphs; the next calls capture theirs again."""
        with self.pool.lock:
            for state in list(self._states):
                self._drop(state)
            self.pool.trim()

    def close(self) -> None:
        """Close all graphs for good; calls go to the function itself."""
        self._closed = True
        self.release()

    def _why(self, signature: CallSignature, args: Args, kwargs: Kwargs) -> str:
        recent = self._recent
        if recent is None:
            return "nothing has been captured for the module as it is"
        difference = recent.signature.differences(args, kwargs)
        change = recent.state.watch.changed()
        return difference or change or "the graph that fitted was closed"

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedCallable:
        return self._copy(copy.deepcopy(self.fn, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.fn, self._options(), self.pool.limit, self.pool.evict)

    def _copy(self, fn: Callable[..., Any]) -> GraphedCallable:
        return _rebuild(fn, self._options(), self.pool.limit, self.pool.evict)

    def _options(self) -> dict[str, Any]:
        return {
            "outputs": self._outputs,
            "on_miss": self.on_miss,
            "max_graphs": self._max_graphs,
            "audit": self._audit_every,
        }


def _rebuild(
    fn: Callable[..., Any], options: Mapping[str, Any], limit: int | None, evict: bool
) -> GraphedCallable:
    return GraphedCallable(fn, pool=MemoryPool(limit, evict=evict), **options)


def _quick_key(args: Args, kwargs: Kwargs) -> Any:
    """What is looked up before a whole signature is made; None where not all are tensors."""
    try:
        shapes = [arg.shape for arg in args]
        if kwargs:
            return (*shapes, *kwargs, *[value.shape for value in kwargs.values()])
        return tuple(shapes)
    except AttributeError:
        return None


def _arguments(call: Call) -> tuple[Args, Kwargs]:
    if isinstance(call, Mapping):
        return (), dict(call)
    if isinstance(call, tuple):
        if len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], Mapping):
            return call[0], dict(call[1])
        return call, {}
    raise OptionError(
        f"A call to prepare is a tuple, a dictionary, or a pair of both, not a "
        f"{type(call).__name__}.",
        remedy="For one positional argument x write (x,).",
    )


def _kind(error: GraphwrightError) -> str:
    return (
        "the pool's limit" if isinstance(error, MemoryBudgetExceeded) else "it cannot be captured"
    )


def _name(fn: Callable[..., Any]) -> str:
    return type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
