"""InputDependence: a mode that follows which tensors depend on the values of some others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .modes import OperationMode
from .operations import tensors, written

# They take a tensor's shape and dtype, and none of its values.
_NEW = {
    f"aten::{name}"
    for value in ("empty", "zeros", "ones", "full", "rand", "randn")
    for name in (f"{value}_like", f"new_{value}")
} | {"aten::new_empty_strided", "aten::randint_like"}


class InputDependence(OperationMode):
    """Finds out what depends on the values of some tensors; their sizes do not count.

    Attributes:
        read: the first operation that gave Python such a value; None if there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: str | None = None
        # Storages whose values depend on the inputs. While a weak reference lives, the address of
        # a storage's handle is not used for another one.
        self._dependent: dict[int, StorageWeakRef] = {}

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take these tensors for the inputs."""
        self._dependent.clear()
        self._mark(inputs)

    def depends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may depend on the inputs."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._dependent

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note what depends on the inputs after it."""
        takes = func.name().split(".")[0] not in _NEW
        depends = takes and any(map(self.depends, tensors((args, kwargs))))
        result = func(*args, **kwargs)
        if depends:
            made = tensors(result)
            self._mark(made)
            self._mark(written(func, args, kwargs))
            if not made and result is not None and self.read is None:
                self.read = str(func)
        return result

    def _mark(self, made: Sequence[torch.Tensor]) -> None:
        for tensor in made:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._dependent[storage._cdata] = StorageWeakRef(storage)
