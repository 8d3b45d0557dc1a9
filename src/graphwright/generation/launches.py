"""A step that changes tensors in place, run many times: several times in one graph.

The end is seen late: whether all sequences have ended is copied to the host beside the next launch
and read after it, so that the device never waits for the host. What runs too much has no effect,
which is up to the step: it writes nothing more of a sequence that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field

import torch

from ..dispatch.graphed_callable import GraphedCallable
from ..errors import CaptureError, GraphwrightError
from ..graphs.memory import MemoryPool
from .steps import Step, repeated

# Steps in one graph, where nothing has to look at each: the host works once for all of them.
STEPS_PER_LAUNCH = 8
# How an explanation names a place where the host reads a value.
_BREAK = "break at "


@dataclass(frozen=True)
class Counts:
    """How the steps of a loop were answered.

    Attributes:
        steps: steps that ran.
        launches: calls that they were made by.
        graphed: launches that a graph answered.
        captures: graphs that were captured for them.
    """

    steps: int = 0
    launches: int = 0
    graphed: int = 0
    captures: int = 0

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """All of some counts together."""
        return cls(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))

    def without_steps(self, later: Counts) -> Counts:
        """What to add to later counts, so that steps since these are not among them."""
        return Counts(
            self.steps - later.steps, self.launches - later.launches, self.graphed - later.graphed
        )


@dataclass(eq=False)
class StepGraphs:
    """One step, and the graphs that run it once or several times.

    Args:
        step: changes tensors in place, and nothing else; it reads nothing on the host.
        pool: the memory of the graphs.

    Attributes:
        refused: why there can be no graph even of one step; None if there can.
    """

    step: Step
    pool: MemoryPool
    refused: GraphwrightError | None = None
    _graphs: dict[int, GraphedCallable | None] = field(default_factory=dict)
    _eager: int = 0

    def launch(self, steps: int) -> None:
        """Run the step so many times, by one graph if there can be one."""
        graph = self._graph_of(steps)
        if graph is not None:
            graph()
        elif steps > 1:
            for _ in range(steps):
                self.launch(1)
        else:
            self.step()
            self._eager += 1

    def _graph_of(self, steps: int) -> GraphedCallable | None:
        if steps in self._graphs or self.refused is not None:
            return self._graphs.get(steps)
        graph = GraphedCallable(repeated(self.step, steps), pool=self.pool, outputs="static")
        try:
            # Nobody else decides whether this pays: the loop has many steps to go.
            graph.prepare([()], progress=False)
            _refuse_reads(graph)
        except GraphwrightError as error:
            graph.close()
            self._graphs[steps] = None
            if steps == 1:
                self.refused = error
        else:
            self._graphs[steps] = graph
        return self._graphs[steps]

    @property
    def counts(self) -> Counts:
        """How the launches went so far."""
        found = [Counts(self._eager, self._eager)]
        for steps, graph in self._made():
            made = graph.statistics
            calls = made.hits + sum(made.eager.values())
            found.append(Counts(calls * steps, calls, made.hits, made.captures))
        return Counts.total(found)

    @property
    def refusals(self) -> dict[str, int]:
        """Launches that no graph answered, by reason."""
        found: dict[str, int] = {}
        for _, graph in self._made():
            for reason, calls in graph.statistics.eager.items():
                found[reason] = found.get(reason, 0) + calls
        return found

    @property
    def recaptures(self) -> int:
        """Graphs that were captured again, since what they depend on has changed."""
        return sum(max(0, graph.statistics.captures - 1) for _, graph in self._made())

    def _made(self) -> list[tuple[int, GraphedCallable]]:
        return [(steps, graph) for steps, graph in self._graphs.items() if graph is not None]

    def close(self) -> None:
        """Close the graphs for good."""
        for _, graph in self._made():
            graph.close()
        self._graphs.clear()


def _refuse_reads(graph: GraphedCallable) -> None:
    """Raise if a step tells the host something, for which each token would wait.

    What it reads may be another value in every step, and each would be recorded anew.
    """
    lines = map(str.strip, graph.explain().splitlines())
    where = next((line for line in lines if line.startswith(_BREAK)), None)
    if where is not None:
        raise CaptureError(f"its step reads a value on the host ({where.partition(', ')[0]})")


class LateFlag:
    """A boolean on the device, as the host knows it one launch later.

    Args:
        flag: shape (), bool; a launch changes it in place.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag
        on_host = flag.device.type == "cpu"
        self._slots = [
            torch.zeros_like(flag, device="cpu", pin_memory=not on_host) for _ in range(2)
        ]
        self._events = [None if on_host else torch.Event(device=flag.device) for _ in range(2)]
        self._asked = 0

    def after_launch(self) -> bool:
        """Begin to read the flag, and give what it was after the launch before this one."""
        now, before = self._asked % 2, (self._asked + 1) % 2
        self._slots[now].copy_(self._flag, non_blocking=True)
        event = self._events[now]
        if event is not None:
            event.record()
        self._asked += 1
        if self._asked == 1:
            return False
        event = self._events[before]
        if event is not None:
            event.synchronize()
        return bool(self._slots[before])


def launches(
    graphs: Callable[[int], StepGraphs], steps: int, *, at_once: int, ended: torch.Tensor | None
) -> Iterator[int]:
    """Run a step up to so many times, and give the number of steps of each launch.

    Args:
        graphs: the graphs that may run when so many steps are done after them.
        steps: the most steps to run.
        at_once: the steps of one launch; those that are left over run one by one.
        ended: shape (), bool, on the device: nothing is left to do. None if nothing ends early.

    Yields:
        how many steps were launched, after each launch.
    """
    late = None if ended is None else LateFlag(ended)
    done = 0
    while done < steps:
        count = at_once if steps - done >= at_once else 1
        done += count
        graphs(done).launch(count)
        yield count
        if late is not None and late.after_launch():
            return
