"""Memory pools: the memory that graphs share, its limit, and predictions of what a graph adds."""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..calls import forking
from ..calls.options import device_problem, flag_problem, in_brief, kind_problem, refuse
from ..calls.plurals import counted
from ..errors import CaptureError, MemoryBudgetExceeded, OptionError
from .capture_budget import CaptureBudget
from .conditions import keep_while_capturing
from .recorder import Allocate, Recorder, Recording

# PyTorch's CUDA allocator packs blocks of up to 10 MiB into shared segments of up to 20 MiB, and
# gives each larger block its own segment, rounded up to 2 MiB.
_SHARED_SEGMENT = 20 << 20
_ROUNDING = 2 << 20
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(value: int | str) -> int:
    """Parse a memory limit: a number of bytes, or a text such as "512MiB", "1.5 GiB" or "2GB".

    Raises:
        OptionError: it is neither, or not above 0.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*", value, re.IGNORECASE)
        if match:
            number, prefix, suffix = match.groups()
            unit = prefix.upper()
            decimal = unit and suffix and suffix.upper() == "B"
            value = int(float(number) * (_DECIMAL[unit + "B"] if decimal else _UNITS[unit]))
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise OptionError(
            "A memory limit is a number of bytes above 0, or a text such as '1GiB', not "
            f"{in_brief(value)}."
        )
    return value


def format_bytes(nbytes: int) -> str:
    """Bytes in readable units: "17.2 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class GraphMemory:
    """The memory that one graph added to its pool.

    Attributes:
        name: what was captured, with the shapes of its inputs.
        nbytes: bytes by which the pool grew when it was captured.
        predicted: bytes by which the pool was expected to grow.
    """

    name: str
    nbytes: int
    predicted: int


@dataclass(frozen=True)
class MemoryPrediction:
    """The memory that capturing a call would take.

    Attributes:
        nbytes: bytes by which the pool would grow.
        segments: bytes of each memory segment that the graph would take in an empty pool.
        contributors: the largest tensors of the call, as (what, bytes), largest first.
    """

    nbytes: int
    segments: tuple[int, ...]
    contributors: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        largest = ", ".join(f"{what} {format_bytes(n)}" for what, n in self.contributors)
        total = format_bytes(self.nbytes)
        return f"{total} (largest: {largest})" if largest else total


class PooledGraph(Protocol):
    """A graph as its pool sees it."""

    name: str
    _evictable: bool

    @property
    def memory(self) -> GraphMemory:
        """The memory that it added to its pool."""

    def close(self) -> None:
        """Close the graph."""

    def _retire(self) -> None:
        """Close it without touching the device."""


class MemoryPool:
    """Memory that graphs share, with an optional limit.

    Graphs of one pool never run at the same time: the pool orders their replays across threads and
    streams. Use separate pools for graphs that should run concurrently. All graphs of a pool are
    captured on one stream.

    Args:
        limit: bytes that the pool may hold, or a text such as "1GiB"; None for no limit.
        device: the pool's device; by default that of the first call captured in it.
        evict: when the limit is reached, close the least recently used of the graphs that
            `graph()` made. Without it, and for graphs that `capture()` made, MemoryBudgetExceeded
            is raised instead.

    Attributes:
        limit: bytes that the pool may hold; None for no limit.
        device: the pool's device; None before the first capture, if none was given.
        evict: as it was given.
        evictions: graphs that were closed for others.
    """

    def __init__(
        self,
        limit: int | str | None = None,
        device: torch.device | str | None = None,
        *,
        evict: bool = False,
    ) -> None:
        refuse("MemoryPool", device_problem("device", device), flag_problem("evict", evict))
        self.limit = None if limit is None else parse_bytes(limit)
        self.evict = evict
        self.device = None if device is None else torch.device(device)
        # Held while a graph of the pool is recorded, replayed or closed.
        self._lock = forking.lock()
        # What all captures in it are paid from.
        self._budget = CaptureBudget()
        self._recorder: Recorder | None = None
        self._graphs: dict[int, weakref.ref[PooledGraph]] = {}  # least recently used first
        self._retired: deque[Recording] = deque()
        # Buffers of shared static inputs; each lives as long as a graph uses it.
        self._shared: dict[int, StorageWeakRef] = {}
        self._high_water = 0
        self.evictions = 0
        # Whenever a graph is closed, there may be room for another one.
        self._closings = 0
        self._closed = False
        # Whether it is closed with the last of its graphs.
        self._of_one_graph = False

    def __del__(self) -> None:
        # Its last graph may be dropped inside of a capture, and take the pool with it.
        if hasattr(self, "_retired"):
            keep_while_capturing(self._recorder, self._retired)

    @property
    def closed(self) -> bool:
        """Whether the pool was closed for good."""
        return self._closed

    @property
    def in_use(self) -> int:
        """Bytes that static inputs, outputs and other live tensors use now."""
        return 0 if self._recorder is None else self._recorder.in_use

    @property
    def reserved(self) -> int:
        """Bytes that the pool holds; `limit` bounds them."""
        return 0 if self._recorder is None else self._recorder.reserved

    @property
    def high_water(self) -> int:
        """The most bytes that the pool has held."""
        return self._high_water

    @property
    def graphs(self) -> list[GraphMemory]:
        """The memory that each graph added, least recently used first."""
        return [graph.memory for graph in self._alive()]

    def release(self) -> None:
        """Close all graphs and hand the memory back; `graph()` captures its graphs again."""
        with self._lock:
            for graph in self._alive():
                graph.close()
            self._trim()

    def close(self) -> None:
        """Release everything for good."""
        with self._lock:
            self.release()
            self._closed = True
            if self._recorder is not None:
                self._recorder.close()
                self._recorder = None

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f" of at most {format_bytes(self.limit)}"
        held = f"{counted(len(self._alive()), 'graph')} in {format_bytes(self.reserved)}{limit}"
        return f"<MemoryPool on {self.device}: {held}>"

    def _trim(self) -> None:
        """Hand back unused memory that no graph might use as workspace."""
        if self._recorder is not None:
            self._recorder.trim()

    def _alive(self) -> list[PooledGraph]:
        found = [reference() for reference in list(self._graphs.values())]
        return [graph for graph in found if graph is not None]


def pool_of_one_graph(device: torch.device | str | None = None) -> MemoryPool:
    """A pool for one graph: when the graph is closed, so is the pool, and its memory is free."""
    pool = MemoryPool(device=device)
    pool._of_one_graph = True
    return pool


# What graphs do with their pool: no part of its public face.


def lock_of(pool: MemoryPool) -> Any:
    """What is held while a graph of a pool is recorded, replayed or closed."""
    return pool._lock


def budget_of(pool: MemoryPool) -> CaptureBudget:
    """What all captures in a pool are paid from."""
    return pool._budget


def order(pool: MemoryPool) -> None:
    """Have what follows on the current stream wait for a pool's last replay."""
    assert pool._recorder is not None
    pool._recorder.order()


def closings_of(pool: MemoryPool) -> int:
    """How many graphs of a pool were closed: with each, there may be room for another one."""
    return pool._closings


def touch(pool: MemoryPool, graph: PooledGraph) -> None:
    """Make a graph of a pool the most recently used one."""
    reference = pool._graphs.pop(id(graph), None)
    if reference is not None:
        pool._graphs[id(graph)] = reference


def trim(pool: MemoryPool) -> None:
    """Hand back unused memory of a pool that no graph might use as workspace."""
    pool._trim()


def recorder_for(pool: MemoryPool, device: torch.device) -> Recorder:
    """A pool's recorder, made on first use.

    Raises:
        CaptureError: the pool is closed, or on another device.
    """
    if pool._closed:
        raise CaptureError("The pool is closed.", remedy="Make another MemoryPool.")
    known = pool.device if pool._recorder is None else pool._recorder.device
    if known is not None and not _same_device(known, device):
        raise CaptureError(
            f"The pool is on {known}, the call on {device}.",
            remedy="Use one pool for each device.",
        )
    if pool._recorder is None:
        pool._recorder = _make_recorder(device)
        pool.device = pool._recorder.device
    return pool._recorder


def predict(
    pool: MemoryPool, segments: Sequence[int], contributors: Sequence[tuple[str, int]] = ()
) -> MemoryPrediction:
    """What work will take, with a pool as it is now.

    Args:
        pool: the pool.
        segments: bytes of each memory segment that the work takes in an empty pool.
        contributors: its largest tensors, as (what, bytes).
    """
    return MemoryPrediction(_growth(pool, segments), tuple(segments), tuple(contributors))


def _growth(pool: MemoryPool, segments: Sequence[int]) -> int:
    """Bytes by which a pool would grow for work that takes these segments in an empty pool.

    Free memory of the pool's segments is used first. A block with its own segment needs one free
    range; all other blocks share what is left. This is a lower bound, so that the growth is checked
    again after a recording.
    """
    if pool._recorder is None:
        return sum(segments)
    free = sorted(pool._recorder.free_ranges())
    missing = 0
    for segment in sorted((s for s in segments if s > _SHARED_SEGMENT), reverse=True):
        index = next((i for i, size in enumerate(free) if size >= segment - _ROUNDING), None)
        if index is None:
            missing += segment
        else:
            free[index] = max(0, free[index] - segment)
    shared = sum(s for s in segments if s <= _SHARED_SEGMENT)
    return missing + max(0, shared - sum(free))


class Admission:
    """A graph that is being recorded in a pool.

    Attributes:
        recorder: what records it.
        before: bytes that the pool held before.
    """

    def __init__(self, pool: MemoryPool, graph: PooledGraph, device: torch.device) -> None:
        self.recorder = recorder_for(pool, device)
        self.before = pool.reserved
        self._pool = pool
        self._graph = graph
        self._prediction: MemoryPrediction | None = None

    def admit(self, prediction: MemoryPrediction) -> None:
        """Make room for the graph, or refuse it before anything is captured.

        Raises:
            MemoryBudgetExceeded: it does not fit under the pool's limit.
        """
        pool, self._prediction = self._pool, prediction
        if pool.limit is None:
            return
        while (growth := _growth(pool, prediction.segments)) > 0:
            if pool.reserved + growth <= pool.limit:
                break
            if sum(prediction.segments) > pool.limit or not make_room(pool, self._graph):
                raise self.exceeded()
        self.before = pool.reserved

    def fits(self) -> bool:
        """After it was recorded: whether the pool has kept to its limit.

        The prediction may have been too low: it knows nothing of fragmentation.
        """
        return note_growth(self._pool, self.before)

    def make_room(self) -> None:
        """Once the recording was dropped: make room for another try.

        Raises:
            MemoryBudgetExceeded: there is none.
        """
        sweep(self._pool)
        if not make_room(self._pool, self._graph):
            raise self.exceeded()

    def exceeded(self) -> MemoryBudgetExceeded:
        """The error for a graph that does not fit."""
        taken = self._graph.memory.nbytes
        prediction = self._prediction or MemoryPrediction(taken, (taken,), ())
        return exceeded(self._pool, self._graph, prediction)


def exceeded(
    pool: MemoryPool, graph: PooledGraph, prediction: MemoryPrediction
) -> MemoryBudgetExceeded:
    """The error for a graph that does not fit into a pool."""
    limit = 0 if pool.limit is None else pool.limit
    return MemoryBudgetExceeded(
        f"Capturing {graph.name} takes {format_bytes(sum(prediction.segments))} alone and adds "
        f"{prediction}; the pool holds {format_bytes(pool.reserved)} and may hold "
        f"{format_bytes(limit)}.",
        remedy="Raise the pool's limit, capture fewer or smaller shapes, close graphs, or "
        "allow eviction with MemoryPool(limit, evict=True).",
    )


@contextlib.contextmanager
def recording_in(pool: MemoryPool, graph: PooledGraph, device: torch.device) -> Iterator[Admission]:
    """Record a graph in a pool inside the block; on an error, nothing of it stays there.

    Args:
        pool: the pool, which nobody else uses meanwhile.
        graph: what is recorded; one of the pool's graphs from then on.
        device: where.

    Raises:
        MemoryBudgetExceeded: the pool has grown past its limit.
    """
    with pool._lock:
        try:
            admission = Admission(pool, graph, device)
            yield admission
            if not admission.fits():
                raise admission.exceeded()
        except BaseException:
            graph._retire()
            sweep(pool)
            raise
        pool._graphs[id(graph)] = weakref.ref(graph)


def note_growth(pool: MemoryPool, before: int) -> bool:
    """After something was recorded: whether the pool has kept to its limit.

    Args:
        pool: the pool.
        before: bytes that it held before, which are not counted against it.
    """
    pool._high_water = max(pool._high_water, pool.reserved)
    return pool.limit is None or pool.reserved <= max(pool.limit, before)


def make_room(pool: MemoryPool, newcomer: PooledGraph) -> bool:
    """Close the least recently used graph that is evictable; False if there is none."""
    victim = next((g for g in pool._alive() if g._evictable and g is not newcomer), None)
    if not pool.evict or victim is None:
        return False
    victim.close()
    pool.evictions += 1
    pool._trim()
    return True


def retire(pool: MemoryPool, recording: Recording) -> None:
    """Have a recording closed at the next sweep, when that is safe."""
    pool._retired.append(recording)


def sweep(pool: MemoryPool) -> None:
    """Close retired recordings; the lock is held, and this thread is not capturing."""
    while pool._retired:
        pool._retired.popleft().close()


def leave(pool: MemoryPool, graph: PooledGraph) -> None:
    """Unregister a graph that is closed."""
    if pool._graphs.pop(id(graph), None) is not None:
        pool._closings += 1


def close_if_left(pool: MemoryPool) -> None:
    """Close a pool that was made for one graph, after that graph."""
    if pool._of_one_graph and not pool._alive():
        pool.close()


def shared_bytes(pool: MemoryPool) -> Allocate:
    """An allocator for static inputs whose memory the pool's graphs share.

    They can share it since they are copied in at each call. The n-th request of each graph gets a
    prefix of the n-th buffer.
    """
    count = itertools.count()

    def allocate(nbytes: int) -> torch.Tensor:
        index = next(count)
        known = pool._shared.get(index)
        storage = None
        if known is not None:
            storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
        if storage is None or storage.nbytes() < nbytes:
            assert pool._recorder is not None
            buffer = pool._recorder.allocate(nbytes)
            pool._shared[index] = StorageWeakRef(buffer.untyped_storage())
            return buffer
        buffer = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return buffer.set_(storage, 0, (nbytes,), (1,))

    return allocate


def pool_problem(pool: Any) -> str | None:
    """What is wrong with the `pool` of a public function, in words; None if nothing is."""
    limit = repr(pool) if isinstance(pool, str | int) else "'1GiB'"
    return kind_problem("pool", pool, MemoryPool, f"write MemoryPool({limit})", optional=True)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (
        a.type == "cpu" or None in (a.index, b.index) or a.index == b.index
    )


def _make_recorder(device: torch.device) -> Recorder:
    if device.type == "cpu":
        from .cpu.recorder import CpuRecorder

        return CpuRecorder(device)
    if device.type == "cuda":
        from .cuda.recorder import CudaRecorder

        return CudaRecorder(device)
    raise CaptureError(
        f"There is no recorder for {device.type} devices.", remedy="Use a CUDA device, or the CPU."
    )
