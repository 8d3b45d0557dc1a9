"""Breaks: what is run between two segments of a call, and what follows by what it gave.

A break is an operation that lets the host know something of the device: a value, a content, a
shape. It is run between two graphs, and what it gave decides how the call goes on: each outcome
that was met has a segment of its own behind it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .journal import tensors
from .recorder import Allocate, Recorder, Recording, Segment
from .steps import Given, Host, New, Step, bytes_of, key_of, key_of_results, on_the_way_out
from .transfer import Geometry, Inputs, Results, copy
from .walk import Differs, Walk, replaced

_TIMED = 5


class Source:
    """Memory on the host, from outside of the call, and its copy on the device."""

    def __init__(self, host: torch.Tensor, static: torch.Tensor) -> None:
        self._host = host.detach()
        self._static = static
        self._bytes: bytes | None = None

    def refresh(self) -> None:
        """Copy it, the first time and whenever it has changed."""
        now = bytes_of(self._host)
        if now != self._bytes:
            self._static.copy_(self._host)
            self._bytes = now


class Stop:
    """A break: the operation that is run between two segments.

    Attributes:
        operation: its name.
        place: `file:line` of the user's code.
        after: what follows, by what the operation gave.
    """

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, *, content: bool
    ) -> None:
        self.operation = str(func)
        self.place = step.place
        self.after: dict[Hashable, Node] = {}
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._asked = step.asked
        self._content = content
        self._given = tensors((args, kwargs))
        scalar = torch.ops.aten._local_scalar_dense.default
        self._scalar: torch.Tensor | None = args[0] if func is scalar else None

    def run(self) -> tuple[Hashable, Any]:
        """Run it: what its results are known by, and they themselves."""
        if self._scalar is not None:
            value = self._scalar.item()
            return ((type(value), key_of(value)),), value
        # In inference mode, tensors that were made in it and others may be written to.
        with torch.inference_mode(), torch._C._DisableAutocast():
            result = self._func(*self._args, **self._kwargs)
            leaves = pytree.tree_leaves(result)
            return key_of_results(leaves, [self._made(leaf, -1) for leaf in leaves]), result

    def step(self, key: Hashable, result: Any, count: int) -> Step:
        """The step that it was this time; memory that it made is numbered from `count` on."""
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
        return Step(self._func, self._asked, tuple(made), spec, key=key, real=real)

    def _made(self, leaf: Any, number: int) -> Any:
        on_cuda = any(tensor.device.type != "cpu" for tensor in self._given)
        host = isinstance(leaf, torch.Tensor) and (
            self._content or (on_cuda and leaf.device.type == "cpu")
        )
        made = on_the_way_out(leaf, self._given, host=host)
        if made is not None or leaf is None:
            return made
        nbytes = leaf.untyped_storage().nbytes()
        return New(number, nbytes, leaf.storage_offset(), Geometry.of(leaf))


@dataclass(eq=False)
class Node:
    """A segment: what a call does from one break, or its begin, to the next, or its end.

    Attributes:
        device: where it runs.
        parent: the segment before the break that it comes after.
        arrival: that break, with the outcome that leads here.
        memory: by number, what the break's results are copied into.
        targets: these results there.
        steps: what it does.
        recording: its graph; None if it does nothing on the device.
        held: by number, memory that it has made and that is needed later.
        sources: memory on the host that it has a copy of.
        stop: the break at its end; None at the call's.
        count: how many pieces of memory the call has made up to there.
        results: what the call returns, at its end.
        back: positions of the arguments that are copied back as bytes.
        back_by_element: likewise, element by element.
        hits: how often calls have come by here.
    """

    device: torch.device
    parent: Node | None
    arrival: Step | None
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    targets: list[torch.Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    recording: Recording | None = None
    held: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    stop: Stop | None = None
    count: int = 0
    results: Results | None = None
    back: list[int] = field(default_factory=list)
    back_by_element: list[int] = field(default_factory=list)
    hits: int = 0
    _times: list[Any] = field(default_factory=list)

    @classmethod
    def after(cls, parent: Node, arrival: Step, allocate: Allocate) -> Node:
        """What follows a break, with memory for its results."""
        node = cls(parent.device, parent, arrival)
        news = [made for made in arrival.made if isinstance(made, New)]
        for made, real in zip(news, arrival.real, strict=True):
            if made.number not in node.memory:
                node.memory[made.number] = allocate(made.nbytes).untyped_storage()
            node.targets.append(made.at(node.memory[made.number]))
            copy(real, node.targets[-1])
        return node

    def path(self) -> list[Node]:
        """The segments up to this one, from the first."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def known(self) -> list[Step]:
        """All steps up to the end of this segment, its break left out."""
        found = []
        for node in self.path():
            found += [node.arrival] if node.arrival is not None else []
            found += node.steps
        return found

    def memory_so_far(self) -> dict[int, torch.UntypedStorage]:
        """Memory of the call that lives at the end of this segment, by number."""
        return {n: s for node in self.path() for n, s in (node.memory | node.held).items()}

    def below(self) -> Iterator[Node]:
        """This segment and all that come after it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            if node.stop is not None:
                waiting += node.stop.after.values()

    def enter(self, result: Any) -> None:
        """Copy what the break before has made to where this segment reads it."""
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        assert self.arrival is not None
        made = [what for what in self.arrival.made if isinstance(what, New | Host | Given)]
        sources = [leaf for leaf, what in zip(leaves, made, strict=True) if isinstance(what, New)]
        with torch.no_grad():
            for source, target in zip(sources, self.targets, strict=True):
                copy(source, target)

    def launch(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Run the segment."""
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
        """Give its graph up, at once."""
        recording = self.let_go()
        if recording is not None:
            recording.close()

    def let_go(self) -> Recording | None:
        """Give everything up but its graph, which is left to the caller."""
        recording, self.recording = self.recording, None
        self.memory, self.held = {}, {}
        self.targets, self.steps, self.sources = [], [], []
        self.parent = self.arrival = self.stop = self.results = None
        return recording

    @property
    def seconds(self) -> float | None:
        """Seconds that a replay takes, the quickest of the first ones; None if there was none."""
        taken = [t if isinstance(t, float) else t[0].elapsed_time(t[1]) / 1e3 for t in self._times]
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


Finishing = Callable[[Walk, Any], tuple[Results | None, list[torch.Tensor]]]


class Tracing(Walk):
    """Records what comes after the known steps, as an observation has found it.

    Args:
        node: the first segment to record.
        script: the observation's steps.
        recorder: what records them.
        feeds: for the first segment, memory that is filled before the call.
        generators: random generators that the call draws from.
        given: as for `Walk`.

    Attributes:
        nodes: the segments that were recorded.
        culprit: the operation that could not be recorded.
    """

    def __init__(
        self,
        node: Node,
        script: Iterable[Step],
        recorder: Recorder,
        feeds: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
        *given: Any,
    ) -> None:
        super().__init__(*given)
        self.nodes = [node]
        self.culprit: Any = None
        self._script = deque(script)
        self._recorder = recorder
        self._feeds = feeds
        self._draws_from = generators
        self._segment: Segment | None = None
        self._ending = contextlib.ExitStack()
        self._segments: list[Segment] = []

    def record(self, work: Callable[[Inputs], Any], inputs: Inputs, finish: Finishing) -> None:
        """Walk through the work. On an error nothing is left.

        Raises:
            Differs: it does something else than was observed.
            CaptureError: it cannot be recorded.
        """
        try:
            with self._ending:
                with self.seen():
                    result = work(inputs)
                self.finish(result)
                if self._script:
                    raise Differs(f"{self._script[0].func} is missing")
                segment = self._begin()
                node = self.nodes[-1]
                node.results, drains = finish(self, result)
                segment.drain(drains)
                self._end(drained=bool(drains))
        except BaseException:
            for node in self.nodes:
                node.close()
            raise
        finally:
            for segment in reversed(self._segments):
                segment.forget()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Nothing is done that would have to be undone; what is used is held."""
        self.operation = func
        for tensor in tensors((args, kwargs)):
            if tensor.layout is torch.strided and not tensor.is_nested:
                self.read(tensor)

    def fresh(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: tuple[Any, ...]
    ) -> Any:
        """Record an operation."""
        if not self._script or not self._script[0].same(func, asked):
            raise Differs(f"{func} is new, or has other arguments")
        step = self._script.popleft()
        segment, node = self._begin(), self.nodes[-1]
        given = tensors((args, kwargs))
        hosts = self.hosts_among(func, args, kwargs)
        if hosts:
            for host, static in zip(hosts, step.statics, strict=True):
                if not self.is_made(host):
                    node.sources.append(Source(host, static))
            args, kwargs = replaced((args, kwargs), hosts, step.statics)
        if step.key is not None:
            self._cut(step, Stop(func, args, kwargs, step, content=self.content))
            return self.answered(step, given)
        try:
            result = segment.run(func, args, kwargs)
        except Exception:
            self.culprit = func
            raise
        for leaf, made in zip(pytree.tree_leaves(result), step.made, strict=True):
            if isinstance(made, New):
                if Geometry.of(leaf) != made.geometry:
                    raise Differs(f"{func} gives another shape")
                self.made(leaf)
                self._take(leaf.untyped_storage(), made.number)
        node.steps.append(step)
        return result

    def _cut(self, step: Step, stop: Stop) -> None:
        """End the segment at a break, and begin what follows its outcome."""
        self._end()
        node = self.nodes[-1]
        known = node.memory_so_far()
        node.held = {n: s for n, s in self.living().items() if n not in known}
        node.count, node.stop = self._count, stop
        child = Node.after(node, step, self._recorder.allocate)
        self._memory |= child.memory
        assert step.key is not None
        stop.after[step.key] = child
        self.nodes.append(child)

    def _begin(self) -> Segment:
        if self._segment is None:
            feeds = self._feeds if self.nodes[-1].parent is None else ()
            self._segment = self._ending.enter_context(
                self._recorder.segment(feeds, self._draws_from)
            )
            self._segments.append(self._segment)
        return self._segment

    def _end(self, *, drained: bool = False) -> None:
        segment, node = self._segment, self.nodes[-1]
        self._segment = None
        self._ending.close()
        assert segment is not None
        if node.steps or drained or (node.parent is None and self._feeds):
            node.recording = segment.recording
        else:
            segment.recording.close()
