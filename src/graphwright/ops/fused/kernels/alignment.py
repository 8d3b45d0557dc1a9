"""What a compiler is told of numbers that it does not know."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def known_multiple(number, FACTOR: tl.constexpr):
    """A number that the factor divides, written so that the compiler sees that it does."""
    return number // FACTOR * FACTOR
