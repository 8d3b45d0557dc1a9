"""Running a call until it is warm, and learning what it needs.

The first runs are seen operation by operation: one as eager, one told that a capture is under way.
The last one runs under the conditions of a capture.

What work does once it is told that a capture is under way: it may be something else.

Libraries ask torch.cuda.is_current_stream_capturing(), and leave out what would read the device
then. The numbers have to stay the same but for rounding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.modes import OperationMode, compilers_off
from ..calls.operations import tensors
from ..calls.signature import SCALARS, describe
from ..errors import CaptureError, first_line, user_frame
from ..evaluation.accuracy import OTHER_ROUNDING, ROUNDING, error_of, special_values
from .journal import Copies, Journal, seeded_on_gpu
from .python_state import PythonState, StateChanges
from .recorder import Allocate, Recorder
from .static_tensors import StaticInputs
from .transaction import let_go

_OTHER_SEED = 8_675_309

Rescue = Callable[[Sequence[torch.Generator]], tuple[int, ...]]


@dataclass(frozen=True)
class Warmed:
    """What warm-up has found out about a call.

    Attributes:
        mutated: positions of the arguments' leaves that the call writes to.
        mutates: whether it writes to these or to anything else from outside.
        generators: random generators that it draws from.
        external: memory from outside that it uses, weights above all.
        announced: storages of these, by identity, whose tensors autograd counts a new version of.
        segments: bytes of the memory ranges that it would take in an empty pool.
        contributors: its largest tensors, as (what, bytes).
    """

    mutated: tuple[int, ...]
    mutates: bool
    generators: tuple[torch.Generator, ...]
    external: tuple[torch.UntypedStorage, ...]
    announced: frozenset[int]
    segments: tuple[int, ...]
    contributors: tuple[tuple[str, int], ...]


def warm(
    work: Callable[[StaticInputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    undo: PythonState,
    runs: int,
    rescue: Rescue | None = None,
    comparison: Comparison | None = None,
    copies: Copies | None = None,
) -> Warmed:
    """Run a call on copies of a sample until it is warm; what it writes to is put back.

    Args:
        work: runs the call on static inputs.
        sample: the leaves of its arguments.
        recorder: what it is to be recorded by.
        undo: the Python side of its state.
        runs: how often to run it unobserved, between the observed runs and the rehearsal.
        rescue: another way to record it, where it cannot be recorded as it is: what that takes, by
            the random generators that it draws from.
        comparison: how its results are compared with eager's.
        copies: what memory from outside held before, of other runs, where each begins with that.

    Raises:
        CaptureError: it keeps state that a graph cannot carry on.
        Exception: whatever the work raises.
    """
    allocate = _ordinary(recorder.device)
    comparison = Comparison() if comparison is None else comparison
    trial = _Trial(work, sample, recorder, undo, comparison, copies)
    eager, first, set_up = trial.eager()
    # Not its inputs, which need not be there any longer.
    hosts = {k: s for k, s in first.external.items() if s.device != recorder.device}
    made = first.made_by_it
    del first
    inputs = StaticInputs(sample, allocate)
    journal = Journal(copies)
    put_back = False
    try:
        with recorder.warming(), compilers_off(), journal:
            result = run_told(work, inputs)
        _refuse_what_the_first_run_set_up(set_up, journal.written)
        if journal.goes_on_from(made):
            raise CaptureError(
                "The call makes a tensor in its first run that later runs change; a graph would "
                "go on from what the runs here have left in it.",
                remedy="Make it before the capture, and give it its first value there.",
            )
        journal.forget_what_stood_still()
        for tensor in tensors(result):
            journal.read(tensor)  # It may be a weight that no operation has touched.
        undo.check()
        undo.refuse_host_randomness(recorder.device, journal.generators)
        if rescue is None and recorder.device.type != "cpu":
            _refuse_writes_on_host(journal.written)
        try:
            comparison.check(result, eager, journal.dtypes)
        except CaptureError:
            if not journal.generators:
                raise
            journal.undo()
            trial.compare_without_dropout()
        finally:
            del result, eager
        if journal.generators:
            trial.refuse_seeding(journal.generators)
            undo.check()
        if copies is not None:
            recorder.tidy()  # Runs that were seen have needed blocks of other sizes.
        for count in range(runs):
            if not count or copies is None:
                # Each from the same state, so that each does the same; to put back what a training
                # step changes takes a while.
                journal.undo()
            inputs.fill(sample)
            # The tape holds the parts of what was compiled: each size would be compiled for nothing
            # and count against TorchDynamo's limit of recompilations.
            on_tape = recorder.device.type == "cpu"
            with recorder.warming(), compilers_off() if on_tape else contextlib.nullcontext():
                work(inputs)
            undo.check()
        journal.undo()
        mutated = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
        for slot in inputs.slots:
            journal.external.pop(inputs.tensor(slot).untyped_storage()._cdata, None)
        del inputs

        segments = _taken(work, sample, recorder, journal, rescue, hosts)
        undo.check()
        put_back = True
    finally:
        if not put_back:
            journal.undo()
    return Warmed(
        mutated=mutated,
        mutates=journal.wrote,
        generators=tuple(journal.generators),
        external=tuple(journal.external.values()),
        announced=frozenset(journal.announced),
        segments=segments,
        contributors=journal.largest(),
    )


def _taken(
    work: Callable[[StaticInputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    journal: Journal,
    rescue: Rescue | None,
    outside: Container[int],
) -> tuple[int, ...]:
    """Bytes of the memory ranges that a call takes in an empty pool.

    Args:
        work: runs the call on static inputs.
        sample: the leaves of its arguments.
        recorder: what it is to be recorded by.
        journal: of its run.
        rescue: as for `warm`.
        outside: memory elsewhere that it has used in another run too.
    """
    generators = journal.generators
    if rescue is not None and recorder.device.type != "cpu":
        hosts = [s for s in journal.external.values() if s.device.type == "cpu" and s.nbytes()]
        if any(storage._cdata in outside for storage in hosts):
            # One graph would keep for ever what the host's memory holds now.
            with contextlib.suppress(CaptureError, RuntimeError):
                return rescue(generators)
    prepare = functools.partial(StaticInputs, sample)
    try:
        return recorder.rehearse(prepare, work, generators)
    except Exception as error:
        short_of_memory = isinstance(error, torch.OutOfMemoryError)
        capturing = isinstance(error, RuntimeError | CaptureError) and not short_of_memory
        if rescue is not None and capturing:
            let_go(error)
            return rescue(generators)
        if isinstance(error, CaptureError):
            raise
        raise _named(error, prepare, work, recorder, generators) from error


def _refuse_writes_on_host(written: Sequence[torch.UntypedStorage]) -> None:
    """A graph of device work repeats none of what the host computes.

    Raises:
        CaptureError: memory of the host is written to.
    """
    if any(storage.device.type == "cpu" for storage in written):
        raise CaptureError(
            "The call writes to a tensor on the host, which a graph would not.",
            remedy="Keep it on the device, or update it where the graph is called.",
        )


def _refuse_what_the_first_run_set_up(
    first: Sequence[torch.UntypedStorage], second: Sequence[torch.UntypedStorage]
) -> None:
    """Raise where only the first of two runs has written to some memory of the model's.

    What it wrote is put back; whatever tells later runs that it is done is not.
    """
    if {storage._cdata for storage in first} - {storage._cdata for storage in second}:
        raise StateChanges(
            "The first run of the call writes to tensors that later runs leave alone: it sets "
            "something up.",
            remedy="Call it once before it is captured.",
        )


class _Trial:
    """Runs of a call that are only to find something out about it, each put back."""

    def __init__(
        self,
        work: Callable[[StaticInputs], Any],
        sample: Sequence[Any],
        recorder: Recorder,
        undo: PythonState,
        comparison: Comparison,
        copies: Copies | None,
    ) -> None:
        self._work = work
        self._sample = sample
        self._recorder = recorder
        self._undo = undo
        self._comparison = comparison
        self._copies = copies

    def eager(
        self, under: AbstractContextManager[Any] | None = None
    ) -> tuple[Any, Journal, list[torch.UntypedStorage]]:
        """What is kept of a call that is not told of a capture, and what was seen of it.

        The third is the memory that it changed of tensors that the model held before.
        """
        inputs = StaticInputs(self._sample, _ordinary(self._recorder.device))
        journal = Journal(self._copies)
        try:
            with self._recorder.warming(told=False), compilers_off(), journal:
                with under or contextlib.nullcontext():
                    kept = self._comparison.keep(self._work(inputs))
            self._undo.check()
            written = [storage for storage in journal.written if self._undo.holds(storage)]
            written = [storage for storage in written if journal.changed(storage)]
        finally:
            journal.undo()
        if self._copies is not None:
            self._recorder.tidy()  # The next run needs blocks of other sizes.
        return kept, journal, written

    def compare_without_dropout(self) -> None:
        """Compare a run that is told of a capture with eager, both without dropout.

        Raises:
            CaptureError: it computes something else.
        """
        eager, *_ = self.eager(WithoutDropout())
        inputs = StaticInputs(self._sample, _ordinary(self._recorder.device))
        journal = Journal(self._copies)
        try:
            with self._recorder.warming(), compilers_off(), journal, WithoutDropout():
                result = run_told(self._work, inputs)
            self._comparison.check(result, eager, journal.dtypes)
        finally:
            journal.undo()

    def refuse_seeding(self, generators: Sequence[torch.Generator]) -> None:
        """Run it with its random generators elsewhere than before: does it go on from there?

        Raises:
            CaptureError: it seeds them itself, or makes one of its own.
        """
        states = [(generator, generator.get_state()) for generator in generators]
        journal = Journal(self._copies)
        try:
            for generator in generators:
                generator.manual_seed(_OTHER_SEED)
            journal.expect(generators)
            inputs = StaticInputs(self._sample, _ordinary(self._recorder.device))
            with self._recorder.warming(), compilers_off(), journal:
                run_told(self._work, inputs)
            journal.check_end()
        finally:
            journal.undo()
            for generator, state in states:
                generator.set_state(state)
        journal.forget_what_stood_still()
        if any(all(g is not known for known in generators) for g in journal.generators):
            raise CaptureError(
                "The call makes a random generator of its own every time; a graph would draw from "
                "the first one for ever.",
                remedy="Make it once, outside the captured call.",
            )


def _named(
    error: Exception,
    prepare: Callable[[Allocate], StaticInputs],
    work: Callable[[StaticInputs], Any],
    recorder: Recorder,
    generators: Sequence[torch.Generator],
) -> CaptureError:
    """The error of a rehearsal with the operation that it came from: found by another one."""
    journal = Journal()

    def seen(inputs: StaticInputs) -> Any:
        with compilers_off(), journal:
            return work(inputs)

    try:
        recorder.rehearse(prepare, seen, generators)
    except Exception as again:
        error = again  # Nothing to put back: a rehearsal does that, and what was kept is no copy.
    what = f"{first_line(error)} (in or after {journal.operation})"
    where = user_frame(error)
    let_go(error)  # It refers to itself by way of this frame.
    return CaptureError(
        what,
        where=where,
        remedy=seeded_on_gpu(error)
        or "A graph repeats device work only: what waits for the GPU, copies from ordinary "
        "host memory or reads a tensor's value has to be done outside the captured call.",
    )


def _ordinary(device: torch.device) -> Allocate:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)


class WithoutDropout(OperationMode):
    """Runs operations without dropout; for comparisons only.

    Two attention kernels drop other elements, with the same random numbers; what they compute can
    be compared where they drop none.
    """

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with a chance of 1 to keep an element."""
        for index, name, chance in _chances(func):
            if index < len(args):
                args = (*args[:index], chance, *args[index + 1 :])
            elif name in kwargs:
                kwargs[name] = chance
        return func(*args, **kwargs)


# Names of arguments that are a chance, and which value drops nothing; by operation, else for all.
_KEEP_ALL = {
    "native_dropout": ("p", 0.0),
    "bernoulli_": ("p", 1.0),
    "bernoulli": ("p", 1.0),
    "_cudnn_rnn": ("dropout", 0.0),
    "_cudnn_rnn_backward": ("dropout", 0.0),
}


@functools.cache
def _chances(func: Any) -> list[tuple[int, str, float]]:
    name, chance = _KEEP_ALL.get(func._opname, ("dropout_p", 0.0))
    arguments = enumerate(func._schema.arguments)
    return [(i, name, chance) for i, a in arguments if a.name == name]


def run_told(work: Callable[[StaticInputs], Any], inputs: StaticInputs) -> Any:
    """Run work that is told that a capture is under way, and has run without being told."""
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


class Comparison:
    """Compares what work returns when it is told of a capture with what eager has returned."""

    def keep(self, result: Any) -> Any:
        """What a later run is compared with."""
        return [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in pytree.tree_leaves(result)
        ]

    def check(self, told: Any, kept: Any, dtypes: Iterable[torch.dtype]) -> None:
        """Raise CaptureError if the two differ by more than rounding.

        Args:
            told: what the work has returned.
            kept: what `keep` has kept of eager's.
            dtypes: those that it has computed in.
        """
        same_when_told(told, kept, rounding_of(dtypes))


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """The relative error that rounding in the coarsest of some dtypes may make."""
    return max((ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def same_when_told(told: Any, eager: Sequence[Any], rounding: float = 0.0) -> None:
    """Refuse work that computes something else when it is told that a capture is under way.

    Args:
        told: what it returns when it is told.
        eager: the leaves of what it returns else.
        rounding: relative error that is allowed in any case; more where their dtype is coarser.
    """
    mine = pytree.tree_leaves(told)
    alike = len(mine) == len(eager)
    for a, b in zip(mine, eager, strict=False):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            plain = isinstance(a, SCALARS) and isinstance(b, SCALARS)
            alike = alike and (not plain or describe(a) == describe(b))
            continue
        alike = alike and a.shape == b.shape and a.dtype == b.dtype
        if alike and a.numel():
            error, _ = error_of(a, b, b)
            real = a.dtype.to_real() if a.dtype.is_complex else a.dtype
            alike = error.rms <= max(rounding, ROUNDING.get(real, OTHER_ROUNDING))
            alike = alike and torch.equal(special_values(a), special_values(b))
    if not alike:
        raise another_result()


def another_result() -> CaptureError:
    """The error for work that computes something else when it is told."""
    return CaptureError(
        "The call computes something else when it is told that a capture is under way.",
        remedy="It asks torch.cuda.is_current_stream_capturing(), and so does transformers for "
        "attention masks: try attn_implementation='eager', or pass the mask explicitly.",
    )
