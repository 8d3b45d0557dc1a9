"""MemoryMeter: how much memory calls take at most, and how much they keep."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import Any

import torch

from .clock import Call


class MemoryMeter:
    """Peak memory, in bytes, above what was in use when the meter was made.

    On CUDA it is what torch's allocator has handed out, or what it has reserved beyond that, as
    the pools of graphs are; on Linux CPUs the process's resident set, its high-water mark being
    reset beforehand (proc(5), clear_refs). Elsewhere there is no figure.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settle()
        self._start = self._in_use()

    def peak(self, call: Call) -> int | None:
        """The largest peak of three calls, with what has been kept since the meter was made."""
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif not _reset_high_water():
            return None
        for _ in range(3):
            call()
            if self.device.type == "cpu":
                # What the heap keeps of a call that is over is not the next one's. They differ in
                # where they find room, so that it would add up.
                _trim_heap()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            allocated = torch.cuda.max_memory_allocated(self.device)
            high: tuple[int, ...] = (allocated, torch.cuda.max_memory_reserved(self.device))
        else:
            high = (_status_bytes("VmHWM"),)
        return max(0, *(after - before for after, before in zip(high, self._start, strict=True)))

    def kept(self) -> int:
        """Bytes in use between calls: allocated on CUDA, else resident."""
        self._settle()
        return self._in_use()[0]

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            _trim_heap()

    def _in_use(self) -> tuple[int, ...]:
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            return allocated, torch.cuda.memory_reserved(self.device)
        return (_status_bytes("VmRSS"),)


def _reset_high_water() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
            handle.write("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    """A figure of proc(5)'s status file; 0 where there is none."""
    with contextlib.suppress(OSError):
        with open("/proc/self/status", encoding="ascii") as handle:
            for line in handle:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    return 0


def _trim_heap() -> None:
    """Hand freed heap pages back, so that a later peak is not hidden under an earlier one."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Any = ctypes.CDLL(None).malloc_trim
        trim(0)
