"""Softmax of scaled scores under a mask, which is read where it lies."""

from __future__ import annotations

import torch

from . import reference
from .fused_operator import define
from .operands import LIMIT, takes

# A row is held in registers.
LONGEST_ROW = 32768


def _applies(scores: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> bool:
    columns = scores.shape[-1] if scores.dim() else 0
    if not takes(scores) or scores.dim() > 4 or columns > LONGEST_ROW:
        return False
    if (columns > 1 and scores.stride(-1) != 1) or scores.numel() // columns >= LIMIT:
        return False
    if mask is None:
        return True
    return (
        mask.dtype is torch.bool
        and mask.device == scores.device
        and mask.dim() <= scores.dim()
        and all(
            m in (1, s) for m, s in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
        )
    )


def _launch(
    scores: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    from .kernels.softmax import masked_softmax

    return masked_softmax(scores, mask, scale)


MASKED_SOFTMAX = define(
    "masked_softmax(Tensor scores, Tensor? mask=None, float scale=1.0) -> Tensor",
    reference.masked_softmax,
    applies=_applies,
    launch=_launch,
)


def masked_softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, scale: float = 1.0
) -> torch.Tensor:
    """Softmax over the last dimension of scores * scale, where the mask is true.

    A row without a true element gives NaN, as in PyTorch. The kernel takes float32, float16 and
    bfloat16 of at most 4 dimensions, the last one contiguous and at most 32768 long, and computes
    in float32 throughout; all else is computed by PyTorch's own operations.

    Args:
        scores: (..., queries, keys).
        mask: boolean, true where a query attends to a key, as in scaled_dot_product_attention;
            of any shape that broadcasts to that of the scores. None for no mask.
        scale: what the scores are multiplied with first.

    Returns:
        As scores in shape and dtype, contiguous.

    Raises:
        RuntimeError: where (scores * scale).masked_fill(~mask, -inf).softmax(-1) raises it.
        TypeError: if the mask is of a floating dtype.
    """
    result: torch.Tensor = torch.ops.graphwright.masked_softmax.default(scores, mask, scale)
    return result
