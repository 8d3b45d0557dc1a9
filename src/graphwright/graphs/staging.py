"""Staging: how arguments on the host get into a graph's memory on a GPU.

A copy from pageable memory may have the host wait for all that was launched before. So a call's
values are written to pinned memory first, and copied from there in the order of the stream, after
the replays before and ahead of its own. That copy may still have to come when the next call writes
its values: each buffer of pinned memory is used again only when its own copy is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

# So many calls may wait in a stream before the next one waits for the first of them.
_MOST_BUFFERS = 4

# Makes the tensors of some positions in memory of its own.
Views = Callable[[Sequence[torch.Tensor]], list[tuple[int, torch.Tensor]]]
# Copies one tensor to another one.
Copy = Callable[[torch.Tensor, torch.Tensor], None]


class StagingBuffer:
    """Pinned memory for one call's values.

    Attributes:
        parts: the memory, a part for each target.
        views: the tensors in it, with their positions among the arguments.
    """

    def __init__(self, targets: Sequence[torch.Tensor], views: Views) -> None:
        pinned = targets[0].is_cuda
        with torch.inference_mode(False):
            self.parts = [
                torch.empty(t.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for t in targets
            ]
            self.views = views(self.parts)
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
        views: makes the arguments' tensors in such memory.
        copy: copies an argument to its tensor there.
    """

    def __init__(self, targets: Sequence[torch.Tensor], views: Views, copy: Copy) -> None:
        self._targets = targets
        self._views = views
        self._copy = copy
        self._buffers: deque[StagingBuffer] = deque()  # the one that was used last comes last

    def send(self, leaves: Sequence[Any]) -> None:
        """Send a call's values to the targets, in the order of the device's current stream."""
        buffer = self._next()
        for slot, view in buffer.views:
            self._copy(leaves[slot], view)
        buffer.copy_to(self._targets)
        self._buffers.append(buffer)

    def _next(self) -> StagingBuffer:
        waiting = self._buffers
        if len(waiting) < _MOST_BUFFERS and not (waiting and waiting[0].is_free):
            return StagingBuffer(self._targets, self._views)
        buffer = waiting.popleft()
        buffer.wait()
        return buffer
