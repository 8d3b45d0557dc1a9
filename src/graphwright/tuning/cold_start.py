"""Seconds from the start of a process to its first right answer, for each candidate.

Each is timed in fresh processes (`_first`): what can be loaded without the model through its saved
artifact, all else from the pickled model. Compilers find empty caches there; how long it takes with
those caches filled stands in the row's notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from ..artifacts.saving import save
from ..artifacts.tuned_module import TunedModule
from ..errors import GraphwrightError, in_words
from ..report.result import EAGER, Row, Status
from ..report.table import duration
from ..strategies.base import Built, Candidate
from ..strategies.registry import is_ours
from .trial import CandidateEvaluator
from .workers.fork_server import CANDIDATE
from .workers.process import kill, last_line
from .workers.settings import Settings
from .workers.task import IsolationError, Task, by_value, written

ARTIFACT, ORDER = "artifact.gw", "order.pickle"
ROUNDS = 2
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Seconds that a process has to end after it has fallen silent, and the longest that it may say.
_END_S = 2.0
_SAID = 1 << 16


@dataclass(frozen=True)
class Order:
    """What a fresh process is to do.

    Attributes:
        path: where modules are found.
        argv: of the caller's process.
        settings: likewise.
        candidate: pickled, where it is to be built from the model.
    """

    path: list[str]
    argv: list[str]
    settings: Settings
    candidate: bytes


class _Refused(Exception):
    """A candidate gave no right first answer."""

    def __init__(self, status: Status, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.remedy = status, reason, remedy


@dataclass
class ColdStarts:
    """Times first answers; a context manager, after which neither process nor file is left.

    Attributes:
        evaluator: of this process.
        kept: what was built in this process, by candidate.
        tuned: makes a TunedModule of what was built.
        timeout_s: that one process may take.
        deadline: `time.monotonic()` after which no other candidate is begun; None for no limit.
    """

    evaluator: CandidateEvaluator
    kept: dict[str, list[Built]]
    tuned: Callable[[str, list[Built]], TunedModule]
    timeout_s: float
    deadline: float | None
    _payload: IO[bytes] | None = None
    _unfit: str = ""

    def __enter__(self) -> ColdStarts:
        """Write the model down, once for all candidates."""
        try:
            self._payload = written(Task.of(self.evaluator))
        except (IsolationError, OSError, ValueError) as error:
            self._unfit = str(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._payload is not None:
            self._payload.close()
            self._payload = None

    def time(self, row: Row, candidate: Candidate) -> None:
        """Give a row its figure; one without is out, but eager, which is always right."""
        try:
            if self.deadline is not None and time.monotonic() > self.deadline:
                why = "the budget was spent before its first answer was timed"
                raise _Refused(Status.NOT_TRIED, why, "Give a larger budget.")
            row.first_answers = self._timed(row, candidate)
            row.cold_start_s = min(row.first_answers)
        except _Refused as refused:
            row.reason, row.remedy = f"no first answer: {refused.reason}", refused.remedy
            if row.strategy != EAGER:
                row.status = refused.status

    def _timed(self, row: Row, candidate: Candidate) -> list[float]:
        with tempfile.TemporaryDirectory(prefix="graphwright-", ignore_cleanup_errors=True) as made:
            folder = Path(made)
            saved = self._saved(candidate, folder / ARTIFACT)
            if not saved and self._payload is None:
                raise _Refused(
                    Status.FAILED, f"a fresh process cannot be given the model: {self._unfit}"
                )
            compiles = candidate.compiles and not saved
            self._write_order(candidate, folder / ORDER, compiles=compiles)
            if self.evaluator.device.type == "cuda":
                torch.cuda.empty_cache()
            found, again = [], []
            for number in range(ROUNDS):
                caches = folder / f"caches{number}"
                found.append(self._first(folder, caches, saved))
                if compiles:
                    again.append(self._first(folder, caches, saved))
        if saved:
            row.notes.append("its first answer is that of what was saved of it")
        if again:
            row.notes.append(f"first answer with filled caches: {duration(min(again))}")
        return found

    def _saved(self, candidate: Candidate, path: Path) -> bool:
        """Save what can be loaded without the model; False where that is not so."""
        savable = getattr(candidate.compiler, "unsavable", None) is None and is_ours(candidate)
        if not savable or candidate.loader is None:
            return False
        name = candidate.name
        builts = self.kept.get(name)
        if builts is None:
            trial = self.evaluator.set_up(candidate)
            if not trial.builts:
                why = f"in this process: {trial.row.reason}"
                raise _Refused(trial.row.status, why, trial.row.remedy)
            builts = self.kept[name] = trial.builts
        if any(built.save is None for built in builts):
            return False
        try:
            save(self.tuned(name, builts), path)
        except GraphwrightError as error:
            raise _Refused(Status.FAILED, *in_words(error)) from error
        return True

    def _write_order(self, candidate: Candidate, path: Path, *, compiles: bool) -> None:
        import cloudpickle

        taken = Settings.taken()
        # What was set of compilers matters to what compiles, and costs others its import.
        options = {name: text for name, text in taken.compilers.items() if text and compiles}
        try:
            with by_value():
                packed = cloudpickle.dumps(candidate)
        except Exception as error:
            why = f"the strategy cannot be pickled: {error}"
            raise _Refused(Status.FAILED, why) from error
        places = [os.path.abspath(entry) for entry in sys.path]
        order = Order(places, list(sys.argv), replace(taken, compilers=options), packed)
        path.write_bytes(pickle.dumps(order))

    def _first(self, folder: Path, caches: Path, saved: bool) -> float:
        """Seconds from a process's start to its word that its answer was right."""
        scratch = caches / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            **{name: str(caches / place) for name, place in _CACHES.items()},
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "PYTHONSAFEPATH": "1",
            CANDIDATE: "1",
        }
        payload = -1 if saved or self._payload is None else self._payload.fileno()
        with _pipe() as (ours, theirs), tempfile.TemporaryFile() as log:
            handles = [theirs.fileno(), *([] if payload < 0 else [payload])]
            if payload >= 0:
                os.lseek(payload, 0, os.SEEK_SET)  # One place in the file, whoever reads it.
            given = [str(folder), *map(str, (theirs.fileno(), payload, os.getpid()))]
            began = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "graphwright.tuning.cold_start_main", *given],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            try:
                theirs.close()
                said = self._heard(ours)
                seconds = time.perf_counter() - began
                ended = bool(said) or _has_ended(process.pid)
            finally:
                kill(process.pid)  # Nobody has waited for it: the number is still its own.
                process.wait()
            if not said:
                raise _silent(process.returncode if ended else None, last_line(log))
        try:
            status, reason, remedy = json.loads(said)
            status = Status(status)
        except (ValueError, TypeError):
            raise _Refused(Status.FAILED, "its process said what makes no sense") from None
        if status is not Status.OK:
            raise _Refused(status, str(reason), str(remedy))
        return seconds

    def _heard(self, ours: IO[bytes]) -> bytes:
        """The line that a process says; empty where it ends without."""
        deadline, said = time.monotonic() + self.timeout_s, b""
        while not said.endswith(b"\n") and len(said) < _SAID:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([ours], [], [], left)[0]:
                why = f"its first answer took over {duration(self.timeout_s)}"
                raise _Refused(Status.TIMED_OUT, why, "Raise timeout_s if it needs longer.")
            more = os.read(ours.fileno(), _SAID)
            if not more:
                return b""
            said += more
        return said


@contextlib.contextmanager
def _pipe() -> Iterator[Sequence[IO[bytes]]]:
    """Both ends of a pipe, closed at the end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as ours, open(writing, "wb", buffering=0) as theirs:
        yield ours, theirs


def _has_ended(pid: int) -> bool:
    """Whether a process ends within some seconds; it is not waited for."""
    deadline = time.monotonic() + _END_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _silent(status: int | None, last: str) -> _Refused:
    """What became of a process that ended, or did not, without a word."""
    told = f": {last}" if last else ""
    if status is None:
        return _Refused(Status.CRASHED, "its process closed what it talks through")
    if status == -signal.SIGKILL:
        why = "the system killed its process, as it does where memory runs out"
        return _Refused(Status.MEMORY_EXCEEDED, why)
    if status < 0:
        name = signal.Signals(-status).name
        return _Refused(Status.CRASHED, f"its process was ended by {name}{told}")
    return _Refused(Status.CRASHED, f"its process ended with exit status {status}{told}")
