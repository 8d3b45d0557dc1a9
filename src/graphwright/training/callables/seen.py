"""What a part of a call uses and makes, seen while it is recorded."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import CaptureError
from ...graphs.journal import tensors
from ...modes import OperationMode


class Seen(OperationMode):
    """A dispatch mode that keeps nothing alive of what is made inside of its block.

    Attributes:
        used: by identity, memory that was used and not made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._users: dict[int, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and look at its tensors."""
        constant = func is torch.ops.aten.lift_fresh.default
        for tensor in _dense(args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and not constant:
                self.used.setdefault(storage._cdata, storage)
                self._users.setdefault(storage._cdata, func)
        result = func(*args, **kwargs)
        for tensor in _dense(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.used:
                # While the weak reference lives, the address of the handle is not reused.
                self._made.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def living(self) -> list[torch.UntypedStorage]:
        """What was made and lives."""
        found = [
            torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            for reference in self._made.values()
        ]
        return [storage for storage in found if storage is not None]

    def refuse_what_is_new(self, known: Container[int]) -> None:
        """Refuse memory that is neither known nor made by an operation.

        Raises:
            CaptureError: a replay would use it for ever.
        """
        for key, storage in self.used.items():
            if key not in known and storage.nbytes():
                raise CaptureError(
                    f"{self._users[key]} uses a tensor that is made anew in every call by code "
                    "that runs no PyTorch operation; a replay would use the first one for ever.",
                    remedy="Make it an argument, or make it with PyTorch's own operations.",
                )


def _dense(*trees: Any) -> list[torch.Tensor]:
    return [t for t in tensors(trees) if t.layout is torch.strided and not t.is_nested]
