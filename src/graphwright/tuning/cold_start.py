"""Seconds from the start of a process to its first right answer, for each candidate.

Each is timed in fresh processes, which run `cold_start_main`. A candidate that can be loaded
without the model is loaded from a saved artifact; all others are built from the pickled model.
Compilers start with empty caches; a note of the row says how long it takes once these are filled.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from ..artifacts.saving import save_choice
from ..artifacts.substitute import unsavable
from ..artifacts.tuned_module import TunedModule
from ..errors import GraphwrightError, in_words
from ..processes.child import GARBLED, KILLED, Child, ending
from ..processes.environment_variables import CANDIDATE
from ..processes.pickled_files import pickling_by_value
from ..report.result import EAGER, Row, Status
from ..report.table import duration
from ..strategies.base import Built, Candidate
from .trial import CandidateEvaluator
from .workers.settings import ProcessSettings
from .workers.task import IsolationError, Task, write_task

# Files in the folder that is handed to a process.
ARTIFACT, ORDER = "artifact.gw", "order.pickle"
# How often each candidate is timed with empty caches.
ROUNDS = 2
_CACHE_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Seconds that a process has to end after it has closed its pipe.
_END_TIMEOUT_S = 2.0
# Bytes of the longest answer.
_MAX_ANSWER = 1 << 16


@dataclass(frozen=True)
class StartOrder:
    """What a fresh process is to do.

    Attributes:
        path: the caller's `sys.path`.
        argv: the caller's `sys.argv`.
        settings: the caller's.
        candidate: what to build from the model, pickled; unused where an artifact is loaded.
    """

    path: list[str]
    argv: list[str]
    settings: ProcessSettings
    candidate: bytes


class _NoRightAnswer(Exception):
    """A candidate gave no right first answer."""

    def __init__(self, status: Status, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.remedy = status, reason, remedy


@dataclass
class ColdStarts:
    """Times first answers; a context manager that leaves neither processes nor files behind.

    Attributes:
        evaluator: of this process.
        kept: what was built in this process, by candidate.
        tuned: makes a TunedModule of what was built.
        timeout_s: seconds that one process may take.
        deadline: `time.monotonic()` when timing has to end; None for no limit.
    """

    evaluator: CandidateEvaluator
    kept: dict[str, list[Built]]
    tuned: Callable[[str, list[Built]], TunedModule]
    timeout_s: float
    deadline: float | None
    _task: IO[bytes] | None = None
    _no_task: str = ""

    def __enter__(self) -> ColdStarts:
        """Write the model to a file, once for all candidates."""
        try:
            self._task = write_task(Task.of(self.evaluator))
        except (IsolationError, OSError, ValueError) as error:
            self._no_task = str(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.close()
            self._task = None

    def time(self, row: Row, candidate: Candidate) -> None:
        """Put the seconds into a candidate's row; without them it is out, unless it is eager."""
        try:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise _too_late()
            row.first_answers = self._times(row, candidate)
            row.cold_start_s = min(row.first_answers)
        except _NoRightAnswer as refused:
            row.reason, row.remedy = f"no first answer: {refused.reason}", refused.remedy
            if row.strategy != EAGER:
                row.status = refused.status

    def _times(self, row: Row, candidate: Candidate) -> list[float]:
        """Seconds with empty caches, one figure for each round."""
        with tempfile.TemporaryDirectory(prefix="graphwright-", ignore_cleanup_errors=True) as made:
            folder = Path(made)
            saved = self._save(candidate, folder / ARTIFACT)
            if not saved and self._task is None:
                raise _NoRightAnswer(
                    Status.FAILED, f"a fresh process cannot be given the model: {self._no_task}"
                )
            compiles = candidate.compiles and not saved
            self._write_order(candidate, folder / ORDER, compiles=compiles)
            if self.evaluator.device.type == "cuda":
                torch.cuda.empty_cache()
            found, again = [], []
            for number in range(ROUNDS):
                caches = folder / f"caches{number}"
                found.append(self._time_process(folder, caches, saved))
                if compiles:
                    again.append(self._time_process(folder, caches, saved))
        if saved:
            row.notes.append("its first answer was measured from the saved file")
        if again:
            row.notes.append(f"first answer with filled caches: {duration(min(again))}")
        return found

    def _save(self, candidate: Candidate, path: Path) -> bool:
        """Save a candidate that can be loaded without the model; False if it cannot."""
        if unsavable(candidate) is not None or candidate.loader is None:
            return False
        name = candidate.name
        builts = self.kept.get(name)
        if builts is None:
            trial = self.evaluator.set_up(candidate)
            if not trial.builts:
                why = f"in this process: {trial.row.reason}"
                raise _NoRightAnswer(trial.row.status, why, trial.row.remedy)
            builts = self.kept[name] = trial.builts
        if any(built.save is None for built in builts):
            return False
        try:
            save_choice(self.tuned(name, builts), path)
        except GraphwrightError as error:
            raise _NoRightAnswer(Status.FAILED, *in_words(error)) from error
        return True

    def _write_order(self, candidate: Candidate, path: Path, *, compiles: bool) -> None:
        import cloudpickle

        settings = ProcessSettings.current()
        # Only what compiles needs the options of compilers; others would import them for nothing.
        options = {name: text for name, text in settings.compilers.items() if text and compiles}
        try:
            with pickling_by_value():
                pickled = cloudpickle.dumps(candidate)
        except Exception as error:
            why = f"the strategy cannot be pickled: {error}"
            raise _NoRightAnswer(Status.FAILED, why) from error
        modules = [os.path.abspath(entry) for entry in sys.path]
        order = StartOrder(modules, list(sys.argv), replace(settings, compilers=options), pickled)
        path.write_bytes(pickle.dumps(order))

    def _time_process(self, folder: Path, caches: Path, saved: bool) -> float:
        """Seconds from the start of a process until it reports a right answer."""
        scratch = caches / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        environment = {
            **{name: str(caches / place) for name, place in _CACHE_VARIABLES.items()},
            "TMPDIR": str(scratch),
            CANDIDATE: "1",
        }
        task = -1 if saved or self._task is None else self._task.fileno()
        with _pipe() as (ours, theirs):
            handles = [theirs.fileno(), *([] if task < 0 else [task])]
            arguments = [str(folder), *map(str, (theirs.fileno(), task, os.getpid()))]
            began = time.perf_counter()
            words = ["-m", "graphwright.tuning.cold_start_main", *arguments]
            with Child(words, handles=handles, environment=environment) as child:
                theirs.close()
                answer = self._read_answer(ours)
                seconds = time.perf_counter() - began
                if not answer:
                    raise _without_answer(child.status_within(_END_TIMEOUT_S), child.last_line())
        try:
            status, reason, remedy = json.loads(answer)
            status = Status(status)
        except (ValueError, TypeError):
            raise _NoRightAnswer(Status.FAILED, GARBLED) from None
        if status is not Status.OK:
            raise _NoRightAnswer(status, str(reason), str(remedy))
        return seconds

    def _read_answer(self, ours: IO[bytes]) -> bytes:
        """The line that a process answers with; empty if it ends without."""
        ends, answer = time.monotonic() + self.timeout_s, b""
        ends = ends if self.deadline is None else min(ends, self.deadline)
        while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER:
            left = ends - time.monotonic()
            if left <= 0 or not select.select([ours], [], [], left)[0]:
                if ends == self.deadline:
                    raise _too_late()
                why = f"its first answer took over {duration(self.timeout_s)}"
                raise _NoRightAnswer(Status.TIMED_OUT, why, "Raise timeout_s if it needs longer.")
            more = os.read(ours.fileno(), _MAX_ANSWER)
            if not more:
                return b""
            answer += more
        return answer


@contextlib.contextmanager
def _pipe() -> Iterator[Sequence[IO[bytes]]]:
    """Both ends of a pipe, closed at the end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as ours, open(writing, "wb", buffering=0) as theirs:
        yield ours, theirs


def _too_late() -> _NoRightAnswer:
    why = "the budget was spent before its first answer was timed"
    return _NoRightAnswer(Status.NOT_TRIED, why, "Give a larger budget.")


def _without_answer(status: int | None, printed: str) -> _NoRightAnswer:
    """What became of a process without an answer; `status` is None if it has not ended."""
    why = ending(status, printed)
    return _NoRightAnswer(Status.MEMORY_EXCEEDED if why == KILLED else Status.CRASHED, why)
