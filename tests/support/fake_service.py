"""A service without models, for the tests of the transports: what it answers shows by the name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from graphwright.serving.protocol import (
    Duration,
    ErrorKind,
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelConfiguration,
    ModelMetadata,
    ModelStatistics,
    Parameters,
    RequestError,
    ServerMetadata,
    TensorMetadata,
)


@dataclass
class FakeLimits:
    max_request_bytes: int = 10**6
    token: str | None = None
    timeout_s: float | None = 30.0


def _index() -> dict[str, IndexEntry]:
    old = IndexEntry("old", "2", "UNAVAILABLE", "unloaded")
    return {"echo": IndexEntry("echo", "1", "READY"), "old": old}


@dataclass
class FakeService:
    """Its models are named after what they do.

    `echo` gives what it takes, `slow` never answers, `dropped` is cancelled by the server, `boom`
    fails unforeseen, `error:KIND` refuses and says when to ask again, `full` does not say when, and
    `seconds left` tells the deadline.

    Attributes:
        asked: the requests so far.
        began: set once `slow` has a request.
        dropped: set once that was cancelled.
        loaded: the parameters that models were loaded with.
        models: what the index says of each.
        live: whether it is live and ready.
    """

    asked: list[InferRequest] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    dropped: threading.Event = field(default_factory=threading.Event)
    loaded: dict[str, Parameters] = field(default_factory=dict)
    models: dict[str, IndexEntry] = field(default_factory=_index)
    live: bool = True

    def is_live(self) -> bool:
        return self.live

    def is_ready(self) -> bool:
        return self.live

    def metadata(self) -> ServerMetadata:
        return ServerMetadata("fake", "0.1", ("statistics", "model_repository"))

    def is_model_ready(self, name: str, version: str) -> bool:
        self._check(name)
        return version in ("", "1")

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        self._check(name)
        x, y = TensorMetadata("x", "FP32", (-1, 2)), TensorMetadata("y", "BYTES", (-1,))
        return ModelMetadata(name, (version or "1",), "pytorch", (x,), (y,))

    def model_configuration(self, name: str, version: str) -> ModelConfiguration:
        return ModelConfiguration(self.model_metadata(name, version), 8)

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        parts = [Duration(i, 10 * i) for i in range(6)]
        batches = {1: Duration(2, 3), 8: Duration(4, 5)}
        names = [name] if name else ["echo", "slow"]
        return [ModelStatistics(each, version or "1", 7, 8, 9, *parts, batches) for each in names]

    async def infer(self, request: InferRequest) -> InferResponse:
        self.asked.append(request)
        name = request.model
        outputs = {each: request.inputs[each] for each in request.outputs or request.inputs}
        if name == "slow":
            self.began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.dropped.set()
                raise
        elif name == "dropped":
            raise asyncio.CancelledError
        elif name == "boom":
            raise RuntimeError("within the model")
        elif name == "full":
            raise RequestError(ErrorKind.OVERLOADED, "Much to do.")
        elif name.startswith("error:"):
            kind = ErrorKind[name.removeprefix("error:")]
            raise RequestError(kind, "So it is.", remedy="Ask öfter.", retry_after_s=1.2)
        elif name == "seconds left":
            left = -1.0 if request.deadline is None else request.deadline - request.received
            outputs = {"y": torch.tensor(left)}
        else:
            self._check(name)
        version = request.version or "1"
        return InferResponse(name, version, request.id, outputs, request.parameters)

    def index(self, only_ready: bool) -> Sequence[IndexEntry]:
        entries = self.models.values()
        return [each for each in entries if each.state == "READY" or not only_ready]

    async def load(self, name: str, parameters: Parameters) -> None:
        version = self.models[name].version if name in self.models else "1"
        config = str(parameters.get("config", ""))
        self.loaded[name] = parameters
        self.models[name] = IndexEntry(name, version, "READY", config)

    async def unload(self, name: str) -> None:
        self._check(name)
        version = self.models[name].version
        self.models[name] = IndexEntry(name, version, "UNAVAILABLE", "unloaded")

    def metrics(self) -> tuple[bytes, str]:
        return b"up 1\n", "text/plain; version=0.0.4"

    def _check(self, name: str) -> None:
        if name not in self.models or self.models[name].state != "READY":
            raise RequestError(ErrorKind.NOT_FOUND, f"There is no model {name!r}.")
