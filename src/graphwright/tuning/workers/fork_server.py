"""The process that workers are forked from, as the caller's process sees it.

The other side is `fork_server_main`. Requests and answers are JSON messages over a socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from ...processes.child import GARBLED, Child, ending, message_of
from ...processes.environment_variables import CANDIDATE
from .task import IsolationError

# Seconds that a new process has to give its first answer.
START_TIMEOUT_S = 120.0
# Seconds that it has to end after it was asked to.
_END_TIMEOUT_S = 5.0
_MAIN = "graphwright.tuning.workers.fork_server_main"
_SILENT = "it runs on, and says nothing"
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
        compiling = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        worker_environment = {**compiling, **os.environ, CANDIDATE: "1"}
        environment = {
            **{name: worker_environment[name] for name in (*compiling, CANDIDATE)},
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
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(self._control.close)
        self._control.settimeout(START_TIMEOUT_S)
        with theirs:
            words = ["-m", _MAIN, str(theirs.fileno()), str(os.getpid())]
            self._child = Child(words, handles=[theirs.fileno()], environment=environment)
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
        self._child.end(_END_TIMEOUT_S)
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
        try:
            return message_of(message)
        except ValueError as error:
            raise self._gone(GARBLED) from error

    def _gone(self, why: str | None = None) -> ForkServerGone:
        if why is None:
            status = self._child.status_within(_END_TIMEOUT_S)
            why = ending(status, self._child.last_line()) if status is not None else _SILENT
        return ForkServerGone(f"the process for candidates does not answer: {why}")
