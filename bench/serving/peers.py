"""Servers of the same model, each started in a process of its own on 127.0.0.1."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..common.processes import command, variables
from ..common.record import ROOT
from .apps.common import Options
from .traffic import MODEL, WIRES

# Seconds until a server has to answer, and until it has to be gone.
START_S, END_S = 180.0, 10.0
POLL_S = 0.1


@dataclass(frozen=True)
class Server:
    """How a server is started and spoken to.

    Attributes:
        module: without which it is not installed.
        wire: of its requests, a name of WIRES.
        command: what starts it.
    """

    module: str
    wire: str
    command: Callable[[Options], list[str]]

    def installed(self) -> bool:
        """Whether it can be started here."""
        return importlib.util.find_spec(self.module) is not None


def _ours(given: Options) -> list[str]:
    """`graphwright serve`: the one place that knows its options."""
    file, _, _ = given.target.rpartition(":")
    served = f"{MODEL}={file}:served"
    words = ["--device", given.device, "--http-port", str(given.port), "--no-grpc"]
    return [sys.executable, "-m", "graphwright", "serve", served, *words]


def _app(name: str) -> Callable[[Options], list[str]]:
    def words(given: Options) -> list[str]:
        options = {
            "--port": given.port,
            "--batch": given.batch,
            "--wait-s": given.wait_s,
            "--threads": given.threads,
            "--device": given.device,
        }
        flat = [str(word) for pair in options.items() for word in pair]
        return command(f"bench.serving.apps.{name}", given.target, *flat)

    return words


SERVERS = {
    "graphwright": Server("graphwright.serving.server", "v2", _ours),
    "LitServe": Server("litserve", "raw", _app("with_litserve")),
    "Ray Serve": Server("ray", "raw", _app("with_ray")),
    "FastAPI": Server("fastapi", "raw", _app("with_fastapi")),
}


class ServerFailed(Exception):
    """A server that did not start, or has ended."""


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(server: Server, given: Options, first: np.ndarray) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process, once it has answered a first request.

    Raises:
        ServerFailed: it ended, or did not answer in START_S.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as written:
        process = subprocess.Popen(
            server.command(given),
            env=variables(ROOT / "examples") | {"OMP_NUM_THREADS": str(given.threads)},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + START_S
            while not _answers(server, given.port, first):
                late = time.monotonic() >= until
                if late or process.poll() is not None:
                    written.seek(0)
                    last = written.read().strip().splitlines()[-1:] or [""]
                    what = f"no answer in {START_S:g} s" if late else "it ended"
                    raise ServerFailed(f"{what}: {last[0]}")
                time.sleep(POLL_S)
            yield process
        finally:
            _end(process)


def _answers(server: Server, port: int, first: np.ndarray) -> bool:
    wire = WIRES[server.wire]
    body, headers = wire.encode(first)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", wire.path, body, headers)
        return connection.getresponse().status == 200
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it has started in its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
