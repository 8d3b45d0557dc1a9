"""A callable whose calls go to the smallest bucket that holds them, filled up and cut.

Calls of a bucket's own sizes are answered as if there were no buckets; others are filled up where
that is proved to be harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.signature import (
    Args,
    CallSignature,
    Kwargs,
    are_plain,
    flatten,
    inside_transform,
    quick_key,
    unflatten,
)
from ..errors import CaptureError, OptionError, PaddingError, SignatureError
from ..graphs.conditions import capturing_now
from ..graphs.graph import GraphClosed
from ..graphs.turns import Busy
from ..report.progress import Progress
from ..shapes.buckets import PADDING, Buckets
from ..shapes.dimensions import portable
from ..shapes.family import ShapeFamily
from ..shapes.padding import PaddingPlan
from ..shapes.selection import BucketSelector
from .graph_cache import CacheEntry
from .graphed_callable import SHARED, UNCAPTURED, Asked, GraphedCallable, Miss, compare, name_of
from .statistics import Tally

_MAX_QUICK = 1 << 16
_MAX_FAILURES = 3


@dataclass(eq=False)
class _Filled:
    """Calls of one form that a bucket's graph answers, filled up."""

    entry: CacheEntry
    plan: PaddingPlan
    strides: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    positional: int


class BucketedCallable(GraphedCallable):
    """A function or module whose calls are answered by buckets; made by `graph(buckets=…)`."""

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
        if split and self._outputs == "static":
            raise OptionError(
                "A call that is split needs the outputs of several replays, and outputs='static' "
                "keeps those of one.",
                remedy="Leave one of the two out.",
            )
        self._bucketing = BucketSelector(
            fn, buckets, dynamic_shapes=dynamic_shapes, pad=pad, split=split, pool=self.pool
        )
        if len(buckets.points) > self._max_graphs:
            raise OptionError(
                f"There are {len(buckets.points)} buckets and at most {self._max_graphs} graphs.",
                remedy="Raise max_graphs, or take fewer buckets.",
            )
        self._tally = Tally(buckets.names)
        self._recent_bucket: CacheEntry | None = None
        self._failures = 0

    def _unknown(self, found: Any, args: Args, kwargs: Kwargs) -> Any:
        if isinstance(found, _Filled):
            return self._filled_up(found, args, kwargs)
        return self._find(args, kwargs)

    def _uncaptured(self, asked: Asked) -> Any:
        try:
            return self._in_buckets(asked)
        except Busy as error:
            return self._missed("other threads were at work", error.what, asked.args, asked.kwargs)

    def _in_buckets(self, asked: Asked) -> Any:
        bucketing, state = self._bucketing, asked.state
        args, kwargs = asked.args, asked.kwargs
        try:
            kind, sizes = bucketing.kind(state.kinds, asked.signature, args, kwargs, asked.grad)
        except SignatureError as error:
            return self._missed("no dynamic sizes", error.what, args, kwargs)
        if kind is None:
            if sizes in bucketing.buckets.points:
                return self._exactly(asked, sizes)
            why = "an argument's dimensions lie in memory in another order than a bucket's"
            return self._missed("another order in memory", why, args, kwargs, sizes)
        if self.on_miss != "capture" and not kind.prepared:
            return self._missed(
                "no graph fits", "prepare() was not called for this kind", args, kwargs, sizes
            )
        try:
            answer = bucketing.answer(kind, sizes)
        except CaptureError as error:
            # The sample may be to blame, so that others get their turn, but not for ever.
            self._failures += 1
            if self._failures < _MAX_FAILURES:
                state.kinds = [other for other in state.kinds if other is not kind]
            else:
                kind.reason = error.what
            return self._missed(UNCAPTURED, error.what, args, kwargs, sizes)
        if answer.above is not None and bucketing.split:
            chunks = bucketing.chunks(kind, sizes, answer.above)
            if not isinstance(chunks, str):
                return self._in_chunks(asked, kind, answer.above, *chunks, sizes)
            return self._missed("it cannot be split", chunks, args, kwargs, sizes)
        if answer.reason is not None:
            return self._missed(answer.kind, answer.reason, args, kwargs, sizes)
        if kind.sets_up is not None:
            # By this call, and not by one that is filled up.
            return self._exactly(asked, sizes)
        leaves, _ = flatten(args, kwargs)
        plan = kind.laid_out(leaves, sizes) if answer.plan is None else answer.plan
        if plan is None:
            return self._exactly(asked, sizes)
        return self._fill_up(asked, kind, plan, leaves)

    def _fill_up(
        self, asked: Asked, kind: ShapeFamily, plan: PaddingPlan, leaves: Sequence[Any]
    ) -> Any:
        """Fill a call up for the first time, and remember how for calls of its shapes."""
        args, kwargs = asked.args, asked.kwargs
        values = plan.pad(leaves)
        padded, named = unflatten(values, kind.subject.spec)
        full = CallSignature.of(padded, named)
        entry = self._entry(replace(asked, args=padded, kwargs=named, signature=full))
        if isinstance(entry, Miss):
            return self._missed(entry.kind, entry.why, args, kwargs, plan.sizes)
        graph = entry.graph
        assert graph is not None
        entry.sizes = plan.bucket
        if kind.form.overlap and graph.written:
            why = "it writes to an argument that shares memory with another one"
            return self._missed(PADDING, why, args, kwargs, plan.sizes)
        if plan.sizes != plan.bucket and not kind.is_checked(plan.bucket) and entry.pure:
            off = kind.check(plan, graph.run, args, kwargs)
            if off is not None:
                return self._missed(PADDING, off, args, kwargs, plan.sizes)
        filled = _Filled(
            entry,
            plan,
            tuple(leaf.stride() if isinstance(leaf, torch.Tensor) else () for leaf in leaves),
            tuple(sorted(kwargs)),
            len(args),
        )
        key = quick_key(args, kwargs)
        if key is not None and entry.pure and asked.signature.flat is not None:
            if len(self._quick) >= _MAX_QUICK:
                self._quick.clear()
            self._quick[key] = filled
        return self._run_filled(filled, args, kwargs, leaves, values)

    def _filled_up(self, filled: _Filled, args: Args, kwargs: Kwargs) -> Any:
        """A call whose bucket is known by its shapes; all else about it is looked at."""
        entry, plan, names = filled.entry, filled.plan, filled.names
        if len(args) != filled.positional or len(kwargs) != len(names) or not entry.ready:
            return self._find(args, kwargs)
        try:
            leaves = (*args, *[kwargs[name] for name in names])
        except KeyError:
            return self._find(args, kwargs)
        if not are_plain(leaves) or inside_transform() or capturing_now():
            return self._find(args, kwargs)
        for leaf, stride in zip(leaves, filled.strides, strict=True):
            if leaf.stride() != stride:
                return self._find(args, kwargs)
        if torch.is_grad_enabled() and (
            entry.state.training or any(leaf.requires_grad for leaf in leaves)
        ):
            return self._find(args, kwargs)
        if entry.grad is not None and torch.is_grad_enabled() is not entry.grad:
            return self._find(args, kwargs)
        values = plan.pad(leaves)
        padded = tuple(values[: filled.positional])
        named = dict(zip(names, values[filled.positional :], strict=True))
        if not entry.signature.fits(padded, named):
            return self._find(args, kwargs)
        return self._run_filled(filled, args, kwargs, leaves, values)

    def _run_filled(
        self,
        filled: _Filled,
        args: Args,
        kwargs: Kwargs,
        leaves: Sequence[Any],
        values: Sequence[Any],
    ) -> Any:
        """Run a bucket's graph on what was filled up, and cut what it returns."""
        entry, plan, graph = filled.entry, filled.plan, filled.entry.graph
        assert graph is not None
        if not entry.pure and entry.state.watch.changed() is not None:
            return self._find(args, kwargs)
        try:
            with torch.no_grad():
                result = graph.run_leaves(values, lambda made: plan.cut(made, leaves, values))
        except GraphClosed:
            return self._find(args, kwargs)
        except SignatureError as error:
            return self._missed(SHARED, error.what, args, kwargs, plan.sizes)
        watch = entry.state.watch
        if entry.pure and not watch.unchanged() and watch.changed() is not None:
            return self._find(args, kwargs)
        if not entry.pure:
            plan.write_back(graph.written, leaves, values)
        tally = self._tally
        tally.padded[plan.bucket, plan.sizes] += 1
        if entry is not self._recent_bucket:
            self._recent_bucket = entry
            self._entries.touch(entry)
        every = self._audit_every
        if every is not None and entry.pure and sum(tally.padded.values()) % every == 0:
            compare(result, self._quietly(args, kwargs), graph.name, other_kernels=True)
            tally.audits += 1
        return result

    def _in_chunks(
        self,
        asked: Asked,
        kind: ShapeFamily,
        name: str,
        parts: Sequence[int],
        joints: Sequence[int | None],
        sizes: tuple[int, ...],
    ) -> Any:
        """Answer a call in chunks along one dimension, and join what they return."""
        leaves, spec = flatten(asked.args, asked.kwargs)
        results = []
        place = self._bucketing.dimensions.names.index(name)
        self._tally.split[sizes] += 1
        for n in parts:
            self._tally.chunks[*sizes[:place], n, *sizes[place + 1 :]] += 1
        for chunk in kind.subject.chunks(leaves, name, parts):
            results.append(pytree.tree_flatten(self.call(*unflatten(chunk, spec))))
        joined = [
            pieces[0] if joint is None else torch.cat(pieces, joint)
            for joint, *pieces in zip(joints, *(found for found, _ in results), strict=True)
        ]
        return pytree.tree_unflatten(joined, results[0][1])

    def _missed(
        self,
        kind: str,
        why: str,
        args: Args,
        kwargs: Kwargs,
        sizes: tuple[int, ...] | None = None,
    ) -> Any:
        if kind == PADDING and self.on_miss == "error":
            raise self._padding_error(why)
        return super()._missed(kind, why, args, kwargs, sizes)

    def _forget(self, entry: CacheEntry) -> None:
        super()._forget(entry)
        if self._recent_bucket is entry:
            self._recent_bucket = None
        self._quick = {
            key: found
            for key, found in self._quick.items()
            if not (isinstance(found, _Filled) and found.entry is entry)
        }

    def _prepare(self, wanted: Sequence[tuple[Args, Kwargs]], bar: Progress) -> None:
        """Prove and capture every bucket for some kinds of calls."""
        bucketing = self._bucketing
        bar.start(3 * len(bucketing.buckets.points) * len(wanted))
        state = self._entries.state()
        grad = self._entries.grad_mode()
        calls: list[tuple[Args, Kwargs]] = []
        sizes: list[tuple[int, ...]] = []
        owners: list[ShapeFamily] = []
        for args, kwargs in wanted:
            try:
                signature = CallSignature.of(args, kwargs)
                kind, _ = bucketing.kind(state.kinds, signature, args, kwargs, grad)
            except SignatureError as error:
                raise CaptureError(error.what, remedy=error.remedy) from error
            if kind is None:
                raise CaptureError(
                    "An argument's dimensions lie in memory in another order than a bucket's.",
                    remedy="Call contiguous() on it.",
                )
            if kind in owners:
                continue
            kind.prepared = True
            for bucket in bucketing.buckets.points:
                bar.step(f"proving that padding to {bucketing.words(bucket)} is harmless")
                why = kind.prove(bucket, list(bucketing.served(bucket)))
                if why is not None:
                    raise self._padding_error(why)
                calls.append(kind.subject.arguments(bucket))
                owners.append(kind)
                sizes.append(bucket)
        self._entries.capture_all(calls, bar.step)
        state = self._entries.state()
        for kind, bucket, (args, kwargs) in zip(owners, sizes, calls, strict=True):
            entry = state.entries.get((CallSignature.of(args, kwargs), grad))
            if entry is not None and entry.ready:
                entry.sizes = bucket
                self._check(kind, bucket, entry)

    def _check(self, kind: ShapeFamily, bucket: tuple[int, ...], entry: CacheEntry) -> None:
        """Compare the graph of a bucket, filled up, with eager, before it is first used."""
        served = list(self._bucketing.served(bucket))
        if not served or not entry.pure or kind.is_checked(bucket):
            return
        sizes = served[len(served) // 2]
        plan = kind.plan(sizes, bucket)
        graph = entry.graph
        assert isinstance(plan, PaddingPlan)
        assert graph is not None
        why = kind.check(plan, graph.run, *kind.subject.arguments(sizes))
        if why is not None:
            raise self._padding_error(why)

    def _padding_error(self, why: str) -> PaddingError:
        return PaddingError(
            f"{name_of(self.fn)} may not be filled up to a bucket: {why}.",
            remedy="If a mask could tell padding from data, pass one and declare its value there: "
            "pad={'attention_mask': 0}; else leave the dimension out of the buckets."
            if " padded from " in why
            else "Leave the buckets out; or change the function in that point.",
        )

    def _options(self) -> dict[str, Any]:
        mine = self._bucketing
        return {
            **super()._options(),
            "buckets": mine.buckets,
            "dynamic_shapes": portable(mine.dimensions.shapes),
            "pad": mine.dimensions.pad,
            "split": mine.split,
        }
