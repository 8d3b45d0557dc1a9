"""The CUDA recorder: CUDA graphs on one stream, in one memory pool."""

from __future__ import annotations

import contextlib
import functools
import secrets
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ...calls.modes import OperationMode
from ...errors import CaptureError
from ..conditions import pretend_capturing
from ..inspection.origins import observer
from ..journal import Journal, users_of
from ..random_state import put_seed, put_state
from ..recorder import Allocate, Interrupted, Prepared, Work
from . import driver
from .driver import CopyNode
from .reading import CaptureObserver
from .recording import CudaRecording, find_copies
from .side_streams import SideStreams
from .stream_capture import capturing
from .streams import CaptureStream, PreparedThreads

Made = TypeVar("Made")
Drains = Callable[[Any], Sequence[torch.Tensor]]
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_ATTEMPTS = 5
# Bytes up to which PyTorch's allocator packs tensors closely.
_SMALL = 1 << 20
# `relieve` hands memory back when more than this share of it is unused, and when it has grown by
# this share since the last time.
_UNUSED_SHARE, _GROWTH = 0.25, 0.02

# Capture streams that no recorder uses now, by device.
_SPARE_STREAMS: dict[int, list[CaptureStream]] = {}


class _CudaSegment:
    """Captures one segment of a call."""

    recording: CudaRecording

    def __init__(self, outside: torch.cuda.Stream | None, run: Run) -> None:
        """Begin a segment.

        Args:
            outside: the stream on which targets for copies out of the drains are allocated; None if
                these copies are not nodes of the graph.
            run: runs an operation.
        """
        self._outside = outside
        self._run = run
        self.drains: Sequence[torch.Tensor] = ()
        self.targets: list[torch.Tensor] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, which captures it."""
        return self._run(func, args, kwargs)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: everything that is issued is captured."""
        return contextlib.nullcontext()

    def drain(self, drains: Sequence[torch.Tensor]) -> None:
        """Capture copies out of these."""
        self.drains = drains
        if self._outside is not None:
            self.targets = _copy_out(drains, self._outside)

    def forget(self) -> None:
        """Nothing to do: a capture computes nothing."""


@contextlib.contextmanager
def _other_seed(device: torch.device) -> Iterator[tuple[torch.Generator, torch.Tensor]]:
    """Give the device's generator a random seed inside the block; yields it and its state.

    A graph takes its seed and offset when it is replayed, so seeding during a capture has no
    effect. PyTorch forbids it, unless the seed is the one already set: that of the run before, if
    this block did not set another one. State that is read and set back inside, as
    torch.utils.checkpoint does, is set back in a replay too.
    """
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    put_seed(generator, secrets.randbits(62))
    try:
        yield generator, generator.get_state()
    finally:
        put_state(generator, state)


class CudaRecorder:
    """Captures CUDA graphs into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        free = _SPARE_STREAMS.setdefault(index, [])
        self._capture_stream = free.pop() if free else CaptureStream(self.device)
        self._stream = self._capture_stream.stream
        self._side: list[CaptureStream] = []
        self._pool: Any = None
        self._anchor: Any = None
        self._apart: list[tuple[Any, Any]] = []  # other pools, with their anchors
        self._live = 0
        self._relieved_at = 0.0
        self._last = torch.cuda.current_stream(self.device)
        # Streams and workspaces are reused, since neither can be freed.
        self._release_stream = weakref.finalize(self, free.append, self._capture_stream)
        self._release_stream.atexit = False

    @property
    def reserved(self) -> int:
        """Bytes of the pool's segments."""
        return sum(segment["total_size"] for segment in self._segments())

    @property
    def in_use(self) -> int:
        """Bytes allocated in them."""
        return sum(segment["allocated_size"] for segment in self._segments())

    def free_ranges(self) -> list[int]:
        """Bytes of each unused block, and of each segment of small blocks."""
        found = []
        for segment in [] if self._pool is None else _segments(self._pool):
            if segment["segment_type"] == "small":
                found.append(segment["total_size"])
            else:
                found += [b["size"] for b in segment["blocks"] if b["state"] == "inactive"]
        return found

    @contextlib.contextmanager
    def warming(self, *, pretend: bool = True) -> Iterator[None]:
        """Run on the capture stream, in ordinary memory."""
        mode = pretend_capturing() if pretend else PreparedThreads(self._capture_stream)
        with self._on_stream(), mode, warnings.catch_warnings():
            # An earlier eager backward ran on another stream, which is intended.
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            yield

    def tidy(self) -> None:
        """Hand back the allocator's cached memory."""
        torch.cuda.empty_cache()

    def relieve(self) -> None:
        """Hand back the allocator's cached memory, if it is much and has grown since last time."""
        reserved, allocated = self._held()
        if reserved - allocated > _UNUSED_SHARE * reserved and reserved > self._relieved_at:
            self.tidy()
            self._relieved_at = (1 + _GROWTH) * self._held()[0]

    def _held(self) -> tuple[int, int]:
        """Bytes that the allocator holds, and how many of them are in use."""
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved, allocated = (found[f"{what}_bytes"]["all"] for what in ("reserved", "allocated"))
        return reserved["current"], allocated["current"]

    def resettle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors to new segments that hold nothing else, and hand back their old segments.

        A block in use keeps its whole segment from being handed back.
        """
        moving = [t for t in tensors if t.nbytes > _SMALL and _owns_its_memory(t)]
        if not moving:
            return
        pool = torch.cuda.MemPool()
        with self._on_stream(), torch.no_grad(), torch.cuda.use_mem_pool(pool, self.device):
            moved = [tensor.clone() for tensor in moving]
        for tensor, copy in zip(moving, moved, strict=True):
            tensor.data = copy
        del moved, copy, pool  # The tensors' memory outlives the pool.
        self.tidy()

    def rehearse(
        self,
        prepare: Callable[[Allocate], Prepared],
        work: Callable[[Prepared], Any],
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[int, ...]:
        """Capture work into a pool that is thrown away."""
        self.tidy()  # A pool cannot use what earlier runs left cached.
        with self.scratch() as sizes:
            prepared = prepare(self.allocate)
            graph, kept = self._capture(generators, functools.partial(work, prepared))
            taken = sizes()
            del graph, prepared, kept
            return taken

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes of the pool."""
        return self._allocator(self._memory())(nbytes)

    def record(
        self,
        work: Work,
        feeds: Sequence[torch.Tensor],
        drains: Callable[[Any], Sequence[torch.Tensor]],
        generators: Sequence[torch.Generator] = (),
        streams: int = 1,
    ) -> CudaRecording:
        """Capture work between copies into its feeds and copies out of its drains."""
        if streams > 1:
            arguments = frozenset(feed.untyped_storage()._cdata for feed in feeds)
            side = self._side_streams(streams - 1)
            work = functools.partial(_beside, self._stream, side, arguments, work)
        if driver.libcuda() is None:
            return self._record_alone(work, feeds, drains, generators)
        outside = torch.cuda.current_stream(self.device)
        work = self._observed(work)
        body = functools.partial(_work_with_copies, work, feeds, drains, outside)
        graph, (drained, targets) = self._capture(generators, body)
        graph.instantiate()
        nodes = find_copies(graph, feeds, [*zip(drained, targets, strict=True)])
        if nodes is None:
            graph.reset()
            return self._record_alone(work, feeds, drains, generators)
        return self._recording(graph, feeds, drained, nodes)

    def _record_alone(
        self,
        work: Work,
        feeds: Sequence[torch.Tensor],
        drains: Callable[[Any], Sequence[torch.Tensor]],
        generators: Sequence[torch.Generator],
    ) -> CudaRecording:
        body = functools.partial(_work_alone, work, drains)
        graph, drained = self._capture(generators, body)
        graph.instantiate()
        return self._recording(graph, feeds, drained, None)

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[], CudaRecording]]:
        """Capture a `with` block."""
        journal = Journal()
        with (
            _other_seed(self.device) as (generator, start),
            self._capturing(()) as graph,
            journal,
            self._seen(),
        ):
            yield lambda: self._recording(graph, (), (), None, list(journal.external.values()))
            journal.check_moved(generator, start)
        graph.instantiate()

    @contextlib.contextmanager
    def segment(
        self, feeds: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()
    ) -> Iterator[_CudaSegment]:
        """Capture one segment of a call, with its copies as nodes where the driver lets us."""
        outside = torch.cuda.current_stream(self.device)
        nodes: Sequence[CopyNode | None] | None = None
        by_nodes = driver.libcuda() is not None
        with self._capturing(generators) as graph:
            by = observer()
            run = CaptureObserver(by, self._stream).run if by is not None and by_nodes else _run
            segment = _CudaSegment(outside if by_nodes else None, run)
            if by_nodes:
                _copy_in(feeds)
            yield segment
        graph.instantiate()
        if by_nodes:
            out_of = [*zip(segment.drains, segment.targets, strict=True)]
            nodes = find_copies(graph, feeds, out_of)
            if nodes is None:
                graph.reset()
                raise CaptureError("The copies of a segment were not found in its graph.")
        segment.recording = self._recording(graph, feeds, segment.drains, nodes)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Use a separate pool inside the block."""
        self._drop_empty_pools()
        kept = self._pool, self._anchor
        self._pool = self._anchor = None
        try:
            yield
        finally:
            if self._pool is not None:
                self._apart.append((self._pool, self._anchor))
            self._pool, self._anchor = kept

    def _drop_empty_pools(self) -> None:
        """Give back separate pools that no graph and no tensor uses."""
        kept = []
        for pool, anchor in self._apart:
            users = pool.use_count() - 1  # The anchor is one.
            if users > 1 or any(segment["allocated_size"] for segment in _segments(pool)):
                kept.append((pool, anchor))
            else:
                anchor.reset()
        self._apart = kept

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Callable[[], tuple[int, ...]]]:
        """Use a pool that is thrown away afterwards."""
        kept = self._pool, self._anchor, self._live, self._apart
        self._pool, self._anchor, self._apart = None, None, []
        try:
            yield lambda: tuple(segment["total_size"] for segment in self._segments())
        finally:
            self._let_go_of_pools()
            self._pool, self._anchor, self._live, self._apart = kept
            torch.cuda.empty_cache()

    def order(self) -> None:
        """On a new stream, wait for the last one: both use the pool's memory."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != self._last.cuda_stream:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self._last)
            self._last = stream

    def trim(self) -> None:
        """Give memory back: separate pools that nothing uses, and all once no graph is left."""
        if self._live:
            self._drop_empty_pools()
            return
        if self._pool is None and not self._apart:
            return
        torch.cuda.synchronize(self.device)
        self._let_go_of_pools()
        torch.cuda.empty_cache()

    def __del__(self) -> None:
        # A pool that goes before its anchor leaves its memory with the allocator.
        if hasattr(self, "_anchor"):
            self._let_go_of_pools()

    def _let_go_of_pools(self) -> None:
        for _, anchor in (*self._apart, (self._pool, self._anchor)):
            if anchor is not None:
                anchor.reset()
        self._pool = self._anchor = None
        self._apart = []

    def close(self) -> None:
        """Give the memory back, and the stream to the next recorder."""
        self.trim()
        self._stream.wait_stream(self._last)
        self._release_stream()

    def _recording(
        self,
        graph: torch.cuda.CUDAGraph,
        feeds: Sequence[torch.Tensor],
        drains: Sequence[torch.Tensor],
        nodes: Sequence[CopyNode | None] | None,
        external: list[torch.UntypedStorage] | None = None,
    ) -> CudaRecording:
        self._live += 1
        if nodes is not None:
            drains = ()  # The copy nodes have their addresses; they need not be kept alive.
        return CudaRecording(
            graph, feeds, drains, nodes, external or [], self._recording_closed, self.order
        )

    def _recording_closed(self) -> None:
        self._live -= 1

    def _memory(self) -> Any:
        if self._pool is None:
            pool = torch.cuda.MemPool()
            # An empty graph, never launched, keeps the pool in use: PyTorch's allocator of pinned
            # memory forgets a pool for good as soon as no graph uses it.
            with self._capturing((), pool) as anchor:
                pass
            self._pool, self._anchor = pool, anchor
        return self._pool

    def _set_aside(self, pool: Any) -> None:
        """Capture into another pool from now on: this one's graphs stay, and no more can join."""
        if pool is self._pool:
            self._apart.append((pool, self._anchor))
            self._pool = self._anchor = None

    def _segments(self) -> list[dict[str, Any]]:
        pools = [pool for pool, _ in (*self._apart, (self._pool, None)) if pool is not None]
        return [segment for pool in pools for segment in _segments(pool)]

    def _allocator(self, pool: Any) -> Allocate:
        def allocate(nbytes: int) -> torch.Tensor:
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(pool, self.device):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

        return allocate

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the block on the capture stream, in order with the current stream.

        It waits for the last replay too: memory of the capture stream that is freed is reused.
        """
        self._capture_stream.prepare()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        self._stream.wait_stream(self._last)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _capture(
        self, generators: Sequence[torch.Generator], body: Callable[[], Made]
    ) -> tuple[torch.cuda.CUDAGraph, Made]:
        """Capture what `body` issues, trying again if another thread breaks the capture."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self._capturing(generators) as graph:
                    made = body()
                return graph, made
            except Interrupted:
                if not left:
                    raise
                if (by := observer()) is not None:
                    by.recorded.clear()
        raise AssertionError("unreachable")

    def _side_streams(self, count: int) -> list[torch.cuda.Stream]:
        """Streams for captures beside the capture stream, with workspaces for this thread."""
        free = _SPARE_STREAMS.setdefault(self.device.index, [])
        while len(self._side) < count:
            added = free.pop() if free else CaptureStream(self.device)
            self._side.append(added)
            weakref.finalize(self, free.append, added).atexit = False
        for each in self._side[:count]:
            each.prepare()
            torch.cuda.current_stream(self.device).wait_stream(each.stream)
        return [each.stream for each in self._side[:count]]

    def _observed(self, work: Work) -> Work:
        """Work that tells of its operations, if somebody wants to know of them."""
        return work if observer() is None else functools.partial(_in_sight, self._seen, work)

    def _seen(self) -> contextlib.AbstractContextManager[Any]:
        """Tell of the operations inside the block, which are captured."""
        by = observer()
        if by is None or driver.libcuda() is None:
            return contextlib.nullcontext()
        return _Observed(CaptureObserver(by, self._stream))

    def _capturing(
        self, generators: Sequence[torch.Generator], pool: Any = None
    ) -> contextlib.AbstractContextManager[torch.cuda.CUDAGraph]:
        """Capture what is issued inside on the capture stream, by default into our memory."""
        pool = self._memory() if pool is None else pool
        return capturing(self.device, pool, generators, self._on_stream(), self._set_aside)


class _Observed(OperationMode):
    """Tells of the operations of a block that is captured."""

    def __init__(self, seen: CaptureObserver) -> None:
        super().__init__()
        self.run = seen.run  # type: ignore[method-assign]  # it is what this mode does


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


# What is captured. These are no closures: an error's traceback would keep their variables alive.


def _beside(
    main: torch.cuda.Stream,
    side: Sequence[torch.cuda.Stream],
    arguments: Collection[int],
    work: Work,
) -> Any:
    streams = SideStreams(main, side, arguments)
    with streams:
        result = work()
    streams.join()
    return result


def _in_sight(seen: Callable[[], contextlib.AbstractContextManager[Any]], work: Work) -> Any:
    with seen():
        return work()


def _work_alone(work: Work, drains: Drains) -> Sequence[torch.Tensor]:
    return drains(work())


def _work_with_copies(
    work: Work,
    feeds: Sequence[torch.Tensor],
    drains: Drains,
    outside: torch.cuda.Stream,
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
    """Work between copies into its feeds and out of its drains.

    Returns:
        the drains, and the memory that each was copied into.
    """
    _copy_in(feeds)
    drained = drains(work())
    return drained, _copy_out(drained, outside)


def _copy_in(feeds: Sequence[torch.Tensor]) -> None:
    """Issue copies into the feeds; their sources are set before each launch."""
    for feed in feeds:
        if feed.numel():
            driver.copy_onto_itself(feed, torch.cuda.current_stream(feed.device))


def _copy_out(drained: Sequence[torch.Tensor], outside: torch.cuda.Stream) -> list[torch.Tensor]:
    """Issue copies out of the drains; returns the memory that they are copied into."""
    # Allocated on another stream than the captured one, hence not in the pool.
    with driver.capture_mode_relaxed(), torch.cuda.stream(outside):
        targets = [torch.empty_like(drain) for drain in drained]
    for drain, target in zip(drained, targets, strict=True):
        if drain.numel():
            target.copy_(drain)
    return targets


def _segments(pool: Any) -> list[dict[str, Any]]:
    """A pool's segments, picked from a snapshot of all of the allocator's segments.

    PyTorch's snapshot of one pool, MemPool.snapshot(), corrupts Python's memory (2.11: after some
    hundred calls the process dies of a segmentation fault).
    """
    return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool.id]


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares its storage."""
    return users_of(tensor) == users_of(torch.empty(1))
