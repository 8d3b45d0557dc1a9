"""The process that workers are forked from, as the caller's process sees it.

The other side is `fork_server_main`. Requests and answers are JSON messages over a socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from .process import kill_group, last_line
from .task import IsolationError

# Seconds that a new process has to give its first answer.
START_TIMEOUT_S = 120.0
# Seconds that it has to end after it was asked to.
_END_TIMEOUT_S = 5.0
# This environment variable marks the processes that candidates run in.
CANDIDATE = "GRAPHWRIGHT_CANDIDATE"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Bytes of the longest message on the control socket.
MAX_MESSAGE = 1 << 20


class ForkServerGone(IsolationError):
    """The fork server has ended or does not answer."""


class ForkServer:
    """A process that imports modules once and forks a worker for each candidate.

    The imports begin at once; `wait_until_ready` waits for them.

    Args:
        modules: names of the modules to import.
        threads: how many threads torch.compile may compile with in each worker.

    Raises:
        IsolationError: no process can be started or forked here.
    """

    def __init__(self, modules: Sequence[str], threads: int) -> None:
        if sys.platform != "linux":
            raise IsolationError(f"on {sys.platform} a process cannot be forked safely")
        self._is_ready = False
        try:
            with contextlib.ExitStack() as stack:
                self._start(stack, modules, threads)
                stack.pop_all()
        except (OSError, ValueError, TypeError) as error:
            raise IsolationError(f"no process could be started: {error}") from error

    def _start(self, stack: contextlib.ExitStack, modules: Sequence[str], threads: int) -> None:
        root = str(Path(__file__).resolve().parents[3])
        worker_environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            **os.environ,
            CANDIDATE: "1",
        }
        environment = {
            **worker_environment,
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "PYTHONSAFEPATH": "1",  # Import nothing from the current folder.
            # Without this, merely asking for a GPU starts CUDA, which does not survive a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # Threads do not survive a fork either; each worker has as many as the caller.
            **dict.fromkeys(_THREAD_VARIABLES, "1"),
        }
        # An empty entry of sys.path means the current folder.
        path = [os.path.abspath(entry) for entry in sys.path]
        # Workers are killed or exit at once, so they leave temporary files: all are kept in one
        # folder, which is removed with the fork server.
        self._scratch = tempfile.mkdtemp(prefix="gw-")  # Short: paths of sockets are limited.
        stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        stack.callback(self._log.close)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(self._control.close)
        self._control.settimeout(START_TIMEOUT_S)
        with theirs:
            handle = theirs.fileno()
            command = [
                "-m",
                "graphwright.tuning.workers.fork_server_main",
                str(handle),
                str(os.getpid()),
            ]
            self._process = subprocess.Popen(
                [sys.executable, *command],
                pass_fds=(handle,),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        stack.callback(self.close)
        self._send(
            "prepare",
            path=path,
            argv=sys.argv,
            modules=list(modules),
            environment=worker_environment,
            scratch=self._scratch,
        )

    def wait_until_ready(self) -> None:
        """Wait until the modules are imported and workers can be forked.

        Raises:
            IsolationError: importing a module has started CUDA, which does not survive a fork.
        """
        if not self._is_ready:
            if not self._receive()["can_fork"]:
                raise IsolationError("a module that the model needs starts CUDA when imported")
            self._is_ready = True

    def fork(self, handles: Sequence[int]) -> int:
        """Start a worker and return its process number.

        Args:
            handles: the worker's files, in the order that `fork_server_main` expects.
        """
        self.wait_until_ready()
        self._send("fork", handles)
        return int(self._receive()["worker"])

    def reap(self, worker: int) -> int:
        """Wait for a worker to end: its exit status, or minus the number of the fatal signal."""
        self._send("reap", worker=worker)
        return int(self._receive()["status"])

    def close(self) -> None:
        """End the process, which ends everything that was started under it."""
        self._control.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _send(self, request: str, handles: Sequence[int] = (), **arguments: Any) -> None:
        message = json.dumps({"request": request, **arguments}).encode()
        try:
            socket.send_fds(self._control, [message], list(handles))
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._control.recv(MAX_MESSAGE)
        except OSError as error:
            raise self._gone() from error
        if not message:
            raise self._gone()
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _gone(self) -> ForkServerGone:
        return ForkServerGone(f"the process for candidates does not answer: {last_line(self._log)}")
