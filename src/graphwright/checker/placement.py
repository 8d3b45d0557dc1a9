"""On which side a tensor's memory is, the GPU's or the host's, and what its values come from.

A model on the CPU is judged as if it, and the arguments of its call, were on a GPU: its tensors are
all on the CPU, and what would be where is kept here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, Flag, auto
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

GPU = torch.device("cuda", 0)


class Side(Enum):
    """Where memory is."""

    DEVICE = "device"
    HOST = "host"


class Origin(Flag):
    """What values come from; nothing of this for constants."""

    CONSTANT = 0
    INPUT = auto()
    RANDOM = auto()


def side_of_device(device: Any) -> Side:
    """The side of a torch.device, of its name, or of its index."""
    if isinstance(device, int):
        return Side.DEVICE
    return Side.DEVICE if str(device).startswith("cuda") else Side.HOST


class Sides:
    """What is known of the memory that a run meets, by its storage.

    Args:
        pretend: whether tensors on the CPU stand for others.
        lies: whether tensors that are pretended to be on a GPU say so.
    """

    def __init__(self, pretend: bool, *, lies: bool) -> None:
        self.pretend = pretend
        self.lies = lies
        self._side: dict[int, Side] = {}
        self._origin: dict[int, Origin] = {}
        self._held: dict[int, Any] = {}
        self._pinned: set[int] = set()

    def of(self, tensor: torch.Tensor) -> Side:
        """Where a tensor's memory is; on the host, where nothing is known of it."""
        if not self.pretend:
            return side_of_device(tensor.device)
        return self._side.get(_memory(tensor), Side.HOST)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """The device that a tensor says it is on."""
        return GPU if self.lies and self.of(tensor) is Side.DEVICE else tensor.device

    def origin(self, tensor: torch.Tensor) -> Origin:
        """What a tensor's values come from."""
        return self._origin.get(_memory(tensor), Origin.CONSTANT)

    def origins(self, among: Iterable[torch.Tensor]) -> Origin:
        """What the values of several come from."""
        found = Origin.CONSTANT
        for tensor in among:
            found |= self.origin(tensor)
        return found

    def put(self, tensor: torch.Tensor, side: Side | None, origin: Origin | None = None) -> None:
        """Note the side and the origin of a tensor's memory."""
        memory = _memory(tensor)
        if memory not in self._held:
            # While it is known here, its identity is given to no other.
            tensor = _unwrapped(tensor)
            strided = tensor.layout is torch.strided and not tensor.is_nested
            self._held[memory] = StorageWeakRef(tensor.untyped_storage()) if strided else tensor
        if side is not None:
            self._side[memory] = side
        if origin is not None:
            self._origin[memory] = origin

    def pin(self, tensor: torch.Tensor) -> None:
        """Memory is pinned."""
        self.put(tensor, Side.HOST)
        self._pinned.add(_memory(tensor))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether memory is pinned, or said to be."""
        return _memory(tensor) in self._pinned if self.pretend else tensor.is_pinned()

    def known(self, tensor: torch.Tensor) -> bool:
        """Whether the side of a tensor's memory is known."""
        return not self.pretend or _memory(tensor) in self._side


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What is inside the wrappers of vmap and grad."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _memory(tensor: torch.Tensor) -> int:
    tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def tensors_in(*trees: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results."""
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            yield tree
        else:
            for leaf in pytree.tree_leaves(tree):
                if isinstance(leaf, torch.Tensor):
                    yield leaf
