"""Buckets: the sizes for which graphs are captured, and to which the sizes of calls are padded."""

from __future__ import annotations

import itertools
import keyword
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ge, index
from typing import Any, TypeAlias

from ..calls.options import in_brief
from ..errors import OptionError
from .optimal_buckets import Point, nestings

# Why a call is eager that a bucket holds; as errors, warnings and statistics say it.
PADDING = "padding is not harmless"

_EXAMPLE = "Buckets(batch=[1, 4, 16])"


@dataclass(frozen=True)
class SizesSeen:
    """Sizes of dynamic dimensions, and how many calls had them.

    Attributes:
        names: names of the dimensions, such as ("batch", "length").
        counts: calls by their size in each dimension, in the order of the names.
    """

    names: tuple[str, ...]
    counts: Mapping[Point, int]


Observed: TypeAlias = SizesSeen | Mapping[int, int] | Iterable[int] | Iterable[Mapping[str, int]]


@dataclass(frozen=True, init=False, repr=False)
class Buckets:
    """Sizes of dynamic dimensions for which graphs are captured: `Buckets(batch=[1, 4, 16])`.

    With several dimensions there is a bucket for each combination of the sizes; `from_points`
    takes any set of them. Buckets are immutable and compare by value.

    Args:
        sizes: for each dimension, by its name, sizes of at least 1; duplicates are merged.

    Attributes:
        names: names of the dimensions.
        points: one size in each dimension for each bucket, by their volume (the product of the
            sizes), then by the sizes.

    Raises:
        OptionError: there are no dimensions, or one has no sizes or something else than sizes.
    """

    names: tuple[str, ...]
    points: tuple[Point, ...]

    def __init__(self, /, **sizes: Iterable[int]) -> None:
        axes = {name: _items(values) for name, values in sizes.items()}
        problems = [] if axes else ["There are no dimensions"]
        for name, values in axes.items():
            if values is None:
                problems.append(f"{name}={_item(sizes[name])} is not a list of sizes")
            elif not values:
                problems.append(f"{name} has no sizes")
            elif wrong := _wrong(values):
                problems.append(f"{name} has {wrong}")
        _refuse(problems, f"Give each dimension whole numbers of at least 1: {_EXAMPLE}.")
        self._set(axes, itertools.product(*(values or () for values in axes.values())))

    @classmethod
    def powers_of_two(cls, /, **ranges: tuple[int, int]) -> Buckets:
        """The powers of two between two sizes, and the two: `powers_of_two(batch=(3, 20))`.

        That example has 3, 4, 8, 16 and 20. Several dimensions are combined as by `Buckets`.

        Args:
            ranges: the smallest and the largest size of each dimension, by its name.

        Raises:
            OptionError: there are no dimensions, or a range is no pair of sizes in order.
        """
        problems = [] if ranges else ["There are no dimensions"]
        axes: dict[str, list[int]] = {}
        for name, ends in ranges.items():
            pair = _items(ends)
            if pair is None or len(pair) != 2 or _wrong(pair) or pair[0] > pair[1]:
                problems.append(f"{name}={_item(ends)} is not a range of sizes")
                continue
            low, high = map(index, pair)
            powers = (1 << n for n in range(low.bit_length(), high.bit_length()))
            axes[name] = [low, *powers, high]
        _refuse(
            problems,
            "Give each dimension its smallest and largest size, whole numbers of at least 1: "
            "Buckets.powers_of_two(batch=(1, 64)).",
        )
        return cls(**axes)

    @classmethod
    def from_points(cls, names: Iterable[str], points: Iterable[Sequence[int]]) -> Buckets:
        """Any set of buckets, not necessarily every combination of their sizes.

        Args:
            names: names of the dimensions.
            points: for each bucket its size in each dimension; duplicates are merged.

        Raises:
            OptionError: the names are no distinct texts, there are no points, or one has not one
                size for each name.
        """
        called, listed = _items(names) or [], _items(points) or []
        problems = _no_names(names, called) or _no_points(called, listed)
        if not listed:
            problems.append("There are no points")
        _refuse(
            problems,
            "Give names, and points of one whole number of at least 1 for each name: "
            'Buckets.from_points(["batch", "length"], [(1, 64), (8, 16)]).',
        )
        made = cls.__new__(cls)
        made._set(called, listed)
        return made

    @classmethod
    def from_sizes(cls, observed: Observed, *, max_graphs: int = 8) -> Buckets:
        """The buckets, at most so many, that waste the least on sizes like the observed ones.

        Each observed size is held by a bucket. There are fewer buckets than allowed when more
        would not lower the waste.

        In one dimension no other choice of as many buckets wastes less: the least padding is found
        by dynamic programming over the distinct sizes (Bellman, "On the approximation of curves by
        line segments using dynamic programming", CACM 4(6), 1961). In several dimensions the choice
        is the best among nested buckets: one dimension is divided into intervals, and each interval
        has its own buckets in the other dimensions, which are divided in turn; a size is padded to
        the end of its interval. Every order of the dimensions and every division of the graphs is
        covered. All combinations of some sizes of each dimension are such buckets, so none that
        holds what was observed wastes less with as many. The result can waste less than
        computed, as each size takes the smallest bucket that holds it, in whichever interval.

        The time grows with the number of graphs and with the square of the number of distinct sizes
        of each dimension.

        Args:
            observed: sizes that calls had: `SizesSeen`; or whole numbers, or how often each
                occurred, then the dimension is named "batch"; or a size by name for each call.
            max_graphs: how many buckets there may be.

        Raises:
            OptionError: nothing was observed, what was observed are no sizes of the same
                dimensions, max_graphs is below 1, or the sizes times their counts overflow int64.
        """
        if (graphs := _size(max_graphs)) is None:
            raise OptionError(
                f"max_graphs={_item(max_graphs)} is not a number of graphs.",
                remedy="Give a whole number of at least 1.",
            )
        seen = _seen(observed)
        if graphs >= len(seen.counts):
            return cls.from_points(seen.names, list(seen.counts))
        choices = [cls.from_points(seen.names, points) for points in nestings(seen.counts, graphs)]
        return min(choices, key=lambda made: (made._volumes(seen.counts)[1], len(made.points)))

    def waste(self, observed: Observed) -> float:
        """Share of the computed elements that are padding, from 0 to below 1.

        Each size is padded to the smallest bucket that holds it; a size's elements are the product
        of its dimensions. Sizes that no bucket holds are left out; if none is held, the share is 0.

        Args:
            observed: as for `from_sizes`; plain numbers are sizes of the only dimension.

        Raises:
            OptionError: as for `from_sizes`, or the dimensions are not those of the buckets.
        """
        seen = _seen(observed, self.names[0] if len(self.names) == 1 else "batch")
        if sorted(seen.names) != sorted(self.names):
            raise OptionError(
                f"The observed sizes are of {_list(seen.names)}, the buckets of "
                f"{_list(self.names)}.",
                remedy="Give a size for each dimension of the buckets, under its name.",
            )
        order = [seen.names.index(name) for name in self.names]
        own = Counter({tuple(sizes[d] for d in order): n for sizes, n in seen.counts.items()})
        true, computed = self._volumes(own)
        return (computed - true) / computed if computed else 0.0

    def holding(self, sizes: Sequence[int], exact: Collection[str] = ()) -> Iterator[Point]:
        """The points that hold the sizes, the smallest volume first.

        Args:
            sizes: a size for each dimension, in the order of the names.
            exact: names of dimensions in which a point has to have the very size.

        Raises:
            OptionError: there is not one size for each dimension, or a name is unknown.
        """
        if len(sizes) != len(self.names) or not set(exact) <= set(self.names):
            raise OptionError(
                f"The sizes {tuple(sizes)}, exact in {_list(exact)}, do not fit the dimensions "
                f"{_list(self.names)}.",
                remedy="Give one size for each dimension, and no other names.",
            )
        fixed = [d for d, name in enumerate(self.names) if name in exact]
        return (
            point
            for point in self.points
            if all(map(ge, point, sizes)) and all(point[d] == sizes[d] for d in fixed)
        )

    def smallest(self, sizes: Sequence[int]) -> Point | None:
        """The point of the smallest volume that holds the sizes; None if there is none.

        Args:
            sizes: a size for each dimension, in the order of the names.

        Raises:
            OptionError: there is not one size for each dimension.
        """
        return next(self.holding(sizes), None)

    @property
    def largest(self) -> dict[str, int]:
        """The largest size in each dimension; no bucket need have all of them."""
        return {name: sizes[-1] for name, sizes in self._axes().items()}

    def __repr__(self) -> str:
        axes = self._axes()
        product = math.prod(map(len, axes.values())) == len(self.points)
        if product and all(n.isidentifier() and not keyword.iskeyword(n) for n in self.names):
            return f"Buckets({', '.join(f'{name}={sizes}' for name, sizes in axes.items())})"
        return f"Buckets.from_points({list(self.names)}, {list(self.points)})"

    def _set(self, names: Iterable[str], points: Iterable[Sequence[int]]) -> None:
        unique = {tuple(map(index, point)) for point in points}
        ordered = sorted(unique, key=lambda point: (math.prod(point), point))
        object.__setattr__(self, "names", tuple(names))
        object.__setattr__(self, "points", tuple(ordered))

    def _axes(self) -> dict[str, list[int]]:
        columns = zip(*self.points, strict=True)
        return {name: sorted(set(sizes)) for name, sizes in zip(self.names, columns, strict=True)}

    def _volumes(self, counts: Mapping[Point, int]) -> tuple[int, int]:
        """Elements of the sizes that a bucket holds, before and after padding."""
        true = computed = 0
        for sizes, count in counts.items():
            if bucket := self.smallest(sizes):
                true += count * math.prod(sizes)
                computed += count * math.prod(bucket)
        return true, computed


def _seen(observed: Observed, only: str = "batch") -> SizesSeen:
    """The observed sizes in one form, checked; `only` names the dimension of plain numbers."""
    names: list[Any] = [only]
    points: list[Any]
    times: list[Any] | None = None
    if isinstance(observed, SizesSeen):
        names, points = list(observed.names), list(observed.counts)
        times = list(observed.counts.values())
    elif isinstance(observed, Mapping):
        points, times = [(size,) for size in observed], list(observed.values())
    else:
        calls = _items(observed) or []
        named = next((call for call in calls if isinstance(call, Mapping)), None)
        if named is None:
            points = [(size,) for size in calls]
        else:
            names = list(named)
            points = [_in_order(call, names) for call in calls]
    times = [1] * len(points) if times is None else times
    problems = _no_names(names, names) or _no_points(names, points)
    if not points:
        problems.append("No sizes were observed")
    if wrong := _wrong(times):
        problems.append(f"The counts have {wrong}")
    _refuse(
        problems,
        "Give whole numbers of at least 1: sizes, counts by size, a size by name for each call, "
        "or SizesSeen.",
    )
    counts: Counter[Point] = Counter()
    for point, count in zip(points, times, strict=True):
        counts[tuple(map(index, point))] += index(count)
    return SizesSeen(tuple(names), counts)


def _in_order(call: Any, names: list[Any]) -> Any:
    """A call's sizes in the order of the names; what is no such call is left for the error."""
    same = isinstance(call, Mapping) and call.keys() == set(names)
    return tuple(call[name] for name in names) if same else call


def _size(value: Any) -> int | None:
    """A whole number of at least 1, numpy's and torch's included; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        size = index(value)
    except TypeError:
        return None
    return size if size >= 1 else None


def _items(values: Any) -> list[Any] | None:
    """What is in a list, a set, a tensor and the like; None for anything else."""
    if isinstance(values, str | bytes | Mapping):
        return None
    try:
        items = iter(values)
    except TypeError:
        return None
    return list(items)


def _wrong(values: Iterable[Any]) -> str:
    """The values that are no sizes, for an error; empty if there is none."""
    return _few([value for value in values if _size(value) is None])


def _few(values: list[Any]) -> str:
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return ", ".join(map(_item, values[:3])) + more


def _item(value: Any) -> str:
    """One of several values in an error, as it is written if that is short."""
    text = repr(value)
    return in_brief(value) if len(text) > 60 or " at 0x" in text else text


def _no_names(given: object, names: list[Any]) -> list[str]:
    """What is wrong with the names of dimensions."""
    texts = all(isinstance(name, str) and name for name in names)
    good = texts and names and len(set(names)) == len(names)
    return [] if good else [f"The names {_item(given)} are not distinct texts"]


def _no_points(names: list[str], points: list[Any]) -> list[str]:
    """What is wrong with points that have not one size for each name."""
    wrong = []
    for point in points:
        sizes = _items(point)
        if sizes is None or len(sizes) != len(names) or not all(map(_size, sizes)):
            wrong.append(point[0] if sizes is not None and len(sizes) == len(names) == 1 else point)
    return [f"{_few(wrong)}: no sizes of {_list(names)}"] if wrong else []


def _refuse(problems: list[str], remedy: str) -> None:
    if problems:
        raise OptionError("; ".join(problems) + ".", remedy=remedy)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
