"""One candidate's process, as seen from the caller's.

What a candidate may have written is never unpickled: a child says short things in JSON through a
socket of whole messages, and leaves its row as JSON in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO

from ...report.result import Row
from ...strategies.base import Candidate
from .fork_server import ForkServer
from .process import kill, last_line, resident

# What a child may print, in bytes, and the length of what it may say.
MOST_PRINTED = 64 << 20
_SAID = 1 << 16


@dataclass(eq=False)
class Worker:
    """A process that evaluates one candidate.

    Attributes:
        candidate: what it evaluates.
        seconds: that its set-up may take, and its timing.
        host_bytes: of memory that it may take beyond what it holds with the model loaded.
        began: `time.monotonic()` when what it does now began.
        loaded: whether it has loaded the model.
        held: bytes that it held then.
        ready: whether it is set up.
        row: the result, once there is one.
        unfit: why it cannot stand for the caller's process, if it cannot.
    """

    candidate: Candidate
    seconds: float
    host_bytes: int
    pid: int
    channel: socket.socket
    log: IO[bytes]
    paper: IO[bytes]
    pidfd: int | None
    began: float = field(default_factory=time.monotonic)
    loaded: bool = False
    held: int = 0
    ready: bool = False
    row: Row | None = None
    unfit: str | None = None

    @classmethod
    def born(
        cls,
        nursery: ForkServer,
        candidate: Candidate,
        packed: bytes,
        payload: int,
        seconds: float,
        host_bytes: int,
    ) -> Worker:
        """Start a process.

        Args:
            nursery: what forks it.
            candidate: what it evaluates.
            packed: the same, pickled.
            payload: handle of the file with the model.
            seconds: see above.
            host_bytes: likewise.

        Raises:
            IsolationError: none can be started.
            OSError: likewise.
        """
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile())
            paper = stack.enter_context(tempfile.TemporaryFile())
            paper.write(packed)
            paper.flush()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            with theirs:
                handles = (theirs.fileno(), log.fileno(), payload, paper.fileno())
                pid = nursery.fork(handles)
            pidfd = None
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
            stack.pop_all()
        ours.setblocking(False)
        return cls(candidate, seconds, host_bytes, pid, ours, log, paper, pidfd)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.row is not None or self.unfit is not None

    @property
    def handles(self) -> list[int]:
        """What becomes readable when it says something or ends."""
        return [self.channel.fileno(), *([] if self.pidfd is None else [self.pidfd])]

    def say(self, what: str) -> None:
        """Tell it to go on."""
        with contextlib.suppress(OSError):
            self.channel.send(what.encode())

    def hear(self) -> bool:
        """Take in what it has said; whether its end of the channel is closed."""
        while True:
            try:
                said = self.channel.recv(_SAID)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not said:
                return True
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self._take(json.loads(said))

    def _take(self, said: dict[str, str]) -> None:
        what = said["say"]
        if what == "loaded":
            self.loaded, self.held, self.began = True, resident(self.pid), time.monotonic()
        elif what == "ready":
            self.ready = True
        elif what == "unfit":
            self.unfit = str(said["why"])[:300]
        elif what == "row":
            size = os.fstat(self.paper.fileno()).st_size
            row = Row.from_json(os.pread(self.paper.fileno(), size, 0).decode())
            row.strategy, row.complexity = self.candidate.name, self.candidate.complexity
            self.row = row

    def has_ended(self, patience_s: float) -> bool:
        """Whether the process ends within some seconds."""
        if self.pidfd is None:
            return True
        return bool(select.select([self.pidfd], [], [], patience_s)[0])

    @property
    def printed(self) -> int:
        """Bytes that it has printed."""
        return os.fstat(self.log.fileno()).st_size

    @property
    def last_words(self) -> str:
        """The last line that it has printed."""
        return last_line(self.log)

    def stop(self, row: Row) -> None:
        """End it and all of its group at once, with this row."""
        kill(self.pid)  # Nobody has waited for it: the number is still its own.
        self.row = row

    def let_go(self) -> None:
        """Close what connects this process with it."""
        self.channel.close()
        self.log.close()
        self.paper.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
