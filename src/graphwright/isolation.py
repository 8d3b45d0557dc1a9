"""Try candidates in processes of their own, so that none can harm the caller or another one.

The model, its inputs and what eager makes of them are written once to a file without a name. A
process (`graphwright._worker`) imports what the model needs and forks a child for each candidate;
several children may set up at once, one at a time is timed, and nothing else runs then. A child
that crashes, hangs or takes more memory than it may becomes a row; its whole process group is
killed.

A child sends ("unfit", why) when it cannot stand for the caller's process, else ("loaded",). It is
sent the candidate; after ("ready",) it waits to be told to begin timing; ("row", row) is its last.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from .errors import first_line
from .evaluation import Evaluator, Sample
from .report import Row, Status
from .report.table import duration, memory
from .settings import Settings
from .snapshots import State
from .strategies import Candidate
from .watch import FunctionModule

# Seconds between two looks at the memory of children, and until a new process has to answer.
_LOOK_S = 0.05
# Bytes of the longest message on a control socket.
MESSAGE = 1 << 20
_START_S = 120.0
# The share of what is free that one candidate may take.
_SHARE = 0.8
# Copies of the model and its inputs that a set-up may need at once.
_COPIES = 6


class IsolationError(Exception):
    """Candidates cannot be tried in processes of their own here."""


@dataclass
class Task:
    """What a child needs to evaluate a candidate as the caller's process would."""

    module: nn.Module
    samples: list[Sample]
    device: torch.device
    objective: str
    screening_s: float
    settings: Settings

    def evaluator(self) -> Evaluator:
        """An evaluator in this process, which has loaded the task."""
        state = State(self.module)
        for sample in self.samples:
            sample.reference.state = state
        return Evaluator(
            self.module,
            self.samples,
            self.device,
            objective=self.objective,
            screening_s=self.screening_s,
        )


@dataclass(frozen=True)
class Limits:
    """What one candidate may take: seconds to set up and to time, each, and bytes.

    Host memory counts beyond what the child holds with the model loaded.
    """

    seconds: float
    host_bytes: int
    device_bytes: int | None = None

    @classmethod
    def here(cls, seconds: float, device: torch.device, memory_limit: int | None) -> Limits:
        """What this machine has: most of what is free, or less if the caller says so."""
        host = int(_SHARE * _free_host_bytes())
        if device.type != "cuda":
            return cls(seconds, host if memory_limit is None else memory_limit)
        free = int(_SHARE * torch.cuda.mem_get_info(device)[0])
        return cls(seconds, host, free if memory_limit is None else memory_limit)


@dataclass(eq=False)
class _Child:
    """One candidate's process, as seen from here."""

    candidate: Candidate
    pid: int
    channel: Connection
    log: IO[bytes]
    began: float = field(default_factory=time.monotonic)
    held: int = 0
    ready: bool = False
    row: Row | None = None
    unfit: str | None = None

    @property
    def over(self) -> bool:
        return self.row is not None or self.unfit is not None


class Workers:
    """Processes that evaluate candidates; a context manager, after which none is left.

    Args:
        evaluator: what evaluates candidates in this process, to be repeated in others.
        limits: for each candidate.
        overlap: set-ups at once.
        objective: as the evaluator's.
        screening_s: likewise.
        preload: modules to import before children are forked, beside the model's own.

    Raises:
        IsolationError: this machine or model does not allow it; the text says why.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        limits: Limits,
        *,
        objective: str,
        screening_s: float,
        preload: Sequence[str] = (),
        overlap: int | None = None,
    ) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            raise IsolationError(f"{sys.platform} has no safe fork")
        self._limits = limits
        self._children: list[_Child] = []
        self._device = evaluator.device
        task = Task(
            evaluator.module,
            evaluator.samples,
            evaluator.device,
            objective,
            screening_s,
            Settings.taken(),
        )
        self._payload = _written(task)
        self._overlap = overlap or _overlap(evaluator.device, self._payload, limits)
        self._preload = [*_modules_of(evaluator.module), *preload]
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = task.settings

    def __enter__(self) -> Workers:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, self._log = mine, tempfile.TemporaryFile()
        root = str(Path(__file__).resolve().parent.parent)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (root, environment.get("PYTHONPATH")))
        )
        # Else a mere question for a GPU starts CUDA, which does not survive a fork.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        handles = (theirs.fileno(), self._payload.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "graphwright._worker", *map(str, (*handles, os.getpid()))],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
            theirs.close()
            mine.settimeout(_START_S)
            found = self._ask("prepare", path=self._settings.path, modules=self._preload)
            if not found["forks"]:
                raise IsolationError("a module that the model needs starts CUDA when imported")
        except BaseException as error:
            theirs.close()
            self.close()
            if isinstance(error, OSError | ValueError):
                raise IsolationError(f"no process could be started: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started, and let go of the file."""
        for child in self._children:
            _kill(child.pid)
            child.channel.close()
            child.log.close()
        self._children.clear()
        if self._process is not None:
            self._control.close()
            _kill(self._process.pid)
            self._process.wait()
            self._process = None
        self._log.close()
        self._payload.close()

    def _ask(self, what: str, handles: Sequence[int] = (), **more: Any) -> dict[str, Any]:
        message = json.dumps({"do": what, **more}).encode()
        socket.send_fds(self._control, [message], list(handles))
        answer = self._control.recv(MESSAGE)
        if not answer:
            raise IsolationError(f"the process for candidates ended: {_last_line(self._log)}")
        found: dict[str, Any] = json.loads(answer)
        return found

    # ------------------------------------------------------------ candidates

    def evaluate(
        self,
        candidates: Sequence[Candidate],
        *,
        deadline: float | None = None,
        begin: Callable[[Candidate], None] | None = None,
    ) -> Iterator[tuple[Candidate, Row | str]]:
        """A row for each candidate, in order; in place of one, why it cannot be tried like this.

        Args:
            candidates: what to try.
            deadline: `time.monotonic()` at which what is left is not tried any more.
            begin: told of each candidate when its set-up begins, or its timing.
        """
        for start in range(0, len(candidates), self._overlap):
            group = candidates[start : start + self._overlap]
            if deadline is not None and time.monotonic() >= deadline:
                for candidate in group:
                    yield candidate, _late(candidate)
                continue
            started: list[tuple[Candidate, _Child | str]] = []
            for candidate in group:
                if begin is not None:
                    begin(candidate)
                try:
                    started.append((candidate, self._start(candidate)))
                except IsolationError as error:
                    started.append((candidate, str(error)))
            children = [child for _, child in started if isinstance(child, _Child)]
            self._follow(children, deadline, lambda child: child.ready)
            for candidate, child in started:
                if isinstance(child, str):
                    yield candidate, child
                    continue
                if not child.over:
                    if begin is not None:
                        begin(candidate)
                    child.began = time.monotonic()
                    with contextlib.suppress(OSError):
                        child.channel.send("begin")
                    self._follow([child], deadline, lambda child: False)
                self._end(child)
                yield candidate, child.row if child.row is not None else str(child.unfit)

    def _start(self, candidate: Candidate) -> _Child:
        import cloudpickle

        try:
            with _by_value():
                packed = cloudpickle.dumps((candidate, self._limits.device_bytes))
        except Exception as error:
            raise IsolationError(f"the strategy cannot be pickled: {first_line(error)}") from error
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        try:
            pid = self._ask("fork", (theirs.fileno(), log.fileno()))["child"]
        except OSError as error:
            ours.close()
            log.close()
            raise IsolationError(f"no process could be started: {error}") from error
        finally:
            theirs.close()
        child = _Child(candidate, pid, Connection(ours.detach()), log)
        self._children.append(child)
        with contextlib.suppress(OSError):
            child.channel.send_bytes(packed)
        return child

    def _follow(
        self, children: Sequence[_Child], deadline: float | None, until: Callable[[_Child], bool]
    ) -> None:
        """Listen to children until each is over or has come so far; watch what they take."""
        while waiting := [child for child in children if not (child.over or until(child))]:
            for ready in wait([child.channel for child in waiting], _LOOK_S):
                child = next(child for child in waiting if child.channel is ready)
                self._hear(child)
            now = time.monotonic()
            for child in waiting:
                if child.over:
                    continue
                if deadline is not None and now > deadline:
                    _kill(child.pid)
                    child.row = _late(child.candidate)
                elif now - child.began > (self._limits.seconds if child.held else _START_S):
                    self._stop(
                        child,
                        Status.TIMED_OUT,
                        f"its {'timing' if child.ready else 'set-up'} took over "
                        f"{duration(self._limits.seconds)}",
                        "Raise timeout_s if it needs longer.",
                    )
                taken = _resident(child.pid) - child.held
                if child.held and not child.over and taken > self._limits.host_bytes:
                    self._stop(
                        child,
                        Status.MEMORY_EXCEEDED,
                        f"it took {memory(taken)} of host memory; "
                        f"{memory(self._limits.host_bytes)} are allowed",
                        "Raise memory_limit if it needs more.",
                    )

    def _hear(self, child: _Child) -> None:
        try:
            kind, *rest = child.channel.recv()
        except (EOFError, OSError):
            child.row = self._ended(child)
            return
        if kind == "loaded":
            # What comes before is not the candidate's doing.
            child.held, child.began = _resident(child.pid), time.monotonic()
        elif kind == "ready":
            child.ready = True
        elif kind == "unfit":
            child.unfit = rest[0]
        else:
            child.row = rest[0]

    def _stop(self, child: _Child, status: Status, reason: str, remedy: str) -> None:
        _kill(child.pid)
        row = Row(child.candidate.name, status, reason, remedy)
        row.complexity = child.candidate.complexity
        child.row = row

    def _ended(self, child: _Child) -> Row:
        """The row of a child that ended without one."""
        _kill(child.pid)
        self._children.remove(child)
        status = self._ask("reap", child=child.pid)["status"]
        row = Row(child.candidate.name, Status.CRASHED, complexity=child.candidate.complexity)
        last = _last_line(child.log)
        told = f": {last}" if last else ""
        child.channel.close()
        child.log.close()
        if status == -signal.SIGKILL:
            row.status = Status.MEMORY_EXCEEDED
            row.reason = "the system killed its process, as it does where memory runs out"
        elif status < 0:
            row.reason = f"its process was ended by {signal.Signals(-status).name}{told}"
        else:
            row.reason = f"its process ended with exit status {status}{told}"
        return row

    def _end(self, child: _Child) -> None:
        """Leave nothing of a child, nor of what it has started."""
        if child not in self._children:
            return
        self._children.remove(child)
        _kill(child.pid)
        self._ask("reap", child=child.pid)
        child.channel.close()
        child.log.close()


def _late(candidate: Candidate) -> Row:
    return Row(candidate.name, Status.NOT_TRIED, complexity=candidate.complexity)


def _kill(pid: int) -> None:
    """Kill a process and all of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _resident(pid: int) -> int:
    """Bytes of memory of its own that a process holds; 0 where that cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/status", encoding="ascii") as handle:
            kept = ("RssAnon:", "RssShmem:")
            return sum(int(line.split()[1]) for line in handle if line.startswith(kept)) * 1024
    return 0


def _last_line(log: IO[bytes]) -> str:
    """The last line that a process printed."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - 4096))
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]


# ---------------------------------------------------------------- the payload


def _written(task: Task) -> IO[bytes]:
    """The task in a file that has no name: it goes when the last process that holds it does."""
    import cloudpickle

    file = tempfile.TemporaryFile(prefix="graphwright-")  # noqa: SIM115  # handed out
    try:
        with _by_value():
            torch.save(task, file, pickle_module=cloudpickle)
        file.flush()
    except BaseException as error:
        file.close()
        if isinstance(error, Exception):
            raise IsolationError(f"it cannot be pickled: {first_line(error, 160)}") from error
        raise
    return file


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Pickle what modules define that another process could not import, not just their names."""
    import cloudpickle

    finder = importlib.machinery.PathFinder
    found = []
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__" or not getattr(module, "__file__", None):
            continue
        if (
            finder.find_spec(name) is None
            and name not in cloudpickle.list_registry_pickle_by_value()
        ):
            found.append(module)
    for module in found:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in found:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of(module: nn.Module) -> list[str]:
    """Modules that define a model's classes, to be imported once for all children."""
    owner: Any = module._function if isinstance(module, FunctionModule) else None
    names = {type(child).__module__ for child in module.modules()}
    names.add(getattr(owner, "__module__", None) or "torch")
    return sorted(names - {"__main__"})


def _overlap(device: torch.device, payload: IO[bytes], limits: Limits) -> int:
    """Set-ups at once: half of the cores, as far as memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = max(1, (cores or 1) // 2)
    needed = _COPIES * max(1, os.fstat(payload.fileno()).st_size)
    room = limits.host_bytes if device.type == "cpu" else limits.device_bytes or 0
    return max(1, min(count, room // needed))


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
