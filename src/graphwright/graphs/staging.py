"""Staging: how arguments on the host get into a graph's memory on a GPU.

A copy from pageable memory may have the host wait for all that was launched before. So a call's
values are written to pinned memory first, and copied from there in the order of the stream, after
the replays before and ahead of its own. That copy may still have to come when the next call writes
its values: each buffer of pinned memory is used again only when its own copy is over.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch

# So many calls may wait in a stream before the next one waits for the first of them.
_MOST_BUFFERS = 4


class StagingBuffer:
    """Pinned memory for one call's values.

    Attributes:
        parts: the memory, a part for each target.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        pinned = targets[0].is_cuda
        with torch.inference_mode(False):
            self.parts = [
                torch.empty(t.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for t in targets
            ]
        self._copied = torch.cuda.Event() if pinned else None

    def copy_to(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy it to the device, in the order of its current stream."""
        for part, target in zip(self.parts, targets, strict=True):
            target.copy_(part, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(targets[0].device))

    @property
    def is_free(self) -> bool:
        """Whether its last copy is over."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Wait until its last copy is over."""
        if self._copied is not None:
            self._copied.synchronize()


class Staging:
    """The buffers of one graph; their callers hold its pool's lock.

    Args:
        targets: memory on the device, as bytes.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._targets = targets
        self._buffers: deque[StagingBuffer] = deque()  # the one that was used last comes last

    @contextlib.contextmanager
    def buffers(self) -> Iterator[Sequence[torch.Tensor]]:
        """Memory to write a call's values to; it is copied to the targets after the block."""
        buffer = self._next()
        yield buffer.parts
        buffer.copy_to(self._targets)
        self._buffers.append(buffer)

    def _next(self) -> StagingBuffer:
        waiting = self._buffers
        if len(waiting) < _MOST_BUFFERS and not (waiting and waiting[0].is_free):
            return StagingBuffer(self._targets)
        buffer = waiting.popleft()
        buffer.wait()
        return buffer
