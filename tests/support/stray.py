"""A kernel that writes far outside of any tensor; imported where there is a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stray(pointer):
    tl.store(pointer + (1 << 42), 1.0)
