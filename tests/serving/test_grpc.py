"""The Open Inference Protocol over gRPC, as Triton's and open-inference's clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fake_service import FakeLimits, FakeService
from open_inference.grpc import protocol as messages
from open_inference.grpc.service import GRPCInferenceServiceStub

from graphwright.serving import grpc_codec
from graphwright.serving import grpc_extensions as extensions
from graphwright.serving.grpc import server
from graphwright.serving.protocol import ErrorKind

TOKEN = "secret"
CASES = [
    *("health", "metadata", "configuration", "numbers", "strings", "empty", "several_outputs"),
    *("id_version_and_parameters", "compressed", "callbacks", "cancelled", "errors", "malformed"),
    *("shared_memory", "without_token", "deadlines", "statistics", "repository"),
    *("concurrent_aio", "everything_aio", "errors_aio"),
]
CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.TOO_LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.FAILED: grpc.StatusCode.INTERNAL,
}


@contextlib.asynccontextmanager
async def serving(service: FakeService, limits: FakeLimits) -> AsyncIterator[str]:
    """The address of a server that runs meanwhile."""
    serves = server(service, limits)
    port = serves.add_insecure_port("127.0.0.1:0")
    await serves.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await serves.stop(None)


def talking(
    talk: Callable[[Any, FakeService], Awaitable[None]], limits: FakeLimits | None = None
) -> None:
    """Have a coroutine talk to a server over a channel of gRPC."""

    async def main() -> None:
        service = FakeService()
        async with serving(service, limits or FakeLimits()) as address:
            async with grpc.aio.insecure_channel(address) as channel:
                await asyncio.wait_for(talk(channel, service), 20)

    asyncio.run(main())


def floats(model: str, *values: float, **options: Any) -> messages.ModelInferRequest:
    x = {
        "name": "x",
        "datatype": "FP32",
        "shape": [len(values)],
        "contents": {"fp32_contents": values},
    }
    return messages.ModelInferRequest(model_name=model, inputs=[x], **options)


async def is_set(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, 20)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.fixture(scope="module")
def triton() -> dict[str, str | None]:
    """What Triton's clients saw, in a process of their own: None or what failed, for each case."""

    async def main() -> bytes:
        async with serving(FakeService(), FakeLimits(token=TOKEN)) as address:
            script = Path(__file__).with_name("triton_clients.py")
            clients = await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), address, TOKEN), stdout=asyncio.subprocess.PIPE
            )
            try:
                written, _ = await asyncio.wait_for(clients.communicate(), 60)
            except TimeoutError:
                clients.kill()
                raise
            return written

    found: dict[str, str | None] = json.loads(asyncio.run(main()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_clients_of_triton(case: str, triton: dict[str, str | None]) -> None:
    assert triton[case] is None, triton[case]


def test_all_cases_of_triton_s_clients_are_looked_at(triton: dict[str, str | None]) -> None:
    assert set(triton) == set(CASES)


def test_open_inference_s_own_client() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        assert (await stub.ServerLive(messages.ServerLiveRequest())).live
        assert (await stub.ServerReady(messages.ServerReadyRequest())).ready
        service.live = False
        assert not (await stub.ServerLive(messages.ServerLiveRequest())).live
        ready = await stub.ModelReady(messages.ModelReadyRequest(name="echo", version="1"))
        assert ready.ready
        ready = await stub.ModelReady(messages.ModelReadyRequest(name="echo", version="2"))
        assert not ready.ready
        assert (await stub.ServerMetadata(messages.ServerMetadataRequest())).name == "fake"
        found = await stub.ModelMetadata(messages.ModelMetadataRequest(name="echo"))
        assert found.inputs[0].name == "x"
        before = time.monotonic()
        answer = await stub.ModelInfer(floats("echo", 1.5, 2.5, id="mine"))
        assert (answer.id, answer.outputs[0].datatype) == ("mine", "FP32")
        sent = torch.frombuffer(bytearray(answer.raw_output_contents[0]), dtype=torch.float32)
        assert sent.tolist() == [1.5, 2.5]
        assert before <= service.asked[0].received <= time.monotonic()

    talking(talk)


@pytest.mark.parametrize("kind", ErrorKind)
def test_each_error_has_its_code_and_says_when_to_ask_again(kind: ErrorKind) -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        error = await refusal(stub.ModelInfer(floats(f"error:{kind.name}", 1.0)))
        assert error.code() is CODES[kind]
        assert error.details() == "So it is.\nAsk öfter."
        assert ("retry-after", "2") in list(error.trailing_metadata())

    talking(talk)


def test_an_unexpected_error_is_logged_with_its_traceback_and_told_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        error = await refusal(stub.ModelInfer(floats("boom", 1.0)))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "The server could not answer ModelInfer: RuntimeError.\n" + (
            "Its log says more."
        )
        assert "retry-after" not in dict(error.trailing_metadata())

    with caplog.at_level(logging.ERROR, "graphwright.serving"):
        talking(talk)
    (record,) = [each for each in caplog.records if each.name == "graphwright.serving"]
    assert record.exc_info is not None
    assert "RuntimeError: within the model" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("kind", [BaseException, SystemExit])
def test_an_error_that_is_no_exception_is_answered(kind: type[BaseException]) -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        async def raising(name: str) -> None:
            raise kind("oh")

        service.unload = raising  # type: ignore[method-assign]  # what a source may raise
        call = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")
        error = await refusal(call(b"", timeout=10))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert (
            await GRPCInferenceServiceStub(channel).ServerLive(messages.ServerLiveRequest())
        ).live

    talking(talk)


def test_what_is_no_message_is_the_client_s_error() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        for method, data in (("ModelInfer", b"\xff\xff\xff"), ("ModelReady", b"\x0a\x02\xff\xfe")):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            error = await refusal(call(data))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == f"The request is no {method}Request."

    talking(talk)


def test_long_names_do_not_hide_the_error() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        inputs = [{"name": "ü" * 20_000, "datatype": "ü" * 20_000, "shape": [1]}]
        sent = messages.ModelInferRequest(model_name="echo", inputs=inputs)
        assert (await refusal(stub.ModelInfer(sent))).code() is grpc.StatusCode.INVALID_ARGUMENT
        # What the service says is cut as well.
        error = await refusal(stub.ModelInfer(floats("ü" * 20_000, 1.0)))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details().startswith("There is no model 'üü")

    talking(talk)


def test_what_is_too_large_is_refused_and_what_fits_is_not() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        large = floats("echo", *[1.0] * 300)
        for how in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            error = await refusal(stub.ModelInfer(large, compression=how))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not service.asked
        await stub.ModelInfer(floats("echo", *[1.0] * 200))

    talking(talk, FakeLimits(max_request_bytes=1000))


def test_large_messages_are_read_and_written_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_loop: list[bool] = []
    read, write = grpc_codec.infer_request, grpc_codec.infer_response

    def reads(*args: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return read(*args)

    def writes(response: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return write(response)

    monkeypatch.setattr(grpc_codec, "infer_request", reads)
    monkeypatch.setattr(grpc_codec, "infer_response", writes)

    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        for count in (2, 20_000):
            answer = await stub.ModelInfer(floats("echo", *[1.5] * count))
            assert len(answer.raw_output_contents[0]) == 4 * count

    talking(talk)
    assert on_loop == [True, True, False, False]


@pytest.mark.parametrize(
    "sent",
    [None, "", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer ", f"Bearer {TOKEN}x"],
)
def test_all_but_health_wants_the_token(sent: str | None) -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        metadata = None if sent is None else [("authorization", sent)]
        for call in (
            stub.ModelInfer(floats("echo", 1.0), metadata=metadata),
            stub.ModelReady(messages.ModelReadyRequest(name="echo"), metadata=metadata),
            channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")(
                b"", metadata=metadata
            ),
        ):
            assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert not service.asked
        assert (await stub.ServerLive(messages.ServerLiveRequest(), metadata=metadata)).live
        assert (await stub.ServerReady(messages.ServerReadyRequest(), metadata=metadata)).ready
        right = [("authorization", f"bearer {TOKEN}")]
        await stub.ModelInfer(floats("echo", 1.0), metadata=right)

    talking(talk, FakeLimits(token=TOKEN))


def test_a_request_without_any_deadline_has_none() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        stub = GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(floats("echo", 1.0))
        await stub.ModelInfer(floats("echo", 1.0), timeout=15)
        without, soon = service.asked
        assert without.deadline is None
        assert soon.deadline is not None
        assert 10 < soon.deadline - soon.received < 16  # gRPC rounds it up.

    talking(talk, FakeLimits(timeout_s=None))


def test_a_cancelled_call_cancels_the_service_s_task() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        call = GRPCInferenceServiceStub(channel).ModelInfer(floats("slow", 1.0))
        assert await is_set(service.began)
        assert not service.dropped.is_set()
        call.cancel()
        assert await is_set(service.dropped)

    talking(talk)


def test_a_request_that_the_service_drops_is_answered() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        call = GRPCInferenceServiceStub(channel).ModelInfer(floats("dropped", 1.0), timeout=10)
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.CANCELLED
        assert error.details() == "The server has dropped the request."

    talking(talk)


def test_requests_under_way_end_with_the_server() -> None:
    async def main() -> None:
        service = FakeService()
        serves = server(service, FakeLimits())
        port = serves.add_insecure_port("127.0.0.1:0")
        await serves.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = GRPCInferenceServiceStub(channel).ModelInfer(floats("slow", 1.0))
            assert await is_set(service.began)
            await serves.stop(0.1)
            assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert await is_set(service.dropped)

    asyncio.run(main())


def test_a_call_whose_deadline_is_over_is_cancelled() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        call = GRPCInferenceServiceStub(channel).ModelInfer(floats("slow", 1.0), timeout=0.2)
        assert (await refusal(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await is_set(service.dropped)

    talking(talk)


def test_a_client_that_goes_away_is_not_answered() -> None:
    async def main() -> None:
        service = FakeService()
        async with serving(service, FakeLimits()) as address:
            channel = grpc.aio.insecure_channel(address)
            call = GRPCInferenceServiceStub(channel).ModelInfer(floats("slow", 1.0))
            assert await is_set(service.began)
            await channel.close()
            assert await is_set(service.dropped)
            assert call.cancelled()

    asyncio.run(main())


def test_the_index_of_a_repository() -> None:
    async def talk(channel: Any, service: FakeService) -> None:
        index = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryIndex",
            request_serializer=extensions.RepositoryIndexRequest.SerializeToString,
            response_deserializer=extensions.RepositoryIndexResponse.FromString,
        )
        every = await index(extensions.RepositoryIndexRequest())
        ready = await index(extensions.RepositoryIndexRequest(ready=True))
        assert [model.name for model in every.models] == ["echo", "old"]
        assert [model.name for model in ready.models] == ["echo"]
        error = await refusal(index(extensions.RepositoryIndexRequest(repository_name="other")))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED

    talking(talk)


def test_a_port_that_is_taken_is_not_shared() -> None:
    async def main() -> None:
        async with serving(FakeService(), FakeLimits()) as address:
            with pytest.raises(RuntimeError, match="bind"):
                server(FakeService(), FakeLimits()).add_insecure_port(address)

    asyncio.run(main())
