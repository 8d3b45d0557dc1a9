"""The definition of each of our operators, in PyTorch's own operations."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812  # the field's name for it

from .operands import Pair

# Activations after a convolution, by their names in torch.nn.functional, and GELU with tanh.
ACTIVATIONS = (
    *("none", "relu", "relu6", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu", "gelu_tanh"),
)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer norm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum's layer norm over the last dimension, and the sum."""
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum's root-mean-square norm over the last dimension, and the sum."""
    total = x + residual
    if total.dim() and isinstance(total.shape[-1], torch.SymInt):
        return _rms_norm(total, weight, eps), total
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """For a size that is a symbol: PyTorch 2.11's own norm on CUDA reads it as a number."""
    wide = x if x.dtype == torch.float64 else x.float()
    result = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (result if weight is None else result * weight).to(x.dtype)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU of x + bias."""
    return F.gelu(x + bias, approximate=approximate)


def channel_activation(
    x: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """An activation of x + bias, a bias a channel, + other."""
    total = x + bias.view(-1, *[1] * (x.dim() - 2))
    if other is not None:
        total = total + other
    return _activated(total, activation)


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """An activation, by its name; x itself for "none"."""
    if activation == "none":
        return x
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, not one of {', '.join(ACTIVATIONS)}")
    result: torch.Tensor = getattr(F, activation)(x)
    return result


def channel_mean(x: torch.Tensor) -> torch.Tensor:
    """The mean of each channel of each image."""
    return x.mean((2, 3), keepdim=True)


def channel_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """X times an activation of gate + bias, a bias a channel."""
    if bias is not None:
        gate = gate + bias.view(-1, 1, 1)
    return x * _activated(gate, activation)


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same images in channels_last, in memory of their own."""
    return x.clone(memory_format=torch.channels_last)


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    activation: str = "none",
) -> torch.Tensor:
    """An activation of a convolution of each channel by itself."""
    total = F.conv2d(x, weight, bias, stride, padding, groups=weight.shape[0])
    return _activated(total, activation)


def bias_silu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """SiLU of x + bias."""
    return F.silu(x + bias)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of the gate, times the other."""
    return F.silu(gate) * up


def relu_max_pool2d(
    x: torch.Tensor,
    kernel_size: Pair,
    stride: Pair = (),
    padding: Pair = 0,
    contiguous: bool = False,
) -> torch.Tensor:
    """The pool of ReLU."""
    result = torch.max_pool2d(F.relu(x), kernel_size, stride, padding)
    # contiguous() would leave the strides of planes of one pixel to the input's format.
    return result.clone(memory_format=torch.contiguous_format) if contiguous else result


def max_pool2d_relu(
    x: torch.Tensor,
    kernel_size: Pair,
    stride: Pair = (),
    padding: Pair = 0,
    contiguous: bool = False,
) -> torch.Tensor:
    """The same values with less work: ReLU is monotonic, and both hand on NaN.

    The gradients are the same too: they go to the first of the largest elements, if it is over 0.
    """
    if not x.is_floating_point():
        return relu_max_pool2d(x, kernel_size, stride, padding)  # It says what is wrong.
    result = torch.max_pool2d(x, kernel_size, stride, padding)
    return F.relu(result.contiguous() if contiguous else result)


def masked_softmax(
    scores: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Softmax over the last dimension of scores * scale, where the mask is true."""
    scaled = scores * scale
    if mask is not None:
        scaled = scaled.masked_fill(~mask, -torch.inf)
    return scaled.softmax(-1)
