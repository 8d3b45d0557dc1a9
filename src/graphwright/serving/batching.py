"""Which requests are computed next, together: a choice by measured time, not by a fixed wait.

A model that is idle computes what is there at once. While it computes, requests gather; of all
sizes that it could compute next, it takes the one that does the most work a second, measured by
what the requests would take in the best batches of their own size. The request that has waited
longest, or whose deadline is near, is always among them. Deadlines pass the request that has waited
longest only a few times in a row, so that none waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..shapes.padding import Sizes

# How many waiting requests are looked at for one batch.
_LOOKED_AT = 1024
# How often in a row requests whose deadlines are near may pass the oldest.
_PASSED = 3
# For how many sizes is remembered what was found.
_REMEMBERED = 1 << 14

_Found = TypeVar("_Found")


class Waiting(Protocol):
    """A request that waits."""

    @property
    def sizes(self) -> Sizes:
        """Its named sizes; the first is its number of rows."""

    @property
    def key(self) -> tuple[bytes, ...]:
        """Only requests with equal keys may be joined."""

    @property
    def deadline(self) -> float | None:
        """Until when it has to be answered, on the clock of `time.monotonic`."""


@dataclass(frozen=True)
class Timings:
    """How long a model takes, by the named sizes of a call; the first is the number of rows.

    Attributes:
        seconds: for each size that was measured.
        exact: whether only these sizes are computed; else any size below them, too.
        pads: whether requests may be padded in other dimensions than the rows.
    """

    seconds: Mapping[Sizes, float]
    exact: bool
    pads: bool = True
    _points: dict[Sizes, list[Sizes]] = field(default_factory=dict, init=False, repr=False)
    _shares: dict[Sizes, float] = field(default_factory=dict, init=False, repr=False)
    _measured: dict[Sizes, Sizes | None] = field(default_factory=dict, init=False, repr=False)

    def points_for(self, sizes: Sizes) -> Sequence[Sizes]:
        """The measured sizes that hold these."""
        known = self._points.get(sizes)
        if known is None:
            known = [point for point in self.seconds if _holds(point, sizes)]
            if self.exact and not self.pads:
                known = [point for point in known if point[1:] == sizes[1:]]
            _remember(self._points, sizes, known)
        return known

    def share(self, sizes: Sizes) -> float:
        """The seconds that a request costs in the best batch of its own sizes."""
        known = self._shares.get(sizes)
        if known is None:
            found = (self.seconds[p] / p[0] * sizes[0] for p in self.points_for(sizes))
            known = min(found, default=max(self.seconds.values(), default=0.0))
            _remember(self._shares, sizes, known)
        return known

    def sizes_alone(self, sizes: Sizes) -> Sizes:
        """The sizes at which a request is computed by itself."""
        points = self.points_for(sizes) if self.exact else []
        return min(points, key=self.seconds.__getitem__, default=sizes)

    def most_rows(self, sizes: Sequence[int]) -> int:
        """The most rows of a call whose other sizes are these, without the batch; 0 if none is."""
        return max((point[0] for point in self.points_for((1, *sizes))), default=0)

    def measured(self, sizes: Sizes) -> Sizes | None:
        """The smallest size that was measured and holds these; None if none does."""
        if sizes not in self._measured:
            points = [point for point in self.seconds if _holds(point, sizes)]
            _remember(self._measured, sizes, min(points, key=math.prod, default=None))
        return self._measured[sizes]

    def alone(self, sizes: Sizes) -> float:
        """The seconds that a request takes by itself."""
        found = (self.seconds[point] for point in self.points_for(sizes))
        return min(found, default=max(self.seconds.values(), default=0.0))


@dataclass(frozen=True)
class Choice:
    """A batch: which of the waiting requests, and the named sizes at which they are computed."""

    members: tuple[int, ...]
    sizes: Sizes


def choose(waiting: Sequence[Waiting], timings: Timings, now: float, *, passed: int = 0) -> Choice:
    """The next batch.

    Args:
        waiting: at least one request, the oldest first.
        timings: of the model.
        now: on the clock of `time.monotonic`.
        passed: how many choices before this one, in a row, left the oldest request out.
    """
    if len(waiting) == 1:
        return Choice((0,), timings.sizes_alone(waiting[0].sizes))
    looked_at = waiting[:_LOOKED_AT]
    first = _most_urgent(looked_at, timings, now) if passed < _PASSED else 0
    anchor = looked_at[first]
    points = timings.points_for(anchor.sizes)
    if not points:  # Larger than all that was measured: by itself, as it is.
        return Choice((first,), anchor.sizes)
    if anchor.deadline is not None:
        points = _in_time(points, timings, anchor.deadline - now)
    groups = _groups(looked_at, first, timings)
    if not timings.pads:
        groups = [group for group in groups if group[1][1:] == anchor.sizes[1:]]
    best, most = [first], -1.0
    at = points[0]
    for point in points:
        members, work = _filled(point, first, anchor, groups, timings)
        if work > most * (1 + 1e-9) or (
            work >= most and timings.seconds[point] < timings.seconds[at]
        ):
            best, most, at = members, work, point
    best.sort()
    if not timings.exact:
        at = _sizes_of([looked_at[index] for index in best])
    return Choice(tuple(best), at)


def _in_time(points: Sequence[Sizes], timings: Timings, left_s: float) -> Sequence[Sizes]:
    """The points that take no longer than the time that is left; if all do, the fastest one."""
    found = [point for point in points if timings.seconds[point] <= left_s]
    return found or [min(points, key=timings.seconds.__getitem__)]


def _most_urgent(waiting: Sequence[Waiting], timings: Timings, now: float) -> int:
    """The oldest request, or one that the next batch would make late."""
    dated = [i for i, each in enumerate(waiting) if each.deadline is not None]
    if dated:
        index = min(dated, key=lambda i: waiting[i].deadline or 0.0)
        urgent = waiting[index]
        longest = max(timings.seconds.values(), default=0.0)
        assert urgent.deadline is not None
        if urgent.deadline - now < longest + timings.alone(urgent.sizes):
            return index
    return 0


def _groups(
    waiting: Sequence[Waiting], first: int, timings: Timings
) -> list[tuple[float, Sizes, list[int]]]:
    """The requests that may join the first one, by their sizes; first what costs most a row.

    Of what costs the same, the oldest come first: else some sizes would wait behind all others.
    """
    found: dict[object, tuple[Sizes, list[int]]] = {}
    key = waiting[first].key
    for index, each in enumerate(waiting):
        if index == first or each.key != key:
            continue
        # What is padded to the same sizes is one group.
        kind: object = each.sizes
        if timings.exact and timings.pads:
            kind = each.sizes[0], tuple(timings.points_for(each.sizes))
        found.setdefault(kind, (each.sizes, []))[1].append(index)
    listed = [(timings.share(sizes), sizes, members) for sizes, members in found.values()]
    return sorted(listed, key=lambda entry: (-entry[0] / entry[1][0], entry[2][0]))


def _filled(
    point: Sizes,
    first: int,
    anchor: Waiting,
    groups: Iterable[tuple[float, Sizes, list[int]]],
    timings: Timings,
) -> tuple[list[int], float]:
    """What is computed at a size, and how much work that is for each second that it takes."""
    members, room, work = [first], point[0] - anchor.sizes[0], timings.share(anchor.sizes)
    for share, sizes, indices in groups:
        if sizes[0] > room or not _holds(point[1:], sizes[1:]):
            continue
        count = min(len(indices), room // sizes[0])
        members += indices[:count]
        room -= count * sizes[0]
        work += count * share
        if not room:
            break
    return members, work / timings.seconds[point]


def _sizes_of(members: Sequence[Waiting]) -> Sizes:
    """The smallest sizes that hold them all."""
    rows = sum(each.sizes[0] for each in members)
    others = zip(*(each.sizes[1:] for each in members), strict=True)
    return (rows, *(max(column) for column in others))


def _remember(known: dict[Sizes, _Found], sizes: Sizes, found: _Found) -> None:
    """Keep what was found for sizes, of which clients may ask for any."""
    if len(known) >= _REMEMBERED:
        known.clear()
    known[sizes] = found


def _holds(point: Sizes, sizes: Sizes) -> bool:
    return all(n <= m for n, m in zip(sizes, point, strict=True))
