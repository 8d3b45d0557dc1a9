"""How many elements a program takes: formulas instead of trials at run time."""

from __future__ import annotations

# Two for each multiprocessor of an H100 or H200, so that a small call uses the whole device.
PROGRAMS = 2 * 132
# Outputs of a strip, at most, and channels of a thread: the more, the fewer loads and conversions
# a product. The first pair that leaves each scheduler two warps is taken, else the last.
STRIPS = (8, 4), (8, 2), (4, 2), (2, 2)


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def aligned(number: int, itemsize: int) -> int:
    """The elements that divide a number, of those that one load of 16 bytes has."""
    return min(number & -number, 16 // itemsize)


def row_block(rows: int, columns: int, size: int = 1024, least: int = 1) -> tuple[int, int, int]:
    """Rows a program, its block of columns and its warps, where a row lies in one program.

    Of short rows a program has several: `size` elements, of `least` if they are few.
    """
    block = power_of_two(columns)
    together = max(1, size // block)
    while together > 1 and together * block > least and rows < together * PROGRAMS:
        together //= 2
    elements = together * block
    # 32 elements a thread keep memory busy, and fewer warps wait less for each other.
    warps = min(32, max(4, elements // 1024))
    return together, block, warps


def tile(rows: int, columns: int, largest: int = 2048, least: int = 512) -> tuple[int, int]:
    """Rows and columns of a program's tile, where all elements are independent.

    A width that divides the columns is preferred, as it leaves no thread idle.
    """
    size = largest
    while size > least and rows * columns < size * PROGRAMS:
        size //= 2
    dividing = columns & -columns
    width = dividing if dividing >= 256 else power_of_two(columns)
    width = min(width, size)
    return min(size // width, power_of_two(rows)), width


def channel_block(channels: int) -> int:
    """Channels of a program: at most 64, and fewer where more than a ninth were idle."""
    block = min(64, power_of_two(channels))
    while block > 16 and 8 * block * -(-channels // block) > 9 * channels:
        block //= 2
    return block


def strips(rows: int, width: int, channels: int) -> tuple[int, int]:
    """Outputs of a strip, as even as the strips of a row can be, and channels of a thread."""
    for most, each in STRIPS:
        across = -(-width // most)
        if rows * across * channels >= 4 * PROGRAMS * 32 * each:
            break
    return -(-width // across), each


def strips_together(rows: int, others: int, block: int, each: int) -> int:
    """Rows of a program, with a strip of each; there are `others` programs to the same rows.

    Four warps of them share what they load; where programs would be few, it is down to one warp,
    which is given more registers for what is under way.
    """
    together = max(1, 128 * each // block)
    while together * block > 32 * each and others * -(-rows // together) < 4 * PROGRAMS:
        together //= 2
    return min(together, power_of_two(rows))
