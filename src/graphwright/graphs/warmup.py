"""Warm-up: run a call until it is warm, and find out what a graph of it needs.

`warm` goes through stages. `observe` runs the call as plain eager code. `repeat` runs it while
torch.cuda.is_current_stream_capturing() returns True: libraries call that and may skip what would
read the device. `find_chance` finds what it draws. `compare` compares the results of both runs,
which may differ by rounding only. `check_chance` runs it with other seeds, and `settle` runs it
unobserved. The last run is a rehearsal: it runs under the conditions of a capture.

Where eager code reads nothing, and libraries run something else in captures for nothing, the call
can be warmed up and captured as eager runs it (`RunsOtherwise`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..calls.modes import compilers_off
from ..calls.operations import tensors
from ..errors import CaptureError, first_line, user_frame
from .comparison import Comparison
from .conditions import questions
from .host_draws import Draw, HostDraws, generator_kept, is_foreign
from .journal import Copies, Journal, seeded_on_gpu
from .observed_runs import ObservedRuns, run_in_pretended_capture
from .python_state import PythonState, StateChanges
from .reads import OutsideRead, Reads
from .recorder import Allocate, Recorder
from .segments.tree import SegmentTree
from .static_inputs import StaticInputs
from .transaction import let_go

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
    read: Sequence[OutsideRead] = ()
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
    comparison = Comparison() if comparison is None else comparison
    observed = ObservedRuns(work, sample, recorder, python_state, comparison, copies)
    eager, first = observe(observed, names)
    inputs, journal = observed.inputs(), Journal(copies)
    try:
        result, second = repeat(observed, first, inputs, journal)
        chance = find_chance(observed, first, journal, draws_again=draws_again)
        if fallback is None and recorder.device.type != "cpu":
            _refuse_writes_on_host(journal.written)
        compare(observed, result, eager, journal, chance.generators)
        del result
        # What draws random numbers may do so by a seed of the host unless it is captured.
        if not (may_run_otherwise or chance) and second.runs_otherwise:
            raise RunsOtherwise
        _refuse_unsettled(python_state)
        check_chance(observed, journal, chance, eager)
        del eager
        settle(observed, inputs, journal, runs)
        del inputs
        tree: SegmentTree | None = None
        segments: tuple[int, ...] = ()
        if rehearse:
            with generator_kept(chance.draws):
                tree, segments = _rehearsed(observed, journal, chance, fallback, first.hosts)
            python_state.check()
    except BaseException:
        journal.undo()
        raise
    return Warmed(
        mutated=second.mutated,
        mutates=journal.wrote,
        generators=chance.generators,
        draws=chance.draws,
        external=tuple(journal.external.values()),
        announced=frozenset(journal.announced),
        segments=segments,
        contributors=journal.largest(),
        looks_in_eager=second.looks_in_eager,
        read=second.read,
        tree=tree,
    )


# The stages of warm-up, in their order.


@dataclass(frozen=True)
class FirstRun:
    """What the first run has shown, as plain eager code.

    Attributes:
        draws: what it drew on the host.
        made: storages that it made, by identity.
        external: memory from outside that it used, by identity.
        hosts: the part of it that is not on the device of the graph.
        set_up: memory of the model that it changed.
        written: positions of the arguments that it wrote to.
        reads: whether the host had to see values of tensors.
        sequence: a number for its operations and their order.
        count: of its operations.
    """

    draws: HostDraws
    made: Mapping[int, StorageWeakRef]
    external: Mapping[int, torch.UntypedStorage]
    hosts: Mapping[int, torch.UntypedStorage]
    set_up: Sequence[torch.UntypedStorage]
    written: tuple[int, ...]
    reads: bool
    sequence: int
    count: int


def observe(runs: ObservedRuns, names: Sequence[str] = ()) -> tuple[Any, FirstRun]:
    """Run the call as plain eager code.

    Args:
        runs: of the call.
        names: of the arguments' leaves.

    Returns:
        what `Comparison.keep` kept of its results, and what it has shown.

    Raises:
        CaptureError: the call goes by errors, or needs arguments on the host.
    """
    kept, journal, set_up, written = runs.eager_on_device(names)
    _refuse_caught(journal)
    device = runs.recorder.device
    first = FirstRun(
        draws=journal.draws,
        made=journal.made_storages,
        external=journal.external,
        hosts={k: s for k, s in journal.external.items() if s.device != device},
        set_up=set_up,
        written=written,
        reads=journal.reads,
        sequence=journal.sequence,
        count=journal.count,
    )
    return kept, first


@dataclass(frozen=True)
class SecondRun:
    """What the second run has shown, which was told that it is captured.

    Attributes:
        mutated: positions of the arguments that it wrote to.
        read: what its operations took from outside.
        runs_otherwise: whether it ran other operations, since it was told so, although eager code
            reads nothing either.
        looks_in_eager: as for `Warmed`.
    """

    mutated: tuple[int, ...]
    read: Sequence[OutsideRead]
    runs_otherwise: bool
    looks_in_eager: bool


def repeat(
    runs: ObservedRuns, first: FirstRun, inputs: StaticInputs, journal: Journal
) -> tuple[Any, SecondRun]:
    """Run the call while it is told that it is captured; it must leave the same behind.

    Args:
        runs: of the call.
        first: what its first run has shown.
        inputs: what it runs on.
        journal: notes what it does, which is not undone here.

    Returns:
        its results, and what it has shown.

    Raises:
        CaptureError: it does something else than the first run, or goes on from that.
    """
    journal.reads_of = reads = Reads(runs.state.reaches)
    before = questions()
    with runs.recorder.warming(), compilers_off(), journal:
        result = run_in_pretended_capture(runs.work, inputs)
    told = questions() > before
    _refuse_caught(journal)
    runs.state.check(read=frozenset(journal.external))
    _refuse_first_run_setup(first.set_up, journal.written)
    mutated = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
    if mutated != first.written:
        raise CaptureError(
            "The call writes to other arguments when it runs as eager code than when it is "
            "told that a capture is under way."
            if told
            else "The call writes to other arguments in its second run than in its first.",
            remedy="Let each run write to the same arguments, or to none.",
        )
    if not told:  # Else it may well have gone another way.
        reads.compare(first.external, first.made)
    read = reads.left([inputs.tensor(slot) for slot in inputs.slots])
    journal.reads_of = None
    if journal.continues_from(first.made):
        raise StateChanges(
            "The call makes a tensor in its first run that later runs change; a graph would "
            "go on from what the runs here have left in it.",
            remedy="Make it before the capture, and give it its first value there.",
        )
    for tensor in tensors(result):
        journal.read(tensor)  # It may be a weight that no operation has touched.
    otherwise = told and not first.reads and first.sequence != journal.sequence
    looks = told and first.reads and not journal.reads and first.count < journal.count
    return result, SecondRun(mutated, tuple(read), otherwise, looks)


@dataclass(frozen=True)
class Chance:
    """Random numbers of a call.

    Attributes:
        generators: what a graph of it draws from.
        draws: what it draws on the host beside the graph, and each replay has to draw again.
    """

    generators: tuple[torch.Generator, ...]
    draws: tuple[Draw, ...]

    def __bool__(self) -> bool:
        return bool(self.generators or self.draws)


def find_chance(
    runs: ObservedRuns, first: FirstRun, journal: Journal, *, draws_again: bool
) -> Chance:
    """Find what the call draws, while its results are still alive.

    Args:
        runs: of the call.
        first: what its first run has shown.
        journal: of the second one.
        draws_again: as for `warm`.

    Raises:
        CaptureError: it draws what no graph can repeat.
    """
    device = runs.recorder.device
    journal.drop_unused_generators()
    repeatable = draws_again and first.draws.made == journal.draws.made
    both = [first.draws, journal.draws] if repeatable else []
    runs.state.refuse_host_randomness(device, journal.generators, both)
    generators = tuple(g for g in journal.generators if not is_foreign(g, device))
    return Chance(generators, journal.draws.to_repeat(device))


def compare(
    runs: ObservedRuns,
    result: Any,
    eager: Any,
    journal: Journal,
    generators: Sequence[torch.Generator] = (),
) -> None:
    """Compare the results of both runs; find out to which places outside of it the call writes.

    Args:
        runs: of the call.
        result: of the second run.
        eager: what was kept of the first run's.
        journal: of the second run, which is undone where others follow.
        generators: random generators that the call draws from: then only what it computes without
            dropout has to be the same.

    Raises:
        CaptureError: the results differ, or the call reads such a place before it writes to it.
    """
    state = runs.state
    try:
        runs.comparison.check(result, eager, journal.dtypes)
    except CaptureError as error:
        counter = next((place.name for place in state.places if place.counts), None)
        if counter is not None:
            raise StateChanges(
                f"{counter} changes with every call, and a graph repeats no Python.",
                remedy="Compute with a tensor in its place, or pass it in.",
            ) from error
        if not generators:
            raise
        journal.undo()
        runs.compare_without_dropout()
        return
    if state.places:
        journal.undo()
        runs.find_written(state.places, eager, generators)
        state.settle()


def check_chance(runs: ObservedRuns, journal: Journal, chance: Chance, eager: Any) -> None:
    """Run a call that draws random numbers with other seeds: it has to draw from those.

    Args:
        runs: of the call.
        journal: of the second run.
        chance: what it draws.
        eager: what was kept of the first run's results.

    Raises:
        CaptureError: it seeds by itself, or uses what it draws on the host.
    """
    if not journal.generators:
        return
    if chance.draws:
        journal.undo()
    expected = None if chance.generators else eager
    runs.refuse_seeding(journal.generators, chance.draws, expected)
    runs.state.check()


def settle(runs: ObservedRuns, inputs: StaticInputs, journal: Journal, count: int) -> None:
    """Run the call unobserved until it is warm; at the end all is as before its second run.

    Args:
        runs: of the call.
        inputs: what it runs on; from now on, they do not count as memory from outside.
        journal: of the second run.
        count: of the runs.

    Raises:
        CaptureError: it keeps state that changes with every call.
    """
    recorder = runs.recorder
    if runs.copies is not None:
        recorder.tidy()  # FirstRun runs needed blocks of other sizes.
    # The tape runs compiled code operation by operation anyway: compiling each size would be for
    # nothing, and count against TorchDynamo's limit of recompilations.
    on_tape = recorder.device.type == "cpu"
    for done in range(count):
        if not done or runs.copies is None:
            # All start from the same state, so that all do the same. What a training step changes
            # takes long to put back, so that is done once.
            journal.undo()
        inputs.fill(runs.sample)
        with recorder.warming(), compilers_off() if on_tape else contextlib.nullcontext():
            runs.work(inputs)
        runs.state.check()
    journal.undo()
    for slot in inputs.slots:
        journal.external.pop(inputs.tensor(slot).untyped_storage()._cdata, None)


def _rehearsed(
    runs: ObservedRuns,
    journal: Journal,
    chance: Chance,
    fallback: Fallback | None,
    outside: Container[int],
) -> tuple[SegmentTree | None, tuple[int, ...]]:
    """Rehearse the recording: the segments that take its place, and the memory that it takes.

    Args:
        runs: of the call.
        journal: of its second run.
        chance: what it draws.
        fallback: as for `warm`.
        outside: storages on other devices that the eager run used too, by identity.
    """
    recorder, generators, draws = runs.recorder, chance.generators, chance.draws
    if fallback is not None and journal.waits:
        # A capture that waits breaks, and leaves behind what PyTorch never gives back.
        return fallback(generators, draws)
    if fallback is not None and recorder.device.type != "cpu":
        hosts = [s for s in journal.external.values() if s.device.type == "cpu" and s.nbytes()]
        if any(storage._cdata in outside for storage in hosts):
            # One graph would keep what the host's memory holds now for ever.
            with contextlib.suppress(CaptureError, RuntimeError):
                return fallback(generators, draws)
    prepare = functools.partial(StaticInputs, runs.sample)
    try:
        return None, recorder.rehearse(prepare, runs.work, generators)
    except Exception as error:
        short_of_memory = isinstance(error, torch.OutOfMemoryError)
        capturing = isinstance(error, RuntimeError | CaptureError) and not short_of_memory
        if fallback is not None and capturing:
            let_go(error)
            return fallback(generators, draws)
        if isinstance(error, CaptureError):
            raise
        raise _with_operation(error, prepare, runs.work, recorder, generators) from error


def _refuse_unsettled(state: PythonState) -> None:
    """Raise StateChanges where it is not known whether the call reads what it writes to."""
    if not state.unsettled:
        return
    error = StateChanges(
        f"{state.unsettled} changes with every call that draws random numbers, and "
        "a graph repeats no Python.",
        remedy="Keep it out of the captured call: pass it in and return it as a tensor.",
    )
    if not any(place.counts for place in state.places):
        error.places = tuple(each for each in state.places if each.is_plain)
    raise error


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
