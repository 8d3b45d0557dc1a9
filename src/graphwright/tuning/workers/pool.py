"""Try candidates in worker processes, so that none can harm the caller or another candidate.

The model, its inputs and eager's results are written once, to a file without a name. The fork
server imports what the model needs and forks workers. Several workers may set up at once; only one
is timed at a time, and nothing else runs then, but slow set-ups where cores are to spare. A worker
that crashes, hangs or takes too much memory becomes a row of the report, and its whole process
group is killed.

A worker serves one candidate after the other, as long as each is graphwright's own, ends well, and
leaves it as it was (`leftovers`). Candidates that differ in the runner alone come one after the
other, and share what the compiler makes.

A worker sends "unfit" if it cannot stand in for the caller's process, else "loaded". For each
candidate it waits for the word to set up, sends "ready", waits for the word to time, sends "row",
and then, unless it is to be ended, "clean" or "not clean".
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, TypeGuard

import torch
from torch import nn

from ...processes.child import KILLED, ending
from ...processes.linux import kill_group, resident_bytes
from ...report.result import Row, Status
from ...report.table import duration, memory
from ...strategies.base import Candidate
from ...strategies.registry import is_ours, is_slow
from ..trial import CandidateEvaluator
from .fork_server import START_TIMEOUT_S, ForkServer, ForkServerGone
from .schedule import Choose, Job, Schedule, cache_of
from .task import IsolationError, Order, Task, modules_to_import, write_task
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
# With so many, some are to spare while one call is timed.
_MANY_CORES = 8
# A set-up that has taken so many seconds is slow, whatever it usually takes.
_LONG_S = 5.0
_CPU = torch.device("cpu")
# For which a worker that was killed is waited for at once.
_SOON_S = 0.5
# How often a fork server that has ended is replaced.
_MAX_RESTARTS = 16


@dataclass(frozen=True)
class TrialLimits:
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

    def split(self, count: int) -> TrialLimits:
        """The limits of each of several candidates at once."""
        if not self.shared or count < 2:
            return self
        device = None if self.device_bytes is None else self.device_bytes // count
        return replace(self, host_bytes=self.host_bytes // count, device_bytes=device)

    @classmethod
    def of_machine(
        cls, timeout_s: float, device: torch.device, memory_limit: int | None
    ) -> TrialLimits:
        """Most of the memory that is free here, or what the caller has set."""
        host = int(_MEMORY_SHARE * _free_host_bytes())
        shared = memory_limit is None
        if device.type != "cuda":
            return cls(timeout_s, host if memory_limit is None else memory_limit, shared=shared)
        free = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
        given = free if memory_limit is None else memory_limit
        return cls(timeout_s, host, given, shared=shared)


# What is known of a candidate: who tries it, its row, or the reason why no worker can try it.
_Found = Worker | Row | str


@dataclass(eq=False)
class _Trial:
    """A job whose first candidate is under way.

    Attributes:
        job: the job.
        found: its worker, until the candidate is known.
        crowded: whether it has only a share of the memory.
    """

    job: Job
    found: _Found
    crowded: bool


def has_cores_to_spare(device: torch.device) -> bool:
    """Whether imports and slow set-ups can go on beside calls on a device without slowing them."""
    return device.type == "cuda" and cores() >= _MANY_CORES


class WorkerPool:
    """Evaluates candidates in workers; a context manager that leaves no process behind.

    The fork server begins its imports as soon as the pool is made.

    Args:
        module: the model.
        candidates: what will be tried.
        device: where the model is.

    Attributes:
        spare: whether there are cores to spare: on a GPU, imports and slow set-ups then go on
            beside what is timed. Finalists are timed again, alone.

    Raises:
        IsolationError: this machine does not allow it; the text says why.
    """

    def __init__(
        self, module: nn.Module, candidates: Sequence[Candidate], device: torch.device = _CPU
    ) -> None:
        self._workers: list[Worker] = []
        # Those that are clean and have nothing to do.
        self._idle: list[Worker] = []
        # Those that were killed, and have not ended yet.
        self._ending: list[Worker] = []
        self._task: IO[bytes] | None = None
        self._device = device
        self._compiling = any(candidate.compiles for candidate in candidates)
        modules = [*modules_to_import(module), *(["torch._dynamo"] if self._compiling else [])]
        self.spare = has_cores_to_spare(device)
        self._at_once = max(1, cores() * 3 // 4 if self.spare else cores() // 2)
        builds = {each.without_runner.name for each in candidates if cache_of(each) == "inductor"}
        threads = max(1, cores() // max(1, min(len(builds), self._at_once)))
        self._importing: threading.Thread | None = None
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
        if self._importing is not None:
            self._importing.join()

    def _kill_workers(self) -> None:
        for worker in (*self._workers, *self._ending):
            kill_group(worker.pid)  # Not waited for yet, so the number is still its own.
            worker.close()
        self._workers.clear()
        self._ending.clear()
        self._idle.clear()

    def wait_until_ready(self) -> None:
        """Wait until the fork server has imported everything.

        This process, which will build what may be chosen, imports its compiler meanwhile: in a
        thread where there are cores to spare, so that workers need not wait for that.
        """
        if self._compiling and self._importing is None:
            self._importing = threading.Thread(target=_import_compiler, daemon=True)
            self._importing.start()
            if not self.spare:
                self._importing.join()
        self._server.wait_until_ready()

    def load(self, evaluator: CandidateEvaluator, limits: TrialLimits) -> None:
        """Write down what workers evaluate candidates with.

        Args:
            evaluator: of this process; workers get its model, samples and settings.
            limits: for each candidate.

        Raises:
            IsolationError: the model cannot be pickled.
        """
        self._limits = limits
        self._timing_s = evaluator.screening_s + _BESIDE_ROUNDS_S
        self._most_timing_s = evaluator.timing_s
        # What an earlier candidate has loaded is not in a later one's memory.
        self._apart = evaluator.objective == "memory"
        try:
            self._task = write_task(Task.of(evaluator))
        except (OSError, ValueError) as error:
            raise IsolationError(f"what it needs cannot be pickled: {error}") from error
        needed = _COPIES * max(1, os.fstat(self._task.fileno()).st_size)
        room = limits.host_bytes if limits.device_bytes is None else limits.device_bytes
        self._at_once = max(1, min(self._at_once, room // needed))
        self.wait_until_ready()

    # ------------------------------------------------------------ candidates

    def evaluate(
        self,
        choose: Choose,
        *,
        ends: Callable[[], float | None] = lambda: None,
        doing: Callable[[str], None] = lambda what: None,
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """Yield each candidate with its row, or with the reason why no worker can try it.

        Args:
            choose: is asked for candidates whenever there is room.
            ends: gives the `time.monotonic()` after which no timing begins, asked after each row;
                what is left then is not tried.
            doing: is told what is under way.
        """
        schedule = Schedule(choose, self._at_once, waits_for_caches=not self.spare)
        under_way: list[_Trial] = []
        # They lacked memory beside others, or the fork server has ended: these are tried alone.
        alone: list[Job] = []
        while True:
            started: list[Job] = []
            deadline = ends()
            lone = bool(alone) and not under_way
            try:
                if lone:
                    self._end_all()
                    started = [alone.pop(0)]
                elif not alone and self._has_room(under_way):
                    started = schedule.next_group(self._room(under_way, deadline))
                self._start_all(started, under_way, lone, deadline, doing)
                if not under_way:
                    return
                trial = self._next_known(under_way, deadline, doing)
            except ForkServerGone as error:
                # None runs in the caller's process: one by one shows which one did it.
                known = [trial.job for trial in under_way]
                lost = known + [job for job in started if job not in known]
                under_way.clear()
                alone += yield from self._after_server(lost, schedule, str(error))
                continue
            under_way.remove(trial)
            job, candidate, found = trial.job, trial.job.candidates.pop(0), trial.found
            exceeded = isinstance(found, Row) and found.status is Status.MEMORY_EXCEEDED
            if trial.crowded and exceeded:
                # It had only a share, or another one took everything: try it alone.
                alone.append(Job([candidate, *job.candidates]))
            else:
                assert not isinstance(found, Worker)
                yield candidate, found
                schedule.put_back(job)

    def _after_server(
        self, lost: Sequence[Job], schedule: Schedule, why: str
    ) -> Generator[tuple[Candidate, Row | str], None, list[Job]]:
        """Start another fork server, and yield the candidate that has ended this one, if known.

        Args:
            lost: what was under way.
            schedule: gets back what is left of that candidate's job.
            why: the fork server ended.

        Returns:
            Jobs that are to be tried alone.

        Raises:
            IsolationError: no other one can be started.
        """
        lost = list(lost)
        if len(lost) == 1:
            job = lost.pop()
            yield _ended_server(job)
            schedule.put_back(job)
        try:
            self._restart(why)
        except IsolationError:
            for job in lost:
                yield _ended_server(job)
            raise
        return lost

    def _has_room(self, under_way: Sequence[_Trial]) -> bool:
        """Whether other candidates may be set up now: nothing is, or only what is slow."""
        if not self.spare:
            return not under_way
        return len(under_way) < self._at_once and all(map(self._is_aside, under_way))

    def _room(self, under_way: Sequence[_Trial], deadline: float | None) -> int:
        """How many more may be set up now; of many, as many as there is time to time."""
        room = self._at_once - len(under_way)
        if deadline is not None and self.spare:
            room = min(room, int((deadline - time.monotonic()) / self._timing_s))
        return max(1, room)

    def _is_aside(self, trial: _Trial) -> bool:
        """Whether a set-up is slow, and others are set up and timed meanwhile."""
        found = trial.found
        if not (self.spare and _sets_up(found)):
            return False
        is_long = found.loaded and time.monotonic() - found.phase_began > _LONG_S
        return is_long or is_slow(_candidate_of(found), self._device)

    def _start_all(
        self,
        jobs: Sequence[Job],
        under_way: list[_Trial],
        lone: bool,
        deadline: float | None,
        doing: Callable[[str], None],
    ) -> None:
        """Begin to set up the first candidate of each job."""
        if not jobs:
            return
        doing(f"setting up {', '.join(job.candidates[0].name for job in jobs)}")
        count = len(under_way) + len(jobs)
        if self.spare and not lone and count > 1:
            count = self._at_once  # Others follow before all of these are done.
        limits, crowded = self._limits.split(count), count > 1 and self._limits.shared
        for job in jobs:
            under_way.append(_Trial(job, self._start_or_refuse(job, deadline, limits), crowded))

    def _next_known(
        self, under_way: Sequence[_Trial], deadline: float | None, doing: Callable[[str], None]
    ) -> _Trial:
        """Wait until a candidate's row is known, and time it for that, if it can be timed."""
        self._wait_for_set_up(under_way, deadline)
        self._reap_ended()
        for trial in under_way:
            worker = trial.found
            if not isinstance(worker, Worker):
                return trial
            if worker.settled or _waits(worker):
                doing(f"timing {trial.job.candidates[0].name}")
                self._time(worker, under_way, deadline)
                self._leave(worker, trial.job)
                trial.found = worker.row or str(worker.unfit)
                return trial
        raise AssertionError("a worker was awaited whose row is known or that can be timed")

    def _restart(self, why: str) -> None:
        self._kill_workers()
        self._server.close()
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise IsolationError(why)
        self._server = ForkServer(*self._server_arguments)
        self._server.wait_until_ready()

    def _start_or_refuse(
        self, job: Job, deadline: float | None, limits: TrialLimits
    ) -> Worker | Row | str:
        """A worker; or a row if it is too late, or the reason why none can be started."""
        if deadline is not None and time.monotonic() >= deadline:
            return _not_tried(job.candidates[0])
        try:
            return self._start(job, limits)
        except ForkServerGone:
            raise
        except IsolationError as error:
            return str(error)

    def _start(self, job: Job, limits: TrialLimits) -> Worker:
        """Give the first candidate of a job to a worker."""
        assert self._task is not None
        candidate = job.candidates[0]
        is_last = self._apart or not is_ours(candidate)
        keeps_build = not is_last and len(job.candidates) > 1
        order = Order(candidate, limits.device_bytes, is_last, keeps_build)
        pickled = order.to_bytes()
        worker = job.worker if self._lives(job.worker) else None
        shares = worker is not None
        worker = worker or self._idle_worker(order, job)
        if worker is None:
            try:
                worker = Worker.start(self._server, self._task.fileno())
            except OSError as error:
                raise IsolationError(f"no process could be started: {error}") from error
            self._workers.append(worker)
        job.worker = None
        worker.give(order, pickled, limits.timeout_s, limits.host_bytes, shares=shares)
        return worker

    def _idle_worker(self, order: Order, job: Job) -> Worker | None:
        """A worker that can serve a candidate, best one that has used the same compiler."""
        if order.is_last:
            if self._idle and len(self._workers) >= self._at_once:
                self._end(self._idle.pop(0))  # Each holds a copy of the model.
            return None
        self._idle.sort(key=lambda worker: job.cache is not None and worker.cache == job.cache)
        while self._idle:
            worker = self._idle.pop()
            if self._lives(worker):
                return worker
            self._end(worker)
        return None

    def _lives(self, worker: Worker | None) -> bool:
        """Whether a worker that has rested was not ended meanwhile, for its memory say."""
        return worker in self._workers and worker is not None and not worker.has_ended(0.0)

    def _end_all(self) -> None:
        """End all workers, so that one candidate has all of the memory."""
        self._idle.clear()
        for worker in (*self._workers, *self._ending):
            self._end(worker)

    def _leave(self, worker: Worker, job: Job) -> None:
        """Keep a worker that is clean for the rest of its job or for other ones; end any other."""
        worker.cache = job.cache
        if not worker.clean:
            self._let_end(worker)
        elif len(job.candidates) > 1:
            job.worker = worker
        else:
            self._idle.append(worker)

    def _wait_for_set_up(self, under_way: Sequence[_Trial], deadline: float | None) -> None:
        """Wait until one may be timed, or is known: nothing is set up then but what is aside.

        When the time that is left is needed to time those that are ready, slow ones are stopped, or
        go on beside these.
        """
        while waiting := [trial for trial in under_way if _sets_up(trial.found)]:
            in_the_way = [trial for trial in waiting if not self._is_aside(trial)]
            known = len(waiting) < len(under_way)
            if known and not in_the_way:
                return
            self._poll([trial.found for trial in waiting])
            if not self._is_late(under_way, deadline):
                continue
            if known and self.spare:
                return  # They may go on beside what is timed.
            # Those that have become ready just now can still be timed.
            for trial in waiting:
                if _sets_up(trial.found):
                    _stop_late(trial.found)

    def _is_late(self, under_way: Sequence[_Trial], deadline: float | None) -> bool:
        """Whether the time that is left is needed to time what is ready."""
        if deadline is None:
            return False
        ready = sum(_waits(trial.found) for trial in under_way)
        return time.monotonic() > deadline - ready * self._timing_s

    def _time(self, worker: Worker, under_way: Sequence[_Trial], deadline: float | None) -> None:
        """Have a worker time its candidate, for so long as a timing may take after the deadline."""
        if worker.settled:
            return
        if deadline is not None and time.monotonic() > deadline:
            _stop_late(worker)
            return
        worker.phase_began = time.monotonic()
        worker.go_on()
        others = [trial.found for trial in under_way if trial.found is not worker]
        while not worker.settled:
            self._poll([worker, *filter(_sets_up, others)])
            late = deadline is not None and time.monotonic() > deadline + self._most_timing_s
            if late and not worker.settled:
                _stop_late(worker)

    def _poll(self, found: Sequence[_Found]) -> None:
        """Wait a moment for messages of workers, and check their limits."""
        workers = [worker for worker in found if isinstance(worker, Worker)]
        readable = set(wait([handle for one in workers for handle in one.handles], _POLL_S))
        for worker in workers:
            closed = not readable.isdisjoint(worker.handles) and worker.read_messages()
            if worker.settled:
                continue
            if closed or worker.has_ended(0.0):
                worker.read_messages()
                worker.row = worker.row or self._row_of_ended(worker)
                worker.clean = False
            else:
                self._check_limits(worker)

    def _check_limits(self, worker: Worker) -> None:
        """Stop a worker that takes too long, too much memory, or prints too much."""
        spent = time.monotonic() - worker.phase_began
        taken = resident_bytes(worker.pid) - worker.held_bytes
        if worker.row is not None:
            # It looks at what the candidate has left behind.
            if spent > worker.timeout_s:
                worker.stop(worker.row)
        # What it takes to load the model is not the candidate's doing.
        elif not worker.loaded:
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
        candidate = _candidate_of(worker)
        worker.stop(Row(candidate.name, status, reason, remedy, complexity=candidate.complexity))

    def _row_of_ended(self, worker: Worker) -> Row:
        """The row of a worker that ended without one."""
        candidate = _candidate_of(worker)
        row = Row(candidate.name, Status.CRASHED, complexity=candidate.complexity)
        printed, ended = worker.last_line, worker.has_ended(_END_TIMEOUT_S)
        row.reason = ending(self._end(worker) if ended else None, printed)
        if row.reason == KILLED:
            row.status = Status.MEMORY_EXCEEDED
        return row

    def _end(self, worker: Worker) -> int:
        """End a worker and whatever it has started; its exit status, as `ForkServer.reap`."""
        if worker in self._workers:
            self._workers.remove(worker)
            kill_group(worker.pid)
        elif worker in self._ending:
            self._ending.remove(worker)
        else:
            return 0
        try:
            return self._server.reap(worker.pid)
        finally:
            worker.close()

    def _let_end(self, worker: Worker) -> None:
        """Kill a worker; if it has not ended soon, as on a GPU, it is waited for later."""
        if worker in self._workers:
            self._workers.remove(worker)
            kill_group(worker.pid)
            self._ending.append(worker)
            worker.has_ended(_SOON_S)
        self._reap_ended()

    def _reap_ended(self) -> None:
        for worker in self._ending.copy():
            if worker.has_ended(0.0):
                self._end(worker)


def _import_compiler() -> None:
    # If the compiler is broken, its candidates say so.
    with contextlib.suppress(Exception):
        importlib.import_module("torch._inductor.compile_fx")


def _candidate_of(worker: Worker) -> Candidate:
    assert worker.candidate is not None
    return worker.candidate


def _waits(found: _Found) -> bool:
    """Whether a worker is set up and waits to be timed."""
    return isinstance(found, Worker) and found.ready and not found.done


def _sets_up(found: _Found) -> TypeGuard[Worker]:
    """Whether it is a worker that is neither ready nor settled."""
    return isinstance(found, Worker) and not (found.settled or _waits(found))


def _stop_late(worker: Worker) -> None:
    """Stop a worker since there is no time left to time its candidate."""
    row = _not_tried(_candidate_of(worker))
    if worker.loaded and not worker.ready:
        spent = time.monotonic() - worker.phase_began
        row.reason = f"its set-up was stopped after {duration(spent)}"
    worker.stop(worker.row or row)


def _ended_server(job: Job) -> tuple[Candidate, Row]:
    """The row of the candidate of a job that was tried when the fork server ended."""
    candidate = job.candidates.pop(0)
    why = "the process that candidates are started from ended while this one was tried"
    return candidate, Row(candidate.name, Status.CRASHED, why, complexity=candidate.complexity)


def _not_tried(candidate: Candidate) -> Row:
    return Row(candidate.name, Status.NOT_TRIED, complexity=candidate.complexity)


def cores() -> int:
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
