"""Activations with a bias or a product, in one pass over memory."""

from __future__ import annotations

from typing import Literal

import torch

from . import reference
from .fused_operator import define
from .operands import LIMIT, has_rows, is_row, like, takes


def _bias_applies(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> bool:
    known = approximate in ("none", "tanh")
    return known and takes(x) and is_row(bias, x) and has_rows(x)


def _swiglu_applies(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return takes(gate) and like(gate, up) and has_rows(gate) and has_rows(up)


def _launch_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    from .kernels.activations import bias_activation

    return bias_activation(x, bias, "gelu" if approximate == "none" else "gelu_tanh")


def _launch_silu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    from .kernels.activations import bias_activation

    return bias_activation(x, bias, "silu")


def _channel_applies(
    x: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None = None,
    activation: str = "none",
) -> bool:
    form = torch.channels_last
    if activation not in reference.ACTIVATIONS or not takes(x) or x.dim() != 4:
        return False
    if x.is_contiguous():
        return False  # If it lies the same both ways, PyTorch's results lie in one or the other.
    if (bias.dtype, bias.device, bias.shape) != (x.dtype, x.device, x.shape[1:2]):
        return False
    if other is not None and not (like(x, other) and other.is_contiguous(memory_format=form)):
        return False
    return bias.is_contiguous() and x.is_contiguous(memory_format=form) and x.numel() < LIMIT


def _launch_channels(
    x: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    from .kernels.activations import channel_activation

    return channel_activation(x, bias, other, activation)


def _launch_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from .kernels.activations import swiglu

    return swiglu(gate, up)


BIAS_GELU = define(
    'bias_gelu(Tensor x, Tensor bias, str approximate="none") -> Tensor',
    reference.bias_gelu,
    applies=_bias_applies,
    launch=_launch_gelu,
)
BIAS_SILU = define(
    "bias_silu(Tensor x, Tensor bias) -> Tensor",
    reference.bias_silu,
    applies=_bias_applies,
    launch=_launch_silu,
)
CHANNELS = define(
    'channel_activation(Tensor x, Tensor bias, Tensor? other=None, str activation="none") '
    "-> Tensor",
    reference.channel_activation,
    applies=_channel_applies,
    launch=_launch_channels,
)
SWIGLU = define(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    reference.swiglu,
    applies=_swiglu_applies,
    launch=_launch_swiglu,
)


def bias_gelu(
    x: torch.Tensor, bias: torch.Tensor, approximate: Literal["none", "tanh"] = "none"
) -> torch.Tensor:
    """GELU of x + bias.

    In float16 and bfloat16 the normal distribution's function is taken with a relative error of
    5e-6 before the result is rounded, also far below zero, where 1 + erf has no digits left.

    The kernel takes float32, float16 and bfloat16 with a contiguous last dimension, and computes
    in float32 throughout; all else is computed by PyTorch's own operations.

    Args:
        x: (..., N).
        bias: (N,), or anything that x + bias takes.
        approximate: "none" for the error function, "tanh" for its approximation.

    Returns:
        As x in shape and dtype.

    Raises:
        RuntimeError: where torch.nn.functional.gelu(x + bias, ...) raises it.
    """
    result: torch.Tensor = torch.ops.graphwright.bias_gelu.default(x, bias, approximate)
    return result


def bias_silu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """SiLU of x + bias.

    Args:
        x: (..., N); dtypes and layouts as `bias_gelu`.
        bias: (N,), or anything that x + bias takes.

    Returns:
        As x in shape and dtype.

    Raises:
        RuntimeError: where torch.nn.functional.silu(x + bias) raises it.
    """
    result: torch.Tensor = torch.ops.graphwright.bias_silu.default(x, bias)
    return result


def channel_activation(
    x: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """What follows a convolution: its bias, another tensor, an activation.

    The kernel takes float32, float16 and bfloat16 in channels_last, and computes in float32
    throughout; all else is computed by PyTorch's own operations.

    Args:
        x: (N, C, H, W), or anything of channels in its second dimension.
        bias: (C,).
        other: as x, or None.
        activation: "none", "relu", "relu6", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu"
            or "gelu_tanh".

    Returns:
        As x in shape and dtype.

    Raises:
        RuntimeError: where x + bias.view(-1, 1, 1) + other raises it.
        ValueError: there is no such activation.
    """
    result: torch.Tensor = torch.ops.graphwright.channel_activation.default(
        x, bias, other, activation
    )
    return result


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer, 2020).

    The two may be the halves of one tensor, `both.chunk(2, -1)`: no copy is made of them.

    Args:
        gate: (..., N); dtypes and layouts as `bias_gelu`.
        up: as gate, or anything that silu(gate) * up takes.

    Returns:
        As gate in shape and dtype, contiguous where the kernel applies.

    Raises:
        RuntimeError: where torch.nn.functional.silu(gate) * up raises it.
    """
    result: torch.Tensor = torch.ops.graphwright.swiglu.default(gate, up)
    return result
