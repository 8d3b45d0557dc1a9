"""Which arguments and outputs of a call are the same tensor, or share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .dimensions import Axes


def twins_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf, the index of the first leaf that is the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), index) if isinstance(leaf, torch.Tensor) else index
        for index, leaf in enumerate(leaves)
    )


# For each output, the argument that it is, and the first tensor in its memory; or None.
Pattern = tuple[tuple[int | None, int | None], ...]


def shares_alike(a: Pattern, b: Pattern, arguments: int) -> bool:
    """Whether the outputs of two runs share memory in the same way; empty outputs are ignored."""
    both = [index for index, pair in enumerate(zip(a, b, strict=True)) if None not in _memory(pair)]
    for place, index in enumerate(both):
        if a[index][0] != b[index][0]:
            return False
        mine, theirs = _memory((a[index], b[index]))
        if min(mine, theirs) < arguments and mine != theirs:
            return False
        for other in both[:place]:
            if (a[other][1] == mine) != (b[other][1] == theirs):
                return False
    return True


def _memory(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    return pair[0][1], pair[1][1]


def pattern_of(result: Any, leaves: Sequence[Any]) -> Pattern:
    """For each output, the argument that it is, and the first argument or output in its memory.

    Arguments are numbered from 0, outputs after them.
    """
    by_identity = {id(v): slot for slot, v in reversed(list(enumerate(leaves))) if _holds(v)}
    first: dict[int, int] = {}
    for slot, leaf in enumerate(leaves):
        if _holds(leaf):
            first.setdefault(_address(leaf), slot)
    found: list[tuple[int | None, int | None]] = []
    for index, output in enumerate(pytree.tree_leaves(result), len(leaves)):
        if _holds(output):
            memory = first.setdefault(_address(output), index)
            found.append((by_identity.get(id(output)), memory))
        else:
            found.append((None, None))
    return tuple(found)


def _holds(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


@dataclass(frozen=True)
class Sharing:
    """What the outputs of a call share with its arguments and with each other.

    Attributes:
        pattern: as of `pattern_of`.
        arguments: outputs that are arguments with dynamic dimensions.
        views: outputs that are views of such an argument, each with that argument.
        shared: other outputs that share memory without being the same tensor.
    """

    pattern: Pattern
    arguments: frozenset[int]
    views: tuple[tuple[int, int], ...]
    shared: frozenset[int]

    @classmethod
    def of(cls, result: Any, leaves: Sequence[Any], axes: Sequence[Axes]) -> Sharing:
        """Look at what a call returned.

        Args:
            result: what it returned.
            leaves: of its arguments, as the function got them.
            axes: their dynamic dimensions.
        """
        varying = [slot for slot, own in enumerate(axes) if own]
        by_identity = {id(leaves[slot]) for slot in varying}
        by_memory = {_address(leaves[slot]): slot for slot in varying}
        arguments: set[int] = set()
        views: list[tuple[int, int]] = []
        shared: set[int] = set()
        owners: dict[int, tuple[int, int]] = {}
        met: set[int] = set()
        for index, output in enumerate(pytree.tree_leaves(result)):
            if not _holds(output):
                continue
            memory, identity = _address(output), id(output)
            if identity in by_identity:
                arguments.add(index)
            elif memory in by_memory:
                views.append((index, by_memory[memory]))
            else:
                first, other = owners.setdefault(memory, (index, identity))
                if other != identity and identity not in met:
                    shared |= {first, index}
                met.add(identity)
        pattern = pattern_of(result, leaves)
        return cls(pattern, frozenset(arguments), tuple(views), frozenset(shared))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
