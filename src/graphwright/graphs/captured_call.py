"""CapturedCall, the graph of one call: warmed up, recorded, and replayed for other values.

`CallSpec` says what is recorded, `Warmed` what warm-up has found out about it, `Recorded` what the
recording has given. A recording is made again by the same steps, from the same spec.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ..calls.modes import OperationMode, compilers_off, opaque
from ..calls.objects import classes_in, giving
from ..calls.operations import default_generators
from ..calls.options import callable_problem, choice_problem, count_problem, refuse
from ..calls.places import Written, carried_by, hidden
from ..calls.snapshots import clone_leaves, same_bits
from ..calls.split import Args, Kwargs, Split
from ..calls.watch import ModuleWatch
from ..errors import CaptureError, GraphwrightError, SignatureError
from ..evaluation.clock import synchronize
from . import as_eager
from .as_eager import CaptureMode
from .call_spec import CallSpec
from .call_work import CallWork
from .capture_turns import Busy
from .composition import Parts, SetUpFirst
from .conditions import THREAD, answering_as_eager
from .effects import Outcome
from .graph import Graph, GraphClosed, GraphState, with_operations
from .host_draws import Draw, generator_kept
from .inspection.node import Node
from .inspection.origins import Observer, Origins, observing
from .journal import Copies, Journal
from .marks import mark, wanted
from .memory import (
    Admission,
    MemoryPool,
    MemoryPrediction,
    make_room,
    pool_of_one_graph,
    pool_problem,
    predict,
    recorder_for,
    recording_in,
    retire,
    shared_bytes,
)
from .python_state import PythonState
from .random_state import put_state
from .reads import OutsideRead, explain
from .recorded import Recorded, record_call
from .recorder import Interrupted, Recorder, Recording
from .segments.explanation import describe_tree
from .segments.tracer import Untraceable
from .segments.tree import SegmentTree
from .static_inputs import StaticInputs, left_in_place
from .static_outputs import Around, Finish, Launch
from .transaction import let_go, transaction
from .warmup import RunsOtherwise, Warmed, warm

Outputs = Literal["fresh", "static"]
Breaks = Literal["auto", "never"]


class CapturedCall(Graph):
    """The graph of a function's call, or several where it is divided into segments.

    Attributes:
        spec: what is recorded, and how.
        signature: of its calls.
        work: runs the call.
        places: attributes and items outside of it that each run writes to, once they are known.
        parts: fused and tuned modules inside of it, which run what they were made into.
        was_eager: whether a call ran eagerly because its segments were given up.
        has_effects: whether a call changes or returns objects that it was given.
    """

    was_eager = False
    has_effects = False
    # What libraries are told that ask whether they are captured.
    _mode = CaptureMode.UNDECIDED
    # Where warm-up keeps copies of what the call changes.
    _copies: Copies | None = None

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        *,
        pool: MemoryPool | None = None,
        warmup: int = 3,
        outputs: Outputs = "fresh",
        evictable: bool = False,
        breaks: Breaks = "never",
        objects: bool = True,
        places: Sequence[Written] = (),
        streams: int = 1,
        may_look: bool = True,
        trusted: bool = False,
        in_place: bool = False,
    ) -> None:
        """Check the arguments; nothing runs yet.

        Args:
            fn: the function or module.
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            pool: as for `capture`.
            warmup: likewise.
            outputs: likewise.
            evictable: whether the pool may close it for another graph.
            breaks: as for `graph`.
            objects: whether objects among the arguments and results are taken apart.
            places: attributes and items to which other calls of the function write.
            streams: as for `capture`.
            may_look: whether segments are taken in place of one graph where they are faster.
            trusted: whether the owner looks at all that the function reads from outside.
            in_place: whether a second recording works on many arguments that the call writes to, a
                cache say, where the sample has them.

        Raises:
            OptionError: an option is invalid.
            CaptureError: the call cannot be captured, as its arguments show.
        """
        refuse(
            "capture",
            callable_problem("fn", fn),
            pool_problem(pool),
            count_problem("warmup", warmup),
            choice_problem("outputs", outputs, ("fresh", "static")),
            count_problem("streams", streams),
        )
        pool = pool_of_one_graph() if pool is None else pool
        spec, sample = CallSpec.of(
            fn,
            args,
            kwargs,
            pool,
            objects=objects,
            warmup=warmup,
            fresh=outputs == "fresh",
            may_divide=breaks == "auto",
            may_look=may_look,
            streams=streams,
            trusted=trusted,
            in_place=in_place,
        )
        self._begin(spec, sample, pool, places, evictable=evictable)

    def _begin(
        self,
        spec: CallSpec,
        sample: Sequence[Any],
        pool: MemoryPool,
        places: Sequence[Written] = (),
        *,
        evictable: bool = False,
    ) -> None:
        """Begin the life of a call that is to be recorded."""
        super().__init__(pool, spec.name, evictable=evictable)
        self.signature = spec.signature
        self.parts = Parts()
        self._sample = list(sample)
        self._warmed: Warmed | None = None
        self._recorded: Recorded | None = None
        self._watch: ModuleWatch | None = None
        # Addresses of memory that the call uses by itself.
        self._outside: set[int] = set()
        # The recording that the last call or replay has used.
        self._last: Recorded | None = None
        self._specify(spec, places)

    def _specify(self, spec: CallSpec, places: Sequence[Written] = ()) -> None:
        """Say what is to be recorded; places are those to which other calls write."""
        self.spec = spec
        self.work = CallWork(spec, places)
        self.places = self.work.places

    @classmethod
    def of(
        cls,
        spec: CallSpec,
        sample: Sequence[Any],
        pool: MemoryPool,
        places: Sequence[Written] = (),
        mode: CaptureMode = CaptureMode.UNDECIDED,
    ) -> CapturedCall:
        """A call that is yet to be warmed up.

        Args:
            spec: what is to be recorded.
            sample: the leaves of its arguments.
            pool: the memory that it will live in.
            places: attributes and items to which other calls of the function write.
            mode: what libraries are told of captures.
        """
        made = cls.__new__(cls)
        made._begin(spec, sample, pool, places)
        made._mode = mode
        return made

    @property
    def function(self) -> Callable[..., Any]:
        """The function or module that was captured."""
        return self.spec.fn

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.spec.device

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The static inputs, in the order of the arguments: what `replay()` reads.

        In a shared pool, no other graph may replay between filling them and reading `outputs`: it
        may use the same memory.
        """
        inputs = self.recorded.inputs
        return tuple(inputs.tensor(slot) for slot in inputs.slots)

    @property
    def outputs(self) -> Any:
        """What the function returned, in the graph's memory: the next replay overwrites it."""
        recorded = self.recorded
        results = (self._last or recorded).results
        if results is None:
            raise CaptureError(
                f"{self.name} is in segments, whose results depend on the path that a call takes.",
                remedy="Call the graph instead.",
            )
        if self.has_effects:
            raise CaptureError(
                f"{self.name} changes or returns objects that it is given, or sets attributes.",
                remedy="Call the graph instead: a replay alone does none of this.",
            )
        return results.again()

    @property
    def tree(self) -> SegmentTree | None:
        """The call's segments, if it is divided into several; else None."""
        return self._planned if self._recorded is None else self._recorded.tree

    @property
    def warmed(self) -> Warmed | None:
        """What warm-up has found out about the call, once it is warm."""
        return self._warmed

    @property
    def _planned(self) -> SegmentTree | None:
        """The segments that warm-up has divided the call into; a single one is a graph."""
        return None if self._warmed is None else self._warmed.tree

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the arguments' leaves that a call writes to."""
        return () if self._warmed is None else self._warmed.mutated

    @property
    def looks(self) -> bool:
        """True if it is split into segments only because the host reads a value there."""
        return self._mode is CaptureMode.LOOKING

    @property
    def recorded(self) -> Recorded:
        """What was recorded; raise where it cannot be replayed now."""
        self._ready()
        assert self._recorded is not None
        return self._recorded

    def _recordings(self) -> list[Recording]:
        """Its recording, or those of the segments on all paths."""
        tree = self.tree
        if tree is None or tree.root is None:
            return [self._ready()]
        found = [segment.recording for segment in tree.root.below()]
        return [recording for recording in found if recording is not None]

    def _listed(self, notes: list[str]) -> list[list[Node]]:
        """The nodes of each recording, with what a second, observed recording tells of them."""
        listed = [recording.inspect() for recording in self._recordings()]
        try:
            by, twins = self._observed_twins()
        except GraphwrightError as error:
            notes.append(f"Modules and lines are not known: {error.what}")
            twins = []
        else:
            if self.tree is not None and len(twins) < len(listed):
                notes.append(
                    "Modules and lines are known for the path of the last call only, and for "
                    "what it shares with others."
                )
        found, unmatched = [], False
        for nodes, _ in listed:
            shape = [node.shape for node in nodes]
            twin = next((t for t in twins if [node.shape for node in t[0]] == shape), None)
            if twin is None:
                found.append(nodes)
                unmatched = unmatched or bool(twins)
                continue
            twins.remove(twin)
            found.append(with_operations(nodes, twin[1], by.recorded))
        if unmatched and self.tree is None:
            notes.append(
                "Modules and lines are not known: recorded again under observation, the call has "
                "other nodes. Code that torch.compile compiled runs as plain Python there; or the "
                "model has changed since the capture."
            )
        return found

    def _observed_twins(self) -> tuple[Observer, list[tuple[list[Node], list[int]]]]:
        """Record the call again under observation: what was seen, and the nodes of that."""
        by = Observer(Origins(self.spec.module))
        with self.recorded_again(by) as twin:
            return by, [recording.inspect() for recording in twin._recordings()]

    @contextlib.contextmanager
    def recorded_again(
        self, by: Observer | None = None, leaves: Sequence[Any] | None = None
    ) -> Iterator[CapturedCall]:
        """The same call, recorded once more into memory of its own, for the block.

        A call that is one graph is not run: warm-up is over. One in segments is warmed up again.

        Args:
            by: is told of the operations that are recorded.
            leaves: of arguments; by default what the static inputs hold.

        Raises:
            CaptureError: it cannot be recorded again.
        """
        with self._twin(leaves) as twin:
            if twin._warmed is None:
                twin.warm()
            with observing(by):
                twin.record()
            yield twin

    @contextlib.contextmanager
    def _twin(self, leaves: Sequence[Any] | None) -> Iterator[CapturedCall]:
        """The same call, yet to be recorded, with a memory pool of its own.

        It is warm unless it is in segments.
        """
        recorded, spec = self.recorded, self.spec
        if spec.trained is not None:
            raise CaptureError("A training step is not recorded again.")
        # What runs works on copies of the leaves; and what it reads is watched by now.
        sample = recorded.inputs.leaves if leaves is None else leaves
        pool = pool_of_one_graph(spec.device)
        spec = replace(spec, trusted=True, in_place=False)
        twin = CapturedCall.of(spec, sample, pool, self.work.known, self._mode)
        twin.parts.settle()
        twin.work.candidates[:], twin.places[:] = self.work.candidates, self.places
        twin.work.has_effects = twin.has_effects = self.has_effects
        if self._planned is None:
            twin._warmed = self._warmed
        twin.mutates, twin.random, twin._outside = self.mutates, self.random, self._outside
        twin.state = GraphState.WARMING
        try:
            yield twin
        finally:
            twin.close()
            twin.pool.close()

    # To compare a replay with eager.

    def run_eagerly(
        self, leaves: Sequence[Any], under: OperationMode | None = None, *, pretend: bool = False
    ) -> RunResult:
        """Run the call as eager code on copies of arguments; what it changes is put back.

        Args:
            leaves: of the arguments.
            under: sees its operations.
            pretend: whether torch.cuda.is_current_stream_capturing() returns True, as in captures.

        Raises:
            CaptureError: it raises; its error is the cause.
        """
        with self._twin(leaves) as twin:
            recorder = recorder_for(twin.pool, self.device)
            inputs = StaticInputs(twin._sample, functools.partial(_ordinary, self.device))
            journal = Journal()
            with twin._transaction(GraphState.WARMING):
                try:
                    with (
                        recorder.warming(pretend=pretend),
                        compilers_off(),
                        journal,
                        contextlib.nullcontext() if under is None else under,
                    ):
                        tree = twin.work(inputs)
                    mine = {inputs.tensor(slot).untyped_storage()._cdata for slot in inputs.slots}
                    written = [s for s in journal.written if s._cdata not in mine]
                    return RunResult(
                        [_kept(leaf) for leaf in pytree.tree_leaves(tree)],
                        {slot: _kept(inputs.tensor(slot)) for slot in self.written},
                        [(storage, storage.clone()) for storage in written],
                    )
                finally:
                    journal.undo()

    def run_replayed(
        self, leaves: Sequence[Any], outside: Sequence[torch.UntypedStorage] = ()
    ) -> RunResult:
        """Replay for arguments, and put back what that writes to memory from outside.

        Args:
            leaves: of the arguments.
            outside: memory from outside that the call is known to write to.
        """
        with self._lock, torch.no_grad():
            recorded = self.recorded
            if recorded.results is None:
                copies = clone_leaves(leaves)
                made = self.run_leaves(copies)
                results = [_kept(leaf) for leaf in pytree.tree_leaves(made)]
                return RunResult(results, {s: _kept(copies[s]) for s in self.written}, [])
            recorded.recording.order()
            with put_back(outside), _generators_kept(self.device):
                recorded.inputs.fill(leaves)
                recorded.recording.replay()
                synchronize(self.device)  # Its errors are raised here.
                return RunResult(
                    [_kept(leaf) for leaf in recorded.results.again_leaves()],
                    {slot: _kept(recorded.inputs.tensor(slot)) for slot in self.written},
                    [(storage, storage.clone()) for storage in outside],
                )

    def replay_sample(self) -> None:
        """Replay on what the static inputs hold; what that changes outside is put back."""
        with self._lock, torch.no_grad():
            recording, warmed = self._ready(), self._warmed
            assert warmed is not None
            recording.order()
            outside = [s for s in warmed.external if s._cdata in warmed.announced]
            with put_back(outside), _generators_kept(self.device):
                recording.replay()
                synchronize(self.device)

    def describe_segments(self) -> list[str]:
        """Lines on the call's segments, breaks and hoisted constants; none for a plain graph."""
        root = None if self._planned is None else self._planned.root
        return [] if root is None else describe_tree(root)

    @property
    def divided(self) -> str:
        """How it answers calls, in words."""
        return "in one graph" if self._planned is None else "in segments"

    @property
    def may_not_pay(self) -> bool:
        """Whether eager code may be faster: it waits for values, or looks at them to do less."""
        skips = self._warmed is not None and self._warmed.looks_in_eager and not self.spec.may_look
        return skips or self._planned is not None

    @property
    def given_up(self) -> CaptureError | None:
        """Why calls now run eagerly, if they do."""
        # Asked at every call: without `_planned`, which is a call of its own.
        tree = None if self._warmed is None else self._warmed.tree
        return None if tree is None else tree.given_up

    def replay(self) -> None:
        """As `Graph.replay`, for a graph that is not in segments."""
        if self.state is GraphState.READY:
            _ = self.outputs
        super().replay()
        self._last = None

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ready()
        split = self.signature.split(args, kwargs)
        if split is None and not self.signature.fits(args, kwargs):
            raise SignatureError(
                f"The graph was captured for another call: "
                f"{self.signature.differences(args, kwargs, 'captured')}.",
                remedy="Capture a graph for this call, or use graphwright.graph().",
            )
        watch, recorded = self._watch, self._recorded
        if watch is None or recorded is None:
            self._ready()  # Another thread has just closed it.
        assert watch is not None
        assert recorded is not None
        if self.mutates or self.random or self.has_effects or recorded.results is None:
            self._check_module(watch)
            return self.run(args, kwargs, split=split)
        # The device works while the module is checked; if that has changed, the result is dropped.
        result = self.run(args, kwargs, split=split)
        self._check_module(watch)
        return result

    def _check_module(self, watch: ModuleWatch) -> None:
        if (change := watch.changed()) is not None:
            raise SignatureError(
                f"Since {self.name} was captured, {change}.",
                remedy="Capture it again, or use graphwright.graph(), which does so by itself.",
            )

    def run(
        self,
        args: Args,
        kwargs: Kwargs,
        finish: Finish | None = None,
        *,
        split: Split | None = None,
    ) -> Any:
        """Replay for a call that is known to fit.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            finish: turns the leaves of the result into those that the caller gets.
            split: what `signature.split` made of the call.
        """
        if split is None:
            plain = self.spec.is_plain
            split = Split(args, ()) if plain else self.signature.taken_apart(args, kwargs)
        recorded = self._recorded
        if recorded is None:
            recorded = self.recorded  # Says what is wrong.
        if not (self.has_effects or recorded.meets_objects):
            return self.run_leaves(split.leaves, finish, (args, kwargs))
        self._refuse_owned(split.objects)
        given = [*split.objects, *(place.owner for place in self.places)]
        with giving(given):
            made = self.run_leaves(split.leaves, finish, (args, kwargs))
        return made.happen(given) if isinstance(made, Outcome) else made

    def _refuse_owned(self, objects: Sequence[Any]) -> None:
        """Refuse an object among the arguments that the module or function reaches by itself.

        The graph was made of a copy of the argument, which is another object.
        """
        owned = {} if self._watch is None else self._watch.visits
        for each in objects:
            if id(each) in owned:
                raise SignatureError(
                    f"An argument is, or holds, a {type(each).__name__} that the call also reaches "
                    "by itself.",
                    remedy="Pass a copy.",
                )

    def run_leaves(
        self,
        leaves: Sequence[Any],
        finish: Finish | None = None,
        call: tuple[Args, Kwargs] | None = None,
    ) -> Any:
        """As `run`, for the leaves of a call's arguments; its effects are yet to happen.

        Args:
            leaves: of the arguments.
            finish: turns the leaves of the result into those that the caller gets.
            call: the arguments, if these hold objects.
        """
        recorded = self._recorded
        if recorded is None:
            recorded = self.recorded  # Says what is wrong.
        chosen = recorded.best_for(leaves)
        if self.mutates or recorded.tree is not None:
            # What is worked on in place was looked at with the sample.
            self.check_overlap([leaves[slot] for slot in chosen.apart])
            if recorded.tree is not None:
                return self._run_segments(recorded.tree, leaves, call, finish)
        with self._lock:
            if self._recorded is not recorded or THREAD.depth:
                chosen = self.recorded
            targets = chosen.replay(leaves)
            self._last = chosen
        results = chosen.results
        assert results is not None
        if not chosen.copies.fresh:
            return results.again(finish)
        if finish is None and results.single:
            return targets[0]
        return results.build(leaves, targets, finish)

    def _run_segments(
        self,
        tree: SegmentTree,
        leaves: Sequence[Any],
        call: tuple[Args, Kwargs] | None,
        finish: Finish | None,
    ) -> Any:
        """Run the call in segments, or eagerly where these were given up."""
        with self._lock:
            self._ready().order()
            tree.check_frozen()
            if tree.given_up is None:
                # Draws on the host are put back where a call is given up.
                pure = not (self.mutates or tree.generators)
                try:
                    marked = mark(self.name) if wanted() else contextlib.nullcontext()
                    told = answering_as_eager(self._mode.as_eager)
                    with self.parts.joining(), marked, told:
                        made, read = tree.answer(
                            leaves,
                            finish,
                            self.work,
                            functools.partial(make_room, self.pool, self),
                            self.work.effects_so_far,
                            self._has_moved,
                        )
                except Untraceable:
                    self.has_effects = self.work.has_effects
                    if not pure:
                        raise
                else:
                    if read is not None:
                        self._explain_path(tree, read)
                        self._update_from_tree(tree)
                        if isinstance(made, Outcome):
                            made.counted = [(p, p.value()) for p in self.places if p.counts]
                    return made
        self.was_eager = True
        args, kwargs = self.spec.arguments(leaves) if call is None else call
        with torch.no_grad():
            results = self.spec.fn(*args, **kwargs)
        if finish is None:
            return results
        made, spec = pytree.tree_flatten(results)
        return pytree.tree_unflatten(finish(made), spec)

    def _has_moved(self) -> bool:
        """Whether what the call depends on is no longer what it was captured with."""
        return self._watch is not None and self._watch.changed() is not None

    def _update_from_tree(self, tree: SegmentTree) -> None:
        """Take over what a new path through the segments may need."""
        self.has_effects = self.work.has_effects
        self.mutates = self.mutates or tree.mutates
        self.random = self.random or tree.random
        self._outside = self._outside | {s.data_ptr() for s in tree.external.values() if s.nbytes()}

    def check_overlap(self, leaves: Sequence[Any]) -> None:
        """Refuse an argument in memory that the call also uses by itself.

        The graph works on a copy of the argument, so writes to one would not reach the other.
        """
        if not self._outside:
            return
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.untyped_storage().data_ptr() in self._outside and leaf.numel():
                raise SignatureError(
                    "An argument shares memory with a tensor that the call uses by itself, and one "
                    "of the two is written to.",
                    remedy="Pass a copy.",
                )

    def launcher(self, around: Around | None = None) -> Launch | None:
        """`run` as one fast function of positional arguments; None where the call is not simple.

        The function raises GraphClosed once the graph is no longer ready.

        Args:
            around: makes the function of another one, which gives the leaves of the results.
        """
        recorded = self._recorded
        if recorded is None or recorded.results is None or self.has_effects:
            return None
        if not (recorded.is_simple and recorded.copies.fresh):
            return None
        # The function holds none of the graph's memory: the graph may be closed at any time.
        lock, slots, rebuild = self._lock, tuple(recorded.sources), recorded.results.rebuilder()
        apart = around is not None
        single = recorded.results.single and not apart
        everything = slots == tuple(range(len(self.signature.leaves)))
        empty_like, thread, sends = torch.empty_like, THREAD, recorded.sends
        del recorded

        def launch(args: Sequence[Any]) -> Any:
            with lock:
                recorded = self._recorded
                if recorded is None or thread.depth:
                    raise GraphClosed("The graph was closed meanwhile.")
                recording = recorded.recording
                recording.order()
                if sends:
                    recorded.inputs.send(args)
                sources = args if everything else [args[slot] for slot in slots]
                if single:
                    target = empty_like(recorded.bases[0])
                    recording.run(sources, (target,))
                    return target
                targets = [empty_like(base) for base in recorded.bases]
                recording.run(sources, targets)
                results = recorded.results
                assert results is not None
                return results.build(args, targets, apart=apart)

        return launch if around is None else around(launch, rebuild)

    def warm(self, *, rehearse: bool = True) -> MemoryPrediction:
        """Run the call until it is warm, and predict what capturing it will take.

        Args:
            rehearse: whether to rehearse the recording; without it nothing is predicted.

        Raises:
            CaptureError: it cannot be captured.
        """
        while True:
            outcome = self._attempt(rehearse=rehearse)
            if isinstance(outcome, SetUpFirst):
                self.parts.set_up(outcome)
            elif isinstance(outcome, RunsOtherwise):
                self._mode = CaptureMode.EAGER
            elif isinstance(outcome, CaptureError):
                self._mode = CaptureMode.CAPTURED
            elif not self._may_be_faster_as_eager(outcome):
                break
            elif self._is_faster_as_eager(outcome):
                self._mode = CaptureMode.LOOKING
            else:
                self._mode = CaptureMode.CAPTURED
                break
        self.parts.settle()
        return self.prediction

    def _attempt(self, *, rehearse: bool) -> Warmed | SetUpFirst | RunsOtherwise | CaptureError:
        """Warm the call up; what has come of it, if it can be tried in another mode."""
        self.work.begin_anew()
        try:
            return self._warm(rehearse=rehearse)
        except (Busy, Interrupted):
            raise  # Other threads were in the way.
        except (SetUpFirst, RunsOtherwise) as outcome:
            return outcome
        except CaptureError as error:
            if not self._mode.as_eager:
                raise
            let_go(error)
            return error

    def _may_be_faster_as_eager(self, warmed: Warmed) -> bool:
        """Whether what libraries see in eager mode, and not in captures, may make it faster."""
        spec = self.spec
        if self._mode is not CaptureMode.UNDECIDED or not (warmed.looks_in_eager and spec.may_look):
            return False
        return spec.may_divide and self.device.type in as_eager.TRIED_ON

    def _is_faster_as_eager(self, warmed: Warmed) -> bool:
        """Whether segments between what libraries read in eager mode beat one graph."""
        left = None if self.pool.limit is None else self.pool.limit - self.pool.reserved
        if left is not None and left < max(1, sum(warmed.segments)):
            return False
        args, kwargs = self.spec.arguments(self._sample)
        spec = replace(self.spec, fresh=True, may_look=True, trusted=False)
        with MemoryPool(left, device=self.device) as pool:
            make = functools.partial(CapturedCall.of, spec, self._sample, pool, self.work.known)
            return as_eager.is_faster_as_eager(make, args, kwargs, self.device)

    def consider(self, places: Sequence[Written]) -> None:
        """Make sure that the warm call does not read places to which other calls write.

        Raises:
            CaptureError: it does.
        """
        new = [each for each in places if not any(map(each.same_as, self.work.known))]
        if new:
            self.work.known += new
            self.warm()

    def _warm(self, *, rehearse: bool) -> Warmed:
        spec, mode = self.spec, self._mode
        with self._lock:
            recorder = recorder_for(self.pool, spec.device)
            self._warmed = None
            whole = not spec.may_divide or mode is CaptureMode.EAGER
            with (
                self._transaction(GraphState.WARMING) as state,
                answering_as_eager(mode.as_eager),
            ):
                warmed = warm(
                    self.work,
                    self._sample,
                    recorder,
                    state,
                    spec.warmup,
                    None if whole else self._plan_segments,
                    spec.comparison,
                    self._copies,
                    rehearse=rehearse,
                    draws_again=spec.trained is None,
                    may_run_otherwise=mode is not CaptureMode.UNDECIDED,
                    names=spec.names,
                )
            self._warmed = warmed
            self.mutates = warmed.mutates
            self.random = bool(warmed.generators or warmed.draws)
            self._outside = {s.data_ptr() for s in warmed.external if s.nbytes()}
            if self.mutates:
                try:
                    self.check_overlap(self._sample)
                except SignatureError as error:
                    raise CaptureError(error.what, remedy=error.remedy) from error
            return warmed

    def _plan_segments(
        self, generators: Sequence[torch.Generator], draws: Sequence[Draw]
    ) -> tuple[SegmentTree, tuple[int, ...]]:
        """Divide the call into segments; with them, the bytes of each memory segment they take."""
        known = [p for p in self.work.known if not any(map(p.same_as, self.places))]
        tree = SegmentTree(self.spec.module, self.pool, self.device, [*known, *self.places])
        recorder = recorder_for(self.pool, self.device)
        return tree, tree.plan(self.work, self._sample, recorder, generators, draws)

    @property
    def prediction(self) -> MemoryPrediction:
        """The memory that capturing the warm call will take, with the pool as it is now."""
        assert self._warmed is not None
        return predict(self.pool, self._warmed.segments, self._warmed.contributors)

    def record(self, *, share_inputs: bool = False) -> None:
        """Record the warm call in the pool.

        Args:
            share_inputs: let the static inputs share memory with those of the pool's other graphs;
                for callers that fill them before each replay.

        Raises:
            MemoryBudgetExceeded: the graph does not fit under the pool's limit.
            CaptureError: the call cannot be captured.
        """
        try:
            with recording_in(self.pool, self, self.device) as admission:
                try:
                    self._record(admission, share_inputs)
                except (Busy, Interrupted):
                    raise
                except GraphwrightError as error:
                    if not self.looks:
                        raise
                    let_go(error)
                    self._forget()
                    self._mode = CaptureMode.CAPTURED  # One graph does, too.
                    self.warm()
                    self._record(admission, share_inputs)
                self._record_in_place(admission.recorder)
                self._sample = []
                if self._planned is not None:
                    self._planned.drop_script()
                self.work.answers = True
                self.state = GraphState.READY
        except BaseException as error:
            let_go(error)
            raise
        self.parts.warn()

    def _record(self, admission: Admission, share_inputs: bool) -> None:
        """Record the call, if there is room for it."""
        if self.has_effects and not self.spec.fresh:
            raise CaptureError(
                "The call changes or returns objects that it is given, or sets attributes: "
                "these would hold tensors that the next replay overwrites.",
                remedy="Leave outputs='static' out.",
            )
        prediction = self.prediction
        admission.admit(prediction)
        self._record_once(admission.recorder, prediction, share_inputs)
        while not admission.fits():
            self._forget()
            admission.make_room()
            self._record_once(admission.recorder, prediction, share_inputs)

    def _record_once(
        self, recorder: Recorder, prediction: MemoryPrediction, share_inputs: bool
    ) -> None:
        warmed = self._warmed
        assert warmed is not None
        before = recorder.reserved
        recorder.order()  # A replay may still be working in the memory of the inputs.
        with (
            self._transaction(GraphState.CAPTURING),
            generator_kept(warmed.draws),
            answering_as_eager(self._mode.as_eager),
        ):
            allocate = shared_bytes(self.pool) if share_inputs else recorder.allocate
            recorded = record_call(
                self.spec, self._sample, warmed, self.work, recorder, allocate, self._results_of
            )
            self._held = [self.spec.fn, warmed.external]
            self._take(recorded.recording, before, prediction.nbytes)
            self._recorded = recorded
        self._watch = watch = self._new_watch()
        self._explain_reads(warmed.read, watch)
        self._warmed = replace(warmed, read=())
        if classes := classes_in(self.spec.shape):
            self.parts.watch(ModuleWatch(self.spec.module, values=False, given=classes))
        if self.parts.watches or recorded.tree is not None:  # A new path may run others.
            watch.join(self.parts)
        if recorded.tree is not None:
            self._update_from_tree(recorded.tree)
            # A new path may use any of these.
            self._outside = self._outside | {s.data_ptr() for s in watch.memory if s.nbytes()}
        self.work.reach = watch

    def _record_in_place(self, recorder: Recorder) -> None:
        """Record the call once more for the sample's own cache, if it is given one.

        That saves copies, and takes memory: where a pool has a limit it is left out.
        """
        spec, warmed, recorded = self.spec, self._warmed, self._recorded
        assert warmed is not None
        assert recorded is not None
        if not (spec.in_place and spec.fresh) or self._planned or self.pool.limit is not None:
            return
        slots = left_in_place(self._sample, warmed.mutated, self.device)
        if not slots:
            return
        before = self.pool.reserved
        recorder.order()
        with (
            self._transaction(GraphState.CAPTURING),
            generator_kept(warmed.draws),
            answering_as_eager(self._mode.as_eager),
        ):
            own = record_call(
                spec,
                self._sample,
                warmed,
                self.work,
                recorder,
                recorder.allocate,
                self._results_of,
                slots,
            )
        self._recorded = replace(recorded, for_sample=own)
        self._add_growth(before)

    def _results_of(self, tree: Any) -> Any:
        """What the caller is to get, of what the work returned."""
        return tree

    def _new_watch(self) -> ModuleWatch:
        """Begin to watch what the call depends on."""
        unwatched = hidden([*self.places, *carried_by(self.spec.fn)])
        return ModuleWatch(self.spec.module, values=False, hidden=unwatched)

    def explain_reads(self) -> None:
        """After `warm`: raise CaptureError where `record` would for what the call reads."""
        assert self._warmed is not None
        self._explain_reads(self._warmed.read, self._new_watch())
        self._warmed = replace(self._warmed, read=())

    def _explain_reads(self, read: Sequence[OutsideRead], watch: ModuleWatch) -> None:
        """Have what the call reads from outside be watched, as `reads.explain`."""
        if not self.spec.trusted:
            explain(read, watch, self.parts, self.device)

    def _explain_path(self, tree: SegmentTree, read: Sequence[OutsideRead]) -> None:
        """The same for a new path through the segments; give them up where nobody could watch."""
        watch = self._watch
        if not read or watch is None or self.spec.trusted:
            return
        try:
            watched = {storage._cdata for storage in watch.memory}
            explain(read, watch, self.parts, self.device, watched)
        except CaptureError as error:
            let_go(error)
            tree.given_up = CaptureError(error.what, where=error.where, remedy=error.remedy)

    @contextlib.contextmanager
    def _transaction(self, state: GraphState) -> Iterator[PythonState]:
        self.state = state
        spec = self.spec
        # A part that is trained runs as it is.
        joining = self.parts.joining() if spec.trained is None else contextlib.nullcontext()
        try:
            with (
                joining,
                transaction(self.pool, spec.module, self._forget, spec.trained) as python_state,
                self.work.beginning_with(python_state),
            ):
                yield python_state
        finally:
            self.has_effects = self.work.has_effects

    def _forget(self) -> None:
        """Drop what was recorded; the call can be recorded again."""
        recording, self._recording = self._recording, None
        own = None if self._recorded is None else self._recorded.for_sample
        for each in (recording, None if own is None else own.recording):
            if each is not None:
                retire(self.pool, each)
        if self._planned is not None:
            self._planned.forget()
        self._recorded = self._last = self._watch = self.work.reach = None
        self._held = []

    def _retire(self) -> None:
        super()._retire()
        self._forget()
        self._warmed = None
        self._sample = []
        self.parts.let_go()
        self._outside = set()  # These addresses may now belong to other memory.


@dataclass(frozen=True)
class RunResult:
    """Copies of what a run gave.

    Attributes:
        results: leaves of what the call returned.
        arguments: those that it wrote to, by position among the leaves of the arguments.
        outside: memory from outside that it wrote to, with what it left there.
    """

    results: list[Any]
    arguments: dict[int, torch.Tensor]
    outside: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]

    def same_as(self, other: RunResult) -> bool:
        """Whether another run gave the same bits."""
        mine, its = (
            [r for r in (*run.results, *run.arguments.values()) if isinstance(r, torch.Tensor)]
            for run in (self, other)
        )
        left, found = ([_bytes(after) for _, after in run.outside] for run in (self, other))
        return all(map(same_bits, mine, its)) and all(map(torch.equal, left, found))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _ordinary(device: torch.device, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def put_back(storages: Sequence[torch.UntypedStorage]) -> Iterator[None]:
    """Put back what the block writes to some memory."""
    kept = [(storage, storage.clone()) for storage in storages]
    try:
        yield
    finally:
        for storage, before in kept:
            storage.copy_(before)


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Put the default random generators back after the block."""
    states = [(g, g.get_state()) for g in default_generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            put_state(generator, state)
