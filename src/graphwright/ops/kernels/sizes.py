"""How a kernel's work is cut up: formulas rather than trials at run time."""

from __future__ import annotations

# Two for each multiprocessor of an H100 or H200, so that a small call uses the whole device.
PROGRAMS = 2 * 132


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
