"""Try candidates in processes of their own, so that none can harm the caller or another one.

The model, its inputs and what eager makes of them are written once to a file without a name. A
process (`nursery`) imports what the model needs and forks a child for each candidate; several
children may set up at once, one at a time is timed, and nothing else runs then. A child that
crashes, hangs or takes more memory than it may becomes a row; its whole process group is killed.

A child says "unfit" when it cannot stand for the caller's process, else "loaded", and waits to be
told to set up; after "ready" it waits to be told to begin timing; "row" is its last word.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

import torch
from torch import nn

from ...errors import first_line
from ...report.result import Row, Status
from ...report.table import duration, memory
from ...strategies.base import Candidate
from ..trial import CandidateEvaluator
from .fork_server import START_S, ForkServer, ForkServerGone
from .process import kill, resident
from .task import IsolationError, Task, by_value, modules_of, written
from .worker import MOST_PRINTED, Worker

# Seconds between two looks at the memory of children.
_LOOK_S = 0.05
# The share of what is free that one candidate may take.
_SHARE = 0.8
# Copies of the model and its inputs that a set-up may need at once.
_COPIES = 6
# Seconds that a timing takes beside its rounds, for warm-up and the look at memory.
_BESIDE_ROUNDS_S = 0.7
# Seconds that a child has to end after it has fallen silent.
_END_S = 2.0
# Times that the process is started anew which candidates are started from.
_MOST_RESTARTS = 16


@dataclass(frozen=True)
class Limits:
    """What one candidate may take: seconds to set up and to time, each, and bytes.

    Memory counts beyond what the child holds with the model loaded. Where it is `shared`, it is
    what is free for all that are set up at once.
    """

    seconds: float
    host_bytes: int
    device_bytes: int | None = None
    shared: bool = True

    def among(self, count: int) -> Limits:
        """The limits of one of several at once."""
        if not self.shared or count < 2:
            return self
        device = None if self.device_bytes is None else self.device_bytes // count
        return replace(self, host_bytes=self.host_bytes // count, device_bytes=device)

    @classmethod
    def here(cls, seconds: float, device: torch.device, memory_limit: int | None) -> Limits:
        """What this machine has: most of what is free, or less if the caller says so."""
        host = int(_SHARE * _free_host_bytes())
        if device.type != "cuda":
            given = host if memory_limit is None else memory_limit
            return cls(seconds, given, shared=memory_limit is None)
        free = int(_SHARE * torch.cuda.mem_get_info(device)[0])
        given = free if memory_limit is None else memory_limit
        return cls(seconds, host, given, shared=memory_limit is None)


class WorkerPool:
    """Processes that evaluate candidates; a context manager, after which none is left.

    They begin to import what is needed as soon as they are made.

    Args:
        module: the model.
        candidates: what will be tried.

    Raises:
        IsolationError: this machine does not allow it; the text says why.
    """

    def __init__(self, module: nn.Module, candidates: Sequence[Candidate]) -> None:
        self._children: list[Worker] = []
        self._payload: IO[bytes] | None = None
        compiling = sum(candidate.compiles for candidate in candidates)
        preload = [*modules_of(module), *(["torch._dynamo"] if compiling else [])]
        self._at_once = max(1, _cores() // 2)
        threads = max(1, _cores() // max(1, min(compiling, self._at_once)))
        self._prepared = (preload, threads)
        self._restarts = 0
        self._nursery = ForkServer(*self._prepared)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started, and let go of the file."""
        self._end_all()
        self._nursery.close()
        if self._payload is not None:
            self._payload.close()

    def _end_all(self) -> None:
        for child in self._children:
            kill(child.pid)  # Nobody has waited for it, so that the number is still its own.
            child.let_go()
        self._children.clear()

    def ready(self) -> None:
        """Wait until all is imported."""
        self._nursery.ready()

    def load(self, evaluator: CandidateEvaluator, limits: Limits) -> None:
        """Take over what an evaluator of this process does.

        Args:
            evaluator: its model, samples and settings.
            limits: for each candidate.

        Raises:
            IsolationError: the model cannot be pickled.
        """
        self._limits = limits
        self._timing_s = evaluator.screening_s + _BESIDE_ROUNDS_S
        try:
            self._payload = written(Task.of(evaluator))
        except (OSError, ValueError) as error:
            raise IsolationError(f"what it needs cannot be written down: {error}") from error
        needed = _COPIES * max(1, os.fstat(self._payload.fileno()).st_size)
        room = limits.host_bytes if limits.device_bytes is None else limits.device_bytes
        self._at_once = max(1, min(self._at_once, room // needed))
        self._nursery.ready()

    # ------------------------------------------------------------ candidates

    def evaluate(
        self,
        candidates: Sequence[Candidate],
        *,
        deadline: float | None = None,
        doing: Callable[[str], None] = lambda what: None,
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """A row for each candidate; in place of one, why it cannot be tried like this.

        Args:
            candidates: what to try.
            deadline: `time.monotonic()` after which no timing begins; what is left is not tried.
            doing: told what is under way.
        """
        for start in range(0, len(candidates), self._at_once):
            group = candidates[start : start + self._at_once]
            again = []
            for candidate, found in self._safely(group, deadline, doing):
                crowded = len(group) > 1 and self._limits.shared
                if crowded and isinstance(found, Row) and found.status is Status.MEMORY_EXCEEDED:
                    # It had a share, or another one had taken all: alone it has what there is.
                    again.append(candidate)
                else:
                    yield candidate, found
            for candidate in again:
                yield from self._safely([candidate], deadline, doing)

    def _safely(
        self, group: Sequence[Candidate], deadline: float | None, doing: Callable[[str], None]
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """The rows of a group, also where one of them ends the process that starts others."""
        left = list(group)
        try:
            for candidate, found in self._together(group, deadline, doing):
                left.remove(candidate)
                yield candidate, found
        except ForkServerGone as error:
            # Never in the caller's process: who of them did it is found out one by one.
            if len(group) == 1:
                yield group[0], _guilty(left.pop())
            try:
                self._restart(str(error))
            except IsolationError:
                for candidate in left:
                    yield candidate, _guilty(candidate)
                raise
            for candidate in left:
                yield from self._safely([candidate], deadline, doing)

    def _restart(self, why: str) -> None:
        self._end_all()
        self._nursery.close()
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise IsolationError(why)
        self._nursery = ForkServer(*self._prepared)
        self._nursery.ready()

    def _together(
        self, group: Sequence[Candidate], deadline: float | None, doing: Callable[[str], None]
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """Set candidates up at once, then time them one by one."""
        limits = self._limits.among(len(group))
        doing(f"setting up {', '.join(candidate.name for candidate in group)}")
        started = [(one, self._started(one, deadline, limits)) for one in group]
        children = [child for _, child in started if isinstance(child, Worker)]
        self._set_up(children, deadline)
        for candidate, child in started:
            if isinstance(child, Worker):
                doing(f"timing {candidate.name}")
                self._time(child, deadline)
                self._end(child)
                yield candidate, child.row or str(child.unfit)
            else:
                yield candidate, child

    def _started(
        self, candidate: Candidate, deadline: float | None, limits: Limits
    ) -> Worker | Row | str:
        if deadline is not None and time.monotonic() >= deadline:
            return _late(candidate)
        try:
            return self._start(candidate, limits)
        except ForkServerGone:
            raise
        except IsolationError as error:
            return str(error)

    def _start(self, candidate: Candidate, limits: Limits) -> Worker:
        import cloudpickle

        assert self._payload is not None
        try:
            with by_value():
                packed = cloudpickle.dumps((candidate, limits.device_bytes))
        except Exception as error:
            raise IsolationError(f"the strategy cannot be pickled: {first_line(error)}") from error
        payload = self._payload.fileno()
        try:
            child = Worker.born(
                self._nursery, candidate, packed, payload, limits.seconds, limits.host_bytes
            )
        except OSError as error:
            raise IsolationError(f"no process could be started: {error}") from error
        self._children.append(child)
        return child

    def _set_up(self, children: Sequence[Worker], deadline: float | None) -> None:
        """Wait until each is ready or over; for the slow ones not longer than the others can."""
        while waiting := [child for child in children if not (child.over or child.ready)]:
            self._listen(waiting)
            if deadline is not None:
                ready = sum(child.ready for child in children)
                if time.monotonic() > deadline - ready * self._timing_s:
                    for child in waiting:
                        child.stop(child.row or _late(child.candidate))

    def _time(self, child: Worker, deadline: float | None) -> None:
        if child.over:
            return
        if deadline is not None and time.monotonic() > deadline:
            child.row = _late(child.candidate)
            return
        child.began = time.monotonic()
        child.say("!")
        while not child.over:
            self._listen([child])

    def _listen(self, children: Sequence[Worker]) -> None:
        """Hear what children say, for a moment, and watch what they take."""
        spoken = set(wait([handle for child in children for handle in child.handles], _LOOK_S))
        for child in children:
            loaded = child.loaded
            closed = not spoken.isdisjoint(child.handles) and child.hear()
            if child.loaded and not loaded:
                child.say("!")  # What it holds was looked at: now comes the candidate.
            if child.over:
                continue
            if closed or child.has_ended(0.0):
                child.hear()
                child.row = child.row or self._ended(child)
            else:
                self._watch(child)

    def _watch(self, child: Worker) -> None:
        """Stop a child that takes too much."""
        spent, taken = time.monotonic() - child.began, resident(child.pid) - child.held
        # Until it has loaded the model, what it takes is not the candidate's doing.
        if not child.loaded:
            if spent > START_S:
                child.unfit = f"another process needs over {duration(START_S)} to load it"
        elif spent > child.seconds:
            what = "timing" if child.ready else "set-up"
            self._stop(
                child,
                Status.TIMED_OUT,
                f"its {what} took over {duration(child.seconds)}",
                "Raise timeout_s if it needs longer.",
            )
        elif taken > child.host_bytes:
            self._stop(
                child,
                Status.MEMORY_EXCEEDED,
                f"it took {memory(taken)} of host memory; {memory(child.host_bytes)} are allowed",
                "Raise memory_limit if it needs more.",
            )
        elif child.printed > MOST_PRINTED:
            self._stop(child, Status.FAILED, f"it printed over {memory(MOST_PRINTED)}", "")

    def _stop(self, child: Worker, status: Status, reason: str, remedy: str) -> None:
        row = Row(child.candidate.name, status, reason, remedy)
        row.complexity = child.candidate.complexity
        child.stop(row)

    def _ended(self, child: Worker) -> Row:
        """The row of a child that ended without one."""
        row = Row(child.candidate.name, Status.CRASHED, complexity=child.candidate.complexity)
        told = f": {child.last_words}" if child.last_words else ""
        if not child.has_ended(_END_S):
            row.reason = "it closed what its process talks through"
            return row
        status = self._end(child)
        if status == -signal.SIGKILL:
            row.status = Status.MEMORY_EXCEEDED
            row.reason = "the system killed its process, as it does where memory runs out"
        elif status < 0:
            row.reason = f"its process was ended by {signal.Signals(-status).name}{told}"
        else:
            row.reason = f"its process ended with exit status {status}{told}"
        return row

    def _end(self, child: Worker) -> int:
        """Leave nothing of a child, nor of what it has started; how it ended."""
        if child not in self._children:
            return 0
        self._children.remove(child)
        kill(child.pid)
        try:
            return self._nursery.reap(child.pid)
        finally:
            child.let_go()


def _guilty(candidate: Candidate) -> Row:
    why = "the process that candidates are started from ended while this one was tried"
    return Row(candidate.name, Status.CRASHED, why, complexity=candidate.complexity)


def _late(candidate: Candidate) -> Row:
    return Row(candidate.name, Status.NOT_TRIED, complexity=candidate.complexity)


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _free_host_bytes() -> int:
    """Memory that could still be had: of the machine, or of the container if that is less."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        pages = dict(line.split() for line in (group / "memory.stat").open(encoding="ascii"))
        free = min(free, limit - used + int(pages["file"]))
    return max(free, 1 << 30)
