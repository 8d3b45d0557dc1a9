"""decode_attention: one query of each head, over a cache of which a mask hides a part."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch_cache import launched
from .sizes import PROGRAMS, power_of_two

# Positions that a program takes at a time, and heads of the least product of matrices.
POSITIONS, LEAST_HEADS = 64, 16


@triton.jit
def attention_part_kernel(
    query,
    key,
    value,
    mask,
    parts,
    sums,
    positions,
    heads,
    query_stride_0,
    query_stride_1,
    key_stride_0,
    key_stride_1,
    key_stride_2,
    value_stride_0,
    value_stride_1,
    value_stride_2,
    mask_stride_0,
    mask_stride_1,
    mask_stride_3,
    scale,
    MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """TOGETHER heads of queries that share keys, over some blocks of positions.

    `parts` is (batch, heads, splits, WIDTH) and `sums` (2, batch, heads, splits): the largest
    score, and the sum of the exponentials of what others are less.
    """
    group, split = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(1)
    groups = heads // TOGETHER
    batch = (group // groups).to(tl.int64)
    shared = group % groups
    row, column = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    head = shared * TOGETHER + row
    inside = row < TOGETHER
    wide = column < WIDTH
    asked = tl.load(
        query + batch * query_stride_0 + head[:, None] * query_stride_1 + column[None, :],
        mask=inside[:, None] & wide[None, :],
        other=0.0,
    )
    key += batch * key_stride_0 + shared * key_stride_1
    value += batch * value_stride_0 + shared * value_stride_1
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, COLUMNS], tl.float32)
    for block in range(BLOCKS):
        position = (split * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        there = position < positions
        place = position.to(tl.int64)
        added = tl.zeros([HEADS, BLOCK], tl.float32)
        if MASK != 0:
            seen = tl.load(
                mask
                + batch * mask_stride_0
                + head[:, None] * mask_stride_1
                + place[None, :] * mask_stride_3,
                mask=inside[:, None] & there[None, :],
                other=0,
            )
            added = seen.to(tl.float32)
            if MASK == 1:
                added = tl.where(seen != 0, 0.0, float("-inf"))
        added = tl.where(inside[:, None] & there[None, :], added, float("-inf"))
        # What the mask hides from all of these heads is not read.
        if tl.max(tl.max(added, axis=1), axis=0) > float("-inf"):
            keys = tl.load(
                key + place[:, None] * key_stride_2 + column[None, :],
                mask=there[:, None] & wide[None, :],
                other=0.0,
            )
            if HEADS == 1:
                products = asked.to(tl.float32) * keys.to(tl.float32)
                scores = tl.sum(products, axis=1)[None, :]
            else:
                scores = tl.dot(asked, tl.trans(keys), input_precision="ieee")
            scores = scores * scale + added
            larger = tl.maximum(most, tl.max(scores, axis=1))
            # Of a head that sees nothing yet, -inf less -inf would be NaN.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp(scores - base[:, None])
            before = tl.exp(most - base)
            total = total * before + tl.sum(weights, axis=1)
            values = tl.load(
                value + place[:, None] * value_stride_2 + column[None, :],
                mask=there[:, None] & wide[None, :],
                other=0.0,
            )
            if HEADS == 1:
                products = tl.trans(weights) * values.to(tl.float32)
                made = tl.sum(products, axis=0)[None, :]
            else:
                made = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            result = result * before[:, None] + made
            most = larger
    place = (batch * heads + head) * splits + split
    tl.store(
        parts + place[:, None] * WIDTH + column[None, :],
        result,
        mask=inside[:, None] & wide[None, :],
    )
    tl.store(sums + place, most, mask=inside)
    every = tl.num_programs(0).to(tl.int64) * TOGETHER * splits
    tl.store(sums + every + place, total, mask=inside)


@triton.jit
def attention_whole_kernel(
    parts,
    sums,
    result,
    splits,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of one head together; 0 for a head that sees nothing, as in PyTorch."""
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    inside, wide = split < splits, column < WIDTH
    most = tl.load(sums + row * splits + split, mask=inside, other=float("-inf"))
    every = tl.num_programs(0).to(tl.int64) * splits
    total = tl.load(sums + every + row * splits + split, mask=inside, other=0.0)
    part = tl.load(
        parts + (row * splits + split[:, None]) * WIDTH + column[None, :],
        mask=inside[:, None] & wide[None, :],
        other=0.0,
    )
    largest = tl.max(most, axis=0)
    weight = tl.exp(most - tl.where(largest == float("-inf"), 0.0, largest))
    whole = tl.sum(total * weight, axis=0)
    found = tl.sum(part * weight[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(result + row * WIDTH + column, found.to(result.dtype.element_ty), mask=wide)


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one query each, shape (batch, heads, 1, width), over key and value."""
    batch, heads, _, width = query.shape
    groups, positions = key.shape[1], key.shape[2]
    together = heads // groups
    splits = max(1, min(triton.cdiv(positions, POSITIONS), PROGRAMS // (batch * groups)))
    blocks = triton.cdiv(triton.cdiv(positions, splits), POSITIONS)
    splits = triton.cdiv(positions, blocks * POSITIONS)
    device = query.device
    parts = torch.empty((batch, heads, splits, width), dtype=torch.float32, device=device)
    sums = torch.empty((2, batch, heads, splits), dtype=torch.float32, device=device)
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(batch, heads, 1, positions)
        mask_strides = mask.stride()
    columns = max(16, power_of_two(width))
    launched(
        attention_part_kernel,
        (batch * groups, splits),
        query,
        key,
        value,
        mask,
        parts,
        sums,
        positions,
        heads,
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        mask_strides[0],
        mask_strides[1],
        mask_strides[3],
        scale,
        MASK=0 if mask is None else 1 if mask.dtype is torch.bool else 2,
        WIDTH=width,
        TOGETHER=together,
        HEADS=1 if together == 1 else max(LEAST_HEADS, power_of_two(together)),
        COLUMNS=columns,
        BLOCK=POSITIONS,
        BLOCKS=blocks,
        num_warps=4,
    )
    result = torch.empty((batch, heads, 1, width), dtype=query.dtype, device=device)
    launched(
        attention_whole_kernel,
        (batch * heads,),
        parts,
        sums,
        result,
        splits,
        WIDTH=width,
        COLUMNS=columns,
        SPLITS=power_of_two(splits),
        num_warps=1,
    )
    return result
