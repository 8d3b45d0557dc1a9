"""masked_softmax: a row, or several short ones, in the registers of a program."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch_cache import launched
from .sizes import row_block


@triton.jit
def masked_softmax_kernel(
    scores,
    mask,
    result,
    rows,
    columns,
    size_1,
    size_2,
    scores_stride_0,
    scores_stride_1,
    scores_stride_2,
    mask_stride_0,
    mask_stride_1,
    mask_stride_2,
    mask_stride_3,
    scale,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of at most BLOCK columns, of BLOCK if WHOLE.

    A row is an index into three dimensions.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None]
    if not WHOLE:
        inside = inside & (column < columns)
    outer = row // size_2
    outermost = outer // size_1
    index_2 = (row - outer * size_2).to(tl.int64)
    index_1 = (outer - outermost * size_1).to(tl.int64)
    index_0 = outermost.to(tl.int64)
    begin = index_0 * scores_stride_0 + index_1 * scores_stride_1 + index_2 * scores_stride_2
    value = tl.load(
        scores + begin[:, None] + column,
        mask=inside,
        other=float("-inf"),
        eviction_policy="evict_first",
    ).to(tl.float32)
    value = value * scale
    if not WHOLE:
        # After that: a scale of 0 would make NaN of -inf.
        value = tl.where(inside, value, float("-inf"))
    if MASK:
        begin = index_0 * mask_stride_0 + index_1 * mask_stride_1 + index_2 * mask_stride_2
        attend = tl.load(mask + begin[:, None] + column * mask_stride_3, mask=inside, other=0)
        value = tl.where(attend != 0, value, float("-inf"))
    value = tl.exp(value - tl.max(value, axis=1, keep_dims=True))
    value = value * (1.0 / tl.sum(value, axis=1, keep_dims=True))
    place = row.to(tl.int64)[:, None] * columns + column
    tl.store(result + place, value.to(result.dtype.element_ty), mask=inside)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Softmax over the last dimension of scores * scale where the mask is true, contiguous."""
    result = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    columns = scores.shape[-1]
    rows = scores.numel() // columns
    missing = 4 - scores.dim()
    sizes = (1,) * missing + tuple(scores.shape)
    strides = (0,) * missing + scores.stride()
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        steps = [0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True)]
        mask_strides = (0,) * (4 - mask.dim()) + tuple(steps)
    together, block, warps = row_block(rows, columns, 2048, 1024)
    launched(
        masked_softmax_kernel,
        (triton.cdiv(rows, together),),
        scores,
        mask,
        result,
        rows,
        columns,
        sizes[1],
        sizes[2],
        *strides[:3],
        *mask_strides,
        scale,
        MASK=mask is not None,
        WHOLE=columns == block,
        ROWS=together,
        BLOCK=block,
        num_warps=warps,
    )
    return result
