"""Replica: the models of an application of Ray Serve, in one process that Ray starts and ends."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette

from . import http
from .options import ServerOptions, Source
from .protocol import Kind, Parameters, RequestError
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
        )
        await self._repository.load_all()

    def __serve_build_asgi_app__(self) -> Starlette:
        """What answers HTTP; Ray asks for it once the models are loaded."""
        return http.application(self._repository, self._options)

    async def check_health(self) -> None:
        """Raise if only a new process can answer: Ray then starts one in this one's place."""
        if not self._repository.is_live():
            raise RuntimeError("A model has stopped, or its GPU no longer answers.")


class _OneOfSeveral(Repository):
    """Models that clients cannot change: that would change one replica alone."""

    async def load(self, name: str, parameters: Parameters) -> None:
        raise RequestError(
            Kind.UNSUPPORTED,
            "This is one of several replicas, and would be the only one to change.",
            remedy="Deploy the application again: Ray replaces one replica after another.",
        )

    async def unload(self, name: str) -> None:
        await self.load(name, {})
