"""application(): the Open Inference Protocol over HTTP, with Triton's extensions for binary tensor
data, statistics, model configuration, the model repository and metrics.

What the bytes mean is http_codec's; what the answers are is the service's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import http_codec as codec
from .off_loop import SMALL, called
from .protocol import ErrorKind, InferRequest, InferResponse, RequestError
from .requests import check_token
from .service import Limits, Service

_LOGGER = logging.getLogger("graphwright.serving")

_STATUS = {
    ErrorKind.INVALID: 400,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.TOO_LATE: 504,
    ErrorKind.CANCELLED: 499,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.UNSUPPORTED: 501,
    ErrorKind.FAILED: 500,
}
_OPEN_TO_ALL = "/v2/health/"
_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")

Result = TypeVar("Result")


def application(service: Service, limits: Limits) -> ASGIApp:
    """The paths of the protocol, as an application for an ASGI server.

    Args:
        service: what answers.
        limits: what clients are held to.
    """
    endpoints = _Endpoints(service, limits)
    model = "/v2/models/{model}"
    version = model + "/versions/{version}"
    others = Starlette(
        routes=[
            Route("/", endpoints.about),
            Route("/v2/health/live", endpoints.live),
            Route("/v2/health/ready", endpoints.ready),
            Route("/v2", endpoints.server),
            Route("/v2/models/stats", endpoints.statistics),
            Route(model, endpoints.model),
            Route(version, endpoints.model),
            Route(f"{model}/ready", endpoints.model_ready),
            Route(f"{version}/ready", endpoints.model_ready),
            Route(f"{model}/stats", endpoints.statistics),
            Route(f"{version}/stats", endpoints.statistics),
            Route(f"{model}/config", endpoints.configuration),
            Route(f"{version}/config", endpoints.configuration),
            # What is no POST is refused in the words of all others.
            Route(f"{model}/infer", endpoints.server, methods=["POST"]),
            Route(f"{version}/infer", endpoints.server, methods=["POST"]),
            Route("/v2/repository/index", endpoints.index, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", endpoints.load, methods=["POST"]),
            Route("/v2/repository/models/{model}/unload", endpoints.unload, methods=["POST"]),
            Route("/metrics", endpoints.metrics),
        ],
        middleware=[Middleware(_Guard, token=limits.token)],
        exception_handlers={HTTPException: _no_such_path},
    )
    return _Paths(_Guard(_Infer(service, limits), limits.token), others)


class _Paths:
    """Leads to inference without Starlette, whose layers take a third of a request's time."""

    def __init__(self, infer: ASGIApp, others: ASGIApp) -> None:
        self._infer, self._others = infer, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = None
        if scope["type"] == "http" and scope["method"] == "POST":
            asked = _INFER.fullmatch(_path(scope))
        if asked is None:
            await self._others(scope, receive, send)
        else:
            scope["path_params"] = asked.groupdict("")
            await self._infer(scope, receive, send)


class _Endpoints:
    """All paths but that of inference."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits

    async def about(self, request: Request) -> Response:
        server, index = self._service.metadata(), self._service.index(False)
        return _json(
            {
                "about": f"This is {server.name} {server.version}: it serves models by the Open "
                "Inference Protocol of KServe and Triton.",
                "models": {each.name: f"/v2/models/{quote(each.name, safe='')}" for each in index},
                "ask": "POST /v2/models/NAME/infer",
                "health": "/v2/health/ready",
                "metrics": "/metrics",
            }
        )

    async def live(self, request: Request) -> Response:
        live = self._service.is_live()
        return _json({"live": live}, 200 if live else 503)

    async def ready(self, request: Request) -> Response:
        ready = self._service.is_ready()
        return _json({"ready": ready}, 200 if ready else 503)

    async def server(self, request: Request) -> Response:
        return _json(self._service.metadata())

    async def model(self, request: Request) -> Response:
        return _json(self._service.model_metadata(*_model(request.scope)))

    async def model_ready(self, request: Request) -> Response:
        name, version = _model(request.scope)
        ready = self._service.is_model_ready(name, version)
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    async def statistics(self, request: Request) -> Response:
        return _json(codec.statistics(self._service.statistics(*_model(request.scope))))

    async def configuration(self, request: Request) -> Response:
        found = self._service.model_configuration(*_model(request.scope))
        return _json(codec.configuration(found))

    async def index(self, request: Request) -> Response:
        only_ready = await self._sent(request, codec.decode_index)
        return _json(list(self._service.index(only_ready)))

    async def load(self, request: Request) -> Response:
        parameters = await self._sent(request, codec.decode_parameters)
        await self._service.load(_model(request.scope)[0], parameters)
        return _json({})

    async def unload(self, request: Request) -> Response:
        # Its parameters only say what becomes of a model's parts, and models have none here.
        await self._sent(request, codec.decode_parameters)
        await self._service.unload(_model(request.scope)[0])
        return _json({})

    async def metrics(self, request: Request) -> Response:
        text, content_type = self._service.metrics()
        return Response(text, headers={"content-type": content_type})

    async def _sent(self, request: Request, decode: Callable[[memoryview], Result]) -> Result:
        """What a body says."""
        headers = dict(request.scope["headers"])
        limit = self._limits.max_request_bytes
        body = await _read(headers, request.receive, limit, 0)
        encoding = _encoding(headers)

        def decoded() -> Result:
            return decode(body if encoding is None else codec.decompress(body, encoding, limit, 0))

        return await called(encoding is None and len(body) <= SMALL, decoded)


class _Infer:
    """The path of inference; an ASGI application."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service, self._limits = service, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        limit = self._limits.max_request_bytes
        length = codec.json_length(headers.get(b"inference-header-content-length"))
        free = codec.lead(length)
        body = await _read(headers, receive, limit, free)
        received = time.monotonic()
        encoding = _encoding(headers)
        name, version = _model(scope)

        def decoded() -> tuple[InferRequest, codec.BinaryOutputs]:
            return codec.decode_infer(
                body if encoding is None else codec.decompress(body, encoding, limit, free),
                length,
                model=name,
                version=version,
                received=received,
                timeout_s=self._limits.timeout_s,
            )

        quick = encoding is None and codec.reads_quickly(body, length)
        request, binary = await called(quick, decoded)
        response = await self._answer(request, receive)
        quick = codec.writes_quickly(response, binary)
        answer, parts = await called(quick, codec.encode_infer, response, binary)

        if sum(map(len, parts)) <= SMALL:
            parts = [b"".join(parts)]
        await send({"type": "http.response.start", "status": 200, "headers": answer})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": parts[-1]})

    async def _answer(self, request: InferRequest, receive: Receive) -> InferResponse:
        """The service's answer; its work is cancelled when the client goes."""
        answering = asyncio.current_task()
        assert answering is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            answering.cancel()

        watching = asyncio.create_task(watch())
        try:
            return await self._service.infer(request)
        except asyncio.CancelledError:
            if gone and not answering.uncancel():
                raise ClientDisconnect from None
            raise  # The server is about to end.
        finally:
            watching.cancel()


class _Guard:
    """Lets in who has the token, and answers every error in the protocol's form."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if self._token is not None and not _path(scope).startswith(_OPEN_TO_ALL):
                sent = dict(scope["headers"]).get(b"authorization", b"")
                check_token(sent.decode(errors="replace"), self._token)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass  # There is nobody to answer.
        except RequestError as error:
            if error.kind is ErrorKind.FAILED:
                _LOGGER.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await _error(error)(scope, receive, send)
        except Exception as error:
            _LOGGER.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            what = f"The server failed with {type(error).__name__}; its log says more."
            await _error(RequestError(ErrorKind.FAILED, what))(scope, receive, send)


async def _read(headers: dict[bytes, bytes], receive: Receive, limit: int, free: int) -> memoryview:
    """A request's body, as it is sent, with some bytes of memory free before it."""
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise codec.too_large(limit)
    # A bytearray, since tensors are writable.
    body = bytearray(free)
    more = True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) - free > limit:
            raise codec.too_large(limit)
        more = message.get("more_body", False)
    return memoryview(body)[free:]


def _encoding(headers: dict[bytes, bytes]) -> bytes | None:
    """How a body is compressed, if it is."""
    encoding = headers.get(b"content-encoding")
    return None if encoding is None or encoding.lower() == b"identity" else encoding


def _path(scope: Scope) -> str:
    """The path within this application, which may be mounted under another."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _model(scope: Scope) -> tuple[str, str]:
    """Name and version of the model in the path; "" for what is not there."""
    found = scope["path_params"]
    return found.get("model", ""), found.get("version", "")


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(codec.dumps(content), status, headers, media_type="application/json")


def _error(error: RequestError) -> Response:
    headers = {}
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    wait_s = error.retry_after_s
    if wait_s is None and error.kind is ErrorKind.OVERLOADED:
        wait_s = 1.0
    if wait_s is not None:
        headers["retry-after"] = str(math.ceil(wait_s))
    text = error.what if error.remedy is None else f"{error.what} {error.remedy}"
    return _json({"error": text}, _STATUS[error.kind], headers)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        text = f"{request.scope['path']} takes no {request.method}."
    else:
        text = f"There is no {request.scope['path']} here."
    return _json({"error": text}, error.status_code, dict(error.headers or {}))
