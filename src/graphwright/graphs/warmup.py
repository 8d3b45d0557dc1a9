"""Running a call until it is warm, and learning what it needs.

The first runs are seen operation by operation: one as eager, one told that a capture is under way.
The last one runs under the conditions of a capture.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..accuracy import OTHER_ROUNDING, ROUNDING, error_of, special_values
from ..errors import CaptureError, first_line, user_frame
from ..signature import SCALARS, describe
from .journal import Journal, compilers_off, tensors
from .recorder import Allocate, Recorder
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
            result = _told(work, inputs)
        journal.forget_what_stood_still()
        for tensor in tensors(result):
            journal.read(tensor)  # It may be a weight that no operation has touched.
        undo.check()
        undo.refuse_host_randomness(recorder.device, journal.generators)
        same_when_told(result, eager)
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
            _told(work, inputs)
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
    work: Callable[[Inputs], Any], sample: Sequence[Any], recorder: Recorder, undo: Undo
) -> tuple[list[Any], dict[int, torch.UntypedStorage]]:
    """The results of a call that is not told that a capture is under way, and what it has used."""
    inputs = Inputs(sample, _ordinary(recorder.device))
    journal = Journal()
    try:
        with compilers_off(), journal:
            kept = [
                leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                for leaf in pytree.tree_leaves(work(inputs))
            ]
        undo.check()
    finally:
        journal.undo()
    return kept, journal.external


def _told(work: Callable[[Inputs], Any], inputs: Inputs) -> Any:
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


def same_when_told(told: Any, eager: Sequence[Any]) -> None:
    """Refuse work that computes something else when it is told that a capture is under way.

    Libraries leave out what would read the device then; the numbers have to stay the same but for
    rounding.
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
            alike = error.rms <= ROUNDING.get(real, OTHER_ROUNDING)
            alike = alike and torch.equal(special_values(a), special_values(b))
    if not alike:
        raise CaptureError(
            "The call computes something else when it is told that a capture is under way.",
            remedy="It asks torch.cuda.is_current_stream_capturing(), and so does transformers for "
            "attention masks: try attn_implementation='eager', or pass the mask explicitly.",
        )


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
