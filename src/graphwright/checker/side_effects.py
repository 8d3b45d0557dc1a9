"""What a call does beside computing: clocks, Python's randomness, streams, captures, hooks."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..calls.dependencies import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from ..graphs.captured_call import CapturedCall
from . import obstacles
from .finding import Place, is_direct, place_of, place_of_code
from .obstacles import Findings, Obstacle

_CLOCKS = {
    time.time,
    time.time_ns,
    time.perf_counter,
    time.perf_counter_ns,
    time.monotonic,
    time.monotonic_ns,
    time.process_time,
    time.localtime,
    time.gmtime,
    time.strftime,
    time.ctime,
}
_DATES = ("now", "utcnow", "today")
_WAITS = ("synchronize", "query", "elapsed_time")

# An object, the name of one of its attributes, and what it is for a while.
_Patch = tuple[Any, str, Any]


class _StreamStandIn:
    """Stands in for a stream or an event of a GPU that is not there."""

    def __init__(self, name: str, report: Callable[[str], None]) -> None:
        self._name = name
        self._report = report

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._report(f"{self._name}.{name}")
            return {"query": True, "elapsed_time": 0.0}.get(name)

        return method

    def __enter__(self) -> _StreamStandIn:
        return self

    def __exit__(self, *args: object) -> None: ...


@contextlib.contextmanager
def watch_python(found: Findings) -> Iterator[None]:
    """Note calls of Python's clocks and random generators by the user's code."""

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        name = called.__name__
        owner = getattr(called, "__self__", None)
        if called in _CLOCKS or (name in _DATES and isinstance(owner, type)):
            obstacle, operation = obstacles.CLOCK, f"{getattr(owner, '__name__', 'time')}.{name}()"
        elif isinstance(owner, random.Random):
            obstacle, operation = obstacles.HOST_RANDOM, f"random.{name}()"
        elif name == "urandom":
            obstacle, operation = obstacles.HOST_RANDOM, "os.urandom()"
        else:
            return
        if is_direct(frame):
            found.add(obstacle, place_of(frame), operation)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def watch_cuda(found: Findings, *, pretend: bool) -> Iterator[None]:
    """Note streams, events, waits for the GPU, and captures inside the call."""

    def report(operation: str) -> None:
        frame = sys._getframe(2)
        if is_direct(frame):
            waits = operation.rpartition(".")[2] in _WAITS
            found.add(
                obstacles.WAIT if waits else obstacles.STREAM, place_of(frame), f"{operation}()"
            )

    def seeds(seed: int) -> Any:
        frame = sys._getframe(1)
        if is_direct(frame):
            found.add(obstacles.SEED, place_of(frame), "torch.manual_seed()")
        return seeded(seed)

    seeded = torch.manual_seed
    patches: list[_Patch] = [
        (torch, "manual_seed", seeds),
        (CapturedCall, "__call__", _nested(_run_captured, found)),
    ]
    if pretend:
        patches += _pretended(report)
    else:
        entered = _nested(torch.cuda.graph.__enter__, found)
        patches += [*_reported(report), (torch.cuda.graph, "__enter__", entered)]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _reported(report: Callable[[str], None]) -> Iterator[_Patch]:
    """PyTorch's own streams, events and waits, which report what is called."""

    def watched(owner: Any, name: str, name_as_written: str) -> _Patch:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            report(name_as_written)
            return original(*args, **kwargs)

        return owner, name, call

    yield watched(torch.cuda, "synchronize", "torch.cuda.synchronize")
    for kind in (torch.cuda.Stream, torch.cuda.Event):
        for name in ("synchronize", "query", "wait", "record", "wait_event", "wait_stream"):
            if hasattr(kind, name):
                yield watched(kind, name, f"{kind.__name__}.{name}")


def _pretended(report: Callable[[str], None]) -> Iterator[_Patch]:
    """Streams, events and waits of a GPU that is not there."""
    try:
        torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # PyTorch was built without CUDA.
        yield torch.cuda, "is_current_stream_capturing", lambda: False

    def nothing(*args: Any, **kwargs: Any) -> None:
        report("torch.cuda.synchronize")

    yield torch.cuda, "synchronize", nothing
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        class_name = name.rpartition("_")[2].capitalize()

        def make(*args: Any, class_name: str = class_name, **kwargs: Any) -> _StreamStandIn:
            return _StreamStandIn(class_name, report)

        yield torch.cuda, name, make
    yield torch.cuda, "stream", lambda stream: contextlib.nullcontext()


def _run_captured(graph: CapturedCall, *args: Any, **kwargs: Any) -> Any:
    """Run the function of a graph, which refuses calls inside a capture."""
    return graph.function(*args, **kwargs)


def _nested(original: Callable[..., Any], found: Findings) -> Callable[..., Any]:
    """A method that captures or replays, with a report of it."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.add(obstacles.NESTED, place_of(sys._getframe(1)), type(self).__name__)
        return original(self, *args, **kwargs)

    return call


def sizes_of_caches() -> dict[int, tuple[Any, int]]:
    """All `functools.lru_cache`s of the process by id, with how many entries they hold."""
    # By type(): asking an object for its __class__ may import a lazy module, or warn.
    caches = [c for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]
    return {id(cache): (cache, cache.cache_info().currsize) for cache in caches}


def clear_grown_caches(before: dict[int, tuple[Any, int]]) -> None:
    """Empty the caches of the user's own functions that hold more than before."""
    for key, (cache, size) in sizes_of_caches().items() if before else ():
        grown = size > before.get(key, (None, 0))[1]
        if grown and place_of_code(getattr(cache, "__wrapped__", None)).file:
            cache.cache_clear()


def hooks_of(module: nn.Module) -> Iterator[tuple[Obstacle, Place, str]]:
    """The forward hooks that the user's own code has put on modules."""
    holders = [
        (f"a forward hook of {type(child).__name__}{f' ({path})' if path else ''}", holder)
        for path, child in module.named_modules()
        for holder in (getattr(child, name, {}) for name in FORWARD_HOOKS)
    ]
    everyone = [
        ("a forward hook of all modules", getattr(nn_module, n, {})) for n in GLOBAL_FORWARD_HOOKS
    ]
    for name, holder in holders + everyone:
        for hook in holder.values():
            place = place_of_code(hook)
            if place.file:
                yield obstacles.HOOK, place, name
