"""A call as tensors in a row, which is all that tracers and exporters take, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .storage import Json, packed, tree_of, tree_text, unpacked


@dataclass(frozen=True)
class Row:
    """A tree without its tensors: their slots among its leaves, where it has None, and the rest."""

    leaves: tuple[Any, ...]
    slots: tuple[int, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Row:
        """Take the tensors out of a flattened tree."""
        slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        rest = (None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(tuple(rest), slots, spec)

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The tree with other tensors in their places."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    def written(self) -> dict[str, Json]:
        """It as JSON.

        Raises:
            ArtifactError: a leaf or a container cannot be written down.
        """
        leaves = [packed(leaf, {}, "") for leaf in self.leaves]
        return {"leaves": leaves, "slots": [*self.slots], "tree": tree_text(self.spec)}

    @classmethod
    def read(cls, known: Mapping[str, Json]) -> Row:
        """What `written` gave.

        Raises:
            ArtifactError: a container's class is not known here.
            KeyError, TypeError, ValueError: it is none.
        """
        leaves = tuple(unpacked(leaf, {}) for leaf in known["leaves"])
        slots = tuple(int(slot) for slot in known["slots"])
        if any(not 0 <= slot < len(leaves) for slot in slots):
            raise ValueError(f"there are no leaves {slots} among {len(leaves)}")
        return cls(leaves, slots, tree_of(known["tree"]))
