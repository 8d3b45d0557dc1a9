"""One worker, as the caller's process sees it.

Nothing that a candidate may have written is unpickled: a worker sends short JSON messages through a
socket and leaves its row as JSON in a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import socket
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO

from ...processes.linux import kill_group, last_line, resident_bytes
from ...report.result import Row
from ...strategies.base import Candidate
from .fork_server import ForkServer
from .task import Order

_LOGGER = logging.getLogger("graphwright")
# Bytes that a candidate may print.
MAX_PRINTED = 64 << 20
# Bytes of a worker's longest message.
_MAX_MESSAGE = 1 << 16


@dataclass(eq=False)
class Worker:
    """A process that evaluates candidates, one after the other.

    Attributes:
        pid: its process number.
        channel: the socket for messages in both directions.
        log: the file that it prints to.
        exchange: the file with the pickled order, which the candidate's row replaces.
        pidfd: becomes readable when it ends; None where the system has no such handle.
        candidate: what it evaluates; None before the first one.
        timeout_s: seconds that set-up may take, and timing.
        host_bytes: memory that the candidate may take beyond what the worker held before.
        is_last: whether the worker is ended after this candidate.
        phase_began: `time.monotonic()` when it began to load, to set up or to time.
        loaded: whether it has loaded the model.
        held_bytes: what it held before the candidate.
        ready: whether it is set up and waits to be timed.
        row: the result, once there is one.
        unfit: why it cannot stand in for the caller's process, if it cannot.
        clean: whether it is as it was before the candidate, once it has looked.
        cache: the compiler's cache that it has used last; None for none.
    """

    pid: int
    channel: socket.socket
    log: IO[bytes]
    exchange: IO[bytes]
    pidfd: int | None
    candidate: Candidate | None = None
    timeout_s: float = math.inf
    host_bytes: int = 0
    is_last: bool = True
    phase_began: float = field(default_factory=time.monotonic)
    loaded: bool = False
    held_bytes: int = 0
    ready: bool = False
    row: Row | None = None
    unfit: str | None = None
    clean: bool | None = None
    cache: str | None = None

    @classmethod
    def start(cls, server: ForkServer, task: int) -> Worker:
        """Fork a worker, which begins to load the model.

        Args:
            server: forks it.
            task: handle of the file with the task.

        Raises:
            IsolationError: none can be started.
            OSError: likewise.
        """
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile())
            exchange = stack.enter_context(tempfile.TemporaryFile())
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            with theirs:
                pid = server.fork((theirs.fileno(), log.fileno(), task, exchange.fileno()))
            pidfd = None
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
            stack.pop_all()
        ours.setblocking(False)
        return cls(pid, ours, log, exchange, pidfd)

    def give(
        self, order: Order, pickled: bytes, timeout_s: float, host_bytes: int, *, shares: bool
    ) -> None:
        """Have it evaluate a candidate: at once, or as soon as it has loaded the model.

        Args:
            order: tells the candidate.
            pickled: the order, pickled.
            timeout_s: see the class.
            host_bytes: see the class.
            shares: whether it holds a build that the candidate shares, which counts as its memory.
        """
        os.ftruncate(self.exchange.fileno(), 0)
        os.pwrite(self.exchange.fileno(), pickled, 0)
        self.candidate, self.is_last = order.candidate, order.is_last
        self.timeout_s, self.host_bytes = timeout_s, host_bytes
        self.ready, self.row, self.clean = False, None, None
        if self.loaded:
            self._begin(shares=shares)

    def _begin(self, *, shares: bool = False) -> None:
        """What it holds was there before; from here on its memory and time are the candidate's."""
        if not shares:
            self.held_bytes = resident_bytes(self.pid)
        self.phase_began = time.monotonic()
        self.go_on()

    @property
    def done(self) -> bool:
        """Whether it is known what became of the candidate."""
        return self.row is not None or self.unfit is not None

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to wait for: it rests, or is about to be ended."""
        known = self.is_last or self.clean is not None
        return self.unfit is not None or (self.row is not None and known)

    @property
    def handles(self) -> list[int]:
        """What becomes readable when it sends a message or ends."""
        return [self.channel.fileno(), *([] if self.pidfd is None else [self.pidfd])]

    def go_on(self) -> None:
        """Tell it to begin its next phase."""
        with contextlib.suppress(OSError):
            self.channel.send(b"!")

    def read_messages(self) -> bool:
        """Take in all messages that have arrived; whether its end of the channel is closed."""
        while True:
            try:
                message = self.channel.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not message:
                return True
            # A candidate may have written to the channel: ignore what is no message.
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self._take_in(json.loads(message))

    def _take_in(self, message: dict[str, str]) -> None:
        what = message["say"]
        if what == "loaded":
            self.loaded = True
            self._begin()
        elif what == "ready":
            self.ready = True
        elif what == "unfit":
            self.unfit = str(message["why"])[:300]
        elif what == "row":
            size = os.fstat(self.exchange.fileno()).st_size
            row = Row.from_json(os.pread(self.exchange.fileno(), size, 0).decode())
            assert self.candidate is not None
            row.strategy, row.complexity = self.candidate.name, self.candidate.complexity
            self.row, self.phase_began = row, time.monotonic()
        elif what == "clean":
            self.clean = self.row is not None
        elif what == "not clean":
            self.clean = False
            _LOGGER.debug("a worker is replaced: %s", message["why"])

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the process ends within some seconds."""
        if self.pidfd is None:
            return True
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    @property
    def printed_bytes(self) -> int:
        """How much it has printed since it began with the candidate."""
        return os.fstat(self.log.fileno()).st_size

    @property
    def last_line(self) -> str:
        """The last line that it has printed."""
        return last_line(self.log)

    def stop(self, row: Row) -> None:
        """Kill it and its process group, and make this its row."""
        kill_group(self.pid)  # Not waited for yet, so the number is still its own.
        self.row, self.clean = row, False

    def close(self) -> None:
        """Close its files; the process itself is not touched."""
        self.channel.close()
        self.log.close()
        self.exchange.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
