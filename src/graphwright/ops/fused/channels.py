"""Channels of images: their means and factors (squeeze and excitation), and channels_last."""

from __future__ import annotations

import torch

from . import reference
from .fused_operator import define
from .operands import LIMIT, is_row, takes


def _is_last(x: torch.Tensor) -> bool:
    """Whether kernels take x, and it is in channels_last and in no other format."""
    if not takes(x) or x.dim() != 4 or x.numel() >= LIMIT or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


def _is_first(x: torch.Tensor) -> bool:
    """Whether kernels take x, and it is contiguous and not in channels_last."""
    if not takes(x) or x.dim() != 4 or x.numel() >= LIMIT or not x.is_contiguous():
        return False
    return not x.is_contiguous(memory_format=torch.channels_last)


def _gate_applies(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> bool:
    if activation not in reference.ACTIVATIONS or not _is_last(x):
        return False
    if (gate.dtype, gate.device, gate.shape) != (x.dtype, x.device, (*x.shape[:2], 1, 1)):
        return False
    if bias is not None and not is_row(bias, gate[..., 0, 0]):
        return False
    return gate.is_contiguous()


def _launch_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    from .kernels.channels import channel_gate

    return channel_gate(x, gate, bias, activation)


def _launch_mean(x: torch.Tensor) -> torch.Tensor:
    from .kernels.channels import channel_mean

    return channel_mean(x)


def _launch_to_last(x: torch.Tensor) -> torch.Tensor:
    from .kernels.channels import to_channels_last

    return to_channels_last(x)


GATE = define(
    'channel_gate(Tensor x, Tensor gate, Tensor? bias=None, str activation="none") -> Tensor',
    reference.channel_gate,
    applies=_gate_applies,
    launch=_launch_gate,
)
MEAN = define(
    "channel_mean(Tensor x) -> Tensor",
    reference.channel_mean,
    applies=_is_last,
    launch=_launch_mean,
)
TO_LAST = define(
    "to_channels_last(Tensor x) -> Tensor",
    reference.to_channels_last,
    applies=_is_first,
    launch=_launch_to_last,
)


def channel_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """X times an activation of gate + bias: what squeeze-and-excitation ends with.

    The kernel takes float32, float16 and bfloat16, with x in channels_last, and computes in
    float32 throughout, where PyTorch rounds the gate; all else is computed by its operations.

    Args:
        x: (N, C, H, W).
        gate: (N, C, 1, 1), or anything that x * gate takes.
        bias: (C,), or None for zeros.
        activation: as `channel_activation` has them.

    Returns:
        As x in shape and dtype.

    Raises:
        RuntimeError: where x * (gate + bias.view(-1, 1, 1)) raises it.
        ValueError: there is no such activation.
    """
    result: torch.Tensor = torch.ops.graphwright.channel_gate.default(x, gate, bias, activation)
    return result


def channel_mean(x: torch.Tensor) -> torch.Tensor:
    """The mean of each channel of each image.

    The kernel takes float32, float16 and bfloat16 in channels_last, and adds in float32; all else
    is computed by PyTorch's own operations. A program adds all pixels of its channels: few images
    of few channels and very many pixels leave most of a device idle.

    Args:
        x: (N, C, H, W).

    Returns:
        (N, C, 1, 1), contiguous, in the dtype of x.

    Raises:
        IndexError: x has fewer than four dimensions.
        RuntimeError: where x.mean((2, 3)) raises it.
    """
    result: torch.Tensor = torch.ops.graphwright.channel_mean.default(x)
    return result


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """A copy in channels_last, also of what is in it already.

    The kernel takes contiguous float32, float16 and bfloat16; all else is copied by PyTorch.

    Args:
        x: (N, C, H, W).

    Returns:
        As x in shape, dtype and values.

    Raises:
        RuntimeError: x does not have four dimensions.
    """
    result: torch.Tensor = torch.ops.graphwright.to_channels_last.default(x)
    return result
