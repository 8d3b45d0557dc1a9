"""Find nested buckets that pad the least, by dynamic programming over the sizes that were seen.

One dimension is cut into intervals, and each interval has its own buckets of the other dimensions,
which are cut in turn. A size is padded to the end of its interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch

from ..errors import OptionError

_NEVER = 1 << 62  # more than any volume; a volume can be added to it within int64
_MOST = 1 << 61
_FLOATS = 1 << 53  # whole numbers up to here are exact in float64, several times as fast as int64

Point: TypeAlias = tuple[int, ...]


def nestings(seen: Mapping[Point, int], graphs: int) -> Iterator[list[Point]]:
    """For each order of the dimensions, the nested buckets that pad the least.

    Args:
        seen: calls by their size in each dimension.
        graphs: the most buckets that there may be.

    Raises:
        OptionError: the sizes times their counts overflow int64.
    """
    axes = [sorted(set(sizes)) for sizes in zip(*seen, strict=True)]
    most = sum(seen.values()) * math.prod(sizes[-1] for sizes in axes)
    if most >= _MOST:
        raise OptionError(
            "The observed sizes times their counts do not fit into 64 bits.",
            remedy="Divide all counts by the same number, or measure sizes in larger units.",
        )
    counts = _table(seen, axes, torch.float64 if most < _FLOATS else torch.int64)
    for order in itertools.permutations(range(len(axes))):
        cut = _cut(counts.permute(order), [axes[d] for d in order], graphs)
        yield [tuple(point[order.index(d)] for d in range(len(axes))) for point in cut]


def _table(counts: Mapping[Point, int], axes: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """How often each combination of the distinct sizes was seen."""
    places = [{size: place for place, size in enumerate(sizes)} for sizes in axes]
    # A default device is for the user's tensors.
    table = torch.zeros([len(sizes) for sizes in axes], dtype=dtype, device="cpu")
    for sizes, count in counts.items():
        table[tuple(place[size] for place, size in zip(places, sizes, strict=True))] = count
    return table


def _cut(counts: torch.Tensor, axes: list[list[int]], graphs: int) -> list[Point]:
    """The nested buckets that pad the least, and the fewest of those.

    Args:
        counts: calls by their place along each axis.
        axes: the distinct sizes of each dimension in ascending order, the outermost first.
        graphs: the most buckets that there may be.
    """
    if not axes:
        return [()]
    outer, *inner = axes
    counts = counts.unsqueeze(-1)
    before, best = _before(counts), _least(counts, axes, graphs).squeeze(-1)
    end, left = len(outer), int((best[-1] == best[-1, -1]).nonzero()[0])
    found: list[Point] = []
    while left:
        # Which interval ends here, and how many graphs it has, is found again from the volumes.
        if not counts[end - 1].any():
            end -= 1
            continue
        costs = _intervals(before, end, outer, inner, graphs).squeeze(-1)
        used = min(left, len(costs))
        rest = best[:end, left - used : left].flip(1).T
        its, start = (rest + costs[:used] == best[end, left]).nonzero()[0].tolist()
        within = (before[end] - before[start]).squeeze(-1)
        found += [(outer[end - 1], *point) for point in _cut(within, inner, its + 1)]
        end, left = start, left - its - 1
    return found


def _least(counts: torch.Tensor, axes: list[list[int]], graphs: int) -> torch.Tensor:
    """Least padded volume of the calls whose outer size is among the first so many.

    Args:
        counts: calls by their place along each axis; a last dimension has independent cases.
        axes: as for `_cut`.
        graphs: the most buckets that there may be.

    Returns:
        (sizes of the outer dimension + 1, buckets + 1, cases), for at most so many buckets.
    """
    outer, *inner = axes
    graphs = min(graphs, math.prod(map(len, axes)))
    before = _before(counts)
    empty = ~counts.flatten(1, -2).any(1) if inner else counts == 0
    best = counts.new_full((len(outer) + 1, graphs + 1, counts.shape[-1]), _NEVER)
    best[0] = 0
    for end in range(1, len(outer) + 1):
        for its, cost in enumerate(_intervals(before, end, outer, inner, graphs), 1):
            volumes = (best[:end, : graphs + 1 - its] + cost.unsqueeze(1)).amin(0)
            torch.minimum(best[end, its:], volumes, out=best[end, its:])
        # A size that never occurs needs no bucket.
        best[end] = torch.where(empty[end - 1], best[end - 1], best[end])
    return best


def _intervals(
    before: torch.Tensor, end: int, outer: list[int], inner: list[list[int]], graphs: int
) -> torch.Tensor:
    """Least padded volume of each interval of outer sizes with a given end.

    Returns:
        (buckets of the interval - 1, starts of the interval, cases)
    """
    counts = before[end] - before[:end]
    if inner:
        cases = counts.movedim(0, -2)
        best = _least(cases.flatten(-2), inner, graphs)[-1, 1:]
        volumes = best.view(len(best), *cases.shape[-2:])
    else:
        volumes = counts.unsqueeze(0)
    return volumes * outer[end - 1]


def _before(counts: torch.Tensor) -> torch.Tensor:
    """Calls at the places before each place of the first axis, and all of them last."""
    return torch.cat([torch.zeros_like(counts[:1]), counts.cumsum(0)])
