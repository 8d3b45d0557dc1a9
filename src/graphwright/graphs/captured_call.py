"""CapturedCall, the graph of one call: checked, warmed up, recorded, and replayed for other values.

The functions at the end tell a call's name, signature and device before anything runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.binding import sees_order
from ..calls.modes import OperationMode, compilers_off, opaque
from ..calls.modules import FunctionModule, first_in_training
from ..calls.objects import classes_in, giving, has_objects
from ..calls.operations import default_generators
from ..calls.options import callable_problem, choice_problem, count_problem, refuse
from ..calls.places import Place, carried_by, hidden
from ..calls.signature import CallSignature
from ..calls.snapshots import clone_leaves, same_bits
from ..calls.split import (
    Args,
    Kwargs,
    Split,
    argument_names,
    flatten,
    objects_of,
    objects_tree,
    tensors_of,
    unflatten,
)
from ..calls.watch import ModuleWatch
from ..calls.weights import refuse_weights
from ..errors import CaptureError, GraphwrightError, SignatureError
from . import as_eager
from .composition import Parts, SetUpFirst
from .conditions import THREAD, answering_as_eager, autocast_cache_apart
from .effects import GivenObjects, Outcome, Unrepeatable
from .graph import Graph, GraphClosed, GraphState, with_operations
from .host_draws import Draw, DrawingRecording, generator_kept
from .inspection.node import Node
from .inspection.origins import Observer, Origins, observing
from .journal import Copies, Journal
from .marks import mark, wanted
from .memory import MemoryPool, MemoryPrediction, pool_of_one_graph, pool_problem
from .python_state import PythonState
from .random_state import put_state
from .reads import explain
from .recorder import Interrupted, Recorder, Recording
from .segments.explanation import describe_tree
from .segments.tracer import Untraceable
from .segments.tree import CopyPlan, SegmentTree
from .static_tensors import Finish, Geometry, StaticInputs, StaticOutputs, byte_view, copy
from .transaction import let_go, transaction
from .turns import Busy
from .warmup import Comparison, RunsOtherwise, Warmed, warm

Outputs = Literal["fresh", "static"]
Breaks = Literal["auto", "never"]


class CapturedCall(Graph):
    """The graph of a function's call, or several where it is divided into segments."""

    _tree: SegmentTree | None = None
    # Whether a call ran eagerly because its segments were given up.
    was_eager = False
    # Parameters whose gradients the call sets; None for inference.
    _trained: Sequence[torch.Tensor] | None = None
    # How warm-up compares results, and where it keeps copies of what the call changes.
    _comparison: Comparison | None = None
    _copies: Copies | None = None
    # Whether a call changes or returns objects that it was given.
    has_effects = False
    # Whether libraries are told that nothing is captured, so that the graph runs what eager code
    # runs; None until that is known.
    _as_eager: bool | None = None
    # True if the call was split into segments only because the host reads a value here.
    looks = False

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
        places: Sequence[Place] = (),
        streams: int = 1,
        may_look: bool = True,
        trusted: bool = False,
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
        self._module = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
        self._takes_objects = objects
        self.signature = signature_of(args, kwargs, self._module, objects=objects)
        self._sample, self._spec = flatten(args, kwargs, objects=objects)
        # Fused and tuned modules inside of it, which run what they were made into.
        self.parts = Parts()
        super().__init__(
            pool_of_one_graph() if pool is None else pool,
            name_of(fn, self._sample),
            evictable=evictable,
        )
        self._fn = fn
        self._fresh = outputs == "fresh"
        self._runs = warmup
        self._device = device_of(args, kwargs, self._module, self.pool)
        self._names = argument_names(args, kwargs, objects=objects)
        self._warmed: Warmed | None = None
        self._inputs: StaticInputs | None = None
        self._results: StaticOutputs | None = None
        self._watch: ModuleWatch | None = None
        self._breaks = breaks
        self._streams = streams
        self._may_look = may_look
        self._trusted = trusted
        # Without keyword arguments and containers, the leaves are the arguments themselves.
        # Attributes and items outside of it that each run writes to, once they are known; those
        # that it may write to; and what the module holds.
        self.places: list[Place] = []
        self._known = list(places)
        self._candidates: list[Place] = []
        self._owned: list[Any] = []
        self._plain_args = (
            not kwargs
            and len(args) == len(self._sample)
            and all(a is b for a, b in zip(args, self._sample, strict=True))
        )
        # Whether there is anything among the arguments that a call may change in place.
        self._holds_objects = bool(objects_of(args, kwargs))
        # The objects that the last run was given.
        self._given: GivenObjects | None = None
        # Addresses of memory that the call uses by itself.
        self._outside: set[int] = set()
        self._tree_outside = -1
        # Positions of the arguments that are copied in, and of those that are copied back: as
        # bytes, or element by element. A simple call has only the first kind.
        self._sources: list[int] = []
        self._by_element: list[int] = []
        self._back: list[int] = []
        self._back_by_element: list[int] = []
        self._simple = False
        # Whether arguments are on the host and the call runs on another device.
        self._sends = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function or module that was captured."""
        return self._fn

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The static inputs, in the order of the arguments: what `replay()` reads.

        In a shared pool, no other graph may replay between filling them and reading `outputs`: it
        may use the same memory.
        """
        self._ready()
        assert self._inputs is not None
        return tuple(self._inputs.tensor(slot) for slot in self._inputs.slots)

    @property
    def outputs(self) -> Any:
        """What the function returned, in the graph's memory: the next replay overwrites it."""
        self._ready()
        if self._results is None:
            raise CaptureError(
                f"{self.name} is in segments, whose results depend on the path that a call takes.",
                remedy="Call the graph instead.",
            )
        if self.has_effects:
            raise CaptureError(
                f"{self.name} changes or returns objects that it is given, or sets attributes.",
                remedy="Call the graph instead: a replay alone does none of this.",
            )
        return self._results.again()

    @property
    def tree(self) -> SegmentTree | None:
        """The call's segments, if it is divided into several; else None."""
        return self._tree if self._results is None else None

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
        by = Observer(Origins(self._module))
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
            if self._tree is not None:
                twin.warm()
            with observing(by):
                twin.record()
            yield twin

    @contextlib.contextmanager
    def _twin(self, leaves: Sequence[Any] | None) -> Iterator[CapturedCall]:
        """The same call, warmed up and yet to be recorded, with a memory pool of its own."""
        self._ready()
        assert self._inputs is not None
        if self._trained is not None:
            raise CaptureError("A training step is not recorded again.")
        twin = CapturedCall.__new__(CapturedCall)
        twin.__dict__.update(self.__dict__)
        twin.pool = pool_of_one_graph(self._device)
        twin.state, twin._evictable = GraphState.WARMING, False
        twin._recording = twin._inputs = twin._results = twin._watch = twin._tree = None
        twin._held, twin._origins, twin._given = [], None, None
        twin._trusted = True  # What it reads is watched by now.
        twin.parts = Parts()
        twin.parts.settle()
        twin._known, twin._candidates = [*self._known], [*self._candidates]
        twin.places = [*self.places]
        # What runs works on copies of them.
        twin._sample = [*(self._inputs.leaves if leaves is None else leaves)]
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
            recorder = twin.pool._recorder_for(self._device)
            inputs = StaticInputs(twin._sample, functools.partial(_ordinary, self._device))
            journal = Journal()
            with twin._transaction(GraphState.WARMING):
                try:
                    with (
                        recorder.warming(pretend=pretend),
                        compilers_off(),
                        journal,
                        contextlib.nullcontext() if under is None else under,
                    ):
                        tree = twin._work(inputs)
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
        with self.pool._lock, torch.no_grad():
            recording = self._ready()
            assert self._inputs is not None
            if self.tree is not None:
                copies = clone_leaves(leaves)
                made = self.run_leaves(copies)
                results = [_kept(leaf) for leaf in pytree.tree_leaves(made)]
                return RunResult(results, {s: _kept(copies[s]) for s in self.written}, [])
            assert self._results is not None
            recording.order()
            with put_back(outside), _generators_kept(self._device):
                self._inputs.fill(leaves)
                recording.replay()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # Its errors are raised here.
                return RunResult(
                    [_kept(leaf) for leaf in self._results.again_leaves()],
                    {slot: _kept(self._inputs.tensor(slot)) for slot in self.written},
                    [(storage, storage.clone()) for storage in outside],
                )

    def replay_sample(self) -> None:
        """Replay on what the static inputs hold; what that changes outside is put back."""
        with self.pool._lock, torch.no_grad():
            recording, warmed = self._ready(), self._warmed
            assert warmed is not None
            recording.order()
            outside = [s for s in warmed.external if s._cdata in warmed.announced]
            with put_back(outside), _generators_kept(self._device):
                recording.replay()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)

    def describe_segments(self) -> list[str]:
        """Lines on the call's segments, breaks and hoisted constants; none for a plain graph."""
        root = None if self._tree is None else self._tree.root
        return [] if root is None else describe_tree(root)

    @property
    def divided(self) -> str:
        """How it answers calls, in words."""
        return "in one graph" if self._tree is None else "in segments"

    @property
    def may_not_pay(self) -> bool:
        """Whether eager code may be faster: it waits for values, or looks at them to do less."""
        skips = self._warmed is not None and self._warmed.looks_in_eager and not self._may_look
        return skips or self._tree is not None

    @property
    def given_up(self) -> CaptureError | None:
        """Why calls now run eagerly, if they do."""
        return None if self._tree is None else self._tree.given_up

    def replay(self) -> None:
        """As `Graph.replay`, for a graph that is not in segments."""
        if self.state is GraphState.READY:
            _ = self.outputs
        super().replay()

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
        watch = self._watch
        if watch is None:
            self._ready()  # Another thread has just closed it.
        assert watch is not None
        if self.mutates or self.random or self.has_effects or self._results is None:
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
            split = (
                Split(args, ()) if self._plain_args else self.signature.taken_apart(args, kwargs)
            )
        several = self._holds_objects and self._results is None
        if not (self.has_effects or several or self.signature.has_objects):
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
        if self.mutates or self._results is None:
            self.check_overlap(leaves)
            if self._tree is not None and self._results is None:
                return self._run_segments(self._tree, leaves, call, finish)
        with self.pool._lock:
            recording, results = self._recording, self._results
            if recording is None or results is None or THREAD.depth:
                self._ready()  # Says what is wrong.
            assert recording is not None
            assert results is not None
            recording.order()
            targets = [torch.empty_like(base) for base in results.bases] if self._fresh else []
            if self._sends:
                assert self._inputs is not None
                self._inputs.send(leaves)
            if self._simple:
                recording.run([leaves[slot] for slot in self._sources], targets)
            else:
                self._run_with_copies(recording, leaves, targets)
        if not self._fresh:
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
        with self.pool._lock:
            self._ready().order()
            tree.check_frozen()
            if tree.given_up is None:
                # Draws on the host are put back where a call is given up.
                pure = not (self.mutates or tree.generators)
                try:
                    marked = mark(self.name) if wanted() else contextlib.nullcontext()
                    told = answering_as_eager(bool(self._as_eager))
                    with self.parts.joining(), marked, told:
                        made = tree.answer(
                            leaves,
                            finish,
                            self._work,
                            functools.partial(self.pool._evict_one, self),
                            self._effects_so_far,
                            self._has_moved,
                        )
                except Untraceable:
                    if not pure:
                        raise
                else:
                    self._update_from_tree(tree)
                    if tree.went_on and isinstance(made, Outcome):
                        made.counted = [(p, p.value()) for p in self.places if p.counts]
                    return made
        self.was_eager = True
        args, kwargs = unflatten(leaves, self._spec) if call is None else call
        with torch.no_grad():
            results = self._fn(*args, **kwargs)
        if finish is None:
            return results
        made, spec = pytree.tree_flatten(results)
        return pytree.tree_unflatten(finish(made), spec)

    def _has_moved(self) -> bool:
        """Whether what the call depends on is no longer what it was captured with."""
        return self._watch is not None and self._watch.changed() is not None

    def _update_from_tree(self, tree: SegmentTree) -> None:
        """Take over what a new path through the segments may need."""
        if tree.read:
            self._explain_path(tree)
        self.mutates = self.mutates or tree.mutates
        self.random = self.random or tree.random
        if len(tree.external) != self._tree_outside:
            self._tree_outside = len(tree.external)
            self._outside |= {s.data_ptr() for s in tree.external.values() if s.nbytes()}

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

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the arguments' leaves that a call writes to."""
        return () if self._warmed is None else self._warmed.mutated

    def launcher(self) -> Callable[[Sequence[torch.Tensor]], Any] | None:
        """`run` as one fast function of positional arguments; None where the call is not simple.

        The function raises GraphClosed once the graph is no longer ready.
        """
        if not (self._simple and self._fresh) or self._results is None or self.has_effects:
            return None
        # The function holds none of the graph's memory: the graph may be closed at any time.
        lock, slots, single = self.pool._lock, tuple(self._sources), self._results.single
        everything = slots == tuple(range(len(self.signature.leaves)))
        empty_like, thread, sends = torch.empty_like, THREAD, self._sends

        def launch(args: Sequence[torch.Tensor]) -> Any:
            with lock:
                recording, results = self._recording, self._results
                if recording is None or results is None or thread.depth:
                    raise GraphClosed("The graph was closed meanwhile.")
                recording.order()
                if sends and self._inputs is not None:
                    self._inputs.send(args)
                sources = args if everything else [args[slot] for slot in slots]
                if single:
                    target = empty_like(results.bases[0])
                    recording.run(sources, (target,))
                    return target
                targets = [empty_like(base) for base in results.bases]
                recording.run(sources, targets)
                return results.build(args, targets)

        return launch

    def _run_with_copies(
        self, recording: Recording, leaves: Sequence[Any], targets: list[torch.Tensor]
    ) -> None:
        assert self._inputs is not None
        with torch.no_grad():
            for slot in self._by_element:
                copy(leaves[slot], self._inputs.tensor(slot))
            recording.run(
                [leaves[slot] for slot in self._sources],
                [*targets, *(leaves[slot] for slot in self._back)],
            )
            # Autograd has not seen these writes: what it saved for a backward is stale.
            torch.autograd.graph.increment_version([leaves[slot] for slot in self._back])
            for slot in self._back_by_element:
                copy(self._inputs.tensor(slot), leaves[slot])

    def warm(self, *, rehearse: bool = True) -> MemoryPrediction:
        """Run the call until it is warm, and predict what capturing it will take.

        Args:
            rehearse: whether to rehearse the recording; without it nothing is predicted.

        Raises:
            CaptureError: it cannot be captured.
        """
        while True:
            self._candidates[:], self.places[:] = self._known, []
            try:
                prediction = self._warm(rehearse=rehearse)
            except SetUpFirst as first:
                self.parts.set_up(first)
                continue
            except RunsOtherwise:
                self._as_eager = True
                continue
            except (Busy, Interrupted):
                raise  # Other threads were in the way.
            except CaptureError as error:
                if not self._as_eager:
                    raise
                self._as_eager = self.looks = False
                let_go(error)
                continue
            if not self._may_be_faster_as_eager():
                break
            self._as_eager = self.looks = self._is_faster_as_eager()
            if not self.looks:
                break
        self.parts.settle()
        return prediction

    def _may_be_faster_as_eager(self) -> bool:
        """Whether what libraries see in eager mode, and not in captures, may make it faster."""
        assert self._warmed is not None
        if self._as_eager is not None or not self._warmed.looks_in_eager or not self._may_look:
            return False
        return self._breaks == "auto" and self._device.type in as_eager.TRIED_ON

    def _is_faster_as_eager(self) -> bool:
        """Whether segments between what libraries read in eager mode beat one graph."""
        assert self._warmed is not None
        left = None if self.pool.limit is None else self.pool.limit - self.pool.reserved
        if left is not None and left < max(1, sum(self._warmed.segments)):
            return False
        args, kwargs = unflatten(self._sample, self._spec)
        with MemoryPool(left, device=self._device) as pool:

            def make(in_segments: bool) -> CapturedCall:
                made = CapturedCall(
                    self._fn,
                    args,
                    kwargs,
                    pool=pool,
                    warmup=self._runs,
                    breaks=self._breaks,
                    objects=self._takes_objects,
                    places=self._known,
                    streams=self._streams,
                )
                made._as_eager = made.looks = in_segments
                return made

            return as_eager.is_faster_as_eager(make, args, kwargs, self._device)

    def consider(self, places: Sequence[Place]) -> None:
        """Make sure that the warm call does not read places to which other calls write.

        Raises:
            CaptureError: it does.
        """
        new = [each for each in places if not any(each.same_as(known) for known in self._known)]
        if new:
            self._known += new
            self.warm()

    def _warm(self, *, rehearse: bool) -> MemoryPrediction:
        with self.pool._lock:
            recorder = self.pool._recorder_for(self._device)
            self._tree = None
            with self._transaction(GraphState.WARMING) as state:
                whole = self._breaks == "never" or (self._as_eager and not self.looks)
                fallback = None if whole else self._plan_segments
                with answering_as_eager(bool(self._as_eager)):
                    self._warmed = warm(
                        self._work,
                        self._sample,
                        recorder,
                        state,
                        self._runs,
                        fallback,
                        self._comparison,
                        self._copies,
                        rehearse=rehearse,
                        draws_again=self._trained is None,
                        may_run_otherwise=self._as_eager is not None,
                        names=self._names,
                    )
            self.mutates = self._warmed.mutates
            self.random = bool(self._warmed.generators or self._warmed.draws)
            self._outside = {s.data_ptr() for s in self._warmed.external if s.nbytes()}
            if self.mutates:
                try:
                    self.check_overlap(self._sample)
                except SignatureError as error:
                    raise CaptureError(error.what, remedy=error.remedy) from error
            return self.prediction

    def _plan_segments(
        self, generators: Sequence[torch.Generator], draws: Sequence[Draw]
    ) -> tuple[int, ...]:
        """Divide the call into segments; returns the bytes of each memory segment these take."""
        known = [place for place in self._known if not any(map(place.same_as, self.places))]
        tree = SegmentTree(self._module, self.pool, self._device, [*known, *self.places])
        recorder = self.pool._recorder_for(self._device)
        taken = tree.plan(self._work, self._sample, recorder, generators, draws)
        self._tree = tree
        return taken

    @property
    def prediction(self) -> MemoryPrediction:
        """The memory that capturing the warm call will take, with the pool as it is now."""
        assert self._warmed is not None
        segments = self._warmed.segments
        return MemoryPrediction(self.pool._predicted(segments), segments, self._warmed.contributors)

    def record(self, *, share_inputs: bool = False) -> None:
        """Record the warm call in the pool.

        Args:
            share_inputs: let the static inputs share memory with those of the pool's other graphs;
                for callers that fill them before each replay.

        Raises:
            MemoryBudgetExceeded: the graph does not fit under the pool's limit.
            CaptureError: the call cannot be captured.
        """
        with self.pool._lock:
            try:
                try:
                    self._admit_and_record(share_inputs)
                except (Busy, Interrupted):
                    raise
                except GraphwrightError as error:
                    if not self.looks:
                        raise
                    let_go(error)
                    self._forget()
                    self.pool._sweep()
                    self._as_eager = self.looks = False  # One graph does, too.
                    self.warm()
                    self._admit_and_record(share_inputs)
            except BaseException as error:
                self._retire()
                let_go(error)
                self.pool._sweep()
                raise
            self._sample = []
            if self._tree is not None:
                self._tree.drop_script()
            self.state = GraphState.READY
            self.pool._add(self)
        self.parts.warn()

    def _admit_and_record(self, share_inputs: bool) -> None:
        """Make room for the graph, and record it."""
        prediction = self.prediction
        if self.has_effects and not self._fresh:
            raise CaptureError(
                "The call changes or returns objects that it is given, or sets attributes: "
                "these would hold tensors that the next replay overwrites.",
                remedy="Leave outputs='static' out.",
            )
        self.pool._admit(self, prediction)
        held = self.pool.reserved
        self._record(prediction, share_inputs)
        while self.pool._over_limit(held):
            # The prediction was too low: it knows nothing of fragmentation.
            self._forget()
            self.pool._sweep()
            if not self.pool._evict_one(self):
                raise self.pool._exceeded(self, prediction)
            self._record(prediction, share_inputs)

    def _record(self, prediction: MemoryPrediction, share_inputs: bool) -> None:
        recorder = self.pool._recorder_for(self._device)
        warmed = self._warmed
        assert warmed is not None
        before = recorder.reserved
        recorder.order()  # A replay may still be working in the memory of the inputs.
        with (
            self._transaction(GraphState.CAPTURING),
            generator_kept(warmed.draws),
            answering_as_eager(bool(self._as_eager)),
        ):
            allocate = self.pool._shared_bytes() if share_inputs else recorder.allocate
            inputs = StaticInputs(self._sample, allocate)
            self._back = inputs.back(warmed.mutated) if self._fresh else []
            self._back_by_element = [s for s in warmed.mutated if s not in self._back]
            self._sources, self._by_element = inputs.sources, inputs.by_element
            self._sends = bool(inputs.hosts)
            self._simple = not (self._by_element or warmed.mutated)
            # No closures: an error's traceback would keep what they refer to alive.
            if self._tree is None:
                recording = recorder.record(
                    functools.partial(self._work, inputs),
                    [byte_view(inputs.tensor(slot)) for slot in self._sources],
                    functools.partial(self._drains, inputs),
                    warmed.generators,
                    self._streams,
                )
            else:
                recording = self._record_segments(self._tree, inputs, recorder)
            if warmed.draws and self._results is not None:
                recording = DrawingRecording(recording, warmed.draws)
            self._inputs = inputs
            self._held = [self._fn, warmed.external]
            self._set_recording(recording, before, prediction.nbytes)
        self._watch = self._new_watch()
        self._explain_reads(self._watch)
        if classes := classes_in(self._spec):
            self.parts.watch(ModuleWatch(self._module, values=False, given=classes))
        if self.parts.watches or self._results is None:  # A new path may run others.
            self._watch.join(self.parts)
        if self._results is None:
            # A new path may use any of these.
            self._outside |= {s.data_ptr() for s in self._watch.memory if s.nbytes()}

    def _new_watch(self) -> ModuleWatch:
        """Begin to watch what the call depends on."""
        unwatched = hidden([*self.places, *carried_by(self._fn)])
        return ModuleWatch(self._module, values=False, hidden=unwatched)

    def explain_reads(self) -> None:
        """After `warm`: raise CaptureError where `record` would for what the call reads."""
        self._explain_reads(self._new_watch())

    def _explain_reads(self, watch: ModuleWatch) -> None:
        """Have what the call reads from outside be watched, as `reads.explain`."""
        assert self._warmed is not None
        if not self._trusted:
            explain(self._warmed.read, watch, self.parts, self._device)
        self._warmed.read.clear()

    def _explain_path(self, tree: SegmentTree) -> None:
        """The same for a new path through the segments; give them up where nobody could watch."""
        read, tree.read = tree.read, []
        watched = {storage._cdata for storage in self._watch.memory} if self._watch else set()
        try:
            if self._watch is not None and not self._trusted:
                explain(read, self._watch, self.parts, self._device, watched)
        except CaptureError as error:
            let_go(error)
            tree.given_up = CaptureError(error.what, where=error.where, remedy=error.remedy)

    def _record_segments(
        self, tree: SegmentTree, inputs: StaticInputs, recorder: Recorder
    ) -> Recording:
        """Record the call in segments; a single one without a break is a plain graph."""
        assert self._warmed is not None
        plan = CopyPlan(self._sources, self._by_element, self._fresh)
        root = tree.record(self._work, inputs, plan, self._warmed.mutated, recorder)
        if root.break_ is None and not root.sources and not tree.frozen:
            self._results = root.results
        self._update_from_tree(tree)
        assert root.recording is not None
        return root.recording

    def _drains(self, inputs: StaticInputs, tree: Any) -> list[torch.Tensor]:
        """The memory that is copied out after each replay, as bytes."""
        assert self._warmed is not None
        external = {storage._cdata for storage in self._warmed.external}
        self._results = StaticOutputs(tree, inputs, external)
        back = [inputs.tensor(slot) for slot in self._back]
        return [byte_view(t) for t in (*self._results.bases, *back)] if self._fresh else []

    def _work(self, inputs: StaticInputs) -> Any:
        """Run the call on static inputs; lazily conjugated or negated results are materialized."""
        args, kwargs = unflatten(inputs.leaves, self._spec)
        given = GivenObjects(objects_tree(args, kwargs)) if self._holds_objects else None
        self._given = given
        addresses = [inputs.tensor(slot).data_ptr() for slot in inputs.slots]
        with autocast_cache_apart():
            result = self._fn(*args, **kwargs)
            self._refuse_changed_inputs(inputs, addresses)
            tree = self._outcome(given, result)
            return pytree.tree_map_only(torch.Tensor, resolved, tree)

    def _effects_so_far(self) -> Any:
        """What the last run has done to the objects it was given; None if it did nothing."""
        given = self._given
        if given is not None and self._takes_objects:
            with contextlib.suppress(Unrepeatable, SignatureError):
                tree, effects = given.outcome(None)
                return pytree.tree_map_only(torch.Tensor, resolved, tree) if effects else None
        return None

    def _refuse_changed_inputs(self, inputs: StaticInputs, addresses: Sequence[int]) -> None:
        """Refuse a call that gives an argument's tensor another shape or other memory."""
        for leaf, geometry in zip(inputs.leaves, inputs.geometries, strict=True):
            if isinstance(leaf, torch.Tensor) and Geometry.of(leaf) != geometry:
                break
        else:
            if addresses == [inputs.tensor(slot).data_ptr() for slot in inputs.slots]:
                return
        raise Untraceable(
            "The call changes the shape or memory of a tensor that it is given; a graph would not.",
            remedy="Return what is new instead.",
        )

    def _outcome(self, given: GivenObjects | None, result: Any) -> Any:
        """What the call returned, taken apart, with what it did to the objects it was given."""
        places = self.places
        if given is None and not (places or has_objects(pytree.tree_leaves(result))):
            return result
        given = GivenObjects(()) if given is None else given
        try:
            if self._takes_objects:
                owned = self._owned
                if not owned and self._watch is not None:  # On a new path.
                    owned = self._watch.objects
                tree, effects = given.outcome(result, places, owned)
                if effects and self.state is GraphState.READY and not self._fresh:
                    raise Unrepeatable("and outputs='static' would leave what is overwritten in it")
                self.has_effects = self.has_effects or effects
                return tree
            if given.changes()[0]:
                raise Unrepeatable("whose length or values then differ")
        except Unrepeatable as error:
            raise Untraceable(
                f"The call changes a container that it is given, {error}; a graph would not.",
                remedy="Return what is new instead, or capture a function that passes copies, "
                "such as `lambda features: model(dict(features))`.",
            ) from error
        return result

    @contextlib.contextmanager
    def _transaction(self, state: GraphState) -> Iterator[PythonState]:
        self.state = state
        # A part that is trained runs as it is.
        joining = self.parts.joining() if self._trained is None else contextlib.nullcontext()
        with (
            joining,
            transaction(self.pool, self._module, self._forget, self._trained) as python_state,
        ):
            if self._takes_objects and self._trained is None:
                python_state.allow_writes(self._candidates, self.places)
                self._owned = python_state.objects
            try:
                yield python_state
            finally:
                self._owned, self._given = [], None

    def _forget(self) -> None:
        """Drop what was recorded; the call can be recorded again."""
        recording, self._recording = self._recording, None
        if recording is not None:
            self.pool._retire(recording)
        if self._tree is not None:
            self._tree.forget()
        self._inputs = self._results = self._watch = None
        self._held = []

    def _retire(self) -> None:
        super()._retire()
        self._forget()
        self._warmed = None
        self._tree = None
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


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, materialized if it is lazily conjugated or negated."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if lazy else tensor


def name_of(fn: Callable[..., Any], leaves: Sequence[Any]) -> str:
    """The name of a graph: its function, with the shapes of the arguments."""
    own = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
    shapes = [
        "×".join(map(str, leaf.shape)) or "()" for leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    return f"{own}({', '.join(shapes)})"


def signature_of(
    args: Args, kwargs: Kwargs, module: nn.Module, *, objects: bool = False
) -> CallSignature:
    """The call's signature; refuse weights that no graph can hold, and calls for training."""
    try:
        any_order = len(kwargs) > 1 and not sees_order(module)
        signature = CallSignature.of(args, kwargs, objects=objects, any_order=any_order, lasts=True)
        refuse_weights(module)
    except SignatureError as error:
        raise CaptureError(error.what, where=error.where, remedy=error.remedy) from error
    if torch.is_grad_enabled():
        training = first_in_training(module)
        if signature.wants_grad or training is not None:
            what = (
                "An argument requires grad"
                if training is None
                else f"{type(training).__name__} is in training mode while gradients are on"
            )
            raise CaptureError(
                f"{what}; a captured call gives no gradients.",
                remedy="Call eval(), or capture under torch.no_grad().",
            )
    return signature


def device_of(args: Args, kwargs: Kwargs, module: nn.Module, pool: MemoryPool) -> torch.device:
    """The device of a call: its tensors', else the module's, else the pool's, else the default.

    Tensors on the host may be among those on a GPU, or given to a module that is there.

    Raises:
        CaptureError: the arguments are on several devices beside the host.
    """
    found = {tensor.device: None for tensor in tensors_of((args, dict(kwargs)))}
    on_host = [device for device in found if device.type == "cpu"]
    if len(found) - len(on_host) > 1:
        names = argument_names(args, kwargs, objects=True)
        leaves, _ = flatten(args, kwargs, objects=True)
        each = [
            f"{name} on {leaf.device}"
            for name, leaf in zip(names, leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        raise CaptureError(
            f"The arguments are on several devices: {', '.join(each)}.",
            remedy="Move them to one device.",
        )
    for tensor in (*module.parameters(), *module.buffers()):
        found.setdefault(tensor.device)
    on_device = (device for device in found if device.type != "cpu")
    device = next(on_device, next(iter(found), pool.device))
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
