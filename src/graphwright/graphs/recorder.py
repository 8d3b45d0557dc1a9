"""What capture, pools and dispatch ask of a recorder; CUDA graphs and the CPU tape both meet it.

A recorder is the memory and the order of one pool; a recording is one graph in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from ..errors import CaptureError


class Interrupted(CaptureError):
    """Another thread has broken a capture; it can be tried again."""


Work = Callable[[], Any]
Allocate = Callable[[int], torch.Tensor]
Prepared = TypeVar("Prepared")


class Recording(Protocol):
    """Work that was recorded once and can be repeated on the same memory."""

    @property
    def nodes(self) -> int:
        """How many operations it repeats: a CUDA graph's nodes."""

    @property
    def external(self) -> list[torch.UntypedStorage]:
        """Memory that it uses and does not own, as far as the recorder has seen it itself."""

    def order(self) -> None:
        """Let what follows on the current stream come after the recorder's last replay."""

    def replay(self) -> None:
        """Repeat the work on whatever its memory holds now."""

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy `sources` into the feeds, repeat the work, copy the drains into `targets`.

        All are copied byte for byte: a source has to have its feed's strides, a target its drain's.
        """

    def close(self) -> None:
        """Give up the recording; its memory returns to the pool."""


class SegmentRecorder(Protocol):
    """A part of a call's work while it is recorded."""

    @property
    def recording(self) -> Recording:
        """What was recorded; had after its end."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation."""

    def watching(self) -> AbstractContextManager[None]:
        """Record what is done inside a `with` block, which a recorder may not see by itself."""

    def drain(self, drains: Sequence[torch.Tensor]) -> None:
        """At its end: what `Recording.run` is to copy out, as bytes."""

    def forget(self) -> None:
        """Once the whole call is recorded: undo what recording has done."""


class Recorder(Protocol):
    """Records work in memory of its own, and keeps replays in order."""

    device: torch.device

    @property
    def reserved(self) -> int:
        """Bytes that the recorder holds, used or not."""

    @property
    def in_use(self) -> int:
        """Bytes of it that something lives in."""

    def warming(self, *, told: bool = True) -> AbstractContextManager[None]:
        """Where warm-up runs: as recording does, but in ordinary memory.

        Args:
            told: whether code that asks is told that a capture is under way. The first run of a
                call is not: it may be seen by dispatch modes, and prepares every thread.
        """

    def tidy(self) -> None:
        """Hand back ordinary memory that runs have left over."""

    def relieve(self) -> None:
        """In the midst of a run: the same, where it is much."""

    def resettle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors that have their memory to themselves away from what runs have left over."""

    def free_ranges(self) -> list[int]:
        """Bytes of the ranges that another recording could use; those of small blocks as a whole.

        What a recording needs in small blocks (up to 1 MiB) nearly always finds room in segments
        that hold some already; so these count as free.
        """

    def rehearse(
        self,
        prepare: Callable[[Allocate], Prepared],
        work: Callable[[Prepared], Any],
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[int, ...]:
        """Run work as if recording it, refusing what cannot be recorded, in throw-away memory.

        Args:
            prepare: makes the static inputs with the allocator that it is given.
            work: what is to be recorded, on what `prepare` returned.
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
    ) -> Recording:
        """Record work.

        Args:
            work: what to record.
            feeds: memory that `Recording.run` is to fill before the work.
            drains: which memory it is to copy out after the work, by what the work returned.
            generators: random generators that the work draws from.
        """

    def open(self) -> AbstractContextManager[Callable[[], Recording]]:
        """Record what is done inside a `with` block; the recording is had after its end."""

    def segment(
        self, feeds: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()
    ) -> AbstractContextManager[SegmentRecorder]:
        """Record what is done inside a `with` block as a part of a call.

        Args:
            feeds: memory that `Recording.run` is to fill before the work.
            generators: as for `record`.
        """

    def apart(self) -> AbstractContextManager[None]:
        """Have what is allocated and recorded inside a `with` block in memory of its own.

        Nothing else uses that as long as something of it is used: neither what was recorded before
        nor what comes after.
        """

    def scratch(self) -> AbstractContextManager[Callable[[], tuple[int, ...]]]:
        """Have what is recorded inside a `with` block in memory that is thrown away at its end.

        The function that it gives tells the bytes of each memory segment.
        """

    def order(self) -> None:
        """Let what follows on the current stream come after the last replay."""

    def trim(self) -> None:
        """Hand back the memory that nothing lives in, once no recording is left."""

    def close(self) -> None:
        """Give everything up. Recordings have to be closed before."""
