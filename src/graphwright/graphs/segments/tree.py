"""SegmentTree: a call in segments, replayed, and extended when a call takes a new path.

Each node of the tree is a segment; its children follow it, one for each outcome of the break at its
end. A path through the tree is what one call does. `NewPath` records a path that was just met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...calls.objects import build, given_now
from ...calls.operations import default_generators
from ...calls.places import Written, emptied
from ...errors import CaptureError, GraphwrightError, first_line
from ..conditions import as_captured
from ..host_draws import Draw, draw_others, is_foreign, repeat
from ..memory import MemoryPool, format_bytes, note_growth, predict, recorder_for, retire
from ..reads import OutsideRead, Reads
from ..recorder import Interrupted, Recorder
from ..static_inputs import CopyPlan, StaticInputs, byte_view, copy
from ..static_outputs import Finish, StaticOutputs
from ..transaction import let_go, transaction
from .observing_tracer import ObservingTracer
from .recording import RecordingTracer
from .segment import Break, Segment
from .steps import New, Step, bytes_of
from .tracer import Differs, Tracer, Untraceable

MAX_PATHS = 64
MAX_SEGMENTS = 256
# How often to try to record again, or to find another operation that cannot be recorded.
_ATTEMPTS = 8
# From this many paths on, most calls must take a known one.
_MANY_PATHS = 16

# Runs a call on static inputs.
Work = Callable[[StaticInputs], Any]
# Closes another graph of the pool; False if there is none to close.
MakeRoom = Callable[[], bool]
# The effects of a run that raised, as a tree; None if it had none.
Unfinished = Callable[[], Any]


@dataclass(frozen=True)
class _Tree:
    """Results that no graph can give."""

    tree: Any


@dataclass(frozen=True)
class _EagerRun:
    """A call that took a new path, and went on eagerly.

    Attributes:
        observer: the tracer that observed it.
        results: what it returned.
        mutated: positions of the arguments that it wrote to.
        read: what it took from outside.
    """

    observer: ObservingTracer
    results: StaticOutputs | _Tree
    mutated: list[int]
    read: list[OutsideRead]


class SegmentTree:
    """A call in segments.

    Args:
        module: what is called.
        pool: the memory that the graphs live in.
        device: where the call runs.
        places: attributes and items that no path may read before it writes to them.

    Attributes:
        root: the first segment, once it is recorded.
        inputs: the static inputs.
        copy_plan: how arguments are copied into them, and results out.
        external: memory from outside that the call uses.
        frozen: tensors on the host, from outside, that the host computes with, and their content.
        generators: random generators that its graphs draw from.
        mutates: whether a path that was added later writes to memory from outside.
        random: whether such a path draws random numbers.
        given_up: why graphs no longer answer the call.
        calls: how many calls were answered.
        paths: how many paths were recorded.
    """

    inputs: StaticInputs
    copy_plan: CopyPlan

    def __init__(
        self,
        module: nn.Module,
        pool: MemoryPool,
        device: torch.device,
        places: Sequence[Written] = (),
    ) -> None:
        self.root: Segment | None = None
        self.external: dict[int, torch.UntypedStorage] = {}
        self.frozen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self.generators: list[torch.Generator] = []
        self.mutates = False
        self.random = False
        self.given_up: CaptureError | None = None
        self.calls = 0
        self.paths = 0
        self.places = list(places)
        self._module = module
        self._pool = pool
        self._device = device
        self._unrecordable: set[Any] = set()
        # What the first path is to be recorded by: its steps, and what it draws on the host.
        self._plan: tuple[list[Step], Sequence[Draw]] = [], ()
        self._failures = 0
        self._segments = 0

    # Done once, for the first call.

    def plan(
        self,
        work: Work,
        sample: Sequence[Any],
        recorder: Recorder,
        generators: Sequence[torch.Generator],
        draws: Sequence[Draw],
    ) -> tuple[int, ...]:
        """Find where the call breaks, and record it in memory that is thrown away.

        Args:
            work: runs the call on static inputs.
            sample: the leaves of its arguments.
            recorder: what records it.
            generators: random generators that its graphs are to draw from.
            draws: what it draws on the host beside them.

        Returns:
            bytes of each memory segment that the call would take in an empty pool.

        Raises:
            CaptureError: the call cannot be recorded in segments either.
        """
        self.generators = list(generators)
        held = (*self._module.parameters(), *self._module.buffers())
        if any(tensor.is_inference() for tensor in held):
            raise CaptureError(
                "A parameter or buffer was made in inference mode: outside of it, none can be "
                "written to.",
                remedy="Make the model under torch.no_grad().",
            )
        for left in reversed(range(_ATTEMPTS)):
            inputs = StaticInputs(sample, functools.partial(_allocate_ordinary, self._device))
            observer = ObservingTracer((), {}, inputs, self._device, self._unrecordable)
            try:
                with recorder.warming(), observer.seen():
                    observer.finish(work(inputs))
            finally:
                observer.undo()
            if observer.problem is not None:
                raise observer.problem
            self._plan = observer.script, tuple(draws)
            self._check_limits(sum(step.key is not None for step in observer.script) + 1)
            with recorder.scratch() as sizes:
                inputs = StaticInputs(sample, recorder.allocate)
                root = Segment(self._device, None, None)
                tracer = self.recording_tracer(root, *self._plan, recorder, (), (), {}, inputs)
                try:
                    tracer.record(work, inputs, _no_results)
                except torch.OutOfMemoryError:
                    raise
                except Interrupted:
                    if not left:
                        raise
                    continue
                except Exception:
                    if tracer.culprit is None or tracer.culprit in self._unrecordable:
                        raise
                    self._unrecordable.add(tracer.culprit)
                    continue
                taken = sizes()
                for node in tracer.nodes:
                    node.close()
                del root, tracer, inputs
                return taken
        raise CaptureError("Too many of its operations cannot be captured.")

    def record(
        self,
        work: Work,
        inputs: StaticInputs,
        copy_plan: CopyPlan,
        mutated: Sequence[int],
        recorder: Recorder,
    ) -> Segment:
        """Record the call that was planned; returns its first segment."""
        feeds = [byte_view(inputs.tensor(slot)) for slot in copy_plan.sources]
        finish = functools.partial(self.finish, inputs, copy_plan, mutated)
        for left in reversed(range(_ATTEMPTS)):
            root = Segment(self._device, None, None)
            tracer = self.recording_tracer(root, *self._plan, recorder, feeds, (), {}, inputs)
            try:
                tracer.record(work, inputs, finish)
                break
            except Interrupted:
                if not left:
                    raise
        self._add_path(tracer.nodes, tracer.external, tracer.frozen)
        self.root = root
        self.inputs, self.copy_plan = inputs, copy_plan
        return root

    def recording_tracer(
        self,
        node: Segment,
        script: Sequence[Step],
        draws: Sequence[Draw],
        recorder: Recorder,
        feeds: Sequence[torch.Tensor],
        known: Sequence[Step],
        memory: dict[int, torch.UntypedStorage],
        inputs: StaticInputs,
    ) -> RecordingTracer:
        """A tracer that records what comes after the known steps, from a segment on."""
        given = known, memory, inputs, self._device, self._unrecordable
        return RecordingTracer(node, script, recorder, feeds, self.generators, draws, *given)

    def finish(
        self,
        inputs: StaticInputs,
        copy_plan: CopyPlan,
        mutated: Sequence[int],
        tracer: Tracer,
        tree: Any,
    ) -> tuple[StaticOutputs, list[torch.Tensor]]:
        """At the end of a path: make the static outputs, and name what is to be copied out."""
        assert isinstance(tracer, RecordingTracer)
        results, node = StaticOutputs(tree, inputs, tracer.external), tracer.nodes[-1]
        node.back = inputs.back(mutated) if copy_plan.fresh else []
        node.back_by_element = [s for s in mutated if s not in node.back]
        drained = [*results.bases, *(inputs.tensor(slot) for slot in node.back)]
        return results, [byte_view(tensor) for tensor in drained] if copy_plan.fresh else []

    def drop_script(self) -> None:
        """Drop what only recording needed, once the call is recorded for good."""
        for step in self._plan[0]:
            step.real = ()
        self._plan = [], ()

    def _add_path(
        self,
        nodes: Sequence[Segment],
        external: dict[int, torch.UntypedStorage],
        frozen: dict[int, tuple[torch.Tensor, bytes]],
    ) -> None:
        self.frozen |= frozen
        self.external |= external
        self.paths += 1
        self._segments += len(nodes)

    @property
    def recorder(self) -> Recorder:
        """What records the call."""
        return recorder_for(self._pool, self._device)

    def _check_limits(self, more: int) -> None:
        if self._segments + more > MAX_SEGMENTS:
            raise CaptureError(
                f"The call has more than {MAX_SEGMENTS} segments between its reads of values.",
                remedy="Read values less often: compute with tensors, or decide once for many "
                "steps.",
            )

    # Done at each call.

    def answer(
        self,
        leaves: Sequence[Any],
        finish: Finish | None,
        work: Work,
        make_room: MakeRoom,
        unfinished: Unfinished,
        has_moved: Callable[[], bool],
    ) -> tuple[Any, list[OutsideRead] | None]:
        """Replay the segments for a call's arguments; the pool's lock is held.

        Args:
            leaves: of the arguments.
            finish: turns the leaves of the result into those that the caller gets.
            work: runs the call on static inputs, if it takes a new path.
            make_room: closes another graph of the pool; False if there is none to close.
            unfinished: what the work has done to the caller's objects, if it raised.
            has_moved: whether Python's state is another than that which the segments are of.

        Returns:
            the caller's results; and None where a known path gave them, else, since Python has done
            what it does, what the new path takes from outside, if it was recorded.

        Raises:
            Differs: on a new path, the call did something else up to the break than before.
        """
        node, copy_plan = self.root, self.copy_plan
        assert node is not None
        self.calls += 1
        with torch.no_grad():
            for slot in copy_plan.by_element:
                copy(leaves[slot], self.inputs.tensor(slot))
        self.inputs.send(leaves)
        sources: Sequence[torch.Tensor] = [leaves[slot] for slot in copy_plan.sources]
        while True:
            for source in node.sources:
                source.refresh()
            break_ = node.break_
            if break_ is None:
                return self._replay_last(node, sources, leaves, finish), None
            node.launch(sources, ())
            sources = ()
            key, result = break_.run()
            following = break_.after.get(key)
            if following is None:
                arrival = break_.step(key, result, node.count)
                run = self._continue_eagerly(node, arrival, leaves, work, unfinished)
                made = self._made(run.results, leaves, finish)
                # A replay would not move it.
                extended = not has_moved() and self._extend(node, arrival, run, work, make_room)
                return made, run.read if extended else []
            if following.targets:
                following.enter(result)
            node = following

    def check_frozen(self) -> None:
        """Give up if a tensor that the host computes with has changed."""
        for tensor, held in self.frozen.values():
            if bytes_of(tensor) != held:
                self.given_up = CaptureError(
                    "A tensor on the host, with which the host computes in the call, has changed.",
                    remedy="Keep it on the device, or capture again: release().",
                )

    def _replay_last(
        self,
        node: Segment,
        sources: Sequence[torch.Tensor],
        leaves: Sequence[Any],
        finish: Finish | None,
    ) -> Any:
        """Replay the last segment of a path, and make the caller's results."""
        results = node.results
        assert results is not None
        targets = [torch.empty_like(base) for base in results.bases] if self.copy_plan.fresh else []
        node.launch(sources, [*targets, *(leaves[slot] for slot in node.back)])
        repeat(node.draws)
        for slot in node.back:
            torch.autograd.graph.increment_version(leaves[slot])
        with torch.no_grad():
            for slot in node.back_by_element:
                copy(self.inputs.tensor(slot), leaves[slot])
        if not self.copy_plan.fresh:
            return results.again(finish)
        return results.build(leaves, targets, finish)

    def _continue_eagerly(
        self,
        node: Segment,
        arrival: Step,
        leaves: Sequence[Any],
        work: Work,
        unfinished: Unfinished,
    ) -> _EagerRun:
        """Continue eagerly, in ordinary memory, from a break whose outcome is new."""
        news = [made for made in arrival.made if isinstance(made, New)]
        pairs = zip(news, arrival.real, strict=True)
        memory = node.memory_so_far() | {m.number: real.untyped_storage() for m, real in pairs}
        with torch.inference_mode(False):
            allocate = functools.partial(_allocate_ordinary, self._device)
            inputs = StaticInputs(self.inputs.leaves, allocate, hosts=self.inputs.hosts)
            copies = {number: storage.clone() for number, storage in memory.items()}
        known = [*node.known(), arrival]
        observer = ObservingTracer(known, copies, inputs, self._device, self._unrecordable)
        observer.expect({*self.generators, *default_generators(self._device)})
        observer.reads_of = reads = Reads()
        try:
            with as_captured(), observer.seen():
                tree = work(inputs)
                observer.finish(tree)
            if not observer.all_known():
                raise Differs("operations are missing")
        except BaseException as error:
            if isinstance(error, Untraceable):
                self.given_up = _without_traceback(error)
                observer.undo()
            else:
                self._write_back(observer, inputs, leaves)
                tree = unfinished()
                if tree is not None:  # What Python has done so far, it has done.
                    self._made(StaticOutputs(tree, inputs, set()), leaves, None).happen(given_now())
            raise
        mutated = self._write_back(observer, inputs, leaves)
        read = reads.left([inputs.tensor(slot) for slot in inputs.slots])
        observer.drop_unused_generators()
        self.mutates = self.mutates or observer.wrote_outside
        self.random = self.random or bool(observer.generators)
        outside = {i for i in observer.external if i not in observer.numbers}
        try:
            results = StaticOutputs(tree, inputs, outside)
        except CaptureError as error:
            self.given_up = _without_traceback(error)
            return _EagerRun(observer, _Tree(tree), mutated, read)
        return _EagerRun(observer, results, mutated, read)

    def _made(
        self, results: StaticOutputs | _Tree, leaves: Sequence[Any], finish: Finish | None
    ) -> Any:
        """The caller's results of a call that went on eagerly."""
        if isinstance(results, _Tree):
            return build(*pytree.tree_flatten(results.tree))
        if not self.copy_plan.fresh:
            return results.again(finish)
        return results.build(leaves, [base.clone() for base in results.bases], finish)

    def _write_back(
        self, observer: ObservingTracer, inputs: StaticInputs, leaves: Sequence[Any]
    ) -> list[int]:
        """Copy arguments that were written to back to the caller's; returns their positions."""
        mutated = [s for s in inputs.slots if observer.wrote_to(inputs.tensor(s))]
        with torch.no_grad():
            for slot in mutated:
                copy(inputs.tensor(slot), leaves[slot])
        return mutated

    def _extend(
        self, node: Segment, arrival: Step, run: _EagerRun, work: Work, make_room: MakeRoom
    ) -> bool:
        """Record the new path that a call took, and say whether that was done.

        If it is impossible, give up.
        """
        if run.observer.problem is not None:
            self.given_up = _without_traceback(run.observer.problem)
        if self.given_up is not None or self.root is None:
            return False  # Without a root, the function itself has released its graphs.
        assert node.break_ is not None
        assert arrival.key is not None
        before = self._pool.reserved
        try:
            # While the results are alive.
            draws = run.observer.draws.to_repeat(self._device)
            script = run.observer.script
            path = NewPath(self, node, arrival, script, draws, run.mutated, work)
            self._check_worth(node.break_)
            self._check_limits(1 + sum(step.key is not None for step in script))
            if not self._record_path(path, draws, run, make_room):
                return False
            node.break_.after[arrival.key] = path.nodes[0]
            for step in (arrival, *script):
                step.real = ()
            for made in path.nodes:
                made.hits = 1
            self._add_path(path.nodes, path.external, path.frozen)
            if not note_growth(self._pool, before):
                self._make_room((), make_room)
        except Exception as error:
            if isinstance(error, GraphwrightError):
                self.given_up = _without_traceback(error)
            else:
                self.given_up = CaptureError(f"Recording a new path failed: {first_line(error)}")
            let_go(error)
            return False
        return True

    def _record_path(
        self, path: NewPath, draws: Sequence[Draw], run: _EagerRun, make_room: MakeRoom
    ) -> bool:
        """Record a new path from the state that its call began with; False to try another time."""
        observer = run.observer
        generators = [g for g in observer.generators if not is_foreign(g, self._device)]
        self.generators += [g for g in generators if g not in self.generators]
        observer.exchange()
        try:
            with transaction(self._pool, self._module, path.forget) as state:
                if self.places:
                    state.allow_writes(list(self.places), [])
                draw_others(draws)
                if self._pool.limit is not None:
                    self._make_room(path.size(), make_room)
                state.check()
                path.record()
                state.check()
                if self.places and not path.gives(run.results):
                    raise Differs("its result goes by what an attribute held before")
                state.refuse_host_randomness(self._device, observer.generators, [observer.draws])
        except Exception as error:
            if not self._may_try_again(path, error):
                raise
            return False
        finally:
            observer.exchange()
        return True

    def _may_try_again(self, path: NewPath, error: Exception) -> bool:
        """Whether a new path that could not be recorded may be, the next time.

        It may differ only since something was set up once: the next call will tell.
        """
        self._failures += 1
        if self._failures > _ATTEMPTS:
            return False
        if isinstance(error, Interrupted):
            return True
        memory = isinstance(error.__cause__, torch.OutOfMemoryError)
        again = (path.culprit is not None and not memory) or isinstance(error, Differs)
        if again:
            self._unrecordable |= {path.culprit} - {None}
        return again

    def _make_room(self, segments: Sequence[int], make_room: MakeRoom) -> None:
        """Make room in the pool for a path that takes these memory segments."""
        limit = self._pool.limit
        assert limit is not None
        alone = sum(segments) > limit
        while self._pool.reserved + predict(self._pool, segments).nbytes > limit:
            if alone or not make_room():
                raise CaptureError(
                    f"With another path, the call takes more than the pool's limit of "
                    f"{format_bytes(limit)}.",
                    remedy="Raise the pool's limit, or allow eviction with "
                    "MemoryPool(limit, evict=True).",
                )

    def _check_worth(self, break_: Break) -> None:
        """Raise CaptureError if too many calls take new paths for recording to be worthwhile."""
        new = self.paths + 1
        rare = new >= _MANY_PATHS and self.calls < 2 * new
        if new <= MAX_PATHS and not rare:
            return
        raise CaptureError(
            f"{self.calls} calls took {new} paths, by the values that {break_.operation} read.",
            where=break_.place,
            remedy="Read no values that differ from call to call: compute with tensors.",
        )

    def forget(self) -> None:
        """Have the graphs closed when that is safe; the call can be recorded again."""
        root, self.root = self.root, None
        for node in [] if root is None else list(root.below()):
            recording = node.take_recording()
            if recording is not None and node is not root:  # The root's belongs to the graph.
                retire(self._pool, recording)


class NewPath:
    """A new path that a call took, to be recorded.

    Args:
        tree: the tree that it extends.
        node: the last known segment.
        arrival: the break after it, with its new outcome.
        script: the steps that came then.
        draws: what the call drew on the host, from its beginning.
        mutated: positions of the arguments that were written to.
        work: runs the call on static inputs.

    Attributes:
        nodes: the segments that were recorded.
        external: memory from outside that they use.
        frozen: tensors on the host, from outside, that the host computes with, and their content.
        culprit: an operation that could not be recorded.
    """

    def __init__(
        self,
        tree: SegmentTree,
        node: Segment,
        arrival: Step,
        script: Sequence[Step],
        draws: Sequence[Draw],
        mutated: Sequence[int],
        work: Work,
    ) -> None:
        self.nodes: list[Segment] = []
        self.external: dict[int, torch.UntypedStorage] = {}
        self.frozen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self.culprit: Any = None
        self._given = tree, node, arrival, script, draws, mutated, work

    def record(self) -> None:
        """Record the path's segments."""
        tree, node, arrival, script, draws, mutated, work = self._given
        recorder, inputs = tree.recorder, tree.inputs
        child = Segment.after(node, arrival, recorder.allocate)
        memory = node.memory_so_far() | child.memory
        known = [*node.known(), arrival]
        tracer = tree.recording_tracer(child, script, draws, recorder, (), known, memory, inputs)
        finish = functools.partial(tree.finish, inputs, tree.copy_plan, mutated)
        try:
            with emptied(tree.places):
                tracer.record(work, inputs, finish)
        except Exception:
            self.culprit = tracer.culprit
            raise
        self.nodes, self.external, self.frozen = tracer.nodes, tracer.external, tracer.frozen

    def gives(self, results: StaticOutputs | _Tree) -> bool:
        """Whether its results are like those of the call that took it first."""
        mine = self.nodes[-1].results
        return mine is not None and isinstance(results, StaticOutputs) and mine.alike(results)

    def size(self) -> tuple[int, ...]:
        """Bytes of each memory segment that the path would take in an empty pool."""
        tree = self._given[0]
        with tree.recorder.scratch() as sizes:
            self.record()
            taken = sizes()
            self.forget()
        return taken

    def forget(self) -> None:
        """Close what was recorded."""
        nodes, self.nodes = self.nodes, []
        for node in nodes:
            node.close()


def _without_traceback(error: GraphwrightError) -> CaptureError:
    """A copy of an error without its traceback, whose frames hold tensors."""
    return CaptureError(error.what, where=error.where, remedy=error.remedy)


def _allocate_ordinary(device: torch.device, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _no_results(tracer: Tracer, tree: Any) -> tuple[None, list[torch.Tensor]]:
    """Stands for `SegmentTree.finish` in a recording that only measures memory."""
    return None, []
