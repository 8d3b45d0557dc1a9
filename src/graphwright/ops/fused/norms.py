"""Norms, and sums with their norm, as at each residual connection of a transformer."""

from __future__ import annotations

import torch

from . import reference
from .fused_operator import define
from .operands import has_rows, is_row, like, takes

# A row is held in registers: 64 numbers a thread at this width.
LONGEST_ROW = 32768

Two = tuple[torch.Tensor, torch.Tensor]


def _applies(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> bool:
    return (
        takes(x)
        and (residual is None or (like(x, residual) and has_rows(residual)))
        and x.shape[-1] <= LONGEST_ROW
        and is_row(weight, x)
        and is_row(bias, x)
        and has_rows(x)
    )


def _layer_norm_applies(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> bool:
    return _applies(x, None, weight, bias)


def _add_layer_norm_applies(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> bool:
    return _applies(x, residual, weight, bias)


def _add_rms_norm_applies(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> bool:
    return _applies(x, residual, weight)


def _launch_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    from .kernels.norms import norm

    return norm(x, None, weight, bias, eps, centred=True)[0]


def _launch_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Two:
    from .kernels.norms import norm

    return norm(x, residual, weight, bias, eps, centred=True)


def _launch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> Two:
    from .kernels.norms import norm

    return norm(x, residual, weight, None, eps, centred=False)


LAYER_NORM = define(
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
    reference.layer_norm,
    applies=_layer_norm_applies,
    launch=_launch_layer_norm,
)
ADD_LAYER_NORM = define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, "
    "float eps=1e-05) -> (Tensor, Tensor)",
    reference.add_layer_norm,
    applies=_add_layer_norm_applies,
    launch=_launch_add_layer_norm,
)
ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-06) "
    "-> (Tensor, Tensor)",
    reference.add_rms_norm,
    applies=_add_rms_norm_applies,
    launch=_launch_add_rms_norm,
)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer norm over the last dimension, in about half the time of PyTorch's for a few rows.

    Args:
        x: (..., N); dtypes and layouts as `add_layer_norm`.
        weight: (N,), or None for ones.
        bias: (N,), or None for zeros.
        eps: added to the variance.

    Returns:
        As x in shape and dtype.

    Raises:
        RuntimeError: where torch.nn.functional.layer_norm raises it.
    """
    result: torch.Tensor = torch.ops.graphwright.layer_norm.default(x, weight, bias, eps)
    return result


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Two:
    """Layer norm of x + residual, with that sum, in one pass over memory.

    The sum is rounded to the dtype before it is normalised, as in PyTorch. The kernel takes
    float32, float16 and bfloat16 with a contiguous last dimension of at most 32768; all else is
    computed by PyTorch's own operations. The backward pass computes the sum and norm again.

    Args:
        x: (..., N).
        residual: as x, or anything that x + residual takes.
        weight: (N,), or None for ones.
        bias: (N,), or None for zeros.
        eps: added to the variance.

    Returns:
        The normalised sum and the sum, each as x in shape and dtype.

    Raises:
        RuntimeError: where torch.nn.functional.layer_norm(x + residual, ...) raises it.
    """
    result: Two = torch.ops.graphwright.add_layer_norm.default(x, residual, weight, bias, eps)
    return result


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> Two:
    """Root-mean-square norm of x + residual, with that sum, in one pass over memory.

    As `add_layer_norm`, without mean and bias (Zhang and Sennrich, 2019).

    Args:
        x: (..., N).
        residual: as x, or anything that x + residual takes.
        weight: (N,), or None for ones.
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum, each as x in shape and dtype.

    Raises:
        RuntimeError: where torch.nn.functional.rms_norm(x + residual, ...) raises it.
    """
    result: Two = torch.ops.graphwright.add_rms_norm.default(x, residual, weight, eps)
    return result
