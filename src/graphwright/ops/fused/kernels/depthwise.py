"""depthwise_conv2d: a strip of neighbouring outputs in the registers of each thread.

What a strip reads of an input row is loaded once, for all the windows that it lies in. All loads
have one shape, the weight's too, so that no value moves between threads. The weight's sizes and
strides are constants of the kernel: the compiler sees what divides an address, and adds nothing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# ruff: noqa: RUF005  # Triton knows no other way to put tuples together.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch_cache import launched
from ..operands import pooled_size
from .activations import activated
from .sizes import channel_block, strips, strips_together

# Products of a thread up to which all rows of a window are unrolled. Beyond, one row has loads
# enough to wait for together, and a program that runs once takes time to be fetched.
UNROLLED = 200


@triton.jit
def within(index, size):
    """Whether 0 <= index < size, in one comparison: without its sign, one below 0 is large."""
    # Triton makes a constant of a size of 1.
    return index.to(tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def depthwise_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    height,
    width,
    out_height,
    out_width,
    CHANNELS: tl.constexpr,
    WEIGHT_CHANNEL: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    WEIGHT_COLUMN: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """PIXELS columns of ROWS output rows, of some channels; rows are counted over all images."""
    GROUPS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    across = tl.cdiv(out_width, PIXELS)
    number = tl.program_id(0) // GROUPS
    begin = (number % across) * PIXELS
    row = ((number // across) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(0) % GROUPS) * BLOCK + tl.arange(0, BLOCK)[None, :]
    channel = tl.broadcast_to(channel, (ROWS, BLOCK))
    known = channel < CHANNELS
    inside = (row < rows) & known
    top = (row % out_height) * STRIDE_H - PADDING_H
    left = begin * STRIDE_W - PADDING_W
    place = (((row // out_height) * height + top) * width + left) * CHANNELS + channel
    if BIAS:
        shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    else:
        shift = tl.zeros((ROWS, BLOCK), tl.float32)
    sums = (shift,) * PIXELS
    for i in tl.range(0, KERNEL_H, loop_unroll_factor=UNROLL):
        there = inside & within(top + i, height)
        line = x + (place + i * width * CHANNELS)
        factors = ()
        for j in tl.static_range(KERNEL_W):
            tap = channel * WEIGHT_CHANNEL + i * WEIGHT_ROW + j * WEIGHT_COLUMN
            factors = factors + (tl.load(weight + tap, mask=known, other=0.0).to(tl.float32),)
        for k in tl.static_range((PIXELS - 1) * STRIDE_W + KERNEL_W):
            # Zero beyond the edge is multiplied too: a weight that is infinite makes it NaN.
            mask = there & within(left + k, width)
            value = tl.load(line + k * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            for n in tl.static_range(PIXELS):
                if k >= n * STRIDE_W and k < n * STRIDE_W + KERNEL_W:
                    total = sums[n] + value * factors[k - n * STRIDE_W]
                    sums = sums[:n] + (total,) + sums[n + 1 :]
    for n in tl.static_range(PIXELS):
        total = activated(sums[n], ACTIVATION, result.dtype.element_ty != tl.float32)
        place = (row * out_width + begin + n) * CHANNELS + channel
        mask = inside & (begin + n < out_width)
        tl.store(result + place, total.to(result.dtype.element_ty), mask=mask)


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    activation: str,
) -> torch.Tensor:
    """An activation of a convolution of each channel by itself, in channels_last."""
    images, channels, height, width = x.shape
    kernel = weight.shape[2:]
    out_height = pooled_size(height, kernel[0], stride[0], padding[0])
    out_width = pooled_size(width, kernel[1], stride[1], padding[1])
    result = torch.empty(
        (images, channels, out_height, out_width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    rows = images * out_height
    block = channel_block(channels)
    pixels, each = strips(rows, out_width, channels)
    programs = triton.cdiv(out_width, pixels) * triton.cdiv(channels, block)
    together = strips_together(rows, programs, block, each)
    launched(
        depthwise_kernel,
        (programs * triton.cdiv(rows, together),),
        x,
        weight,
        bias,
        result,
        rows,
        height,
        width,
        out_height,
        out_width,
        CHANNELS=channels,
        WEIGHT_CHANNEL=weight.stride(0),
        WEIGHT_ROW=weight.stride(2),
        WEIGHT_COLUMN=weight.stride(3),
        KERNEL_H=kernel[0],
        KERNEL_W=kernel[1],
        STRIDE_H=stride[0],
        STRIDE_W=stride[1],
        PADDING_H=padding[0],
        PADDING_W=padding[1],
        BIAS=bias is not None,
        ACTIVATION=activation,
        ROWS=together,
        PIXELS=pixels,
        BLOCK=block,
        UNROLL=kernel[0] if pixels * each * kernel.numel() <= UNROLLED else 1,
        num_warps=max(1, together * block // (32 * each)),
    )
    return result
