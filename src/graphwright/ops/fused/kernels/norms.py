"""layer_norm, add_layer_norm, add_rms_norm: a program holds a row or several short ones."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch_cache import launched
from ..operands import row_stride
from .sizes import row_block


@triton.jit
def norm_kernel(
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
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add, where there is a residual, and normalise ROWS rows of at most BLOCK columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    valid = column < columns
    inside = (row < rows)[:, None] & valid
    row = row.to(tl.int64)[:, None]
    a = tl.load(x + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_first")
    if RESIDUAL:
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
    place = row * columns + column
    value = a.to(tl.float32)
    if RESIDUAL:
        rounded = (value + b.to(tl.float32)).to(total.dtype.element_ty)
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


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual and this sum, both contiguous; around the mean if `centred`.

    Without a residual, the norm of x and x itself.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    normalized = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normalized)
    # A row alone is half of what is under way where there is a residual.
    alone = residual is None and x.dtype.itemsize == 2
    together, block, warps = row_block(rows, columns, *(2048, 2048) if alone else ())
    launched(
        norm_kernel,
        (triton.cdiv(rows, together),),
        x,
        residual,
        weight,
        bias,
        normalized,
        total,
        rows,
        columns,
        row_stride(x),
        0 if residual is None else row_stride(residual),
        eps,
        RESIDUAL=residual is not None,
        CENTRED=centred,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        ROWS=together,
        BLOCK=block,
        num_warps=warps,
    )
    return normalized, total
