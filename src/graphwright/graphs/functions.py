"""Functions of torch that get values to the host, or from there, out of sight of the operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils import _pytree as pytree

from .cpu import FROM_DATA, HOST_READS, one_hot
from .journal import tensors

if TYPE_CHECKING:
    from .walk import Walk

# They hand out the tensor's own memory.
_EXPORTS = ("numpy", "__array__", "__dlpack__")


class Functions(TorchFunctionMode):
    """Sees these functions in a walk."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self._walk = walk

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in FROM_DATA:
            return self._from_data(func, name, args, named)
        if self._walk.on_cuda:
            if name in ("__getitem__", "__setitem__"):
                args = (args[0], _indices(args[1]), *args[2:])
            return func(*args, **named)
        if func is F.one_hot and int(named.get("num_classes", args[1] if args[1:] else -1)) >= 0:
            # On the CPU alone it reads its input to check it.
            return one_hot(args[0], int(named.get("num_classes", args[-1])))
        if name == "tensor_split" and any(isinstance(a, torch.Tensor) for a in args[1:2]):
            args = (args[0], self._content(args[1]), *args[2:])
        elif name in HOST_READS and args and isinstance(args[0], torch.Tensor):
            content = self._content(args[0])
            if name in _EXPORTS:
                content = self._walk.exported(args[0], content)
            with self._walk.paused():
                return func(content, *args[1:], **named)
        return func(*args, **named)

    def _content(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor on the host, whose content the host gets to know."""
        walk, plain = self._walk, tensor.detach()
        if walk.on_cuda:
            return plain.cpu()
        walk.content = True
        try:
            return plain.clone()
        finally:
            walk.content = False

    def _from_data(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor of Python's values, some of which may be tensors; on the host first."""
        place = 1 if name == "new_tensor" else 0
        data = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, torch.Tensor):
            return func(*args, **kwargs)
        if tensors(data):
            # On the CPU the dtype is found without the values.
            like = pytree.tree_map_only(
                torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), data
            )
            if kwargs.get("dtype") is None and name != "new_tensor":
                with self._walk.paused():
                    kwargs["dtype"] = torch.tensor(like).dtype
            data = pytree.tree_map_only(torch.Tensor, self._value, data)
            args = (*args[:place], data, *args[place + 1 :])
        if not self._walk.on_cuda:
            return func(*args, **kwargs)
        wanted = kwargs.pop("device", None)
        wanted = _device.CURRENT_DEVICE if wanted is None else wanted
        if name == "new_tensor":
            wanted = args[0].device if wanted is None else wanted
            kwargs.setdefault("dtype", args[0].dtype)
            func, args = torch.tensor, (data,)
        made = func(*args, **kwargs, device="cpu")
        if wanted is None or torch.device(wanted).type == "cpu":
            return made
        return made.to(wanted)

    def _value(self, tensor: torch.Tensor) -> Any:
        return tensor.item() if tensor.dim() == 0 else self._content(tensor).tolist()


def _indices(index: Any) -> Any:
    """Lists among indices as tensors on the host: else they get to the device unseen."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    numbers = isinstance(index, list) and all(isinstance(i, bool | int) for i in index)
    if (numbers and index) or type(index).__name__ == "ndarray":
        return torch.as_tensor(index)
    return index
