"""Arguments that hold positions in others: padding one of the two moves what they point at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..calls.modes import OperationMode
from ..calls.operations import tensors, written

# What is said of an argument that does, between its name and those of the others.
HOLDS_POSITIONS = " holds indices into "
# What operations of ATen call the arguments that hold positions.
_POSITIONS = ("index", "indices", "offsets")


class Positions(OperationMode):
    """Notes which arguments hold positions in which others, as a run uses them.

    Attributes:
        found: pairs of leaves: one with positions, and one whose values are taken or put by them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int]] = set()
        # By storage: the leaves that its values depend on. While a weak reference lives, the
        # address of a storage's handle is not used for another one.
        self._from: dict[int, tuple[StorageWeakRef, frozenset[int]]] = {}

    def begin(self, leaves: Sequence[Any]) -> None:
        """Take these leaves for the arguments."""
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._mark([leaf], frozenset((number,)))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        every = frozenset[int]().union(*map(self._of, tensors((args, kwargs))))
        for tensor in _positions(func, args, kwargs):
            positions = self._of(tensor)
            if len(positions) == 1:  # Else nobody knows whose positions they are.
                self.found |= {
                    (number, other) for number in positions for other in every - positions
                }
        result = func(*args, **kwargs)
        if every:
            self._mark([*tensors(result), *written(func, args, kwargs)], every)
        return result

    def _of(self, tensor: torch.Tensor) -> frozenset[int]:
        if tensor.layout is not torch.strided:
            return frozenset()
        known = self._from.get(tensor.untyped_storage()._cdata)
        return frozenset() if known is None else known[1]

    def _mark(self, made: Sequence[torch.Tensor], leaves: frozenset[int]) -> None:
        for tensor in made:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                before = self._of(tensor)
                self._from[storage._cdata] = StorageWeakRef(storage), before | leaves


def _positions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The integers among an operation's arguments that are positions."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    found = tensors([given[name] for name in _POSITIONS if name in given])
    return [tensor for tensor in found if tensor.dtype in (torch.int64, torch.int32)]
