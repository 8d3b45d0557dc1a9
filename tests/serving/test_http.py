"""The protocol over HTTP, as clients meet it: a server of its own, and clients as they are."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import uvicorn
from fake_service import FakeLimits, FakeService

from graphwright.serving import http_codec as codec
from graphwright.serving import http_connection
from graphwright.serving.http import application
from graphwright.serving.http_connection import Connection
from graphwright.serving.protocol import ErrorKind

pytest.importorskip("geventhttpclient", reason="the HTTP part of tritonclient is not installed")
triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
triton_aio = pytest.importorskip("tritonclient.http.aio")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

JSON_FP32 = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2]}


@contextlib.contextmanager
def serving(service: FakeService, limits: FakeLimits) -> Iterator[str]:
    """A server in a thread; its host and port."""
    app = application(service, limits)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, http=Connection))
    # asyncio turns Nagle's waiting off only for sockets that name their protocol.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def everywhere() -> Iterator[tuple[str, FakeService, FakeLimits]]:
    service, limits = FakeService(), FakeLimits()
    with serving(service, limits) as address:
        yield address, service, limits


@pytest.fixture
def address(everywhere: tuple[str, FakeService, FakeLimits]) -> str:
    return everywhere[0]


@pytest.fixture
def service(everywhere: tuple[str, FakeService, FakeLimits]) -> FakeService:
    """As new for each test."""
    service = everywhere[1]
    service.__init__()  # type: ignore[misc]  # the server keeps the object
    return service


@pytest.fixture
def limits(everywhere: tuple[str, FakeService, FakeLimits]) -> Iterator[FakeLimits]:
    limits = everywhere[2]
    yield limits
    limits.__init__()  # type: ignore[misc]  # the server keeps the object


@pytest.fixture
def client(address: str, service: FakeService) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address, concurrency=4) as client:
        yield client


@pytest.fixture
def web(address: str, service: FakeService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{address}", trust_env=False) as web:
        yield web


def infer_input(array: np.ndarray, datatype: str, name: str = "x", binary: bool = True) -> Any:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array, binary)


ARRAYS = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([[-3], [4]], np.int16),
    "INT32": np.array(-7, np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([1.5, np.inf], np.float16),
    "BF16": np.array([1.5, -3e38], ml_dtypes.bfloat16),
    "FP32": np.array([0.1, np.nan, -np.inf], np.float32),
    "FP64": np.zeros((0, 3)),
    "BYTES": np.array([[b"\x00\xff", "ü".encode(), b""]], np.object_),
}


class TestTritonClient:
    @pytest.mark.parametrize("datatype", ARRAYS)
    def test_binary(self, client: triton.InferenceServerClient, datatype: str) -> None:
        array = ARRAYS[datatype]
        result = client.infer("echo", [infer_input(array, datatype)])
        found = result.as_numpy("x")
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert result.get_output("x")["parameters"]["binary_data_size"] >= array.size

    @pytest.mark.parametrize("datatype", sorted(set(ARRAYS) - {"FP16", "BF16", "BYTES"}))
    def test_json(self, client: triton.InferenceServerClient, datatype: str) -> None:
        array = ARRAYS[datatype]
        wanted = [triton.InferRequestedOutput("x", binary_data=False)]
        result = client.infer("echo", [infer_input(array, datatype, binary=False)], outputs=wanted)
        assert "data" in result.get_output("x")
        np.testing.assert_array_equal(result.as_numpy("x"), array)

    def test_bytes_in_json(self, client: triton.InferenceServerClient) -> None:
        array = np.array(["ü".encode(), b"b"], np.object_)
        wanted = [triton.InferRequestedOutput("x", binary_data=False)]
        result = client.infer("echo", [infer_input(array, "BYTES", binary=False)], outputs=wanted)
        assert result.get_output("x")["data"] == ["ü", "b"]

    def test_mixed_inputs_and_outputs(self, client: triton.InferenceServerClient) -> None:
        arrays = {name: np.arange(n + 1, dtype=np.int16) for n, name in enumerate("abc")}
        inputs = [infer_input(arrays[name], "INT16", name, name != "b") for name in "abc"]
        wanted = [triton.InferRequestedOutput(name, binary_data=name != "c") for name in "cba"]
        result = client.infer("echo", inputs, "7", wanted, request_id="42")
        answer = result.get_response()
        assert [output["name"] for output in answer["outputs"]] == ["c", "b", "a"]
        assert (answer["model_name"], answer["model_version"], answer["id"]) == ("echo", "7", "42")
        for name, array in arrays.items():
            np.testing.assert_array_equal(result.as_numpy(name), array)

    @pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
    def test_compressed(self, client: triton.InferenceServerClient, algorithm: str) -> None:
        array = np.arange(1000, dtype=np.float32)
        result = client.infer(
            "echo",
            [infer_input(array, "FP32")],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        np.testing.assert_array_equal(result.as_numpy("x"), array)

    def test_large(self, client: triton.InferenceServerClient, limits: FakeLimits) -> None:
        limits.max_request_bytes = 1 << 24
        arrays = [np.arange(n, dtype=np.float32) for n in (300_001, 5, 700_000)]
        inputs = [infer_input(array, "FP32", f"x{n}") for n, array in enumerate(arrays)]
        result = client.infer("echo", inputs)
        for n, array in enumerate(arrays):
            np.testing.assert_array_equal(result.as_numpy(f"x{n}"), array)

    def test_parameters(self, client: triton.InferenceServerClient, service: FakeService) -> None:
        x = infer_input(ARRAYS["INT8"], "INT8")
        client.infer("echo", [x], timeout=5_000_000, priority=2, parameters={"beams": 3})
        client.infer("echo", [x])
        first, second = service.asked
        assert first.parameters == {"timeout": 5_000_000, "priority": 2, "beams": 3}
        assert first.deadline == pytest.approx(first.received + 5)
        assert second.deadline == pytest.approx(second.received + 30)
        assert abs(time.monotonic() - second.received) < 20

    def test_concurrent(self, client: triton.InferenceServerClient) -> None:
        arrays = [np.full(3, n, np.int32) for n in range(20)]
        asked = [client.async_infer("echo", [infer_input(a, "INT32")]) for a in arrays]
        for handle, array in zip(asked, arrays, strict=True):
            np.testing.assert_array_equal(handle.get_result().as_numpy("x"), array)

    def test_aio(self, address: str, service: FakeService) -> None:
        async def ask() -> None:
            async with triton_aio.InferenceServerClient(address) as client:
                assert await client.is_server_ready()
                arrays = [np.full(3, n, np.float64) for n in range(20)]
                asked = [client.infer("echo", [infer_input(a, "FP64")]) for a in arrays]
                for result, array in zip(await asyncio.gather(*asked), arrays, strict=True):
                    np.testing.assert_array_equal(result.as_numpy("x"), array)
                with pytest.raises(InferenceServerException, match="no model 'nobody'"):
                    await client.infer("nobody", [infer_input(arrays[0], "FP64")])

        asyncio.run(ask())

    def test_health(self, client: triton.InferenceServerClient, service: FakeService) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.is_model_ready("echo", "1")
        assert not client.is_model_ready("echo", "2")
        assert not client.is_model_ready("nobody")
        service.live = False
        assert not client.is_server_live()
        assert not client.is_server_ready()

    def test_metadata(self, client: triton.InferenceServerClient) -> None:
        extensions = ["statistics", "model_repository"]
        of_server = {"name": "fake", "version": "0.1", "extensions": extensions}
        assert client.get_server_metadata() == of_server
        of_x = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
        of_y = {"name": "y", "datatype": "BYTES", "shape": [-1]}
        of_model = {"name": "echo", "platform": "pytorch", "inputs": [of_x], "outputs": [of_y]}
        assert client.get_model_metadata("echo") == {**of_model, "versions": ["1"]}
        assert client.get_model_metadata("echo", "4") == {**of_model, "versions": ["4"]}

    def test_configuration(self, client: triton.InferenceServerClient) -> None:
        assert client.get_model_config("echo", "1") == {
            "name": "echo",
            "platform": "pytorch",
            "max_batch_size": 8,
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
            "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": []}],
        }
        with pytest.raises(InferenceServerException, match="no model 'nobody'"):
            client.get_model_config("nobody")

    def test_statistics(self, client: triton.InferenceServerClient) -> None:
        names = [m["name"] for m in client.get_inference_statistics()["model_stats"]]
        assert names == ["echo", "slow"]
        (model,) = client.get_inference_statistics("echo", "5")["model_stats"]
        assert (model["name"], model["version"], model["inference_count"]) == ("echo", "5", 8)
        assert model["batch_stats"][0]["compute_infer"] == {"count": 2, "ns": 3}

    def test_repository(self, client: triton.InferenceServerClient, service: FakeService) -> None:
        client.load_model("new", config='{"a": 1}')
        assert service.loaded["new"] == {"config": '{"a": 1}'}
        client.unload_model("echo")
        index = client.get_model_repository_index()
        assert [(entry["name"], entry["state"]) for entry in index] == [
            ("echo", "UNAVAILABLE"),
            ("old", "UNAVAILABLE"),
            ("new", "READY"),
        ]
        with pytest.raises(InferenceServerException, match="no model 'echo'") as info:
            client.unload_model("echo")
        assert info.value.status() == "404"

    def test_half_outputs_as_json(self, client: triton.InferenceServerClient) -> None:
        wanted = [triton.InferRequestedOutput("x", binary_data=False)]
        with pytest.raises(InferenceServerException, match=r'Output "x" is of FP16.*binary'):
            client.infer("echo", [infer_input(ARRAYS["FP16"], "FP16")], outputs=wanted)


class TestPlainJson:
    def test_infer(self, web: httpx.Client) -> None:
        answer = web.post("/v2/models/echo/infer", json={"id": "i", "inputs": [JSON_FP32]})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert "inference-header-content-length" not in answer.headers
        assert answer.json() == {
            "model_name": "echo",
            "model_version": "1",
            "id": "i",
            "outputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2.0]}],
        }

    def test_health_and_readiness(self, web: httpx.Client) -> None:
        assert web.get("/v2/health/live").json() == {"live": True}
        assert web.get("/v2/health/ready").json() == {"ready": True}
        assert web.get("/v2/models/echo/ready").json() == {"name": "echo", "ready": True}
        unready = web.get("/v2/models/echo/versions/2/ready")
        assert (unready.status_code, unready.json()["ready"]) == (503, False)

    def test_the_root_says_what_this_is(self, web: httpx.Client) -> None:
        found = web.get("/").json()
        assert found["about"].startswith("This is fake 0.1: it serves models by the Open Inference")
        assert found["models"] == {"echo": "/v2/models/echo", "old": "/v2/models/old"}
        assert web.get(found["models"]["echo"]).json()["name"] == "echo"
        assert web.get(found["health"]).status_code == 200

    def test_index_of_what_is_ready(self, web: httpx.Client) -> None:
        found = web.post("/v2/repository/index", json={"ready": True}).json()
        assert [entry["name"] for entry in found] == ["echo"]
        packed = gzip.compress(b'{"ready":true}')
        headers = {"content-encoding": "gzip"}
        assert web.post("/v2/repository/index", content=packed, headers=headers).json() == found

    def test_metrics(self, web: httpx.Client) -> None:
        answer = web.get("/metrics")
        assert answer.content == b"up 1\n"
        assert answer.headers["content-type"] == "text/plain; version=0.0.4"

    def test_many_at_once(self, web: httpx.Client) -> None:
        def ask(n: int) -> Any:
            of_n = {"name": "x", "datatype": "INT32", "shape": [1], "data": [n]}
            answer = web.post("/v2/models/echo/infer", json={"inputs": [of_n]})
            return answer.json()["outputs"][0]["data"]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(40))) == [[n] for n in range(40)]

    @pytest.mark.parametrize(("count", "beside"), [(10, False), (40_000, True)])
    def test_large_json_is_read_and_written_beside_the_loop(
        self, web: httpx.Client, monkeypatch: pytest.MonkeyPatch, count: int, beside: bool
    ) -> None:
        threads: list[int] = []
        for name in ("decode_infer", "encode_infer", "writes_quickly"):
            function = getattr(codec, name)

            def noted(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                threads.append(threading.get_ident())
                return function(*args, **kwargs)

            monkeypatch.setattr(codec, name, noted)
        data = list(range(count))
        of_x = {"name": "x", "datatype": "INT32", "shape": [count], "data": data}
        answer = web.post("/v2/models/echo/infer", json={"inputs": [of_x]})
        assert answer.json()["outputs"][0]["data"] == data
        reading, loop, writing = threads  # in the order of a request
        assert (reading != loop, writing != loop) == (beside, beside)


class TestErrors:
    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            (ErrorKind.INVALID, 400),
            (ErrorKind.UNAUTHENTICATED, 401),
            (ErrorKind.NOT_FOUND, 404),
            (ErrorKind.TOO_LARGE, 413),
            (ErrorKind.OVERLOADED, 429),
            (ErrorKind.CANCELLED, 499),
            (ErrorKind.FAILED, 500),
            (ErrorKind.UNSUPPORTED, 501),
            (ErrorKind.UNAVAILABLE, 503),
            (ErrorKind.TOO_LATE, 504),
        ],
    )
    def test_each_kind(self, web: httpx.Client, kind: ErrorKind, status: int) -> None:
        answer = web.post(f"/v2/models/error:{kind.name}/infer", json={"inputs": []})
        assert answer.status_code == status
        assert answer.json() == {"error": "So it is. Ask öfter."}
        assert answer.headers["retry-after"] == "2"
        assert ("www-authenticate" in answer.headers) == (status == 401)

    def test_overload_says_when_to_ask_again(self, web: httpx.Client) -> None:
        answer = web.post("/v2/models/full/infer", json={"inputs": []})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")

    def test_a_failure_is_logged_and_not_shown(
        self, web: httpx.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        answer = web.post("/v2/models/boom/infer", json={"inputs": []})
        assert answer.status_code == 500
        assert answer.json() == {"error": "The server failed with RuntimeError; its log says more."}
        (record,) = [r for r in caplog.records if r.name == "graphwright.serving"]
        assert "/v2/models/boom/infer" in record.getMessage()
        assert record.exc_info is not None
        assert "within the model" in str(record.exc_info[1])
        assert not [r for r in caplog.records if r.name == "uvicorn.error" and r.exc_info]

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/nothing", 404),
            ("GET", "/v2/models/a/b", 404),
            ("POST", "/v2/models/echo/versions/1/generate", 404),
            ("GET", "/v2/models/echo/infer", 405),
            ("POST", "/v2", 405),
            ("GET", "/v2/models/nobody", 404),
        ],
    )
    def test_paths(self, web: httpx.Client, method: str, path: str, status: int) -> None:
        answer = web.request(method, path)
        assert answer.status_code == status
        assert list(answer.json()) == ["error"]

    @pytest.mark.parametrize(
        ("headers", "body", "says"),
        [
            ({}, b"", "valid JSON"),
            ({}, b'{"inputs":[' + b"[" * 5000, "nested"),
            ({"inference-header-content-length": "nan"}, b"{}", "Inference-Header-Content-Length"),
            ({"inference-header-content-length": "-2"}, b"{}", "Inference-Header-Content-Length"),
            ({"inference-header-content-length": "9"}, b"{}", "Inference-Header-Content-Length"),
            ({"content-encoding": "br"}, b"{}", "Content-Encoding"),
            ({"content-encoding": "gzip"}, b"{}", "gzip"),
        ],
    )
    def test_malformed(
        self, web: httpx.Client, headers: dict[str, str], body: bytes, says: str
    ) -> None:
        answer = web.post("/v2/models/echo/infer", content=body, headers=headers)
        assert answer.status_code == 400
        assert says in answer.json()["error"]

    def test_a_large_body_for_the_repository(self, web: httpx.Client, service: FakeService) -> None:
        parameters = {"config": "x" * 100_000}
        path = "/v2/repository/models/new/load"
        assert web.post(path, json={"parameters": parameters}).status_code == 200
        assert service.loaded["new"] == parameters

    @pytest.mark.parametrize("path", ["index", "models/a/load", "models/a/unload"])
    def test_malformed_for_the_repository(self, web: httpx.Client, path: str) -> None:
        answer = web.post(f"/v2/repository/{path}", content=b"[")
        assert (answer.status_code, list(answer.json())) == (400, ["error"])

    def test_the_connection_stays(
        self, address: str, service: FakeService, limits: FakeLimits
    ) -> None:
        limits.max_request_bytes = 100_000
        right = json.dumps({"inputs": [JSON_FP32]}).encode()
        asked = [
            ("echo", b"x" * 70_000, 400),
            ("echo", b"x" * 3_000_000, 413),  # It is answered before it is read.
            ("nobody", right, 404),
            ("boom", right, 500),
            ("echo/x", b"x" * 3_000_000, 404),
            ("error:OVERLOADED", right, 429),
        ]
        with contextlib.closing(http.client.HTTPConnection(address, timeout=20)) as connection:
            connection.connect()
            connection.auto_open = 0  # It is not to come back once it is closed.
            for model, body, status in [each for pair in asked for each in (pair, pair)]:
                connection.request("POST", f"/v2/models/{model}/infer", body)
                answer = connection.getresponse()
                assert (answer.status, list(json.loads(answer.read()))) == (status, ["error"])
                connection.request("POST", "/v2/models/echo/infer", right)
                answer = connection.getresponse()
                assert (answer.status, "outputs" in json.loads(answer.read())) == (200, True)


class TestLimits:
    def body(self, size: int) -> bytes:
        return json.dumps({"inputs": [JSON_FP32]}).encode().ljust(size)

    @pytest.mark.parametrize("chunked", [False, True])
    @pytest.mark.parametrize(("size", "status"), [(5000, 200), (5001, 413)])
    def test_size(
        self, web: httpx.Client, limits: FakeLimits, chunked: bool, size: int, status: int
    ) -> None:
        limits.max_request_bytes = 5000
        body = self.body(size)
        content = iter([body[:3000], body[3000:]]) if chunked else body
        answer = web.post("/v2/models/echo/infer", content=content)
        assert answer.status_code == status

    @pytest.mark.parametrize(("size", "status"), [(5000, 200), (5001, 413), (100_000_000, 413)])
    def test_size_once_decompressed(
        self, web: httpx.Client, limits: FakeLimits, size: int, status: int
    ) -> None:
        limits.max_request_bytes = 5000 if size < 10_000 else 1 << 20
        body = gzip.compress(self.body(size), 1)
        headers = {"content-encoding": "gzip"}
        answer = web.post("/v2/models/echo/infer", content=body, headers=headers)
        assert answer.status_code == status

    @pytest.mark.parametrize("declared", [True, False])
    def test_no_more_is_read_than_the_limit(self, declared: bool) -> None:
        headers = [(b"content-length", b"9000")] if declared else []
        asked = Asked([b"x" * 400] * 100, headers)
        asyncio.run(asked.of(application(FakeService(), FakeLimits(1000))))
        assert asked.status == 413
        assert asked.read == (0 if declared else 3)

    def test_token(self) -> None:
        with serving(FakeService(), FakeLimits(token="sesame")) as address:
            url = f"http://{address}"
            with httpx.Client(base_url=url, trust_env=False) as web:
                for path in ("/v2/health/live", "/v2/health/ready"):
                    assert web.get(path).status_code == 200
                for path in ("/v2", "/v2/models/echo", "/metrics", "/nothing", "/v2/health"):
                    assert web.get(path).status_code == 401
                refused = [{}, {"authorization": "Bearer sesam"}, {"authorization": "sesame"}]
                refused += [{"authorization": "Basic sesame"}, {"authorization": "Bearer ü"}]
                for headers in refused:
                    encoded = {name: value.encode() for name, value in headers.items()}
                    answer = web.post("/v2/models/echo/infer", json={"inputs": []}, headers=encoded)
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert "token" in answer.json()["error"]
                for scheme in ("Bearer", "bearer"):
                    headers = {"authorization": f"{scheme} sesame"}
                    assert web.get("/v2", headers=headers).status_code == 200
                    answer = web.post("/v2/models/echo/infer", json={"inputs": []}, headers=headers)
                    assert answer.status_code == 200

    def test_health_is_open_below_a_prefix_too(self) -> None:
        async def test() -> None:
            app = application(FakeService(), FakeLimits(token="sesame"))
            below = httpx.ASGITransport(app, root_path="/models")
            async with httpx.AsyncClient(transport=below, base_url="http://below") as web:
                assert (await web.get("/models/v2/health/ready")).status_code == 200
                assert (await web.get("/models/v2")).status_code == 401
                headers = {"authorization": "Bearer sesame"}
                assert (await web.get("/models/v2", headers=headers)).status_code == 200

        asyncio.run(test())


POST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n"


class TestHeaders:
    def received(self, address: str, *sent: bytes) -> bytes:
        """What comes until the server closes the connection."""
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            for each in sent:
                connection.sendall(each)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    @pytest.mark.parametrize(
        "head",
        [
            POST + b"X-A: " + b"a" * 66_000,
            POST + b"X-A: b\r\n" * 8_250,
            b"GET /v2/" + b"a" * 66_000,
            b"\r\n" * 33_000,
        ],
        ids=["one", "many", "the URL", "blank lines"],
    )
    def test_too_large_ones_are_refused_before_they_end(self, address: str, head: bytes) -> None:
        answer = self.received(address, head)
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        assert b"larger than 64 KiB" in answer

    def test_too_large_ones_are_refused_after_another_request(self, address: str) -> None:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            connection.sendall(POST + b"X-A: " + b"a" * 66_000)
            assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")

    def test_too_large_trailers_close_the_connection(self, address: str) -> None:
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        with contextlib.suppress(ConnectionError):  # It has not read all of it.
            assert self.received(address, chunked, b"X-A: " + b"a" * 999_000) == b""

    def test_those_that_fit_are_read_beside_large_bodies(
        self, web: httpx.Client, limits: FakeLimits
    ) -> None:
        limits.max_request_bytes = 2 << 20
        count = 300_000
        body = {"inputs": [{**JSON_FP32, "shape": [count], "data": [1.0] * count}]}
        for _ in range(3):
            found = web.post("/v2/models/echo/infer", json=body, headers={"x-a": "a" * 60_000})
            assert found.json()["outputs"][0]["shape"] == [count]

    @pytest.mark.parametrize("sent", [b"", POST + b"X-A: "])
    def test_those_that_do_not_come_close_the_connection(
        self, address: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_connection, "HEADERS_S", 0.2)
        assert self.received(address, sent) == b""

    def test_the_answer_may_take_longer_than_headers_may(
        self, web: httpx.Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_connection, "HEADERS_S", 0.2)
        with pytest.raises(httpx.ReadTimeout):
            web.post("/v2/models/slow/infer", json={"inputs": [JSON_FP32]}, timeout=0.7)
        assert service.dropped.wait(10)  # Before the next test, whose service is the same one.


class TestGoing:
    def test_a_client_that_goes_cancels_its_request(
        self, address: str, service: FakeService
    ) -> None:
        body = json.dumps({"inputs": [JSON_FP32]}).encode()
        head = b"POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head % len(body) + body)
            assert service.began.wait(10)
            assert not service.dropped.is_set()
        assert service.dropped.wait(10)

    def test_a_client_that_goes_while_it_sends(
        self, address: str, service: FakeService, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked = Asked([b"{"], [], gone_after=1)
        asyncio.run(asked.of(application(service, FakeLimits())))
        assert (asked.status, service.asked) == (None, [])
        assert not caplog.records

    def test_nobody_is_answered_once_gone(self, service: FakeService) -> None:
        body = json.dumps({"inputs": [JSON_FP32]}).encode()
        asked = Asked([body], [], path="/v2/models/slow/infer", last=True, gone_after=1)
        asyncio.run(asked.of(application(service, FakeLimits())))
        assert asked.status is None
        assert service.dropped.is_set()

    def test_the_server_s_own_end_goes_through(self, service: FakeService) -> None:
        body = json.dumps({"inputs": [JSON_FP32]}).encode()
        asked = Asked([body], [], path="/v2/models/slow/infer", last=True)

        async def end() -> None:
            task = asyncio.ensure_future(asked.of(application(service, FakeLimits())))
            while not service.began.is_set():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(end())
        assert service.dropped.is_set()
        assert asked.status is None

    def test_nothing_stays_behind_an_answer(self, service: FakeService) -> None:
        body = json.dumps({"inputs": [JSON_FP32]}).encode()
        asked = Asked([body], [], path="/v2/models/echo/infer", last=True)

        async def ask() -> int:
            await asked.of(application(service, FakeLimits()))
            await asyncio.sleep(0)
            return len(asyncio.all_tasks())

        assert asyncio.run(ask()) == 1
        assert asked.status == 200


class Asked:
    """A request without a server: what it sends, and what became of it."""

    def __init__(
        self,
        parts: list[bytes],
        headers: list[tuple[bytes, bytes]],
        *,
        path: str = "/v2/models/echo/infer",
        last: bool = False,
        gone_after: int | None = None,
    ) -> None:
        self._parts, self._headers, self._path = parts, headers, path
        self._last, self._gone_after = last, gone_after
        self.read = 0
        self.status: int | None = None

    async def of(self, app: Any) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "root_path": "",
            "query_string": b"",
            "headers": self._headers,
        }
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self.read == self._gone_after:
            return {"type": "http.disconnect"}
        if self.read == len(self._parts):
            await asyncio.Event().wait()
        part = self._parts[self.read]
        self.read += 1
        more = not self._last or self.read < len(self._parts)
        return {"type": "http.request", "body": part, "more_body": more}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
