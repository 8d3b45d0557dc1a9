"""The program of the fork server, and of the workers that are forked from it.

Run as `python -m graphwright.tuning.workers.fork_server_main CONTROL PARENT`. CONTROL is the handle
of a socket to the process that tunes, PARENT that process's number.

The fork server imports what the model needs, once, and forks workers; it never runs a candidate
itself. A worker loads the model and its references from a file, evaluates candidates as long as
they leave it as it was, and leaves their rows in another file. When the process that tunes ends, so
does everything that was started here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any

import torch

from ...errors import first_line
from ...processes.linux import adopt_orphans, end_with_parent, kill_children
from ...processes.pickled_files import publish_globals, read_pickled
from ...report.result import Status
from ..trial import SharedBuild
from .fork_server import MAX_MESSAGE
from .leftovers import Baseline
from .task import Order, Task

# What a candidate may have become whose worker can serve another one.
_HARMLESS = (Status.OK, Status.SLOWER, Status.UNAVAILABLE)


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
                order and gets the row.
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
            serve(socket.socket(fileno=channel), task, exchange)
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
        # What candidates have started in other sessions; this process has adopted it.
        kill_children(spared=self._workers)
        return {"status": os.waitstatus_to_exitcode(status)}

    def close(self) -> None:
        """Kill every worker and whatever it has started."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        self._workers.clear()
        kill_children()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    message, handles, _, _ = socket.recv_fds(control, MAX_MESSAGE, 4)
    return (json.loads(message), handles) if message else None


def serve(channel: socket.socket, task_handle: int, exchange: int) -> None:
    """Evaluate candidates in this worker, until nobody asks for one.

    Args:
        channel: tells the caller's process how far this is, and waits for its word; see `pool`.
        task_handle: of the file with the task.
        exchange: handle of the file with the pickled order, which the candidate's row replaces.
    """

    def say(what: str, **more: str) -> None:
        channel.send(json.dumps({"say": what, **more}).encode())

    try:
        task: Task = read_pickled(task_handle)
        publish_globals()
        task.settings.apply()
        with task.settings.inference_mode():
            evaluator = task.evaluator()
            why = evaluator.disagreement()
            baseline = None if why is not None else Baseline(evaluator)
    except Exception as error:
        why = first_line(error, 160)
    if why is not None or baseline is None:
        say("unfit", why=str(why))
        return
    say("loaded")
    shared = None
    with task.settings.inference_mode():
        while channel.recv(1):
            try:
                order = Order.from_bytes(os.pread(exchange, os.fstat(exchange).st_size, 0))
            except Exception as error:
                say("unfit", why=first_line(error, 160))
                return
            _begin_log()
            if shared is None:
                shared = SharedBuild()
                _limit_memory(evaluator.device, order.device_bytes)
            trial = evaluator.set_up(order.candidate, shared)
            if trial.builts:
                say("ready")
                channel.recv(1)
                evaluator.time(trial)
            row = trial.row
            os.ftruncate(exchange, 0)
            os.pwrite(exchange, row.to_json().encode(), 0)
            say("row")
            if order.is_last:
                return
            kept = order.keeps_build
            del trial
            # Candidates that share a build that failed are told so, and nothing else is tried.
            goes_on = row.status in _HARMLESS or (kept and shared.failed)
            if not kept:
                shared = None
            if not goes_on:
                why = f"a candidate is {row.status}"
            else:
                why = baseline.difference(holds_build=kept)
            if why is not None:
                say("not clean", why=why[:300])
                return
            say("clean")


def _begin_log() -> None:
    """Forget what was printed before: it is not the next candidate's."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Both share one place in one file.
    os.lseek(1, 0, os.SEEK_SET)
    os.ftruncate(1, 0)


def _limit_memory(device: torch.device, allowed_bytes: int | None) -> None:
    """Limit the memory of the GPU that may be taken in addition to what is reserved now."""
    if allowed_bytes is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = allowed_bytes + torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)


def main() -> None:
    """Serve the process at the other end of the control socket."""
    control, parent = map(int, sys.argv[1:])
    server = _Server(socket.socket(fileno=control))

    def terminate(*_: object) -> None:
        # The kernel sends it again for each thread of the parent that ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
