"""The protocol of recorders, which CUDA graphs (cuda/) and the CPU tape (cpu/) both implement.

A recorder owns the memory of one pool and orders its replays; a recording is one graph in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ..errors import CaptureError
from .inspection.node import Node


class Interrupted(CaptureError):
    """Another thread broke a capture; it can be tried again."""


Work = Callable[[], Any]
Allocate = Callable[[int], torch.Tensor]
Prepared = TypeVar("Prepared")


class Recording(Protocol):
    """Work that was recorded once and can be replayed on the same memory.

    Attributes:
        name: what profilers show of a replay.
    """

    name: str

    @property
    def nodes(self) -> int:
        """How many operations it replays: a CUDA graph's nodes."""

    @property
    def external(self) -> list[torch.UntypedStorage]:
        """Memory that it uses and does not own, as far as the recorder itself has seen it."""

    def order(self) -> None:
        """Have what follows on the current stream wait for the recorder's last replay."""

    def replay(self) -> None:
        """Repeat the work on what its memory holds now."""

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy `sources` into the feeds, repeat the work, copy the drains into `targets`.

        Bytes are copied as they are: each source must have its feed's strides, each target its
        drain's.
        """

    def inspect(self) -> tuple[list[Node], list[int]]:
        """Its nodes as they were recorded, with edges and without branches, and their keys.

        An observer (`inspection.origins`) of the recording was told of the same keys.
        """

    def dump(self, path: Path) -> None:
        """Write what the driver tells of it to a file.

        Raises:
            CaptureError: there is no driver behind it.
        """

    def timed(self, nodes: Sequence[Node]) -> list[Node] | None:
        """Replay it, without the copies of arguments and results, and note when each node ran.

        Args:
            nodes: as `inspect` gave them.

        Returns:
            the nodes with their times; None where these cannot be told for certain.
        """

    def close(self) -> None:
        """Close the recording; its memory returns to the pool."""


class SegmentRecorder(Protocol):
    """Records one segment of a call."""

    @property
    def recording(self) -> Recording:
        """What was recorded; available once the segment has ended."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation."""

    def watching(self) -> AbstractContextManager[None]:
        """Record what runs inside a `with` block, which a recorder may not see by itself."""

    def drain(self, drains: Sequence[torch.Tensor]) -> None:
        """At the segment's end: name what `Recording.run` is to copy out, as bytes."""

    def forget(self) -> None:
        """Once the whole call is recorded: undo what recording changed."""


class Recorder(Protocol):
    """Records work in its own memory, and keeps replays in order."""

    device: torch.device

    @property
    def reserved(self) -> int:
        """Bytes that the recorder holds, used or not."""

    @property
    def in_use(self) -> int:
        """Bytes of it that live tensors use."""

    def warming(self, *, pretend: bool = True) -> AbstractContextManager[None]:
        """Run warm-up inside the block: as recording does, but in ordinary memory.

        Args:
            pretend: whether torch.cuda.is_current_stream_capturing() returns True. It does not in
                a call's first run, which may run under dispatch modes and prepares every thread.
        """

    def tidy(self) -> None:
        """Hand back ordinary memory that finished runs left cached."""

    def relieve(self) -> None:
        """During a run: hand back cached memory, if there is much of it."""

    def resettle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors that own their storage out of memory segments that are otherwise free."""

    def free_ranges(self) -> list[int]:
        """Bytes of each range that another recording could use.

        Segments of small blocks (up to 1 MiB) count as free as a whole: what a recording needs in
        small blocks nearly always finds room in them.
        """

    def rehearse(
        self,
        prepare: Callable[[Allocate], Prepared],
        work: Callable[[Prepared], Any],
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[int, ...]:
        """Record work in throw-away memory, refusing what cannot be recorded.

        Args:
            prepare: makes the static inputs with the allocator that it is given.
            work: what to record, on what `prepare` returned.
            generators: as for `record`.

        Returns:
            bytes of each memory segment that both would take in an empty pool.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes in the recorder's memory, as a 1-D uint8 tensor."""

    def record(
        self,
        work: Work,
        feeds: Sequence[torch.Tensor],
        drains: Callable[[Any], Sequence[torch.Tensor]],
        generators: Sequence[torch.Generator] = (),
        streams: int = 1,
    ) -> Recording:
        """Record work.

        Args:
            work: what to record.
            feeds: memory that `Recording.run` copies into before the work.
            drains: gives the memory that it copies out after the work, from what the work returned.
            generators: random generators that the work draws from.
            streams: how many streams to capture independent operations on, where there are any.
        """

    def open(self) -> AbstractContextManager[Callable[[], Recording]]:
        """Record a `with` block; the function that it gives returns the recording afterwards."""

    def segment(
        self, feeds: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()
    ) -> AbstractContextManager[SegmentRecorder]:
        """Record a `with` block as one segment of a call.

        Args:
            feeds: memory that `Recording.run` copies into before the work.
            generators: as for `record`.
        """

    def apart(self) -> AbstractContextManager[None]:
        """Give what is allocated and recorded inside a `with` block separate memory.

        No other recording shares it, earlier or later, as long as any of it is in use.
        """

    def scratch(self) -> AbstractContextManager[Callable[[], tuple[int, ...]]]:
        """Record what is inside a `with` block in memory that is thrown away at its end.

        The function that it gives returns the bytes of each memory segment.
        """

    def order(self) -> None:
        """Have what follows on the current stream wait for the last replay."""

    def trim(self) -> None:
        """Hand back unused memory that `apart` gave, and all once no recording is left."""

    def close(self) -> None:
        """Give everything back. Close the recordings first."""
