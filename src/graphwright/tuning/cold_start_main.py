"""One first answer, timed by PARENT.

Run as `python -m graphwright.tuning.cold_start_main FOLDER ANSWER PAYLOAD PARENT`.

FOLDER holds what to do, ANSWER is a handle to say in one line how it went, and PAYLOAD one of a
file with the model and its references, or -1 where an artifact is loaded. PARENT is the number of
the process that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifacts.loading import load
from ..calls.snapshots import ModuleState, run
from ..errors import in_words
from ..evaluation.reference import Sample
from ..evaluation.verification import compare
from ..report.result import Status
from ..strategies.base import Candidate
from .cold_start import ARTIFACT, ORDER, Order
from .trial import status_of
from .workers.process import when_parent_ends
from .workers.task import Task, lend_globals


def answer(folder: Path, payload: int) -> tuple[Status, str, str]:
    """Load or build, call, compare: a status with its reason and remedy."""
    order: Order = pickle.loads((folder / ORDER).read_bytes())
    sys.path[:], sys.argv[1:] = order.path, order.argv[1:]
    order.settings.apply()
    mode = torch.inference_mode if order.settings.inference else contextlib.nullcontext
    with mode():
        if payload < 0:
            # It verifies by itself what it has loaded; the calls are then made as a user's are.
            tuned = load(folder / ARTIFACT, trust=True)
            origin = tuned._choice.origin
            assert origin is not None
            return judged([tuned] * len(origin.samples), origin.samples, origin.candidate)
        with open(payload, "rb") as file:
            task: Task = torch.load(file, weights_only=False)
        candidate: Candidate = pickle.loads(order.candidate)
        if candidate.compiles:
            lend_globals()
        # One for all samples; parameters were verified when the candidate was.
        state, calls = ModuleState(task.module, weights=False), []
        for sample in task.samples:
            sample.reference.state = state
            mine = sample.call.clone()
            calls.append(candidate.build(task.module, mine.args, mine.kwargs).call)
        return judged(calls, task.samples, candidate)


def judged(
    calls: Sequence[Any], samples: Sequence[Sample], candidate: Candidate
) -> tuple[Status, str, str]:
    """Whether the first answer to each sample is right."""
    for call, sample in zip(calls, samples, strict=True):
        ref = sample.reference
        outcome = run(call, ref.cases[0].call, ref.state)
        verdict = compare(outcome, ref.cases[0], ref, candidate.lossy_ulp)
        if not verdict.ok:
            return Status.WRONG, verdict.reason, ""
    return Status.OK, "", ""


def main() -> None:
    """Say how it went, and end at once: what the process clears up is no part of the answer."""
    folder, handle, payload = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    when_parent_ends(signal.SIGKILL, int(sys.argv[4]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A warning would stand in the log as the last word.
            found = answer(folder, payload)
    except Exception as error:
        found = (status_of(error), *in_words(error))
    os.write(handle, json.dumps(found).encode() + b"\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
