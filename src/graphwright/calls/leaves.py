"""The leaves of calls, tensors and plain values: described, compared, and refused by name."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import SignatureError
from .argument_sharing import own_storages

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# For checks at each call: module-level names are found faster than attributes.
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_STRIDED = torch.strided
_is_functional = torch._is_functional_tensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def describe(leaf: Any, name: str = "argument") -> tuple[Any, ...]:
    """A hashable description of one leaf: everything that must match for a call to be the same.

    Tensors are described by shape, dtype, stride, device and requires_grad; other values by type
    and bit pattern, since 1, 1.0, True and -0.0 differ.

    Raises:
        SignatureError: the leaf is neither a tensor nor a plain value.
    """
    if isinstance(leaf, torch.Tensor):
        if not is_plain(leaf):
            raise SignatureError(
                f"{name} is {unusual_kind(leaf)}; only plain dense tensors are supported.",
                remedy="Pass it as its dense parts, or convert it inside the model.",
            )
        return (leaf.shape, leaf.dtype, leaf.stride(), leaf.device, leaf.requires_grad)
    if isinstance(leaf, float):
        return (type(leaf), struct.pack("<d", leaf))
    if isinstance(leaf, complex):
        return (type(leaf), struct.pack("<dd", leaf.real, leaf.imag))
    if isinstance(leaf, SCALARS):
        return (type(leaf), leaf)
    _refuse_numpy(leaf, name)
    raise SignatureError(
        f"{name} is an object of type {type(leaf).__qualname__}, which graphwright cannot look "
        "into: tensors inside it would go unseen.",
        remedy="Pass tensors, plain values, and tuples, lists or dictionaries of them, or "
        "register the type with torch.utils._pytree.register_pytree_node.",
    )


def _refuse_numpy(leaf: Any, name: str) -> None:
    """Refuse an array or a scalar of NumPy's, with what to pass instead.

    Raises:
        SignatureError: it is one.
    """
    numpy = sys.modules.get("numpy")  # Nobody has one without it.
    if numpy is None or not isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return
    if isinstance(leaf, numpy.ndarray):
        raise SignatureError(
            f"{name} is a NumPy array, and no graph would see its values change.",
            remedy=f"Pass a tensor: torch.from_numpy({name}).",
        )
    plain = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}.get(leaf.dtype.kind)
    raise SignatureError(
        f"{name} is a NumPy scalar of type {type(leaf).__name__}.",
        remedy=f"Pass {plain}({name}), or a tensor if it changes from call to call."
        if plain is not None
        else f"Pass a plain value: {name}.item().",
    )


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor of PyTorch's own class whose bits are its values."""
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not (_is_wrapped(value) or _is_functional(value))
        and not (value.is_nested or value.is_quantized or value.is_neg() or value.is_conj())
        and not value._is_zerotensor()
        and not was_freed(value)
    )


def was_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has no memory any more, as where FSDP has freed it."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() == 0


def unusual_kind(tensor: torch.Tensor) -> str:
    """What kind of tensor it is that is not plain, in words."""
    nothing = without_memory(tensor)
    if nothing is not None:
        return nothing
    if type(tensor) not in _PLAIN_TYPES:
        return f"a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"a {tensor.layout} tensor" if not tensor.is_quantized else "a quantized tensor"
    return "a lazily conjugated or negated tensor (see torch.resolve_conj, torch.resolve_neg)"


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether its class runs PyTorch's operations in its own way (`__torch_dispatch__`)."""
    cls = type(tensor)
    return cls not in _PLAIN_TYPES and cls.__torch_dispatch__ is not _NO_DISPATCH


def without_memory(tensor: torch.Tensor) -> str | None:
    """What kind of tensor it is, in words, if it has no values in its own memory; else None.

    Reading the address or bytes of such a tensor raises whatever PyTorch raises.
    """
    if nn.parameter.is_lazy(tensor):
        return f"an {type(tensor).__qualname__}, of a lazy module before its first call"
    if _is_wrapped(tensor):
        return "a tensor of a torch.func transform (vmap, grad, jvp)"
    if _is_functional(tensor):
        return "a functional tensor (torch.func.functionalize)"
    if dispatches(tensor):
        return f"a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory"
    if was_freed(tensor):
        return "a tensor whose memory was freed"
    return None


def matches(value: Any, expected: tuple[Any, ...]) -> bool:
    """Whether `describe(value)` would equal a description; faster than describing it."""
    shape, dtype, stride, device, requires_grad = expected
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not value.is_nested
        and value.dtype is dtype
        and value.shape == shape
        and value.stride() == stride
        and value.device == device
        and value.requires_grad is requires_grad
        and not value.is_neg()
        and not value._is_zerotensor()
        and not (_is_wrapped(value) or _is_functional(value))
        and not (dtype.is_complex and value.is_conj())
        and not was_freed(value)
    )


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A fast check whether tensors have the same type, layout, device and so on as these.

    torch.compile guards its code with it. It may reject tensors that fit, for example under another
    autocast or inference mode.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        # Its stub speaks of one tensor where it takes several.
        sizes: Any = [list(tensor.size()) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check if tensors and check(*tensors) else None
    except (ImportError, TypeError, ValueError, RuntimeError):  # It is no public interface.
        return None


def are_plain(values: Sequence[Any]) -> bool:
    """Whether all values are dense tensors of PyTorch's own class."""
    for value in values:
        if type(value) not in _PLAIN_TYPES or value.layout is not _STRIDED or value.is_nested:
            return False
    return True


def fitting(guard: Callable[..., bool], values: Sequence[Any]) -> bool:
    """Whether some values are plain tensors that pass a guard and share no memory."""
    # The guard crashes the process on tensors without strides.
    if not are_plain(values):
        return False
    if not guard(*values):
        return False
    if len(values) < 2:
        return not any(map(was_freed, values))
    return own_storages(values)


def value_of(described: tuple[Any, ...]) -> Any:
    """The plain value that a description is of."""
    cls, value = described
    if issubclass(cls, float):
        return struct.unpack("<d", value)[0]
    return complex(*struct.unpack("<dd", value)) if issubclass(cls, complex) else value


def in_words(described: tuple[Any, ...]) -> str:
    """A description in words."""
    if len(described) == 5:
        shape, dtype, stride, device, requires_grad = described
        grad = ", requires_grad" if requires_grad else ""
        return (
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')} strides {stride} on {device}{grad}"
        )
    return f"{described[0].__name__} {value_of(described)!r}"


def with_value(name: str, described: tuple[Any, ...]) -> str:
    """An argument with its value, in words."""
    if len(described) == 5:
        shape, dtype = described[:2]
        return f"{name}, a tensor {tuple(shape)} {str(dtype).removeprefix('torch.')}"
    return f"{name}={value_of(described)!r}"
