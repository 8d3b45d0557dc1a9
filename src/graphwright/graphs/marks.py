"""Marks for profilers: a replay bears the name of what was captured.

Under torch.profiler a mark is a `record_function`, under torch.autograd.profiler.emit_nvtx a range
of NVTX. Nsight Systems sees such ranges too where it runs this process (it sets a variable of the
environment) or GRAPHWRIGHT_NVTX is 1. Else there are no marks, and looking takes nanoseconds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.autograd import profiler

from ..processes.environment_variables import NVTX, is_on

# What Nsight Systems sets in processes that it profiles.
_SESSION = "NSYS_PROFILING_SESSION_ID"
_NVTX = _SESSION in os.environ or is_on(NVTX, by_default=False)
# From which level on torch.profiler's library prints to stderr; of 6 there is nothing.
_KINETO, _NOTHING = "KINETO_LOG_LEVEL", "6"


def wanted() -> bool:
    """Whether anybody would see a mark."""
    return profiler._is_profiler_enabled or _NVTX


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """Mark what runs inside the block."""
    with contextlib.ExitStack() as stack:
        if profiler._is_profiler_enabled:
            stack.enter_context(torch.profiler.record_function(name))
        if _NVTX and torch.cuda.is_initialized():
            stack.enter_context(torch.cuda.nvtx.range(name.replace("{", "(").replace("}", ")")))
        yield


@contextlib.contextmanager
def silent_profiler() -> Iterator[None]:
    """Have a torch.profiler that starts inside the block print nothing of its own.

    The first one of a process decides for all that follow. What the user has chosen stays.
    """
    if _KINETO in os.environ:
        yield
        return
    os.environ[_KINETO] = _NOTHING
    try:
        yield
    finally:
        os.environ.pop(_KINETO, None)
