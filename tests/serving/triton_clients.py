"""What Triton's unmodified clients see of the server of test_grpc.py.

Run as `python triton_clients.py ADDRESS TOKEN`: prints a JSON object that has for each case None,
or the traceback of what failed. It is no part of the tests' own process, since tritonclient and
open-inference-grpc describe the same messages to protobuf, each in its own way.
"""

from __future__ import annotations

import asyncio
import functools
import json
import queue
import sys
import traceback
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

ADDRESS, TOKEN = sys.argv[1:]
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def given(name: str, values: np.ndarray) -> Any:
    held = tritonclient.grpc.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    return held.set_data_from_numpy(values)


def wanted(*names: str) -> list[Any]:
    return [tritonclient.grpc.InferRequestedOutput(name) for name in names]


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Code and text of the error that a call raises."""
    try:
        call()
    except InferenceServerException as error:
        return error.status().removeprefix("StatusCode."), error.message()
    raise AssertionError("nothing was raised")


class Cases:
    def __init__(self, client: Any) -> None:
        self.client = client

    def infer(self, model: str, *inputs: Any, **options: Any) -> Any:
        return self.client.infer(model, list(inputs), headers=HEADERS, **options)

    def health(self) -> None:
        assert self.client.is_server_live()
        assert self.client.is_server_ready()
        assert self.client.is_model_ready("echo", headers=HEADERS)
        assert self.client.is_model_ready("echo", "1", headers=HEADERS)

    def metadata(self) -> None:
        server = self.client.get_server_metadata(headers=HEADERS)
        assert (server.name, server.version) == ("fake", "0.1")
        assert list(server.extensions) == ["statistics", "model_repository"]
        model = self.client.get_model_metadata("echo", headers=HEADERS)
        assert (model.name, list(model.versions), model.platform) == ("echo", ["1"], "pytorch")
        assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [
            ("x", "FP32", [-1, 2])
        ]
        assert [(t.name, t.datatype, list(t.shape)) for t in model.outputs] == [
            ("y", "BYTES", [-1])
        ]

    def configuration(self) -> None:
        config = self.client.get_model_config("echo", headers=HEADERS).config
        assert (config.name, config.platform, config.max_batch_size) == ("echo", "pytorch", 8)
        kinds = tritonclient.grpc.model_config_pb2
        (x,), (y,) = config.input, config.output
        assert (x.name, x.data_type, list(x.dims)) == ("x", kinds.TYPE_FP32, [2])
        assert (y.name, y.data_type, list(y.dims)) == ("y", kinds.TYPE_STRING, [])

    def numbers(self) -> None:
        for kind in (
            *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64),
            ml_dtypes.bfloat16,
        ):
            values = np.arange(6).reshape(2, 3).astype(kind)
            back = self.infer("echo", given("x", values)).as_numpy("x")
            assert back.dtype == values.dtype, kind
            assert np.array_equal(back, values), kind

    def strings(self) -> None:
        values = np.array([[b"one", b""], ["zwölf".encode(), b"\0\xff"]], dtype=np.object_)
        back = self.infer("echo", given("x", values)).as_numpy("x")
        assert back.shape == (2, 2)
        assert back.tolist() == values.tolist()

    def empty(self) -> None:
        back = self.infer("echo", given("x", np.zeros((0, 3), np.float32))).as_numpy("x")
        assert back.shape == (0, 3)

    def several_outputs(self) -> None:
        inputs = [given(name, np.full((2,), i, np.int32)) for i, name in enumerate("abc")]
        every = self.infer("echo", *inputs)
        assert [output.name for output in every.get_response().outputs] == ["a", "b", "c"]
        some = self.infer("echo", *inputs, outputs=wanted("c", "a"))
        assert [output.name for output in some.get_response().outputs] == ["c", "a"]
        assert some.as_numpy("c").tolist() == [2, 2]
        assert some.as_numpy("a").tolist() == [0, 0]
        assert some.as_numpy("b") is None

    def id_version_and_parameters(self) -> None:
        parameters = {"word": "w", "yes": True, "count": 3, "share": 0.5}
        answer = self.infer(
            *("echo", given("x", np.zeros(1, np.float32))),
            model_version="1",
            request_id="mine",
            priority=2**63,
            parameters=parameters,
        ).get_response()
        assert (answer.model_name, answer.model_version, answer.id) == ("echo", "1", "mine")
        back = {
            key: getattr(value, value.WhichOneof("parameter_choice"))
            for key, value in answer.parameters.items()
        }
        assert back == {**parameters, "priority": 2**63}

    def compressed(self) -> None:
        values = np.zeros((100, 100), np.float32)
        back = self.infer("echo", given("x", values), compression_algorithm="gzip").as_numpy("x")
        assert np.array_equal(back, values)

    def callbacks(self) -> None:
        found: queue.Queue[tuple[Any, Any]] = queue.Queue()
        for i in range(20):
            values = np.full((2,), i, np.int64)
            self.client.async_infer(
                *("echo", [given("x", values)]),
                callback=lambda result, error: found.put((result, error)),
                request_id=str(i),
                headers=HEADERS,
            )
        seen = set()
        for _ in range(20):
            result, error = found.get(timeout=10)
            assert error is None, error
            assert result.as_numpy("x").tolist() == [int(result.get_response().id)] * 2
            seen.add(result.get_response().id)
        assert len(seen) == 20

    def cancelled(self) -> None:
        found: queue.Queue[tuple[Any, Any]] = queue.Queue()
        call = self.client.async_infer(
            *("slow", [given("x", np.zeros(1, np.float32))]),
            callback=lambda result, error: found.put((result, error)),
            headers=HEADERS,
        )
        call.cancel()
        assert "CANCELLED" in found.get(timeout=10)[1].status()

    def errors(self) -> None:
        x = given("x", np.zeros(1, np.float32))
        for model, code in (
            ("error:INVALID", "INVALID_ARGUMENT"),
            ("error:OVERLOADED", "RESOURCE_EXHAUSTED"),
            ("boom", "INTERNAL"),
            ("nobody", "NOT_FOUND"),
        ):
            assert refusal(lambda model=model: self.infer(model, x))[0] == code
        code, text = refusal(lambda: self.client.get_model_metadata("nobody", headers=HEADERS))
        assert (code, text) == ("NOT_FOUND", "There is no model 'nobody'.")
        assert refusal(self.client.get_cuda_shared_memory_status)[0] == "UNIMPLEMENTED"

    def malformed(self) -> None:
        x = given("x", np.zeros(4, np.float32)).set_shape([5])
        code, text = refusal(lambda: self.infer("echo", x))
        assert code == "INVALID_ARGUMENT"
        assert "'x' has 16 bytes" in text

    def shared_memory(self) -> None:
        x = tritonclient.grpc.InferInput("x", [1], "FP32").set_shared_memory("region", 4)
        assert refusal(lambda: self.infer("echo", x))[0] == "UNIMPLEMENTED"

    def without_token(self) -> None:
        call = self.client.get_server_metadata
        for headers in (None, {"authorization": "Bearer wrong"}):
            assert refusal(lambda headers=headers: call(headers=headers))[0] == "UNAUTHENTICATED"

    def deadlines(self) -> None:
        x = given("x", np.zeros(1, np.float32))
        code, _ = refusal(lambda: self.infer("slow", x, client_timeout=0.1))
        assert code == "DEADLINE_EXCEEDED"
        # In microseconds; the model says which deadline it was given.
        answer = self.infer("seconds left", x, timeout=5_000_000)
        assert 4 < answer.as_numpy("y") <= 5
        answer = self.infer("seconds left", x, client_timeout=20)
        assert 15 < answer.as_numpy("y") < 21  # gRPC rounds it up.
        answer = self.infer("seconds left", x)
        assert 25 < answer.as_numpy("y") <= 30  # The server's own.

    def statistics(self) -> None:
        (model,) = self.client.get_inference_statistics("echo", headers=HEADERS).model_stats
        assert (model.name, model.version) == ("echo", "1")
        assert (model.last_inference, model.inference_count, model.execution_count) == (7, 8, 9)
        stats = model.inference_stats
        parts = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        durations = [getattr(stats, part) for part in parts]
        assert [(each.count, each.ns) for each in durations] == [(i, 10 * i) for i in range(6)]
        assert [
            (each.batch_size, each.compute_infer.count, each.compute_infer.ns)
            for each in model.batch_stats
        ] == [(1, 2, 3), (8, 4, 5)]
        every = self.client.get_inference_statistics(headers=HEADERS).model_stats
        assert [each.name for each in every] == ["echo", "slow"]

    def repository(self) -> None:
        def models() -> list[tuple[str, ...]]:
            index = self.client.get_model_repository_index(headers=HEADERS)
            return [(m.name, m.version, m.state, m.reason) for m in index.models]

        assert models() == [("echo", "1", "READY", ""), ("old", "2", "UNAVAILABLE", "unloaded")]
        self.client.load_model("old", headers=HEADERS, config='{"batch": 4}')
        assert models()[1] == ("old", "2", "READY", '{"batch": 4}')
        self.client.unload_model("old", headers=HEADERS, unload_dependents=True)
        assert models()[1] == ("old", "2", "UNAVAILABLE", "unloaded")
        code, _ = refusal(lambda: self.client.unload_model("nobody", headers=HEADERS))
        assert code == "NOT_FOUND"
        files = {"file:1/model.pt": b"\0"}
        code, _ = refusal(lambda: self.client.load_model("old", HEADERS, "{}", files))
        assert code == "UNIMPLEMENTED"


class AioCases:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def concurrent_aio(self) -> None:
        async def ask(i: int) -> None:
            x = given("x", np.full((2, i), i, np.float32))
            result = await self.client.infer("echo", [x], request_id=str(i), headers=HEADERS)
            assert result.get_response().id == str(i)
            assert np.array_equal(result.as_numpy("x"), np.full((2, i), i, np.float32))

        await asyncio.gather(*map(ask, range(50)))

    async def everything_aio(self) -> None:
        assert await self.client.is_server_live()
        assert await self.client.is_server_ready()
        assert await self.client.is_model_ready("echo", headers=HEADERS)
        metadata = await self.client.get_model_metadata("echo", headers=HEADERS)
        assert metadata.platform == "pytorch"
        stats = await self.client.get_inference_statistics("echo", headers=HEADERS)
        assert stats.model_stats[0].inference_count == 8
        index = await self.client.get_model_repository_index(headers=HEADERS)
        assert index.models[0].name == "echo"

    async def errors_aio(self) -> None:
        x = given("x", np.zeros(1, np.float32))
        models = ("nobody", "boom", "echo")
        calls = [self.client.infer(model, [x], headers=HEADERS) for model in models]
        nobody, boom, echo = await asyncio.gather(*calls, return_exceptions=True)
        assert nobody.status() == "StatusCode.NOT_FOUND"
        assert boom.status() == "StatusCode.INTERNAL"
        assert echo.as_numpy("x").tolist() == [0]


def names(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_") and name != "infer"]


def seen(case: Callable[[], Any]) -> str | None:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None


def through_aio(name: str) -> None:
    async def main() -> None:
        async with tritonclient.grpc.aio.InferenceServerClient(ADDRESS) as client:
            await getattr(AioCases(client), name)()

    asyncio.run(main())


def main() -> None:
    with tritonclient.grpc.InferenceServerClient(ADDRESS) as client:
        found = {name: seen(getattr(Cases(client), name)) for name in names(Cases)}
    found |= {name: seen(functools.partial(through_aio, name)) for name in names(AioCases)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
