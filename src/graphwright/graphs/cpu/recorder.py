"""The CPU recorder: a tape of ATen operations, replayed inside an arena.

It behaves like CUDA capture, hazards included: results lie at fixed addresses in a pool whose
memory is reused, tensors from outside are used by address, and nothing that Python did is repeated.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...calls.leaves import without_memory
from ...calls.modes import compilers_off
from ...calls.operations import (
    FROM_DATA,
    HOST_READS,
    default_generators,
    has_fixed_shape,
    one_hot,
    tensors,
    written,
)
from ...errors import CaptureError, user_frame
from ...evaluation.garbage_collection import garbage_collection_off
from ..composition import packed
from ..conditions import pretend_capturing
from ..inspection.node import Node
from ..inspection.origins import observer
from ..journal import Journal
from ..marks import mark, wanted
from ..recorder import Allocate, Prepared, Work
from . import reading
from .arena import Arena, Block

_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_REMEDY = "A graph repeats device work only: compute with tensors, or do this outside the capture."


class _RefuseHostReads(TorchFunctionMode):
    """Refuses reads of values by Python that a dispatch mode does not see."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.one_hot and _classes(args, kwargs) >= 0:
            # On the CPU it reads its input to check it; on CUDA it does not.
            return one_hot(args[0], _classes(args, kwargs))
        name = getattr(func, "__name__", "")
        if name in FROM_DATA and any(isinstance(a, list | tuple) and tensors(a) for a in args):
            raise CaptureError(f"Values of tensors are read by {name}().", remedy=_REMEDY)
        if name == "tensor_split" and any(isinstance(a, torch.Tensor) for a in args[1:2]):
            raise CaptureError(f"Values of a tensor are read by {name}().", remedy=_REMEDY)
        how = HOST_READS.get(name)
        if how is not None and args and isinstance(args[0], torch.Tensor):
            raise CaptureError(f"A value of a tensor is read by {how}.", remedy=_REMEDY)
        return func(*args, **(kwargs or {}))


def _classes(args: Any, kwargs: Mapping[str, Any] | None) -> int:
    return int(args[1] if len(args) > 1 else (kwargs or {}).get("num_classes", -1))


def _refuse_value_reads(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse operations that give values, or shapes that depend on values, to Python."""
    if torch.Tag.data_dependent_output in func.tags:
        name = "Tensor.item(), or a tensor as a condition" if "local_scalar" in str(func) else ""
        raise CaptureError(
            f"A value of a tensor is read by {name or func} ({func}).", remedy=_REMEDY
        )
    if torch.Tag.dynamic_output_shape in func.tags:
        if has_fixed_shape(func, args, kwargs):
            return
        raise CaptureError(
            f"{func} gives a tensor whose shape depends on values.",
            remedy="Use an operation of fixed shape, torch.where for example.",
        )
    if torch.Tag.inplace_view in func.tags and func._opname in ("set_", "resize_", "resize_as_"):
        raise CaptureError(
            f"{func} gives a tensor other memory, which a graph cannot repeat.",
            remedy="Make a new tensor instead.",
        )


def _refuse_without_memory(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse tensors that a tape cannot hold by their address."""
    for tensor in tensors((args, kwargs)):
        what = without_memory(tensor)
        if what is not None:
            raise CaptureError(
                f"{func} works on {what}, which a graph cannot hold.",
                remedy="Use dense tensors of PyTorch's own class, or leave this part out of the "
                "capture.",
            )


def needs_step(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, made: bool) -> bool:
    """Whether a tape has to repeat an operation: it writes, computes something new, or checks.

    Args:
        func: the operation.
        args: what it is given.
        kwargs: likewise.
        made: whether it makes a tensor in memory of its own.
    """
    # Uninitialized memory needs no step, unless PyTorch fills it for reproducibility.
    if func._opname in _UNINITIALISED and not _fills_new_memory():
        return False
    # One without a result is there for what it does: it may raise an error.
    return made or not func._schema.returns or bool(written(func, args, kwargs))


def _fills_new_memory() -> bool:
    """Whether PyTorch fills new memory with NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic and torch._C._get_deterministic_fill_uninitialized_memory()


@dataclass(frozen=True)
class _Step:
    """One operation, its arguments by address, and where its results go."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor | None, ...]
    grad: bool


def _is_new(leaf: Any, known: Container[int], func: Any) -> bool:
    """Whether a result of an operation is in new memory: no view, nor the argument itself.

    Raises:
        CaptureError: it is a value of Python's.
    """
    if isinstance(leaf, torch.Tensor):
        storage = leaf.untyped_storage()
        return storage.nbytes() > 0 and storage.data_ptr() not in known
    if leaf is not None:
        raise CaptureError(f"{func} gives Python a value, {leaf!r}.", remedy=_REMEDY)
    return False


class _Tape(Journal):
    """Records each operation, and moves its results into the arena.

    Args:
        arena: where the results go.
        known: storages from outside that a rehearsal of the same work used; None without a
            rehearsal. A storage that is new since then was made by code that the tape does not see,
            and would stay the same in every replay.

    Attributes:
        arena: where the results go.
        steps: operations, and blocks that died between them.
        broken: whether a graph was destroyed meanwhile, which breaks a CUDA capture.
        refusal: the last error that an operation was refused with.
    """

    def __init__(self, arena: Arena, known: Mapping[int, Any] | None) -> None:
        super().__init__()
        self.steps: list[_Step | Block] = []
        self.arena = arena
        self._known = known
        self._constants: set[int] = set()
        self._mine: dict[int, Block] = {}
        self.broken = False
        self.refusal: CaptureError | None = None
        self._thread = threading.get_ident()
        self._observer = observer()

    def owns(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that this recording made."""
        block = self.arena.block_of(tensor)
        return block if block is not None and block.number in self._mine else None

    def spoil(self) -> None:
        """Overwrite what was computed while recording: before a replay there is no result."""
        for block in self._mine.values():
            block.poison()

    def freed(self, block: Block) -> None:
        """Note that a block died; each replay overwrites it at the same point."""
        if self._mine.pop(block.number, None) and threading.get_ident() == self._thread:
            self.steps.append(block)

    def read(self, tensor: torch.Tensor) -> None:
        """As the journal does, for memory that is not of this recording."""
        if self.owns(tensor) is None:
            self._check_origin(tensor)
            super().read(tensor)

    def writes(self, tensor: torch.Tensor) -> None:
        """As the journal does, for memory that is not of this recording."""
        if self.owns(tensor) is None:
            super().writes(tensor)

    def _check_origin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if self._known is None or not storage.nbytes() or storage._cdata in self._known:
            return
        if storage._cdata not in self._constants and self.arena.block_of(tensor) is None:
            raise CaptureError(
                f"{self.operation} uses a tensor that is made anew in every call by code that "
                "runs no PyTorch operation; a replay would use the first one for ever.",
                remedy="Make it an argument, or make it with PyTorch's own operations.",
            )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, move its results into the arena, and record both."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # It only names a range of time.
        if func is torch.ops.aten.lift_fresh.default:
            # torch.tensor([...]): a constant. The work may write to its own copy of it.
            func = torch.ops.aten.clone.default
            self._constants.add(args[0].untyped_storage()._cdata)
        try:
            _refuse_without_memory(func, args, kwargs)
            self.before(func, args, kwargs)
            _refuse_value_reads(func, args, kwargs)
        except CaptureError as error:
            self.refusal = error
            raise
        grad = torch.is_grad_enabled()
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs)) if not packed(t)}
        if self._observer is not None:
            self._observer.before(func, args, kwargs)
        leaves, spec = pytree.tree_flatten(func(*args, **kwargs))
        self.drew(func, args, kwargs, leaves)
        moved: dict[int, torch.UntypedStorage] = {}
        targets: list[torch.Tensor | None] = []
        for index, leaf in enumerate(leaves):
            target = None
            if _is_new(leaf, known, func):
                leaves[index] = leaf = self._move(leaf, moved)
                target = self._by_address(leaf)
            targets.append(target)
        step = None
        if needs_step(func, args, kwargs, made=any(t is not None for t in targets)):
            where = pytree.tree_map_only(torch.Tensor, self._by_address, (args, kwargs))
            step = _Step(func, where[0], where[1], tuple(targets), grad)
            self.steps.append(step)
        result = pytree.tree_unflatten(leaves, spec)
        if self._observer is not None:
            keys = [] if step is None else [id(step)]
            self._observer.after(func, args, kwargs, result, keys)
        return result

    def _move(self, tensor: torch.Tensor, moved: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The same tensor in the arena."""
        if tensor.is_quantized:
            raise CaptureError(
                f"{self.operation} makes a quantized tensor, which a graph cannot hold.",
                remedy="Keep its integers, scale and zero point, or leave this part out of the "
                "capture.",
            )
        old = tensor.untyped_storage()
        if old._cdata not in moved:
            moved[old._cdata] = self.arena.allocate(old.nbytes())
            moved[old._cdata].copy_(old)
        with torch.inference_mode(False):
            result = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                moved[old._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        block = self.arena.block_of(result)
        assert block is not None  # It has bytes, and they were just allocated.
        self._mine[block.number] = block
        return result

    def _by_address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor by address, so that the tape does not keep the pool's memory from reuse."""
        if packed(tensor):
            return tensor
        block = self.owns(tensor)
        return tensor.detach() if block is None else self.arena.alias(tensor, block)


class Replayed:
    """One operation of a tape, about to be repeated.

    Attributes:
        func: the operation.
        args: its arguments, by address.
        kwargs: likewise.
    """

    def __init__(self, step: _Step) -> None:
        self.func, self.args, self.kwargs = step.func, step.args, step.kwargs
        self.key = id(step)
        self._step = step

    def run(self) -> list[Any]:
        """Repeat it, and return the leaves of its results."""
        with torch.inference_mode(False), torch._C._DisableAutocast(), torch.no_grad():
            results = _repeat(self._step)
        targets = self._step.results
        return [r if t is None else t for r, t in zip(results, targets, strict=True)]


def _repeat(step: _Step) -> Sequence[Any]:
    torch._C._set_grad_enabled(step.grad)
    results = step.func(*step.args, **step.kwargs)
    torch._C._set_grad_enabled(False)
    if isinstance(results, torch.Tensor):
        results = (results,)
    elif not isinstance(results, tuple):
        results = pytree.tree_leaves(results)
    for result, target in zip(results, step.results, strict=True):
        if target is not None:
            target.copy_(result)
    found: Sequence[Any] = results
    return found


class CpuRecording:
    """A tape and the memory that it works on."""

    def __init__(
        self,
        tape: _Tape,
        feeds: Sequence[torch.Tensor],
        drains: Sequence[torch.Tensor],
        on_close: Callable[[], None],
        order: Callable[[], None],
    ) -> None:
        self.name = "graph"
        self.order = order
        self._on_close = on_close
        self._arena = tape.arena
        self._steps = tape.steps
        self._feeds = feeds
        self._drains = drains
        self.external = list(tape.external.values())

    @property
    def nodes(self) -> int:
        """How many operations it repeats."""
        return sum(not isinstance(step, Block) for step in self._steps)

    def replay(self) -> None:
        """Repeat the operations in order, each where it was recorded."""
        if wanted():
            with mark(self.name):
                self._replay()
            return
        self._replay()

    def _replay(self) -> None:
        with (
            self._arena.work(),
            torch.inference_mode(False),
            torch._C._DisableAutocast(),
            torch.no_grad(),
        ):
            for step in self._steps:
                if isinstance(step, Block):
                    step.poison()
                    continue
                _repeat(step)

    def step_by_step(self) -> Iterator[Replayed]:
        """The operations one by one: the caller repeats each before it goes on."""
        for step in self._steps:
            if isinstance(step, Block):
                step.poison()
            else:
                yield Replayed(step)

    def inspect(self) -> tuple[list[Node], list[int]]:
        """Its operations as nodes, and their keys."""
        steps = [
            (step.address, step.address + step.nbytes) if isinstance(step, Block) else step
            for step in self._steps
        ]
        return reading.nodes_of(steps), [id(s) for s in self._steps if not isinstance(s, Block)]

    def dump(self, path: Path) -> None:
        """There is no driver to ask."""
        raise CaptureError(
            "A graph on the CPU is a tape of operations, of which no driver knows.",
            remedy="Use nodes().",
        )

    def timed(self, nodes: Sequence[Node]) -> list[Node] | None:
        """The nodes with their times in one replay."""
        self.replay()  # The first one is slower.
        began, found = time.perf_counter(), []
        with self._arena.work():
            for node, step in zip(nodes, self.step_by_step(), strict=True):
                start = time.perf_counter()
                step.run()
                took = time.perf_counter() - start
                found.append(replace(node, start_us=1e6 * (start - began), duration_us=1e6 * took))
        return found

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy in, replay, copy out."""
        for feed, source in zip(self._feeds, sources, strict=True):
            ctypes.memmove(feed.data_ptr(), source.data_ptr(), feed.numel())
        self.replay()
        for drain, target in zip(self._drains, targets, strict=True):
            ctypes.memmove(target.data_ptr(), drain.data_ptr(), drain.numel())

    def close(self) -> None:
        """Forget the steps and what they hold."""
        if _RECORDING.now:
            # On CUDA, destroying a graph on a thread that captures breaks the capture.
            _RECORDING.now.broken = True
        self._on_close()
        self._on_close = lambda: None
        self._steps = []
        self._feeds = self._drains = ()
        self.external = []


class _TapeOfThread(threading.local):
    """The tape that is being recorded on this thread."""

    now: _Tape | None = None


_RECORDING = _TapeOfThread()


@contextlib.contextmanager
def _capture_conditions(tape: _Tape) -> Iterator[None]:
    """Record the operations of a `with` block, under the conditions of a capture."""
    with garbage_collection_off(), pretend_capturing(), compilers_off(), _RefuseHostReads(), tape:
        try:
            yield
        except Exception as error:
            # TorchScript's interpreter replaces errors by its own, which do not say why.
            if tape.refusal is not None and not isinstance(error, CaptureError):
                why = tape.refusal
                where = user_frame(error)
                raise CaptureError(why.what, where=where, remedy=why.remedy) from error
            raise


class _CpuSegment:
    """A tape of one segment of a call."""

    recording: CpuRecording

    def __init__(self, tape: _Tape, feeds: Sequence[torch.Tensor]) -> None:
        self.tape = tape
        self.run = tape.run
        self.feeds = feeds
        self.drains: Sequence[torch.Tensor] = ()

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Record the operations inside a `with` block."""
        return _capture_conditions(self.tape)

    def drain(self, drains: Sequence[torch.Tensor]) -> None:
        """Note what is copied out."""
        self.drains = drains

    def forget(self) -> None:
        """Put back what was written to, and overwrite what was computed."""
        self.tape.undo()
        self.tape.spoil()


class CpuRecorder:
    """Records tapes in one arena."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._live = 0
        self._arena = Arena()
        self._rehearsed: dict[int, Any] | None = None

    @property
    def reserved(self) -> int:
        """Bytes of the arena."""
        return self._arena.reserved

    @property
    def in_use(self) -> int:
        """Bytes of its live blocks."""
        return self._arena.in_use

    @contextlib.contextmanager
    def warming(self, *, pretend: bool = True) -> Iterator[None]:
        """Run in ordinary memory, without recording."""
        with pretend_capturing() if pretend else contextlib.nullcontext():
            yield

    def tidy(self) -> None:
        """Nothing to do: the host's allocator gives memory back by itself."""

    def relieve(self) -> None:
        """Nothing to do, as for `tidy`."""

    def resettle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to do, as for `tidy`."""

    def free_ranges(self) -> list[int]:
        """Sizes of the arena's free ranges."""
        return self._arena.free_ranges()

    def rehearse(
        self,
        prepare: Callable[[Allocate], Prepared],
        work: Callable[[Prepared], Any],
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[int, ...]:
        """Record the work in an arena that is thrown away."""
        scratch = CpuRecorder(self.device)
        prepared = prepare(scratch.allocate)
        with scratch._record_tape(None) as tape:
            kept = work(prepared)
        for tensor in tensors(kept):
            tape.read(tensor)
        self._rehearsed = dict(tape.external)
        sizes = scratch._arena.segments()
        del kept
        return sizes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Bytes of the arena."""
        storage = self._arena.allocate(nbytes)
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))

    def record(
        self,
        work: Work,
        feeds: Sequence[torch.Tensor],
        drains: Callable[[Any], Sequence[torch.Tensor]],
        generators: Sequence[torch.Generator] = (),
        streams: int = 1,
    ) -> CpuRecording:
        """Record work; what it wrote outside of the arena is put back."""
        known, self._rehearsed = self._rehearsed, None
        with self._record_tape(known) as tape:
            made = work()
        for tensor in tensors(made):
            tape.read(tensor)
        return self._recorded(tape, feeds, drains(made))

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[], CpuRecording]]:
        """Record a `with` block."""
        with self._record_tape(None) as tape:
            # There was no earlier run to show whether it seeds its random numbers.
            tape.expect(default_generators(self.device))
            yield lambda: self._recorded(tape, (), ())
            tape.check_end()

    @contextlib.contextmanager
    def segment(
        self, feeds: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()
    ) -> Iterator[_CpuSegment]:
        """Record one segment of a call; what it computes is there for later segments."""
        segment = _CpuSegment(_Tape(self._arena, None), feeds)
        with self._active(segment.tape):
            yield segment
        segment.recording = self._recorded(segment.tape, feeds, segment.drains)

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Use segments of the arena that nothing else uses."""
        return self._arena.apart()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Callable[[], tuple[int, ...]]]:
        """Use an arena that is thrown away."""
        arena, live = self._arena, self._live
        self._arena = Arena()
        try:
            yield self._arena.segments
        finally:
            self._arena, self._live = arena, live

    @contextlib.contextmanager
    def _active(self, tape: _Tape) -> Iterator[None]:
        """Have the tape notice blocks that die and graphs that are destroyed."""
        self._arena.on_free = tape.freed
        outer, _RECORDING.now = _RECORDING.now, tape
        try:
            yield
            if tape.broken:
                raise CaptureError("A graph was destroyed while another one was being captured.")
        finally:
            _RECORDING.now = outer
            self._arena.on_free = lambda block: None

    def _recorded(
        self, tape: _Tape, feeds: Sequence[torch.Tensor], drains: Sequence[torch.Tensor]
    ) -> CpuRecording:
        self._live += 1
        # What is copied out after each replay need not be kept until the next one.
        places = [self._by_address(drain) for drain in drains]
        return CpuRecording(tape, feeds, places, self._recording_closed, self.order)

    def _by_address(self, drain: torch.Tensor) -> torch.Tensor:
        block = self._arena.block_of(drain)
        return drain if block is None else self._arena.alias(drain, block)

    def _recording_closed(self) -> None:
        self._live -= 1

    @contextlib.contextmanager
    def _record_tape(self, known: Mapping[int, Any] | None) -> Iterator[_Tape]:
        tape = _Tape(self._arena, known)
        try:
            with self._active(tape), _capture_conditions(tape):
                yield tape
        finally:
            tape.undo()
            tape.spoil()

    def order(self) -> None:
        """Nothing to do: the pool's lock orders replays, and there are no streams."""

    def trim(self) -> None:
        """Give empty segments back that no recording works in."""
        self._arena.trim(only_apart=self._live > 0)

    def close(self) -> None:
        """Give empty segments back; what callers still hold lives on."""
        self.trim()
