"""GraphedForward replaces a callable: calls go to the graphs that fit, or to the original."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...calls.binding import sees_order
from ...calls.introspection import FunctionStandIn
from ...calls.modes import opaque
from ...calls.modules import FunctionModule, forward_of_class
from ...calls.signature import CallSignature, inside_transform, under_hooks_for_saved_tensors
from ...calls.watch import ModuleWatch
from ...dispatch.decision import (
    CAPTURED,
    TRANSFORMED,
    UNCAPTURED,
    UNDER_HOOKS,
    UNFITTING,
    Miss,
)
from ...dispatch.fallback import Fallback, Words
from ...dispatch.graphed_callable import OnMiss
from ...dispatch.waiting import WaitingCalls
from ...errors import GraphwrightError, SignatureError, in_a_row
from ...graphs import capture_budget
from ...graphs.capture_turns import turns_of
from ...graphs.conditions import THREAD
from ...graphs.memory import MemoryPool, budget_of, lock_of
from .activation_set_limit import Refusal
from .activations import Lease
from .captured_pair import BUSY, CapturedPair

# How many pairs of graphs are kept; beyond that the least recently used one is closed.
_MAX_PAIRS = 32
# Calls without graphs that are remembered, with the state of the module, in case they come back.
_MAX_SEEN = 16


@dataclass
class TrainingCallStatistics:
    """How the calls of a graphed callable went.

    Attributes:
        replays: forwards that a graph answered.
        captures: call signatures that were captured.
        added_sets: sets of activations that were captured beyond the first of each signature, since
            a forward came while others waited for their backwards.
        eager: forwards of the original, by reason.
    """

    replays: int = 0
    captures: int = 0
    added_sets: int = 0
    eager: Counter[str] = field(default_factory=Counter)


@dataclass
class _Seen:
    """A kind of call without graphs, and the state of the module.

    Attributes:
        signature: the call's.
        grad: whether gradients were on.
        watch: of the module as it was.
        calls: how many calls there were when it was seen last.
        graph: whether it has had graphs since it came back.
    """

    signature: CallSignature
    grad: bool
    watch: ModuleWatch
    calls: int
    graph: bool = False


class GraphedForward(FunctionStandIn):
    """A function, or the forward of a module, whose calls are answered by graphs.

    Attributes:
        original: what is called without graphs.
        pool: the memory that the graphs live in.
        statistics: how the calls went.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        pool: MemoryPool,
        *,
        warmup: int,
        allow_unused: bool,
        sets: int,
        on_miss: OnMiss,
    ) -> None:
        """The arguments are those of `make_graphed_callables`, which checks them."""
        self._module = fn if isinstance(fn, nn.Module) else None
        replaced: Any = fn if self._module is None else vars(self._module).get("forward")
        if isinstance(replaced, GraphedForward):
            replaced = replaced._replaced
        # None for the forward of the module's class, looked up at each call.
        self._replaced: Callable[..., Any] | None = replaced
        self._owner = FunctionModule(self.original) if self._module is None else self._module
        self._mode = self._owner.training
        self._turns = turns_of(self._owner, fn if self._module is None else None)
        self.pool = pool
        self._lock = lock_of(pool)
        self.statistics = TrainingCallStatistics()
        self._warmup = warmup
        self._allow_unused = allow_unused
        self._sets = sets
        self._on_miss = on_miss
        self._pairs: list[CapturedPair] = []  # most recently used first
        self._refused: list[tuple[CallSignature, bool, Miss]] = []
        self._fallback = Fallback(self._words, on_miss, self._count_eager)
        self._ever_trained: list[torch.Tensor] = []
        self._waiting = WaitingCalls()
        self._seen: list[_Seen] = []  # most recently seen first
        self._look_like(self.original)

    def _words(self) -> Words:
        """How it is said that no graph answers a call."""
        name, remedy = repr(self), "Use on_miss='capture' or on_miss='eager'."
        counted, refused = "Its statistics count them.", f"No graph of {name} fits this call"
        return Words(name, counted, refused, remedy)

    def _count_eager(self, reason: str) -> None:
        self.statistics.eager[reason] += 1

    @property
    def original(self) -> Callable[..., Any]:
        """The callable without graphs."""
        if self._replaced is not None:
            return self._replaced
        assert self._module is not None
        return forward_of_class(self._module)

    @property
    def _graphwright_stands_for(self) -> Any:
        return self.original

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call.

        Raises:
            SignatureError: no graph fits, and on_miss is "error".
        """
        why = self._why_original()
        if why is not None:
            self._fallback.count(why)
            return self._call_original(args, kwargs)
        began, looks = capture_budget.CLOCK(), self._waiting.looks
        if began < looks.until_s:
            self._fallback.count(self._waiting.resting.category)
            return self._call_original(args, kwargs)
        with self._lock:
            pair = self._find(args, kwargs)
            lease = None if pair is None else pair.reserve()
        if pair is None:
            made = self._made_for(args, kwargs, began)
            if isinstance(made, Miss):
                return self._missed(made, args, kwargs)
            pair, lease = made, made.reserve()
        if looks.in_vain:
            looks.found()
        if lease is None:
            found = self._another_set(pair, args, kwargs)
            if isinstance(found, Refusal):
                return self._missed(Miss(found.reason, found.advice), args, kwargs)
            lease = found
        result = lease.pair.call(lease, args, kwargs)
        self.statistics.replays += 1
        return result

    def _made_for(self, args: Any, kwargs: Any, began: float) -> CapturedPair | Miss:
        """New graphs for a call that none fit, which were looked for since `began`; or why not."""
        if self._on_miss != "capture":
            why = self._difference(args, kwargs)
            self._fallback.refuse(why)
            return Miss(UNFITTING, why)
        for signature, grad, refused in self._refused:
            if grad is torch.is_grad_enabled() and signature.fits(args, kwargs):
                return refused
        is_new, comes_back = self._sight(args, kwargs)
        try:
            with budget_of(self.pool).capture(self._answered, comes_back=comes_back) as capture:
                if capture.allowed:
                    return self._capture(args, kwargs)
        except GraphwrightError as error:
            return Miss(UNCAPTURED, in_a_row(error), after_capture=True)
        unpaid = functools.partial(self._why_unpaid, args, kwargs)
        seconds = capture_budget.now() - began
        return self._waiting.postpone(None, seconds, unpaid, is_new=is_new, no_room=False)

    def _missed(self, missed: Miss, args: Any, kwargs: Any) -> Any:
        """Run a call that no graph answers; if that works, count it, and tell of its kind once."""
        result = self._call_original(args, kwargs)
        if missed.after_capture:
            self._refuse(args, kwargs, missed)
        self._fallback.last = missed.reason or self._fallback.last
        self._fallback.count(missed.category)
        self._fallback.tell(missed.category, missed.reason)
        return result

    def _answered(self) -> int:
        """How many calls graphs have answered."""
        return self.statistics.replays

    def _sight(self, args: Any, kwargs: Any) -> tuple[bool, bool]:
        """Note a call that has no graph.

        Returns:
            whether its kind is new with the module as it is, and whether it comes back after other
            calls and may have its one free capture.
        """
        calls = self.statistics.replays + sum(self.statistics.eager.values())
        grad = torch.is_grad_enabled()
        for seen in self._seen:
            if seen.grad is grad and seen.signature.fits(args, kwargs) and not seen.watch.changed():
                others = calls - seen.calls > 1
                seen.calls = calls
                comes_back = others and not seen.graph and len(self._pairs) < _MAX_PAIRS
                if comes_back:
                    seen.graph = True
                    self._waiting.came_back()
                return False, comes_back
        try:
            any_order = not sees_order(self.original)
            signature = CallSignature.of(args, kwargs, any_order=any_order)
        except SignatureError:
            return True, False
        watch = ModuleWatch(self._owner, values=False, training=True)
        self._drop_replaced(watch.tensor_ids)
        self._seen = [_Seen(signature, grad, watch, calls), *self._seen[: _MAX_SEEN - 1]]
        return True, False

    def _drop_replaced(self, held: set[int]) -> None:
        """Drop what keeps weights alive that the module no longer has.

        Args:
            held: identities of the tensors that the module holds now.
        """
        self._seen = [seen for seen in self._seen if not seen.watch.rebound(held)]
        with self._lock:
            self._pairs = [pair for pair in self._pairs if not pair.is_stale(held)]
            held = held.union(*([id(t) for t in pair.trained] for pair in self._pairs))
            self._ever_trained = [t for t in self._ever_trained if id(t) in held]

    def _why_unpaid(self, args: Any, kwargs: Any) -> tuple[str, str]:
        """What keeps captures from paying off: a cause, and the reason with what to do."""
        return "other kinds", (
            "most calls are of another kind than those before, or find the module changed "
            f"({self._difference(args, kwargs)}); keep it as it is between calls, pass what "
            "changes as a tensor, and change weights in place"
        )

    def _another_set(self, pair: CapturedPair, args: Any, kwargs: Any) -> Lease | Refusal:
        """A set of activations for a forward that found all of them waiting for their backwards."""
        lease = pair.reserve_garbage()
        if lease is not None:
            return lease
        refusal = pair.why_no_more_sets()
        if refusal is not None:
            return refusal
        try:
            # In the same order as for a capture.
            with self._turns.alone(), self._lock:
                return self._add_set(args, kwargs)
        except GraphwrightError as error:
            return pair.why_no_more_sets() or pair.refuse_sets(error)

    def _add_set(self, args: Any, kwargs: Any) -> Lease | Refusal:
        # Another thread may have changed everything meanwhile.
        pair = self._find(args, kwargs)
        if pair is None:
            return Refusal("the graphs were closed meanwhile", "Another thread closed its graphs.")
        lease = pair.reserve()
        if lease is None:
            refusal = pair.why_no_more_sets()
            if refusal is not None:
                return refusal
            pair.add_set(args, kwargs)
            self.statistics.added_sets += 1
            lease = pair.reserve()
        assert lease is not None  # The lock is held.
        return lease

    def _find(self, args: Any, kwargs: Any) -> CapturedPair | None:
        for index, pair in enumerate(self._pairs):
            if pair.fits(args, kwargs):
                if index:
                    self._pairs.insert(0, self._pairs.pop(index))
                return pair
        return None

    def new_pair(self, args: Any, kwargs: Any) -> CapturedPair:
        """A pair of graphs for a call, not captured yet."""
        return CapturedPair(
            self.original,
            self._owner,
            args,
            kwargs,
            self.pool,
            warmup=self._warmup,
            allow_unused=self._allow_unused,
            sets=self._sets,
        )

    def add(self, pair: CapturedPair) -> None:
        """Use a captured pair from now on."""
        pair.watch()
        # A parameter that one pair trains may be frozen in the calls of another.
        for other in (*self._pairs, pair):
            for tensor in other.trained:
                if all(tensor is not known for known in self._ever_trained):
                    self._ever_trained.append(tensor)
        for other in (*self._pairs, pair):
            other.also_watch(self._ever_trained)
        self.statistics.captures += 1
        self._pairs.insert(0, pair)

    def close(self) -> None:
        """Close all graphs; later calls capture theirs again or run the original."""
        for pair in self._pairs:
            pair.close()
        self._pairs = []
        self._seen = []
        self._waiting.begin_anew()
        budget_of(self.pool).renew()

    def __repr__(self) -> str:
        return f"<graphed {getattr(self.original, '__qualname__', self.original)!s}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A module is being copied: its copy has no graphs.
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> Any:
        if self._replaced is not None:
            return _itself, (self._replaced,)
        return getattr, (self._module, "forward")

    def _why_original(self) -> str | None:
        """Why the original must run, whatever the call is; None if a graph may."""
        if self._module is not None and self._module.training is not self._mode:
            return f"the module is in {'training' if self._module.training else 'eval'} mode"
        device = self.pool.device
        on_cuda = device is not None and device.type == "cuda"
        if THREAD.depth or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return CAPTURED
        if id(self.pool) in BUSY:
            # This may be autograd's thread, in a backward that the capture waits for.
            return "another thread captures in the same pool"
        if torch.compiler.is_compiling() or inside_transform():
            return TRANSFORMED
        if under_hooks_for_saved_tensors():
            return UNDER_HOOKS
        return None

    def _capture(self, args: Any, kwargs: Any) -> CapturedPair:
        # Before the lock: it waits for eager calls of other threads, which may need the lock.
        with self._turns.alone(), self._lock:
            # Another thread may have captured it meanwhile.
            found = self._find(args, kwargs)
            return self._capture_new(args, kwargs) if found is None else found

    def _capture_new(self, args: Any, kwargs: Any) -> CapturedPair:
        self._pairs = [pair for pair in self._pairs if not pair.is_stale()]
        while len(self._pairs) >= _MAX_PAIRS:
            idle = next((p for p in reversed(self._pairs) if not p.in_use), None)
            if idle is None:
                break
            self._pairs.remove(idle)
            idle.close()
        pair = self.new_pair(args, kwargs)
        try:
            pair.warm()
            pair.record()
        except BaseException:
            pair.close()
            raise
        self.add(pair)
        return pair

    def _call_original(self, args: Any, kwargs: Any) -> Any:
        with self._turns.calling():
            return self.original(*args, **kwargs)

    def _difference(self, args: Any, kwargs: Any) -> str:
        for pair in self._pairs:
            found = pair.signature.differences(args, kwargs, "captured") or pair.changed()
            return found or "gradients are on or off, or needed for other parameters"
        return "nothing is captured"

    def _refuse(self, args: Any, kwargs: Any, missed: Miss) -> None:
        """Have calls like one that cannot be captured be eager from now on."""
        with contextlib.suppress(SignatureError):
            any_order = not sees_order(self.original)
            signature = CallSignature.of(args, kwargs, any_order=any_order)
            refused = signature, torch.is_grad_enabled(), replace(missed, after_capture=False)
            self._refused = [*self._refused[-_MAX_PAIRS:], refused]


def _itself(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a pickle of a graphed function is read as: the function, without graphs."""
    return fn
