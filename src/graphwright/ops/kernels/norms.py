"""add_layer_norm and add_rms_norm: a row, or several short ones, in the registers of a program."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import row_stride
from .sizes import row_block


@triton.jit
def add_norm_kernel(
    x,
    residual,
    weight,
    bias,
    normalized,
    total,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add, and normalise ROWS rows of at most BLOCK columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    valid = column < columns
    inside = (row < rows)[:, None] & valid
    row = row.to(tl.int64)[:, None]
    a = tl.load(x + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_first")
    b = tl.load(
        residual + row * residual_stride + column,
        mask=inside,
        other=0.0,
        eviction_policy="evict_first",
    )
    # Before the reduction, so that they are under way while it waits.
    if WEIGHT:
        scale = tl.load(weight + column, mask=valid, other=0.0, eviction_policy="evict_last")
    if BIAS:
        shift = tl.load(bias + column, mask=valid, other=0.0, eviction_policy="evict_last")
    rounded = (a.to(tl.float32) + b.to(tl.float32)).to(total.dtype.element_ty)
    place = row * columns + column
    tl.store(total + place, rounded, mask=inside)
    value = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(value, axis=1, keep_dims=True) / columns
        value = tl.where(valid, value - mean, 0.0)
    square = tl.sum(value * value, axis=1, keep_dims=True) / columns
    value = value * tl.rsqrt(square + eps)
    if WEIGHT:
        value = value * scale.to(tl.float32)
    if BIAS:
        value = value + shift.to(tl.float32)
    tl.store(normalized + place, value.to(normalized.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual and this sum, both contiguous; around the mean if `centred`."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normalized = torch.empty_like(total)
    together, block, warps = row_block(rows, columns)
    add_norm_kernel[(triton.cdiv(rows, together),)](
        x,
        residual,
        weight,
        bias,
        normalized,
        total,
        rows,
        columns,
        row_stride(x),
        row_stride(residual),
        eps,
        CENTRED=centred,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        ROWS=together,
        BLOCK=block,
        num_warps=warps,
    )
    return normalized, total
