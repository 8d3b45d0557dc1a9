"""server(): the Open Inference Protocol over gRPC, with Triton's extensions."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from open_inference.grpc import protocol as messages

from . import grpc_codec, requests
from . import grpc_extensions as extensions
from .off_loop import SMALL, called
from .protocol import ErrorKind, InferRequest, RequestError
from .service import Limits, Service

_LOGGER = logging.getLogger("graphwright.serving")
_NAME = "inference.GRPCInferenceService"
_CODES = {
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
# Clients refuse errors with longer text, since it is sent as a header.
_LONGEST_TEXT = 500
# So many parameters are read in a moment.
_FEW = 1000
# What may be asked without a token.
_OPEN = frozenset({"ServerLive", "ServerReady"})

# Answers a request; the context is that of gRPC.
_Answer: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
Handler: TypeAlias = Callable[[bytes, Any], Awaitable[bytes]]


def server(service: Service, limits: Limits) -> grpc.aio.Server:
    """A server of gRPC for a service; the caller adds ports, starts and stops it.

    A client that cancels its call, goes away, or whose deadline is over has its `infer` cancelled.

    Args:
        service: what answers; asked on the event loop that this is called on.
        limits: what clients are held to. gRPC itself refuses requests that are too large.
    """
    made = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", min(limits.max_request_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # A port of another server is not to be shared.
        ]
    )
    _add(made, handlers_of(service, limits))
    return made


def handlers_of(service: Service, limits: Limits) -> dict[str, Handler]:
    """What answers each method: takes the bytes of a request and gRPC's context, gives bytes.

    Messages are read by it, after the token, so that bad ones are the client's error.
    """
    methods = _Methods(service, limits)
    return {
        name: _handler(name, kind, functools.partial(answer, methods), limits)
        for name, (kind, answer) in METHODS.items()
    }


def add_to_proxy(servicer: Any, server: Any) -> None:
    """Let a proxy of Ray Serve take the methods; it hands their bytes to replicas.

    Args:
        servicer: Ray's, which is not asked.
        server: of the proxy.
    """
    _add(server, dict.fromkeys(METHODS, servicer))


def _add(server: Any, handlers: Mapping[str, Any]) -> None:
    made = {
        name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in handlers.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_NAME, made),))


class _Methods:
    """The methods of the protocol: each takes a message and gRPC's context, and gives a message.

    What has no class in `METHODS` takes and gives bytes.
    """

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits

    async def server_live(self, request: Any, context: Any) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=self._service.is_live())

    async def server_ready(self, request: Any, context: Any) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=self._service.is_ready())

    async def server_metadata(self, request: Any, context: Any) -> messages.ServerMetadataResponse:
        return grpc_codec.server_metadata(self._service.metadata())

    async def model_ready(self, request: Any, context: Any) -> messages.ModelReadyResponse:
        ready = self._service.is_model_ready(request.name, request.version)
        return messages.ModelReadyResponse(ready=ready)

    async def model_metadata(self, request: Any, context: Any) -> messages.ModelMetadataResponse:
        found = self._service.model_metadata(request.name, request.version)
        return grpc_codec.model_metadata(found)

    async def infer(self, data: bytes, context: Any) -> bytes:
        """Reads and writes its messages itself: at once, if that is done in a thread."""
        received, left = time.monotonic(), context.time_remaining()

        def read() -> InferRequest:
            message = _read(messages.ModelInferRequest, data)
            return grpc_codec.infer_request(message, received, left, self._limits.timeout_s)

        wanted = await called(len(data) <= SMALL, read)
        response = await self._service.infer(wanted)

        def written() -> bytes:
            answer: bytes = grpc_codec.infer_response(response).SerializeToString()
            return answer

        return await called(grpc_codec.writes_quickly(response), written)

    async def statistics(self, request: Any, context: Any) -> Any:
        return grpc_codec.statistics(self._service.statistics(request.name, request.version))

    async def configuration(self, request: Any, context: Any) -> Any:
        found = self._service.model_configuration(request.name, request.version)
        return grpc_codec.configuration(found)

    async def index(self, request: Any, context: Any) -> Any:
        _check_repository(request)
        return grpc_codec.index(self._service.index(request.ready))

    async def load(self, request: Any, context: Any) -> Any:
        _check_repository(request)
        few = len(request.parameters) <= _FEW
        parameters = await called(few, grpc_codec.load_parameters, request)
        await self._service.load(request.model_name, parameters)
        return extensions.RepositoryModelLoadResponse()

    async def unload(self, request: Any, context: Any) -> Any:
        _check_repository(request)
        await self._service.unload(request.model_name)
        return extensions.RepositoryModelUnloadResponse()


# For each method the class of its request, if it does not read it itself, and what answers.
METHODS: dict[str, tuple[Any, Callable[[_Methods, Any, Any], Awaitable[Any]]]] = {
    "ServerLive": (messages.ServerLiveRequest, _Methods.server_live),
    "ServerReady": (messages.ServerReadyRequest, _Methods.server_ready),
    "ServerMetadata": (messages.ServerMetadataRequest, _Methods.server_metadata),
    "ModelReady": (messages.ModelReadyRequest, _Methods.model_ready),
    "ModelMetadata": (messages.ModelMetadataRequest, _Methods.model_metadata),
    "ModelInfer": (None, _Methods.infer),
    "ModelConfig": (extensions.ModelConfigRequest, _Methods.configuration),
    "ModelStatistics": (extensions.ModelStatisticsRequest, _Methods.statistics),
    "RepositoryIndex": (extensions.RepositoryIndexRequest, _Methods.index),
    "RepositoryModelLoad": (extensions.RepositoryModelLoadRequest, _Methods.load),
    "RepositoryModelUnload": (extensions.RepositoryModelUnloadRequest, _Methods.unload),
}


def _check_repository(request: Any) -> None:
    if request.repository_name:
        what = "This server has one repository, which has no name."
        raise RequestError(ErrorKind.UNSUPPORTED, what, remedy="Leave repository_name out.")


def _handler(name: str, kind: Any, answer: _Answer, limits: Limits) -> Handler:
    """From the bytes of a request to those of its answer, or to gRPC's way to say an error."""

    async def handle(data: bytes, context: Any) -> bytes:
        try:
            if name not in _OPEN:
                metadata = dict(context.invocation_metadata())
                requests.check_token(metadata.get("authorization"), limits.token)
            answered: bytes
            if kind is None:
                answered = await answer(data, context)
            else:
                request = await called(len(data) <= SMALL, _read, kind, data)
                answered = (await answer(request, context)).SerializeToString()
            return answered
        except RequestError as error:
            problem = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not by the client, who would wait for ever.
            problem = RequestError(ErrorKind.CANCELLED, "The server has dropped the request.")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # A client would wait for ever for what is no Exception.
            what = f"The server could not answer {name}: {type(error).__name__}."
            problem = RequestError(ErrorKind.FAILED, what, remedy="Its log says more.")
            problem.__cause__ = error
        if problem.kind is ErrorKind.FAILED:
            _LOGGER.error("%s failed", name, exc_info=problem)
        await context.abort(*_said(problem))
        raise problem  # Which is not reached: abort() raises.

    return handle


def _read(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise requests.invalid(f"The request is no {kind.DESCRIPTOR.name}.") from None


def _said(error: RequestError) -> tuple[Any, str, tuple[tuple[str, str], ...]]:
    """An error as gRPC says it: code, text and trailing metadata."""
    text = str(error)[:_LONGEST_TEXT]
    if error.retry_after_s is None:
        return _CODES[error.kind], text, ()
    return _CODES[error.kind], text, (("retry-after", str(math.ceil(error.retry_after_s))),)
