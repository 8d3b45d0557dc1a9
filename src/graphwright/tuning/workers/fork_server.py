"""The process that forks one for each candidate, as seen from the caller's."""

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

from .process import kill, last_line
from .task import IsolationError

# Seconds until a new process has to answer.
START_S = 120.0
# Seconds that it has to end by itself.
_END_S = 5.0
# Says, in the environment, that a process is one of a candidate's.
CANDIDATE = "GRAPHWRIGHT_CANDIDATE"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Bytes of the longest message on a control socket.
MESSAGE = 1 << 20


class ForkServerGone(IsolationError):
    """The process that candidates are started from has ended, or does not answer."""


class ForkServer:
    """A process that imports modules once and is forked for each candidate.

    Args:
        modules: what to import; it begins at once, and `ready` waits for it.
        threads: of torch.compile's own processes, for each candidate.

    Raises:
        IsolationError: no process can be started or forked here.
    """

    def __init__(self, modules: Sequence[str], threads: int) -> None:
        if sys.platform != "linux":
            raise IsolationError(f"on {sys.platform} a process cannot be forked safely")
        self._is_ready = False
        try:
            with contextlib.ExitStack() as stack:
                self._begin(stack, modules, threads)
                stack.pop_all()
        except (OSError, ValueError, TypeError) as error:
            raise IsolationError(f"no process could be started: {error}") from error

    def _begin(self, stack: contextlib.ExitStack, modules: Sequence[str], threads: int) -> None:
        root = str(Path(__file__).resolve().parents[3])
        given = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ, CANDIDATE: "1"}
        environment = {
            **given,
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "PYTHONSAFEPATH": "1",  # Modules of the folder that one is in are not for this.
            # Else a mere question for a GPU starts CUDA, which does not survive a fork; nor do
            # threads, which each child has as many of as the caller.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            **dict.fromkeys(_THREADS, "1"),
        }
        # An empty entry is the folder that this process is in.
        path = [os.path.abspath(entry) for entry in sys.path]
        # Children are killed, or end at once: what they leave in temporary folders goes with this.
        self._scratch = tempfile.mkdtemp(prefix="gw-")  # Paths of sockets are short.
        stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        stack.callback(self._log.close)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(self._control.close)
        self._control.settimeout(START_S)
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
            environment=given,
            scratch=self._scratch,
        )

    def ready(self) -> None:
        """Wait until it can be forked."""
        if not self._is_ready:
            if not self._answer()["forks"]:
                raise IsolationError("a module that the model needs starts CUDA when imported")
            self._is_ready = True

    def fork(self, handles: Sequence[int]) -> int:
        """The process number of a child with these handles; see `fork_server_main`."""
        self.ready()
        self._send("fork", handles)
        return int(self._answer()["child"])

    def reap(self, child: int) -> int:
        """How a child that has ended did so: its exit status, or minus a signal's number."""
        self._send("reap", child=child)
        return int(self._answer()["status"])

    def close(self) -> None:
        """End the process, which ends all that was started under it."""
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill(self._process.pid)
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _send(self, what: str, handles: Sequence[int] = (), **more: Any) -> None:
        message = json.dumps({"do": what, **more}).encode()
        try:
            socket.send_fds(self._control, [message], list(handles))
        except OSError as error:
            raise ForkServerGone(self._gone()) from error

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self._control.recv(MESSAGE)
        except OSError as error:
            raise ForkServerGone(self._gone()) from error
        if not answer:
            raise ForkServerGone(self._gone())
        found: dict[str, Any] = json.loads(answer)
        return found

    def _gone(self) -> str:
        return f"the process for candidates does not answer: {last_line(self._log)}"
