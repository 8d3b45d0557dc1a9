"""What goes wrong with arguments on the host: more of hazards.py, with number 10.

On a GPU the values of a call are copied there after the replays before it, while the host goes on.
On the CPU a stand-in for a stream does the same: copies and replays run when somebody waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hazards import hazard

import graphwright as gw
from graphwright.graphs import static_inputs
from graphwright.graphs.cpu import recorder as cpu
from graphwright.graphs.staging import StagingBuffer
from graphwright.graphs.static_inputs import StaticInputs

_CALLS = 20
# Clock cycles of a GPU, about a millisecond.
_LATE = 2_000_000


class LateStream:
    """A stream of the CPU: what is given to it runs in order, when `wait` is called."""

    def __init__(self) -> None:
        self._given: list[Callable[[], object]] = []
        self._done = 0

    def add(self, work: Callable[[], object]) -> int:
        """Add work; returns its number."""
        self._given.append(work)
        return len(self._given)

    def is_over(self, number: int) -> bool:
        """Whether some work has run."""
        return number <= self._done

    def wait(self, number: int | None = None) -> None:
        """Run the work up to a number, or all."""
        last = len(self._given) if number is None else number
        while self._done < last:
            self._given[self._done]()
            self._done += 1


@contextlib.contextmanager
def late(device: torch.device) -> Iterator[Callable[[], None]]:
    """Have the device lag behind the host in the block; what is given waits for it."""
    if device.type == "cuda":
        yield torch.cuda.synchronize
        return
    stream, run = LateStream(), cpu.CpuRecording.run
    numbers: dict[int, int] = {}
    copy_to, is_free = StagingBuffer.copy_to, StagingBuffer.is_free

    def run_late(self: Any, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        stream.add(lambda: run(self, sources, targets))

    def copy_late(self: StagingBuffer, targets: Sequence[torch.Tensor]) -> None:
        numbers[id(self)] = stream.add(lambda: copy_to(self, targets))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.CpuRecording, "run", run_late)
        patch.setattr(StagingBuffer, "copy_to", copy_late)
        # Not where a switch has taken these.
        if not hasattr(is_free, "switched_off"):
            over = property(lambda self: stream.is_over(numbers.get(id(self), 0)))
            patch.setattr(StagingBuffer, "is_free", over)
            patch.setattr(StagingBuffer, "wait", lambda self: stream.wait(numbers.get(id(self), 0)))
        yield stream.wait


@contextlib.contextmanager
def on_host(device: torch.device) -> Iterator[Callable[[int], torch.Tensor]]:
    """Give what makes a tensor on the host; on the CPU all of its dtype are taken for such."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            marked = lambda tensor, device: tensor.dtype is torch.int64  # noqa: E731
            patch.setattr(static_inputs, "is_on_host", marked)
            yield lambda value: torch.full((100,), value)
            return
        yield lambda value: torch.full((100,), value).pin_memory()


def scaled(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        torch.cuda._sleep(_LATE)
    return x * t.to(x.device)


class _SwitchedOff(property):
    switched_off = True


def buffers_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagingBuffer, "is_free", _SwitchedOff(lambda self: True))
    patch.setattr(StagingBuffer, "wait", lambda self: None)


@hazard(10, buffers_are_not_waited_for)
@torch.no_grad()
def a_value_on_the_host_is_still_that_of_its_call(device: torch.device) -> None:
    x = torch.ones(100, device=device)
    with on_host(device) as make:
        graph = gw.capture(scaled, x, make(0))
        graph(x, make(0))
        with late(device) as wait:
            made = [graph(x, make(value)) for value in range(_CALLS)]
            wait()
    assert [int(each[-1]) for each in made] == [*range(_CALLS)]


def values_are_copied_from_where_they_are(patch: pytest.MonkeyPatch) -> None:
    def send(self: StaticInputs, leaves: Sequence[Any]) -> None:
        class Given(StagingBuffer):
            def __init__(self, parts: Sequence[torch.Tensor]) -> None:
                self.parts = [*parts]
                self._copied = None

        slots = [slot for _, staged in self._staged for slot, _ in staged]
        given = Given([static_inputs.byte_view(leaves[slot]) for slot in slots])
        given.copy_to([memory for memory, _ in self._staged])

    patch.setattr(StaticInputs, "send", send)


@hazard(10, values_are_copied_from_where_they_are)
@torch.no_grad()
def the_caller_may_write_to_the_host_after_the_call(device: torch.device) -> None:
    x, made = torch.ones(100, device=device), []
    with on_host(device) as make:
        t = make(0)
        graph = gw.capture(scaled, x, t)
        graph(x, t)
        with late(device) as wait:
            for value in range(_CALLS):
                t.fill_(value)
                made.append(graph(x, t))
            wait()
    assert [int(each[-1]) for each in made] == [*range(_CALLS)]
