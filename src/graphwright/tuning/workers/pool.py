"""Try candidates in worker processes, so that none can harm the caller or another candidate.

The model, its inputs and eager's results are written once, to a file without a name. The fork
server imports what the model needs and forks a worker for each candidate. Several workers may set
up at once; only one is timed at a time, and nothing else runs then. A worker that crashes, hangs or
takes too much memory becomes a row of the report, and its whole process group is killed.

A worker sends "unfit" if it cannot stand in for the caller's process, else "loaded". It then waits
for the word to set up, sends "ready", waits for the word to time, and last sends "row".
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
from .fork_server import START_TIMEOUT_S, ForkServer, ForkServerGone
from .process import kill_group, resident_bytes
from .task import IsolationError, Task, modules_to_import, pickling_by_value, write_task
from .worker import MAX_PRINTED, Worker

# Seconds between two checks of the workers' time and memory.
_POLL_S = 0.05
# The share of the free memory that one candidate may take.
_MEMORY_SHARE = 0.8
# Copies of the model and its inputs that a set-up may need at once.
_COPIES = 6
# Seconds that timing takes in addition to its rounds, to warm up and to measure memory.
_BESIDE_ROUNDS_S = 0.7
# Seconds that a worker has to end after it has closed its channel.
_END_TIMEOUT_S = 2.0
# How often a fork server that has ended is replaced.
_MAX_RESTARTS = 16


@dataclass(frozen=True)
class Limits:
    """What one candidate may take.

    Attributes:
        timeout_s: seconds to set up, and seconds to time.
        host_bytes: host memory beyond what the worker holds with the model loaded.
        device_bytes: likewise, memory of the GPU; None on the CPU.
        shared: whether candidates that are set up at once share this memory.
    """

    timeout_s: float
    host_bytes: int
    device_bytes: int | None = None
    shared: bool = True

    def split(self, count: int) -> Limits:
        """The limits of each of several candidates at once."""
        if not self.shared or count < 2:
            return self
        device = None if self.device_bytes is None else self.device_bytes // count
        return replace(self, host_bytes=self.host_bytes // count, device_bytes=device)

    @classmethod
    def of_machine(cls, timeout_s: float, device: torch.device, memory_limit: int | None) -> Limits:
        """Most of the memory that is free here, or what the caller has set."""
        host = int(_MEMORY_SHARE * _free_host_bytes())
        shared = memory_limit is None
        if device.type != "cuda":
            return cls(timeout_s, host if memory_limit is None else memory_limit, shared=shared)
        free = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
        given = free if memory_limit is None else memory_limit
        return cls(timeout_s, host, given, shared=shared)


class WorkerPool:
    """Evaluates candidates in workers; a context manager that leaves no process behind.

    The fork server begins its imports as soon as the pool is made.

    Args:
        module: the model.
        candidates: what will be tried.

    Raises:
        IsolationError: this machine does not allow it; the text says why.
    """

    def __init__(self, module: nn.Module, candidates: Sequence[Candidate]) -> None:
        self._workers: list[Worker] = []
        self._task: IO[bytes] | None = None
        compiling = sum(candidate.compiles for candidate in candidates)
        modules = [*modules_to_import(module), *(["torch._dynamo"] if compiling else [])]
        self._at_once = max(1, _cores() // 2)
        threads = max(1, _cores() // max(1, min(compiling, self._at_once)))
        self._server_arguments = (modules, threads)
        self._restarts = 0
        self._server = ForkServer(*self._server_arguments)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started, and close the task's file."""
        self._kill_workers()
        self._server.close()
        if self._task is not None:
            self._task.close()

    def _kill_workers(self) -> None:
        for worker in self._workers:
            kill_group(worker.pid)  # Not waited for yet, so the number is still its own.
            worker.close()
        self._workers.clear()

    @property
    def at_once(self) -> int:
        """How many candidates can be set up side by side."""
        return self._at_once

    def wait_until_ready(self) -> None:
        """Wait until the fork server has imported everything."""
        self._server.wait_until_ready()

    def load(self, evaluator: CandidateEvaluator, limits: Limits) -> None:
        """Write down what workers evaluate candidates with.

        Args:
            evaluator: of this process; workers get its model, samples and settings.
            limits: for each candidate.

        Raises:
            IsolationError: the model cannot be pickled.
        """
        self._limits = limits
        self._timing_s = evaluator.screening_s + _BESIDE_ROUNDS_S
        try:
            self._task = write_task(Task.of(evaluator))
        except (OSError, ValueError) as error:
            raise IsolationError(f"what it needs cannot be written down: {error}") from error
        needed = _COPIES * max(1, os.fstat(self._task.fileno()).st_size)
        room = limits.host_bytes if limits.device_bytes is None else limits.device_bytes
        self._at_once = max(1, min(self._at_once, room // needed))
        self._server.wait_until_ready()

    # ------------------------------------------------------------ candidates

    def evaluate(
        self,
        candidates: Sequence[Candidate],
        *,
        deadline: float | None = None,
        doing: Callable[[str], None] = lambda what: None,
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """Yield each candidate with its row, or with the reason why no worker can try it.

        Args:
            candidates: what to try.
            deadline: `time.monotonic()` after which no timing begins; what is left is not tried.
            doing: is told what is under way.
        """
        for start in range(0, len(candidates), self._at_once):
            group = candidates[start : start + self._at_once]
            again = []
            for candidate, found in self._evaluate_safely(group, deadline, doing):
                crowded = len(group) > 1 and self._limits.shared
                if crowded and isinstance(found, Row) and found.status is Status.MEMORY_EXCEEDED:
                    # It had only a share, or another one took everything: try it alone.
                    again.append(candidate)
                else:
                    yield candidate, found
            for candidate in again:
                yield from self._evaluate_safely([candidate], deadline, doing)

    def _evaluate_safely(
        self, group: Sequence[Candidate], deadline: float | None, doing: Callable[[str], None]
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """The rows of a group, even if one of its candidates ends the fork server."""
        left = list(group)
        try:
            for candidate, found in self._evaluate_group(group, deadline, doing):
                left.remove(candidate)
                yield candidate, found
        except ForkServerGone as error:
            # The rest never runs in the caller's process: one by one shows which one did it.
            if len(group) == 1:
                yield group[0], _ended_server(left.pop())
            try:
                self._restart(str(error))
            except IsolationError:
                for candidate in left:
                    yield candidate, _ended_server(candidate)
                raise
            for candidate in left:
                yield from self._evaluate_safely([candidate], deadline, doing)

    def _restart(self, why: str) -> None:
        self._kill_workers()
        self._server.close()
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise IsolationError(why)
        self._server = ForkServer(*self._server_arguments)
        self._server.wait_until_ready()

    def _evaluate_group(
        self, group: Sequence[Candidate], deadline: float | None, doing: Callable[[str], None]
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """Set candidates up at once, then time them one by one."""
        limits = self._limits.split(len(group))
        doing(f"setting up {', '.join(candidate.name for candidate in group)}")
        started = [(one, self._start_or_refuse(one, deadline, limits)) for one in group]
        workers = [worker for _, worker in started if isinstance(worker, Worker)]
        self._wait_for_set_up(workers, deadline)
        for candidate, worker in started:
            if isinstance(worker, Worker):
                doing(f"timing {candidate.name}")
                self._time(worker, deadline)
                self._end(worker)
                yield candidate, worker.row or str(worker.unfit)
            else:
                yield candidate, worker

    def _start_or_refuse(
        self, candidate: Candidate, deadline: float | None, limits: Limits
    ) -> Worker | Row | str:
        """A worker; or a row if it is too late, or the reason why none can be started."""
        if deadline is not None and time.monotonic() >= deadline:
            return _not_tried(candidate)
        try:
            return self._start(candidate, limits)
        except ForkServerGone:
            raise
        except IsolationError as error:
            return str(error)

    def _start(self, candidate: Candidate, limits: Limits) -> Worker:
        import cloudpickle

        assert self._task is not None
        try:
            with pickling_by_value():
                pickled = cloudpickle.dumps((candidate, limits.device_bytes))
        except Exception as error:
            raise IsolationError(f"the strategy cannot be pickled: {first_line(error)}") from error
        task = self._task.fileno()
        try:
            worker = Worker.start(
                self._server, candidate, pickled, task, limits.timeout_s, limits.host_bytes
            )
        except OSError as error:
            raise IsolationError(f"no process could be started: {error}") from error
        self._workers.append(worker)
        return worker

    def _wait_for_set_up(self, workers: Sequence[Worker], deadline: float | None) -> None:
        """Wait until each worker is ready or done.

        Slow ones are stopped when the time that is left is needed to time those that are ready.
        """
        while waiting := [worker for worker in workers if not (worker.done or worker.ready)]:
            self._poll(waiting)
            if deadline is not None:
                ready = sum(worker.ready for worker in workers)
                if time.monotonic() > deadline - ready * self._timing_s:
                    for worker in waiting:
                        worker.stop(worker.row or _not_tried(worker.candidate))

    def _time(self, worker: Worker, deadline: float | None) -> None:
        if worker.done:
            return
        if deadline is not None and time.monotonic() > deadline:
            worker.row = _not_tried(worker.candidate)
            return
        worker.phase_began = time.monotonic()
        worker.go_on()
        while not worker.done:
            self._poll([worker])

    def _poll(self, workers: Sequence[Worker]) -> None:
        """Wait a moment for messages of workers, and check their limits."""
        readable = set(wait([handle for one in workers for handle in one.handles], _POLL_S))
        for worker in workers:
            was_loaded = worker.loaded
            closed = not readable.isdisjoint(worker.handles) and worker.read_messages()
            if worker.loaded and not was_loaded:
                worker.go_on()  # Its memory was read; from here on it is the candidate's.
            if worker.done:
                continue
            if closed or worker.has_ended(0.0):
                worker.read_messages()
                worker.row = worker.row or self._row_of_ended(worker)
            else:
                self._check_limits(worker)

    def _check_limits(self, worker: Worker) -> None:
        """Stop a worker that takes too long, too much memory, or prints too much."""
        spent = time.monotonic() - worker.phase_began
        taken = resident_bytes(worker.pid) - worker.loaded_bytes
        # What it takes to load the model is not the candidate's doing.
        if not worker.loaded:
            if spent > START_TIMEOUT_S:
                worker.unfit = f"another process needs over {duration(START_TIMEOUT_S)} to load it"
        elif spent > worker.timeout_s:
            what = "timing" if worker.ready else "set-up"
            self._stop(
                worker,
                Status.TIMED_OUT,
                f"its {what} took over {duration(worker.timeout_s)}",
                "Raise timeout_s if it needs longer.",
            )
        elif taken > worker.host_bytes:
            self._stop(
                worker,
                Status.MEMORY_EXCEEDED,
                f"it took {memory(taken)} of host memory; {memory(worker.host_bytes)} are allowed",
                "Raise memory_limit if it needs more.",
            )
        elif worker.printed_bytes > MAX_PRINTED:
            self._stop(worker, Status.FAILED, f"it printed over {memory(MAX_PRINTED)}", "")

    def _stop(self, worker: Worker, status: Status, reason: str, remedy: str) -> None:
        row = Row(worker.candidate.name, status, reason, remedy)
        row.complexity = worker.candidate.complexity
        worker.stop(row)

    def _row_of_ended(self, worker: Worker) -> Row:
        """The row of a worker that ended without one."""
        row = Row(worker.candidate.name, Status.CRASHED, complexity=worker.candidate.complexity)
        printed = f": {worker.last_line}" if worker.last_line else ""
        if not worker.has_ended(_END_TIMEOUT_S):
            row.reason = "it closed what its process talks through"
            return row
        status = self._end(worker)
        if status == -signal.SIGKILL:
            row.status = Status.MEMORY_EXCEEDED
            row.reason = "the system killed its process, as it does where memory runs out"
        elif status < 0:
            row.reason = f"its process was ended by {signal.Signals(-status).name}{printed}"
        else:
            row.reason = f"its process ended with exit status {status}{printed}"
        return row

    def _end(self, worker: Worker) -> int:
        """End a worker and whatever it has started; its exit status, as `ForkServer.reap`."""
        if worker not in self._workers:
            return 0
        self._workers.remove(worker)
        kill_group(worker.pid)
        try:
            return self._server.reap(worker.pid)
        finally:
            worker.close()


def _ended_server(candidate: Candidate) -> Row:
    """The row of a candidate that was tried when the fork server ended."""
    why = "the process that candidates are started from ended while this one was tried"
    return Row(candidate.name, Status.CRASHED, why, complexity=candidate.complexity)


def _not_tried(candidate: Candidate) -> Row:
    return Row(candidate.name, Status.NOT_TRIED, complexity=candidate.complexity)


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _free_host_bytes() -> int:
    """Bytes of memory that are free: of the machine, or of the container if that is less."""
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
