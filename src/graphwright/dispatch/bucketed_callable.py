"""BucketedCallable: calls are padded to the smallest bucket that holds them, results are sliced.

Calls of a bucket's own sizes are answered as if there were no buckets; others are padded once
padding is proved to change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.modules import FunctionModule
from ..calls.signature import CallSignature, inside_transform, quick_key
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..errors import CaptureError, OptionError, PaddingError, SignatureError, in_a_row
from ..graphs.capture_turns import Busy
from ..graphs.conditions import capturing_now
from ..graphs.graph import GraphClosed
from ..graphs.memory import budget_of
from ..graphs.taken_apart import (
    ApartCall,
    TakenApart,
    eager_results,
    holds_objects,
    with_objects,
)
from ..report.progress import Progress
from ..shapes.buckets import PADDING, Buckets
from ..shapes.dimensions import portable
from ..shapes.dynamic_signature import DynamicSignature
from ..shapes.family import ShapeFamily
from ..shapes.padding import PaddingPlan
from ..shapes.positions import HOLDS_POSITIONS
from ..shapes.selection import MAX_FAMILIES, Answer, BucketSelector
from .answerer import SizesAnswered
from .decision import SHARED, UNCAPTURED, UNFITTING, UNPAID, Miss
from .fast_path import MISS
from .graph_cache import CacheEntry, GraphCache, PaddedEntry
from .graphed_callable import (
    MAX_QUICK,
    GraphedCallable,
    UncapturedCall,
    compare,
    name_of,
)

# Failed proofs after which a family of calls stays eager.
_MAX_FAILURES = 3
# Kinds of calls with objects that have graphs.
_MAX_WITH_OBJECTS = 8
_NO_SIZES = "no dynamic sizes"
_MANY_OBJECTS = (
    "the objects of most calls differ in more than their tensors, in a number that counts, say"
)
_MANY_FAMILIES = (
    "most calls differ in more than the named sizes{how}; pass plain values that change as "
    "tensors, and name all sizes that vary"
)


class BucketedCallable(GraphedCallable):
    """A function or module whose calls are answered by buckets; made by `graph(buckets=…)`."""

    _takes_objects = False

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        buckets: Buckets,
        dynamic_shapes: Any = None,
        pad: Any = None,
        split: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(fn, **options)
        if split and self._given.outputs == "static":
            raise OptionError(
                "A call that is split needs the outputs of several replays, and outputs='static' "
                "keeps those of one.",
                remedy="Leave one of the two out.",
            )
        self._selector = BucketSelector(
            fn, buckets, dynamic_shapes=dynamic_shapes, pad=pad, split=split, pool=self.pool
        )
        if len(buckets.points) > self._given.max_graphs:
            most = self._given.max_graphs
            raise OptionError(
                f"There are {len(buckets.points)} buckets, and max_graphs is {most}.",
                remedy="Raise max_graphs, or take fewer buckets.",
            )
        self._tally.names = buckets.names
        self._recent_bucket: CacheEntry | None = None
        # What answers calls with objects, by all of these but their tensors; or why nothing does.
        self._with_objects: dict[Any, _OfTensors | SignatureError] = {}
        # Kinds of calls whose results alone hold objects.
        self._give_objects: set[Any] = set()

    def _answer_apart(self, args: Args, kwargs: Kwargs) -> Any:
        plain = quick_key(args, kwargs) is not None or not holds_objects(args, kwargs)
        if plain and not self._give_objects:
            return MISS
        try:
            apart = ApartCall.of(args, kwargs)
        except SignatureError as error:
            if plain:
                return MISS  # It is refused by name, as other calls are.
            return self._missed(Miss(_NO_SIZES, in_a_row(error)), args, kwargs)
        if plain and apart.kind not in self._give_objects:
            return MISS
        return self._answer_by_tensors(apart, args, kwargs)

    def _answer_by_tensors(self, apart: ApartCall, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call whose arguments or results hold objects."""
        try:
            known = self._of_tensors(apart, args, kwargs)
        except SignatureError as error:
            return self._missed(Miss(_NO_SIZES, error.what), args, kwargs)
        if known is None:
            return self._missed(Miss(UNPAID, _MANY_OBJECTS), args, kwargs)
        return known.answer(*args, **kwargs)

    def _of_tensors(self, call: ApartCall, args: Args, kwargs: Kwargs) -> _OfTensors | None:
        """What answers a call with objects by its tensors; None if there are too many kinds.

        Raises:
            SignatureError: an argument cannot be looked into, or the call lacks a dimension.
        """
        known = self._with_objects.get(call.kind)
        if isinstance(known, SignatureError):
            raise SignatureError(known.what, remedy=known.remedy)
        if known is not None or len(self._with_objects) >= _MAX_WITH_OBJECTS:
            return known
        dimensions, slots = self._selector.dimensions, call.template.slots
        axes, pads = dimensions.axes(args, kwargs), dimensions.pads(args, kwargs)
        module = self.fn if isinstance(self.fn, nn.Module) else FunctionModule(self.fn)
        options = self._options() | {
            "dynamic_shapes": tuple(axes[slot] for slot in slots),
            "pad": tuple(pads[slot] for slot in slots),
        }
        taken = TakenApart(module, [call.template], alike=True)
        try:
            made = self._with_objects[call.kind] = _OfTensors(taken, call, self, options)
        except SignatureError as error:  # To see it once more, the model would run again.
            self._with_objects[call.kind] = SignatureError(error.what, remedy=error.remedy)
            raise
        return made

    def _of_each_kind(self) -> Iterator[_OfTensors]:
        """What answers calls with objects."""
        return (each for each in self._with_objects.values() if isinstance(each, _OfTensors))

    def _caches(self) -> list[GraphCache]:
        own = super()._caches()
        return own + [cache for each in self._of_each_kind() for cache in each._caches()]

    def release(self) -> None:
        """Close all graphs; the next calls capture theirs again."""
        super().release()
        for each in self._of_each_kind():
            each.release()

    def _answer_uncaptured(self, call: UncapturedCall) -> Any:
        try:
            return self._answer_from_buckets(call)
        except Busy as error:
            missed = Miss("other threads were at work", error.what)
            return self._missed(missed, call.args, call.kwargs)

    def _answer_from_buckets(self, call: UncapturedCall) -> Any:
        selector, state = self._selector, call.state
        args, kwargs = call.args, call.kwargs
        known = list(state.families)
        try:
            family, sizes = selector.family(state.families, call.signature, args, kwargs, call.grad)
        except SignatureError as error:
            return self._missed(Miss(_NO_SIZES, error.what), args, kwargs)
        if family is None:
            if sizes in selector.buckets.points:
                return self._capture_and_answer(call, sizes)
            why = "an argument's dimensions lie in memory in another order than a bucket's"
            return self._missed(Miss("another order in memory", why, sizes), args, kwargs)
        if any(family is other for other in known) or self.on_miss != "capture":
            return self._answer_from_family(call, family, sizes)
        # A family has proofs and graphs of its own, as for a plain value that is new in each call.
        is_new, comes_back = super()._sight(call)
        with budget_of(self.pool).capture(self._answered, comes_back=comes_back) as capture:
            if capture.allowed:
                return self._answer_from_family(call, family, sizes)
        state.families = known
        missed = self._postpone(call, is_new=is_new)
        return self._missed(replace(missed, sizes=sizes), args, kwargs)

    def _sight(self, call: UncapturedCall) -> tuple[bool, bool]:
        is_new, comes_back = super()._sight(call)
        # The caller has named the sizes that come back.
        named = is_new and bool(call.state.families) and not self._entries.is_full()
        return is_new, comes_back or named

    def _why_kinds_differ(self, call: UncapturedCall) -> tuple[str, str]:
        known = call.state.families
        how = known[-1].signature.difference(call.signature, "captured") if known else None
        return "families", _MANY_FAMILIES.format(how=f" ({how})" if how else "")

    def _answer_from_family(
        self, call: UncapturedCall, family: ShapeFamily, sizes: tuple[int, ...]
    ) -> Any:
        args, kwargs = call.args, call.kwargs
        if self.on_miss != "capture" and not family.prepared:
            why = self._why_unprepared(call)
            return self._missed(Miss(UNFITTING, why, sizes), args, kwargs)
        try:
            gives_objects = family.returns_objects()
            answer = None if gives_objects else self._selector.answer(family, sizes)
        except Busy:
            raise  # Other threads were in the way.
        except CaptureError as error:
            self._count_failure(call, family, error.what)
            return self._missed(Miss(UNCAPTURED, error.what, sizes), args, kwargs)
        if answer is None:
            apart = ApartCall.of(args, kwargs)
            self._give_objects.add(apart.kind)
            return self._answer_by_tensors(apart, args, kwargs)
        state = call.state
        state.failed = [each for each in state.failed if not _is_of(call, *each)]
        return self._answer_from_bucket(call, family, answer, sizes)

    def _answer_from_bucket(
        self, call: UncapturedCall, family: ShapeFamily, answer: Answer, sizes: tuple[int, ...]
    ) -> Any:
        """Answer a call as the buckets of its family allow."""
        selector, args, kwargs = self._selector, call.args, call.kwargs
        if answer.above is not None and selector.split:
            chunks = selector.chunks(family, sizes, answer.above)
            if not isinstance(chunks, str):
                return self._answer_in_chunks(call, family, answer.above, *chunks, sizes)
            return self._missed(Miss("it cannot be split", chunks, sizes), args, kwargs)
        if answer.reason is not None:
            return self._missed(Miss(answer.category, answer.reason, sizes), args, kwargs)
        if family.sets_up is not None:
            # This call itself has to set it up, not a padded one.
            return self._capture_and_answer(call, sizes)
        leaves, _ = flatten(args, kwargs)
        plan = family.layout_plan(leaves, sizes) if answer.plan is None else answer.plan
        if plan is None:
            return self._capture_and_answer(call, sizes)
        return self._pad_and_answer(call, family, plan, leaves)

    def _why_unprepared(self, call: UncapturedCall) -> str:
        """Why no graph fits a call for whose family prepare() was not called."""
        why = "prepare() was not called for this kind"
        prepared = [each for each in call.state.families if each.prepared]
        how = prepared[-1].signature.difference(call.signature, "prepared") if prepared else None
        return f"{why}: {how}" if how else why

    def _count_failure(self, call: UncapturedCall, family: ShapeFamily, why: str) -> None:
        """Note that a family's proofs could not be made.

        The sample may be to blame: the next call of that kind becomes the sample, a few times.
        """
        state = call.state
        failures = 1 + sum(each[2] for each in state.failed if _is_of(call, *each))
        others = [each for each in state.failed if not _is_of(call, *each)]
        state.failed = [*others[1 - MAX_FAMILIES :], (family.signature, call.grad, failures)]
        if failures < _MAX_FAILURES:
            state.families = [other for other in state.families if other is not family]
        else:
            family.reason = why

    def _pad_and_answer(
        self, call: UncapturedCall, family: ShapeFamily, plan: PaddingPlan, leaves: Sequence[Any]
    ) -> Any:
        """Pad a call of new shapes and answer it, and remember how for the next ones."""
        args, kwargs = call.args, call.kwargs
        values = plan.pad(leaves)
        given, named = unflatten(values, family.sampler.spec)
        full = CallSignature.of(given, named)
        captures = self._entries.captures
        entry = self._entry_for(replace(call, args=given, kwargs=named, signature=full))
        if isinstance(entry, Miss):
            return self._missed(replace(entry, sizes=plan.sizes), args, kwargs)
        graph = entry.graph
        assert graph is not None
        entry.sizes = plan.bucket
        if family.signature.overlap and graph.written:
            why = "it writes to an argument that shares memory with another one"
            return self._missed(Miss(PADDING, why, plan.sizes), args, kwargs)
        if plan.sizes != plan.bucket and not family.is_checked(plan):
            if entry.pure:
                wrong = family.check(plan, graph.run, args, kwargs)
            else:
                wrong = family.check_eagerly(plan)
            if wrong is not None:
                return self._missed(Miss(PADDING, wrong, plan.sizes), args, kwargs)
        padded = PaddedEntry(call.signature, entry, plan)
        key = quick_key(args, kwargs)
        if key is not None and entry.pure and call.signature.flat is not None:
            if len(self._quick) >= MAX_QUICK:
                self._quick.clear()
            padded.shortcut = self._make_shortcut(entry, call.signature, plan.around)
            self._quick[key] = padded
        result = self._run_padded(padded, args, kwargs, leaves, values)
        self._tally.after_capture += self._entries.captures > captures
        return result

    def _answer_padded(self, padded: PaddedEntry, args: Args, kwargs: Kwargs) -> Any:
        """Answer a call whose padding is known by its shapes, once all else about it is checked."""
        entry, signature = padded.entry, padded.signature
        with_grad = torch.is_grad_enabled()
        shut = inside_transform() or capturing_now() or not entry.ready
        if shut or entry.grad not in (None, with_grad) or not signature.fits(args, kwargs):
            return self._find(args, kwargs)
        if with_grad and (entry.state.training or signature.wants_grad):
            return self._find(args, kwargs)
        leaves = signature.taken_apart(args, kwargs).leaves
        return self._run_padded(padded, args, kwargs, leaves, padded.plan.pad(leaves))

    def _run_padded(
        self,
        padded: PaddedEntry,
        args: Args,
        kwargs: Kwargs,
        leaves: Sequence[Any],
        values: Sequence[Any],
    ) -> Any:
        """Run a bucket's graph on padded arguments, and slice what it returns.

        Args:
            padded: how the call is padded.
            args: of the call.
            kwargs: likewise.
            leaves: of its arguments.
            values: the same, padded.
        """
        entry, plan, graph = padded.entry, padded.plan, padded.entry.graph
        assert graph is not None
        if not entry.pure and entry.state.watch.changed() is not None:
            return self._find(args, kwargs)
        try:
            with torch.no_grad():
                result = graph.run_leaves(values, lambda made: plan.cut(made, leaves, values))
        except GraphClosed:
            return self._find(args, kwargs)
        except SignatureError as error:
            return self._missed(Miss(SHARED, error.what, plan.sizes), args, kwargs)
        watch = entry.state.watch
        if entry.pure and not watch.unchanged() and watch.changed() is not None:
            return self._find(args, kwargs)
        if not entry.pure:
            plan.write_back(graph.written, leaves, values)
        self._count_padded(padded)
        every, tally = self._audit_every, self._tally
        if every is not None and entry.pure and sum(tally.padded.values()) % every == 0:
            compare(result, self._run_detached(args, kwargs), graph.name, other_kernels=True)
            tally.audits += 1
        return result

    def _count_padded(self, padded: PaddedEntry) -> None:
        entry, plan = padded.entry, padded.plan
        self._tally.padded[plan.bucket, plan.sizes] += 1
        if entry is not self._recent_bucket:
            self._recent_bucket = entry
            self._entries.touch(entry)

    def _answer_in_chunks(
        self,
        call: UncapturedCall,
        family: ShapeFamily,
        name: str,
        parts: Sequence[int],
        joints: Sequence[int | None],
        sizes: tuple[int, ...],
    ) -> Any:
        """Answer a call in chunks along one dimension, and join what they return."""
        leaves, spec = flatten(call.args, call.kwargs)
        results = []
        place = self._selector.dimensions.names.index(name)
        self._tally.split[sizes] += 1
        for n in parts:
            self._tally.chunks[*sizes[:place], n, *sizes[place + 1 :]] += 1
        for chunk in family.sampler.chunks(leaves, name, parts):
            results.append(pytree.tree_flatten(self._call(*unflatten(chunk, spec))))
        joined = [
            pieces[0] if joint is None else torch.cat(pieces, joint)
            for joint, *pieces in zip(joints, *(found for found, _ in results), strict=True)
        ]
        result = pytree.tree_unflatten(joined, results[0][1])
        every, tally = self._audit_every, self._tally
        if every is not None and sum(tally.split.values()) % every == 0:
            expected = self._run_detached(call.args, call.kwargs)
            compare(result, expected, f"{name_of(self.fn)} in chunks", other_kernels=True)
            tally.audits += 1
        return result

    def _refuse_miss(self, missed: Miss) -> None:
        if missed.category == PADDING:
            raise self._padding_error(missed.reason)
        super()._refuse_miss(missed)

    def _may_have_parts(self) -> bool:
        return False  # Their sizes vary.

    def _forget(self, entry: CacheEntry) -> None:
        super()._forget(entry)
        if self._recent_bucket is entry:
            self._recent_bucket = None
        self._quick = {
            key: found
            for key, found in self._quick.items()
            if not (isinstance(found, PaddedEntry) and found.entry is entry)
        }

    def _prepare(self, wanted: Sequence[tuple[Args, Kwargs]], bar: Progress) -> None:
        """Prove and capture every bucket for the families of some calls."""
        selector = self._selector
        for args, kwargs in wanted:
            if holds_objects(args, kwargs):
                self._prepare_apart(args, kwargs, bar)
        wanted = [each for each in wanted if not holds_objects(*each)]
        bar.start(3 * len(selector.buckets.points) * len(wanted))
        state = self._entries.state()
        grad = self._entries.grad_mode()
        calls: list[tuple[Args, Kwargs]] = []
        sizes: list[tuple[int, ...]] = []
        owners: list[ShapeFamily] = []
        for args, kwargs in wanted:
            try:
                signature = CallSignature.of(args, kwargs)
                family, _ = selector.family(state.families, signature, args, kwargs, grad)
            except SignatureError as error:
                raise CaptureError(error.what, remedy=error.remedy) from error
            if family is None:
                raise CaptureError(
                    "An argument's dimensions lie in memory in another order than a bucket's.",
                    remedy="Call contiguous() on it.",
                )
            if family in owners:
                continue
            family.prepared = True
            if family.returns_objects():
                self._give_objects.add(ApartCall.of(args, kwargs).kind)
                self._prepare_apart(args, kwargs, bar)
                continue
            for bucket in selector.buckets.points:
                bar.step(f"proving that padding to {selector.words(bucket)} is harmless")
                why = family.prove(bucket, list(selector.served(bucket)))
                if why is not None:
                    raise self._padding_error(why)
                calls.append(family.sampler.arguments(bucket))
                owners.append(family)
                sizes.append(bucket)
        self._entries.capture_all(calls, bar.step)
        state = self._entries.state()
        for family, bucket, (args, kwargs) in zip(owners, sizes, calls, strict=True):
            entry = state.entries.get((CallSignature.of(args, kwargs), grad))
            if entry is not None and entry.ready:
                entry.sizes = bucket
                self._check(family, bucket, entry)

    def _prepare_apart(self, args: Args, kwargs: Kwargs, bar: Progress) -> None:
        """Prove and capture every bucket for calls that are like one with objects."""
        try:
            known = self._of_tensors(ApartCall.of(args, kwargs), args, kwargs)
        except SignatureError as error:
            raise CaptureError(error.what, remedy=error.remedy) from error
        if known is None:
            raise CaptureError(_MANY_OBJECTS, remedy="Prepare fewer kinds of calls.")
        known._prepare([(known.call.tensors, {})], bar)

    def _check(self, family: ShapeFamily, bucket: tuple[int, ...], entry: CacheEntry) -> None:
        """Compare a bucket with eager for padded calls of each case, before it is first used."""
        graph = entry.graph
        assert graph is not None
        for sizes in self._selector.served(bucket):
            plan = family.plan(sizes, bucket)
            if not isinstance(plan, PaddingPlan) or family.is_checked(plan):
                continue  # Eager refuses such calls too, or one of their case was compared.
            if entry.pure:
                why = family.check(plan, graph.run, *family.sampler.arguments(sizes))
            else:
                why = family.check_eagerly(plan)
            if why is not None:
                raise self._padding_error(why)

    def _padding_error(self, why: str) -> PaddingError:
        remedy = "Leave the buckets out, or change this in the function."
        if HOLDS_POSITIONS in why:
            remedy = (
                "No pad value can help, since it is a position too. Leave that dimension out of "
                "the buckets, or pad these arguments yourself, so that what is added points at "
                "what is added."
            )
        elif " padded from " in why:
            remedy = (
                "If a mask could tell padding from data, pass one and declare its value there: "
                "pad={'attention_mask': 0}; else leave the dimension out of the buckets."
            )
        return PaddingError(
            f"{name_of(self.fn)} may not be padded to a bucket: {why}.", remedy=remedy
        )

    def sizes(self) -> SizesAnswered:
        """Which sizes calls are padded to."""
        buckets, given = self._selector.buckets, self._selector.dimensions
        return SizesAnswered(buckets=buckets, dynamic_shapes=given.shapes, pad=given.pad)

    def _options(self) -> dict[str, Any]:
        mine = self._selector
        return {
            **super()._options(),
            "buckets": mine.buckets,
            "dynamic_shapes": portable(mine.dimensions.shapes),
            "pad": mine.dimensions.pad,
            "split": mine.split,
        }


def _is_of(call: UncapturedCall, kind: DynamicSignature, grad: bool | None, failures: int) -> bool:
    """Whether a call is of a kind whose proofs failed."""
    leaves, _ = flatten(call.args, call.kwargs)
    return call.grad is grad and kind.sizes(call.signature, leaves) is not None


class _OfTensors(BucketedCallable):
    """Answers calls with objects of one kind by their tensors, for another callable.

    Attributes:
        call: the first of these calls.
        answer: answers them.
    """

    def __init__(
        self, taken: TakenApart, call: ApartCall, owner: BucketedCallable, options: dict[str, Any]
    ) -> None:
        super().__init__(taken, pool=owner.pool, **options)
        mine, its = self._selector.dimensions, owner._selector.dimensions
        mine.bounds = its.bounds
        mine.name_arguments(call.names)
        self._tally, self._fallback = owner._tally, owner._fallback
        self.call = call
        self.answer = with_objects(self, call.signature, taken.made(0, call.tensors))

    def _run_detached(self, args: Args, kwargs: Kwargs, *, as_called: bool = False) -> Any:
        with eager_results():
            return super()._run_detached(args, kwargs, as_called=as_called)
