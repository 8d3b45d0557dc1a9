"""Errors: how far apart two sets of values are, in units that do not depend on their scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..calls.snapshots import CallOutcome, same_value

# The largest share of the results' root mean square that other kernels may differ by.
ROUNDING = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,  # TF32
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
OTHER_ROUNDING = 1e-1
# A graph runs eager's own kernels: a result that is off by more than this, in units in the last
# place, was computed in another way.
_AUDIT_RMS_ULPS = 32
_AUDIT_MAX_ULPS = 256


@dataclass(frozen=True)
class ErrorMeasure:
    """Distance from the reference in units of the reference's root mean square."""

    rms: float
    max: float


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as float64; real and imaginary parts in a dimension of their own."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.double()


def peak_of(values: torch.Tensor) -> float:
    """Largest magnitude over the root mean square, of the finite values; at least 1."""
    values = values[torch.isfinite(values)]
    if values.numel() == 0:
        return 1.0
    scale = _root_mean_square(values)
    return max(1.0, _largest(values) / scale) if scale > 0 else 1.0


def _root_mean_square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) / math.sqrt(values.numel())


def _largest(values: torch.Tensor) -> float:
    """Largest magnitude; NaN where there is one."""
    return float(torch.linalg.vector_norm(values, math.inf))


def error_of(
    actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor
) -> tuple[ErrorMeasure, float]:
    """Error of `actual` and the peak of `exact`, where eager and exact are both finite."""
    wide, exact, eager = as_float64(actual), as_float64(exact), as_float64(eager)
    where = torch.isfinite(eager) & torch.isfinite(exact)
    if not where.all():
        wide, exact = wide[where], exact[where]
    if exact.numel() == 0:
        return ErrorMeasure(0.0, 0.0), 1.0
    own = _root_mean_square(exact)
    scale = own or 1.0
    gap = wide - exact
    error = ErrorMeasure(_root_mean_square(gap) / scale, _largest(gap) / scale)
    return error, max(1.0, _largest(exact) / scale)


def errors(outcome: CallOutcome, exact: Mapping[str, torch.Tensor]) -> dict[str, ErrorMeasure]:
    """An outcome's error against exact values, leaf by leaf, where their shapes agree."""
    found = {}
    for name, leaf in tensors_in(outcome).items():
        if name in exact and exact[name].shape == leaf.shape:
            found[name] = error_of(leaf, exact[name], leaf)[0]
    return found


def special_values(tensor: torch.Tensor) -> torch.Tensor:
    """0 where finite, else 1 for NaN, 2 for +Inf, 3 for -Inf."""
    values = as_float64(tensor)
    if torch.isfinite(values).all():
        return torch.zeros_like(values, dtype=torch.int8)
    found = values.isnan() + 2 * values.isposinf() + 3 * values.isneginf()
    return found.to(torch.int8)


def worse(a: ErrorMeasure | None, b: ErrorMeasure) -> ErrorMeasure:
    """The larger of two errors."""
    return b if a is None or b.rms > a.rms else a


def tensors_in(outcome: CallOutcome) -> dict[str, torch.Tensor]:
    """All tensors of an outcome, by name."""
    return {n: v for n, v in outcome.leaves().items() if isinstance(v, torch.Tensor)}


def difference(a: Any, b: Any, *, other_kernels: bool = False) -> str | None:
    """How a leaf of a graph's result differs from eager's, in words, beyond rounding."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if same_value(a, b) else f"{a!r} instead of {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}"
    if not torch.equal(special_values(a), special_values(b)):
        return "NaN or Inf in other places"
    error, peak = error_of(a, b, b)
    real = b.dtype.to_real() if b.dtype.is_complex else b.dtype
    ulp = torch.finfo(real).eps if real.is_floating_point else 0.0
    rms, largest = _AUDIT_RMS_ULPS * ulp, _AUDIT_MAX_ULPS * ulp
    if other_kernels and real.is_floating_point:
        rms = ROUNDING.get(real, OTHER_ROUNDING)
        largest = 10 * rms
    if error.rms <= rms and error.max <= largest * peak:
        return None
    return f"off by {error.rms:.1e} (rms) and {error.max:.1e} (largest)"
