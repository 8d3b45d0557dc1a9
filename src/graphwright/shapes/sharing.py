"""Which tensors of a call are one, or share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .dimensions import Axes


def twins_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf the first one that is the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), index) if isinstance(leaf, torch.Tensor) else index
        for index, leaf in enumerate(leaves)
    )


# For each output the argument that it is, and the first tensor in its memory; None for none.
Pattern = tuple[tuple[int | None, int | None], ...]


def shares_alike(a: Pattern, b: Pattern, arguments: int) -> bool:
    """Whether the outputs of two runs share memory in the same way, those that are empty aside."""
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
    """For each output the argument that it is, and the first argument or output in its memory.

    Arguments count from 0, outputs after them.
    """
    by_identity = {id(v): slot for slot, v in reversed(list(enumerate(leaves))) if _holds(v)}
    first: dict[int, int] = {}
    for slot, leaf in enumerate(leaves):
        if _holds(leaf):
            first.setdefault(leaf.untyped_storage().data_ptr(), slot)
    found: list[tuple[int | None, int | None]] = []
    for index, output in enumerate(pytree.tree_leaves(result), len(leaves)):
        if _holds(output):
            memory = first.setdefault(output.untyped_storage().data_ptr(), index)
            found.append((by_identity.get(id(output)), memory))
        else:
            found.append((None, None))
    return tuple(found)


def _holds(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def aliases_of(
    outputs: Sequence[Any],
    names: Sequence[str],
    leaves: Sequence[Any],
    arguments: Sequence[str],
    axes: Sequence[Axes],
) -> tuple[list[int], str | None]:
    """Outputs that share memory with others, and what forbids cuts."""
    by_identity = {
        id(leaf): slot for slot, (leaf, own) in enumerate(zip(leaves, axes, strict=True)) if own
    }
    by_memory = {leaves[slot].untyped_storage().data_ptr(): slot for slot in by_identity.values()}
    owners: dict[int, tuple[int, int]] = {}
    shared: set[int] = set()
    met: set[int] = set()
    for index, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or not output.numel():
            continue
        memory = output.untyped_storage().data_ptr()
        if id(output) in by_identity:
            continue
        if memory in by_memory:
            reason = f"{names[index]} is a view of the argument {arguments[by_memory[memory]]}"
            return [], reason
        first, identity = owners.setdefault(memory, (index, id(output)))
        if identity != id(output) and id(output) not in met:
            shared |= {first, index}
        met.add(id(output))
    return sorted(shared), None
