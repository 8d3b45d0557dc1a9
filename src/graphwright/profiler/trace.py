"""One run under torch.profiler: what it says of the host and, by CUPTI, of the device's kernels.

The figures are read from the profiler's own Chrome trace, whose form is stable. Some calls run as
they are; in others every operation runs inside a mark, so that each kernel belongs to one.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ..errors import GraphwrightError, first_line
from ..graphs.marks import silent_profiler
from .observation import MARK, Marker, ObservedOperation
from .subject import Subject

Event = dict[str, Any]
Span = tuple[float, float]

# Names of the marks of whole calls: as they are, and with a mark for each operation.
CALL, MARKED = "graphwright.call.", "graphwright.marked."
# Calls of each kind, and seconds after which there is no other one.
_CALLS, _LIMIT_S = 3, 1.0
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_WAITING = ("cudaMemcpy",)
# Copies between host and device.
_TRANSFERS = ("HtoD", "DtoH")
# Copies of fewer bytes, or where that is not told of fewer microseconds, are reads of values.
_LARGE_BYTES, _LARGE_US = 1 << 16, 10.0
# Kernels of one launch that are this close, in microseconds, run as a chain: a graph's, say.
_CHAIN_US = 4.0


@dataclass(frozen=True)
class Kernel:
    """One piece of work on the device.

    Attributes:
        name: of the kernel or copy.
        start_s: when it began, after the call did.
        seconds: how long it took.
        operation: index of the operation that launched it; None if none did.
        kind: "kernel", "copy", "set", "to device" or "to host".
        stream: of the device.
    """

    name: str
    start_s: float
    seconds: float
    operation: int | None
    kind: str
    stream: int = 0


@dataclass(frozen=True)
class TracedCall:
    """What the profiler says of a call; times in seconds.

    Attributes:
        kernels: of one call, in order.
        busy_s: in which the device did something: the union of its work.
        waiting_s: in which the host waited for the device.
        copying_s: in which the host was inside of copies between host and device.
        python_s: in which no operation and nothing of CUDA's runtime ran on any thread.
        window_s: how long the call took under the profiler.
        launches: kernels, copies and graphs that the host launched.
        operation_s: of each operation on the device, by its index.
        events: the profiler's own, of one call of each kind, for a Chrome trace.
    """

    kernels: tuple[Kernel, ...] = ()
    busy_s: float = 0.0
    waiting_s: float = 0.0
    copying_s: float = 0.0
    python_s: float = 0.0
    window_s: float = 0.0
    launches: int = 0
    operation_s: dict[int, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list, repr=False)


def traced(subject: Subject) -> TracedCall:
    """Run some calls under torch.profiler.

    Raises:
        GraphwrightError: the profiler cannot run, as where another one does.
    """
    activities = [ProfilerActivity.CPU]
    cuda = subject.device.type == "cuda"
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "trace.json"
        try:
            with silent_profiler(), torch.profiler.profile(activities=activities) as profiler:
                _run(subject, cuda)
            profiler.export_chrome_trace(str(file))
            events = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        except (RuntimeError, OSError, ValueError, KeyError, AssertionError) as error:
            raise GraphwrightError(
                f"torch.profiler cannot trace the call: {first_line(error)}.",
                remedy="Run no other profiler in this process. On a GPU, CUPTI has to be allowed "
                "to profile: NVIDIA's page ERR_NVGPUCTRPERM says how.",
            ) from error
    return parse(events)


def _run(subject: Subject, cuda: bool) -> None:
    def finish() -> None:
        if cuda:
            torch.cuda.synchronize(subject.device)

    with subject.mode():
        began = time.perf_counter()
        for number in range(_CALLS + 1):  # The first one starts the profiler up.
            if number > 1 and time.perf_counter() - began > _LIMIT_S:
                break
            call = subject.prepared()
            finish()
            with torch.profiler.record_function(f"{CALL}{number}"):
                result = call()
            finish()
            del result
        for number in range(_CALLS if cuda else 1):
            call = subject.prepared()
            finish()
            with torch.profiler.record_function(f"{MARKED}{number}"), Marker():
                result = call()
            finish()
            del result


def parse(events: Sequence[Event]) -> TracedCall:
    """Figures from the events of a Chrome trace of `_run`; microseconds become seconds."""
    trace = _ChromeTrace(events)
    calls = trace.windows(CALL)[1:] or trace.windows(CALL)
    marked = trace.windows(MARKED)
    found = [_figures(trace, call) for call in calls]
    kernels, operation_s = _by_operation(trace, marked)
    return TracedCall(
        kernels=kernels,
        busy_s=_median([each.busy for each in found]) / 1e6,
        waiting_s=_median([each.waiting for each in found]) / 1e6,
        copying_s=_median([each.copying for each in found]) / 1e6,
        python_s=_median([each.python for each in found]) / 1e6,
        window_s=_median([each.window for each in found]) / 1e6,
        launches=round(_median([each.launches for each in found])),
        operation_s=operation_s,
        events=_kept(events, trace, [*calls[-1:], *marked[-1:]]),
    )


class _ChromeTrace:
    """The events of a Chrome trace by what they are.

    Attributes:
        spans: all that begin and end.
        runtime: of these, calls of CUDA's runtime.
        host: when it was in an operation or in CUDA's runtime, in order.
        device: work of the device, in order.
        launches: what of `runtime` launched such work, by the number that both bear.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.spans = [e for e in events if e.get("ph") == "X" and "ts" in e]
        self.runtime = [e for e in self.spans if e.get("cat") in _RUNTIME]
        operations = [e for e in self.spans if e.get("cat") == "cpu_op"]
        self.host = sorted(_span(e) for e in (*self.runtime, *operations) if not _is_mark(e))
        device = (e for e in self.spans if e.get("cat") in _DEVICE)
        self.device = sorted(device, key=lambda e: float(e["ts"]))
        self.launches = {n: e for e in self.runtime if (n := _correlation(e)) is not None}

    def windows(self, prefix: str) -> list[Span]:
        """When the blocks ran whose marks begin with a prefix, in order."""
        return sorted(_span(e) for e in self.spans if _is_mark(e, prefix) and _is_block(e))

    def launched_in(self, window: Span) -> list[Event]:
        """The device's work that was launched in a window, whenever it ran."""
        launched = (e for e in self.device if _correlation(e) in self.launches)
        return [e for e in launched if _begins_in(self.launches[_correlation(e)], window)]


@dataclass(frozen=True)
class _Figures:
    """What a trace says of one call, in microseconds; see `TracedCall`."""

    busy: float
    waiting: float
    copying: float
    python: float
    window: float
    launches: int


def _figures(trace: _ChromeTrace, call: Span) -> _Figures:
    begin, end = call
    inside = [e for e in trace.runtime if _begins_in(e, call)]
    mine = trace.launched_in(call)
    transfers = {_correlation(e) for e in mine if _is_transfer(e)}
    covered = _length(_union((s for s in trace.host if s[1] > begin and s[0] < end), 0.0))
    return _Figures(
        busy=_length(_busy(mine)),
        waiting=sum(float(e["dur"]) for e in inside if _waits(e)),
        copying=sum(float(e["dur"]) for e in inside if _correlation(e) in transfers),
        python=max(0.0, end - begin - covered),
        window=end - begin,
        launches=len({_correlation(e) for e in mine}),
    )


def _begins_in(event: Event, window: Span) -> bool:
    return window[0] <= float(event["ts"]) < window[1]


def _is_block(event: Event) -> bool:
    return event.get("cat") == "user_annotation"


def _span(event: Event) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0.0))


def _correlation(event: Event) -> Any:
    """The number that a piece of work on the device shares with its launch."""
    return event.get("args", {}).get("correlation")


def _is_mark(event: Event, prefix: str | tuple[str, ...] = (CALL, MARKED, MARK)) -> bool:
    return str(event.get("name", "")).startswith(prefix)


def _waits(event: Event) -> bool:
    name = str(event["name"])
    return "Synchronize" in name or name in _WAITING


def _is_transfer(event: Event) -> bool:
    """Whether it copies more between host and device than a few values that are read."""
    if not any(kind in str(event["name"]) for kind in _TRANSFERS):
        return False
    nbytes = event.get("args", {}).get("bytes")
    return float(event["dur"]) > _LARGE_US if nbytes is None else int(nbytes) >= _LARGE_BYTES


def _union(spans: Iterable[Span], gap: float) -> list[Span]:
    """Spans joined where they overlap or are no further apart than `gap`."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _busy(events: Sequence[Event]) -> list[Span]:
    """When the device works; the gaps inside of one launch, as of a graph, count as work."""
    by_launch: dict[Any, list[Span]] = {}
    for event in events:
        by_launch.setdefault(_correlation(event), []).append(_span(event))
    chains = [span for spans in by_launch.values() for span in _union(spans, _CHAIN_US)]
    return _union(chains, 0.0)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _by_operation(
    trace: _ChromeTrace, calls: list[Span]
) -> tuple[tuple[Kernel, ...], dict[int, float]]:
    """The kernels of one marked call, and the median device time of each operation in all."""
    marks: dict[Any, list[tuple[float, float, int]]] = {}
    for event in trace.spans:
        if _is_mark(event, MARK) and _is_block(event):
            number = int(str(event["name"])[len(MARK) :])
            marks.setdefault(event.get("tid"), []).append((*_span(event), number))
    for several in marks.values():
        several.sort()
    found = [_kernels(trace, marks, call) for call in calls]
    totals: dict[int, list[float]] = {}
    for kernels in found:
        sums: dict[int, float] = {}
        for kernel in kernels:
            if kernel.operation is not None:
                sums[kernel.operation] = sums.get(kernel.operation, 0.0) + kernel.seconds
        for index, seconds in sums.items():
            totals.setdefault(index, []).append(seconds)
    medians = {index: _median(values) for index, values in totals.items()}
    return found[-1] if found else (), medians


def _kernels(
    trace: _ChromeTrace, marks: dict[Any, list[tuple[float, float, int]]], call: Span
) -> tuple[Kernel, ...]:
    """The device's work of a call, each with the operation inside of whose mark it was launched."""
    found = []
    for event in trace.launched_in(call):
        launch = trace.launches[_correlation(event)]
        index = _enclosing(marks.get(launch.get("tid"), []), float(launch["ts"]))
        start, over = _span(event)
        found.append(
            Kernel(
                str(event["name"]),
                (start - call[0]) / 1e6,
                (over - start) / 1e6,
                index,
                _kind(event),
                int(event["args"].get("stream", 0) or 0),
            )
        )
    return tuple(found)


def _enclosing(marks: list[tuple[float, float, int]], time: float) -> int | None:
    place = bisect.bisect_right(marks, (time, float("inf"), 0)) - 1
    if place >= 0 and marks[place][0] <= time <= marks[place][1]:
        return marks[place][2]
    return None


def _kind(event: Event) -> str:
    if event["cat"] == "gpu_memset":
        return "set"
    if event["cat"] == "kernel":
        return "kernel"
    name = str(event["name"])
    return "to device" if "HtoD" in name else "to host" if "DtoH" in name else "copy"


def _kept(events: Sequence[Event], trace: _ChromeTrace, windows: Sequence[Span]) -> list[Event]:
    """The events of some windows, and what names processes and threads."""
    inside = set(map(id, _inside(events, trace, windows)))
    return [event for event in events if event.get("ph") == "M" or id(event) in inside]


def _inside(events: Sequence[Event], trace: _ChromeTrace, windows: Sequence[Span]) -> list[Event]:
    """The events of some windows; of the device, what was launched in them."""
    launched = {id(e) for window in windows for e in trace.launched_in(window)}

    def begins(event: Event) -> bool:
        if event.get("cat") in _DEVICE or "ts" not in event:
            return False
        return any(_begins_in(event, window) for window in windows)

    return [event for event in events if id(event) in launched or begins(event)]


def named(events: Sequence[Event], operations: Sequence[ObservedOperation]) -> Iterator[Event]:
    """Events of a Chrome trace in which the marks bear the names of modules and operations."""
    for event in events:
        if not _is_mark(event, MARK):
            yield event
            continue
        name = str(event["name"])
        with contextlib.suppress(ValueError, IndexError):
            operation = operations[int(name[len(MARK) :])]
            args = dict(event.get("args", {}))
            args |= {
                "module": operation.module,
                "line": str(operation.line or ""),
                "bytes": operation.nbytes,
                "FLOPs": operation.flops,
            }
            title = f"{operation.module}: {operation.name}" if operation.module else operation.name
            yield {**event, "name": title, "args": args}


@dataclass(frozen=True)
class Bar:
    """A piece of a timeline: on which lane, what, from when and for how long in seconds."""

    lane: str
    name: str
    start_s: float
    seconds: float


def timeline(events: Sequence[Event]) -> list[Bar]:
    """A call as it ran without marks: operations and waits of the host, and work of the device."""
    trace = _ChromeTrace(events)
    windows = trace.windows(CALL)
    if not windows:
        return []
    window = windows[-1]
    found: list[Bar] = []
    over: dict[Any, float] = {}
    inside = _inside(trace.spans, trace, [window])
    for event in sorted(inside, key=lambda e: (float(e["ts"]), -float(e.get("dur", 0.0)))):
        start, stop = _span(event)
        lane = _lane(event)
        if lane == _OPERATIONS:
            if start < over.get(event.get("tid"), window[0]):
                continue  # Inside of another one.
            over[event.get("tid")] = stop
        if lane:
            begin, seconds = (start - window[0]) / 1e6, (stop - start) / 1e6
            found.append(Bar(lane, str(event["name"]), begin, seconds))
    return found


_OPERATIONS = "host: operations"
_LANES = {"to device": "copies", "to host": "copies"}


def _lane(event: Event) -> str:
    """Where a timeline shows an event; empty if nowhere."""
    category = event.get("cat")
    if category in _DEVICE:
        return f"device: {_LANES.get(_kind(event), 'kernels')}"
    if category == "cpu_op" and not _is_mark(event):
        return _OPERATIONS
    if category in _RUNTIME and _waits(event):
        return "host: waiting"
    return ""
