"""Running a call until it is warm, and learning what it needs.

The first run is seen operation by operation, the last one runs under the conditions of a capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CaptureError, first_line, user_frame
from .journal import Journal, compilers_off, tensors
from .recorder import Allocate, Recorder
from .transfer import Inputs
from .undo import Undo


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
) -> Warmed:
    """Run a call on copies of a sample until it is warm; what it writes to is put back.

    Args:
        work: runs the call on static inputs.
        sample: the leaves of its arguments.
        recorder: what it is to be recorded by.
        undo: the Python side of its state.
        runs: how often to run it before the rehearsal, the first, observed time included.

    Raises:
        CaptureError: it keeps state that a graph cannot carry on.
        Exception: whatever the work raises.
    """
    allocate = _ordinary(recorder.device)
    inputs = Inputs(sample, allocate)
    journal = Journal()
    try:
        with recorder.warming(), compilers_off(), journal:
            result = work(inputs)
        for tensor in tensors(result):
            journal.read(tensor)  # It may be a weight that no operation has touched.
        del result
        undo.check()
        undo.refuse_host_randomness(recorder.device, journal.generators)
        for _ in range(max(1, runs - 1)):
            inputs.fill(sample)
            with recorder.warming():
                work(inputs)
            undo.check()
        mutated = tuple(s for s in inputs.slots if journal.wrote_to(inputs.tensor(s)))
        del inputs

        prepare = functools.partial(Inputs, sample)
        try:
            segments = recorder.rehearse(prepare, work, journal.generators)
        except CaptureError:
            raise
        except Exception as error:
            raise _named(error, prepare, work, recorder, journal.generators) from error
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
