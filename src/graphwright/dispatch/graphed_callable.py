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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ..calls.places import Place
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
    warn_of_fallback,
)
from ..evaluation.accuracy import difference
from ..graphs import capture_budget
from ..graphs.capture_budget import WORTH_CALLS, Looks, now
from ..graphs.captured_call import Breaks, CapturedCall, Outputs
from ..graphs.composition import warn_if_traced
from ..graphs.conditions import capturing_now, hidden_from_hooks_for_saved_tensors
from ..graphs.graph import Graph, GraphClosed
from ..graphs.memory import MemoryPool, pool_problem
from ..graphs.python_state import StateChanges
from ..graphs.taken_apart import TakenApart
from ..graphs.turns import Busy
from ..ops import compiled_checks
from ..report.progress import SHORT_S, Progress, shown
from ..shapes.buckets import PADDING
from .carried_state import CarriedState, reached
from .fast_path import MISS, Shortcut, shortcut
from .graph_cache import MAX_BARE, CacheEntry, GraphCache, StateGraphs
from .graphed_parts import GraphedParts, refuse_talk
from .payoff import Payoff
from .statistics import CallStatistics, Tally, both, explained, summary, to_html

if TYPE_CHECKING:
    from ..shapes.verdicts import Verdicts

OnMiss = Literal["capture", "eager", "error"]

# Why calls are eager, by category; a caller is warned of some of them, once for each reason.
UNCAPTURED = "it cannot be captured"
_LIMIT = "the pool's limit"
SHARED = "an argument shares memory with a tensor of the call's own"
_UNKNOWN_ARGUMENT = "an argument that cannot be captured"
UNPAID = "capturing does not pay off"
FIRST = "the first call with objects of these shapes"
NOT_YET = "not captured yet"
_BESIDE = "timed beside calls in segments"
_BESIDE_CARRIED = "timed beside calls that are given what others have left"
_FIRST_CARRIED = "the first call that reads an attribute and then sets it"
# Shapes and values of calls of which it is remembered what answers them.
MAX_QUICK = 1 << 16
# Signatures of which it is remembered that they were refused.
_MAX_REFUSED = 1024
# Devices where calls in segments are timed beside eager ones, and calls before that; and the same
# for calls that are given what others have left in attributes, on any device.
_TIMED = frozenset({"cuda"})
_FIRST_IN_SEGMENTS = 6
_FIRST_CARRIED_CALLS = 5
# States without a graph that are remembered where hardly any comes back: each takes a while to
# compare.
_FEW_BARE = 3
# New kinds of calls in a row, of which none comes back, before a caller is told.
_MANY_NEW = 16
# At rest, the clock is read at one call of so many: it costs half of what such a call adds.
_CALLS_A_CLOCK = 8
# States in a row that prepare() captures graphs for.
_STATES_AHEAD = 3
# Times that more attributes are found which a call reads before it sets them.
_MOST_CARRIED = 4
# Graphs of a submodule, where there is none for the whole module.
_PART_GRAPHS = 4
_RUNS_IN_PARTS = "runs in parts"
# Kinds of calls with objects that are remembered.
_MAX_SEEN = 4096
# Seconds that a capture counts for which other threads left no room.
_BUSY_S = 0.01
# Eager calls of these kinds are told apart by their reasons, others by their kind alone.
_TOLD_BY_REASON = (UNCAPTURED, _LIMIT, PADDING, UNPAID)


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
    # Whether submodules may be answered by graphs where there is none for the whole.
    _in_parts = True
    # Whether this answers the calls of such a submodule.
    _is_part = False
    # Whether attributes that a call reads and sets may be carried from call to call, so often.
    _may_carry = _MOST_CARRIED

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
        self._outputs: Outputs = outputs
        self._max_graphs = max_graphs
        self._audit_every = audit
        self._tally = Tally()
        self._breaks: Breaks = breaks
        self._in_parts = self._in_parts and breaks != "never"
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
        self._last_miss: str | None = None
        self._warned: set[str] = set()
        # Calls that have no graph, which takes a while to find out.
        self._refused: dict[CallSignature, _Refused] = {}
        # Of calls with objects, by `objects_key`: those that were eager once, and whether a graph
        # was captured for one.
        self._seen: dict[Any, bool] = {}
        # A module's parts that are answered by graphs, once there is none for the whole.
        self._parts: GraphedParts | None = None
        # What calls leave in attributes for the next ones, and what answers calls given it.
        self._carried: _Carried | None = None
        # What carries the state that this answers calls with, if that is what it is for.
        self._carries_for: GraphedCallable | None = None
        # Calls that were counted by what is closed.
        self._counted: CallStatistics | None = None
        self._begin_anew()
        self._closed = False
        if not isinstance(fn, nn.Module):
            self._look_like(fn)

    def _begin_anew(self) -> None:
        """Forget which calls have had no graph."""
        # Calls without a graph, in a row; and why the last one had none.
        self._looks = Looks()
        self._rests_for, self._why_rests = NOT_YET, ""
        # What answers calls eagerly, at next to no cost, until the next look is due.
        self._rest: Shortcut | None = None
        # What keeps captures from paying off, in words, by its cause.
        self._unpaid: dict[str, str] = {}
        # New kinds of calls that wait, none of which has come back so far.
        self._new_kinds = 0
        # Why the last capture was refused, if that was the last one.
        self._last_refusal: str | None = None

    @property
    def _graphwright_stands_for(self) -> Any:
        return self.fn

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
        entry.shortcut = made = self._make_shortcut(entry)
        return made

    def _make_shortcut(self, entry: CacheEntry) -> Shortcut | None:
        if entry.graph is None or not entry.pure or entry.grad is not None:
            return None
        if self._audit_every is not None or self._is_timed(entry):
            return None
        state = entry.state
        return shortcut(
            entry.signature,
            entry.graph.launcher(),
            state.watch.unchanged,
            training=state.training,
            checks=self._entries.checks,
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
            return self._missed(SHARED, error.what, args, kwargs)
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
            self._tally.eager_for(UNCAPTURED)[0] += 1
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

    def _find(self, args: Args, kwargs: Kwargs, refused: _Refused | None = None) -> Any:
        """Answer a call outside of the fast path.

        Args:
            args: of the call.
            kwargs: likewise.
            refused: that of calls of its signature, if it is known already.
        """
        entered = now()
        captured = capturing_now()  # Then the capture's own mode is on, which is no transform.
        if inside_func() if captured else inside_transform():
            warn_if_traced(self, "graph")
            return self._run_as_is("traced or transformed", args, kwargs)
        # A training step that is captured wants gradients too.
        if torch.is_grad_enabled() and (require_grad(args, kwargs) or self._entries.in_training()):
            return self._run_as_is("gradients are wanted", args, kwargs)
        if self._closed:
            return self._run_eagerly("closed", args, kwargs)
        if captured:
            return self._run_eagerly("inside another capture", args, kwargs)
        kwargs = self._in_one_order(kwargs)
        result = self._answer_apart(args, kwargs)
        if result is not MISS:
            return result
        if self.on_miss == "capture":
            # To describe the call, and to compare the module, takes a while.
            if self._looks.rests:
                return self._missed(self._rests_for, self._why_rests, args, kwargs, as_called=True)
            if refused is not None and refused.looks.rests:
                return self._missed(refused.category, refused.reason, args, kwargs, as_called=True)
            objects = self._objects_key(args, kwargs)
            if objects is not None and not self._seen.get(objects) and self._is_first(objects):
                return self._missed(FIRST, "the next such call is captured", args, kwargs)
        try:
            signature = self._signature_of(args, kwargs)
        except SignatureError as error:
            if torch.is_grad_enabled() and self.on_miss != "error":
                # Tensors inside of it may require grad.
                self._last_miss = in_a_row(error)
                return self._run_as_is(_UNKNOWN_ARGUMENT, args, kwargs, self._last_miss)
            return self._missed(_UNKNOWN_ARGUMENT, in_a_row(error), args, kwargs)
        if self._refused and refused is None:
            refused = self._refused.get(signature)
            if refused is not None and refused.looks.rests:
                return self._missed(refused.category, refused.reason, args, kwargs, as_called=True)
        before = self._entries.current
        state = self._entries.state(_FEW_BARE if self._looks.mostly_in_vain else MAX_BARE)
        grad = self._entries.grad_mode()
        entry = state.entries.get((signature, grad))
        if entry is not None and entry.ready:
            self._looks.found()
            return self._answer(entry, args, kwargs)
        left = before if before is not state else None
        call = UncapturedCall(args, kwargs, signature, state, grad, left, now() - entered)
        return self._answer_uncaptured(call)

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
        if found is None and kwargs:
            named = self._in_one_order(kwargs)
            if named is not kwargs:
                return self._call(args, named)
        refused = found if isinstance(found, _Refused) else None
        if refused is not None and not refused.signature.fits(args, kwargs):
            refused = None
        return self._find(args, kwargs, refused)

    def _answer_uncaptured(self, call: UncapturedCall) -> Any:
        """Answer a call that no graph fits."""
        return self._capture_and_answer(call)

    def _capture_and_answer(
        self, call: UncapturedCall, sizes: tuple[int, ...] | None = None
    ) -> Any:
        """Capture a graph for a call without padding, if that is allowed, and answer by it."""
        entry = self._entry_for(call)
        if isinstance(entry, Miss):
            return self._answer_miss(entry, call.args, call.kwargs)
        entry.sizes = sizes
        before = entry.hits
        result = self._answer(entry, call.args, call.kwargs)
        if not before:
            self._tally.after_capture += min(entry.hits, 1)
        return result

    def _entry_for(self, call: UncapturedCall) -> CacheEntry | Miss:
        """The entry for a call, captured now if need be and allowed; else why there is none."""
        signature, state = call.signature, call.state
        entry = state.entries.get((signature, call.grad))
        if entry is not None:
            if entry.ready:
                return entry
            if entry.error is not None and entry.pool_version in (None, self.pool._version):
                category, reason = _category_of(entry.error), in_words(entry.error)[0]
                if self.on_miss == "capture":
                    self._refuse(call, call.looked_s, category, reason)
                return Miss(category, reason)
        if self.on_miss != "capture":
            return Miss("no graph fits", self._why(call))
        is_new, comes_back = self._sight(call)
        with self.pool._budget.capture(self._answered, comes_back=comes_back) as capture:
            if not capture.allowed:
                return self._postpone(call, is_new=is_new)
            began = now()
            try:
                if self._is_part and isinstance(self.fn, nn.Module):
                    refuse_talk(self.fn)
                made = self._entries.capture(signature, state, call.args, call.kwargs)
                if made.graph is not None and made.graph.may_not_pay and made.payoff is None:
                    device = made.graph.device
                    timed = device.type in _TIMED
                    made.payoff = Payoff(device, _FIRST_IN_SEGMENTS) if timed else None
                if self._changes_shape(signature):
                    self._note_objects(self._objects_key(call.args, call.kwargs), captured=True)
                self._last_refusal = None
                return made
            except (StateChanges, Busy) as error:
                if isinstance(error, StateChanges) and self._carry(error.places):
                    capture.counts = False
                    names = ", ".join(place.name for place in error.places)
                    return Miss(_FIRST_CARRIED, f"graphs of the next ones are given {names}")
                # A refusal would be kept with the module's state, which will not come back.
                reason = self._last_refusal = in_words(error)[0]
                # What other threads take is no cost of a capture.
                capture.most_s = _BUSY_S if isinstance(error, Busy) else math.inf
                self._refuse(call, min(now() - began, capture.most_s), UNCAPTURED, reason)
                missed = Miss(UNCAPTURED, reason, after_capture=True)
            except (CaptureError, MemoryBudgetExceeded) as error:
                self._entries.refuse(signature, state, call.grad, error)
                reason = in_words(error)[0]
                if isinstance(error, MemoryBudgetExceeded):
                    capture.counts = False
                else:
                    self._last_refusal = reason
                missed = Miss(_category_of(error), reason, after_capture=True)
        # Free what the error held, such as autograd nodes, which remember the stream they ran on.
        gc.collect(1)
        return missed

    def _carry(self, places: Sequence[Place]) -> bool:
        """From now on, have graphs that are given what places hold; whether that may work."""
        if self._carries_for is not None:
            return self._carries_for._carry(places)
        if not places or not self._may_carry or self._is_part or not self._takes_objects:
            return False
        known: list[Place] = []
        if self._carried is not None:
            if self._carried.graphs._answered() >= WORTH_CALLS:
                self._may_carry = _MOST_CARRIED
            # An owner that was replaced takes what it held with it.
            known = reached(self.fn, self._carried.state.places)
            self._stop_carrying()
        self._may_carry -= 1
        new = [place for place in places if not any(map(place.same_as, known))]
        state = CarriedState(self.fn, [*known, *new])
        graphs = GraphedCallable(state.function, pool=self.pool, **self._options())
        graphs._carries_for = self
        self._carried = _Carried(state, graphs, Payoff(None, _FIRST_CARRIED_CALLS))
        return True

    def _stop_carrying(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None:
            found = carried.graphs.statistics
            self._counted = found if self._counted is None else both(self._counted, found)
            carried.graphs.close()

    def _answer_carried(self, carried: _Carried, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call by what is given the state that calls leave, or eagerly to time that."""
        payoff = carried.payoff

        def other() -> Any:
            return carried.state.call(carried.graphs._call, args, kwargs)

        if payoff is None or self.on_miss != "capture" or not _TIMED:
            return other()
        if torch.is_grad_enabled() and (require_grad(args, kwargs) or self._entries.in_training()):
            return other()
        result, _ = payoff.call(lambda: self._run_eagerly(_BESIDE_CARRIED, args, kwargs), other)
        if not payoff.pays:
            self._may_carry = 0
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
        turn = self.pool._budget.turn_of(self)
        mine = self._tally.calls(self._entries.ready())
        seen = call.state.sighted(call.signature, call.grad, (mine, turn))
        # What grows with each call comes back with each text: as many graphs as it has calls.
        grows = self._changes_shape(call.signature)
        if seen is None or seen.graph or grows or self._entries.is_full():
            return seen is None, False
        others = turn != seen.calls[1] and self._entries.captures < self._max_graphs
        if mine - seen.calls[0] <= 1 and not others:
            return False, False
        self._new_kinds = 0
        call.state.seen[call.signature, call.grad].graph = True
        return False, True

    def _postpone(self, call: UncapturedCall, *, is_new: bool) -> Miss:
        """Why a call is eager that the budget for captures leaves none for."""
        self._looks.failed(call.looked_s, is_new=is_new)
        if not call.state.has_graphs:
            # Nothing answers calls while the module is as it is.
            self._recent = self._short = None
            self._quick.clear()
        refused = self._refused.get(call.signature)
        if refused is not None:
            refused.looks.failed(call.looked_s)
            missed = Miss(refused.category, refused.reason)
        else:
            self._new_kinds += is_new
            no_room = self._entries.is_full() and not is_new
            if no_room or self._new_kinds > _MANY_NEW:
                missed = Miss(UNPAID, self._why_unpaid(call))
            else:
                missed = Miss(NOT_YET, "it is captured when it comes back after other calls")
        self._rests_for, self._why_rests = missed.category, missed.reason
        # Parts may answer what is refused as a whole.
        at_rest = self._looks.rests and self._parts_for(missed.category) is None
        self._rest = self._make_rest(missed.category) if at_rest else None
        return missed

    def _make_rest(self, category: str) -> Shortcut:
        """A function that answers calls as `_missed` does, until the next look is due."""
        # Local names are found faster than attributes.
        count, until_s, clock = (
            self._tally.eager_for(category),
            self._looks.until_s,
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

    def _why_unpaid(self, call: UncapturedCall) -> str:
        """What keeps captures from paying off, and what to do; the same words for each cause."""
        if self._last_refusal is not None:
            return self._unpaid.setdefault("it is refused", self._last_refusal)
        if call.left is not None and not call.state.has_graphs:
            return self._unpaid.setdefault("it changes", _changes(call.left))
        cause, reason = self._why_kinds_differ(call)
        return self._unpaid.setdefault(cause, reason)

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
                f"{self._max_graphs}, or name the sizes that vary as buckets"
            )
        return "new kinds", (
            f"most calls are of a new kind ({self._why(call)}); name sizes that vary as buckets, "
            "or prepare() the kinds that come back"
        )

    def _refuse(self, call: UncapturedCall, seconds: float, category: str, reason: str) -> None:
        """Have calls of a signature be eager, without a look at the module, for a while.

        Args:
            call: one of them.
            seconds: that it took to find out that there is no graph for it.
            category: why there is none, as it is counted.
            reason: why, in detail.
        """
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        refused = self._refused.get(call.signature)
        if refused is None or refused.category != category:
            refused = self._refused[call.signature] = _Refused(call.signature, category)
        refused.reason = reason
        refused.looks.failed(seconds)
        key = quick_key(call.args, call.kwargs)
        if key is not None and key not in self._quick:
            self._quick[key] = refused

    def _objects_key(self, args: Args, kwargs: Kwargs) -> Any:
        """A key of a call with objects; None for others."""
        quick = quick_key(args, kwargs)
        if not self._takes_objects or quick is not None:
            # A state that grows is of another shape each time, as a cache is.
            return None if self._carries_for is None else quick
        return objects_key((*args, *(value for _, value in sorted(kwargs.items()))))

    def _is_first(self, key: Any) -> bool:
        """Whether this is the first call with such objects.

        A cache that grows with each call is of another shape each time, and capturing each of them
        would never pay off; the next text may have the same lengths.
        """
        if key in self._seen:
            return False
        self._note_objects(key, captured=False)
        return True

    def _note_objects(self, key: Any, *, captured: bool) -> None:
        if key is not None:
            if len(self._seen) >= _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = captured

    def _changes_shape(self, signature: CallSignature) -> bool:
        """Whether a call has arguments that are of another shape in each call where they grow."""
        return signature.has_objects or self._carries_for is not None

    def _answer_miss(
        self, miss: Miss, args: Args, kwargs: Kwargs, sizes: tuple[int, ...] | None = None
    ) -> Any:
        """Answer a call that no graph answers."""
        if miss.after_capture:
            with warnings.catch_warnings():
                # A backward of the capture ran on another stream, which is intended.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
                return self._missed(miss.category, miss.reason, args, kwargs, sizes)
        return self._missed(miss.category, miss.reason, args, kwargs, sizes)

    def _answered(self) -> int:
        """How many calls graphs have answered."""
        return self._tally.answered(self._entries.ready())

    def _missed(
        self,
        category: str,
        reason: str,
        args: Args,
        kwargs: Kwargs,
        sizes: tuple[int, ...] | None = None,
        *,
        as_called: bool = False,
    ) -> Any:
        """Answer a call that no graph answers: raise or run eagerly, as `on_miss` says.

        Args:
            category: why, as statistics count it.
            reason: why, in detail.
            args: of the call.
            kwargs: likewise.
            sizes: its named sizes, if there are buckets.
            as_called: leave the gradient mode as it is, since nobody has looked at the module.
        """
        self._last_miss = reason
        if sizes is not None:
            self._tally.elsewhere[sizes] += 1
        if self.on_miss == "error":
            raise SignatureError(
                f"No graph of {name_of(self.fn)} fits this call: {reason}",
                remedy="Prepare one with prepare(), or allow on_miss='capture' or 'eager'.",
            )
        parts = self._parts_for(category)
        # It may raise what the function raises.
        run = functools.partial(self._run_detached, args, kwargs, as_called=as_called)
        result, in_parts = (run(), False) if parts is None else parts.call(run)
        if in_parts:
            self._tally.in_parts += 1
        else:
            self._tally.eager_for(category)[0] += 1
        how = RUNS_EAGERLY if parts is None or not parts.used else _RUNS_IN_PARTS
        self._tell(category, reason, how)
        return result

    def _parts_for(self, category: str) -> GraphedParts | None:
        """The module's parts, where they may answer calls that are eager otherwise."""
        if category != UNCAPTURED or not self._in_parts:
            return None
        if self._parts is None and isinstance(self.fn, nn.Module):
            self._parts = GraphedParts(self.fn, self._graph_of_part, timed=not self._is_part)
        return self._parts

    def _graph_of_part(self, module: nn.Module) -> GraphedCallable:
        """What answers the calls of a submodule."""
        made = GraphedCallable(
            module,
            pool=self.pool,
            max_graphs=_PART_GRAPHS,
            breaks="never",  # Parts of it are better than paths without end.
            checks=self._entries.checks,
        )
        made._in_parts = made._is_part = True
        return made

    def _pays(self, nodes: int) -> bool:
        """Whether graphs of at least so many nodes have answered calls, or those of parts."""
        if self._parts is not None and self._parts.settle():
            return True
        graphs = [entry.graph for entry in self._entries.ready() if entry.hits]
        return any(graph is not None and graph.node_count >= nodes for graph in graphs)

    def _tell(self, category: str, reason: str = "", how: str = RUNS_EAGERLY) -> None:
        """Warn of calls that no graph answers, once for each kind."""
        kind = reason if category in _TOLD_BY_REASON else category
        if (
            category not in (FIRST, NOT_YET, _FIRST_CARRIED)
            and kind not in self._warned
            and not self._is_part
        ):
            self._warned.add(kind)
            why = f"{category}: {reason}" if reason else category
            warn_of_fallback(name_of(self.fn), why, "Its statistics and explain() count them.", how)

    def _run_as_is(self, category: str, args: Args, kwargs: Kwargs, reason: str = "") -> Any:
        """Run the function as it is, with gradients."""
        self._tally.eager_for(category)[0] += 1
        self._tell(category, reason)
        with self._entries.turns.calling():
            return self.fn(*args, **kwargs)

    def _run_eagerly(self, category: str, args: Args, kwargs: Kwargs) -> Any:
        self._tally.eager_for(category)[0] += 1
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
        with shown(progress, title, after_s=SHORT_S) as bar:
            self._prepare(wanted, bar)
        for args, kwargs in wanted:
            self._note_objects(self._objects_key(args, kwargs), captured=True)
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
                carried.graphs._note_objects(
                    carried.graphs._objects_key(args, kwargs), captured=True
                )
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
        if self._counted is not None:
            found = both(found, replace(self._counted, graphs=0, nbytes=0))
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
        return f"GraphedCallable({name_of(self.fn)}, {summary(self.statistics)})"

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
        if latest._last_miss is not None:
            lines.append(f"last call without a graph: {latest._last_miss}")
        return "\n".join(lines)

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
        self._refused.clear()
        self._seen.clear()
        self._begin_anew()
        self.pool._budget.renew()
        self._quick.clear()
        self._stop_carrying()
        self._may_carry = type(self)._may_carry
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
        return {
            "outputs": self._outputs,
            "on_miss": self.on_miss,
            "max_graphs": self._max_graphs,
            "audit": self._audit_every,
            "breaks": self._breaks,
            "checks": self._entries.checks,
        }


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


@dataclass(frozen=True)
class Miss:
    """Why no graph answers a call: the category that statistics count, and the reason."""

    category: str
    reason: str
    # Whether a capture was tried for this very call.
    after_capture: bool = False


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


class _Refused:
    """Calls of a signature that have no graph, as takes a while to find out, and why."""

    def __init__(self, signature: CallSignature, category: str) -> None:
        self.signature = signature
        self.category = category
        self.reason = ""
        self.looks = Looks(free=0)


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
    return _LIMIT if isinstance(error, MemoryBudgetExceeded) else UNCAPTURED


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
