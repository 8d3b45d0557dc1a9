"""BucketSelector: finds the bucket for a call, and how the call is padded or split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..calls.options import shown
from ..calls.signature import CallSignature
from ..calls.split import Args, Kwargs, flatten
from ..errors import OptionError
from ..graphs.memory import MemoryPool
from .buckets import PADDING, Buckets
from .dimensions import Dimensions
from .dynamic_signature import DynamicSignature
from .family import ShapeFamily
from .padding import PaddingPlan, Sizes

# About how many sizes of each dimension are tried for a bucket.
_SERVED_A_DIMENSION = 12
# Kinds of calls for which there are proofs.
MAX_FAMILIES = 64


@dataclass(frozen=True)
class Answer:
    """How a call is answered.

    Attributes:
        plan: how the call is padded; None if it has a bucket's own sizes.
        reason: why no bucket answers it, or None.
        category: of the reason, as statistics count it.
        above: the dimension in which it is above the largest bucket, if it is only one.
    """

    plan: PaddingPlan | None = None
    reason: str | None = None
    category: str = ""
    above: str | None = None


class BucketSelector:
    """Finds the bucket for each call of one function.

    Args:
        fn: the function or module.
        buckets: sizes to capture.
        dynamic_shapes: as for `graph()`.
        pad: as for `graph()`.
        split: as for `graph()`.
        pool: the memory that the graphs live in.

    Raises:
        OptionError: an option is invalid.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        buckets: Buckets,
        *,
        dynamic_shapes: Any,
        pad: Any,
        split: bool,
        pool: MemoryPool,
    ) -> None:
        if not isinstance(buckets, Buckets):
            raise OptionError(
                f"buckets is {shown(buckets)}, not a Buckets.",
                remedy="For example Buckets(batch=[1, 4, 16]).",
            )
        self.buckets = buckets
        self.split = split
        self.dimensions = Dimensions(fn, buckets.names, dynamic_shapes, pad)
        self._fn = fn
        self._pool = pool

    def family(
        self,
        families: list[ShapeFamily],
        signature: CallSignature,
        args: Args,
        kwargs: Kwargs,
        grad: bool | None,
    ) -> tuple[ShapeFamily | None, Sizes]:
        """The family of a call, found among known ones or added to them, and the call's sizes.

        Calls whose tensors have another order of dimensions in memory than a bucket's have none.

        Raises:
            SignatureError: the call does not have the dimensions.
        """
        leaves, _ = flatten(args, kwargs)
        for family in families:
            if family.grad is grad:
                sizes = family.signature.sizes(signature, leaves)
                if sizes is not None:
                    return family, sizes
        dynamic_signature = DynamicSignature(self.dimensions, signature, args, kwargs)
        if not dynamic_signature.in_order(leaves):
            return None, dynamic_signature.own
        family = ShapeFamily(self._fn, dynamic_signature, args, kwargs, pool=self._pool, grad=grad)
        if len(families) >= MAX_FAMILIES:
            del families[0]
        families.append(family)
        return family, dynamic_signature.own

    def answer(self, family: ShapeFamily, sizes: Sizes) -> Answer:
        """How a call of a family is answered; makes the proofs that this needs."""
        bounds = self.dimensions.bounds
        for name, n in zip(self.dimensions.names, sizes, strict=True):
            if not bounds[name].hold(n):
                reason = f"{name}={n} is outside of the bounds that dynamic_shapes declares"
                return Answer(reason=reason, category="outside the declared bounds")
        if sizes in self.buckets.points:
            return Answer()
        exact: set[str] = set()
        refusal: str | None = None
        while (bucket := next(self.buckets.holding(sizes, exact), None)) is not None:
            found = family.plan(sizes, bucket)
            if isinstance(found, PaddingPlan):
                return Answer(found)
            refusal = refusal or found
            culprits = family.culprits(sizes, bucket)
            if culprits <= exact:
                break
            exact |= culprits
        if refusal is not None:
            return Answer(reason=refusal, category=PADDING)
        largest = self.buckets.largest
        above = [
            name for name, n in zip(self.dimensions.names, sizes, strict=True) if n > largest[name]
        ]
        what = " and ".join(above) or "its sizes together"
        reason = f"{what} above the largest bucket ({self.words(sizes)})"
        return Answer(
            reason=reason,
            category="above the largest bucket",
            above=above[0] if len(above) == 1 else None,
        )

    def chunks(
        self, family: ShapeFamily, sizes: Sizes, name: str
    ) -> tuple[list[int], list[int | None]] | str:
        """Sizes of a call's chunks along one dimension, and how results are joined; or why not."""
        place = self.dimensions.names.index(name)
        chunk = self.buckets.largest[name]
        whole, rest = divmod(sizes[place], chunk)
        parts = [chunk] * whole + [rest] * (rest > 0)
        joints = family.chunk_joints(name, parts, sizes)
        return joints if isinstance(joints, str) else (parts, joints)

    def served(self, bucket: Sizes) -> Iterator[Sizes]:
        """Sizes of calls that are padded to a bucket; a selection if there are many."""
        axes = []
        for place, (name, full) in enumerate(zip(self.dimensions.names, bucket, strict=True)):
            low = self.dimensions.bounds[name].low
            below = {point[place] for point in self.buckets.points if point[place] < full}
            # Just above each smaller bucket, in between, and at both ends.
            step = max(1, (full - low) // _SERVED_A_DIMENSION)
            chosen = {low, full, *range(low, full, step), *(n + 1 for n in below), full - 1}
            axes.append(sorted(n for n in chosen if low <= n <= full))
        for sizes in itertools.product(*axes):
            if sizes != bucket and self.buckets.smallest(sizes) == bucket:
                yield sizes

    def between(self, most: int) -> Iterator[Sizes]:
        """Sizes that are padded to a bucket: all of them, or those of `served` if too many."""
        ranges = [
            range(self.dimensions.bounds[name].low, self.buckets.largest[name] + 1)
            for name in self.dimensions.names
        ]
        points = self.buckets.points
        if math.prod(map(len, ranges)) > most:
            yield from itertools.chain.from_iterable(map(self.served, points))
        else:
            yield from (sizes for sizes in itertools.product(*ranges) if sizes not in points)

    def words(self, sizes: Sequence[int]) -> str:
        """Sizes with their names, as text."""
        pairs = zip(self.dimensions.names, sizes, strict=True)
        return ", ".join(f"{name}={n}" for name, n in pairs)
