"""Which bucket answers a call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..calls.signature import Args, CallSignature, Kwargs, flatten
from ..errors import OptionError
from ..graphs.memory import MemoryPool
from .buckets import PADDING, Buckets
from .dimensions import Dimensions
from .dynamic_signature import DynamicSignature
from .family import ShapeFamily
from .padding import PaddingPlan, Sizes

_SERVED_A_DIMENSION = 12
_MAX_KINDS = 64


@dataclass(frozen=True)
class Answer:
    """How a call is answered.

    Attributes:
        plan: how it is filled up; None where it is a bucket's size as it is.
        reason: why no bucket answers it, or None.
        kind: what kind of reason that is.
        above: the dimension in which it is above the largest bucket, if it is one alone.
    """

    plan: PaddingPlan | None = None
    reason: str | None = None
    kind: str = ""
    above: str | None = None


class BucketSelector:
    """The buckets of one function, and its kinds of calls.

    Args:
        fn: the function or module.
        buckets: sizes to capture.
        dynamic_shapes: as for `graph()`.
        pad: likewise.
        split: likewise.
        pool: the memory that the graphs live in.

    Raises:
        OptionError: an option makes no sense.
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
                f"buckets is a Buckets, not {buckets!r}.",
                remedy="For example Buckets(batch=[1, 4, 16]).",
            )
        self.buckets = buckets
        self.split = split
        self.dimensions = Dimensions(fn, buckets.names, dynamic_shapes, pad)
        self._fn = fn
        self._pool = pool

    def kind(
        self,
        kinds: list[ShapeFamily],
        signature: CallSignature,
        args: Args,
        kwargs: Kwargs,
        grad: bool | None,
    ) -> tuple[ShapeFamily | None, Sizes]:
        """The kind of a call, found among those of a state or added to them, and its sizes.

        There is no kind of calls whose tensors lie in memory in another order than a bucket's.

        Raises:
            SignatureError: the call does not have the dimensions.
        """
        leaves, _ = flatten(args, kwargs)
        for kind in kinds:
            if kind.grad is grad:
                sizes = kind.form.sizes(signature, leaves)
                if sizes is not None:
                    return kind, sizes
        form = DynamicSignature(self.dimensions, signature, args, kwargs)
        if not form.in_order(leaves):
            return None, form.own
        kind = ShapeFamily(self._fn, form, args, kwargs, pool=self._pool, grad=grad)
        if len(kinds) >= _MAX_KINDS:
            del kinds[0]
        kinds.append(kind)
        return kind, form.own

    def answer(self, kind: ShapeFamily, sizes: Sizes) -> Answer:
        """How a call of a kind is answered; proofs that this needs are made."""
        bounds = self.dimensions.bounds
        for name, n in zip(self.dimensions.names, sizes, strict=True):
            if not bounds[name].hold(n):
                reason = f"{name}={n} is outside of the bounds that dynamic_shapes declares"
                return Answer(reason=reason, kind="outside the declared bounds")
        if sizes in self.buckets.points:
            return Answer()
        exact: set[str] = set()
        told: str | None = None
        while (bucket := next(self.buckets.holding(sizes, exact), None)) is not None:
            found = kind.plan(sizes, bucket)
            if isinstance(found, PaddingPlan):
                return Answer(found)
            told = told or found
            culprits = kind.culprits(sizes, bucket)
            if culprits <= exact:
                break
            exact |= culprits
        if told is not None:
            return Answer(reason=told, kind=PADDING)
        largest = self.buckets.largest
        above = [
            name for name, n in zip(self.dimensions.names, sizes, strict=True) if n > largest[name]
        ]
        what = " and ".join(above) or "its sizes together"
        reason = f"{what} above the largest bucket ({self.words(sizes)})"
        return Answer(
            reason=reason,
            kind="above the largest bucket",
            above=above[0] if len(above) == 1 else None,
        )

    def chunks(
        self, kind: ShapeFamily, sizes: Sizes, name: str
    ) -> tuple[list[int], list[int | None]] | str:
        """Sizes of the chunks along one dimension, and how outputs are joined; or why not."""
        place = self.dimensions.names.index(name)
        chunk = self.buckets.largest[name]
        whole, rest = divmod(sizes[place], chunk)
        parts = [chunk] * whole + [rest] * (rest > 0)
        joints = kind.rows_apart(name, parts, sizes)
        return joints if isinstance(joints, str) else (parts, joints)

    def served(self, bucket: Sizes) -> Iterator[Sizes]:
        """Sizes of calls that a bucket answers, itself excepted; where they are many, some."""
        axes = []
        for place, (name, full) in enumerate(zip(self.dimensions.names, bucket, strict=True)):
            low = self.dimensions.bounds[name].low
            below = {point[place] for point in self.buckets.points if point[place] < full}
            # Right above each bucket that is smaller, in between, and at the ends.
            step = max(1, (full - low) // _SERVED_A_DIMENSION)
            chosen = {low, full, *range(low, full, step), *(n + 1 for n in below), full - 1}
            axes.append(sorted(n for n in chosen if low <= n <= full))
        for sizes in itertools.product(*axes):
            if sizes != bucket and self.buckets.smallest(sizes) == bucket:
                yield sizes

    def between(self, most: int) -> Iterator[Sizes]:
        """Sizes that buckets may answer, their own excepted: all, or those `served` if too many."""
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
        """Sizes with their names."""
        pairs = zip(self.dimensions.names, sizes, strict=True)
        return ", ".join(f"{name}={n}" for name, n in pairs)
