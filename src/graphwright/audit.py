"""Is a graph's result still eager's? The comparison behind `graph(audit=N)`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .accuracy import OTHER_ROUNDING, ROUNDING, error_of, special_values
from .errors import VerificationError
from .signature import leaf_names
from .snapshots import same_value

# A graph runs eager's own kernels: what is off by more than rounding is another computation.
_AUDIT_RMS_ULPS = 32
_AUDIT_MAX_ULPS = 256


def compare(result: Any, expected: Any, name: str, *, other_kernels: bool = False) -> None:
    """Raise VerificationError where a graph's result is not eager's.

    Args:
        result: the graph's.
        expected: eager's.
        name: of the graph.
        other_kernels: whether the graph may run others than eager did, for other shapes.
    """
    mine, theirs = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    names = leaf_names(expected, "output")
    for leaf, a, b in zip(names, mine, theirs, strict=True):
        what = difference(a, b, other_kernels=other_kernels)
        if what is not None:
            raise VerificationError(
                f"An audit found that {leaf} of the graph {name} is not eager's: {what}.",
                remedy="Something that the call depends on changed unseen (docs: what is not "
                "watched). Call release(), so that it is captured again.",
            )


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
