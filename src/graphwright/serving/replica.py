"""Replica: the models of an application of Ray Serve, in one process that Ray starts and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from starlette.types import ASGIApp

from . import grpc, http, interpreter
from .options import ServerOptions, Source
from .protocol import ErrorKind, Parameters, RequestError
from .repository import Repository
from .server import source_of


class Replica:
    """All models, as `serve` has them; Ray's proxies listen in place of a server."""

    async def __init__(self, sources: Mapping[str, Source], options: ServerOptions) -> None:  # type: ignore[misc]  # Ray awaits it, on the event loop that answers requests
        self._options = options
        self._repository = _OneOfSeveral(
            {name: source_of(source) for name, source in sources.items()},
            max_queue=options.max_queue,
            drain_s=options.drain_s,
            owns_process=True,
        )
        self._grpc = grpc.handlers_of(self._repository, options)
        # Ray has one process for each replica, and ends it with that; what nobody holds is undone.
        self._settings = contextlib.ExitStack()
        self._settings.enter_context(interpreter.short_turns())
        await self._repository.load_all()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What answers HTTP; Ray asks for it once the models are loaded."""
        return http.application(self._repository, self._options)

    async def check_health(self) -> None:
        """Raise if only a new process can answer: Ray then starts one in this one's place."""
        if not self._repository.is_live():
            raise RuntimeError("A model has stopped, or its GPU no longer answers.")


def _method(name: str) -> Callable[[Replica, bytes, Any], Awaitable[_Message]]:
    """What answers a method of gRPC, which Ray's proxy looks for by this name."""

    async def answer(self: Replica, request: bytes, grpc_context: Any) -> _Message:
        return _Message(await self._grpc[name](request, _Context(grpc_context)))

    return answer


class _Message:
    """An answer that is bytes already, where Ray expects a message to make bytes of."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name
        return self._data


class _Context:
    """gRPC's context as Ray hands it to a replica, with the methods that are used here."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        found: Sequence[tuple[str, str]] = self._given.invocation_metadata()
        return found

    def time_remaining(self) -> None:
        """Ray does not say; its proxy cancels what is too late."""

    async def abort(self, code: Any, text: str, metadata: Sequence[tuple[str, str]]) -> NoReturn:
        self._given.set_code(code)
        self._given.set_details(text)
        self._given.set_trailing_metadata(list(metadata))
        raise RuntimeError(text)


for _name in grpc.METHODS:
    setattr(Replica, _name, _method(_name))


class _OneOfSeveral(Repository):
    """Models that clients cannot change: that would change one replica alone."""

    async def load(self, name: str, parameters: Parameters) -> None:
        raise RequestError(
            ErrorKind.UNSUPPORTED,
            "This is one of several replicas, and would be the only one to change.",
            remedy="Deploy the application again: Ray replaces one replica after another.",
        )

    async def unload(self, name: str) -> None:
        await self.load(name, {})
