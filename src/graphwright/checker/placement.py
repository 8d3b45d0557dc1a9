"""Whether a tensor's memory is on the GPU or on the host, and where its values come from.

A model on the CPU is checked as if it, and the arguments of its call, were on a GPU. Its tensors
are all on the CPU; `Sides` keeps where each would be.
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


class ValueOrigin(Flag):
    """Where values come from; CONSTANT if from neither of the others."""

    CONSTANT = 0
    INPUT = auto()
    RANDOM = auto()


def side_of_device(device: Any) -> Side:
    """The side of a torch.device, of its name, or of its index."""
    if isinstance(device, int):
        return Side.DEVICE
    return Side.DEVICE if str(device).startswith("cuda") else Side.HOST


class Sides:
    """Side and origin of the memory that a run uses, by storage.

    Args:
        pretend: whether tensors on the CPU may stand for tensors on a GPU.
        claims_gpu: whether those that do say that they are on a GPU when asked.
    """

    def __init__(self, pretend: bool, *, claims_gpu: bool) -> None:
        self.pretend = pretend
        self.claims_gpu = claims_gpu
        self._side: dict[int, Side] = {}
        self._origin: dict[int, ValueOrigin] = {}
        self._held: dict[int, Any] = {}
        self._pinned: set[int] = set()

    def of(self, tensor: torch.Tensor) -> Side:
        """Where a tensor's memory is; if that is unknown, the host."""
        if not self.pretend:
            return side_of_device(tensor.device)
        return self._side.get(_memory(tensor), Side.HOST)

    def device(self, tensor: torch.Tensor) -> torch.device:
        """The device that a tensor says it is on."""
        return GPU if self.claims_gpu and self.of(tensor) is Side.DEVICE else tensor.device

    def origin(self, tensor: torch.Tensor) -> ValueOrigin:
        """Where a tensor's values come from."""
        return self._origin.get(_memory(tensor), ValueOrigin.CONSTANT)

    def origins(self, among: Iterable[torch.Tensor]) -> ValueOrigin:
        """Where the values of several tensors come from."""
        found = ValueOrigin.CONSTANT
        for tensor in among:
            found |= self.origin(tensor)
        return found

    def put(
        self, tensor: torch.Tensor, side: Side | None, origin: ValueOrigin | None = None
    ) -> None:
        """Note the side and the origin of a tensor's memory."""
        memory = _memory(tensor)
        if memory not in self._held:
            # While it is listed here, no other memory may get its identity.
            tensor = _unwrapped(tensor)
            strided = tensor.layout is torch.strided and not tensor.is_nested
            self._held[memory] = StorageWeakRef(tensor.untyped_storage()) if strided else tensor
        if side is not None:
            self._side[memory] = side
        if origin is not None:
            self._origin[memory] = origin

    def pin(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's memory is pinned."""
        self.put(tensor, Side.HOST)
        self._pinned.add(_memory(tensor))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is pinned, or pretended to be."""
        return _memory(tensor) in self._pinned if self.pretend else tensor.is_pinned()

    def known(self, tensor: torch.Tensor) -> bool:
        """Whether the side of a tensor's memory is known."""
        return not self.pretend or _memory(tensor) in self._side


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside wrappers of vmap and grad."""
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
