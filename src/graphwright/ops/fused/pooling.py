"""ReLU and max pooling in one pass, as at the start of convolutional networks."""

from __future__ import annotations

import torch

from . import reference
from .fused_operator import define
from .operands import LARGEST_WINDOW, LIMIT, Pair, pooled_size, takes, two


def _applies(
    x: torch.Tensor,
    kernel_size: Pair,
    stride: Pair = (),
    padding: Pair = 0,
    contiguous: bool = False,
) -> bool:
    if not takes(x) or x.dim() != 4 or x.numel() >= LIMIT:
        return False
    # Where both hold, as for one channel, PyTorch's choice of a layout depends on more.
    if x.is_contiguous() == x.is_contiguous(memory_format=torch.channels_last):
        return False
    kernels, strides, paddings = two(kernel_size), two(stride or kernel_size), two(padding)
    if kernels[0] * kernels[1] > LARGEST_WINDOW:
        return False
    return all(
        s > 0 and 0 <= 2 * p <= k and pooled_size(size, k, s, p) > 0
        for size, k, s, p in zip(x.shape[2:], kernels, strides, paddings, strict=True)
    )


def _launch(
    x: torch.Tensor,
    kernel_size: Pair,
    stride: Pair = (),
    padding: Pair = 0,
    contiguous: bool = False,
) -> torch.Tensor:
    from .kernels.pooling import relu_max_pool2d

    window = two(kernel_size), two(stride or kernel_size), two(padding)
    return relu_max_pool2d(x, *window, contiguous=contiguous)


POOL = define(
    "relu_max_pool2d(Tensor x, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
    "bool contiguous=False) -> Tensor",
    reference.relu_max_pool2d,
    plain=reference.max_pool2d_relu,
    applies=_applies,
    launch=_launch,
)


def relu_max_pool2d(
    x: torch.Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    contiguous: bool = False,
) -> torch.Tensor:
    """max_pool2d(relu(x)), in floor mode, without dilation.

    The kernel takes float32, float16 and bfloat16, contiguous or channels_last, and gives the
    values of PyTorch's operations exactly, NaN included; all else is computed by them.

    Args:
        x: (N, C, H, W).
        kernel_size: of the window; one number, or that of height and width.
        stride: from one window to the next; the window's size if None.
        padding: on either side, at most half of the window.
        contiguous: whether the result is contiguous, in whatever format x is.

    Returns:
        (N, C, H', W') in the dtype of x, and in its memory format if not `contiguous`.

    Raises:
        RuntimeError: where torch.nn.functional.max_pool2d(relu(x), ...) raises it.
    """
    result: torch.Tensor = torch.ops.graphwright.relu_max_pool2d.default(
        x, kernel_size, [] if stride is None else stride, padding, contiguous
    )
    return result
