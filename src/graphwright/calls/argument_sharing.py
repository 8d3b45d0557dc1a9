"""Which arguments share memory, and how many bytes apart they are in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def own_storages(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor has its own storage, which is not empty."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return len(sizes) == len(tensors) and 0 not in sizes and not _meet(sizes.items())


def overlapping(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether different storages overlap in memory, as those of NumPy arrays may."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return _meet({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})


def _meet(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether ranges of memory, address and bytes of each, overlap without beginning alike."""
    return any(a + n > b for (a, n), (b, _) in itertools.pairwise(sorted(ranges)) if a != b)


def shared(leaves: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """Pairs of leaves that share a storage, with the bytes between their first elements."""
    tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(tensors) < 2:
        return ()
    first: dict[int, tuple[int, int]] = {}
    pairs = []
    for index, tensor in tensors:
        if tensor.numel() == 0:
            continue
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in first:
            other, start = first[pointer]
            pairs.append((other, index, tensor.data_ptr() - start))
        else:
            first[pointer] = (index, tensor.data_ptr())
    return tuple(pairs)
