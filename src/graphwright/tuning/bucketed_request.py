"""Calls between the sizes that were tuned for: filled up to a bucket, answered, and cut."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..artifacts.padded_calls import (
    OTHER_KIND,
    Known,
    PaddedCalls,
    Shapes,
    Tuned,
    shapes_of,
    strides_of,
)
from ..calls.signature import Args, CallSignature, Kwargs, Range, flatten, unflatten
from ..calls.snapshots import Call
from ..errors import OptionError, SignatureError
from ..graphs.memory import MemoryPool
from ..shapes.buckets import Buckets
from ..shapes.family import ShapeFamily
from ..shapes.padding import PaddingPlan, Sizes
from ..shapes.selection import BucketSelector

# Sizes of which a file keeps how they are filled up.
_MAX_STORED = 1 << 12
# Sizes between the buckets at which what answers a range is verified.
_MAX_VERIFIED = 1 << 7


class ProvedPaddedCalls(PaddedCalls):
    """By what was built for the next larger bucket, once it is proved that it may.

    Padding is proved to be harmless to the module before, as `graph(buckets=…)` does.

    Args:
        bucketing: the buckets of the module.
        kind: of the sample that was tuned with.
        table: what was built for each bucket, and for which call.
        module: the model.
    """

    def __init__(
        self,
        bucketing: BucketSelector,
        kind: ShapeFamily,
        table: Mapping[Sizes, Tuned],
        module: nn.Module,
    ) -> None:
        super().__init__(module)
        self._bucketing = bucketing
        self._kind = kind
        self._table = dict(table)

    def _find(self, args: Args, kwargs: Kwargs) -> Known | str:
        kind = self._kind
        # Of other kinds nothing was built, and nothing is worth a proof.
        sizes = kind.form.sizes(CallSignature.of(args, kwargs), flatten(args, kwargs)[0])
        if sizes is None:
            return OTHER_KIND
        answer = self._bucketing.answer(kind, sizes)
        plan = answer.plan
        if plan is None:
            return answer.reason or OTHER_KIND
        tuned = self._table[plan.bucket]
        leaves, spec = flatten(args, kwargs)
        if not tuned[0].fits(*unflatten(plan.pad(leaves), spec)):
            return OTHER_KIND
        if not kind.is_checked(plan.bucket):
            off = kind.check(plan, lambda mine, named: tuned[1](*mine, **named), args, kwargs)
            if off is not None:
                return off
        return Known(plan, tuned, strides_of(leaves))

    def plans(self) -> dict[Shapes, tuple[PaddingPlan, int]]:
        """For all sizes where these are few, else for those that were proved first.

        There are none where arguments share memory.
        """
        found = {}
        for sizes in self._bucketing.between(_MAX_STORED):
            args, kwargs = self._kind.subject.arguments(sizes)
            try:
                if CallSignature.of(args, kwargs).aliases:
                    return {}
                known = self._find(args, kwargs)
            except Exception:  # As in `fitting`: then the call goes to the model.
                continue
            if not isinstance(known, str):
                leaves, _ = flatten(args, kwargs)
                place = [*self._table].index(known.plan.bucket)
                found[shapes_of(leaves)] = known.plan, place
        return found


class BucketedRequest:
    """A call whose sizes vary, and the buckets to tune it for.

    Attributes:
        sizes: the buckets.
        options: names of the other options that were given.

    Raises:
        OptionError: an option makes no sense.
        SignatureError: the call does not have the dimensions.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        buckets: Buckets,
        dynamic_shapes: Any,
        pad: Any,
    ) -> None:
        self._bucketing = BucketSelector(
            model,
            buckets,
            dynamic_shapes=dynamic_shapes,
            pad=pad,
            split=False,
            pool=MemoryPool(),
        )
        signature = CallSignature.of(args, kwargs)
        kind, _ = self._bucketing.kind([], signature, args, kwargs, None)
        if kind is None:
            raise SignatureError(
                "An argument's dimensions lie in memory in another order than a bucket's.",
                remedy="Call contiguous() on it.",
            )
        self._kind = kind
        self.sizes = buckets
        options = {"dynamic_shapes": dynamic_shapes, "pad": pad}
        self.options = [name for name, given in options.items() if given is not None]

    def samples(self) -> Mapping[str, tuple[Args, Kwargs]]:
        """A call of each bucket's sizes, made of the sample's values, by the bucket's name."""
        subject, words = self._kind.subject, self._bucketing.words
        points = self._bucketing.buckets.points
        return {words(bucket): unflatten(subject.at(bucket), subject.spec) for bucket in points}

    def ranges(self) -> tuple[Range, ...] | None:
        """The sizes of the call's dimensions, from the smallest bucket to the largest.

        What is built for a range is verified there: beyond nothing is known. None where a dimension
        follows from another one, a tensor is not contiguous, or two share memory.
        """
        subject, dimensions = self._kind.subject, self._bucketing.dimensions
        points = self._bucketing.buckets.points
        args, kwargs = unflatten(subject.at(points[-1]), subject.spec)
        leaves, _ = flatten(args, kwargs)
        if CallSignature.of(args, kwargs).aliases:
            return None
        names = self._bucketing.buckets.names
        ends = {
            name: (min(p[i] for p in points), max(p[i] for p in points))
            for i, name in enumerate(names)
        }
        found = []
        for index, axes in enumerate(dimensions.axes(args, kwargs)):
            if axes and not leaves[index].is_contiguous():
                return None
            for axis, size in axes.items():
                if (size.factor, size.offset) != (1, 0):
                    return None
                found.append(Range(index, axis, size.name, *ends[size.name]))
        return tuple(found)

    def between(self) -> Iterator[Call]:
        """Calls of the ranges' sizes that no bucket has: all, or many where there are more."""
        points = self._bucketing.buckets.points
        axes = [range(min(own), max(own) + 1) for own in zip(*points, strict=True)]
        if math.prod(map(len, axes)) <= _MAX_VERIFIED:
            found = {*itertools.product(*axes)}
        else:
            dice = random.Random(0)
            found = {*itertools.product(*((axis[0], axis[-1]) for axis in axes))}
            found |= {tuple(map(dice.choice, axes)) for _ in range(_MAX_VERIFIED)}
        subject, words = self._kind.subject, self._bucketing.words
        for sizes in sorted(found.difference(points)):
            yield subject.call(words(sizes), subject.at(sizes))

    def weights(self, given: Any) -> list[float] | None:
        """The buckets' weights in the order of `samples`, from weights by bucket.

        Raises:
            OptionError: they are not by bucket, or not of these buckets.
        """
        if given is None:
            return None
        points = self._bucketing.buckets.points
        example = {point if len(point) > 1 else point[0]: 1 for point in points}
        by_point = {}
        if isinstance(given, Mapping):
            by_point = {k if isinstance(k, tuple) else (k,): v for k, v in given.items()}
        if set(by_point) != set(points):
            raise OptionError(
                f"weights is {given!r}, which does not give a weight to each bucket.",
                remedy=f"For example weights={example}.",
            )
        return [by_point[point] for point in points]

    def unproved(self) -> str | None:
        """Why a call between the buckets may not be filled up, or None where all may."""
        for bucket in self._bucketing.buckets.points:
            why = self._kind.prove(bucket, list(self._bucketing.served(bucket)))
            if why is not None:
                return why
        return None

    def filled(self, table: Sequence[Tuned]) -> ProvedPaddedCalls:
        """What answers calls between the buckets, by what was built for each of these."""
        known = dict(zip(self._bucketing.buckets.points, table, strict=True))
        return ProvedPaddedCalls(self._bucketing, self._kind, known, self._kind.subject.module)
