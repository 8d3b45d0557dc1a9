"""The process that forks one for each candidate, as seen from the caller's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from .payload import IsolationError

# Seconds until a new process has to answer.
START_S = 120.0
# Bytes of the longest message on a control socket.
MESSAGE = 1 << 20


class Nursery:
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
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process: subprocess.Popen[bytes] | None = None
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            **os.environ,
            "PYTHONPATH": path,
            # Else a mere question for a GPU starts CUDA, which does not survive a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "graphwright._worker", str(theirs.fileno()), _pid()],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
            self._control.settimeout(START_S)
            # An empty entry is the folder that this process is in.
            self._send("prepare", path=list(map(os.path.abspath, sys.path)), modules=list(modules))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise IsolationError(f"no process could be started: {error}") from error
            raise
        finally:
            theirs.close()
        self._is_ready = False

    def ready(self) -> None:
        """Wait until it can be forked."""
        if not self._is_ready:
            if not self._answer()["forks"]:
                raise IsolationError("a module that the model needs starts CUDA when imported")
            self._is_ready = True

    def fork(self, channel: int, log: int, payload: int) -> int:
        """The process number of a child that talks, prints and reads through these handles."""
        self.ready()
        self._send("fork", (channel, log, payload))
        return int(self._answer()["child"])

    def reap(self, child: int) -> int:
        """How a child that has ended did so: its exit status, or minus a signal's number."""
        self._send("reap", child=child)
        return int(self._answer()["status"])

    def close(self) -> None:
        """End the process."""
        self._control.close()
        if self._process is not None:
            kill(self._process.pid)
            self._process.wait()
        self._log.close()

    def _send(self, what: str, handles: Sequence[int] = (), **more: Any) -> None:
        message = json.dumps({"do": what, **more}).encode()
        try:
            socket.send_fds(self._control, [message], list(handles))
        except OSError as error:
            raise IsolationError(self._gone()) from error

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self._control.recv(MESSAGE)
        except OSError as error:
            raise IsolationError(self._gone()) from error
        if not answer:
            raise IsolationError(self._gone())
        found: dict[str, Any] = json.loads(answer)
        return found

    def _gone(self) -> str:
        return f"the process for candidates does not answer: {last_line(self._log)}"


def _pid() -> str:
    return str(os.getpid())


def kill(pid: int) -> None:
    """Kill a process and all of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def last_line(log: IO[bytes]) -> str:
    """The last line that a process printed."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - 4096))
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]
