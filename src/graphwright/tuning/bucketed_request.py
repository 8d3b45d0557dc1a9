"""tune() with buckets: the calls to tune for, and how calls of other sizes are padded to them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..artifacts.padded_calls import (
    OTHER_KIND,
    PaddedCalls,
    PlannedCall,
    ShapeKey,
    Tuned,
    shape_key,
    strides_of,
)
from ..calls.options import shown
from ..calls.signature import CallSignature, Range
from ..calls.snapshots import Call
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..errors import OptionError, SignatureError
from ..graphs.memory import MemoryPool
from ..shapes.buckets import Buckets
from ..shapes.family import ShapeFamily
from ..shapes.padding import PaddingPlan, Sizes, Value
from ..shapes.selection import BucketSelector

# How many padding plans a file stores.
_MAX_STORED = 1 << 12
# At how many sizes between the buckets a candidate for a range of sizes is verified.
_MAX_VERIFIED = 1 << 7


class ProvedPaddedCalls(PaddedCalls):
    """Pads calls to the next larger bucket, once padding is proved to be harmless.

    The proof is that of `graph(buckets=…)`.

    Args:
        selector: chooses the bucket of a call.
        family: that of the sample that was tuned with.
        table: what was built for each bucket, with the signature it was built for.
        module: the model.
    """

    def __init__(
        self,
        selector: BucketSelector,
        family: ShapeFamily,
        table: Mapping[Sizes, Tuned],
        module: nn.Module,
    ) -> None:
        super().__init__(module)
        self._selector = selector
        self._family = family
        self._table = dict(table)

    def _plan(self, args: Args, kwargs: Kwargs) -> PlannedCall | str:
        family = self._family
        # Nothing was built for calls of another family: no need for a proof.
        sizes = family.signature.sizes(CallSignature.of(args, kwargs), flatten(args, kwargs)[0])
        if sizes is None:
            return OTHER_KIND
        answer = self._selector.answer(family, sizes)
        plan = answer.plan
        if plan is None:
            return answer.reason or OTHER_KIND
        tuned = self._table[plan.bucket]
        leaves, spec = flatten(args, kwargs)
        if not tuned[0].fits(*unflatten(plan.pad(leaves), spec)):
            return OTHER_KIND
        if not family.is_checked(plan):
            problem = family.check(plan, lambda mine, named: tuned[1](*mine, **named), args, kwargs)
            if problem is not None:
                return problem
        return PlannedCall(plan, tuned, strides_of(leaves))

    def difference(self, args: Args, kwargs: Kwargs) -> str | None:
        return self._family.signature.difference(CallSignature.of(args, kwargs), "tuned")

    def plans(self) -> dict[ShapeKey, tuple[PaddingPlan, int]]:
        """The plans of all sizes between the buckets, or, if these are many, of those proved.

        There are none if arguments share memory.
        """
        found = {}
        for sizes in self._selector.between(_MAX_STORED):
            args, kwargs = self._family.sampler.arguments(sizes)
            try:
                if CallSignature.of(args, kwargs).aliases:
                    return {}
                planned = self._plan(args, kwargs)
            except Exception:  # As in `callable_for`: such a call falls back to the model.
                continue
            if not isinstance(planned, str):
                leaves, _ = flatten(args, kwargs)
                index = [*self._table].index(planned.plan.bucket)
                found[shape_key(leaves)] = planned.plan, index
        return found

    def fills(self) -> Sequence[Value]:
        return self._family.sampler.pad_values


class BucketedRequest:
    """A call whose sizes vary, and the buckets to tune it for.

    Attributes:
        sizes: the buckets, as they were given.
        options: names of the other options that were given.

    Raises:
        OptionError: an option makes no sense.
        SignatureError: the call lacks a dimension, or its memory is laid out differently.
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
        self._selector = BucketSelector(
            model,
            buckets,
            dynamic_shapes=dynamic_shapes,
            pad=pad,
            split=False,
            pool=MemoryPool(),
        )
        signature = CallSignature.of(args, kwargs)
        family, _ = self._selector.family([], signature, args, kwargs, None)
        if family is None:
            raise SignatureError(
                "An argument's dimensions lie in memory in another order than a bucket's.",
                remedy="Call contiguous() on it.",
            )
        self._family = family
        self.sizes = buckets
        options = {"dynamic_shapes": dynamic_shapes, "pad": pad}
        self.options = [name for name, given in options.items() if given is not None]

    def samples(self) -> Mapping[str, tuple[Args, Kwargs]]:
        """By each bucket's name, a call of its sizes, made of the sample's values."""
        subject, words = self._family.sampler, self._selector.words
        points = self._selector.buckets.points
        return {words(bucket): unflatten(subject.at(bucket), subject.spec) for bucket in points}

    def ranges(self) -> tuple[Range, ...] | None:
        """The range of each dimension that varies, from the smallest bucket to the largest.

        A candidate for all sizes is verified in these ranges, and answers no call beyond them. None
        if a dimension is computed from another one, a tensor is not contiguous, or tensors share
        memory.
        """
        subject, dimensions = self._family.sampler, self._selector.dimensions
        points = self._selector.buckets.points
        args, kwargs = unflatten(subject.at(points[-1]), subject.spec)
        leaves, _ = flatten(args, kwargs)
        if CallSignature.of(args, kwargs).aliases:
            return None
        names = self._selector.buckets.names
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

    def calls_between(self) -> Iterator[Call]:
        """Calls of sizes that no bucket has: all of them, or a random choice of many."""
        points = self._selector.buckets.points
        axes = [range(min(own), max(own) + 1) for own in zip(*points, strict=True)]
        if math.prod(map(len, axes)) <= _MAX_VERIFIED:
            found = {*itertools.product(*axes)}
        else:
            chance = random.Random(0)
            found = {*itertools.product(*((axis[0], axis[-1]) for axis in axes))}
            found |= {tuple(map(chance.choice, axes)) for _ in range(_MAX_VERIFIED)}
        subject, words = self._family.sampler, self._selector.words
        for sizes in sorted(found.difference(points)):
            yield subject.call(words(sizes), subject.at(sizes))

    def weights(self, given: Any) -> list[float] | None:
        """The buckets' weights in the order of `samples`, from weights by bucket.

        Raises:
            OptionError: they are not by bucket, or not of these buckets.
        """
        if given is None:
            return None
        points = self._selector.buckets.points
        example = {point if len(point) > 1 else point[0]: 1 for point in points}
        by_point = {}
        if isinstance(given, Mapping):
            by_point = {k if isinstance(k, tuple) else (k,): v for k, v in given.items()}
        if set(by_point) != set(points):
            raise OptionError(
                f"weights is {shown(given)}, which does not give a weight to each bucket.",
                remedy=f"For example weights={example}.",
            )
        return [by_point[point] for point in points]

    def unproved(self) -> str | None:
        """Why some call between the buckets must not be padded; None if all may be."""
        for bucket in self._selector.buckets.points:
            why = self._family.prove(bucket, list(self._selector.served(bucket)))
            if why is not None:
                return why
        return None

    def padded_calls(self, table: Sequence[Tuned]) -> ProvedPaddedCalls:
        """Answers calls between the buckets by what was built for each bucket."""
        by_bucket = dict(zip(self._selector.buckets.points, table, strict=True))
        return ProvedPaddedCalls(
            self._selector, self._family, by_bucket, self._family.sampler.module
        )
