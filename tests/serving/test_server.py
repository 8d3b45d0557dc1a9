"""serve() and `graphwright serve`: real processes, real sockets, many clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import torch
from chosen import choosing
from click.testing import CliRunner
from served import BY_LENGTH, Picky, config, made, sample
from shares import share

import graphwright as gw
from graphwright.cli.main import main
from graphwright.serving.launch import serve

ROOT = Path(gw.__file__).parents[2]
TARGET = f"{Path(__file__).with_name('served.py')}:config"
ANY = {"http_port": 0, "grpc_port": 0}
REQUESTS = 1000


def binary(model: str, tensors: dict[str, torch.Tensor]) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of a request with binary data, and answers in binary data."""
    raw = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(tensor.shape),
                    "datatype": "INT64",
                    "parameters": {"binary_data_size": len(raw[name])},
                }
                for name, tensor in tensors.items()
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return f"/v2/models/{model}/infer", header + b"".join(raw.values()), headers


def outputs_of(body: bytes, headers: Any) -> dict[str, torch.Tensor]:
    size = int(headers["Inference-Header-Content-Length"])
    found, begin = {}, size
    for each in json.loads(body[:size])["outputs"]:
        end = begin + each["parameters"]["binary_data_size"]
        numbers = np.frombuffer(body[begin:end], np.float32).reshape(each["shape"])
        found[each["name"]], begin = torch.from_numpy(numbers.copy()), end
    return found


def threads() -> list[str]:
    """The threads of this process, but for the one that gRPC may keep for its next server."""
    return [each.name for each in threading.enumerate() if "_poll_wrapper" not in each.name]


def end_with(before: list[str]) -> None:
    """All other threads come to an end, be it a moment after what ends them."""
    until = time.monotonic() + 10
    while threads() != before:
        assert time.monotonic() < until, threads()
        time.sleep(0.01)


def request_of(seed: int, most: int = 16) -> dict[str, torch.Tensor]:
    ids, mask = sample(1 + seed % 2, 1 + seed * 7 % most, seed)
    return {"ids": ids, "mask": mask}


@contextmanager
def process(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`graphwright serve`, and its HTTP address."""
    command = [sys.executable, "-m", "graphwright", "serve", *words]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    running = subprocess.Popen(
        [*command, "--http-port", "0", "--grpc-port", "0", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("Listening on "):
                yield running, line.split()[2]
                break
        else:
            assert running.stderr is not None
            raise AssertionError(running.stderr.read())
    finally:
        running.kill()
        running.communicate()


async def swarm(
    address: str,
    count: int,
    clients: int,
    ask: Callable[[aiohttp.ClientSession, int], Any],
) -> None:
    """So many requests, from so many clients at once."""
    left = iter(range(count))
    async with aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for number in left:
                await ask(session, number)

        await asyncio.gather(*(client() for _ in range(clients)))


def test_sigterm_answers_what_was_asked_and_ends() -> None:
    async def test() -> None:
        answered: list[int] = []

        async def ask(session: aiohttp.ClientSession, number: int) -> None:
            path, body, headers = binary("config", request_of(number))
            async with session.post(path, data=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                outputs_of(await answer.read(), answer.headers)
                answered.append(number)

        with process(TARGET) as (running, address):
            async with aiohttp.ClientSession(address) as session:
                tasks = [asyncio.create_task(ask(session, n)) for n in range(200)]
                while len(answered) < 20:
                    await asyncio.sleep(0.001)
                running.send_signal(signal.SIGTERM)
                found = await asyncio.gather(*tasks, return_exceptions=True)
            # What had been sent is answered; the rest is refused, and says so.
            refused = [each for each in found if each is not None]
            assert all(
                isinstance(each, aiohttp.ClientError)
                or (isinstance(each, AssertionError) and "about to end" in str(each))
                for each in refused
            ), refused
            assert len(answered) + len(refused) == 200
            assert await asyncio.to_thread(running.wait, 30) == 0
            assert running.stderr is not None
            assert "Traceback" not in running.stderr.read()

    asyncio.run(asyncio.wait_for(test(), 120))


def call_that_lasts(pool: ThreadPoolExecutor, address: str) -> Future[httpx.Response]:
    """A call of a model that takes longer than a test waits; it has begun."""
    asked = request_of(0)
    asked["ids"][0, 0] = 0
    path, body, headers = binary("lasting", asked)
    call = pool.submit(httpx.post, address + path, content=body, headers=headers, timeout=60)
    time.sleep(1)
    return call


@pytest.mark.slow
def test_sigterm_ends_the_process_although_a_call_takes_longer_than_the_drain() -> None:
    target = f"{Path(__file__).with_name('served.py')}:lasting"
    with process(target, "--drain", "0.5") as (running, address), ThreadPoolExecutor(1) as pool:
        call = call_that_lasts(pool, address)
        running.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert running.wait(20) == 0
        assert time.monotonic() - begin < 10
        assert call.result().status_code == 503, call.result().text
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()


@pytest.mark.slow
@pytest.mark.usefixtures("heeding_ctrl_c")
def test_a_second_ctrl_c_ends_the_process_before_all_is_answered() -> None:
    target = f"{Path(__file__).with_name('served.py')}:lasting"
    with process(target, "--drain", "10m") as (running, address), ThreadPoolExecutor(1) as pool:
        call = call_that_lasts(pool, address)
        running.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.HTTPError):
            while httpx.get(f"{address}/v2/health/ready").status_code == 200:
                time.sleep(0.01)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
        assert isinstance(call.exception(), httpx.HTTPError)
        assert running.stderr is not None
        assert running.stderr.read().endswith("graphwright: interrupted.\n")


def test_a_server_ends_although_a_call_takes_longer_than_the_drain() -> None:
    go = threading.Event()
    go.set()

    class Slow(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            assert go.wait(30)
            return ids * mask

    before = threads()
    path, body, headers = binary("net", request_of(0))
    given = replace(config(), model=Slow().eval())
    with serve({"net": given}, block=False, drain_s=0.3, **ANY) as server:
        go.clear()
        address = f"http://127.0.0.1:{server.http_port}"
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(httpx.post, address + path, content=body, headers=headers)
            time.sleep(0.3)
            begin = time.monotonic()
            server.close()
            assert time.monotonic() - begin < 5
            assert call.result().status_code == 503, call.result().text
    go.set()
    end_with(before)


WRONG = [
    (["nothing.gw"], "There is no file nothing.gw"),
    ([TARGET, "--host", "1.2.3.4"], "1.2.3.4:0 cannot be listened on"),
    (["nothing.py:f"], "There is no file nothing.py"),
    ([TARGET, TARGET], "Two models are called config"),
    (["a=" + TARGET, "b=" + TARGET, "c.gw", "--model", TARGET], "--model is of one FILE"),
    ([TARGET, "--tls", __file__, __file__], "cannot be read as a certificate"),
    ([TARGET, "--timeout", "soon"], "is no duration above zero"),
]


# Each is a process of its own, which takes seconds.
@pytest.mark.parametrize(
    ("words", "said"), [*share((pytest.param(*each) for each in WRONG), of=len(WRONG))]
)
def test_a_wrong_command_is_told_in_one_sentence(words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "graphwright", "serve", *words, "--device", "cpu"]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [*command, *ports],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def unwanted() -> gw.ModelConfig:
    raise AssertionError("The model is made.")


def test_a_port_that_is_taken_is_named_before_the_model_is_made(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = rf"Port {port} is in use.\nChoose another with --(http|grpc)-port"
        for options in ({"http_port": port, "grpc_port": 0}, {"http_port": 0, "grpc_port": port}):
            with pytest.raises(gw.OptionError, match=said):
                serve({"net": unwanted}, block=False, **options)
        words = ["serve", TARGET, "--device", "cpu", "--http-port", "0", "--grpc-port", str(port)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"graphwright: Port {port} is in use.\nChoose another with ")
    assert capfd.readouterr() == ("", "")  # gRPC writes lines of its own there.


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        ({}, {}, "takes models by name"),
        ({"": config}, {}, "takes models by name"),
        (3, {}, "cannot be served"),
        (lambda: 3, {}, "not a ModelConfig"),
        (config, {"max_queue": 0}, "max_queue"),
        (config, {"http_port": 70000}, "http_port is 70000, no port"),
        (config, {"timeout_s": -1}, "timeout_s is -1"),
        (config, {"prot": 1, "hots": 2}, "no prot; there is no hots .Did you mean 'host'"),
        (config, {"http_port": 8000, "grpc_port": 8000}, "are both 8000"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    models: Any, options: dict[str, Any], said: str
) -> None:
    before = threads()
    with pytest.raises(gw.OptionError, match=said):
        serve(models, block=False, **{**ANY, **options})
    end_with(before)


def test_a_server_that_is_closed_leaves_no_thread() -> None:
    before = threads()
    for _ in range(2):
        with serve({"net": config()}, block=False, **ANY) as server:
            assert httpx.get(f"http://127.0.0.1:{server.http_port}/v2/health/ready").is_success
        server.close()
    end_with(before)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_and_a_token(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    trusting = ssl.create_default_context(cafile=certificate)
    options: dict[str, Any] = {"tls": (str(certificate), str(key)), "token": "sesame"}
    with serve({"net": config()}, block=False, **ANY, **options) as server:
        address = f"https://127.0.0.1:{server.http_port}"
        with httpx.Client(base_url=address, verify=trusting) as client:
            assert client.get("/v2/health/ready").status_code == 200
            assert client.get("/v2/models/net").status_code == 401
            authorised = {"Authorization": "Bearer sesame"}
            assert client.get("/v2/models/net", headers=authorised).status_code == 200


def test_answers_stay_right_beside_bad_requests_leaving_clients_and_reloads() -> None:
    model, given = made(Picky), config(Picky)
    seen = {"right": 0, "refused": 0, "left": 0, "failed": 0}

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        asked = request_of(number)
        kind = number % 20
        if kind == 3:
            asked["ids"][0, 0] = 0  # It fails in the model.
        path, body, headers = binary("net", asked)
        if kind == 7:
            body = body[:-1]
        if kind == 11:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(0.001):
                    async with session.post(path, data=body, headers=headers) as answer:
                        await answer.read()
            seen["left"] += 1
            return
        if number % 150 == 101:
            async with session.post("/v2/repository/models/net/load") as answer:
                assert answer.status == 200, await answer.text()
        async with session.post(path, data=body, headers=headers) as answer:
            status, content = answer.status, await answer.read()
        if kind == 7:
            assert status == 400
            seen["refused"] += 1
        elif kind == 3:
            assert status == 500
            assert b"a row begins with 0" in content
            seen["failed"] += 1
        else:
            assert status == 200, content
            with torch.no_grad():
                expected = model(asked["ids"], asked["mask"])
            for name, value in outputs_of(content, answer.headers).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
            seen["right"] += 1

    with serve({"net": given}, block=False, **ANY) as server:
        address = f"http://127.0.0.1:{server.http_port}"
        asyncio.run(asyncio.wait_for(swarm(address, 600, 32, ask), 120))
        text = httpx.get(f"{address}/metrics").text
    assert seen == {"right": 510, "refused": 30, "left": 30, "failed": 30}
    assert 'graphwright_requests_total{model="net",outcome="failed",version="1"} 30.0' in text


def test_answers_are_right_on_each_device(device: torch.device) -> None:
    """On a GPU by its graphs, without a call that falls back."""
    model = made().to(device)
    args = tuple(each.to(device) for each in sample())
    right: list[int] = []

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        asked = request_of(number)
        path, body, headers = binary("net", asked)
        async with session.post(path, data=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            found = outputs_of(await answer.read(), answer.headers)
        with torch.no_grad():
            expected = model(*(each.to(device) for each in asked.values()))
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].cpu(), rtol=1e-3, atol=1e-5)
        right.append(number)

    given = gw.ModelConfig(model, args, dynamic_shapes=BY_LENGTH)
    with serve({"net": given}, block=False, **ANY) as server:
        address = f"http://127.0.0.1:{server.http_port}"
        asyncio.run(asyncio.wait_for(swarm(address, 300, 16, ask), 120))
        text = httpx.get(f"{address}/metrics").text
    assert sorted(right) == list(range(300))
    calls = [line for line in text.splitlines() if line.startswith("graphwright_calls")]
    if device.type == "cuda":
        print("\n".join(calls))
        assert calls
        assert not any("eager" in line and not line.endswith(" 0.0") for line in calls)


@pytest.mark.long
@pytest.mark.slow
def test_a_thousand_requests_of_minilm_get_their_own_answers() -> None:
    """Mixed lengths, 32 clients: none wrong, none lost, none swapped. `bench soak` has more."""
    from serve_minilm import embedder

    given = embedder()
    generator = random.Random(0)
    requests = []
    for _ in range(200):
        ids = torch.tensor(
            [
                [
                    101,
                    *(
                        generator.randrange(1000, 30000)
                        for _ in range(min(62, int(generator.lognormvariate(2.3, 0.7))))
                    ),
                    102,
                ]
            ]
        )
        requests.append({"attention_mask": torch.ones_like(ids), "input_ids": ids})
    with torch.no_grad():
        expected = [given.model(**each) for each in requests]
    right: list[int] = []

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        which = number * 7919 % len(requests)
        path, body, headers = binary("minilm", requests[which])
        async with session.post(path, data=body, headers=headers) as answer:
            content = await answer.read()
            assert answer.status == 200, content
        (value,) = outputs_of(content, answer.headers).values()
        torch.testing.assert_close(value, expected[which], rtol=1e-3, atol=1e-5)
        right.append(number)

    with serve({"minilm": given}, block=False, **ANY) as server:
        begin = time.monotonic()
        address = f"http://127.0.0.1:{server.http_port}"
        asyncio.run(asyncio.wait_for(swarm(address, REQUESTS, 32, ask), 900))
        print(f"{REQUESTS / (time.monotonic() - begin):.0f} requests a second")
        text = httpx.get(f"{address}/metrics").text
    assert sorted(right) == list(range(REQUESTS))
    assert f'outcome="answered",version="1"}} {REQUESTS:.1f}' in text


def test_a_model_is_served_from_its_file(tmp_path: Path) -> None:
    model = made()
    with choosing("torchscript"):
        tuned = gw.tune(
            model,
            sample(4),
            strategies=["torchscript"],
            remember=False,
            progress=False,
            isolate=False,
        )
    gw.save(tuned, tmp_path / "net.bin")
    with process(str(tmp_path / "net.bin"), "--trust") as (_, address):
        metadata = httpx.get(f"{address}/v2/models/net").json()
        inputs = [(each["name"], each["shape"]) for each in metadata["inputs"]]
        assert inputs == [("ids", [-1, 16]), ("mask", [-1, 16])]
        outputs = [(each["name"], each["shape"]) for each in metadata["outputs"]]
        assert outputs == [("logits", [-1, 5]), ("tokens", [-1, 16, 5])]
        asked = dict(zip(("ids", "mask"), sample(2), strict=True))
        path, body, headers = binary("net", asked)
        answer = httpx.post(address + path, content=body, headers=headers)
        assert answer.is_success, answer.text
        with torch.no_grad():
            expected = model(*sample(2))
        for name, value in outputs_of(answer.content, answer.headers).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_request_within_its_deadline_is_answered_and_one_beyond_it_is_not() -> None:
    class Slow(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return ids * mask

    given = replace(config(), model=Slow().eval())
    with serve({"net": given}, block=False, timeout_s=0.02, **ANY) as server:
        path, body, headers = binary("net", request_of(3))
        address = f"http://127.0.0.1:{server.http_port}{path}"
        late = httpx.post(address, content=body, headers=headers)
        assert late.status_code in (408, 504), late.text
        assert "before the deadline" in late.json()["error"]


def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    """Nagle's algorithm would hold it back for 40 ms."""
    with serve({"net": config()}, block=False, http_port=0, grpc_port=None) as server:
        path, body, headers = binary("net", request_of(3))
        times: list[float] = []

        async def ask(session: aiohttp.ClientSession, number: int) -> None:
            begin = time.monotonic()
            async with session.post(path, data=body, headers=headers) as answer:
                await answer.read()
            times.append(time.monotonic() - begin)

        asyncio.run(swarm(f"http://127.0.0.1:{server.http_port}", 40, 1, ask))
    assert sorted(times)[20] < 0.03
