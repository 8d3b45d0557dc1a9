"""A load on a server: `python -m bench.serving.load PLAN.json RESULT.json`.

Open loop: requests fall due at random (Poisson) at a fixed rate, whatever the server does, and a
latency counts from when its request was due: waiting for a connection, or for this process, counts.
Closed loop: so many clients, each of which asks again once it is answered.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import selectors
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import numpy as np

from ..common.record import write
from .traffic import WIRES, load, message

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
# So long before a request is due, this process is awake: what it needs to wake up is no server's.
READY_S = 0.001
# A request that got no answer at all, and one whose connection broke.
UNANSWERED, BROKEN = "unanswered", "broken"


@dataclass(frozen=True)
class Plan:
    """What to do to a server.

    Attributes:
        port: of the server, on 127.0.0.1.
        wire: how requests are written, a name of WIRES.
        requests: a file of traffic.save, whose requests are sent in turns.
        seconds: for which requests fall due.
        rate: requests a second; None for a closed loop.
        clients: of a closed loop.
        connections: the most of an open loop; what is due beyond them waits.
        drain_s: for which answers are waited for at the end.
        seed: of the times at which requests fall due.
        answers: a file of the expected answers, one a row, if they are to be checked.
        tolerance: the largest difference of an answer from the expected one.
    """

    port: int
    wire: str
    requests: str
    seconds: float
    rate: float | None = None
    clients: int = 1
    connections: int = 256
    drain_s: float = 5.0
    seed: int = 0
    answers: str | None = None
    tolerance: float = 5e-3


@dataclass
class Sent:
    """A request: which one, when it was due, and what became of it."""

    index: int
    due: float
    ended: float | None = None
    status: str = UNANSWERED
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def breaks(self) -> None:
        """Its connection is lost, or there was none."""
        self.ended, self.status = time.perf_counter(), BROKEN


class Connection(asyncio.Protocol):
    """A connection that is kept alive, with one request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.request: Sent | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: Sent) -> None:
        """Ask for an answer."""
        self.request, self.parts = request, []
        self.parser = httptools.HttpResponseParser(self)
        self.transport.write(self.load.messages[request.index])

    def data_received(self, data: bytes) -> None:
        try:
            if self.request is not None:
                self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.request is not None
        self.request.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        request, self.request = self.request, None
        assert request is not None
        request.ended = time.perf_counter()
        request.status = str(self.parser.get_status_code())
        request.body = b"".join(self.parts)
        self.load.answered()
        if self.parser.should_keep_alive():
            self.load.free(self)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.request is not None:
            self.request.breaks()
        self.load.lost(self)


class Load:
    """Requests on their way to a server."""

    def __init__(self, plan: Plan) -> None:
        wire = WIRES[plan.wire]
        self.plan = plan
        self.messages = [message(wire, ids) for ids in load(Path(plan.requests))]
        self.sent: list[Sent] = []
        self.waiting: collections.deque[Sent] = collections.deque()
        self.idle: list[Connection] = []
        self.open = 0
        self.behind = 0.0  # the most seconds by which this process was late
        self.most = 0  # connections that were open at once
        self.again = False  # whether who is answered asks again
        self.opening: set[asyncio.Task[None]] = set()

    async def run(self) -> float:
        """Send everything and wait for the answers; seconds until the last of them."""
        plan = self.plan
        began = time.perf_counter()
        if plan.rate is None:
            await self._closed(plan.seconds)
        else:
            await self._opened(began, plan.rate)
        until = time.perf_counter() + plan.drain_s
        while any(one.ended is None for one in self.sent) and time.perf_counter() < until:
            await asyncio.sleep(0.005)
        return time.perf_counter() - began

    async def _opened(self, began: float, rate: float) -> None:
        plan = self.plan
        draw = np.random.default_rng(plan.seed)
        # A few more than needed: the last ones are cut off by the time.
        gaps = draw.exponential(1 / rate, int(2 * rate * plan.seconds) + 100)
        for due in (began + at for at in np.cumsum(gaps).tolist() if at < plan.seconds):
            wait = due - time.perf_counter() - READY_S
            if wait > 0:
                await asyncio.sleep(wait)
            while time.perf_counter() < due:
                await asyncio.sleep(0)
            self.behind = max(self.behind, time.perf_counter() - due)
            self._due(due)

    async def _closed(self, seconds: float) -> None:
        self.again = True
        for _ in range(self.plan.clients):
            self._due(time.perf_counter())
        await asyncio.sleep(seconds)
        self.again = False

    def _next(self, due: float) -> Sent:
        request = Sent(len(self.sent) % len(self.messages), due)
        self.sent.append(request)
        return request

    def _due(self, due: float) -> None:
        """A request falls due: it is sent, or waits for a connection."""
        request = self._next(due)
        if self.idle:
            self.idle.pop().send(request)
            return
        self.waiting.append(request)
        self._open()

    def _open(self) -> None:
        """Open one more connection, if there may be one."""
        if self.open < self.plan.connections:
            self.open += 1
            self.most = max(self.most, self.open)
            task = asyncio.ensure_future(self._connect())
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.plan.drain_s):
                _, made = await loop.create_connection(
                    lambda: Connection(self), "127.0.0.1", self.plan.port
                )
        except OSError:  # TimeoutError is one
            self.open -= 1
            if self.waiting:
                self.waiting.popleft().breaks()
            return
        self.free(made)

    def answered(self) -> None:
        """A client of a closed loop asks again."""
        if self.again:
            self.waiting.append(self._next(time.perf_counter()))

    def free(self, connection: Connection) -> None:
        """A connection is free: it takes what waits longest."""
        if self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self.idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """A connection is closed; what waits gets another one."""
        self.open -= 1
        if connection in self.idle:
            self.idle.remove(connection)
        if self.waiting:
            self._open()


def summary(load: Load, seconds: float) -> dict[str, Any]:
    """What became of the requests.

    A request without an answer counts with the time for which it was waited.
    """
    plan, sent = load.plan, load.sent
    end = time.perf_counter()
    latencies = np.array([(one.ended or end) - one.due for one in sent])
    found: dict[str, Any] = {
        "due": len(sent),
        "statuses": dict(collections.Counter(one.status for one in sent)),
        "answered_per_s": sum(one.status == "200" for one in sent) / seconds,
        "seconds": seconds,
        "connections": load.most,
        "behind_s": load.behind,
    }
    if sent:
        values = np.percentile(latencies, PERCENTILES).tolist()
        names = [f"p{each:g}_s" for each in PERCENTILES]
        found |= dict(zip(names, values, strict=True)) | {"max_s": float(latencies.max())}
    if plan.answers is not None:
        found |= checked(load, np.load(plan.answers))
    return found


def checked(load: Load, expected: np.ndarray) -> dict[str, int]:
    """How many answers are wrong, and how many of these are the answers to other requests."""
    wrong = swapped = 0
    for one in load.sent:
        if one.status != "200":
            continue
        try:
            answer = WIRES[load.plan.wire].decode(one.body, one.headers)
        except (KeyError, ValueError):
            wrong += 1
            continue
        if answer.shape != expected[one.index].shape:
            wrong += 1
            continue
        # Not `gap > …`: a NaN is not close.
        close = np.abs(expected - answer).max(1) <= load.plan.tolerance
        wrong += not close[one.index]
        swapped += bool(close.any() and not close[one.index])
    return {"wrong": wrong, "swapped": swapped}


def main() -> None:
    source, where = map(Path, sys.argv[1:])
    load = Load(Plan(**json.loads(source.read_text(encoding="utf-8"))))
    gc.disable()  # a collection would be taken for the server's
    # Of all selectors only this one waits for less than a millisecond.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    seconds = loop.run_until_complete(load.run())
    write(where, summary(load, seconds))


if __name__ == "__main__":
    main()
