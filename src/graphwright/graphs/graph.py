"""Graph: the states, replay and closing that all captured graphs share."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

import torch

from ..calls.modes import opaque
from ..errors import CaptureError
from .conditions import capturing_now
from .memory import GraphMemory, MemoryPool
from .recorder import Recording


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
        self.name = name
        self._evictable = evictable
        self.mutates = True
        self.random = True
        self.memory = GraphMemory(name, 0, 0)
        self._recording: Recording | None = None
        self._held: list[Any] = []

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
    def nodes(self) -> int:
        """How many operations a replay repeats, a CUDA graph's nodes; 0 once it is closed."""
        return 0 if self._recording is None else self._recording.nodes

    def replay(self) -> None:
        """Repeat the work on what the static inputs hold now; the results are in `outputs`.

        Raises:
            CaptureError: the graph is closed.
        """
        with self.pool._lock:
            recording = self._ready()
            self.pool._order()
            recording.replay()

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with other values of the arguments that the graph was captured with.

        Returns:
            what the function returns: tensors that the caller owns, or with outputs="static" the
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
        self._retire()
        if not capturing_now():
            with self.pool._lock:
                self.pool._sweep()

    def __del__(self) -> None:
        if getattr(self, "state", GraphState.CLOSED) is GraphState.CLOSED:
            return
        self._retire()
        # A finalizer may run at any time and on any thread: it must not wait.
        if not capturing_now() and self.pool._lock.acquire(blocking=False):
            try:
                self.pool._sweep()
            finally:
                self.pool._lock.release()

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
        self.pool._remove(self)
        recording, self._recording = self._recording, None
        if recording is not None:
            self.pool._retire(recording)
        self._held = []

    def _set_recording(self, recording: Recording, before: int, predicted: int) -> None:
        """Take a recording over, and note what it cost.

        Args:
            recording: what was recorded.
            before: bytes that the pool held before.
            predicted: bytes that it was expected to add.
        """
        recording.name = self.name
        self._recording = recording
        self._held += recording.external
        recorder = self.pool._recorder_for(self.pool.device or torch.device("cpu"))
        self.pool._update_high_water()
        self.memory = GraphMemory(self.name, recorder.reserved - before, predicted)
