"""When each node of a CUDA graph ran in a usual replay, by PyTorch's profiler (CUPTI).

CUPTI reports the kernels, copies and memsets of a launched graph one by one, without the nodes
that they belong to. They are matched by name, in the order in which they began, each to the first
node of that name whose predecessors have begun. Where that fails, no node has a time: a wrong one
is worse.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..inspection.node import Node
from ..marks import silent_profiler

_TIMED = ("kernel", "copy", "memset")
# Launches that are traced: the one in the middle, by the sum of its times, is told.
_LAUNCHES = 5
# Parts of the names of other activities that are reported for a device.
_NO_NODES = ("annotation", "sync", "overhead", "event")


@dataclass(frozen=True)
class Span:
    """What CUPTI tells of one kernel, copy or memset: times in microseconds."""

    kind: str
    name: str
    start_us: float
    duration_us: float


def spans_of(launch: Callable[[], None], device: torch.device | None) -> list[Span]:
    """What ran on a device, the current one by default, in a usual launch, by its begin.

    Several are traced: what else runs on the device makes single ones slower.
    """
    launch()
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        silent_profiler(),
        torch.profiler.profile(activities=activities, acc_events=True) as profiler,
    ):
        for _ in range(_LAUNCHES):
            launch()
            torch.cuda.synchronize(device)
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    # Before a graph that draws random numbers, PyTorch launches kernels that set its seed.
    launches = {event.correlation_id() for event in events if "GraphLaunch" in event.name()}
    traced: dict[int, list[Span]] = {}
    for event in events:
        if not _on_gpu(event) or event.correlation_id() not in launches:
            continue
        kind = _kind(event)
        if kind is not None:
            start, took = event.start_ns() / 1e3, event.duration_ns() / 1e3
            spans = traced.setdefault(event.correlation_id(), [])
            spans.append(Span(kind, event.name(), start, took))
    if not traced:
        return []
    by_total = sorted(traced.values(), key=lambda spans: sum(span.duration_us for span in spans))
    return sorted(by_total[len(by_total) // 2], key=lambda span: span.start_us)


def _on_gpu(event: Any) -> bool:
    return str(event.device_type()).endswith("CUDA")


def _kind(event: Any) -> str | None:
    """The kind of node that an event belongs to; None for what is no node."""
    if event.is_user_annotation():  # such as the mark of a replay
        return None
    known = getattr(event, "activity_type", None)
    activity = "" if known is None else str(known())
    if any(word in activity for word in _NO_NODES):
        return None
    name = event.name()
    if name.startswith("Memcpy"):
        return "copy"
    if name.startswith("Memset"):
        return "memset"
    if name.startswith(("ProfilerStep", "Context Sync", "Event Sync", "Stream Sync")):
        return None
    return "kernel"


def with_times(
    nodes: Sequence[Node], spans: Sequence[Span], off: Container[int] = ()
) -> list[Node] | None:
    """The nodes with the times of the spans; None where they do not match one to one.

    Args:
        nodes: of a graph.
        spans: of one replay of it.
        off: indices of nodes that were turned off in it.
    """
    begun = {node.index for node in nodes if node.kind not in _TIMED or node.index in off}
    waiting = [node for node in nodes if node.index not in begun]
    if len(waiting) != len(spans):
        return None
    found: dict[int, Span] = {}
    for span in spans:
        match = _first(waiting, span, begun) or _first(waiting, span, None)
        if match is None:
            return None
        found[match.index] = span
        begun.add(match.index)
        waiting.remove(match)
    start = min((span.start_us for span in spans), default=0.0)
    return [
        node
        if node.index not in found
        else replace(
            node,
            start_us=found[node.index].start_us - start,
            duration_us=found[node.index].duration_us,
        )
        for node in nodes
    ]


def _first(waiting: Sequence[Node], span: Span, begun: set[int] | None) -> Node | None:
    for node in waiting:
        if node.kind != span.kind or (node.kind == "kernel" and not _same(node.name, span.name)):
            continue
        if begun is None or all(before in begun for before in node.predecessors):
            return node
    return None


def _same(mine: str, its: str) -> bool:
    """Whether two names are one kernel's: demanglers differ in spaces and casts."""
    return mine == its or _bare(mine) == _bare(its)


def _bare(name: str) -> str:
    return "".join(name.split())
