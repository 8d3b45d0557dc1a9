"""Weights of modules that no graph can hold, by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..errors import SignatureError
from .leaves import dispatches, is_plain, unusual_kind, without_memory
from .places import registered

_NO_FUNCTION = torch._C._disabled_torch_function_impl
_EVERY_FUNCTION = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
# By name, so that none has to be imported.
_SHARDING = ("FSDPModule", "FullyShardedDataParallel")


def unusual_weight(module: nn.Module) -> tuple[str, str] | None:
    """Name and kind of the first weight that is no plain dense tensor; None if all are plain."""
    for name, tensor in _weights(module):
        lazy = nn.parameter.is_lazy(tensor)
        if lazy or tensor.is_meta or not (is_plain(tensor) or _is_only_conjugated(tensor)):
            meta = tensor.is_meta and without_memory(tensor) is None
            return name, "a meta tensor, without values" if meta else unusual_kind(tensor)
    return None


def sharded_module(module: nn.Module) -> tuple[str, str] | None:
    """Name and class of a module that shards its weights; None if there is none.

    The memory of such weights is freed between calls, and a graph would read it.
    """
    for path, child in module.named_modules():
        for kind in type(child).__mro__:
            if kind.__name__ in _SHARDING and kind.__module__.startswith("torch."):
                return path, kind.__name__
    return None


def refuse_weights(module: nn.Module, *, subclasses: bool = False) -> None:
    """Refuse a module with weights that no graph can hold.

    A tensor subclass that overrides PyTorch's functions may delegate the work to plain tensors, as
    torchao's quantised weights do. It is accepted, unless `subclasses` is set.

    Args:
        module: the module.
        subclasses: refuse such subclasses too: the values of weights are copied and compared.

    Raises:
        SignatureError: a parameter, buffer or attribute is such a tensor, or FSDP shards weights.
    """
    sharded = sharded_module(module)
    if sharded is not None:
        raise SignatureError(
            f"{sharded[0] or 'The model'} is an {sharded[1]}: the memory of its weights comes and "
            "goes around each call, and a graph reads where it was.",
            remedy="Use the plain module on one device.",
        )
    for name, tensor in _weights(module):
        kind = without_memory(tensor)
        if kind is None and tensor.is_meta:
            kind = "a meta tensor, without values"
        if kind is None or (dispatches(tensor) and _answers_functions(tensor) and not subclasses):
            continue
        raise SignatureError(
            f"The weight {name} is {kind}, which a graph cannot hold.",
            remedy="Run the model once before."
            if nn.parameter.is_lazy(tensor)
            else "Use dense tensors of PyTorch's own class as weights.",
        )


def _answers_functions(tensor: torch.Tensor) -> bool:
    """Whether its class has a `__torch_function__` of its own."""
    own = type(tensor).__torch_function__
    return own is not _NO_FUNCTION and getattr(own, "__func__", own) is not _EVERY_FUNCTION


def _is_only_conjugated(tensor: torch.Tensor) -> bool:
    return (tensor.is_conj() or tensor.is_neg()) and is_plain(tensor.resolve_conj().resolve_neg())


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and attributes that are tensors, by name."""
    for path, child in module.named_modules():
        for name, value in (*registered(child).items(), *vars(child).items()):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value
