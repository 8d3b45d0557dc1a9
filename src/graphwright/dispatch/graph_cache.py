"""GraphCache: the graphs of one callable, by the state of its module and the call's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..calls.modules import FunctionModule, any_in_training
from ..calls.places import Written, carried_by, hidden
from ..calls.signature import CallSignature, quick_key
from ..calls.split import Args, Kwargs
from ..calls.watch import Checks, ModuleWatch, cost_in_words, unread_in_words
from ..errors import CaptureError, GraphwrightError, MemoryBudgetExceeded
from ..graphs.capture_turns import turns_of
from ..graphs.captured_call import Breaks, CapturedCall, Outputs
from ..graphs.graph import GraphState
from ..graphs.memory import MemoryPool, closings_of, lock_of, touch, trim
from .fast_path import Shortcut
from .payoff import Payoff

if TYPE_CHECKING:
    from ..shapes.dynamic_signature import DynamicSignature
    from ..shapes.family import ShapeFamily
    from ..shapes.padding import PaddingPlan
    from ..shapes.verdicts import Verdicts

# States without a graph that are remembered, in case that they come back.
MAX_BARE = 16
# Kinds of calls without a graph that are remembered for a state, likewise.
_MAX_SEEN = 1024
# Refusals that are remembered for a state.
_MAX_REFUSED = 1024
# These use other kernels, with other numbers in padded places, when gradients are off.
_DEPEND_ON_GRAD_MODE = (
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)


@dataclass
class Seen:
    """When a kind of call was seen last that had no graph.

    Attributes:
        calls: how many calls there were by then.
        graph: whether it has had a graph since it came back.
    """

    calls: tuple[int, ...]
    graph: bool = False


@dataclass(eq=False)
class StateGraphs:
    """One state of the module, the graphs that were captured in it, and its families of calls."""

    watch: ModuleWatch
    training: bool
    # Whether what the module computes depends on the gradient mode.
    by_grad_mode: bool
    # By the call's signature and, if `by_grad_mode`, the gradient mode.
    entries: dict[tuple[CallSignature, bool | None], CacheEntry] = field(default_factory=dict)
    families: list[ShapeFamily] = field(default_factory=list)
    # Kinds of calls whose proofs could not be made, with their gradient mode, and how often.
    failed: list[tuple[DynamicSignature, bool | None, int]] = field(default_factory=list)
    # Attributes and items to which calls write, and which are not watched.
    places: list[Written] = field(default_factory=list)
    # Calls without a graph, by the same as `entries`.
    seen: dict[tuple[CallSignature, bool | None], Seen] = field(default_factory=dict)
    # Whether the module was in another state when that was last looked at before a launch.
    is_left: bool = False

    @property
    def has_graphs(self) -> bool:
        """Whether a graph was captured in it that can be replayed."""
        return any(entry.ready for entry in self.entries.values())

    def sighted(
        self, signature: CallSignature, grad: bool | None, calls: tuple[int, ...]
    ) -> Seen | None:
        """Note a call that has no graph; returns what was noted before, with the counts of then.

        Args:
            signature: of the call.
            grad: the gradient mode, if `by_grad_mode`.
            calls: counts of calls so far, of which one is higher if there were others meanwhile.
        """
        before = self.seen.pop((signature, grad), None)
        if len(self.seen) >= _MAX_SEEN:
            del self.seen[next(iter(self.seen))]
        self.seen[signature, grad] = Seen(calls, before is not None and before.graph)
        return before


@dataclass(eq=False)
class CacheEntry:
    """The graph for one signature in one state, or why there is none."""

    signature: CallSignature
    state: StateGraphs
    graph: CapturedCall | None
    # Whether a replay has no effect but its result, which may thus be dropped.
    pure: bool
    grad: bool | None
    error: GraphwrightError | None = None
    # How many graphs of the pool were closed by then; None if more room would not help.
    closings: int | None = 0
    # Calls that the graph answered without padding.
    hits: int = 0
    # The named sizes, if there are buckets.
    sizes: tuple[int, ...] | None = None
    # Whether its segments pay; None where that is not asked.
    payoff: Payoff | None = None
    # The `quick_key` of the call that it was captured for.
    key: Any = None
    # The fast path to the graph, once it was asked for.
    shortcut: Shortcut | None = None
    # The entry that answered the call after the module was left in another state, the last time.
    then: CacheEntry | None = None

    @property
    def ready(self) -> bool:
        """Whether its graph can be replayed."""
        return self.graph is not None and self.graph.state is GraphState.READY


@dataclass(eq=False)
class PaddedEntry:
    """How calls of a signature are padded, and the graph that answers them.

    Attributes:
        signature: of the calls, before they are padded.
        entry: of the bucket's graph.
        plan: how to pad and slice.
        shortcut: the fast path to the answer; None if there is none.
    """

    signature: CallSignature
    entry: CacheEntry
    plan: PaddingPlan
    shortcut: Shortcut | None = None


class GraphCache:
    """Captures, keeps and closes the graphs of a function.

    Args:
        fn: the function or module.
        pool: the memory that the graphs live in; its lock guards the cache.
        outputs: as for `graph()`.
        max_graphs: graphs to keep; the least recently used one is closed for a new one.
        forget: called with each entry that is discarded.
        forget_proofs: called with the verdicts of a state that is discarded.
        breaks: as for `graph()`.
        checks: as for `graph()`.
        objects: whether objects among arguments and results are taken apart.
        may_look: whether segments are taken in place of one graph where they are faster; they may
            need another capture for another value.

    Attributes:
        captures: how many graphs were captured.
        turns: keeps eager calls and captures of the function apart.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        pool: MemoryPool,
        outputs: Outputs,
        max_graphs: int,
        forget: Callable[[CacheEntry], None],
        forget_proofs: Callable[[Iterable[Verdicts]], None],
        breaks: Breaks,
        checks: Checks,
        *,
        objects: bool,
        may_look: bool,
    ) -> None:
        self.fn = fn
        self.checks: Checks = checks
        self.pool = pool
        self.captures = 0
        self._lock = lock_of(pool)
        self._outputs: Outputs = outputs
        self._breaks: Breaks = breaks
        self._objects = objects
        self._may_look = may_look
        self._max_graphs = max_graphs
        self._forget = forget
        self._forget_proofs = forget_proofs
        self._function: tuple[FunctionModule, ModuleWatch] | None = None
        self._current: StateGraphs | None = None
        self.turns = turns_of(self.module(), None if isinstance(fn, nn.Module) else fn)
        self._states: list[StateGraphs] = []  # most recently found first
        self._order: dict[CapturedCall, CacheEntry] = {}  # least recently used first
        self._by_key: dict[Any, list[CacheEntry]] = {}

    def module(self) -> nn.Module:
        """What holds the function's parameters."""
        if isinstance(self.fn, nn.Module):
            return self.fn
        # Finding what a function reaches takes a while, so it is done again only after a change.
        if self._function is None or not self._function[1].unchanged():
            made = FunctionModule(self.fn)
            watch = ModuleWatch(made, values=False, hidden=self._unwatched(self._current))
            self._function = made, watch
        return self._function[0]

    def grad_mode(self) -> bool | None:
        """The gradient mode, if what the module computes depends on it; else None."""
        state = self._current
        by_it = _by_grad_mode(self.module()) if state is None else state.by_grad_mode
        return torch.is_grad_enabled() if by_it else None

    def in_training(self) -> bool:
        """Whether any part of the module is in training mode."""
        return any_in_training(self.module())

    def known_state(self) -> StateGraphs | None:
        """The module's current state, if it was in it before."""
        with self._lock:
            states = self._states
            found = next((s for s in states if s.watch.unchanged()), None)
            if found is None:  # What looks other may be equal, which takes longer to find out.
                found = next((s for s in states if s.watch.changed() is None), None)
            if found is not None:
                if found is not states[0]:
                    states.remove(found)
                    states.insert(0, found)
                self._current = found
            return found

    def state(self, bare: int = MAX_BARE) -> StateGraphs:
        """The module's current state; graphs whose weights were replaced are closed.

        Args:
            bare: how many states without a graph are remembered.
        """
        with self._lock:
            known = self.known_state()
            if known is not None:
                return known
            module = self.module()
            training = any_in_training(module)
            unwatched = self._unwatched()
            watch = ModuleWatch(module, values=False, checks=self.checks, hidden=unwatched)
            for state in [s for s in self._states if s.watch.rebound(watch.tensor_ids)]:
                self._drop(state)
            # How many graphs are kept is limited; states without one only take time to compare.
            without = [state for state in self._states if not state.has_graphs]
            for state in without[bare - 1 :]:
                self._drop(state)
            self._current = StateGraphs(watch, training, _by_grad_mode(module))
            self._states.insert(0, self._current)
            return self._current

    def _hide(self, graph: CapturedCall) -> None:
        """From now on, do not watch places that a graph writes to.

        Graphs that were captured before know nothing of them, and might read them.
        """
        state = self._current
        assert state is not None
        known = state.places
        new = [each for each in graph.places if not any(each.same_as(place) for place in known)]
        if not new:
            return
        for entry in list(state.entries.values()):
            self.discard(entry)
        state.places += new
        module, places = self.module(), self._unwatched(state)
        state.watch = ModuleWatch(module, values=False, checks=self.checks, hidden=places)
        if self._function is not None:
            watch = ModuleWatch(self._function[0], values=False, hidden=places)
            self._function = self._function[0], watch

    def _unwatched(self, state: StateGraphs | None = None) -> Mapping[int, frozenset[Any]]:
        """What is not watched, as `hidden` gives it: to these places calls write."""
        return hidden([*carried_by(self.fn), *([] if state is None else state.places)])

    @property
    def current(self) -> StateGraphs | None:
        """The state that the module was found in last."""
        return self._current

    def has_graph(self, key: Any) -> bool:
        """Whether there is a graph for a call of some `quick_key`, in any state of the module."""
        return any(entry.ready for entry in self._by_key.get(key, ()))

    def is_full(self) -> bool:
        """Whether a new graph takes the place of another."""
        return len(self._order) >= self._max_graphs

    def about_watch(self) -> list[str]:
        """Lines on what watching the module takes, and on objects that it cannot look into."""
        if self._current is None:
            return []
        watch = self._current.watch
        return [*cost_in_words(watch), *unread_in_words(watch)]

    def ready(self) -> list[CacheEntry]:
        """The entries whose graphs can be replayed, least recently used first."""
        return [entry for entry in list(self._order.values()) if entry.ready]

    def verdicts(self) -> list[Verdicts]:
        """What is known about padding to buckets, for all families of calls."""
        families = [family for state in list(self._states) for family in state.families]
        return [verdicts for family in families for verdicts in family.proofs()]

    def touch(self, entry: CacheEntry) -> None:
        """Make an entry the most recently used one."""
        graph = entry.graph
        if graph is not None:
            with self._lock:
                if self._order.pop(graph, None) is not None:
                    self._order[graph] = entry
                touch(self.pool, graph)

    def refuse(
        self,
        signature: CallSignature,
        state: StateGraphs,
        grad: bool | None,
        error: GraphwrightError,
        *,
        for_good: bool = False,
    ) -> None:
        """Remember why a signature has no graph, until the pool has more room or `for_good`."""
        closings = None if for_good else closings_of(self.pool)
        # Not the error itself: the frames of its traceback hold tensors.
        cls = MemoryBudgetExceeded if isinstance(error, MemoryBudgetExceeded) else CaptureError
        error = cls(error.what, where=error.where, remedy=error.remedy)
        refused = [key for key, entry in state.entries.items() if entry.graph is None]
        if len(refused) >= _MAX_REFUSED:
            del state.entries[refused[0]]
        state.entries[signature, grad] = CacheEntry(
            signature, state, None, False, grad, error, closings
        )

    def why_refused(self, entry: CacheEntry) -> GraphwrightError | None:
        """Why an entry has no graph; None if a capture may do now."""
        return entry.error if entry.closings in (None, closings_of(self.pool)) else None

    def capture(
        self, signature: CallSignature, state: StateGraphs, args: Args, kwargs: Kwargs
    ) -> CacheEntry:
        """Capture a graph for a call."""
        # Before the lock: an eager call that this waits for may need the lock.
        with self.turns.alone(), self._lock:
            entry = state.entries.get((signature, self.grad_mode()))
            if entry is not None and entry.ready:
                return entry  # Another thread was faster.
            graph = self._new(args, kwargs)
            graph.warm()
            return self._record(graph, signature, quick_key(args, kwargs))

    def capture_all(
        self, calls: Iterable[tuple[Args, Kwargs]], step: Callable[[str], None]
    ) -> list[CacheEntry]:
        """Capture graphs for calls that have none: all are warmed up, then captured largest first.

        Args:
            calls: their arguments.
            step: called with a description of each next step.

        Raises:
            CaptureError: one cannot be captured; then none is.
            MemoryBudgetExceeded: they do not fit under the pool's limit.
        """
        # As in `capture`: the turn before the lock.
        with self.turns.alone(), self._lock:
            return self._capture_all(calls, step)

    def _capture_all(
        self, calls: Iterable[tuple[Args, Kwargs]], step: Callable[[str], None]
    ) -> list[CacheEntry]:
        made: list[CacheEntry] = []
        waiting: list[tuple[CapturedCall, CallSignature, Any]] = []
        try:
            state = self.state()
            for args, kwargs in calls:
                graph = self._new(args, kwargs)
                step(f"warming up {graph.name}")
                known = state.entries.get((graph.signature, self.grad_mode()))
                if known is not None and known.ready:
                    continue
                if all(graph.signature != signature for _, signature, _ in waiting):
                    graph.warm()
                    waiting.append((graph, graph.signature, quick_key(args, kwargs)))
            waiting.sort(key=lambda each: sum(each[0].prediction.segments), reverse=True)
            for graph, signature, key in waiting:
                step(f"capturing {graph.name}")
                made.append(self._record(graph, signature, key))
        except BaseException:
            for entry in made:
                self.discard(entry)
            for graph, _, _ in waiting:
                graph.close()
            trim(self.pool)
            raise
        return made

    def _new(self, args: Args, kwargs: Kwargs) -> CapturedCall:
        places = () if self._current is None else self._current.places
        return CapturedCall(
            self.fn,
            args,
            kwargs,
            pool=self.pool,
            outputs=self._outputs,
            evictable=True,
            breaks=self._breaks,
            objects=self._objects,
            places=places,
            may_look=self._may_look,
        )

    def _record(self, graph: CapturedCall, signature: CallSignature, key: Any) -> CacheEntry:
        for old in list(self._order)[: max(0, len(self._order) + 1 - self._max_graphs)]:
            self.discard(self._order[old])
        if self._current is not None:
            graph.consider(self._current.places)
        graph.record(share_inputs=self._outputs == "fresh")
        # The first run may have set something up for good; the graph belongs to the state now.
        state = self.state()
        self._hide(graph)
        if graph.parts.watches or graph.tree is not None:  # A new path may run others.
            state.watch.join(graph.parts)
        effects = graph.mutates or graph.random or graph.has_effects
        pure = not (effects or graph.tree is not None)
        # That of the graph is the same, and tells quickly of calls whether they fit.
        entry = CacheEntry(graph.signature, state, graph, pure=pure, grad=self.grad_mode())
        state.entries[signature, entry.grad] = entry
        self._order = {g: e for g, e in self._order.items() if g.state is GraphState.READY}
        self._order[graph] = entry
        if key is not None:
            self._by_key.setdefault(key, []).append(entry)
            entry.key = key
        self.captures += 1
        return entry

    def give_up(self, entry: CacheEntry, error: GraphwrightError) -> None:
        """Close a graph; its calls run eagerly from now on, or by one graph where that will do."""
        with self._lock:
            signature, state, grad = entry.signature, entry.state, entry.grad
            one_does = entry.graph is not None and entry.graph.looks
            self.discard(entry)
            if one_does:
                self._may_look = False
            else:
                self.refuse(signature, state, grad, error, for_good=True)
            trim(self.pool)

    def discard(self, entry: CacheEntry) -> None:
        """Close an entry's graph and drop the entry."""
        if entry.graph is not None:
            self._order.pop(entry.graph, None)
            entry.graph.close()
        others = [other for other in self._by_key.pop(entry.key, ()) if other is not entry]
        if others:
            self._by_key[entry.key] = others
        self._forget(entry)
        entry.state.entries.pop((entry.signature, entry.grad), None)

    def _drop(self, state: StateGraphs) -> None:
        self._states.remove(state)
        self._current = None if self._current is state else self._current
        self._forget_proofs([proof for family in state.families for proof in family.proofs()])
        for entry in list(state.entries.values()):
            self.discard(entry)

    def release(self) -> None:
        """Close all graphs."""
        with self._lock:
            for state in list(self._states):
                self._drop(state)
            trim(self.pool)


def _by_grad_mode(module: nn.Module) -> bool:
    return any(isinstance(part, _DEPEND_ON_GRAD_MODE) for part in module.modules())
