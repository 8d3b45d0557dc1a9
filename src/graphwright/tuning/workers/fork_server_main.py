"""The program of the fork server, and of the workers that are forked from it.

Run as `python -m graphwright.tuning.workers.fork_server_main CONTROL PARENT`. CONTROL is the handle
of a socket to the process that tunes, PARENT that process's number.

The fork server imports what the model needs, once, and forks a worker for each candidate; it never
runs a candidate itself. A worker loads the model and its references from a file, evaluates one
candidate and leaves its row in another file. When the process that tunes ends, so does everything
that was started here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from typing import Any

import torch

from ...errors import first_line
from .fork_server import MAX_MESSAGE
from .process import adopt_orphans, end_with_parent
from .task import Task, publish_globals

# Killing orphans may leave further orphans: how often to look again.
_MAX_GENERATIONS = 50


class _Server:
    """Forks workers on request, reports how they ended, and ends what they leave behind."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: set[int] = set()
        self._scratch = ""
        self._environment: dict[str, str] = {}

    def run(self) -> None:
        """Answer requests until the other side closes the socket.

        A request names one of the methods `prepare`, `fork` and `reap`, with its arguments.
        """
        while message := _receive(self._control):
            arguments, handles = message
            answer = getattr(self, arguments.pop("request"))(handles, **arguments)
            self._control.sendall(json.dumps(answer).encode())

    def prepare(
        self,
        handles: list[int],
        path: list[str],
        argv: list[str],
        modules: list[str],
        environment: dict[str, str],
        scratch: str,
    ) -> dict[str, Any]:
        """Import what workers will need; a module that cannot be imported is left to them.

        Their temporary files go to `scratch`, which is removed with this process.
        """
        sys.path[:], sys.argv[1:] = path, argv[1:]
        self._scratch = scratch
        self._environment = {**environment, "TMPDIR": scratch}
        for name in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        if "torch._inductor" in sys.modules:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            # By default Inductor's cache lies under TMPDIR; keep it where the caller has it.
            self._environment.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        # Workers then neither collect what is here already nor copy its pages.
        gc.collect()
        gc.freeze()
        return {"can_fork": not torch.cuda.is_initialized()}

    def fork(self, handles: list[int]) -> dict[str, Any]:
        """Start a worker.

        Args:
            handles: of its channel, its log, the file with the task, and the file that holds the
                candidate and gets its row.
        """
        server = os.getpid()
        worker = os.fork()
        if worker:
            self._workers.add(worker)
            for handle in handles:
                os.close(handle)
            return {"worker": worker}
        channel, log, task, exchange = handles
        try:
            os.setsid()
            end_with_parent(server, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.clear()
            os.environ.update(self._environment)
            tempfile.tempdir = None  # Have it read TMPDIR again.
            evaluate(socket.socket(fileno=channel), task, exchange)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        except BaseException as error:
            with contextlib.suppress(Exception):
                sys.excepthook(type(error), error, error.__traceback__)
                sys.stderr.flush()
            os._exit(1)

    def reap(self, handles: list[int], worker: int) -> dict[str, Any]:
        """Wait for a worker to end: its exit status, or minus the number of the fatal signal."""
        _, status = os.waitpid(worker, 0)
        self._workers.discard(worker)
        self._kill_orphans()
        return {"status": os.waitstatus_to_exitcode(status)}

    def close(self) -> None:
        """Kill every worker and whatever it has started."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        self._workers.clear()
        self._kill_orphans()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_orphans(self) -> None:
        """Kill what candidates have started in other sessions; this process has adopted it."""
        for _ in range(_MAX_GENERATIONS):
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
                orphans = set(map(int, listed.read().split())) - self._workers
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    message, handles, _, _ = socket.recv_fds(control, MAX_MESSAGE, 4)
    return (json.loads(message), handles) if message else None


def evaluate(channel: socket.socket, task_handle: int, exchange: int) -> None:
    """Evaluate one candidate in this worker.

    Args:
        channel: tells the caller's process how far this is, and waits for its word; see `pool`.
        task_handle: of the file with the task.
        exchange: handle of the file with the pickled candidate, which its row replaces.
    """

    def say(what: str, **more: str) -> None:
        channel.send(json.dumps({"say": what, **more}).encode())

    try:
        with mmap.mmap(task_handle, 0, access=mmap.ACCESS_READ) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The log's last line should be the candidate's.
            readable: Any = file
            task: Task = torch.load(readable, weights_only=False)
            publish_globals()
        task.settings.apply()
        mode = torch.inference_mode if task.settings.inference else contextlib.nullcontext
        with mode():
            evaluator = task.evaluator()
            why = evaluator.disagreement()
        pickled = os.pread(exchange, os.fstat(exchange).st_size, 0)
        candidate, device_bytes = pickle.loads(pickled)
    except Exception as error:
        why = first_line(error, 160)
    if why is not None:
        say("unfit", why=why)
        return
    say("loaded")
    channel.recv(1)
    if device_bytes is not None:
        device = evaluator.device
        total = torch.cuda.get_device_properties(device).total_memory
        allowed = device_bytes + torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    with mode():
        trial = evaluator.set_up(candidate)
        if trial.builts:
            say("ready")
            channel.recv(1)
            evaluator.time(trial)
    os.ftruncate(exchange, 0)
    os.pwrite(exchange, trial.row.to_json().encode(), 0)
    say("row")


def main() -> None:
    """Serve the process at the other end of the control socket."""
    control, parent = map(int, sys.argv[1:])
    server = _Server(socket.socket(fileno=control))

    def terminate(*_: object) -> None:
        server.close()
        os._exit(1)

    signal.signal(signal.SIGTERM, terminate)
    # If the caller ignores this signal, so does this process, and it could wait for no worker.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    try:
        end_with_parent(parent, signal.SIGTERM)
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main()
