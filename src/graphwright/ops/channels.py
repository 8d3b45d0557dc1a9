"""Images channel by channel: what squeeze-and-excitation takes of them, and does to them."""

from __future__ import annotations

import torch

from . import reference
from .defining import define
from .layout import LIMIT, takes


def _is_last(x: torch.Tensor) -> bool:
    """Whether kernels take x, and it is in channels_last and in no other format."""
    if not takes(x) or x.dim() != 4 or x.numel() >= LIMIT or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


def _launch_mean(x: torch.Tensor) -> torch.Tensor:
    from .kernels.channels import channel_mean

    return channel_mean(x)


MEAN = define(
    "channel_mean(Tensor x) -> Tensor",
    reference.channel_mean,
    applies=_is_last,
    launch=_launch_mean,
)


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
