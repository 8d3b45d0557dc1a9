"""Graph: the states, replay and closing that all captured graphs share."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..calls.modes import opaque
from ..errors import CaptureError
from .conditions import capturing_now
from .inspection.node import Node, arranged
from .inspection.nodes import Nodes
from .inspection.origins import Operation
from .memory import GraphMemory, MemoryPool, close_if_left, leave, lock_of, retire, sweep
from .recorder import Recording

_UNKNOWN_BLOCK = (
    "Modules and lines are not known: capture the block with capturing(annotate=True) for them."
)


class GraphState(enum.StrEnum):
    """Steps in the life of a graph."""

    NEW = "new"
    WARMING = "warming"
    CAPTURING = "capturing"
    READY = "ready"
    CLOSED = "closed"


class GraphClosed(CaptureError):
    """The graph is not ready; callers may catch this and capture another one."""


class Graph:
    """Work that was captured once and can be replayed.

    A graph made by `capture` is called like the function. It keeps alive what it reads: the
    function, its weights, and everything else it uses by address.

    Attributes:
        state: "new", "warming", "capturing", "ready" or "closed".
        name: what was captured, with the shapes of its inputs.
        pool: the memory that it lives in.
        mutates: whether a replay writes to inputs, buffers or other tensors from outside.
        random: whether a replay draws random numbers.
        memory: the bytes that it added to the pool.
    """

    def __init__(self, pool: MemoryPool, name: str, *, evictable: bool = False) -> None:
        """Make an empty graph; users call `capture`, `capturing` or `graph`."""
        self.state = GraphState.NEW
        self.pool = pool
        self._lock = lock_of(pool)
        self.name = name
        self._evictable = evictable
        self.mutates = True
        self.random = True
        self.memory = GraphMemory(name, 0, 0)
        self._recording: Recording | None = None
        self._held: list[Any] = []
        # The operation behind each node, by key, if it was captured under observation.
        self._origins: Mapping[int, Operation] | None = None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The static inputs, in the order of the arguments: what `replay()` reads."""
        self._ready()
        return ()

    @property
    def outputs(self) -> Any:
        """What the work returned, in the graph's own memory: the next replay overwrites it."""
        self._ready()
        return None

    @property
    def nbytes(self) -> int:
        """Bytes by which the pool grew when the graph was captured."""
        return self.memory.nbytes

    @property
    def node_count(self) -> int:
        """How many operations a replay repeats, a CUDA graph's nodes; 0 once it is closed."""
        return 0 if self._recording is None else self._recording.nodes

    @property
    def branches(self) -> int:
        """How many chains of nodes can run side by side; 0 if it has none."""
        found = [arranged(recording.inspect()[0]) for recording in self._recordings()]
        return max((node.branch + 1 for nodes in found for node in nodes), default=0)

    def nodes(self, *, timed: bool = False) -> Nodes:
        """What the graph consists of: kernels, copies and memsets, or operations on the CPU.

        The module and line of each node are found by recording the call once more, observed, into
        memory that is thrown away; an ordinary capture notes nothing and costs nothing. They are
        told only where both recordings have the same nodes. A block of `capturing` cannot be
        recorded again: it has them if it was captured with `annotate=True`.

        Args:
            timed: replay the graph, on what its static inputs hold, and say when each node ran: by
                PyTorch's profiler on a GPU, in the middle one of five replays. Each replay writes
                to what the graph writes to.

        Raises:
            CaptureError: the graph is closed, or there is no driver to ask.
        """
        with self._lock:
            self._ready()
            notes: list[str] = []
            found = self._listed(notes)
            if timed:
                found = self._timed(found, notes)
            placed: list[Node] = []
            for segment, nodes in enumerate(found):
                start = len(placed)
                placed += [_shifted(node, start, segment) for node in arranged(nodes)]
            return Nodes(self.name, placed, notes)

    def dump(self, path: str | Path) -> None:
        """Write what the driver itself tells of a CUDA graph, in graphviz' language and verbosely.

        This is what torch.cuda.CUDAGraph.debug_dump writes (cuGraphDebugDotPrint), addresses of
        kernels' arguments included. Of a call in segments it is the first one.

        Args:
            path: the file to write.

        Raises:
            CaptureError: the graph is closed, or no CUDA graph.
        """
        with self._lock:
            self._ready().dump(Path(path))

    def _recordings(self) -> list[Recording]:
        """Its recordings: several where a call is divided into segments."""
        return [self._ready()]

    def _listed(self, notes: list[str]) -> list[list[Node]]:
        """The nodes of each recording, with their operations; what is not known is noted."""
        listed = [recording.inspect() for recording in self._recordings()]
        if self._origins is None:
            notes.append(_UNKNOWN_BLOCK)
        return [with_operations(nodes, keys, self._origins or {}) for nodes, keys in listed]

    def _timed(self, found: list[list[Node]], notes: list[str]) -> list[list[Node]]:
        """The nodes with the times of a replay."""
        recording = self._ready()
        if len(found) > 1:
            notes.append("A call in segments is not timed here: profile it as a whole.")
            return found
        recording.order()
        timed = recording.timed(found[0])
        if timed is None:
            notes.append("The profiler's trace does not match the nodes one to one: no times.")
            return found
        return [timed]

    def replay(self) -> None:
        """Repeat the work on what the static inputs hold now; the results are in `outputs`.

        Raises:
            CaptureError: the graph is closed.
        """
        with self._lock:
            recording = self._ready()
            recording.order()
            recording.replay()

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with other values of the arguments that the graph was captured with.

        Returns:
            the function's results, as tensors that the caller owns, or with outputs="static" as the
            graph's own, which the next replay overwrites. They never require grad.

        Raises:
            SignatureError: the call differs from the captured one, or the module has changed since
                then; the message lists all differences.
            CaptureError: the graph is closed, or has no arguments.
        """
        raise CaptureError(
            "A graph of a `with` block takes no arguments.", remedy="Call its replay()."
        )

    def close(self) -> None:
        """Close the graph; its memory returns to the pool. Closing twice is no error."""
        if capturing_now():
            self._retire()
            return
        with self._lock:  # Another thread may be in a call of it.
            self._retire()
            sweep(self.pool)
            close_if_left(self.pool)

    def __del__(self) -> None:
        if getattr(self, "state", GraphState.CLOSED) is GraphState.CLOSED:
            return
        self._retire()
        # A finalizer may run at any time and on any thread: it must not wait.
        if not capturing_now() and self._lock.acquire(blocking=False):
            try:
                sweep(self.pool)
            finally:
                self._lock.release()

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Graph {self.name}, {self.state}>"

    def __reduce__(self) -> NoReturn:
        raise CaptureError(
            "A graph is tied to memory addresses and can be neither copied nor pickled.",
            remedy="Copy the function or module, and capture the copy.",
        )

    def _ready(self) -> Recording:
        """The recording; raise where it cannot be replayed now."""
        if self._recording is None or self.state is not GraphState.READY:
            raise GraphClosed(
                f"The graph of {self.name} is {self.state}.",
                remedy="Capture it again. A graph is closed by close(), and by release() or "
                "close() of its pool.",
            )
        if capturing_now():
            raise CaptureError(
                f"The graph of {self.name} is called while another one is being captured.",
                remedy="Capture the function that the graph was made of as part of the other one.",
            )
        return self._recording

    def _retire(self) -> None:
        """Close without touching the device, since this thread may be capturing.

        Destroying a CUDA graph would break that capture (pytorch #91302).
        """
        self.state = GraphState.CLOSED
        leave(self.pool, self)
        recording, self._recording = self._recording, None
        if recording is not None:
            retire(self.pool, recording)
        self._held = []

    def _take(self, recording: Recording, before: int, predicted: int) -> None:
        """Take a recording over, and note what it cost.

        Args:
            recording: what was recorded.
            before: bytes that the pool held before.
            predicted: bytes that it was expected to add.
        """
        recording.name = self.name
        self._recording = recording
        self._held += recording.external
        self.memory = GraphMemory(self.name, self.pool.reserved - before, predicted)

    def _add_growth(self, before: int) -> None:
        """Note that more was recorded of it.

        Args:
            before: bytes that the pool held before.
        """
        grown = self.pool.reserved - before
        self.memory = replace(self.memory, nbytes=self.memory.nbytes + grown)


def with_operations(
    nodes: Sequence[Node], keys: Sequence[int], operations: Mapping[int, Operation]
) -> list[Node]:
    """Nodes with the operation, module and line that each came from.

    Args:
        nodes: of a recording.
        keys: of these nodes.
        operations: by key.
    """
    made = []
    for node, key in zip(nodes, keys, strict=True):
        by = operations.get(key)
        if by is not None:
            node = replace(node, operation=by.name, module=by.module, line=by.line)
        made.append(node)
    return made


def _shifted(node: Node, start: int, segment: int) -> Node:
    """A node of a segment, in the list of all segments."""
    before = tuple(each + start for each in node.predecessors)
    return replace(node, index=node.index + start, predecessors=before, segment=segment)


def recordings_of(graph: Graph) -> list[Recording]:
    """A graph's recordings, which are no part of its public face."""
    return graph._recordings()
