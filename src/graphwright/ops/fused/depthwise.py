"""Depthwise convolutions, with their bias and activation in the same pass."""

from __future__ import annotations

import torch

from . import reference
from .fused_operator import define
from .operands import LARGEST_WINDOW, LIMIT, Pair, pooled_size, takes, two


def _weight_applies(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> bool:
    """Whether kernels take a weight, of any strides, and a bias."""
    if not takes(weight) or (weight.dtype, weight.device) != (x.dtype, x.device):
        return False
    if weight.dim() != 4 or weight.shape[:2] != (x.shape[1], 1):
        return False
    reach = sum((n - 1) * step for n, step in zip(weight.shape, weight.stride(), strict=True))
    if weight.shape[2:].numel() > LARGEST_WINDOW or reach >= LIMIT:
        return False
    if bias is None:
        return True
    same = (bias.dtype, bias.device, bias.shape) == (x.dtype, x.device, x.shape[1:2])
    return same and bias.is_contiguous()


def _applies(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    activation: str = "none",
) -> bool:
    if activation not in reference.ACTIVATIONS or not takes(x) or x.dim() != 4:
        return False
    # If it lies the same both ways, PyTorch's results lie in one or the other.
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if not _weight_applies(weight, bias, x):
        return False
    if not all(isinstance(given, int) or len(given) in (1, 2) for given in (stride, padding)):
        return False
    size = x.shape[0] * x.shape[1]
    for n, k, s, p in zip(x.shape[2:], weight.shape[2:], two(stride), two(padding), strict=True):
        if s <= 0 or p < 0:
            return False
        size *= max(0, pooled_size(n, k, s, p))
    return x.numel() < LIMIT and 0 < size < LIMIT


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    activation: str = "none",
) -> torch.Tensor:
    from .kernels.depthwise import depthwise_conv2d

    return depthwise_conv2d(x, weight, bias, two(stride), two(padding), activation)


DEPTHWISE = define(
    "depthwise_conv2d(Tensor x, Tensor weight, Tensor? bias=None, int[2] stride=1, "
    'int[2] padding=0, str activation="none") -> Tensor',
    reference.depthwise_conv2d,
    applies=_applies,
    launch=_launch,
)


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    activation: str = "none",
) -> torch.Tensor:
    """A convolution of each channel by itself, and what follows it: its bias, an activation.

    The kernel takes float32, float16 and bfloat16 in channels_last and windows of at most 49
    elements, computes in float32 throughout, and rounds once; all else is computed by PyTorch's
    own operations. It is at its best with a weight that lies as (KH, KW, C) in memory.

    Args:
        x: (N, C, H, W).
        weight: (C, 1, KH, KW).
        bias: (C,), or None for zeros.
        stride: from one window to the next; one number, or that of height and width.
        padding: zeros on either side.
        activation: a name that `channel_activation` takes.

    Returns:
        (N, C, H', W') in the dtype of x.

    Raises:
        RuntimeError: where torch.nn.functional.conv2d(x, ..., groups=C) raises it.
        ValueError: there is no such activation.
    """
    result: torch.Tensor = torch.ops.graphwright.depthwise_conv2d.default(
        x, weight, bias, stride, padding, activation
    )
    return result
