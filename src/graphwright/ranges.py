"""Calls that differ in sizes alone: what was built for a range of sizes answers all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .signature import Args, CallSignature, Kwargs, inside_transform


@dataclass(frozen=True)
class Range:
    """The sizes that one dimension may have; dimensions of one name have the same one.

    Attributes:
        leaf: which of a call's leaves.
        axis: which dimension of it.
        name: of the dimension.
        low: smallest size.
        high: largest size.
    """

    leaf: int
    axis: int
    name: str
    low: int
    high: int


@dataclass(frozen=True)
class RangedSignature:
    """What calls must share but for the sizes of some dimensions.

    Their tensors are contiguous, as the sample's were.
    """

    base: CallSignature
    ranges: tuple[Range, ...]

    @property
    def wants_grad(self) -> bool:
        """Whether any tensor of the call requires grad."""
        return self.base.wants_grad

    def fits(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call is answered by what was built for the range."""
        return self.differences(args, kwargs) is None

    def differences(self, args: Args, kwargs: Kwargs) -> str | None:
        """Why a call does not fit, in words, or None when it fits."""
        plain = self.base.differences(args, kwargs)
        if plain is None or inside_transform():
            return plain
        try:
            other = CallSignature.of(args, kwargs)
        except Exception:
            return plain
        base = self.base
        same = (other.spec, other.aliases, other.switches)
        if same != (base.spec, base.aliases, base.switches):
            return plain
        sizes: dict[str, int] = {}
        for index, (mine, theirs) in enumerate(zip(base.leaves, other.leaves, strict=True)):
            own = [each for each in self.ranges if each.leaf == index]
            if not own:
                if mine != theirs:
                    return plain
                continue
            shape, *kind = theirs
            if len(theirs) != 5 or len(shape) != len(mine[0]):
                return plain
            expected = list(mine[0])
            for each in own:
                n = expected[each.axis] = shape[each.axis]
                if not each.low <= n <= each.high:
                    return f"{each.name} is {n}; what was built answers {each.low} to {each.high}"
                if sizes.setdefault(each.name, n) != n:
                    return f"{each.name} is both {sizes[each.name]} and {n}"
            known = [mine[1], _contiguous(expected), *mine[3:]]
            if list(shape) != expected or kind[:1] + kind[2:] != known[:1] + known[2:]:
                return plain
            if _odd(expected, kind[1], known[1]):
                return plain
        return None


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _odd(shape: Sequence[int], strides: Any, expected: Sequence[int]) -> bool:
    """Whether strides differ where they matter."""
    steps = zip(shape, strides, expected, strict=True)
    return any(size > 1 and mine != theirs for size, mine, theirs in steps)
