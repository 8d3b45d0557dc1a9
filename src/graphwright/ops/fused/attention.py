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
    if not all(takes(x) and x.dim() == 4 and x.dtype == query.dtype for x in tensors):
        return False
    batch, heads, queries, width = query.shape
    if key.shape != value.shape or queries != 1 or width > WIDEST_HEAD:
        return False
    if key.shape[0] != batch or key.shape[3] != width or heads % key.shape[1]:
        return False
    if any(x.device != query.device or x.stride(3) != 1 for x in tensors):
        return False
    if max(key.shape[2], batch * heads) >= LIMIT:
        return False
    return mask is None or (
        mask.device == query.device
        and (mask.dtype is torch.bool or mask.dtype == query.dtype)
        and mask.dim() == 4
        and all(
            m in (1, n) for m, n in zip(mask.shape, (batch, heads, 1, key.shape[2]), strict=True)
        )
    )


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    from .kernels import attention

    return attention.decode_attention(query, key, value, mask, scale)


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
