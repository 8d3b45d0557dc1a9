"""How far a candidate's results may be off: a few times eager's own error against float64."""

from __future__ import annotations

import torch

from .accuracy import ErrorMeasure

# Of the root mean square error, and of the largest one.
RMS_FACTOR = 3.0
MAX_FACTOR = 8.0
# Eager may be exact by luck on a leaf of few elements: some units in the last place are allowed.
_FREE_RMS_ULPS = 2.0
_FREE_MAX_ULPS = 8.0
# A precision that the caller allowed may cost this many of its units in the last place.
_LOSSY_RMS_ULPS = 8.0
FEW_ELEMENTS = 64
# If the caller's switches permit TF32, a candidate may use it even if eager does not happen to.
TF32_ULP, _TF32_RMS_ULPS = 2.0**-10, 2.0


def limit_of(
    leaf: torch.Tensor, eager: ErrorMeasure, peak: float, *, ulp: float | None, tf32: bool
) -> ErrorMeasure:
    """The error that a leaf of a result may have.

    Args:
        leaf: the result that it is compared with.
        eager: eager's error against float64.
        peak: the largest value over the root mean square.
        ulp: the unit in the last place of a precision that the caller allowed, if any.
        tf32: whether the caller's switches permit TF32.
    """
    real = leaf.dtype.to_real() if leaf.dtype.is_complex else leaf.dtype
    own = torch.finfo(real).eps if real.is_floating_point else 0.0
    beside = beside_eager(eager, own, peak)
    rms, largest = beside.rms, beside.max
    if ulp is not None and leaf.dtype.is_floating_point:
        rms = max(rms, _LOSSY_RMS_ULPS * ulp)
        largest = max(largest, MAX_FACTOR / RMS_FACTOR * rms * peak)
    if tf32 and leaf.dtype in (torch.float32, torch.complex64):
        rms = max(rms, _TF32_RMS_ULPS * TF32_ULP)
        largest = max(largest, MAX_FACTOR / RMS_FACTOR * rms * peak)
    if leaf.numel() < FEW_ELEMENTS:
        # The mean of few elements varies as much as the largest: allow the larger bound.
        rms = max(rms, largest)
    return ErrorMeasure(rms, largest)


def beside_eager(eager: ErrorMeasure, ulp: float, peak: float) -> ErrorMeasure:
    """The error that a result may have where eager's own is this one.

    Args:
        eager: eager's error against float64.
        ulp: the unit in the last place of the result's dtype.
        peak: the largest value over the root mean square.
    """
    rms = max(RMS_FACTOR * eager.rms, _FREE_RMS_ULPS * ulp)
    return ErrorMeasure(rms, max(MAX_FACTOR * eager.max, _FREE_MAX_ULPS * ulp * peak))
