"""Finding where a CUDA graph and eager part, by capturing the call again.

What a graph computes on the way is gone after a replay, since its memory is used again. So the
call is captured once more, observed. First the nodes of both captures are compared, with what is
written into them: a value or an address that two new captures agree on, and the graph has another
one, is a constant that has gone stale. If all nodes agree, a capture that also keeps each
operation's result is replayed and compared with eager, operation by operation.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..calls.modes import OperationMode
from ..calls.operations import tensors, written
from ..calls.plurals import counted
from ..graphs.captured_call import CapturedCall
from ..graphs.cuda.recording import CudaRecording
from ..graphs.graph import recordings_of
from ..graphs.inspection.node import Node
from ..graphs.inspection.origins import Observer, Operation, Origins
from .lockstep import Parting, Unsteady, first_difference, more_telling
from .result import DifferenceCause

# Bytes of results that are kept at once.
_KEPT_BYTES = 1 << 30
_WORD = 8


@dataclass(frozen=True)
class StaleNode:
    """The first node that is not what a capture would give now.

    Attributes:
        cause: why.
        what: in words.
        node: of the graph.
        operation: that it comes from, if that is known.
        index: how many operations ran before it.
    """

    cause: DifferenceCause
    what: str
    node: Node
    operation: Operation | None
    index: int | None


class _Numbered(Observer):
    """Knows the number of each operation."""

    def __init__(self, origins: Origins) -> None:
        super().__init__(origins)
        self.operations: list[Operation] = []
        self.number: dict[int, int] = {}

    def after(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        keys: Sequence[int],
    ) -> None:
        """Number the operation."""
        operation = self.origins.of(func, args, kwargs, result)
        for key in keys:
            self.recorded[key] = operation
            self.number[key] = len(self.operations)
        self.operations.append(operation)


def stale_node(
    graph: CapturedCall, arguments: Sequence[Any], outside: Sequence[torch.UntypedStorage]
) -> StaleNode | None:
    """The first node of a graph that differs from those of two new captures of the call.

    What is written into kernels has gaps that nobody sets, and that differ by chance. So a kernel's
    constants count only if a replay with the new ones gives another result.

    Args:
        graph: on a CUDA device.
        arguments: leaves of the arguments.
        outside: memory from outside that the call writes to.
    """
    by = _Numbered(Origins(graph.spec.module))
    matters = _Patches(graph, arguments, outside)
    with contextlib.ExitStack() as stack:
        # One is observed, to know the operations; compiled code is another under observation.
        captures = [
            stack.enter_context(graph.recorded_again(observer, arguments))
            for observer in (by, None)
        ]
        if _shapes(captures[0]) != _shapes(captures[1]):
            by = _Numbered(by.origins)
            captures = [captures[1], stack.enter_context(graph.recorded_again(None, arguments))]
            if _shapes(captures[0]) != _shapes(captures[1]):
                return None  # No two captures are alike: nothing follows from a difference.
        every = [[_cuda(each) for each in recordings_of(of)] for of in (graph, *captures)]
        if len({len(recordings) for recordings in every}) > 1:
            return None  # Another number of segments: other paths were taken before.
        for old, first, second in zip(*every, strict=True):
            found = _stale_in(old, first, second, by, matters)
            if found is not None:
                return found
    return None


def _stale_in(
    old: CudaRecording,
    first: CudaRecording,
    second: CudaRecording,
    by: _Numbered,
    matters: _Patches,
) -> StaleNode | None:
    """The first node of a recording that is not what two new ones have."""
    (mine, _), (new, keys) = old.inspect(), first.inspect()
    for place, (node, now) in enumerate(zip(mine, new, strict=False)):
        if node.shape != now.shape:
            what = f"the graph has {node.name} there, and a new capture {now.name}"
            return _stale(DifferenceCause.OPERATIONS, what, node, keys[place], by)
    if len(mine) != len(new):
        last = (mine or new)[-1]
        what = f"the graph has {counted(len(mine), 'node')}, and a new capture {len(new)}"
        return StaleNode(DifferenceCause.OPERATIONS, what, last, None, None)
    rows = zip(mine, keys, *(each.constants() for each in (old, first, second)), strict=True)
    for node, key, was, now, too in rows:
        if by.recorded and key not in by.recorded:
            continue  # A copy of an argument or a result: its ends are set for each call.
        if node.kind != "kernel" and not by.recorded:
            continue
        for stale in stale_words(was, now, too):
            if node.kind != "kernel" or matters.has_effect(old, node.index, was or (), stale):
                return _stale(DifferenceCause.CONSTANT, str(stale), node, key, by)
    return None


def _shapes(graph: CapturedCall) -> list[list[Any]]:
    """What the nodes of a graph are, addresses left out."""
    return [[node.shape for node in each.inspect()[0]] for each in recordings_of(graph)]


class _Patches:
    """Replays a graph with one word of a kernel's arguments changed."""

    def __init__(
        self,
        graph: CapturedCall,
        arguments: Sequence[Any],
        outside: Sequence[torch.UntypedStorage],
    ) -> None:
        self._graph, self._call = graph, (arguments, outside)
        self._before = graph.run_replayed(*self._call)

    def has_effect(
        self, recording: CudaRecording, place: int, was: Sequence[bytes], stale: StaleWord
    ) -> bool:
        """Whether the results differ with the word that new captures have."""
        held = was[stale.argument]
        end = stale.start + len(stale.now)
        other = held[: stale.start] + stale.now + held[end:]
        arguments = [*was[: stale.argument], other, *was[stale.argument + 1 :]]
        with recording.patched(place, arguments):
            after = self._graph.run_replayed(*self._call)
        return not self._before.same_as(after)


def _stale(cause: DifferenceCause, what: str, node: Node, key: int, by: _Numbered) -> StaleNode:
    return StaleNode(cause, what, node, by.recorded.get(key), by.number.get(key))


def _cuda(recording: Any) -> CudaRecording:
    inner = getattr(recording, "drawn_beside", recording)
    assert isinstance(inner, CudaRecording)
    return inner


@dataclass(frozen=True)
class StaleWord:
    """A word of a node that new captures have otherwise.

    Attributes:
        argument: number of the kernel's argument.
        start: of the word in it, in bytes.
        was: the word in the graph.
        now: in new captures.
    """

    argument: int
    start: int
    was: bytes
    now: bytes

    def __str__(self) -> str:
        was, now = _word(self.was, self.now), _word(self.now, self.was)
        return f"{was} in the graph, and {now} in a new capture"


def stale_words(
    was: tuple[bytes, ...] | None, now: tuple[bytes, ...] | None, too: tuple[bytes, ...] | None
) -> Iterator[StaleWord]:
    """What a graph's node has that two new captures, which agree, do not have.

    Words of 8 bytes are compared: the two captures lie in other memory, so that they agree on
    constants and on addresses from outside, and on no address of their own.

    Args:
        was: what is written into the graph's node.
        now: what a new capture has in its place.
        too: what another one has.
    """
    if was is None or now is None or too is None or not len(was) == len(now) == len(too):
        return
    for argument, (mine, first, second) in enumerate(zip(was, now, too, strict=True)):
        if not len(mine) == len(first) == len(second):
            continue
        for start in range(0, len(mine), _WORD):
            a, b, c = (each[start : start + _WORD] for each in (mine, first, second))
            if b == c and a != b:
                yield StaleWord(argument, start, a, b)


def _word(word: bytes, other: bytes) -> str:
    """The part of a word in which it differs from another one, as the number that it may be."""
    if len(word) == _WORD:
        number = struct.unpack("<d", word)[0]
        if word[:4] != other[:4] and word[4:] != other[4:]:
            if _is_plain(number):
                return f"{number:g}"
            return f"the address or number {int.from_bytes(word, 'little'):#x}"
        half = slice(0, 4) if word[:4] != other[:4] else slice(4, 8)
        word, rest = word[half], word
        if rest[:4] == b"\0\0\0\0" and half.start == 4 and _is_plain(number):
            return f"{number:g}"  # A double of few digits.
    if len(word) != 4:
        return "0x" + word[::-1].hex()
    single, whole = struct.unpack("<f", word)[0], int.from_bytes(word, "little", signed=True)
    return f"{single:g}" if _is_plain(single) else str(whole)


def _is_plain(number: float) -> bool:
    return number == number and (number == 0 or 1e-9 < abs(number) < 1e12)


class _Keeper(_Numbered):
    """Keeps the results of operations from one on, as far as there is room."""

    def __init__(self, origins: Origins, start: int) -> None:
        super().__init__(origins)
        self.start = start
        self.end = start
        self.kept: list[tuple[Any, list[Any]]] = []
        self.nbytes = 0
        self._full = False

    def after(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        keys: Sequence[int],
    ) -> None:
        """Copy the results; the copies are nodes of the graph."""
        place = len(self.operations)
        super().after(func, args, kwargs, result, keys)
        if place < self.start or self._full:
            return
        values = results_of(func, args, kwargs, result) if keys else []
        size = sum(v.nbytes for v in tensors(values))
        if self.kept and self.nbytes + size > _KEPT_BYTES:
            self._full = True
            return
        self.nbytes += size
        with torch.no_grad():
            self.kept.append((func, [_copy(value) for value in values]))
        self.end = place + 1


def results_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[Any]:
    """What an operation has made and written to."""
    return [*pytree.tree_leaves(result), *written(func, args, kwargs)]


def _copy(value: Any) -> Any:
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.detach().clone() if dense else None


class _Comparing(OperationMode):
    """Runs eager's operations, and compares each with what a replay has kept of it."""

    def __init__(self, keeper: _Keeper, origins: Origins) -> None:
        super().__init__()
        self.count = 0
        self.compared = 0
        self.parting: Parting | None = None
        self.unsteady = Unsteady()
        self._keeper = keeper
        self._origins = origins

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and compare."""
        result = func(*args, **kwargs)
        place = self.count
        self.count += 1
        keeper = self._keeper
        if self.parting is not None or not keeper.start <= place < keeper.end:
            return result
        known, kept = keeper.kept[place - keeper.start]
        operation = self._origins.of(func, args, kwargs)
        if known is not func:
            what = f"is where the operations part: a capture runs {known}"
            self.parting = Parting(DifferenceCause.OPERATIONS, what, operation, place)
            return result
        if kept:
            self.compared += 1
            with _disable_current_modes():
                pairs = zip(kept, results_of(func, args, kwargs, result), strict=False)
                there = [(its, own) for its, own in pairs if its is not None]
                mine, its = [own for _, own in there], [its for its, _ in there]
                gap = first_difference(its, mine, func, args, kwargs)
            if gap is not None and not gap.steady:
                self.unsteady.note(mine[gap.number], operation, place, gap.error)
            elif gap is not None:
                what = "is given the same in both, and gives another result in the replay"
                here = Parting(DifferenceCause.RESULT, what, operation, place, gap.error)
                self.parting = self.unsteady.behind(args, kwargs) or here
        return result


def first_wrong(
    graph: CapturedCall, arguments: Sequence[Any]
) -> tuple[Parting | None, int, str | None]:
    """The first operation whose result differs when a new capture of the call is replayed.

    Args:
        graph: on a CUDA device, not in segments.
        arguments: leaves of the arguments.

    Returns:
        where they part; how many operations were compared; the kernels of that operation.
    """
    origins, start, compared = Origins(graph.spec.module), 0, 0
    while True:
        keeper = _Keeper(origins, start)
        with graph.recorded_again(keeper, arguments) as twin:
            nodes, keys = _cuda(twin.recorded.recording).inspect()
            twin.replay_sample()
            found = None
            for pretend in (False, True):
                if found is None or found.cause is DifferenceCause.OPERATIONS:
                    comparing = _Comparing(keeper, origins)
                    graph.run_eagerly(arguments, comparing, pretend=pretend)
                    found = more_telling(found, comparing.parting or comparing.unsteady.first)
            compared += comparing.compared
            if found is not None:
                of_it = [
                    node.name
                    for node, key in zip(nodes, keys, strict=True)
                    if keeper.number.get(key) == found.index and node.kind == "kernel"
                ]
                return found, compared, ", ".join(of_it) or None
            keeper.kept.clear()
        if keeper.end >= len(keeper.operations) or keeper.end == start:
            return None, compared, None
        start = keeper.end
