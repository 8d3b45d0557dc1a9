"""GraphedCallable: captures one graph per input signature and replays it for later calls.

A graph is found by the call's signature and the state of the module. The common case, the same
signature as last time, takes a fast path: check the arguments, launch, and check the module while
the device works. `compare` is the comparison behind `graph(audit=N)`.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.binding import in_one_order, sees_order
from ..calls.introspection import FunctionStandIn
from ..calls.modes import opaque
from ..calls.objects import apart, detached, objects_key
from ..calls.options import (
    callable_problem,
    choice_problem,
    count_problem,
    items_problem,
    refuse,
)
from ..calls.places import Written
from ..calls.signature import (
    Call,
    CallSignature,
    arguments_of,
    inside_func,
    inside_transform,
    quick_key,
)
from ..calls.split import Args, Kwargs, Split, leaf_names, require_grad
from ..calls.watch import Checks
from ..errors import (
    RUNS_EAGERLY,
    CaptureError,
    GraphwrightError,
    MemoryBudgetExceeded,
    SignatureError,
    VerificationError,
    in_a_row,
    in_words,
)
from ..evaluation.accuracy import difference
from ..graphs import capture_budget
from ..graphs.capture_budget import WORTH_CALLS, Capture, now
from ..graphs.capture_turns import Busy
from ..graphs.captured_call import Breaks, CapturedCall, Outputs
from ..graphs.composition import warn_if_traced
from ..graphs.conditions import capturing_now, hidden_from_hooks_for_saved_tensors
from ..graphs.graph import Graph, GraphClosed
from ..graphs.memory import MemoryPool, budget_of, pool_problem
from ..graphs.python_state import StateChanges
from ..graphs.static_outputs import Around
from ..graphs.taken_apart import TakenApart
from ..ops import compiled_checks
from ..report.progress import SHORT_S, Progress, progress_shown
from .answerer import SizesAnswered
from .carried_state import Answer, CarriedState, reached
from .decision import (
    FIRST_CARRIED,
    LIMIT,
    SHARED,
    TRANSFORMED,
    UNCAPTURED,
    UNFITTING,
    UNKNOWN_ARGUMENT,
    Miss,
    Way,
    shut,
)
from .fallback import Fallback, Words
from .fast_path import MISS, Shortcut, shortcut
from .graph_cache import MAX_BARE, CacheEntry, GraphCache, PaddedEntry, StateGraphs
from .graphed_parts import GraphedParts, refuse_talk
from .payoff import Payoff
from .statistics import CallStatistics, Tally, both, explained, summary, to_html
from .waiting import Refused, WaitingCalls

if TYPE_CHECKING:
    from ..shapes.verdicts import Verdicts

OnMiss = Literal["capture", "eager", "error"]

# Calls that are eager on purpose, to time what answers them otherwise.
_BESIDE = "timed beside calls in segments"
_BESIDE_CARRIED = "timed beside calls that are given what others have left"
# Shapes and values of calls of which it is remembered what answers them.
MAX_QUICK = 1 << 16
# Devices where calls in segments are timed beside eager ones, and calls before that; and the same
# for calls that are given what others have left in attributes, on any device.
_TIMED = frozenset({"cuda"})
_FIRST_IN_SEGMENTS = 6
_FIRST_CARRIED_CALLS = 5
# States without a graph that are remembered where hardly any comes back: each takes a while to
# compare.
_FEW_BARE = 3
# At rest, the clock is read at one call of so many: it costs half of what such a call adds.
_CALLS_A_CLOCK = 8
# States in a row that prepare() captures graphs for.
_STATES_AHEAD = 3
# Times that more attributes are found which a call reads before it sets them.
_MOST_CARRIED = 4
# Graphs of a submodule, where there is none for the whole module.
_PART_GRAPHS = 4
_RUNS_IN_PARTS = "runs in parts"
# Seconds that a capture counts for which other threads left no room.
_BUSY_S = 0.01


@dataclass(frozen=True)
class GraphOptions:
    """How graphs are made and kept; as for `graph()`, but for the pool."""

    outputs: Outputs
    on_miss: OnMiss
    max_graphs: int
    audit: int | None
    breaks: Breaks
    checks: Checks


class GraphedCallable(FunctionStandIn):
    """A function or module whose calls are answered by graphs; made by `graph()`.

    A graph is captured at the first call of each signature, or ahead of time by `prepare()`.

    Attributes:
        fn: the function or module.
        pool: the memory that the graphs live in.
        on_miss: what is done with a call that has no graph.
    """

    # Whether objects among the arguments are taken apart.
    _takes_objects = True

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        pool: MemoryPool | None = None,
        outputs: Outputs = "fresh",
        on_miss: OnMiss = "capture",
        max_graphs: int = 32,
        audit: int | None = None,
        breaks: Breaks = "auto",
        checks: Checks = "full",
    ) -> None:
        refuse(
            "graph",
            callable_problem("fn", fn),
            pool_problem(pool),
            choice_problem("outputs", outputs, get_args(Outputs)),
            choice_problem("on_miss", on_miss, get_args(OnMiss)),
            count_problem("max_graphs", max_graphs),
            count_problem("audit", audit, optional=True),
            choice_problem("breaks", breaks, get_args(Breaks)),
            choice_problem("checks", checks, get_args(Checks)),
        )
        compiled_checks.offer()
        self.fn = fn
        self._owns_pool = pool is None
        self.pool = MemoryPool() if pool is None else pool
        self.on_miss = on_miss
        self._given = GraphOptions(outputs, on_miss, max_graphs, audit, breaks, checks)
        self._audit_every = audit
        self._tally = Tally()
        self._fallback = self._make_fallback()
        self._entries = GraphCache(
            fn,
            self.pool,
            outputs,
            max_graphs,
            self._forget,
            self._forget_proofs,
            breaks,
            checks,
            objects=self._takes_objects,
            may_look=on_miss == "capture",
        )
        self._recent: CacheEntry | None = None
        self._short: tuple[CacheEntry, Shortcut] | None = None
        # By `quick_key`: what answers calls of these shapes, if nothing else about them differs.
        self._quick: dict[Any, Any] = {}
        # By their names: in which order keyword arguments came first, where it makes no difference.
        self._orders: dict[frozenset[str], tuple[str, ...]] = {}
        self._waiting = WaitingCalls()
        # What answers calls eagerly, at next to no cost, until the next look is due.
        self._rest: Shortcut | None = None
        # A module's parts that are answered by graphs, once there is none for the whole.
        self._parts: GraphedParts | None = None
        # What answers calls that are given what others have left in attributes, if need be.
        self._carried: _Carried | None = None
        self._carrying = _Carrying(fn)
        self._closed = False
        if not isinstance(fn, nn.Module):
            self._look_like(fn)

    def _make_fallback(self) -> Fallback:
        """What becomes of calls that no graph answers."""
        return Fallback(functools.partial(_words, self.fn), self.on_miss, self._tally.count_eager)

    def _begin_anew(self) -> None:
        """Forget which calls have had no graph."""
        self._waiting.begin_anew()
        self._rest = None

    @property
    def _graphwright_stands_for(self) -> Any:
        return self.fn

    @property
    def _graphwright_answerer(self) -> GraphedCallable:
        return self

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call by a graph, or eagerly if none fits and none may be captured.

        Outputs require no grad, unless the call is for training: gradients are on, and the module
        is in training mode or an input requires grad. Such a call is eager.

        Raises:
            SignatureError: with on_miss="error", no graph fits.
            VerificationError: an audit found that a graph's result is not eager's.
        """
        return self._call(args, kwargs)

    def _call(self, args: Args, kwargs: Kwargs) -> Any:
        """As `__call__`, with the arguments as a tuple and a dictionary."""
        short = self._short
        if short is not None:
            latest, fast = short
            result = fast(args, kwargs)
            if result is not MISS:
                latest.hits += 1
                return result
            following = latest.then
            if following is not None and following.shortcut is not None:
                result = following.shortcut(args, kwargs)
                if result is not MISS:
                    following.hits += 1
                    self._recent, self._short = following, (following, following.shortcut)
                    return result
        elif self._rest is not None:
            result = self._rest(args, kwargs)
            if result is not MISS:
                return result
        if self._carried is not None:
            return self._answer_carried(self._carried, args, kwargs)
        key = quick_key(args, kwargs)
        entry = self._recent if key is None else self._quick.get(key)
        if not isinstance(entry, CacheEntry):
            return self._answer_unusual(entry, args, kwargs)
        split = entry.signature.split(args, kwargs)
        if split is None and not entry.signature.fits(args, kwargs):
            return self._find(args, kwargs)
        if entry.grad is not None and torch.is_grad_enabled() is not entry.grad:
            return self._find(args, kwargs)
        return self._answer(entry, args, kwargs, split)

    def _shortcut(self, entry: CacheEntry) -> Shortcut | None:
        """The fast path to an entry's graph; None if it has none."""
        if entry.shortcut is not None:
            return entry.shortcut
        entry.shortcut = made = self._make_shortcut(entry, entry.signature)
        return made

    def _make_shortcut(
        self, entry: CacheEntry, signature: CallSignature, around: Around | None = None
    ) -> Shortcut | None:
        """A function for calls of a signature, of what is around a launch of an entry's graph."""
        if entry.graph is None or not entry.pure or entry.grad is not None:
            return None
        if self._audit_every is not None or self._is_timed(entry):
            return None
        state = entry.state
        return shortcut(
            signature,
            entry.graph.launcher(around),
            state.watch.unchanged,
            training=state.training,
            checks=self._entries.checks if around is None else "full",
        )

    def _answer(
        self, entry: CacheEntry, args: Args, kwargs: Kwargs, split: Split | None = None
    ) -> Any:
        """Answer a call by the graph of an entry whose signature fits, or find another answer."""
        graph = entry.graph
        if graph is None or capturing_now() or (entry.state.training and torch.is_grad_enabled()):
            return self._find(args, kwargs)
        if (
            self._audit_every is not None
            and not (graph.mutates or graph.random or graph.has_effects)
            and (entry.hits + 1) % self._audit_every == 0
        ):
            return self._audited(entry, graph, args, kwargs)
        if entry.payoff is not None and self._is_timed(entry):
            return self._answer_timed(entry, entry.payoff, graph, args, kwargs)
        return self._answer_by(entry, graph, args, kwargs, split)

    def _is_timed(self, entry: CacheEntry) -> bool:
        """Whether it is not known yet that the graph is faster than eager."""
        payoff = entry.payoff
        return payoff is not None and payoff.ratio is None and self.on_miss == "capture"

    def _answer_timed(
        self, entry: CacheEntry, payoff: Payoff, graph: CapturedCall, args: Args, kwargs: Kwargs
    ) -> Any:
        """Answer a call by its segments or eagerly, until it is known what is faster."""

        def eager() -> Any:
            return self._run_eagerly(_BESIDE, args, kwargs)

        result, _ = payoff.call(eager, lambda: self._answer_by(entry, graph, args, kwargs))
        if not payoff.pays:
            why = f"{graph.divided.capitalize()} it takes {payoff.share}."
            remedy = "Leave out what it reads of the device; check() lists it."
            self._entries.give_up(entry, CaptureError(why, remedy=remedy))
        elif payoff.ratio is not None and entry is self._recent:
            self._used(entry, args, kwargs)  # From now on it may have a shortcut.
        return result

    def _answer_by(
        self,
        entry: CacheEntry,
        graph: CapturedCall,
        args: Args,
        kwargs: Kwargs,
        split: Split | None = None,
    ) -> Any:
        """Answer a call by the graph of an entry, if the module is as it was."""
        state = entry.state
        try:
            # The device works while the module is checked, unless it is mostly in another state.
            check_first = state.is_left or not entry.pure
            if check_first and self._has_left(state):
                return self._find(args, kwargs)
            result = graph.run(args, kwargs, split=split)
            if not check_first and self._has_left(state):
                return self._find(args, kwargs)
        except GraphClosed:
            return self._find(args, kwargs)
        except SignatureError as error:
            return self._missed(Miss(SHARED, error.what), args, kwargs)
        self._count(entry, graph)
        if entry.ready and entry is not self._recent:
            self._used(entry, args, kwargs)
        return result

    def _has_left(self, state: StateGraphs) -> bool:
        """Whether the module is in another state than this."""
        state.is_left = state.watch.changed() is not None
        return state.is_left

    def _count(self, entry: CacheEntry, graph: CapturedCall) -> None:
        """Count a call that was answered by the graph, or eagerly if its segments were given up."""
        if graph.was_eager:
            self._fallback.count(UNCAPTURED)
        else:
            entry.hits += 1
        if graph.given_up is not None:
            self._entries.give_up(entry, graph.given_up)

    def _used(self, entry: CacheEntry, args: Args, kwargs: Kwargs) -> None:
        """Remember the entry that was used last, for the fast path and for eviction."""
        before, self._recent = self._recent, entry
        fast = self._shortcut(entry)
        self._short = None if fast is None else (entry, fast)
        if before is not None and before.state is not entry.state:
            before.then = entry
        key = quick_key(args, kwargs)
        if key is not None:
            if len(self._quick) >= MAX_QUICK:
                self._quick.clear()
            self._quick[key] = entry
        self._entries.touch(entry)

    def _find(self, args: Args, kwargs: Kwargs, refused: Refused | None = None) -> Any:
        """Answer a call outside of the fast path.

        Args:
            args: of the call.
            kwargs: likewise.
            refused: that of calls of its signature, if it is known already.
        """
        entered = now()
        captured = capturing_now()  # Then the capture's own mode is on, which is no transform.
        transformed = inside_func() if captured else inside_transform()
        missed = shut(
            transformed=transformed,
            wants_grad=torch.is_grad_enabled()
            and not transformed
            and self._is_for_training(args, kwargs),
            closed=self._closed,
            captured=captured,
        )
        if missed is not None:
            return self._answer_shut(missed, args, kwargs)
        kwargs = self._in_one_order(kwargs)
        result = self._answer_apart(args, kwargs)
        if result is not MISS:
            return result
        found = self._decide(args, kwargs, refused, entered)
        if isinstance(found, CacheEntry):
            return self._answer(found, args, kwargs)
        if isinstance(found, Miss):
            return self._missed(found, args, kwargs)
        return self._answer_uncaptured(found)

    def _is_for_training(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call wants gradients, if these are on."""
        return require_grad(args, kwargs) or self._entries.in_training()

    def _decide(
        self, args: Args, kwargs: Kwargs, refused: Refused | None, entered: float
    ) -> CacheEntry | Miss | UncapturedCall:
        """The graph for a call that has passed the gates, or why none answers it, if there is one.

        A call for which there is neither is described.

        Args:
            args: of the call.
            kwargs: likewise, in one order.
            refused: as for `_find`.
            entered: when the search for the graph began.
        """
        waiting = self._waiting
        if self.on_miss == "capture":
            # To describe the call, and to compare the module, takes a while.
            missed = waiting.why(refused) or waiting.first(self._objects_key(args, kwargs))
            if missed is not None:
                return missed
        try:
            signature = self._signature_of(args, kwargs)
        except SignatureError as error:
            # Tensors inside of it may require grad.
            as_it_is = torch.is_grad_enabled() and self.on_miss != "error"
            way: Way = "as it is" if as_it_is else "detached"
            return Miss(UNKNOWN_ARGUMENT, in_a_row(error), way=way)
        if refused is None:
            refused = waiting.refused(signature)
            if refused is not None and refused.looks.rests:
                return refused.miss
        before = self._entries.current
        state = self._entries.state(_FEW_BARE if waiting.looks.mostly_in_vain else MAX_BARE)
        grad = self._entries.grad_mode()
        entry = state.entries.get((signature, grad))
        if entry is not None and entry.ready:
            waiting.looks.found()
            return entry
        left = before if before is not state else None
        return UncapturedCall(args, kwargs, signature, state, grad, left, now() - entered)

    def _answer_shut(self, missed: Miss, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call that no graph may answer, whatever its arguments are."""
        if missed.category == TRANSFORMED:
            warn_if_traced(self, "graph")
        if missed.way == "as it is":
            return self._missed(missed, args, kwargs)
        return self._run_eagerly(missed.category, args, kwargs)

    def _in_one_order(self, kwargs: Kwargs) -> Kwargs:
        """The keyword arguments of a call, in the order of the first call that is the same."""
        return in_one_order(self.fn, kwargs, self._orders)

    def _signature_of(self, args: Args, kwargs: Kwargs) -> CallSignature:
        """The signature of a call whose keyword arguments are in one order.

        Raises:
            SignatureError: an argument is neither a tensor nor a plain value.
        """
        any_order = len(kwargs) > 1 and not sees_order(self.fn)
        return CallSignature.of(args, kwargs, objects=self._takes_objects, any_order=any_order)

    def _answer_apart(self, args: Args, kwargs: Kwargs) -> Any:
        """The answer to a call with objects by what takes its tensors; MISS if nothing does."""
        return MISS

    def _answer_unusual(self, found: Any, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call for whose shapes no entry is known; `found` is what is known instead."""
        if isinstance(found, PaddedEntry):
            result = MISS if found.shortcut is None else found.shortcut(args, kwargs)
            if result is MISS:
                return self._answer_padded(found, args, kwargs)
            self._count_padded(found)
            return result
        if found is None and kwargs:
            named = self._in_one_order(kwargs)
            if named is not kwargs:
                return self._call(args, named)
        refused = found if isinstance(found, Refused) else None
        if refused is not None and not refused.signature.fits(args, kwargs):
            refused = None
        return self._find(args, kwargs, refused)

    def _answer_padded(self, padded: PaddedEntry, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call whose padding is known by its shapes, and that has no fast path."""
        return self._find(args, kwargs)

    def _count_padded(self, padded: PaddedEntry) -> None:
        """Count a call that was padded."""

    def _answer_uncaptured(self, call: UncapturedCall) -> Any:
        """Answer a call that no graph fits."""
        return self._capture_and_answer(call)

    def _capture_and_answer(
        self, call: UncapturedCall, sizes: tuple[int, ...] | None = None
    ) -> Any:
        """Capture a graph for a call without padding, if that is allowed, and answer by it."""
        entry = self._entry_for(call)
        if isinstance(entry, Miss):
            return self._missed(entry, call.args, call.kwargs)
        entry.sizes = sizes
        before = entry.hits
        result = self._answer(entry, call.args, call.kwargs)
        if not before:
            self._tally.after_capture += min(entry.hits, 1)
        return result

    def _entry_for(self, call: UncapturedCall) -> CacheEntry | Miss:
        """The entry for a call, captured now if need be and allowed; else why there is none."""
        entry = call.state.entries.get((call.signature, call.grad))
        if entry is not None and entry.ready:
            return entry
        missed = None if entry is None else self._known_refusal(call, entry)
        if missed is not None:
            return missed
        if self.on_miss != "capture":
            return Miss(UNFITTING, self._why(call))
        is_new, comes_back = self._sight(call)
        with budget_of(self.pool).capture(self._answered, comes_back=comes_back) as capture:
            if not capture.allowed:
                return self._postpone(call, is_new=is_new)
            found = self._capture(call, capture)
        if isinstance(found, Miss) and found.after_capture:
            # Free what the error held, such as autograd nodes, which remember the stream they ran
            # on.
            gc.collect(1)
        return found

    def _known_refusal(self, call: UncapturedCall, entry: CacheEntry) -> Miss | None:
        """Why a call has no graph, as it is known from before; None if a capture may do now."""
        error = self._entries.why_refused(entry)
        if error is None:
            return None
        missed = Miss(_category_of(error), in_words(error)[0])
        if self.on_miss == "capture":
            self._refuse(call, call.looked_s, missed)
        return missed

    def _capture(self, call: UncapturedCall, capture: Capture) -> CacheEntry | Miss:
        """The entry of a new graph for a call; why there is none, if the capture is refused."""
        began = now()
        try:
            self._before_capture()
            made = self._entries.capture(call.signature, call.state, call.args, call.kwargs)
        except (StateChanges, Busy) as error:
            if isinstance(error, StateChanges) and self._carry(error.places):
                capture.counts = False
                names = ", ".join(place.name for place in error.places)
                return Miss(FIRST_CARRIED, f"graphs of the next ones are given {names}")
            # A refusal would be kept with the module's state, which will not come back.
            reason = self._waiting.refusal = in_words(error)[0]
            # What other threads take is no cost of a capture.
            capture.most_s = _BUSY_S if isinstance(error, Busy) else math.inf
            missed = Miss(UNCAPTURED, reason, after_capture=True)
            self._refuse(call, min(now() - began, capture.most_s), missed)
            return missed
        except (CaptureError, MemoryBudgetExceeded) as error:
            self._entries.refuse(call.signature, call.state, call.grad, error)
            reason = in_words(error)[0]
            if isinstance(error, MemoryBudgetExceeded):
                capture.counts = False
            else:
                self._waiting.refusal = reason
            return Miss(_category_of(error), reason, after_capture=True)
        if made.graph is not None and made.graph.may_not_pay and made.payoff is None:
            device = made.graph.device
            made.payoff = Payoff(device, _FIRST_IN_SEGMENTS) if device.type in _TIMED else None
        if self._changes_shape(call.signature):
            self._waiting.note(self._objects_key(call.args, call.kwargs))
        self._waiting.refusal = None
        return made

    def _before_capture(self) -> None:
        """Raise CaptureError if no call of the function may be captured."""

    def _carry(self, places: Sequence[Written]) -> bool:
        """From now on, have graphs that are given what places hold; whether that may work."""
        if not places or not self._carrying.left or not self._takes_objects:
            return False
        before, self._carried = self._carried, None
        self._carried = self._carrying.begin(places, before, self._given_state)
        return True

    def _given_state(self, function: Callable[..., Any]) -> GraphedCallable:
        """What answers calls of a function that is given what attributes hold."""
        return _GivenState(function, self, pool=self.pool, **self._options())

    def _stop_carrying(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None:
            self._carrying.end(carried)

    def _answer_carried(self, carried: _Carried, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call by what is given the state that calls leave, or eagerly to time that."""
        payoff = carried.payoff

        def other() -> Any:
            return carried.state.call(carried.graphs._call, args, kwargs)

        if payoff is None or self.on_miss != "capture" or not _TIMED:
            return other()
        if torch.is_grad_enabled() and self._is_for_training(args, kwargs):
            return other()
        result, _ = payoff.call(lambda: self._run_eagerly(_BESIDE_CARRIED, args, kwargs), other)
        if not payoff.pays:
            self._carrying.left = 0
            self._stop_carrying()
        elif payoff.ratio is not None:
            carried.payoff = None
        return result

    def _sight(self, call: UncapturedCall) -> tuple[bool, bool]:
        """Note a call that has no graph.

        Returns:
            whether its kind is new in this state, and whether it comes back after calls of other
            kinds, or of others in the pool, and may have its one free graph.
        """
        turn = budget_of(self.pool).turn_of(self)
        mine = self._tally.calls(self._entries.ready())
        seen = call.state.sighted(call.signature, call.grad, (mine, turn))
        # What grows with each call comes back with each text: as many graphs as it has calls.
        grows = self._changes_shape(call.signature)
        if seen is None or seen.graph or grows or self._entries.is_full():
            return seen is None, False
        others = turn != seen.calls[1] and self._entries.captures < self._given.max_graphs
        if mine - seen.calls[0] <= 1 and not others:
            return False, False
        self._waiting.came_back()
        call.state.seen[call.signature, call.grad].graph = True
        return False, True

    def _postpone(self, call: UncapturedCall, *, is_new: bool) -> Miss:
        """Why a call is eager that the budget for captures leaves none for."""
        if not call.state.has_graphs:
            # Nothing answers calls while the module is as it is.
            self._recent = self._short = None
            self._quick.clear()
        missed = self._waiting.postpone(
            call.signature,
            call.looked_s,
            functools.partial(self._why_unpaid, call),
            is_new=is_new,
            no_room=self._entries.is_full() and not is_new,
        )
        # Parts may answer what is refused as a whole.
        at_rest = self._waiting.looks.rests and self._parts_for(missed.category) is None
        self._rest = self._make_rest(missed.category) if at_rest else None
        return missed

    def _make_rest(self, category: str) -> Shortcut:
        """A function that answers calls as `_missed` does, until the next look is due."""
        # Local names are found faster than attributes.
        count, until_s, clock = (
            self._tally.eager_for(category),
            self._waiting.looks.until_s,
            capture_budget.CLOCK,
        )
        grad_is_on, call = torch.is_grad_enabled, self._entries.turns.taking(self.fn)

        def rest(args: Args, kwargs: Kwargs) -> Any:
            if grad_is_on():
                return MISS
            count[0] = number = count[0] + 1
            if not number % _CALLS_A_CLOCK and clock() >= until_s:
                count[0] -= 1
                return MISS
            return call(args, kwargs)

        return rest

    def _why_unpaid(self, call: UncapturedCall) -> tuple[str, str]:
        """What keeps captures from paying off: a cause, and the reason with what to do."""
        if call.left is not None and not call.state.has_graphs:
            return "it changes", _changes(call.left)
        return self._why_kinds_differ(call)

    def _why_kinds_differ(self, call: UncapturedCall) -> tuple[str, str]:
        """What makes most calls another kind: a cause, and the reason with what to do."""
        signature = call.signature
        others = [s for (s, _), e in call.state.entries.items() if e.ready and s != signature]
        alike = any(signature.in_objects == other.in_objects for other in others)
        if self._changes_shape(signature) and not (signature.has_objects and alike):
            keeps = (
                "pass a cache whose tensors keep their shapes, such as transformers' StaticCache"
            )
            if signature.holds_static:  # The caller has one.
                keeps = "pass one of the same size in each call"
            return "objects", (
                f"objects among the arguments are of other shapes in most calls; {keeps}"
            )
        names = [signature.differing_value(other) for other in others]
        name = next(filter(None, names), None)
        if name is not None:
            return "a value", (
                f"{name} is another value in most calls; pass it as a tensor, or as one of a few "
                "values"
            )
        if self._entries.is_full():
            return "no room", (
                "there are more kinds of calls than graphs may be kept; raise max_graphs="
                f"{self._given.max_graphs}, or name the sizes that vary as buckets"
            )
        return "new kinds", (
            f"most calls are of a new kind ({self._why(call)}); name sizes that vary as buckets, "
            "or prepare() the kinds that come back"
        )

    def _refuse(self, call: UncapturedCall, seconds: float, missed: Miss) -> None:
        """Have calls like one that was refused be eager for a while; as `WaitingCalls.refuse`."""
        refused = self._waiting.refuse(call.signature, seconds, missed)
        key = quick_key(call.args, call.kwargs)
        if key is not None and key not in self._quick:
            self._quick[key] = refused

    def _objects_key(self, args: Args, kwargs: Kwargs) -> Any:
        """A key of a call with objects; None for others."""
        if not self._takes_objects or quick_key(args, kwargs) is not None:
            return None
        return objects_key((*args, *(value for _, value in sorted(kwargs.items()))))

    def _changes_shape(self, signature: CallSignature) -> bool:
        """Whether a call has arguments that are of another shape in each call where they grow."""
        return signature.has_objects

    def _answered(self) -> int:
        """How many calls graphs have answered."""
        return self._tally.answered(self._entries.ready())

    def _missed(self, missed: Miss, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call that no graph answers: raise or run eagerly, as `on_miss` says."""
        if missed.after_capture:
            with warnings.catch_warnings():
                # A backward of the capture ran on another stream, which is intended.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
                return self._missed(replace(missed, after_capture=False), args, kwargs)
        category, reason, fallback = missed.category, missed.reason, self._fallback
        fallback.last = reason or fallback.last
        if missed.sizes is not None:
            self._tally.elsewhere[missed.sizes] += 1
        if missed.way == "as it is":
            fallback.count(category)
            fallback.tell(category, reason)
            with self._entries.turns.calling():
                return self.fn(*args, **kwargs)
        if self.on_miss == "error":
            self._refuse_miss(missed)
        parts = self._parts_for(category)
        as_called = missed.way == "unexamined"
        run = functools.partial(self._run_detached, args, kwargs, as_called=as_called)
        # It may raise what the function raises.
        result, in_parts = (run(), False) if parts is None else parts.call(run)
        if in_parts:
            self._tally.in_parts += 1
        else:
            fallback.count(category)
        how = RUNS_EAGERLY if parts is None or not parts.used else _RUNS_IN_PARTS
        fallback.tell(category, reason, how)
        return result

    def _refuse_miss(self, missed: Miss) -> None:
        """Raise the error of a call that no graph answers."""
        self._fallback.refuse(missed.reason)

    def _parts_for(self, category: str) -> GraphedParts | None:
        """The module's parts, where they may answer calls that are eager otherwise."""
        if category != UNCAPTURED or not self._may_have_parts():
            return None
        if self._parts is None and isinstance(self.fn, nn.Module):
            self._parts = self._make_parts(self.fn)
        return self._parts

    def _may_have_parts(self) -> bool:
        """Whether submodules may be answered by graphs where there is none for the whole."""
        return self._given.breaks != "never"

    def _make_parts(self, module: nn.Module, *, timed: bool = True) -> GraphedParts:
        def graph_of(part: nn.Module) -> _OfPart:
            # Parts of it are better than paths without end.
            return _OfPart(
                part,
                pool=self.pool,
                max_graphs=_PART_GRAPHS,
                breaks="never",
                checks=self._given.checks,
            )

        return GraphedParts(module, graph_of, timed=timed)

    def _run_eagerly(self, category: str, args: Args, kwargs: Kwargs) -> Any:
        self._fallback.count(category)
        return self._run_detached(args, kwargs)

    def _run_detached(self, args: Args, kwargs: Kwargs, *, as_called: bool = False) -> Any:
        """Run the function; its results require no grad."""
        with_grad = torch.is_grad_enabled()
        if with_grad and not as_called:
            with_grad = self._entries.grad_mode() is not None
        # A checkpoint around must see the same in each run, and a graph shows it nothing.
        with self._entries.turns.calling(), hidden_from_hooks_for_saved_tensors():
            if with_grad or not torch.is_grad_enabled():
                result = self.fn(*args, **kwargs)
            else:
                with torch.no_grad():
                    result = self.fn(*args, **kwargs)
        if with_grad:
            detached((args, tuple(kwargs.values())))  # The call may have given them new tensors.
            return detached(result)
        return result

    def _forget(self, entry: CacheEntry) -> None:
        """Called when an entry is discarded: keep its counts, and drop what refers to it."""
        self._tally.forget(entry)
        if self._recent is entry:
            self._recent = self._short = None
        known = list(self._quick.items())  # Other threads may add to it.
        self._quick = {key: found for key, found in known if found is not entry}

    def _forget_proofs(self, verdicts: Iterable[Verdicts]) -> None:
        self._tally.forget_proofs(verdicts)

    def prepare(self, calls: Iterable[Call], *, progress: bool | None = None) -> None:
        """Capture graphs for these calls now: all are warmed up, then captured largest first.

        Args:
            calls: arguments of each call: a tuple of positional ones, a dictionary of keyword ones,
                or a pair of both.
            progress: whether to show progress on stderr if it takes more than two seconds.

        Raises:
            CaptureError: one cannot be captured; then none is.
            MemoryBudgetExceeded: they do not fit under the pool's limit.
            OptionError: a call is written in none of these forms.
        """
        refuse("prepare", items_problem("calls", calls, "calls: write [(x,)]"))
        wanted = [arguments_of(call) for call in calls]
        wanted = [(args, self._in_one_order(kwargs)) for args, kwargs in wanted]
        title = f"prepare({name_of(self.fn)})"
        with progress_shown(progress, title, after_s=SHORT_S) as bar:
            self._prepare(wanted, bar)
        for args, kwargs in wanted:
            self._waiting.note(self._objects_key(args, kwargs))
        self._begin_anew()

    def _prepare(self, wanted: Sequence[tuple[Args, Kwargs]], bar: Progress) -> None:
        if self._carried is None:
            bar.start(2 * len(wanted))
            try:
                self._entries.capture_all(wanted, bar.step)
            except StateChanges as error:
                if not self._carry(error.places):
                    raise
        if self._carried is not None:
            self._prepare_carried(self._carried, wanted, bar)

    def _prepare_carried(
        self, carried: _Carried, wanted: Sequence[tuple[Args, Kwargs]], bar: Progress
    ) -> None:
        """Capture graphs for calls with the state as it is, and as these calls leave it."""
        calls = [((*carried.state.held(), *args), kwargs) for args, kwargs in wanted]
        own = [len(args) for args, _ in wanted]
        for _ in range(_STATES_AHEAD):
            carried.graphs._prepare(calls, bar)
            if self._carried is not carried:  # More has been found.
                if self._carried is not None:
                    self._prepare_carried(self._carried, wanted, bar)
                return
            following = []
            for (args, kwargs), count in zip(calls, own, strict=True):
                carried.graphs._waiting.note(carried.graphs._objects_key(args, kwargs))
                left = carried.graphs._left_by(args, kwargs)
                if left is not None:
                    following.append(((*left, *args[len(args) - count :]), kwargs))
            if len(following) < len(calls):
                return
            calls = following

    def _left_by(self, args: Args, kwargs: Kwargs) -> tuple[Any, ...] | None:
        """The state that a prepared call leaves, if its graph does nothing else."""
        key = CallSignature.of(args, kwargs, objects=True), self._entries.grad_mode()
        entry = self._entries.state().entries.get(key)
        if entry is None or entry.graph is None or not (entry.ready and entry.pure):
            return None
        left: tuple[Any, ...] = entry.graph.run(args, kwargs)[1]
        return left

    def _audited(self, entry: CacheEntry, graph: CapturedCall, args: Args, kwargs: Kwargs) -> Any:
        """Run a call eagerly beside its graph and compare."""
        if entry.state.watch.changed() is not None:
            return self._find(args, kwargs)
        try:
            result = graph.run(args, kwargs)
        except GraphClosed:
            return self._find(args, kwargs)
        self._count(entry, graph)
        if graph.mutates or graph.random or graph.has_effects or graph.was_eager:
            return result  # It took a new path, which was eager.
        # A pure call has changed nothing, its arguments included.
        expected = self._run_detached(args, kwargs)
        compare(result, expected, graph.name)
        self._tally.audits += 1
        return result

    @property
    def statistics(self) -> CallStatistics:
        """How the calls went so far."""
        caches = self._caches()
        found = self._tally.statistics(
            [entry for cache in caches for entry in cache.ready()],
            sum(cache.captures for cache in caches),
            [proof for cache in caches for proof in cache.verdicts()],
        )
        if self._carrying.counted is not None:
            found = both(found, replace(self._carrying.counted, graphs=0, nbytes=0))
        if self._carried is not None:
            found = both(found, self._carried.graphs.statistics)
        parts = [] if self._parts is None else [g.statistics for g in self._parts.graphs.values()]
        return replace(
            found,
            captures=found.captures + sum(part.captures for part in parts),
            graphs=found.graphs + sum(part.graphs for part in parts),
            nbytes=found.nbytes + sum(part.nbytes for part in parts),
        )

    def __repr__(self) -> str:
        shown = [name_of(self.fn), summary(self.statistics)]
        if self._closed:
            shown.append("closed")
        elif self._parts is not None and self._parts.used:
            shown.append("in parts")
        elif self._waiting.looks.rests:
            shown.append("at rest")
        return f"GraphedCallable({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return to_html(type(self).__name__, name_of(self.fn), self.statistics)

    def explain(self) -> str:
        """What runs now and why, what it costs, and how the calls went so far."""
        ready = self._ready()
        lines = explained(name_of(self.fn), self.statistics, ready, self.pool)
        inside = {name: None for e in ready if e.graph for name in e.graph.parts.names}
        lines += [f"its graphs hold {name}" for name in inside]
        lines += [] if self._parts is None else self._parts.in_words()
        latest = self._latest()
        lines += latest._entries.about_watch()
        if latest._fallback.last is not None:
            lines.append(f"last call without a graph: {latest._fallback.last}")
        return "\n".join(lines)

    def reference(self) -> Callable[..., Any]:
        """What computes the same without graphs: the function or module."""
        return self.fn

    def sizes(self) -> SizesAnswered:
        """Which sizes calls are padded to; here each call is answered at its own."""
        return SizesAnswered()

    def counts(self) -> Counter[str]:
        """How many calls a graph answered, and how many were eager, by their reasons."""
        now = self.statistics
        eager = {f"eager: {why}": count for why, count in now.eager.items()}
        return Counter({"graph": now.hits, **eager})

    def graph_for(self, args: Args, kwargs: Kwargs) -> CapturedCall | None:
        """The graph that answers a call now, without padding; None if none does."""
        signature = self._signature_of(args, self._in_one_order(kwargs))
        entry = self._entries.state().entries.get((signature, self._entries.grad_mode()))
        return entry.graph if entry is not None and entry.ready else None

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that answer calls now, those of parts of the module too."""
        found: list[Graph] = [entry.graph for entry in self._ready() if entry.graph is not None]
        parts = [] if self._parts is None else list(self._parts.graphs.values())
        return found + [graph for part in parts for graph in part.graphs]

    def _ready(self) -> list[CacheEntry]:
        """The entries whose graphs can be replayed, those of calls that are given state too."""
        carried = self._carried
        found = [entry for cache in self._caches() for entry in cache.ready()]
        return found + ([] if carried is None else carried.graphs._ready())

    def _caches(self) -> list[GraphCache]:
        """All that hold graphs whose calls are counted here."""
        return [self._entries]

    def _latest(self) -> GraphedCallable:
        """What answers calls now: this, or what is given the state that calls leave."""
        return self if self._carried is None else self._carried.graphs._latest()

    def release(self) -> None:
        """Close all graphs; the next calls capture theirs again."""
        self._waiting.clear()
        self._rest = None
        budget_of(self.pool).renew()
        self._quick.clear()
        self._stop_carrying()
        self._carrying.left = _MOST_CARRIED
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.close()
        self._entries.release()

    def close(self) -> None:
        """Close all graphs for good, and the pool if it was made for them.

        Calls then run the function itself.
        """
        self._closed = True
        self.release()
        if self._owns_pool:
            self.pool.close()

    def _why(self, call: UncapturedCall) -> str:
        recent = self._recent
        if recent is None:
            return "nothing has been captured for the module as it is"
        difference = recent.signature.differences(call.args, call.kwargs, "captured")
        change = recent.state.watch.changed()
        return difference or change or "the graph that fitted was closed"

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedCallable:
        return self._copy(copy.deepcopy(self.fn, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fn, self._options(), self.pool.limit, self.pool.evict)

    def _copy(self, fn: Callable[..., Any]) -> GraphedCallable:
        return _rebuild(type(self), fn, self._options(), self.pool.limit, self.pool.evict)

    def _options(self) -> dict[str, Any]:
        return asdict(self._given)


class _GivenState(GraphedCallable):
    """Answers calls that are given what others have left in attributes, for another callable."""

    def __init__(self, fn: Callable[..., Any], owner: GraphedCallable, **options: Any) -> None:
        super().__init__(fn, **options)
        self._owner = owner

    def _carry(self, places: Sequence[Written]) -> bool:
        return self._owner._carry(places)

    def _objects_key(self, args: Args, kwargs: Kwargs) -> Any:
        # A state that grows is of another shape each time, as a cache is.
        quick = quick_key(args, kwargs)
        return super()._objects_key(args, kwargs) if quick is None else quick

    def _changes_shape(self, signature: CallSignature) -> bool:
        return True


class _OfPart(GraphedCallable):
    """Answers the calls of a submodule, where there is no graph for the whole module.

    Nobody is told of calls without a graph: they are parts of a call that has none.
    """

    def _make_fallback(self) -> Fallback:
        return Fallback(None, self.on_miss, self._tally.count_eager)

    def _before_capture(self) -> None:
        assert isinstance(self.fn, nn.Module)
        refuse_talk(self.fn)

    def _carry(self, places: Sequence[Written]) -> bool:
        return False

    def _may_have_parts(self) -> bool:
        return True

    def _make_parts(self, module: nn.Module, *, timed: bool = False) -> GraphedParts:
        return super()._make_parts(module, timed=timed)

    def _pays(self, nodes: int) -> bool:
        """Whether graphs of at least so many nodes have answered calls, or those of parts."""
        if self._parts is not None and self._parts.settle():
            return True
        graphs = [entry.graph for entry in self._entries.ready() if entry.hits]
        return any(graph is not None and graph.node_count >= nodes for graph in graphs)


@dataclass(frozen=True)
class UncapturedCall:
    """A call that has no graph, with its signature and the module's state."""

    args: Args
    kwargs: Kwargs
    signature: CallSignature
    state: StateGraphs
    grad: bool | None
    # The state of the call before, if it was another.
    left: StateGraphs | None
    # Seconds that it took to find this state, and to see that there is no graph.
    looked_s: float


@dataclass
class _Carried:
    """How calls are answered that read what others have left in attributes.

    Attributes:
        state: what they hold.
        graphs: answers calls that are given that.
        payoff: whether this is faster than eager; None once it is.
    """

    state: CarriedState
    graphs: GraphedCallable
    payoff: Payoff | None


class _Carrying:
    """Begins and ends to have calls answered by what is given the state that they leave.

    Attributes:
        left: how often more attributes may be found that calls read before they set them.
        counted: calls that were counted by what is closed.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.left = _MOST_CARRIED
        self.counted: CallStatistics | None = None
        self._fn = fn

    def begin(
        self,
        places: Sequence[Written],
        before: _Carried | None,
        make: Callable[[Callable[..., Any]], GraphedCallable],
    ) -> _Carried:
        """Have what some places hold carried too.

        Args:
            places: these.
            before: what has answered calls so far, which is closed.
            make: makes what answers calls of a function that is given what they hold.
        """
        known: list[Written] = []
        if before is not None:
            if before.graphs._answered() >= WORTH_CALLS:
                self.left = _MOST_CARRIED
            # An owner that was replaced takes what it held with it.
            known = reached(self._fn, before.state.places)
            self.end(before)
        self.left -= 1
        new = [place for place in places if not any(map(place.same_as, known))]
        state = CarriedState(self._fn, [*known, *new])
        return _Carried(state, make(state.function), Payoff(None, _FIRST_CARRIED_CALLS))

    def end(self, carried: _Carried) -> None:
        """Close what has answered calls, and keep its counts."""
        found = carried.graphs.statistics
        self.counted = found if self.counted is None else both(self.counted, found)
        carried.graphs.close()


def _words(fn: Callable[..., Any]) -> Words:
    """How it is said that no graph of a function answers a call."""
    name = name_of(fn)
    return Words(
        name,
        "Its statistics and explain() count them.",
        f"No graph of {name} fits this call",
        "Prepare one with prepare(), or allow on_miss='capture' or 'eager'.",
    )


def _rebuild(
    cls: type[GraphedCallable],
    fn: Callable[..., Any],
    options: Mapping[str, Any],
    limit: int | None,
    evict: bool,
) -> GraphedCallable:
    return cls(fn, pool=MemoryPool(limit, evict=evict), **options)


def _changes(before: StateGraphs) -> str:
    """A reason to wait: the module changes again and again."""
    what = before.watch.changed() or "its state"
    return (
        f"the module changes between calls ({what}), so that graphs are captured anew; keep it as "
        "it is, or change weights in place"
    )


def _category_of(error: GraphwrightError) -> str:
    return LIMIT if isinstance(error, MemoryBudgetExceeded) else UNCAPTURED


def answer_of(graphs: GraphedCallable) -> Answer:
    """What answers calls whose arguments are a tuple and a dictionary; as calling it does."""
    return graphs._call


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a function in errors and statistics."""
    fn = fn.model if isinstance(fn, TakenApart) else fn
    return type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))


def compare(result: Any, expected: Any, name: str, *, other_kernels: bool = False) -> None:
    """Raise VerificationError if a graph's result is not eager's.

    Args:
        result: the graph's result.
        expected: eager's result.
        name: of the graph.
        other_kernels: whether the graph may run other kernels than eager, since shapes differ.
    """
    result, expected = apart(result), apart(expected)
    mine, theirs = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    names = leaf_names(expected, "output")
    for leaf, a, b in zip(names, mine, theirs, strict=True):
        what = difference(a, b, other_kernels=other_kernels)
        if what is not None:
            raise VerificationError(
                f"An audit found that {leaf} of the graph {name} is not eager's: {what}.",
                remedy="Something that the call depends on changed unseen (docs: what is not "
                "watched). Call release(), so that it is captured again.",
            )
