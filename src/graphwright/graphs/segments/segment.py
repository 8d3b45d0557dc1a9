"""Segments of a call, the breaks between them, and constants hoisted out of them.

A break is an operation that tells the host something about the device: a value, a tensor's
content, a shape. It runs between two graphs, and its outcome decides how the call continues: for
each outcome seen so far there is a segment that follows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...calls.operations import tensors
from ..host_draws import Draw
from ..recorder import Allocate, Recording
from ..static_inputs import Geometry, copy
from ..static_outputs import StaticOutputs
from .steps import Given, Host, New, Step, bytes_of, describe_result, key_of, key_of_results

# How many replays of a segment are timed.
_TIMED = 5


class HoistedConstant:
    """A tensor on the host, from outside of the call, and its copy on the device."""

    def __init__(self, host: torch.Tensor, static: torch.Tensor) -> None:
        self._host = host.detach()
        self._static = static
        self._bytes: bytes | None = None

    def refresh(self) -> None:
        """Copy it to the device, if it has changed since the last time."""
        now = bytes_of(self._host)
        if now != self._bytes:
            self._static.copy_(self._host)
            self._bytes = now


class Break:
    """An operation that runs between two segments, since the host needs its outcome.

    Attributes:
        operation: its name.
        place: `file:line` of the user's code.
        after: the segment that follows, by the key of the outcome.
    """

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, *, content: bool
    ) -> None:
        self.operation = str(func)
        self.place = step.place
        self.after: dict[Hashable, Segment] = {}
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._arguments = step.arguments
        self._content = content
        self._given = tensors((args, kwargs))
        scalar = torch.ops.aten._local_scalar_dense.default
        self._scalar: torch.Tensor | None = args[0] if func is scalar else None

    @property
    def func(self) -> Any:
        """The operation."""
        return self._func

    @property
    def is_truth_value(self) -> bool:
        """Whether its outcome is one of True and False."""
        return self._scalar is not None and self._scalar.dtype is torch.bool

    def run(self) -> tuple[Hashable, Any]:
        """Run the operation; returns the key of the outcome, and the results."""
        if self._scalar is not None:
            value = self._scalar.item()
            return ((type(value), key_of(value)),), value
        # In inference mode both inference tensors and others may be written to.
        with torch.inference_mode(), torch._C._DisableAutocast():
            result = self._func(*self._args, **self._kwargs)
            leaves = pytree.tree_leaves(result)
            return key_of_results(leaves, [self._made(leaf, -1) for leaf in leaves]), result

    def step(self, key: Hashable, result: Any, count: int) -> Step:
        """The step for this outcome; memory that the operation made is numbered from `count` on."""
        leaves, spec = pytree.tree_flatten(result)
        made: list[Any] = []
        numbers: dict[int, int] = {}
        for leaf in leaves:
            number = -1
            if isinstance(leaf, torch.Tensor):
                memory = leaf.untyped_storage()._cdata
                number = numbers.setdefault(memory, count + len(numbers))
            made.append(self._made(leaf, number))
        real = [leaf for leaf, what in zip(leaves, made, strict=True) if isinstance(what, New)]
        return Step(self._func, self._arguments, tuple(made), spec, key=key, real=real)

    def _made(self, leaf: Any, number: int) -> Any:
        on_cuda = any(tensor.device.type != "cpu" for tensor in self._given)
        host = isinstance(leaf, torch.Tensor) and (
            self._content or (on_cuda and leaf.device.type == "cpu")
        )
        made = describe_result(leaf, self._given, host=host)
        if made is not None or leaf is None:
            return made
        nbytes = leaf.untyped_storage().nbytes()
        return New(number, nbytes, leaf.storage_offset(), Geometry.of(leaf))


@dataclass(eq=False)
class Segment:
    """What a call does between two breaks, before the first break, or after the last one.

    Attributes:
        device: where it runs.
        parent: the segment before the preceding break; None for the first segment.
        arrival: the preceding break, with the outcome that leads here.
        memory: memory that this break's results are copied into, by number.
        targets: the results in that memory.
        steps: the operations.
        recording: its graph; None if it does nothing on the device.
        held: memory that it made and that later segments need, by number.
        sources: constants that were hoisted out of it.
        break_: the break at its end; None if the call ends there.
        count: how many pieces of memory the call has made up to its end.
        draws: what such a call draws on the host beside the graphs, if it ends there.
        results: what the call returns, if it ends there.
        back: positions of the arguments that are then copied back as bytes.
        back_by_element: positions of those that are copied back element by element.
        hits: how often it ran.
    """

    device: torch.device
    parent: Segment | None
    arrival: Step | None
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    targets: list[torch.Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    recording: Recording | None = None
    held: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    sources: list[HoistedConstant] = field(default_factory=list)
    break_: Break | None = None
    count: int = 0
    draws: Sequence[Draw] = ()
    results: StaticOutputs | None = None
    back: list[int] = field(default_factory=list)
    back_by_element: list[int] = field(default_factory=list)
    hits: int = 0
    _times: list[Any] = field(default_factory=list)

    @classmethod
    def after(cls, parent: Segment, arrival: Step, allocate: Allocate) -> Segment:
        """The segment that follows an outcome of a break, with memory for the results."""
        node = cls(parent.device, parent, arrival)
        news = [made for made in arrival.made if isinstance(made, New)]
        for made, real in zip(news, arrival.real, strict=True):
            if made.number not in node.memory:
                node.memory[made.number] = allocate(made.nbytes).untyped_storage()
            node.targets.append(made.at(node.memory[made.number]))
            copy(real, node.targets[-1])
        return node

    def path(self) -> list[Segment]:
        """The segments from the first to this one."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def known(self) -> list[Step]:
        """All steps up to the end of this segment, without its break."""
        found = []
        for node in self.path():
            found += [node.arrival] if node.arrival is not None else []
            found += node.steps
        return found

    def memory_so_far(self) -> dict[int, torch.UntypedStorage]:
        """Memory that the call made and that is alive at this segment's end, by number."""
        return {n: s for node in self.path() for n, s in (node.memory | node.held).items()}

    def below(self) -> Iterator[Segment]:
        """This segment and all that follow it on any path."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            if node.break_ is not None:
                waiting += node.break_.after.values()

    def enter(self, result: Any) -> None:
        """Copy the results of the preceding break to where this segment reads them."""
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        assert self.arrival is not None
        made = [what for what in self.arrival.made if isinstance(what, New | Host | Given)]
        sources = [leaf for leaf, what in zip(leaves, made, strict=True) if isinstance(what, New)]
        with torch.no_grad():
            for source, target in zip(sources, self.targets, strict=True):
                copy(source, target)

    def launch(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Replay the segment; the first replays are timed."""
        recording = self.recording
        self.hits += 1
        if recording is None:
            return
        if len(self._times) >= _TIMED:
            recording.run(sources, targets)
            return
        with _timed(self._times, self.device):
            recording.run(sources, targets)

    def close(self) -> None:
        """Close its graph at once."""
        recording = self.take_recording()
        if recording is not None:
            recording.close()

    def take_recording(self) -> Recording | None:
        """Drop everything but the recording, which the caller has to close."""
        recording, self.recording = self.recording, None
        self.memory, self.held = {}, {}
        self.targets, self.steps, self.sources = [], [], []
        self.parent = self.arrival = self.break_ = self.results = None
        return recording

    @property
    def seconds(self) -> float | None:
        """Seconds of the fastest timed replay; None if there was none."""
        taken = [
            t if isinstance(t, float) else t[0].elapsed_time(t[1]) / 1e3
            for t in self._times
            if isinstance(t, float) or t[1].query()  # Else it is still running.
        ]
        return min(taken) if taken else None


@contextlib.contextmanager
def _timed(times: list[Any], device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        began = time.perf_counter()
        yield
        times.append(time.perf_counter() - began)
        return
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record(stream)
    yield
    events[1].record(stream)
    times.append(events)
