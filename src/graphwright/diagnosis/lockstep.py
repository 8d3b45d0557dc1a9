"""Lockstep: eager and a CPU tape side by side, one operation at a time.

After each operation of eager the tape repeats its own, and both results are compared while both are
there: nothing has to be kept. Memory from outside that both write to is given back its value in
between, and random generators their state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..calls.modes import OperationMode
from ..calls.operations import generator_of, leaves, tensors, written
from ..calls.snapshots import same_value
from ..evaluation.accuracy import difference
from ..graphs.captured_call import CapturedCall
from ..graphs.cpu.recorder import CpuRecording, Replayed, needs_step
from ..graphs.inspection.origins import Operation, Origins
from ..graphs.segments.segment import Break
from .result import DifferenceCause


@dataclass(frozen=True)
class Parting:
    """Where eager and a graph part.

    Attributes:
        cause: why.
        what: in words, as the end of a sentence about the operation.
        operation: the operation of eager.
        index: how many operations of eager ran before it.
        error: how the results differ.
    """

    cause: DifferenceCause
    what: str
    operation: Operation
    index: int
    error: str | None = None


@dataclass(frozen=True)
class Gap:
    """A difference between a graph's and eager's results of an operation.

    Attributes:
        error: it, in words.
        number: of the result, among what the operation has made and written to.
        steady: whether eager gives the same when the operation runs again.
    """

    error: str
    number: int
    steady: bool


class Unsteady:
    """Operations that give another result each time that they run on the same arguments.

    That matters only where the result is used: some results are left open on purpose.
    """

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, Parting]] = []

    def note(self, result: Any, operation: Operation, index: int, error: str) -> None:
        """An operation is one of these."""
        what = "gives another result each time that it runs on the same arguments"
        if isinstance(result, torch.Tensor):
            parting = Parting(DifferenceCause.RESULT, what, operation, index, error)
            self._found.append((result.detach(), parting))

    def behind(self, args: Any, kwargs: Any) -> Parting | None:
        """The operation whose unsteady result is among the arguments of another one."""
        used = {t.untyped_storage()._cdata for t in tensors((args, kwargs)) if _plain(t)}
        for result, parting in self._found:
            if result.untyped_storage()._cdata in used:
                return parting
        return None

    @property
    def first(self) -> Parting | None:
        """The first of them."""
        return self._found[0][1] if self._found else None


class BreakReplayed:
    """A read of a value between two segments, about to be made again."""

    def __init__(self, break_: Break) -> None:
        self.func = break_.func
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._break = break_
        self.outcome: tuple[Any, Any] | None = None

    def run(self) -> list[Any]:
        """Make it; returns the leaves of what it gives."""
        self.outcome = self._break.run()
        return pytree.tree_leaves(self.outcome[1])


def replay_of(graph: CapturedCall, arguments: Any) -> Iterator[Replayed | BreakReplayed]:
    """The operations of a graph on the CPU for some arguments; the caller repeats each."""
    recorded = graph.recorded
    tree = recorded.tree
    with torch.no_grad():
        recorded.inputs.fill(arguments)
    if tree is None:
        yield from _steps(recorded.recording)
        return
    node = tree.root
    while node is not None:
        for source in node.sources:
            source.refresh()
        if node.recording is not None:
            yield from _steps(node.recording)
        if node.break_ is None:
            return
        read = BreakReplayed(node.break_)
        yield read
        if read.outcome is None:
            return
        key, result = read.outcome
        following = node.break_.after.get(key)
        if following is not None and following.targets:
            following.enter(result)
        node = following


def _steps(recording: Any) -> Iterator[Replayed]:
    inner = getattr(recording, "drawn_beside", recording)
    assert isinstance(inner, CpuRecording)
    return inner.step_by_step()


class Lockstep(OperationMode):
    """Runs eager's operations, and after each of them the tape's.

    Args:
        replay: the tape's operations.
        origins: names modules and lines.
        outside: storages that both use, by identity.

    Attributes:
        latest: eager's current operation, or the last one.
        count: how many operations eager has run.
        compared: how many results were compared.
        parting: where they part, once they have.
        unsteady: operations that differ from themselves, too, when they run again.
    """

    def __init__(
        self,
        replay: Iterator[Replayed | BreakReplayed],
        origins: Origins,
        outside: Collection[int],
    ) -> None:
        super().__init__()
        self.latest: Operation | None = None
        self.count = 0
        self.compared = 0
        self.parting: Parting | None = None
        self.unsteady = Unsteady()
        self._replay = replay
        self._next = next(replay, None)
        self._origins = origins
        self._outside = outside

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; then repeat the tape's, and compare."""
        self.latest = self._origins.of(func, args, kwargs)
        self.count += 1
        if self.parting is not None or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.clone.default  # As the tape does.
        own = _memory((args, kwargs))
        shared = [t for t in written(func, args, kwargs) if self._is_outside(t)]
        with _disable_current_modes():
            before = _copies(shared)
        state = _random_state(func, args, kwargs)
        result = func(*args, **kwargs)
        step = self._next
        is_read = isinstance(step, BreakReplayed) and step.func is func
        made = not _memory(result) <= own
        if not is_read and not needs_step(func, args, kwargs, made=made):
            return result
        if step is None or step.func is not func:
            there = "nothing more" if step is None else str(step.func)
            self._part(
                DifferenceCause.OPERATIONS, f"is where the operations part: the graph has {there}"
            )
            return result
        with _disable_current_modes():
            values = [*_flat(result), *written(func, args, kwargs)]
            mine, after = _copies(values), _copies(shared)
            _set(shared, before)
            with _from_state(state):
                theirs = [*step.run(), *written(func, step.args, step.kwargs)]
            self.compared += 1
            gap = first_difference(theirs, mine, func, args, kwargs)
            if gap is not None and not gap.steady:
                self.unsteady.note(values[gap.number], self.latest, self.count - 1, gap.error)
            elif gap is not None:
                self._part_at(gap, step, func, args, kwargs)
            _set(shared, after)
            self._next = next(self._replay, None)  # Between segments, results are copied.
        return result

    def _part_at(
        self,
        gap: Gap,
        step: Replayed | BreakReplayed,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """The results of an operation differ: because of one before it, or of itself."""
        self.parting = self.unsteady.behind(args, kwargs)
        if self.parting is None:
            cause, what = _why(step, func, args, kwargs)
            self._part(cause, what, gap.error)

    def _part(self, cause: DifferenceCause, what: str, error: str | None = None) -> None:
        assert self.latest is not None
        self.parting = Parting(cause, what, self.latest, self.count - 1, error)

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        return _plain(tensor) and tensor.untyped_storage()._cdata in self._outside


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _memory(tree: Any) -> set[int]:
    """Where the memory of tensors begins."""
    storages = (t.untyped_storage() for t in tensors(tree) if _plain(t))
    return {storage.data_ptr() for storage in storages if storage.nbytes()}


def _copies(values: Sequence[Any]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def _flat(result: Any) -> list[Any]:
    return pytree.tree_leaves(result)


def _random_state(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Generator, torch.Tensor] | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = generator_of(args, kwargs)
    return generator, generator.get_state()


def _set(tensors_: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors_, values, strict=True):
        tensor.detach().copy_(value)


@contextlib.contextmanager
def _from_state(state: tuple[torch.Generator, torch.Tensor] | None) -> Iterator[None]:
    """Draw the same random numbers again inside the block."""
    if state is None:
        yield
        return
    generator, start = state
    left = generator.get_state()
    generator.set_state(start)
    try:
        yield
    finally:
        generator.set_state(left)


def first_difference(
    theirs: Sequence[Any],
    mine: Sequence[Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Gap | None:
    """How a graph's results of an operation differ from eager's, if they do.

    Some operations return tensors that they do not always fill. So where there is a difference, the
    operation runs again: what differs from one run to the next may be no result.

    Args:
        theirs: the graph's, with what the operation has written to.
        mine: eager's.
        func: the operation.
        args: what eager gave it.
        kwargs: likewise.
    """
    again: list[Any] | None = None
    unsteady: Gap | None = None
    repeatable = not written(func, args, kwargs) and (
        torch.Tag.nondeterministic_seeded not in func.tags
    )
    for number, (its, own) in enumerate(zip(theirs, mine, strict=False)):
        error = difference(its, own)
        if error is None:
            continue
        if repeatable:
            again = _flat(func(*args, **kwargs)) if again is None else again
            if number < len(again) and difference(again[number], own) is not None:
                unsteady = unsteady or Gap(error, number, steady=False)
                continue
        return Gap(error, number, steady=True)
    return unsteady


def _why(
    step: Replayed | BreakReplayed, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[DifferenceCause, str]:
    """Why results differ: the arguments do, or the operation itself."""
    same = "is given the same in both, and gives another result in the replay"
    mine, theirs = leaves((args, dict(kwargs))), leaves((step.args, step.kwargs))
    if isinstance(step, BreakReplayed):
        return DifferenceCause.RESULT, "reads another value in the replay"
    pairs = list(enumerate(zip(mine, theirs, strict=False), 1))
    for place, (own, its) in pairs:
        if isinstance(own, torch.Tensor) or isinstance(its, torch.Tensor):
            continue
        if not same_value(own, its):
            return DifferenceCause.CONSTANT, (
                f"computes with {its!r} in the replay, a constant of the capture, and with {own!r} "
                f"in eager (argument {place})"
            )
    changed = {t.untyped_storage()._cdata for t in written(func, args, kwargs)}
    for place, (own, its) in pairs:
        if not (isinstance(own, torch.Tensor) and isinstance(its, torch.Tensor)):
            continue
        if own.untyped_storage()._cdata not in changed and difference(its, own) is not None:
            # All that was computed so far agrees, so this is no result of an operation.
            return DifferenceCause.CONSTANT, (
                f"reads a tensor of the capture in the replay, and one with other values in eager "
                f"(argument {place})"
            )
    return DifferenceCause.RESULT, same


def more_telling(first: Parting | None, second: Parting | None) -> Parting | None:
    """Of what two runs of eager show, one plain, one as in a capture, what tells more.

    Libraries take other ways in a capture: a run that does so too may go on to the first result
    that differs, where the plain one parts before.
    """
    if second is None or (first is not None and second.cause is DifferenceCause.OPERATIONS):
        return first
    return second
