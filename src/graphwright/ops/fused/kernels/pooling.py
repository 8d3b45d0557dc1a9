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

from ..launch_cache import launched
from ..operands import pooled_size
from .alignment import known_multiple
from .sizes import PROGRAMS, aligned, power_of_two

# Pairs of columns that tiles share where there are several: those that a window may reach, and as
# many as leave all tiles aligned.
MARGIN = 8


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
def halving_kernel(
    x,
    result,
    height,
    width,
    out_height,
    out_width,
    step,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    MARGIN: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A tile of one plane, where planes are contiguous and windows two columns apart.

    Pairs of columns are loaded once and side by side. When the largest of their rows are found
    they are told apart, and handed on to the windows that begin before or after them. Tiles are
    `step` outputs apart and have MARGIN more pairs on each side, but the first one on its left.
    """
    ODD: tl.constexpr = PADDING_W % 2
    across = tl.cdiv(out_width, step)
    tiles = tl.cdiv(out_height, ROWS) * across
    plane = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    row = ((number // across) * ROWS + tl.arange(0, ROWS))[:, None]
    begin = (number % across) * step
    # Written so that the compiler sees what divides it.
    left = tl.maximum((number % across) * (step // MARGIN) - 1, 0) * MARGIN
    x += plane.to(tl.int64) * height * width
    place = 2 * left + tl.arange(0, 2 * PAIRS)[None, :]
    highest = tl.zeros((ROWS, 2 * PAIRS), x.dtype.element_ty)
    for i in tl.static_range(KERNEL_H):
        y = row * STRIDE_H + (i - PADDING_H)
        y = tl.minimum(tl.maximum(y, 0), height - 1)
        # Beyond the row's end stands ReLU's zero.
        value = tl.load(x + y * width + place, mask=place < width, other=0.0)
        highest = larger(highest, value)
    even, odd = tl.split(tl.reshape(highest, (ROWS, PAIRS, 2)))
    pair = tl.arange(0, PAIRS)[None, :]
    largest = tl.zeros((ROWS, PAIRS), x.dtype.element_ty)
    # Pair n of a window is its columns 2n - ODD and 2n + 1 - ODD; it has KERNEL_W columns.
    for n in tl.static_range((KERNEL_W + ODD + 1) // 2):
        if 2 * n < ODD:
            value = odd
        elif 2 * n + 1 - ODD >= KERNEL_W:
            value = even
        else:
            value = larger(even, odd)
        if 2 * n != PADDING_W + ODD:
            other = pair + (n - (PADDING_W + ODD) // 2)
            there = (other >= 0) & (other < PAIRS)
            other = tl.broadcast_to(tl.minimum(tl.maximum(other, 0), PAIRS - 1), (ROWS, PAIRS))
            value = tl.where(there, tl.gather(value, other, 1), tl.zeros_like(value))
        largest = larger(largest, value)
    result += plane.to(tl.int64) * out_height * out_width
    column = left + pair
    inside = (row < out_height) & (column >= begin) & (column < begin + step) & (column < out_width)
    tl.store(result + row * out_width + column, largest, mask=inside)


@triton.jit
def largest_in_windows(
    x,
    row,
    column,
    channel,
    channels,
    height,
    width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
):
    """The outputs at these pixels and channels of an image, where channels are contiguous."""
    known = channel < channels
    largest = tl.zeros((row.shape[0], channel.shape[1]), tl.float32)
    for i in tl.static_range(KERNEL_H):
        y = row * STRIDE_H + (i - PADDING_H)
        y = tl.minimum(tl.maximum(y, 0), height - 1) * width
        for j in tl.static_range(KERNEL_W):
            z = column * STRIDE_W + (j - PADDING_W)
            z = tl.minimum(tl.maximum(z, 0), width - 1)
            value = tl.load(x + (y + z) * channels + channel, mask=known, other=0.0)
            largest = larger(largest, value.to(tl.float32))
    return largest


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
    x += image * height * width * channels
    largest = largest_in_windows(
        x,
        row,
        column,
        channel,
        channels,
        height,
        width,
        KERNEL_H,
        KERNEL_W,
        STRIDE_H,
        STRIDE_W,
        PADDING_H,
        PADDING_W,
    )
    result += image * out_height * out_width * channels
    inside = (row < out_height) & (column < out_width) & (channel < channels)
    place = (row * out_width + column) * channels + channel
    tl.store(result + place, largest.to(result.dtype.element_ty), mask=inside)


@triton.jit
def to_planes_kernel(
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
    ALIGNED: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Outputs one after the other in some planes of one image, whose channels are contiguous."""
    pixels = known_multiple(out_height * out_width, ALIGNED)
    groups = tl.cdiv(channels, CHANNELS)
    tiles = tl.cdiv(pixels, PIXELS)
    channel = ((tl.program_id(0) % groups) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    pixel = ((tl.program_id(0) // groups % tiles) * PIXELS + tl.arange(0, PIXELS))[:, None]
    image = (tl.program_id(0) // groups // tiles).to(tl.int64)
    x += image * height * width * channels
    largest = largest_in_windows(
        x,
        pixel // out_width,
        pixel % out_width,
        channel,
        channels,
        height,
        width,
        KERNEL_H,
        KERNEL_W,
        STRIDE_H,
        STRIDE_W,
        PADDING_H,
        PADDING_W,
    )
    result += image * pixels * channels
    inside = (pixel < pixels) & (channel < channels)
    place = channel * pixels + pixel
    tl.store(result + place, largest.to(result.dtype.element_ty), mask=inside)


def halving_tile(planes: int, height: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Rows and pairs of columns of a program's tile, and the outputs from one to the next."""
    if width + MARGIN <= 128:
        pairs, step = power_of_two(width + MARGIN), width
    else:
        pairs, step = 128, 128 - 2 * MARGIN
    # A device starts so many programs a second: 16 bytes a thread, twice, keep memory busy.
    rows = min(power_of_two(height), max(1, 1024 // itemsize // pairs))
    while rows > 4 and planes * triton.cdiv(height, rows) * triton.cdiv(width, step) < 8 * PROGRAMS:
        rows //= 2
    return rows, pairs, step


def planes_tile(images: int, channels: int, pixels: int, itemsize: int) -> tuple[int, int]:
    """Outputs side by side in a plane and planes of a program that reads channels_last."""
    # Lines of memory: whole ones are written, and read where there are as many channels.
    block, run = min(power_of_two(channels), 32), min(power_of_two(pixels), 128 // itemsize)

    def few() -> bool:
        programs: int = images * triton.cdiv(channels, block) * triton.cdiv(pixels, run)
        return programs < PROGRAMS

    while run * itemsize > 32 and few():
        run //= 2
    while block * itemsize > 32 and few():
        block //= 2
    return run, block


def relu_max_pool2d(
    x: torch.Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    *,
    contiguous: bool,
) -> torch.Tensor:
    """The pool of relu(x), in the memory format of x, or else contiguous."""
    images, channels, height, width = x.shape
    out_height = pooled_size(height, kernel[0], stride[0], padding[0])
    out_width = pooled_size(width, kernel[1], stride[1], padding[1])
    planes = x.is_contiguous()
    result = torch.empty(
        (images, channels, out_height, out_width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.contiguous_format if planes or contiguous else torch.channels_last,
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
    if planes and stride[1] == 2 and kernel[1] <= 2 * MARGIN:
        del window["STRIDE_W"]
        rows, pairs, step = halving_tile(images * channels, out_height, out_width, x.dtype.itemsize)
        tiles = triton.cdiv(out_height, rows) * triton.cdiv(out_width, step)
        # With one warp no other has to be waited for.
        launched(
            halving_kernel,
            (images * channels * tiles,),
            x,
            result,
            *sizes,
            step,
            **window,
            MARGIN=MARGIN,
            ROWS=rows,
            PAIRS=pairs,
            num_warps=1,
        )
        return result
    if planes:
        columns = min(power_of_two(out_width), 64)
        rows = min(power_of_two(out_height), 256 // columns)
        tiles = triton.cdiv(out_height, rows) * triton.cdiv(out_width, columns)
        # One output a thread: with more, Triton gives a thread neighbours, whose windows lie a
        # stride apart, and the loads of a warp are scattered.
        launched(
            planes_kernel,
            (images * channels * tiles,),
            x,
            result,
            *sizes,
            **window,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=max(1, rows * columns // 32),
        )
        return result
    if contiguous:
        pixels = out_height * out_width
        run, block = planes_tile(images, channels, pixels, x.dtype.itemsize)
        launched(
            to_planes_kernel,
            (images * triton.cdiv(channels, block) * triton.cdiv(pixels, run),),
            x,
            result,
            channels,
            *sizes,
            **window,
            ALIGNED=aligned(pixels, x.dtype.itemsize),
            PIXELS=run,
            CHANNELS=block,
            # Eight outputs a thread: with more, the loads of their windows need too many registers.
            num_warps=max(1, run * block // 256),
        )
        return result
    block = min(power_of_two(channels), 64)
    groups = triton.cdiv(channels, block)
    # A device starts only so many programs a second; few of them are spread thin.
    side = 4 if images * groups * out_height * out_width >= 256 * PROGRAMS else 2
    rows, columns = min(side, power_of_two(out_height)), min(side, power_of_two(out_width))
    tiles = triton.cdiv(out_height, rows) * triton.cdiv(out_width, columns)
    launched(
        channels_last_kernel,
        (images * groups * tiles,),
        x,
        result,
        channels,
        *sizes,
        **window,
        ROWS=rows,
        COLUMNS=columns,
        CHANNELS=block,
        num_warps=4 if side == 4 else 1,
    )
    return result
