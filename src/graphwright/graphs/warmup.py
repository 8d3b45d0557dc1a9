"""Running a call until it is warm, and learning what it needs.

The first runs are seen operation by operation: one as eager, one told that a capture is under way.
The last one runs under the conditions of a capture.
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

from ..errors import CaptureError, first_line, user_frame
from .journal import Journal, compilers_off, tensors
from .recorder import Allocate, Recorder
from .told import WithoutDropout, run_told, same_when_told
from .transaction import let_go
from .transfer import Inputs
from .undo import Undo

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
        segments: bytes of the memory ranges that it would take in an empty pool.
        contributors: its largest tensors, as (what, bytes).
    """

    mutated: tuple[int, ...]
    mutates: bool
    generators: tuple[torch.Generator, ...]
    external: tuple[torch.UntypedStorage, ...]
    segments: tuple[int, ...]
    contributors: tuple[tuple[str, int], ...]


def warm(
    work: Callable[[Inputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    undo: Undo,
    runs: int,
    rescue: Rescue | None = None,
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

    Raises:
        CaptureError: it keeps state that a graph cannot carry on.
        Exception: whatever the work raises.
    """
    allocate = _ordinary(recorder.device)
    eager, outside = _run_eagerly(work, sample, recorder, undo)
    inputs = Inputs(sample, allocate)
    journal = Journal()
    try:
        with recorder.warming(), compilers_off(), journal:
            result = run_told(work, inputs)
        journal.forget_what_stood_still()
        for tensor in tensors(result):
            journal.read(tensor)  # It may be a weight that no operation has touched.
        undo.check()
        undo.refuse_host_randomness(recorder.device, journal.generators)
        try:
            same_when_told(result, eager)
        except CaptureError:
            if not journal.generators:
                raise
            del result, eager
            journal.undo()
            _same_without_dropout(work, sample, recorder, undo)
        else:
            del result, eager
        if journal.generators:
            _refuse_seeding(work, sample, recorder, journal.generators)
            undo.check()
        for _ in range(runs):
            # Each from the same state, so that each does the same.
            journal.undo()
            inputs.fill(sample)
            with recorder.warming():
                work(inputs)
            undo.check()
        journal.undo()
        mutated = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
        del inputs

        segments = _taken(work, sample, recorder, journal, rescue, outside)
        undo.check()
    finally:
        journal.undo()
    return Warmed(
        mutated=mutated,
        mutates=journal.wrote,
        generators=tuple(journal.generators),
        external=tuple(journal.external.values()),
        segments=segments,
        contributors=journal.largest(),
    )


def _taken(
    work: Callable[[Inputs], Any],
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
        outside: memory that it has used in another run too.
    """
    generators = journal.generators
    if rescue is not None and recorder.device.type != "cpu":
        hosts = [s for s in journal.external.values() if s.device.type == "cpu" and s.nbytes()]
        if any(storage._cdata in outside for storage in hosts):
            # One graph would keep for ever what the host's memory holds now.
            with contextlib.suppress(CaptureError, RuntimeError):
                return rescue(generators)
    prepare = functools.partial(Inputs, sample)
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


def _same_without_dropout(
    work: Callable[[Inputs], Any], sample: Sequence[Any], recorder: Recorder, undo: Undo
) -> None:
    """Compare work that is told of a capture with eager, both without dropout.

    Raises:
        CaptureError: it computes something else.
    """
    eager, _ = _run_eagerly(work, sample, recorder, undo, WithoutDropout())
    inputs = Inputs(sample, _ordinary(recorder.device))
    journal = Journal()
    try:
        with recorder.warming(), compilers_off(), journal, WithoutDropout():
            same_when_told(run_told(work, inputs), eager)
    finally:
        journal.undo()


def _refuse_seeding(
    work: Callable[[Inputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    generators: Sequence[torch.Generator],
) -> None:
    """Run a call with its random generators elsewhere than before: does it go on from there?

    Raises:
        CaptureError: it seeds them itself, or makes one of its own.
    """
    states = [(generator, generator.get_state()) for generator in generators]
    journal = Journal()
    try:
        for generator in generators:
            generator.manual_seed(_OTHER_SEED)
        journal.expect(generators)
        inputs = Inputs(sample, _ordinary(recorder.device))
        with recorder.warming(), compilers_off(), journal:
            run_told(work, inputs)
        journal.check_end()
    finally:
        journal.undo()
        for generator, state in states:
            generator.set_state(state)
    journal.forget_what_stood_still()
    if any(all(g is not known for known in generators) for g in journal.generators):
        raise CaptureError(
            "The call makes a random generator of its own every time; a graph would draw from the "
            "first one for ever.",
            remedy="Make it once, outside the captured call.",
        )


def _run_eagerly(
    work: Callable[[Inputs], Any],
    sample: Sequence[Any],
    recorder: Recorder,
    undo: Undo,
    under: AbstractContextManager[Any] | None = None,
) -> tuple[list[Any], dict[int, torch.UntypedStorage]]:
    """The results of a call that is not told that a capture is under way, and what it has used."""
    inputs = Inputs(sample, _ordinary(recorder.device))
    journal = Journal()
    try:
        with compilers_off(), journal, under or contextlib.nullcontext():
            kept = [
                leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                for leaf in pytree.tree_leaves(work(inputs))
            ]
        undo.check()
    finally:
        journal.undo()
    return kept, journal.external


def _named(
    error: Exception,
    prepare: Callable[[Allocate], Inputs],
    work: Callable[[Inputs], Any],
    recorder: Recorder,
    generators: Sequence[torch.Generator],
) -> CaptureError:
    """The error of a rehearsal with the operation that it came from: found by another one."""
    journal = Journal()

    def seen(inputs: Inputs) -> Any:
        with compilers_off(), journal:
            return work(inputs)

    try:
        recorder.rehearse(prepare, seen, generators)
    except Exception as again:
        error = again
    finally:
        journal.undo()
    what = f"{first_line(error)} (in or after {journal.operation})"
    return CaptureError(
        what,
        where=user_frame(error),
        remedy="A graph repeats device work only: what waits for the GPU, copies from ordinary "
        "host memory or reads a tensor's value has to be done outside the captured call.",
    )


def _ordinary(device: torch.device) -> Allocate:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
