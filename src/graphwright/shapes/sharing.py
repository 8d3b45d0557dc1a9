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


def sharing_of(result: Any) -> list[int]:
    """For each output the first one that shares its memory."""
    first: dict[int, int] = {}
    return [
        first.setdefault(leaf.untyped_storage().data_ptr(), index)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
        else index
        for index, leaf in enumerate(pytree.tree_leaves(result))
    ]


def aliases_of(
    outputs: Sequence[Any],
    names: Sequence[str],
    leaves: Sequence[Any],
    arguments: Sequence[str],
    axes: Sequence[Axes],
) -> tuple[dict[int, int], list[int], str | None]:
    """Outputs that are arguments, outputs that share memory with others, and what forbids cuts."""
    by_identity = {
        id(leaf): slot for slot, (leaf, own) in enumerate(zip(leaves, axes, strict=True)) if own
    }
    by_memory = {leaves[slot].untyped_storage().data_ptr(): slot for slot in by_identity.values()}
    same: dict[int, int] = {}
    owners: dict[int, tuple[int, int]] = {}
    shared: set[int] = set()
    met: set[int] = set()
    for index, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or not output.numel():
            continue
        memory = output.untyped_storage().data_ptr()
        if id(output) in by_identity:
            same[index] = by_identity[id(output)]
        elif memory in by_memory:
            reason = f"{names[index]} is a view of the argument {arguments[by_memory[memory]]}"
            return same, [], reason
        first, identity = owners.setdefault(memory, (index, id(output)))
        if identity != id(output) and id(output) not in met:
            shared |= {first, index}
        met.add(id(output))
    return same, sorted(shared), None
