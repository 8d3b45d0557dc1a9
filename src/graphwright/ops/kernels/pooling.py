"""relu_max_pool2d: a tile of outputs a program, each with its window.

An index beyond the input's edge is moved to the edge: that element lies in the same window, as
padding is at most half of it, so it changes no maximum, and no load needs a mask. ReLU is the
maximum with 0, from which each window begins.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pooling import pooled_size
from .sizes import PROGRAMS, power_of_two


@triton.jit
def larger(a, b):
    """The larger one, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def planes_kernel(
    x,
    result,
    height,
    width,
    out_height,
    out_width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of one plane, where planes are contiguous."""
    across = tl.cdiv(out_width, COLUMNS)
    tiles = tl.cdiv(out_height, ROWS) * across
    plane = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    # In one dimension, as Triton would lay the threads of two along the rows.
    pixel = tl.arange(0, ROWS * COLUMNS)
    row = (number // across) * ROWS + pixel // COLUMNS
    column = (number % across) * COLUMNS + pixel % COLUMNS
    x += plane.to(tl.int64) * height * width
    largest = tl.zeros((ROWS * COLUMNS,), tl.float32)
    for i in tl.static_range(KERNEL_H):
        y = row * STRIDE_H + (i - PADDING_H)
        y = tl.minimum(tl.maximum(y, 0), height - 1) * width
        for j in tl.static_range(KERNEL_W):
            z = column * STRIDE_W + (j - PADDING_W)
            z = tl.minimum(tl.maximum(z, 0), width - 1)
            largest = larger(largest, tl.load(x + y + z).to(tl.float32))
    result += plane.to(tl.int64) * out_height * out_width
    inside = (row < out_height) & (column < out_width)
    tl.store(result + row * out_width + column, largest.to(result.dtype.element_ty), mask=inside)


@triton.jit
def down_the_window(
    x,
    row,
    place,
    height,
    width,
    BEFORE: tl.constexpr,
    KERNEL_H: tl.constexpr,
    STRIDE_H: tl.constexpr,
    PADDING_H: tl.constexpr,
):
    """The largest element of each window's rows at a place in the row; beyond an edge, 0."""
    there = place < width
    if BEFORE:
        there = there & (place >= 0)
    largest = tl.zeros((row.shape[0], place.shape[1]), x.dtype.element_ty)
    for i in tl.static_range(KERNEL_H):
        y = row * STRIDE_H + (i - PADDING_H)
        y = tl.minimum(tl.maximum(y, 0), height - 1)
        largest = larger(largest, tl.load(x + y * width + place, mask=there, other=0.0))
    return largest


@triton.jit
def halving_kernel(
    x,
    result,
    height,
    width,
    out_height,
    out_width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of one plane, where planes are contiguous and windows two columns apart.

    Pairs of columns are loaded side by side, and told apart when the largest of their rows are
    found.
    """
    ODD: tl.constexpr = PADDING_W % 2
    FIRST: tl.constexpr = -PADDING_W - ODD
    across = tl.cdiv(out_width, COLUMNS)
    tiles = tl.cdiv(out_height, ROWS) * across
    plane = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    row = ((number // across) * ROWS + tl.arange(0, ROWS))[:, None]
    left = (number % across) * COLUMNS
    column = (left + tl.arange(0, COLUMNS))[None, :]
    pairs = (2 * left + tl.arange(0, 2 * COLUMNS))[None, :]
    x += plane.to(tl.int64) * height * width
    largest = tl.zeros((ROWS, COLUMNS), x.dtype.element_ty)
    # A window has columns 0 to KERNEL_W - 1; pair n is its columns 2n - ODD and 2n + 1 - ODD.
    for n in tl.static_range((KERNEL_W + ODD + 1) // 2):
        if 2 * n < ODD or 2 * n + 1 - ODD >= KERNEL_W:
            place = 2 * column + (2 * n + FIRST + (2 * n < ODD))
            value = down_the_window(
                x, row, place, height, width, 2 * n + FIRST < 0, KERNEL_H, STRIDE_H, PADDING_H
            )
            largest = larger(largest, value)
        else:
            value = down_the_window(
                x,
                row,
                pairs + (2 * n + FIRST),
                height,
                width,
                2 * n + FIRST < 0,
                KERNEL_H,
                STRIDE_H,
                PADDING_H,
            )
            a, b = tl.split(tl.reshape(value, (ROWS, COLUMNS, 2)))
            largest = larger(largest, larger(a, b))
    result += plane.to(tl.int64) * out_height * out_width
    inside = (row < out_height) & (column < out_width)
    tl.store(result + row * out_width + column, largest, mask=inside)


@triton.jit
def channels_last_kernel(
    x,
    result,
    channels,
    height,
    width,
    out_height,
    out_width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile of one image and some of its channels, where channels are contiguous."""
    groups = tl.cdiv(channels, CHANNELS)
    across = tl.cdiv(out_width, COLUMNS)
    tiles = tl.cdiv(out_height, ROWS) * across
    channel = ((tl.program_id(0) % groups) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    number = tl.program_id(0) // groups % tiles
    image = (tl.program_id(0) // groups // tiles).to(tl.int64)
    pixel = tl.arange(0, ROWS * COLUMNS)
    row = ((number // across) * ROWS + pixel // COLUMNS)[:, None]
    column = ((number % across) * COLUMNS + pixel % COLUMNS)[:, None]
    known = channel < channels
    x += image * height * width * channels
    largest = tl.zeros((ROWS * COLUMNS, CHANNELS), tl.float32)
    for i in tl.static_range(KERNEL_H):
        y = row * STRIDE_H + (i - PADDING_H)
        y = tl.minimum(tl.maximum(y, 0), height - 1) * width
        for j in tl.static_range(KERNEL_W):
            z = column * STRIDE_W + (j - PADDING_W)
            z = tl.minimum(tl.maximum(z, 0), width - 1)
            value = tl.load(x + (y + z) * channels + channel, mask=known, other=0.0)
            largest = larger(largest, value.to(tl.float32))
    result += image * out_height * out_width * channels
    inside = (row < out_height) & (column < out_width) & known
    place = (row * out_width + column) * channels + channel
    tl.store(result + place, largest.to(result.dtype.element_ty), mask=inside)


def halving_tile(height: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Rows and columns of outputs that a program computes, and its warps."""
    columns = min(power_of_two(width), 128)
    rows = min(power_of_two(height), max(1, 512 // columns))
    return rows, columns, 4


def channels_last_tile(
    images: int, channels: int, height: int, width: int
) -> tuple[int, int, int, int]:
    """Rows, columns and channels of outputs that a program computes, and its warps."""
    block = min(power_of_two(channels), 64)
    groups = triton.cdiv(channels, block)
    rows = min(4, power_of_two(height))
    columns = min(max(4, 512 // block), power_of_two(width))
    tiles = triton.cdiv(height, rows) * triton.cdiv(width, columns)
    while columns > 4 and images * groups * tiles < PROGRAMS:
        columns //= 2
        tiles = triton.cdiv(height, rows) * triton.cdiv(width, columns)
    return rows, columns, block, 4


def relu_max_pool2d(
    x: torch.Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> torch.Tensor:
    """The pool of relu(x), in the memory format of x."""
    images, channels, height, width = x.shape
    out_height = pooled_size(height, kernel[0], stride[0], padding[0])
    out_width = pooled_size(width, kernel[1], stride[1], padding[1])
    planes = x.is_contiguous()
    result = torch.empty(
        (images, channels, out_height, out_width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.contiguous_format if planes else torch.channels_last,
    )
    sizes = height, width, out_height, out_width
    window = {
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE_H": stride[0],
        "STRIDE_W": stride[1],
        "PADDING_H": padding[0],
        "PADDING_W": padding[1],
    }
    if planes and stride[1] == 2:
        del window["STRIDE_W"]
        rows, columns, warps = halving_tile(out_height, out_width, x.dtype.itemsize)
        tiles = triton.cdiv(out_height, rows) * triton.cdiv(out_width, columns)
        halving_kernel[(images * channels * tiles,)](
            x, result, *sizes, **window, ROWS=rows, COLUMNS=columns, num_warps=warps
        )
        return result
    if planes:
        columns = min(power_of_two(out_width), 64)
        rows = min(power_of_two(out_height), 256 // columns)
        tiles = triton.cdiv(out_height, rows) * triton.cdiv(out_width, columns)
        # One output a thread: with more, Triton gives a thread neighbours, whose windows lie a
        # stride apart, and the loads of a warp are scattered.
        planes_kernel[(images * channels * tiles,)](
            x,
            result,
            *sizes,
            **window,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=max(1, rows * columns // 32),
        )
        return result
    tile = channels_last_tile(images, channels, out_height, out_width)
    rows, columns, block, warps = tile
    tiles = triton.cdiv(out_height, rows) * triton.cdiv(out_width, columns)
    groups = triton.cdiv(channels, block)
    channels_last_kernel[(images * groups * tiles,)](
        x,
        result,
        channels,
        *sizes,
        **window,
        ROWS=rows,
        COLUMNS=columns,
        CHANNELS=block,
        num_warps=warps,
    )
    return result
