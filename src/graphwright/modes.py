"""Seeing the operations that a block of code runs, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A dispatch mode: inside of its block it runs the operations in PyTorch's place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of ATen; `kwargs` may be changed."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.run(func, args, dict(kwargs or {}))
