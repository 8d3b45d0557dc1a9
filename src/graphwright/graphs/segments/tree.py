"""Calls that the host has a say in: the tree of their segments, replayed, and grown when needed.

A way that a call has gone, and that is to be recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...calls.operations import default_generators
from ...errors import CaptureError, GraphwrightError, first_line
from ..conditions import as_captured
from ..memory import MemoryPool, in_units
from ..recorder import Interrupted, Recorder
from ..static_tensors import Finish, StaticInputs, StaticOutputs, copy, flat, is_dense
from ..transaction import transaction
from .observation import ObservingTracer
from .recording import RecordingTracer
from .segment import Break, Segment
from .steps import New, Step, bytes_of
from .tracer import Differs, Tracer, Unfollowed

if TYPE_CHECKING:
    pass


MAX_PATHS = 64
MAX_SEGMENTS = 256
# How often, at the most, it is tried to record what could not be recorded, or to find an operation
# that cannot.
_ATTEMPTS = 8
# From so many ways on, most calls have to go one that is known.
_MANY = 16

Work = Callable[[StaticInputs], Any]
MakeRoom = Callable[[], bool]


@dataclass(frozen=True)
class Plan:
    """How to copy a call's arguments, and what it is.

    Attributes:
        sources: positions of the arguments that are copied in as bytes.
        by_element: likewise, element by element.
        fresh: whether the caller gets tensors of its own.
    """

    sources: Sequence[int]
    by_element: Sequence[int]
    fresh: bool


class SegmentTree:
    """A call in segments.

    Args:
        module: whose state it is.
        pool: the memory that its graphs live in.
        device: where it runs.

    Attributes:
        root: its first segment, once it is recorded.
        inputs: its static inputs.
        copies: how its arguments get there, and its results out.
        external: memory from outside that it uses.
        frozen: likewise on the host, where the host computes with it, and what it held.
        generators: random generators that it draws from.
        mutates: whether it writes to memory from outside on a way that was met later.
        random: whether it draws random numbers there.
        given_up: why it is answered by graphs no longer.
    """

    inputs: StaticInputs
    copies: Plan

    def __init__(self, module: nn.Module, pool: MemoryPool, device: torch.device) -> None:
        self.root: Segment | None = None
        self.external: dict[int, torch.UntypedStorage] = {}
        self.frozen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self.generators: list[torch.Generator] = []
        self.mutates = False
        self.random = False
        self.given_up: CaptureError | None = None
        self.calls = 0
        self.paths = 0
        self._module = module
        self._pool = pool
        self._device = device
        self._separate: set[Any] = set()
        self._script: list[Step] = []
        self._failures = 0
        self._segments = 0

    # What is done once, for the call that is captured first.

    def plan(
        self,
        work: Work,
        sample: Sequence[Any],
        recorder: Recorder,
        generators: Sequence[torch.Generator],
    ) -> tuple[int, ...]:
        """See where the call breaks, and record it in memory that is thrown away.

        Args:
            work: runs the call on static inputs.
            sample: the leaves of its arguments.
            recorder: records it.
            generators: random generators that it draws from.

        Returns:
            bytes of each memory segment that it would take in an empty pool.

        Raises:
            CaptureError: it cannot be recorded in segments either.
        """
        self.generators = list(generators)
        held = (*self._module.parameters(), *self._module.buffers())
        if any(tensor.is_inference() for tensor in held):
            raise CaptureError(
                "A parameter or buffer was made in inference mode: outside of it, none can be "
                "written to.",
                remedy="Make the model under torch.no_grad().",
            )
        for _ in range(_ATTEMPTS):
            inputs = StaticInputs(sample, functools.partial(_ordinary, self._device))
            observation = ObservingTracer((), {}, inputs, self._device, self._separate)
            try:
                with recorder.warming(), observation.seen():
                    observation.finish(work(inputs))
            finally:
                observation.undo()
            if observation.problem is not None:
                raise observation.problem
            self._script = observation.script
            self._check_limits(sum(step.key is not None for step in self._script) + 1)
            with recorder.scratch() as sizes:
                inputs = StaticInputs(sample, recorder.allocate)
                root = Segment(self._device, None, None)
                tracing = self.tracing(root, self._script, recorder, (), (), {}, inputs)
                try:
                    tracing.record(work, inputs, _no_results)
                except torch.OutOfMemoryError:
                    raise
                except Interrupted:
                    continue
                except Exception:
                    if tracing.culprit is None or tracing.culprit in self._separate:
                        raise
                    self._separate.add(tracing.culprit)
                    continue
                taken = sizes()
                for node in tracing.nodes:
                    node.close()
                del root, tracing, inputs
                return taken
        raise CaptureError("Too many of its operations cannot be captured.")

    def record(
        self,
        work: Work,
        inputs: StaticInputs,
        plan: Plan,
        mutated: Sequence[int],
        recorder: Recorder,
    ) -> Segment:
        """Record the call that was planned; returns its first segment."""
        feeds = [flat(inputs.tensor(slot)) for slot in plan.sources]
        finish = functools.partial(self.finish, inputs, plan, mutated)
        for left in reversed(range(_ATTEMPTS)):
            root = Segment(self._device, None, None)
            tracing = self.tracing(root, self._script, recorder, feeds, (), {}, inputs)
            try:
                tracing.record(work, inputs, finish)
                break
            except Interrupted:
                if not left:
                    raise
        self._grown(tracing.nodes, tracing.external, tracing.frozen)
        self.root = root
        self.inputs, self.copies = inputs, plan
        return root

    def tracing(
        self,
        node: Segment,
        script: Sequence[Step],
        recorder: Recorder,
        feeds: Sequence[torch.Tensor],
        known: Sequence[Step],
        memory: dict[int, torch.UntypedStorage],
        inputs: StaticInputs,
    ) -> RecordingTracer:
        walk = known, memory, inputs, self._device, self._separate
        return RecordingTracer(node, script, recorder, feeds, self.generators, *walk)

    def finish(
        self, inputs: StaticInputs, plan: Plan, mutated: Sequence[int], walk: Tracer, tree: Any
    ) -> tuple[StaticOutputs, list[torch.Tensor]]:
        """At the end of a path: what the call returns, and what is to be copied out."""
        assert isinstance(walk, RecordingTracer)
        results, node = StaticOutputs(tree, inputs, walk.external), walk.nodes[-1]
        node.back = [s for s in mutated if plan.fresh and is_dense(inputs.tensor(s))]
        node.back_by_element = [s for s in mutated if s not in node.back]
        drained = [*results.bases, *(inputs.tensor(slot) for slot in node.back)]
        return results, [flat(tensor) for tensor in drained] if plan.fresh else []

    def settle(self) -> None:
        """It is recorded for good: what recording alone has needed can go."""
        for step in self._script:
            step.real = ()
        self._script = []

    def _grown(
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
        """What records it."""
        return self._pool.recorder(self._device)

    def _check_limits(self, more: int) -> None:
        if self._segments + more > MAX_SEGMENTS:
            raise CaptureError(
                f"The call has more than {MAX_SEGMENTS} segments between its reads of values.",
                remedy="Read values less often: compute with tensors, or decide once for many "
                "steps.",
            )

    # What is done at each call.

    def answer(
        self, leaves: Sequence[Any], finish: Finish | None, work: Work, make_room: MakeRoom
    ) -> Any:
        """Replay the segments for a call's arguments; the pool's lock is held.

        Args:
            leaves: of the arguments.
            finish: makes what the caller gets of the leaves of what the work returned.
            work: runs the call on static inputs, should it go a way that is new.
            make_room: gives up a graph of the pool's; False if there is none.

        Raises:
            Differs: the call did something else, on the way to a value that is new, than before.
        """
        node, plan = self.root, self.copies
        assert node is not None
        self.calls += 1
        with torch.no_grad():
            for slot in plan.by_element:
                copy(leaves[slot], self.inputs.tensor(slot))
        sources: Sequence[torch.Tensor] = [leaves[slot] for slot in plan.sources]
        while True:
            for source in node.sources:
                source.refresh()
            stop = node.stop
            if stop is None:
                return self._end(node, sources, leaves, finish)
            node.launch(sources, ())
            sources = ()
            key, result = stop.run()
            following = stop.after.get(key)
            if following is None:
                arrival = stop.step(key, result, node.count)
                observation, made, mutated = self._go_on(node, arrival, leaves, finish, work)
                self._grow(node, arrival, observation, mutated, work, make_room)
                return made
            if following.targets:
                following.enter(result)
            node = following

    def look(self) -> None:
        """Give up where the host would compute something else with memory of its own."""
        for tensor, held in self.frozen.values():
            if bytes_of(tensor) != held:
                self.given_up = CaptureError(
                    "A tensor on the host, with which the host computes in the call, has changed.",
                    remedy="Keep it on the device, or capture again: release().",
                )

    def _end(
        self,
        node: Segment,
        sources: Sequence[torch.Tensor],
        leaves: Sequence[Any],
        finish: Finish | None,
    ) -> Any:
        results = node.results
        assert results is not None
        targets = [torch.empty_like(base) for base in results.bases] if self.copies.fresh else []
        node.launch(sources, [*targets, *(leaves[slot] for slot in node.back)])
        for slot in node.back:
            torch.autograd.graph.increment_version(leaves[slot])
        with torch.no_grad():
            for slot in node.back_by_element:
                copy(self.inputs.tensor(slot), leaves[slot])
        if not self.copies.fresh:
            return results.again(finish)
        return results.build(leaves, targets, finish)

    def _go_on(
        self,
        node: Segment,
        arrival: Step,
        leaves: Sequence[Any],
        finish: Finish | None,
        work: Work,
    ) -> tuple[ObservingTracer, Any, list[int]]:
        """Go on from a break whose outcome is new, as eager code does, in ordinary memory.

        Returns:
            what was observed, what the caller gets, and which arguments were written to.
        """
        news = [made for made in arrival.made if isinstance(made, New)]
        pairs = zip(news, arrival.real, strict=True)
        memory = node.memory_so_far() | {m.number: real.untyped_storage() for m, real in pairs}
        with torch.inference_mode(False):
            inputs = StaticInputs(self.inputs.leaves, functools.partial(_ordinary, self._device))
            copies = {number: storage.clone() for number, storage in memory.items()}
        known = [*node.known(), arrival]
        observation = ObservingTracer(known, copies, inputs, self._device, self._separate)
        observation.expect({*self.generators, *default_generators(self._device)})
        try:
            with as_captured(), observation.seen():
                tree = work(inputs)
                observation.finish(tree)
            if not observation.all_known():
                raise Differs("operations are missing")
        except BaseException as error:
            if isinstance(error, Unfollowed):
                self.given_up = _told(error)
                observation.undo()
            else:
                self._write_back(observation, inputs, leaves)
            raise
        mutated = self._write_back(observation, inputs, leaves)
        observation.forget_what_stood_still()
        self.mutates = self.mutates or observation.wrote_outside
        self.random = self.random or bool(observation.generators)
        outside = {i for i in observation.external if i not in observation.numbers}
        try:
            results = StaticOutputs(tree, inputs, outside)
        except CaptureError as error:
            self.given_up = _told(error)
            return observation, tree, mutated
        made = results.again(finish)
        if self.copies.fresh:
            made = results.build(leaves, [base.clone() for base in results.bases], finish)
        return observation, made, mutated

    def _write_back(
        self, observation: ObservingTracer, inputs: StaticInputs, leaves: Sequence[Any]
    ) -> list[int]:
        """Copy the arguments that were written to back to the caller's; their positions."""
        mutated = [s for s in inputs.slots if observation.wrote_to(inputs.tensor(s))]
        with torch.no_grad():
            for slot in mutated:
                copy(inputs.tensor(slot), leaves[slot])
        return mutated

    def _grow(
        self,
        node: Segment,
        arrival: Step,
        observation: ObservingTracer,
        mutated: Sequence[int],
        work: Work,
        make_room: MakeRoom,
    ) -> None:
        """Record the way that a call has gone; where that is not possible, give up."""
        if observation.problem is not None:
            self.given_up = _told(observation.problem)
        if self.given_up is not None or self.root is None:
            return  # The second: the function itself has released its graphs.
        assert node.stop is not None
        assert arrival.key is not None
        before = self._pool.reserved
        way = NewPath(self, node, arrival, observation.script, mutated, work)
        try:
            self._check_worth(node.stop)
            self._check_limits(1 + sum(step.key is not None for step in observation.script))
            self.generators += [g for g in observation.generators if g not in self.generators]
            observation.exchange()
            try:
                with transaction(self._pool, self._module, way.forget) as undo:
                    if self._pool.limit is not None:
                        self._make_room(way.size(), make_room)
                    undo.check()
                    way.record()
                    undo.check()
                    undo.refuse_host_randomness(self._device, observation.generators)
            except Exception as error:
                # What is set up once may be all that differs: the next call will tell.
                self._failures += 1
                memory = isinstance(error.__cause__, torch.OutOfMemoryError)
                others = isinstance(error, Interrupted)
                again = (way.culprit is not None and not memory) or isinstance(error, Differs)
                if not (again or others) or self._failures > _ATTEMPTS:
                    raise
                if not others:
                    self._separate |= {way.culprit} - {None}
                return
            finally:
                observation.exchange()
            node.stop.after[arrival.key] = way.nodes[0]
            for step in (arrival, *observation.script):
                step.real = ()
            for made in way.nodes:
                made.hits = 1
            self._grown(way.nodes, way.external, way.frozen)
            self._pool.note()
            if self._pool.over_limit(before):
                self._make_room((), make_room)
        except GraphwrightError as error:
            self.given_up = _told(error)
        except Exception as error:
            self.given_up = CaptureError(f"A way that it goes failed: {first_line(error)}")

    def _make_room(self, segments: Sequence[int], make_room: MakeRoom) -> None:
        """Have room in the pool for what takes such segments."""
        limit = self._pool.limit
        assert limit is not None
        alone = sum(segments) > limit
        while self._pool.reserved + self._pool.predicted(segments) > limit:
            if alone or not make_room():
                raise CaptureError(
                    "With another way that it goes, it takes more than the pool's limit of "
                    f"{in_units(limit)}.",
                    remedy="Raise the pool's limit, or allow eviction with "
                    "MemoryPool(limit, evict=True).",
                )

    def _check_worth(self, stop: Break) -> None:
        """Whether calls go ways that are known, most of them.

        Raises:
            CaptureError: they do not.
        """
        new = self.paths + 1
        rare = new >= _MANY and self.calls < 2 * new
        if new <= MAX_PATHS and not rare:
            return
        raise CaptureError(
            f"{self.calls} calls went {new} ways, by the values that {stop.operation} read.",
            where=stop.place,
            remedy="Read no values that differ from call to call: compute with tensors.",
        )

    def forget(self) -> None:
        """Give the graphs up, when it can be done safely; the call can be recorded again."""
        root, self.root = self.root, None
        for node in [] if root is None else list(root.below()):
            recording = node.let_go()
            if recording is not None and node is not root:  # That one is the graph's own.
                self._pool.retire(recording)


def _told(error: GraphwrightError) -> CaptureError:
    """The same without a traceback, whose frames hold tensors."""
    return CaptureError(error.what, where=error.where, remedy=error.remedy)


def _ordinary(device: torch.device, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _no_results(walk: Tracer, tree: Any) -> tuple[None, list[torch.Tensor]]:
    """Of what is recorded only to see what it takes."""
    return None, []


class NewPath:
    """A way that a call has gone, to be recorded.

    Args:
        branches: what it belongs to.
        node: the last segment that was known.
        arrival: the break after it, with its new outcome.
        script: what came then.
        mutated: positions of the arguments that were written to.
        work: runs the call on static inputs.

    Attributes:
        nodes: the segments that were recorded.
        external: memory from outside that they use.
        frozen: likewise on the host, with what it held.
        culprit: an operation that cannot be recorded.
    """

    def __init__(
        self,
        branches: SegmentTree,
        node: Segment,
        arrival: Step,
        script: Sequence[Step],
        mutated: Sequence[int],
        work: Work,
    ) -> None:
        self.nodes: list[Segment] = []
        self.external: dict[int, torch.UntypedStorage] = {}
        self.frozen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self.culprit: Any = None
        self._of = branches, node, arrival, script, mutated, work

    def record(self) -> None:
        """Record it."""
        branches, node, arrival, script, mutated, work = self._of
        recorder, inputs = branches.recorder, branches.inputs
        child = Segment.after(node, arrival, recorder.allocate)
        memory = node.memory_so_far() | child.memory
        known = [*node.known(), arrival]
        tracing = branches.tracing(child, script, recorder, (), known, memory, inputs)
        finish = functools.partial(branches.finish, inputs, branches.copies, mutated)
        try:
            tracing.record(work, inputs, finish)
        except Exception:
            self.culprit = tracing.culprit
            raise
        self.nodes, self.external, self.frozen = tracing.nodes, tracing.external, tracing.frozen

    def size(self) -> tuple[int, ...]:
        """Bytes of each memory segment that it would take in an empty pool."""
        branches = self._of[0]
        with branches.recorder.scratch() as sizes:
            self.record()
            taken = sizes()
            self.forget()
        return taken

    def forget(self) -> None:
        """Give up what was recorded."""
        nodes, self.nodes = self.nodes, []
        for node in nodes:
            node.close()
