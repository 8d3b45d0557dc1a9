"""A server under a long mixed load: is every answer right, and does the server stay as it is?

    scripts/bench soak [--out DIR] [--seconds S] [--clients N]

Half the clients speak HTTP, half gRPC. Of 100 requests 5 are malformed or left by their client, 2
fail in the model, 2 have more rows than a call holds; every few seconds the model is loaded again.
The memory, threads and open files of the server's process are read from /proc once a second. They
count from the end of a warm-up on, by when each of the server's threads has had its malloc arena.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import torch
from open_inference.grpc import protocol as messages
from open_inference.grpc.service import GRPCInferenceServiceStub

from graphwright.calls.plurals import counted
from graphwright.report.environment import environment

from ..common.processes import variables
from ..common.record import ROOT, SCHEMA, commit, write
from .soaked import LENGTH, VOCABULARY, model

NAME = "soak-serving-cpu.json"
# How much of the time is warm-up, and at least how many seconds of it.
WARM_UP, WARM_UP_S = 0.25, 10.0
# Growth that is allowed from the end of the warm-up to the end. Reloads and requests of all sizes
# fragment malloc's arenas by some MiB; a leak of 100 bytes a request is more than that in minutes.
GROWTH_MIB = 16.0
# Threads and files are compared at their highest: they follow the load. The event loop's helpers
# begin when they are first needed, which may be after the warm-up of a short run.
MORE_THREADS, MORE_FILES = min(32, (os.cpu_count() or 1) + 4), 4
RELOAD_S = 4.0
ANSWER_S = 60.0
REQUESTS = 200
MALFORMED = ("truncated", "no JSON", "wrong datatype", "wrong shape", "too long")
LEFT = ("left while sending", "left while waiting")
INFER = "/v2/models/soaked/infer"
# Ways to answer what is malformed.
REFUSED = {400, 413, grpc.StatusCode.INVALID_ARGUMENT}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request and its answer."""

    ids: torch.Tensor
    mask: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """The server's process at one moment."""

    seconds: float
    rss_mib: float
    threads: int
    files: int


def sampled(process: int, seconds: float) -> Sample:
    """A process as it is now."""
    folder = Path(f"/proc/{process}")
    pages = int((folder / "statm").read_text().split()[1])
    rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    threads = len(list((folder / "task").iterdir()))
    return Sample(seconds, rss_mib, threads, len(list((folder / "fd").iterdir())))


def drawn(count: int) -> list[Asked]:
    """Requests of all sizes, one in 50 with more rows than a call holds."""
    generator, net, found = torch.Generator().manual_seed(1), model(), []
    for number in range(count):
        rows = 70 if number % 50 == 49 else 1 + number % 3
        length = 1 + number * 7 % LENGTH
        ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            found.append(Asked(ids, mask, net(ids, mask)))
    return found


def summary(samples: list[Sample], seconds: float) -> Figures:
    """How the process was after the warm-up and at the end, by medians over a tenth of the time."""
    warm = max(WARM_UP_S, WARM_UP * seconds)
    tenth = max(3.0, seconds / 10)
    first = [each for each in samples if warm <= each.seconds < warm + tenth]
    last = [each for each in samples if each.seconds >= samples[-1].seconds - tenth]
    before = [each for each in samples if each.seconds < warm + tenth]
    return {
        "rss_mib": {
            "after the warm-up": statistics.median(each.rss_mib for each in first),
            "at the end": statistics.median(each.rss_mib for each in last),
            "allowed growth": GROWTH_MIB,
        },
        "threads": {
            "until the warm-up's end": max(each.threads for each in before),
            "at the end": max(each.threads for each in last),
            "allowed growth": MORE_THREADS,
        },
        "files": {
            "until the warm-up's end": max(each.files for each in before),
            "at the end": max(each.files for each in last),
            "allowed growth": MORE_FILES,
        },
    }


def problems(found: Figures) -> list[str]:
    """What was wrong, in sentences; none if the server stayed as it was."""
    wrong = []
    for what, figures in found["process"].items():
        (_, start), (_, end), (_, allowed) = figures.items()
        if end - start > allowed:
            wrong.append(f"{what} grew from {start:g} to {end:g}, by more than {allowed:g}")
    counts = found["requests"]
    wrong += [
        counted(counts[kind], f"{kind} request") for kind in ("wrong", "lost") if counts[kind]
    ]
    # Clients that leave may have been answered or not.
    least, most = counts["right"], counts["right"] + counts["left"]
    if not least <= found["server"]["answered"] <= most:
        wrong.append(f"the server counts {found['server']['answered']} answers, not {least}")
    if found["server"]["waiting"]:
        wrong.append(f"{counted(found['server']['waiting'], 'request')} still waiting")
    if found["server"]["ended"] != 0:
        wrong.append(f"the server ended with {found['server']['ended']}")
    return wrong


class Load:
    """Clients of a server; what they see is counted."""

    def __init__(self, http_address: str, grpc_address: str, requests: list[Asked]) -> None:
        self.http_address, self.grpc_address = http_address, grpc_address
        self.requests = requests
        kinds = ("right", "refused", "failed", "left", "reloads", "wrong", "lost")
        self.counts: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        self.examples: list[str] = []
        self.going = True

    async def run(self, seconds: float, clients: int) -> None:
        """All clients at once, for so many seconds."""
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.http_address, connector=connector) as session,
            grpc.aio.insecure_channel(self.grpc_address) as channel,
        ):
            stub = GRPCInferenceServiceStub(channel)
            tasks = [
                asyncio.create_task(self._client(number, session, stub))
                for number in range(clients)
            ]
            tasks.append(asyncio.create_task(self._reload(session)))
            await asyncio.sleep(seconds)
            self.going = False
            await asyncio.gather(*tasks)

    async def _client(self, number: int, session: Any, stub: Any) -> None:
        chance = random.Random(number)
        while self.going:
            asked = chance.choice(self.requests)
            drawn = chance.random()
            how = "well"
            if drawn < 0.025:
                how = chance.choice(MALFORMED)
            elif drawn < 0.05:
                how = chance.choice(LEFT)
            elif drawn < 0.07:
                how = "fails"
            try:
                async with asyncio.timeout(ANSWER_S):
                    if number % 2:
                        await self._over_grpc(stub, asked, how)
                    else:
                        await self._over_http(session, asked, how)
            except Exception as error:
                self._note("lost", f"{how}: {type(error).__name__}: {error}")

    def _note(self, kind: str, example: str) -> None:
        self.counts[kind] += 1
        if len(self.examples) < 10:
            self.examples.append(f"{kind}: {example}")

    async def _reload(self, session: Any) -> None:
        while self.going:
            await asyncio.sleep(RELOAD_S)
            async with session.post("/v2/repository/models/soaked/load") as answer:
                if answer.status == 200:
                    self.counts["reloads"] += 1
                else:
                    self._note("lost", f"a reload: {answer.status} {await answer.text()}")

    async def _over_http(self, session: Any, asked: Asked, how: str) -> None:
        ids, mask = changed(asked, how)
        body, headers = message(ids, mask, "FP32" if how == "wrong datatype" else "INT64")
        if how == "truncated":
            body = body[:-1]
        elif how == "no JSON":
            body = b"\xff" + body
        if how in LEFT:
            await self._leave(body, headers, how)
            return
        async with session.post(INFER, data=body, headers=headers) as answer:
            content, status = await answer.read(), answer.status
        if status == 200:
            size = int(answer.headers["Inference-Header-Content-Length"])
            self._check(content[size:], json.loads(content[:size])["outputs"][0], asked, how)
        else:
            self._refused(status, content.decode(), how)

    async def _leave(self, body: bytes, headers: dict[str, str], how: str) -> None:
        host, port = self.http_address.removeprefix("http://").split(":")
        lines = [f"POST {INFER} HTTP/1.1", "Host: soak", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + (body if how == "left while waiting" else body[: len(body) // 2]))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.counts["left"] += 1

    async def _over_grpc(self, stub: Any, asked: Asked, how: str) -> None:
        ids, mask = changed(asked, how)
        raw = [ids.numpy().tobytes(), mask.numpy().tobytes()]
        if how in ("truncated", "no JSON"):
            raw[1] = raw[1][:-1]
        kind = "FP32" if how == "wrong datatype" else "INT64"
        inputs = [
            messages.ModelInferRequest.InferInputTensor(name=name, datatype=kind, shape=each.shape)
            for name, each in (("ids", ids), ("mask", mask))
        ]
        call = stub.ModelInfer(
            messages.ModelInferRequest(model_name="soaked", inputs=inputs, raw_input_contents=raw)
        )
        if how in LEFT:
            await asyncio.sleep(0.002 if how == "left while waiting" else 0)
            call.cancel()
            self.counts["left"] += 1
            return
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            self._refused(error.code(), error.details() or "", how)
            return
        (output,) = answer.outputs
        described = {"shape": list(output.shape), "datatype": output.datatype}
        self._check(answer.raw_output_contents[0], described, asked, how)

    def _refused(self, status: Any, text: str, how: str) -> None:
        if how in MALFORMED and status in REFUSED:
            self.counts["refused"] += 1
        elif how == "fails" and "a row begins with 0" in text:
            self.counts["failed"] += 1
        else:
            self._note("lost", f"{how}: {status} {text}")

    def _check(self, data: bytes, described: Figures, asked: Asked, how: str) -> None:
        right = how == "well" and described["datatype"] == "FP32"
        if right:
            values = np.frombuffer(data, np.float32).reshape(described["shape"])
            expected = asked.expected.numpy()
            right = values.shape == expected.shape and np.allclose(values, expected, 1e-4, 1e-5)
        if right:
            self.counts["right"] += 1
        else:
            self._note("wrong", f"{how}, of the shape {list(asked.ids.shape)}")


def changed(asked: Asked, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors that are sent for a request."""
    ids, mask = asked.ids, asked.mask
    if how == "fails":
        ids = ids.clone()
        ids[-1, 0] = 0
    elif how == "wrong shape":
        ids = ids[0]
    elif how == "too long":
        ids = mask = torch.ones(1, LENGTH + 1, dtype=torch.int64)
    return ids.contiguous(), mask


def message(ids: torch.Tensor, mask: torch.Tensor, kind: str) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request over HTTP."""
    raw = [ids.numpy().tobytes(), mask.numpy().tobytes()]
    inputs = [
        {
            "name": name,
            "datatype": kind,
            "shape": list(each.shape),
            "parameters": {"binary_data_size": len(data)},
        }
        for name, each, data in zip(("ids", "mask"), (ids, mask), raw, strict=True)
    ]
    asked = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head = json.dumps(asked).encode()
    return head + b"".join(raw), {"Inference-Header-Content-Length": str(len(head))}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """The server's process, and where it listens for HTTP and gRPC."""
    target = f"soaked={Path(__file__).with_name('soaked.py')}:served"
    words = ["--http-port", "0", "--grpc-port", "0", "--device", "cpu"]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "graphwright", "serve", target, *words),
            stdout=subprocess.PIPE,
            stderr=log,
            env=variables(ROOT / "src") | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                if line.startswith(b"Listening on "):
                    _, _, over_http, _, over_grpc = line.decode().split()
                    yield process, over_http, over_grpc.removeprefix("grpc://")
                    return
            log.seek(0)
            raise AssertionError(log.read().decode())
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _soak(seconds: float, clients: int) -> Figures:
    samples: list[Sample] = []
    async with serving() as (process, over_http, over_grpc):
        load = Load(over_http, over_grpc, drawn(REQUESTS))
        began = time.monotonic()

        async def watch() -> None:
            for number in itertools.count():
                await asyncio.sleep(began + number - time.monotonic())
                samples.append(sampled(process.pid, time.monotonic() - began))

        watching = asyncio.create_task(watch())
        await load.run(seconds, clients)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        async with aiohttp.ClientSession(over_http) as session:
            async with session.get("/metrics") as answer:
                text = await answer.text()
        process.send_signal(signal.SIGTERM)
        ended = await asyncio.wait_for(process.wait(), ANSWER_S)
    found = {
        "seconds": seconds,
        "clients": clients,
        "requests": dict(load.counts),
        "examples": load.examples,
        "server": {
            "answered": _metric(text, "graphwright_requests_total", "answered"),
            "waiting": _metric(text, "graphwright_queue_requests", ""),
            "ended": ended,
        },
        "process": summary(samples, seconds),
        "samples": [
            [round(each.seconds, 2), round(each.rss_mib, 2), each.threads, each.files]
            for each in samples
        ],
    }
    return found | {"problems": problems(found)}


def _metric(text: str, name: str, label: str) -> int:
    lines = [line for line in text.splitlines() if line.startswith(name + "{") and label in line]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def soak(seconds: float, clients: int = 24) -> Figures:
    """The figures of one run; "problems" is empty if there were none.

    Args:
        seconds: of the load, warm-up included.
        clients: at once.
    """
    return asyncio.run(_soak(seconds, clients))


def benchmark(out: Path, seconds: float, clients: int) -> int:
    """Run once and write the outcome; the number of problems."""
    found = soak(seconds, clients)
    head = {"schema": SCHEMA, "kind": "soak", "commit": commit()}
    write(out / NAME, head | {"environment": environment(torch.device("cpu"))} | found)
    for problem in found["problems"]:
        print(problem)
    return len(found["problems"])
