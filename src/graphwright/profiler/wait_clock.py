"""How long the host waits for a GPU in a call, taken without a profiler, which would shorten it.

A profiler makes the host slower, so that the device is done before the host asks. Here only the
functions that read values of tensors, or wait by name, are timed: as attributes of classes and
modules, while some calls run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

# Methods and functions that may wait for the device, as users call them.
_METHODS = (
    *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__getitem__", "__setitem__"),
    *("item", "tolist", "cpu", "numpy", "to", "nonzero", "unique", "masked_select", "equal"),
    *("allclose", "is_nonzero", "copy_", "argwhere"),
)
_FUNCTIONS = ("nonzero", "unique", "masked_select", "equal", "allclose", "where", "argwhere")


class WaitClock:
    """Adds up what functions that may wait take beyond an operation without work.

    Args:
        operation_s: seconds of such an operation.

    Attributes:
        seconds: beyond that, of all calls together.
    """

    def __init__(self, operation_s: float) -> None:
        self.seconds = 0.0
        self._operation_s = operation_s
        self._depth = 0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time such functions while the block runs."""
        with contextlib.ExitStack() as stack:
            for owner, names in (
                (torch.Tensor, _METHODS),
                (torch, _FUNCTIONS),
                (torch.cuda, ("synchronize",)),
                (torch.cuda.Stream, ("synchronize",)),
                (torch.cuda.Event, ("synchronize",)),
            ):
                for name in names:
                    original = getattr(owner, name, None)
                    if original is not None:
                        patch = mock.patch.object(owner, name, self._timed(original))
                        stack.enter_context(patch)
            yield

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._depth += 1
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                spent = time.perf_counter() - began
                self.seconds += max(0.0, spent - self._operation_s)

        return call
