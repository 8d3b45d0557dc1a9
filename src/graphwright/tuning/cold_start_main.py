"""The program that gives one first answer, which `cold_start` times.

Run as `python -m graphwright.tuning.cold_start_main FOLDER ANSWER TASK PARENT`. FOLDER holds what
to do. ANSWER is the handle of a pipe that gets one line: how it went. TASK is the handle of a file
with the model and its references, or -1 to load an artifact. PARENT is the number of the process
that waits.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..artifacts.loading import load
from ..artifacts.tuned_module import choice_of
from ..calls.snapshots import ModuleState, run
from ..errors import in_words
from ..evaluation.reference import Sample
from ..evaluation.verification import compare
from ..processes.linux import end_with_parent
from ..processes.pickled_files import publish_globals, read_pickled
from ..report.result import Status
from ..strategies.base import Candidate
from .cold_start import ARTIFACT, ORDER, StartOrder
from .trial import status_of
from .workers.task import Task


def answer(folder: Path, task_handle: int) -> tuple[Status, str, str]:
    """Load or build, call, compare: a status with its reason and remedy."""
    order: StartOrder = pickle.loads((folder / ORDER).read_bytes())
    sys.path[:], sys.argv[1:] = order.path, order.argv[1:]
    order.settings.apply()
    with order.settings.inference_mode():
        if task_handle < 0:
            # load() verifies what it loads; after that, call it as a user would.
            tuned = load(folder / ARTIFACT, trust=True)
            origin = choice_of(tuned).origin
            assert origin is not None
            return judged([tuned] * len(origin.samples), origin.samples, origin.candidate)
        task: Task = read_pickled(task_handle)
        candidate: Candidate = pickle.loads(order.candidate)
        if candidate.compiles:
            publish_globals()
        # Parameters need no look: they were verified when the candidate was.
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
    """Report how it went and exit at once, without cleaning up, which is no part of the answer."""
    folder, pipe, task, parent = Path(sys.argv[1]), *map(int, sys.argv[2:])
    end_with_parent(parent, signal.SIGKILL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The log's last line should be the candidate's.
            found = answer(folder, task)
    except Exception as error:
        found = (status_of(error), *in_words(error))
    os.write(pipe, json.dumps(found).encode() + b"\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
