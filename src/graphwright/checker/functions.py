"""FunctionObserver sees each function of torch that Python calls.

It also keeps up the pretence that tensors of a model on the CPU are on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from ..calls.operations import FROM_DATA, HOST_READS, one_hot
from . import obstacles
from .operations import FunctionCall, OperationObserver
from .placement import Side, side_of_device, tensors_in

_INDEXING = ("__getitem__", "__setitem__")
_MOVES = ("to", "cuda", "cpu", "type_as")
_NAMED_SIDES = {"cuda": Side.DEVICE, "cpu": Side.HOST}


class FunctionObserver(TorchFunctionMode):
    """Reports obstacles in functions of torch, and pretends devices, for an `OperationObserver`."""

    def __init__(self, observer: OperationObserver) -> None:
        super().__init__()
        self._operations = observer
        self._sides = observer.sides

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        self._operations.draws.use((args, named))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if name == "device":
            return func(*args, **named)
        func, args, named = _as_on_a_gpu(func, args, named)
        wanted = self._requested_side(name, args, named)
        given = list(tensors_in(args, named))
        on_device = self._any_on_device(given)
        read = self._read(name, args, named, on_device=on_device)
        if read is not None:
            self._operations.report(obstacles.READ, read)
        if self._sides.claims_gpu and name in ("is_pinned", "get_device") and given:
            return False if name == "is_pinned" else (0 if on_device else -1)
        side = wanted or (Side.DEVICE if on_device else Side.HOST)
        number = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
        self._operations.calls.append(FunctionCall(name, side, number))
        try:
            with contextlib.nullcontext() if read is None else self._operations.silent():
                return self._call(func, name, args, named, wanted)
        finally:
            self._operations.calls.pop()

    def _any_on_device(self, tree: Any) -> bool:
        return any(self._sides.of(tensor) is Side.DEVICE for tensor in tensors_in(tree))

    def _read(
        self, name: str, args: Any, kwargs: Mapping[str, Any], *, on_device: bool
    ) -> str | None:
        """What a function does that reads values from the GPU before any operation; or None."""
        if name in HOST_READS:
            return HOST_READS[name] if on_device else None
        if name == "tensor_split":
            data = args[1:2]
        elif name in FROM_DATA:
            data = _data(name, args, kwargs)
        else:
            return None
        read = isinstance(data, list | tuple) and self._any_on_device(data)
        return f"{name}()" if read else None

    def _call(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], wanted: Side | None
    ) -> Any:
        if not self._sides.pretend:
            if name in _INDEXING:
                self._note_copied_indices(args)
            result = func(*args, **kwargs)
            if name in FROM_DATA and not isinstance(_data(name, args, kwargs), torch.Tensor):
                self._note_made_of_data(name, result)
            return result
        args, kwargs = _on_the_cpu(args), _on_the_cpu(kwargs)
        if name in _MOVES and args and isinstance(args[0], torch.Tensor):
            return self._move(func, name, args, kwargs, wanted)
        if name == "pin_memory":
            with self._operations.silent():
                result = args[0].clone()
            self._sides.pin(result)
            return result
        if name in FROM_DATA and not isinstance(_data(name, args, kwargs), torch.Tensor):
            if wanted is None:
                itself = name == "new_tensor" and self._sides.of(args[0]) is Side.DEVICE
                wanted = Side.DEVICE if itself else Side.HOST
            with self._operations.silent():
                result = func(*args, **kwargs)
            self._sides.put(result, wanted)
            self._note_made_of_data(name, result)
            return result
        return func(*args, **kwargs)

    def _note_made_of_data(self, name: str, result: torch.Tensor) -> None:
        """Note that a tensor was made of Python's values on the host and copied to the GPU."""
        if self._sides.of(result) is Side.HOST:
            return
        with self._operations.silent():
            held = result.detach().cpu().clone()
            self._sides.put(held, Side.HOST)
        self._operations.note_host_copy(f"{name}()", held)

    def _note_copied_indices(self, args: Any) -> None:
        """Note lists as indices: they are copied to the GPU where a dispatch mode cannot see it."""
        if self._sides.of(args[0]) is Side.HOST:
            return
        for index in args[1] if isinstance(args[1], tuple) else (args[1],):
            if isinstance(index, list) or type(index).__name__ == "ndarray":
                with self._operations.silent():
                    held = torch.as_tensor(index)
                self._operations.note_host_copy("tensor[…]", held)

    def _move(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], wanted: Side | None
    ) -> Any:
        """Run to(), cuda() or cpu(), and note a copy to the other side."""
        source = args[0]
        before = self._sides.of(source)
        after = wanted or before
        if name == "type_as":
            func, args, kwargs = torch.Tensor.to, (source, args[1].dtype), {}
        if before is not after:
            operation = f"Tensor.{name}()"
            if after is Side.HOST:
                self._operations.report(obstacles.TRANSFER, operation)
            else:
                self._operations.note_host_copy(operation, source)
        with self._operations.silent() if before is not after else contextlib.nullcontext():
            result = source if name in ("cuda", "cpu") else func(*args, **kwargs)
            if before is not after and result.data_ptr() == source.data_ptr():
                result = result.clone()
        if before is not after:
            self._sides.put(result, after, self._sides.origin(source))
        return result

    def _attribute(self, func: Any, args: Any) -> Any:
        name = getattr(func.__self__, "__name__", "")
        if self._sides.claims_gpu and isinstance(args[0], torch.Tensor):
            if name == "device":
                return self._sides.device(args[0])
            if name == "is_cuda":
                return self._sides.of(args[0]) is Side.DEVICE
            if name == "is_cpu":
                return self._sides.of(args[0]) is Side.HOST
        return func(*args)

    def _requested_side(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> Side | None:
        """The side that the arguments name for the result; None if they name none."""
        if name in _NAMED_SIDES:
            return _NAMED_SIDES[name]
        if name == "type_as":
            return self._sides.of(args[1])
        target = _target(name, args, kwargs)
        if target is None:
            return None
        if isinstance(target, torch.Tensor):
            return self._sides.of(target)
        if self._sides.pretend and not self._sides.claims_gpu and isinstance(target, torch.device):
            return Side.DEVICE  # It is most likely that of a tensor, which has said "cpu".
        return side_of_device(target)


def _as_on_a_gpu(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A call as it would run on a GPU, and with the device of the user's `with` statement."""
    if func is F.one_hot:
        classes = int(kwargs.get("num_classes", args[1] if args[1:] else -1))
        if classes >= 0:
            # On the CPU it reads its input to check it; on a GPU it does not.
            return one_hot, (args[0], classes), {}
    around = _device.CURRENT_DEVICE
    if around is not None and func in _device._device_constructors():
        # The mode of the user's `with torch.device(...)` would act only after this one.
        kwargs["device"] = kwargs.get("device") or around
    return func, args, kwargs


def _target(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The device that arguments name, or a tensor that is on it; None if they name none."""
    device = kwargs.get("device")
    if device is None:
        device = next((a for a in args if isinstance(a, torch.device)), None)
    if device is not None or name != "to":
        return device
    target = next((a for a in args[1:] if isinstance(a, str | int | torch.Tensor)), None)
    target = kwargs.get("other", target)
    return None if isinstance(target, bool) else target


def _data(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The data argument of a function that makes a tensor of data."""
    place = 1 if name == "new_tensor" else 0
    return args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))


def _on_the_cpu(tree: Any) -> Any:
    """Arguments with GPUs replaced by the CPU."""
    if isinstance(tree, dict):
        return {key: _host(value, key) for key, value in tree.items()}
    return tuple(_host(value) for value in tree)


def _host(value: Any, key: str = "") -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return "cpu" if key == "device" and type(value) is int else value
