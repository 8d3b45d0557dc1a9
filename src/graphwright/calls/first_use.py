"""Seeing memory before it is first used: by a dispatch mode, and by a mode for raw addresses.

Any use by an operation counts, not only what its schema says that it writes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from .leaves import dispatches
from .modes import OperationMode
from .operations import leaves

# Operations of these work on their arguments alone; another one may know of other memory.
_NAMESPACES = frozenset(("aten", "prim", "prims", "mkldnn", "onednn", "graphwright"))
# Methods that give a tensor's memory away without an operation.
_RAW = frozenset(("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__"))

# Layout of oneDNN's tensors, which have memory of their own.
_PACKED: Any = getattr(torch, "_mkldnn")  # noqa: B009  # unknown to mypy
# Called with the id of the storage that is used next, or None for any.
Use = Callable[[int | None], None]


class FirstUse(OperationMode):
    """Announces each storage that an operation is about to use, while any is waited for."""

    supports_higher_order_operators = True

    def __init__(self, use: Use, waiting: Sized) -> None:
        super().__init__()
        self._use = use
        self._waiting = waiting

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._waiting:
            if getattr(func, "namespace", "") not in _NAMESPACES:
                self._use(None)
            for leaf in leaves((args, kwargs)):
                announce(leaf, self._use)
        return func(*args, **kwargs)


class RawAccess(TorchFunctionMode):
    """Announces each storage whose address is about to be taken.

    PyTorch takes other ways through some modules under it (`nn.TransformerEncoder`): it is for runs
    whose numbers do not matter.
    """

    def __init__(self, use: Use) -> None:
        super().__init__()
        self._use = use

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _RAW or func is _INTERFACE:
            announce(args[0], self._use)
        return func(*args, **(kwargs or {}))


_INTERFACE = torch.Tensor.__cuda_array_interface__.__get__


def announce(value: Any, use: Use) -> None:
    """Announce the memory of a tensor or storage; nothing for other values."""
    if type(value) in (int, float, bool, type(None), str):
        return
    if isinstance(value, torch.UntypedStorage):
        use(value._cdata)
    elif isinstance(value, torch.Tensor) and type(value).__name__ != "FakeTensor":
        if value.layout is torch.strided and not dispatches(value):
            with torch._C.DisableTorchFunction():
                use(value.untyped_storage()._cdata)
        elif value.layout is not _PACKED:
            use(None)  # Tensors inside of it would be used where no mode sees it.


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Take the innermost mode off inside the block, if it is one that announces uses."""
    if isinstance(_get_current_dispatch_mode(), FirstUse):
        with _pop_mode_temporarily():
            yield
    else:
        yield
