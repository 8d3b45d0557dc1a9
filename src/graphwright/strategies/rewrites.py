"""Changes of the model before it is compiled: memory layout, and lower precisions if allowed.

A rewrite works on a copy of the model; the caller's model is not touched.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.objects import build, flatten_result, has_objects
from ..calls.split import Args, Kwargs
from ..errors import StrategyFailed
from .base import AVAILABLE, Availability, Finish, Rewrite, Rewritten

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def has_convolutions(model: nn.Module) -> bool:
    """Whether a model has 2-d convolutions, for which channels_last is worth trying."""
    return any(isinstance(child, _CONVOLUTIONS) for child in model.modules())


def _available(device: torch.device) -> Availability:
    return AVAILABLE


def _channels_last(model: nn.Module, args: Args, kwargs: Kwargs) -> Rewritten:
    changed: nn.Module = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks this form of to()
    with torch.no_grad():
        results, _ = flatten_result(model(*args, **kwargs))
    args, kwargs = pytree.tree_map(_turned, (args, dict(kwargs)))
    return Rewritten(changed, args, kwargs, _turning(results), copies_weights=True)


def _turned(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf


def _turning(results: Sequence[Any]) -> Finish:
    """Arguments turned to channels_last, results laid out as eager's."""
    strides = [leaf.stride() if isinstance(leaf, torch.Tensor) else None for leaf in results]

    def finish(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map(_turned, (args, kwargs))
            leaves, spec = flatten_result(inner(*args, **kwargs))
            for index, (leaf, stride) in enumerate(zip(leaves, strides, strict=True)):
                # Callers may view() what eager gives them: strides belong to the contract.
                if stride is not None and leaf.stride() != stride:
                    with torch.no_grad():
                        leaves[index] = torch.empty_strided(
                            leaf.shape, stride, dtype=leaf.dtype, device=leaf.device
                        ).copy_(leaf)
            return build(leaves, spec)

        return call

    return finish


def _cast(dtype: torch.dtype, model: nn.Module, args: Args, kwargs: Kwargs) -> Rewritten:
    if not any(p.is_floating_point() for p in model.parameters()):
        raise StrategyFailed("the model has no floating-point parameters to convert")
    inner_model = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        results = model(*args, **kwargs)
    leaves, _ = flatten_result(results)
    kinds = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    # Compilers see through PyTorch's own functions best.
    plain = not has_objects(pytree.tree_leaves(results))
    flatten, unflatten = (
        (pytree.tree_flatten, pytree.tree_unflatten) if plain else (flatten_result, build)
    )

    class Cast(nn.Module):
        """The casts stand inside what is compiled, where a compiler can fuse them."""

        def __init__(self) -> None:
            super().__init__()
            self.training = False
            self.model = inner_model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map(lambda leaf: _narrow(leaf, dtype), (args, kwargs))
            leaves, spec = flatten(self.model(*args, **kwargs))
            leaves = [
                leaf if kind is None else leaf.to(kind)
                for leaf, kind in zip(leaves, kinds, strict=True)
            ]
            return unflatten(leaves, spec)

    return Rewritten(Cast(), args, kwargs, lambda inner: inner, copies_weights=True)


def _narrow(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.to(dtype)
    return leaf


def _probe_cast(dtype: torch.dtype, device: torch.device) -> Availability:
    x = torch.ones(4, 4, device=device, dtype=dtype)
    (x @ x).sum()
    return AVAILABLE


_tf32_lock = threading.Lock()


def _tf32(model: nn.Module, args: Args, kwargs: Kwargs) -> Rewritten:
    return Rewritten(model, args, kwargs, _under_tf32, copies_weights=False)


def _under_tf32(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # One switch for the whole process: two threads would put back each other's value.
        with _tf32_lock:
            before = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            try:
                return inner(*args, **kwargs)
            finally:
                torch.backends.cuda.matmul.fp32_precision = before

    return call


def _probe_tf32(device: torch.device) -> Availability:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return AVAILABLE
    return Availability(
        False, "TF32 is a mode of NVIDIA's tensor cores", "Run on an Ampere GPU or a later one."
    )


CHANNELS_LAST = Rewrite("channels_last", 1, _available, _channels_last, finish=_turning)
TF32 = Rewrite(
    "tf32", 2, _probe_tf32, _tf32, lossy_ulp=2.0**-10, finish=lambda results: _under_tf32
)
BF16 = Rewrite(
    "bf16",
    3,
    functools.partial(_probe_cast, torch.bfloat16),
    functools.partial(_cast, torch.bfloat16),
    lossy_ulp=torch.finfo(torch.bfloat16).eps,
)
FP16 = Rewrite(
    "fp16",
    3,
    functools.partial(_probe_cast, torch.float16),
    functools.partial(_cast, torch.float16),
    lossy_ulp=torch.finfo(torch.float16).eps,
)
