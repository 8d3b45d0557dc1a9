"""What a transport asks of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .protocol import (
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelConfiguration,
    ModelMetadata,
    ModelStatistics,
    Parameters,
    ServerMetadata,
)


class Service(Protocol):
    """The models of a server, as HTTP and gRPC see them. All of it runs on one event loop.

    Every method raises RequestError; `infer` of a task that is cancelled drops the request.
    """

    def is_live(self) -> bool:
        """Whether the server can answer at all; if not, only a new process can."""

    def is_ready(self) -> bool:
        """Whether all models answer, and the server is not about to end."""

    def metadata(self) -> ServerMetadata:
        """Name, version and extensions of the server."""

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model answers; NOT_FOUND if there is none."""

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """What a model takes and gives."""

    def model_configuration(self, name: str, version: str) -> ModelConfiguration:
        """How a model is called."""

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """What a model has done; of all models if the name is ""."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request."""

    def index(self, only_ready: bool) -> Sequence[IndexEntry]:
        """The models of the repository."""

    async def load(self, name: str, parameters: Parameters) -> None:
        """Load a model, or load it again without losing a request."""

    async def unload(self, name: str) -> None:
        """Let a model answer what it was asked, then unload it."""

    def metrics(self) -> tuple[bytes, str]:
        """Prometheus' text and its content type."""


class Limits(Protocol):
    """What a transport has to hold a client to.

    Attributes:
        max_request_bytes: the largest body or message.
        token: what a client has to send as "Authorization: Bearer …"; None if anybody may ask.
        timeout_s: after which a request is dropped, if its client gives no deadline of its own.
    """

    @property
    def max_request_bytes(self) -> int: ...
    @property
    def token(self) -> str | None: ...
    @property
    def timeout_s(self) -> float | None: ...
