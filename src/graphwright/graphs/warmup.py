"""Warm-up: run a call until it is warm, and find out what a graph of it needs.

The first runs are seen operation by operation: one as plain eager code, one while
torch.cuda.is_current_stream_capturing() returns True. Libraries call that and may skip what would
read the device, so the results of both are compared: they may differ by rounding only. Where eager
code reads nothing, and libraries run something else in captures for nothing, the call can be warmed
up and captured as eager runs it (`RunsOtherwise`). The last run is a rehearsal: it runs under the
conditions of a capture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.modes import compilers_off
from ..calls.objects import apart
from ..calls.operations import tensors
from ..calls.places import MISSING, Place, kind_of
from ..errors import CaptureError, first_line, user_frame
from .comparison import Comparison, WithoutDropout, check_same_result, rounding_of
from .conditions import questions
from .host_draws import OTHER_SEED, Draw, UsesOf, generator_kept, is_foreign
from .journal import Copies, Journal, seeded_on_gpu
from .python_state import PythonState, StateChanges
from .random_state import put_seed, put_state
from .reads import Read, Reads
from .recorder import Allocate, Recorder
from .segments.tree import SegmentTree
from .static_tensors import StaticInputs, hosts_among
from .transaction import let_go

_ON_DEVICE = (
    "Pass it on the device, and let the call compute with it there; or pass its values as plain "
    "numbers, each of which gets a graph of its own."
)

# Divides a call into segments; with them, the bytes of each memory segment that they take.
Fallback = Callable[
    [Sequence[torch.Generator], Sequence[Draw]], tuple[SegmentTree, tuple[int, ...]]
]


class RunsOtherwise(BaseException):
    """A call runs other operations in a capture than in eager mode, which reads nothing either.

    transformers makes attention masks there that it leaves out in eager mode, and slower kernels of
    attention with them. Not an Exception: it is no error, and nobody is to take it for one.
    """


@dataclass(frozen=True)
class Warmed:
    """What warm-up has found out about a call.

    Attributes:
        mutated: positions of the arguments' leaves that the call writes to.
        mutates: whether it writes to these or to anything else from outside.
        generators: random generators that a graph of it draws from.
        draws: what it draws on the host beside the graph, and each replay has to draw again.
        external: memory from outside that it uses, mostly weights.
        announced: storages among these whose tensors get a new version from autograd, by identity.
        segments: bytes of each memory segment that it would take in an empty pool.
        contributors: its largest tensors, as (what, bytes).
        looks_in_eager: whether libraries read values in eager mode and run fewer operations then,
            but read none in a capture.
        read: what operations took from outside; only until it is known who watches it.
        tree: the segments that the call was divided into; None for one graph.
    """

    mutated: tuple[int, ...]
    mutates: bool
    generators: tuple[torch.Generator, ...]
    draws: tuple[Draw, ...]
    external: tuple[torch.UntypedStorage, ...]
    announced: frozenset[int]
    segments: tuple[int, ...]
    contributors: tuple[tuple[str, int], ...]
    looks_in_eager: bool = False
    read: Sequence[Read] = ()
    tree: SegmentTree | None = None


def warm(
    work: Callable[[StaticInputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    python_state: PythonState,
    runs: int,
    fallback: Fallback | None = None,
    comparison: Comparison | None = None,
    copies: Copies | None = None,
    *,
    rehearse: bool = True,
    draws_again: bool = False,
    may_run_otherwise: bool = True,
    names: Sequence[str] = (),
) -> Warmed:
    """Run a call on copies of a sample until it is warm; what it writes is put back.

    Args:
        work: runs the call on static inputs.
        sample: the leaves of its arguments.
        recorder: what will record it.
        python_state: the Python side of its state.
        runs: how often to run it unobserved, between the observed runs and the rehearsal.
        fallback: tried where the call cannot be recorded as it is.
        comparison: how its results are compared with eager's.
        copies: copies of memory from outside, shared with other runs that start from it.
        rehearse: whether to rehearse the recording; without it nothing is known of its segments.
        draws_again: whether each replay makes again what the call draws on the host and does not
            use.
        may_run_otherwise: whether it may run other operations in a capture than in eager mode
            although these read nothing from the device.
        names: of the arguments' leaves.

    Raises:
        RunsOtherwise: it does so, and must not.
        CaptureError: the call keeps state that a graph cannot update.
        Exception: whatever the work raises.
    """
    allocate = _ordinary_allocator(recorder.device)
    comparison = Comparison() if comparison is None else comparison
    trial = _ObservedRuns(work, sample, recorder, python_state, comparison, copies)
    eager, first, set_up, written_eagerly = trial.eager_on_device(names)
    hosts = {k: s for k, s in first.external.items() if s.device != recorder.device}
    _refuse_caught(first)
    made, first_draws, used = first.made_storages, first.draws, first.external
    as_eager = None if first.reads or may_run_otherwise else first.sequence
    read_in = first.count if first.reads else None
    del first
    inputs = StaticInputs(sample, allocate)
    journal = Journal(copies)
    journal.reads_of = reads = Reads(python_state.reaches)
    put_back, before = False, questions()
    try:
        with recorder.warming(), compilers_off(), journal:
            result = run_in_pretended_capture(work, inputs)
        told = questions() > before
        _refuse_caught(journal)
        python_state.check(read=frozenset(journal.external))
        _refuse_first_run_setup(set_up, journal.written)
        mutated = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
        if mutated != written_eagerly:
            raise CaptureError(
                "The call writes to other arguments when it runs as eager code than when it is "
                "told that a capture is under way."
                if told
                else "The call writes to other arguments in its second run than in its first.",
                remedy="Let each run write to the same arguments, or to none.",
            )
        if not told:  # Else it may well have gone another way.
            reads.compare(used, made)
        read = reads.left([inputs.tensor(slot) for slot in inputs.slots])
        del used, reads
        journal.reads_of = None
        if journal.continues_from(made):
            raise StateChanges(
                "The call makes a tensor in its first run that later runs change; a graph would "
                "go on from what the runs here have left in it.",
                remedy="Make it before the capture, and give it its first value there.",
            )
        journal.drop_unused_generators()
        for tensor in tensors(result):
            journal.read(tensor)  # It may be a weight that no operation has touched.
        repeatable = draws_again and first_draws.made == journal.draws.made
        python_state.refuse_host_randomness(
            recorder.device,
            journal.generators,
            [first_draws, journal.draws] if repeatable else [],
        )
        generators = [g for g in journal.generators if not is_foreign(g, recorder.device)]
        draws = journal.draws.to_repeat(recorder.device)
        if fallback is None and recorder.device.type != "cpu":
            _refuse_writes_on_host(journal.written)
        try:
            comparison.check(result, eager, journal.dtypes)
        except CaptureError as error:
            counter = next((place.name for place in python_state.places if place.counts), None)
            if counter is not None:
                raise StateChanges(
                    f"{counter} changes with every call, and a graph repeats no Python.",
                    remedy="Compute with a tensor in its place, or pass it in.",
                ) from error
            if not generators:
                raise
            journal.undo()
            trial.compare_without_dropout()
        else:
            if python_state.places:
                journal.undo()
                trial.find_written(python_state.places, eager, generators)
                python_state.settle()
        finally:
            del result
        # What draws random numbers may do so by a seed of the host unless it is captured.
        if told and as_eager not in (None, journal.sequence) and not (generators or draws):
            raise RunsOtherwise
        looks = told and not journal.reads and read_in is not None and read_in < journal.count
        if python_state.unsettled:
            unsettled = StateChanges(
                f"{python_state.unsettled} changes with every call that draws random numbers, and "
                "a graph repeats no Python.",
                remedy="Keep it out of the captured call: pass it in and return it as a tensor.",
            )
            if not any(place.counts for place in python_state.places):
                unsettled.places = tuple(each for each in python_state.places if each.is_plain)
            raise unsettled
        if journal.generators:
            if draws:
                journal.undo()
            trial.refuse_seeding(journal.generators, draws, None if generators else eager)
            python_state.check()
        del eager
        if copies is not None:
            recorder.tidy()  # Observed runs needed blocks of other sizes.
        for count in range(runs):
            if not count or copies is None:
                # All start from the same state, so that all do the same. What a training step
                # changes takes long to put back, so that is done once.
                journal.undo()
            inputs.fill(sample)
            # The tape runs compiled code operation by operation anyway: compiling each size would
            # be for nothing, and count against TorchDynamo's limit of recompilations.
            on_tape = recorder.device.type == "cpu"
            with recorder.warming(), compilers_off() if on_tape else contextlib.nullcontext():
                work(inputs)
            python_state.check()
        journal.undo()
        for slot in inputs.slots:
            journal.external.pop(inputs.tensor(slot).untyped_storage()._cdata, None)
        del inputs

        tree: SegmentTree | None = None
        segments: tuple[int, ...] = ()
        if rehearse:
            with generator_kept(draws):
                tree, segments = _rehearsed(
                    work, sample, recorder, journal, generators, draws, fallback, hosts
                )
            python_state.check()
        put_back = True
    finally:
        if not put_back:
            journal.undo()
    return Warmed(
        mutated=mutated,
        mutates=journal.wrote,
        generators=tuple(generators),
        draws=draws,
        external=tuple(journal.external.values()),
        announced=frozenset(journal.announced),
        segments=segments,
        contributors=journal.largest(),
        looks_in_eager=looks,
        read=tuple(read),
        tree=tree,
    )


def _rehearsed(
    work: Callable[[StaticInputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    journal: Journal,
    generators: Sequence[torch.Generator],
    draws: Sequence[Draw],
    fallback: Fallback | None,
    outside: Container[int],
) -> tuple[SegmentTree | None, tuple[int, ...]]:
    """Rehearse the recording: the segments that take its place, and the memory that it takes.

    Args:
        work: runs the call on static inputs.
        sample: the leaves of its arguments.
        recorder: what will record it.
        journal: of an observed run.
        generators: random generators that the graph draws from.
        draws: what the call draws on the host beside it.
        fallback: as for `warm`.
        outside: storages on other devices that the eager run used too, by identity.
    """
    if fallback is not None and journal.waits:
        # A capture that waits breaks, and leaves behind what PyTorch never gives back.
        return fallback(generators, draws)
    if fallback is not None and recorder.device.type != "cpu":
        hosts = [s for s in journal.external.values() if s.device.type == "cpu" and s.nbytes()]
        if any(storage._cdata in outside for storage in hosts):
            # One graph would keep what the host's memory holds now for ever.
            with contextlib.suppress(CaptureError, RuntimeError):
                return fallback(generators, draws)
    prepare = functools.partial(StaticInputs, sample)
    try:
        return None, recorder.rehearse(prepare, work, generators)
    except Exception as error:
        short_of_memory = isinstance(error, torch.OutOfMemoryError)
        capturing = isinstance(error, RuntimeError | CaptureError) and not short_of_memory
        if fallback is not None and capturing:
            let_go(error)
            return fallback(generators, draws)
        if isinstance(error, CaptureError):
            raise
        raise _with_operation(error, prepare, work, recorder, generators) from error


def _refuse_writes_on_host(written: Sequence[torch.UntypedStorage]) -> None:
    """Raise CaptureError where a call for a GPU writes to memory of the host."""
    if any(storage.device.type == "cpu" for storage in written):
        raise CaptureError(
            "The call writes to a tensor on the host, which a graph would not.",
            remedy="Keep it on the device, or update it where the graph is called.",
        )


def _refuse_caught(run: Journal) -> None:
    """Raise CaptureError where a run went on after an operation had failed for its values."""
    if run.caught is not None:
        raise CaptureError(
            f"The call goes on after an error of {run.caught}, which the values of tensors decide; "
            "a graph would go on like this for all values.",
            remedy="Compute with tensors in place of try and except: torch.where, for example.",
        )


def _refuse_first_run_setup(
    first: Sequence[torch.UntypedStorage], second: Sequence[torch.UntypedStorage]
) -> None:
    """Raise StateChanges where only the first of two runs wrote to some of the model's memory.

    What it wrote is put back, but not the flag that tells later runs that this is done.
    """
    if {storage._cdata for storage in first} - {storage._cdata for storage in second}:
        raise StateChanges(
            "The first run of the call writes to tensors that later runs leave alone: it sets "
            "something up.",
            remedy="Call it once before it is captured.",
        )


class _ObservedRuns:
    """Observed runs of a call, each of which is undone."""

    def __init__(
        self,
        work: Callable[[StaticInputs], Any],
        sample: Sequence[Any],
        recorder: Recorder,
        python_state: PythonState,
        comparison: Comparison,
        copies: Copies | None,
    ) -> None:
        self._work = work
        self._sample = sample
        self._recorder = recorder
        self._python_state = python_state
        self._comparison = comparison
        self._copies = copies
        # Where the leaves of the last eager run's results were.
        self._devices: list[torch.device | None] = []

    def eager(
        self, under: AbstractContextManager[Any] | None = None, *, as_given: bool = False
    ) -> tuple[Any, Journal, list[torch.UntypedStorage], tuple[int, ...]]:
        """Run the call as plain eager code.

        Args:
            under: a context to run it in.
            as_given: whether arguments on the host stay there.

        Returns:
            what `Comparison.keep` kept of its results; its journal; the storages that it changed
            among those of the model's tensors; the slots of the arguments that it wrote to.
        """
        allocate = _ordinary_allocator(self._recorder.device)
        inputs = StaticInputs(self._sample, allocate, as_given=as_given)
        journal = Journal(self._copies)
        try:
            with self._recorder.warming(pretend=False), compilers_off(), journal:
                with self._python_state.refusing_advances(), under or contextlib.nullcontext():
                    result = self._work(inputs)
                    kept = self._comparison.keep(result)
            leaves = pytree.tree_leaves(result)
            self._devices = [x.device if isinstance(x, torch.Tensor) else None for x in leaves]
            del result, leaves
            self._python_state.check()
            written = [storage for storage in journal.written if self._python_state.holds(storage)]
            written = [storage for storage in written if journal.changed(storage)]
            slots = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
        finally:
            journal.undo()
        for slot in inputs.slots:
            journal.external.pop(inputs.tensor(slot).untyped_storage()._cdata, None)
        if self._copies is not None:
            self._recorder.tidy()  # The next run needs blocks of other sizes.
        return kept, journal, written, slots

    def eager_on_device(
        self, names: Sequence[str]
    ) -> tuple[Any, Journal, list[torch.UntypedStorage], tuple[int, ...]]:
        """As `eager`, which has arguments on the host on the device; that must change nothing.

        Args:
            names: of the arguments' leaves.

        Raises:
            CaptureError: it does: the call needs them on the host.
        """
        hosts = hosts_among(self._sample, self._recorder.device)
        if not hosts:
            return self.eager()
        named = ", ".join(names[slot] for slot in hosts) or "An argument"
        try:
            run = self.eager()
        except Exception as error:
            self.eager(as_given=True)  # Where that fails too, it is the call's own error.
            raise CaptureError(
                f"{named} on the host: the call fails with a copy of it on the device, which is "
                f"what a graph reads: {first_line(error)}",
                where=user_frame(error),
                remedy=_ON_DEVICE,
            ) from error
        devices = self._devices
        given, _, _, slots = self.eager(as_given=True)
        try:
            if devices != self._devices or slots != run[-1]:
                raise CaptureError("")
            self._comparison.compare(run[0], given, run[1].dtypes)
        except CaptureError as error:
            raise CaptureError(
                f"{named} on the host: the call computes or writes something else with a copy of "
                "it on the device, which is what a graph reads.",
                remedy=_ON_DEVICE,
            ) from error
        return run

    def compare_without_dropout(self) -> None:
        """Compare a run that pretends to be captured with a plain one, both without dropout.

        Raises:
            CaptureError: their results differ.
        """
        eager, *_ = self.eager(WithoutDropout())
        inputs = StaticInputs(self._sample, _ordinary_allocator(self._recorder.device))
        journal = Journal(self._copies)
        try:
            with self._recorder.warming(), compilers_off(), journal, WithoutDropout():
                result = run_in_pretended_capture(self._work, inputs)
            self._comparison.check(result, eager, journal.dtypes)
        finally:
            journal.undo()

    def find_written(
        self, places: list[Place], eager: Any, generators: Sequence[torch.Generator]
    ) -> None:
        """Keep of some places those to which the call writes; it must not read any of them.

        It runs once more where they hold nothing: what it returns and leaves in them must be what
        the last run has.

        Args:
            places: attributes and items of dictionaries.
            eager: what `Comparison.keep` kept of eager's result.
            generators: random generators that the call draws from.

        Raises:
            StateChanges: the call reads one of them before it writes to it, or may.
        """
        held = [(place, place.value()) for place in places]
        kept = {
            id(place): Comparison().keep(apart([value]))
            for place, value in held
            if value is not MISSING and not place.counts
        }
        inputs = StaticInputs(self._sample, _ordinary_allocator(self._recorder.device))
        journal = Journal(self._copies)
        names = ", ".join(place.name for place in places)
        try:
            for place in places:
                place.empty()
            with self._recorder.warming(), compilers_off(), journal:
                result = self._work(inputs)
            self._comparison.check(result, eager, journal.dtypes)
            untouched = [
                place for place, _ in held if not place.counts and place.value() is MISSING
            ]
            for place, value in held:
                now, before = place.value(), kept.get(id(place))
                if place.counts:
                    place.step = place.added()
                    place.put(value)
                    if not place.step:
                        places.remove(place)
                elif now is MISSING:
                    places.remove(place)
                    place.put(value)
                elif kind_of(now) is None or kind_of(now) != kind_of(value):
                    raise StateChanges("Another value is left there.")
                else:
                    check_same_result(apart([now]), before or [], rounding_of(journal.dtypes))
            if generators:
                raise StateChanges("It draws random numbers.")
            if untouched:
                journal.undo()
                self._refuse_removals(untouched)
        except Exception as error:
            refused = StateChanges(
                f"{names} changes with every call, and a graph repeats no Python: what it held "
                "before may matter to the call.",
                remedy="Set it in every call before it is read; or keep it out of the captured "
                "call: pass it in and return it as a tensor.",
            )
            if not any(place.counts for place, _ in held):
                refused.places = tuple(place for place, _ in held if place.is_plain)
            raise refused from error
        finally:
            journal.undo()

    def _refuse_removals(self, places: Sequence[Place]) -> None:
        """Run the call with something in places that it does not write to: it must stay there.

        Raises:
            StateChanges: the call removes it.
        """
        held = [(place, place.value()) for place in places]
        inputs = StaticInputs(self._sample, _ordinary_allocator(self._recorder.device))
        journal = Journal(self._copies)
        there = object()
        try:
            for place in places:
                place.put(there)
            with self._recorder.warming(), compilers_off(), journal:
                self._work(inputs)
            if any(place.value() is not there for place in places):
                raise StateChanges("It removes what another call has left there.")
        finally:
            journal.undo()
            for place, value in held:
                place.put(value)

    def refuse_seeding(
        self, generators: Sequence[torch.Generator], draws: Sequence[Draw], eager: Any
    ) -> None:
        """Run the call with other seeds, and refuse it unless it draws from those.

        Args:
            generators: random generators that it draws from.
            draws: what it draws on the host, which must make no difference.
            eager: what `Comparison.keep` kept of eager's result, if that is to be the same.

        Raises:
            CaptureError: it seeds its generators itself, makes its own generator, or uses `draws`.
        """
        states = [(generator, generator.get_state()) for generator in generators]
        journal = Journal(self._copies)
        try:
            for generator in generators:
                put_seed(generator, OTHER_SEED)
            journal.expect(generators)
            inputs = StaticInputs(self._sample, _ordinary_allocator(self._recorder.device))
            seen = UsesOf(journal.draws) if draws else contextlib.nullcontext()
            with self._recorder.warming(), compilers_off(), journal, seen:
                result = run_in_pretended_capture(self._work, inputs)
            journal.check_end()
            if draws:
                unused = journal.draws.made == list(draws) and self._gives(result, eager, journal)
                self._python_state.refuse_host_randomness(
                    self._recorder.device, generators, [journal.draws] if unused else []
                )
        finally:
            journal.undo()
            for generator, state in states:
                put_state(generator, state)
        journal.drop_unused_generators()
        if any(all(g is not known for known in generators) for g in journal.generators):
            raise CaptureError(
                "The call makes a random generator of its own every time; a graph would draw from "
                "the first one for ever.",
                remedy="Make it once, outside the captured call.",
            )

    def _gives(self, result: Any, eager: Any, journal: Journal) -> bool:
        """Whether a run's result is eager's; True if that is not known."""
        try:
            if eager is not None:
                self._comparison.check(result, eager, journal.dtypes)
        except CaptureError:
            return False
        return True


def _with_operation(
    error: Exception,
    prepare: Callable[[Allocate], StaticInputs],
    work: Callable[[StaticInputs], Any],
    recorder: Recorder,
    generators: Sequence[torch.Generator],
) -> CaptureError:
    """The error of a rehearsal, with its operation: found by an observed rehearsal."""
    journal = Journal()

    def seen(inputs: StaticInputs) -> Any:
        with compilers_off(), journal:
            return work(inputs)

    try:
        recorder.rehearse(prepare, seen, generators)
    except Exception as again:
        error = again  # The journal need not python_state anything: the rehearsal itself does.
    what = f"{first_line(error)} (in or after {journal.operation})"
    where = user_frame(error)
    let_go(error)  # Its traceback holds this frame, which holds it.
    return CaptureError(
        what,
        where=where,
        remedy=seeded_on_gpu(error)
        or "A graph repeats device work only: what waits for the GPU, copies from ordinary "
        "host memory or reads a tensor's value has to be done outside the captured call.",
    )


def _ordinary_allocator(device: torch.device) -> Allocate:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)


def run_in_pretended_capture(work: Callable[[StaticInputs], Any], inputs: StaticInputs) -> Any:
    """Run work that pretends to be captured; an error is its own doing, since it ran without."""
    try:
        return work(inputs)
    except Exception as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(
            f"The call works by itself and fails once it is told that a capture is under way: "
            f"{first_line(error)}",
            where=user_frame(error),
            remedy="It asks torch.cuda.is_current_stream_capturing(), and takes another way.",
        ) from error
