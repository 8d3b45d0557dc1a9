"""Attention of one query for each head: the next token of a text, over a cache of keys and values.

Flash-decoding (https://pytorch.org/blog/flash-decoding): programs share the positions of a head, as
one program alone would leave most of the device idle. What the mask hides is not read.
"""

from __future__ import annotations

import torch

from .fused_operator import define
from .operands import LIMIT, takes

WIDEST_HEAD = 256


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=bool(query.shape[1] != key.shape[1])
    )
    return result.contiguous()


def applies(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> bool:
    """Whether the kernel computes these arguments, as far as shapes, strides and dtypes tell."""
    tensors = (query, key, value)
    if not all(_is_taken(x, query) for x in tensors) or key.shape != value.shape:
        return False
    batch, heads, queries, width = query.shape
    groups, positions = key.shape[1:3]
    if queries != 1 or width > WIDEST_HEAD or max(positions, batch * heads) >= LIMIT:
        return False
    if key.shape != (batch, groups, positions, width) or heads % groups:
        return False
    return mask is None or _is_mask(mask, query, positions)


def _is_taken(x: torch.Tensor, query: torch.Tensor) -> bool:
    alike = x.dtype == query.dtype and x.device == query.device
    return takes(x) and x.dim() == 4 and alike and x.stride(3) == 1


def _is_mask(mask: torch.Tensor, query: torch.Tensor, positions: int) -> bool:
    if mask.device != query.device or mask.dim() != 4:
        return False
    whole = (*query.shape[:3], positions)
    broadcasts = all(m in (1, n) for m, n in zip(mask.shape, whole, strict=True))
    return broadcasts and mask.dtype in (torch.bool, query.dtype)


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    from .kernels import decode_attention as kernels

    return kernels.decode_attention(query, key, value, mask, scale)


DECODE_ATTENTION = define(
    "decode_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
    _reference,
    applies=applies,
    launch=_launch,
)


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """scaled_dot_product_attention of one query for each head.

    The kernel takes float32, float16 and bfloat16 of heads that are at most 256 wide; all else is
    computed by PyTorch's own operation. Heads of queries may share keys and values.

    Args:
        query: (batch, heads, 1, width).
        key: (batch, groups, positions, width); `groups` divides `heads`.
        value: as `key`.
        mask: what each query sees (boolean), or what is added to its scores; broadcasts to
            (batch, heads, 1, positions). None where it sees all.
        scale: what scores are multiplied with.

    Returns:
        (batch, heads, 1, width), contiguous; 0 of a head that sees nothing.
    """
    result: torch.Tensor = torch.ops.graphwright.decode_attention.default(
        query, key, value, mask, scale
    )
    return result
