"""Side streams: operations that do not depend on each other are captured on streams of their own.

Python runs the branches of a module one after the other; on one stream the graph does so too. Here
each operation waits only for those whose results it reads, or whose memory it writes to, so that
the graph's edges are the data flow. A tensor that another stream uses than the one that allocated
it lives until the capture ends: PyTorch's allocator orders the uses of its memory by stream, and
would hand it out too early.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...calls.modes import OperationMode
from ...calls.operations import tensors, written


@dataclass(frozen=True)
class StreamPlacement:
    """Where an operation runs.

    Attributes:
        number: of the operation, from 0.
        stream: the number of its stream; 0 is the main one.
        waits: operations on other streams that it has to wait for.
    """

    number: int
    stream: int
    waits: tuple[int, ...]


@dataclass
class _Uses:
    """Who wrote to some memory last, and who has read it since."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


class StreamPlan:
    """Places operations on streams by their data flow.

    An operation goes on where one of those that it waits for ran, unless another one already has;
    then it takes a stream that nothing was placed on yet, else the one that has rested longest.

    Args:
        count: how many streams there are, the main one among them.
    """

    def __init__(self, count: int) -> None:
        self._tips = [-1] * count  # the last operation of each stream
        self._streams: list[int] = []  # of each operation
        self._uses: dict[Hashable, _Uses] = {}
        # For each stream, the latest operation of each other one that it has waited for.
        self._waited: list[dict[int, int]] = [{} for _ in range(count)]

    def stream_of(self, memory: Hashable) -> int | None:
        """The stream of the operation that wrote to some memory last; None if none did."""
        uses = self._uses.get(memory)
        return None if uses is None or uses.writer is None else self._streams[uses.writer]

    def place(
        self, reads: Iterable[Hashable], writes: Iterable[Hashable], *, begins: bool = False
    ) -> StreamPlacement:
        """Place the next operation.

        Args:
            reads: the memory that it is given.
            writes: the memory that it writes to, of what it is given.
            begins: whether it is given an argument of the call: a branch may begin there.
        """
        reads, writes = [*reads], [*writes]
        before: set[int] = set()
        for memory in (*reads, *writes):
            uses = self._uses.get(memory)
            if uses is not None and uses.writer is not None:
                before.add(uses.writer)
        for memory in writes:
            uses = self._uses.get(memory)
            before |= set() if uses is None else {*uses.readers}
        number, stream = len(self._streams), self._choose(before, begins)
        latest: dict[int, int] = {}
        for each in before:
            other = self._streams[each]
            if other != stream and each > self._waited[stream].get(other, -1):
                latest[other] = max(each, latest.get(other, -1))
        self._waited[stream] |= latest
        self._streams.append(stream)
        self._tips[stream] = number
        for memory in reads:
            self._uses.setdefault(memory, _Uses()).readers.append(number)
        for memory in writes:
            self._uses[memory] = _Uses(number)
        return StreamPlacement(number, stream, tuple(sorted(latest.values())))

    def made(self, number: int, memory: Iterable[Hashable]) -> None:
        """An operation has made tensors in some memory."""
        for each in memory:
            self._uses[each] = _Uses(number)

    def _choose(self, before: set[int], begins: bool) -> int:
        if not before and not begins:
            # What makes a tensor of nothing goes where its user will probably be.
            return self._streams[-1] if self._streams else 0
        going_on = [
            self._streams[each] for each in before if self._tips[self._streams[each]] == each
        ]
        if going_on:
            return min(going_on)
        return min(range(len(self._tips)), key=lambda stream: (self._tips[stream], stream))


class SideStreams(OperationMode):
    """Captures the operations of a block on several streams.

    Args:
        main: the stream that is being captured; the block's work begins and ends there.
        side: other streams, prepared for this thread, that nothing else uses.
        arguments: storages of the call's arguments, by identity.
    """

    def __init__(
        self,
        main: torch.cuda.Stream,
        side: Sequence[torch.cuda.Stream],
        arguments: Collection[Hashable],
    ) -> None:
        super().__init__()
        self._arguments = arguments
        self._streams = [main, *side]
        self._plan = StreamPlan(len(self._streams))
        self._events: list[torch.cuda.Event] = []
        self._begun = {0}
        self._start = main.record_event()
        # Tensors that another stream uses than the one that made them.
        self._held: list[torch.Tensor] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Capture an operation on its stream."""
        if _is_view(func):
            return func(*args, **kwargs)  # Nothing is launched.
        given, changed = tensors((args, kwargs)), written(func, args, kwargs)
        if not all(map(_plain, given)):
            self.join()  # Whose memory cannot be told.
            return func(*args, **kwargs)
        origins = [self._plan.stream_of(_memory(tensor)) for tensor in given]
        begins = any(_memory(tensor) in self._arguments for tensor in given)
        placed = self._plan.place(map(_memory, given), map(_memory, changed), begins=begins)
        stream = self._streams[placed.stream]
        if placed.stream not in self._begun:
            self._begun.add(placed.stream)
            stream.wait_event(self._start)
        for number in placed.waits:
            stream.wait_event(self._events[number])
        self._held += [
            tensor for tensor, origin in zip(given, origins, strict=True) if origin != placed.stream
        ]
        with torch.cuda.stream(stream):
            result = func(*args, **kwargs)
            self._events.append(stream.record_event())
        self._plan.made(placed.number, map(_memory, filter(_plain, tensors(result))))
        return result

    def join(self) -> None:
        """Have the main stream, and what begins later, wait for all that was captured."""
        main = self._streams[0]
        for number in self._begun - {0}:
            main.wait_event(self._streams[number].record_event())
        self._start = main.record_event()
        self._begun = {0}
        self._plan, self._events = StreamPlan(len(self._streams)), []


def _is_view(func: Any) -> bool:
    """Whether all that an operation returns is a view of what it is given."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _memory(tensor: torch.Tensor) -> Hashable:
    number: int = tensor.untyped_storage()._cdata
    return number
