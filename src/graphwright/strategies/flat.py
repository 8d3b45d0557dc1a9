"""A call as tensors in a row, which is all that tracers and exporters take, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import StrategyFailed


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


class Flat(nn.Module):
    """A model from a row of tensors to a row of tensors; `out` is what its results belong to."""

    def __init__(self, model: nn.Module, call: Row) -> None:
        super().__init__()
        self.training = False  # eval() would reach into the user's own submodules.
        self.model = model
        self.call = call
        self.out: Row | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.call.fill(tensors)
        leaves, spec = pytree.tree_flatten(self.model(*args, **kwargs))
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            raise StrategyFailed("an output is a number that depends on a dynamic size")
        self.out = Row.of(leaves, spec)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
