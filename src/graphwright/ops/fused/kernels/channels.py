"""channel_mean: the pixels of a few channels a program; others: a tile of one image."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch_cache import launched
from .activations import activated
from .alignment import known_multiple
from .sizes import PROGRAMS, aligned, power_of_two, tile


@triton.jit
def mean_kernel(
    x,
    result,
    channels,
    pixels,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The means of some channels of one image, so many pixels at a time."""
    channels = known_multiple(channels, ALIGNED)
    groups = tl.cdiv(channels, CHANNELS)
    channel = (tl.program_id(0) % groups) * CHANNELS + tl.arange(0, CHANNELS)
    image = (tl.program_id(0) // groups).to(tl.int64)
    known = channel < channels
    x += image * pixels * channels
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for step in range(STEPS):
        pixel = (step * PIXELS + tl.arange(0, PIXELS))[:, None]
        inside = (pixel < pixels) & known[None, :]
        value = tl.load(x + pixel * channels + channel[None, :], mask=inside, other=0.0)
        total += value.to(tl.float32)
    mean = tl.sum(total, axis=0) / pixels
    tl.store(result + image * channels + channel, mean.to(result.dtype.element_ty), mask=known)


@triton.jit
def gate_kernel(
    x,
    gate,
    bias,
    result,
    channels,
    pixels,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALIGNED: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile of one image, times an activation of gate + bias."""
    channels = known_multiple(channels, ALIGNED)
    across = tl.cdiv(channels, CHANNELS)
    down = tl.cdiv(pixels, PIXELS)
    channel = ((tl.program_id(0) % across) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    number = tl.program_id(0) // across
    image = (number // down).to(tl.int64)
    pixel = ((number % down) * PIXELS + tl.arange(0, PIXELS))[:, None]
    known = channel < channels
    inside = (pixel < pixels) & known
    place = image * pixels * channels + (pixel * channels + channel)
    # Before the gate is computed, so that they are under way meanwhile.
    value = tl.load(x + place, mask=inside, eviction_policy="evict_first").to(tl.float32)
    factor = tl.load(gate + image * channels + channel, mask=known).to(tl.float32)
    if BIAS:
        factor += tl.load(bias + channel, mask=known, eviction_policy="evict_last").to(tl.float32)
    factor = activated(factor, ACTIVATION, result.dtype.element_ty != tl.float32)
    # Rounded as PyTorch's: infinity times a factor that is rounded to 0 is NaN.
    value = value * factor.to(result.dtype.element_ty).to(tl.float32)
    tl.store(result + place, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def to_last_kernel(
    x,
    result,
    channels,
    pixels,
    CHANNELS_ALIGNED: tl.constexpr,
    PIXELS_ALIGNED: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile of one image: read along its pixels, written along its channels."""
    channels = known_multiple(channels, CHANNELS_ALIGNED)
    pixels = known_multiple(pixels, PIXELS_ALIGNED)
    groups = tl.cdiv(channels, CHANNELS)
    tiles = tl.cdiv(pixels, PIXELS)
    channel = ((tl.program_id(0) % groups) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    pixel = ((tl.program_id(0) // groups % tiles) * PIXELS + tl.arange(0, PIXELS))[:, None]
    begin = (tl.program_id(0) // groups // tiles).to(tl.int64) * pixels * channels
    inside = (pixel < pixels) & (channel < channels)
    value = tl.load(
        x + begin + (channel * pixels + pixel), mask=inside, eviction_policy="evict_first"
    )
    tl.store(result + begin + (pixel * channels + channel), value, mask=inside)


def transposed_tile(images: int, channels: int, pixels: int, itemsize: int) -> tuple[int, int]:
    """Pixels and channels of a program, where one is read along pixels, written along channels."""
    # A line of memory is written whole, and 8 KiB are 64 bytes a thread under way.
    block = min(power_of_two(channels), 128 // itemsize)
    run = min(power_of_two(pixels), 8192 // itemsize // block)
    groups = images * triton.cdiv(channels, block)
    while run * itemsize > 64 and groups * triton.cdiv(pixels, run) < PROGRAMS:
        run //= 2
    return run, block


def mean_block(images: int, channels: int, pixels: int, itemsize: int) -> tuple[int, int, int]:
    """Pixels at a time and channels of a program, and its warps."""
    # Few pixels at a time of two sectors of memory, in many programs.
    block = min(power_of_two(channels), 64 // itemsize)
    if 4 * images * triton.cdiv(channels, block) >= PROGRAMS:
        return min(power_of_two(pixels), 16), block, 4
    # Where there are few programs, a sector, so that there are more.
    block = min(power_of_two(channels), 32 // itemsize)
    # All at once where they are 32 KiB or less: what is under way is not waited for in turns.
    together = min(power_of_two(pixels), 32768 // itemsize // block)
    return together, block, min(16, max(1, together * block * itemsize // 1024))


def channel_mean(x: torch.Tensor) -> torch.Tensor:
    """The means of channels_last images, contiguous."""
    images, channels, height, width = x.shape
    result = torch.empty((images, channels, 1, 1), dtype=x.dtype, device=x.device)
    together, block, warps = mean_block(images, channels, height * width, x.dtype.itemsize)
    launched(
        mean_kernel,
        (images * triton.cdiv(channels, block),),
        x,
        result,
        channels,
        height * width,
        ALIGNED=aligned(channels, x.dtype.itemsize),
        STEPS=triton.cdiv(height * width, together),
        PIXELS=together,
        CHANNELS=block,
        num_warps=warps,
    )
    return result


def channel_gate(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Images in channels_last, times an activation of gate + bias."""
    images, channels, height, width = x.shape
    pixels = height * width
    result = torch.empty_like(x)
    # A tile that reached into the next image would need two gates.
    rows, columns = tile(images * pixels, channels)
    rows = min(rows, power_of_two(pixels))
    launched(
        gate_kernel,
        (images * triton.cdiv(pixels, rows) * triton.cdiv(channels, columns),),
        x,
        gate,
        bias,
        result,
        channels,
        pixels,
        BIAS=bias is not None,
        ACTIVATION=activation,
        ALIGNED=aligned(channels, x.dtype.itemsize),
        PIXELS=rows,
        CHANNELS=columns,
        num_warps=4,
    )
    return result


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """Contiguous images, copied into channels_last."""
    images, channels, height, width = x.shape
    pixels = height * width
    result = torch.empty_like(x, memory_format=torch.channels_last)
    run, block = transposed_tile(images, channels, pixels, x.dtype.itemsize)
    launched(
        to_last_kernel,
        (images * triton.cdiv(channels, block) * triton.cdiv(pixels, run),),
        x,
        result,
        channels,
        pixels,
        CHANNELS_ALIGNED=aligned(channels, x.dtype.itemsize),
        PIXELS_ALIGNED=aligned(pixels, x.dtype.itemsize),
        PIXELS=run,
        CHANNELS=block,
        num_warps=min(4, max(1, run * block * x.dtype.itemsize // 1024)),
    )
    return result
