"""Whether a library's fused kernel keeps NaN; that very kernel is tried.

cuDNN and cuBLASLt choose among many kernels for each shape. The ReLU of some float32 kernels turns
NaN into 0, where PyTorch's own keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Known = dict[tuple[Any, ...], bool]


def keeps_nan(
    x: torch.Tensor,
    eager: Callable[[torch.Tensor], torch.Tensor],
    fused: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Whether what is fused gives NaN wherever eager does, for nothing but NaN.

    Args:
        x: like the argument of both, in shape, dtype, device and layout; its numbers do not count.
        eager: what is to be replaced.
        fused: what would replace it; whatever it raises says no.
    """
    nothing = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        nothing = nothing.contiguous(memory_format=torch.channels_last)
    try:
        lost = eager(nothing).isnan() & ~fused(nothing).isnan()
    except RuntimeError:
        return False
    return not bool(lost.any())
