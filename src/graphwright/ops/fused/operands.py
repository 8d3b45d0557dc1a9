"""Checks whether kernels can take a tensor (dtype, rows, sizes), and sizes of windows."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Kernels count rows and columns in 32 bits; offsets of rows are taken in 64.
LIMIT = 2**31 - 2**16
# Elements of a window: kernels unroll it.
LARGEST_WINDOW = 49
# A number for both dimensions of an image, or one for each.
Pair = int | list[int] | tuple[int, ...]


def takes(x: torch.Tensor) -> bool:
    """Whether kernels compute a tensor's dtype, and it has elements."""
    return x.dtype in DTYPES and x.dim() > 0 and x.numel() > 0 and x.layout is torch.strided


def like(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and device."""
    return x.shape == other.shape and x.dtype == other.dtype and x.device == other.device


def is_row(row: torch.Tensor | None, x: torch.Tensor) -> bool:
    """Whether a weight or bias has an element for each column of x, one after the other."""
    if row is None:
        return True
    return (
        row.shape == x.shape[-1:]
        and row.dtype == x.dtype
        and row.device == x.device
        and row.is_contiguous()
    )


def row_stride(x: torch.Tensor) -> int | None:
    """The elements from one row to the next when x is seen as (rows, columns).

    None where there is no such number: the leading dimensions lie in another order, or the
    elements of a row apart. Rows that overlap in part are left out too, as PyTorch's operations
    choose another layout for their result.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return columns
    if columns > 1 and x.stride(-1) != 1:
        return None
    found, following = None, 0
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if found is None:
            found = stride
        elif stride != following:
            return None
        following = stride * size
    if found is None:
        return columns
    return found if found == 0 or found >= columns else None


def has_rows(x: torch.Tensor) -> bool:
    """Whether x is (rows, columns) to a kernel, and neither is beyond 32 bits."""
    return row_stride(x) is not None and x.numel() // x.shape[-1] < LIMIT and x.shape[-1] < LIMIT


def two(value: Pair) -> tuple[int, int]:
    """The sizes for both dimensions."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])


def pooled_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many windows fit along a dimension."""
    return (size + 2 * padding - kernel) // stride + 1
