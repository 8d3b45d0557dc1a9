"""The CPU recorder's memory, which is handed out, freed and reused as in a CUDA memory pool.

Rounding, segment sizes and best fit follow PyTorch's CUDA caching allocator
(c10/cuda/CUDACachingAllocator.cpp), so that what overlaps there overlaps here. Freed bytes are
overwritten with 0xFF, which is NaN in every floating-point format, so that a read after the free
shows. Tensors may die on any thread at any time; what dies while a tape is replayed is overwritten
after that, as the tape may use the same bytes for something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...calls import forking

MIB = 1 << 20
ROUNDING = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB
POISON = 0xFF


@dataclass
class ArenaSegment:
    """Bytes taken from the host at once, divided into blocks."""

    memory: torch.Tensor
    small: bool
    free: dict[int, int]  # offset -> bytes
    used: dict[int, int]

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


@dataclass(frozen=True)
class Block:
    """Bytes of a segment. Unlike an address, a `number` is never reused."""

    number: int
    segment: ArenaSegment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.segment.address + self.offset

    def poison(self) -> None:
        """Overwrite its bytes with NaN."""
        ctypes.memset(self.address, POISON, self.nbytes)


class Arena:
    """Memory for recordings; each block lives as long as the storage made of it.

    Attributes:
        on_free: called with each block that is freed.
    """

    def __init__(self) -> None:
        # Held by the thread that works here: it allocates, replays or takes blocks back.
        self._lock = forking.lock()
        self._at_work: int | None = None
        self._dead: deque[Block] = deque()  # to be taken back
        self._segments: list[ArenaSegment] = []
        self._apart: list[list[ArenaSegment]] = []
        self._current = self._segments
        self._blocks: dict[int, Block] = {}  # by address
        self._numbers = itertools.count()
        self.on_free: Callable[[Block], None] = lambda block: None

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        groups = (self._segments, *self._apart)
        return sum(segment.memory.numel() for group in groups for segment in group)

    @property
    def in_use(self) -> int:
        """Bytes of the live blocks."""
        return sum(block.nbytes for block in list(self._blocks.values()))

    def segments(self) -> tuple[int, ...]:
        """Bytes of each segment."""
        return tuple(segment.memory.numel() for segment in self._segments)

    def free_ranges(self) -> list[int]:
        """Bytes of each free range; segments of small blocks as a whole."""
        with self.work():
            return [
                size
                for segment in self._segments
                for size in ([SMALL_SEGMENT] if segment.small else segment.free.values())
            ]

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of `nbytes` bytes; its memory returns to the arena when it dies."""
        if nbytes == 0:
            return torch.UntypedStorage(0)
        with self.work():
            block = self._take(-(-nbytes // ROUNDING) * ROUNDING)
        # Only the storage keeps `buffer` alive: when it dies, the block is freed.
        buffer = (ctypes.c_char * nbytes).from_address(block.address)
        weakref.finalize(buffer, self._give_back, block).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor's storage, if it is in this arena."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def alias(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """A tensor at the same place that does not keep the block alive."""
        item = tensor.element_size()
        start = block.offset // item + tensor.storage_offset()
        with torch.inference_mode(False):
            alias = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                block.segment.memory.untyped_storage(), start, tensor.size(), tensor.stride()
            )
        if tensor.is_conj():
            alias = alias.conj()
        return alias._neg_view() if tensor.is_neg() else alias

    def trim(self, *, only_apart: bool = False) -> None:
        """Hand back segments without live blocks, or only those that `apart` gave."""
        with self.work():
            if not only_apart:
                self._segments[:] = [segment for segment in self._segments if segment.used]
            self._drop_empty_groups()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Give what is allocated inside a `with` block separate segments, for good."""
        with self.work():
            self._drop_empty_groups()
            outer, self._current = self._current, []
            self._apart.append(self._current)
        try:
            yield
        finally:
            self._current = outer

    def _drop_empty_groups(self) -> None:
        self._apart = [
            group
            for group in self._apart
            if group is self._current or any(segment.used for segment in group)
        ]

    def _take(self, nbytes: int) -> Block:
        small = nbytes <= SMALL
        fits = [
            (size, index, offset)
            for index, segment in enumerate(self._current)
            if segment.small == small
            for offset, size in segment.free.items()
            if size >= nbytes
        ]
        if fits:
            size, index, offset = min(fits)
            segment = self._current[index]
        else:
            segment = self._grow(nbytes, small)
            size, offset = segment.memory.numel(), 0
        del segment.free[offset]
        rest = size - nbytes
        # A large block is split only where more than a small one would be left over.
        if rest >= (ROUNDING if small else SMALL + 1):
            segment.free[offset + nbytes] = rest
        else:
            nbytes = size
        segment.used[offset] = nbytes
        block = Block(next(self._numbers), segment, offset, nbytes)
        self._blocks[block.address] = block
        return block

    def _grow(self, nbytes: int, small: bool) -> ArenaSegment:
        if small:
            size = SMALL_SEGMENT
        elif nbytes < MIN_LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-nbytes // (2 * MIB)) * 2 * MIB
        segment = ArenaSegment(
            torch.empty(size, dtype=torch.uint8, device="cpu"), small, {0: size}, {}
        )
        self._current.append(segment)
        return segment

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Take no block back inside a `with` block, and do so at its end; other threads wait."""
        with self._lock:
            outer, self._at_work = self._at_work, threading.get_ident()
            try:
                yield
            finally:
                self._at_work = outer
        self._take_back()

    def _give_back(self, block: Block) -> None:
        """A storage has died; what is at work on any thread does not notice."""
        self._dead.append(block)
        self._take_back()

    def _take_back(self) -> None:
        """Take dead blocks back; if something is at work, it does so when it is done."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                if self._at_work == threading.get_ident():
                    return
                self._at_work = threading.get_ident()
                try:
                    while self._dead:
                        self._free(self._dead.popleft())
                finally:
                    self._at_work = None
            finally:
                self._lock.release()

    def _free(self, block: Block) -> None:
        block.poison()
        self.on_free(block)
        del self._blocks[block.address]
        segment, start = block.segment, block.offset
        size = segment.used.pop(start)
        # Merge with the free neighbours.
        for offset, length in list(segment.free.items()):
            if offset + length == start:
                del segment.free[offset]
                start, size = offset, size + length
            elif offset == start + size:
                del segment.free[offset]
                size += length
        segment.free[start] = size
