"""Repository: the models of a server, by name; loads, reloads and unloads them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .._version import __version__
from ..calls.options import in_brief
from ..errors import GraphwrightError, first_line
from .interpreter import freeze_garbage_collector
from .metrics import Metrics
from .options import Source
from .prepared_model import PreparedModel
from .protocol import (
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
)
from .runner import ModelRunner, device_memory, devices_answer

_LOGGER = logging.getLogger("graphwright.serving")
_VERSION = "1"
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")


@dataclass
class _Entry:
    """A model of the repository.

    Attributes:
        source: makes it.
        lock: held while it is loaded or unloaded.
        runner: answers for it; None if it is not loaded.
        state: as the index says it.
        reason: why it is not ready.
    """

    source: Source
    lock: asyncio.Lock
    runner: ModelRunner | None = None
    state: str = "UNAVAILABLE"
    reason: str = "not loaded yet"


class Repository:
    """The models of a server; the `Service` behind HTTP and gRPC.

    Args:
        sources: what each model is made of, by its name.
        max_queue: how many requests may wait for each model.
        drain_s: how long to wait for answers before a model is dropped.
        owns_process: whether the process is there for the server alone.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        max_queue: int,
        drain_s: float | None,
        owns_process: bool = False,
    ) -> None:
        self._entries = {name: _Entry(source, asyncio.Lock()) for name, source in sources.items()}
        self._max_queue, self._drain_s = max_queue, drain_s
        self._metrics = Metrics(device_memory)
        self._owns_process = owns_process
        self._threads = torch.get_num_threads()
        self._ending = False
        # Models that are loaded at once would disturb each other's times.
        self._loading = threading.Lock()
        self._calls: set[Future[Any]] = set()  # that run in threads
        # Answer what they were asked before another took their place, and are closed then.
        self._retiring: dict[ModelRunner, asyncio.Task[None]] = {}

    async def load_all(self) -> None:
        """Load every model, one after the other: each is timed by itself.

        Raises:
            GraphwrightError: one cannot be served.
        """
        for name, entry in self._entries.items():
            async with entry.lock:
                await self._load(name, entry)
        await self._settle()

    async def _settle(self) -> None:
        """The models are others than before, and nothing here refers to those that were dropped."""
        if self._owns_process and not self._ending:
            await asyncio.to_thread(freeze_garbage_collector)

    async def drain(self) -> None:
        """Take no new requests, and answer those that are there, as long as that may take."""
        self._ending = True

        async def drain(runner: ModelRunner) -> None:
            if not await runner.drain(self._drain_s):
                _LOGGER.warning("requests of %s are given up: the time is over", runner.name)
                runner.give_up()

        await asyncio.gather(*(drain(runner) for runner in [*self._runners(), *self._retiring]))

    async def close(self) -> bool:
        """Drop all models; what is computed is waited for, unless drain() gave it up.

        Returns:
            whether nothing runs on in a thread: a call that was given up, or a load.
        """
        self._ending = True
        for entry in self._entries.values():
            runner, entry.runner = entry.runner, None
            if runner is not None:
                await runner.close()
        await asyncio.gather(*(runner.close() for runner in self._retiring))
        await asyncio.gather(*self._retiring.values(), return_exceptions=True)
        return not self._calls

    async def _retire(self, runner: ModelRunner) -> None:
        """Let a model answer what it was asked, then close it, even if nobody waits for that."""

        async def retire() -> None:
            try:
                await runner.drain(self._drain_s)
                await runner.close()
            finally:
                del self._retiring[runner]

        task = self._retiring[runner] = asyncio.create_task(retire(), name=f"retire {runner.name}")
        await asyncio.shield(task)

    def _runners(self) -> list[ModelRunner]:
        return [entry.runner for entry in self._entries.values() if entry.runner is not None]

    def prepared(self) -> dict[str, PreparedModel]:
        """The models that are loaded, by name."""
        return {runner.name: runner.model for runner in self._runners()}

    # The Service.

    def is_live(self) -> bool:
        """Whether the server can answer at all; if not, only a new process can."""
        return all(runner.is_running() for runner in self._runners()) and devices_answer()

    def is_ready(self) -> bool:
        """Whether all models answer, and the server is not about to end."""
        return not self._ending and all(e.runner is not None for e in self._entries.values())

    def metadata(self) -> ServerMetadata:
        """Name, version and extensions of the server."""
        return ServerMetadata("graphwright", __version__, _EXTENSIONS)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model answers; NOT_FOUND if there is none."""
        return self._entry(name, version).runner is not None and not self._ending

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """What a model takes and gives."""
        return self._runner(name, version).metadata

    def model_configuration(self, name: str, version: str) -> ModelConfiguration:
        """How a model is called."""
        return self._runner(name, version).configuration

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """What a model has done; of all models if the name is ""."""
        runners = [self._runner(name, version)] if name else self._runners()
        return [runner.statistics() for runner in runners]

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request."""
        if self._ending:
            raise _about_to_end()
        return await self._runner(request.model, request.version).infer(request)

    def index(self, only_ready: bool) -> Sequence[IndexEntry]:
        """The models of the repository."""
        return [
            IndexEntry(name, _VERSION, entry.state, entry.reason)
            for name, entry in self._entries.items()
            if entry.state == "READY" or not only_ready
        ]

    async def load(self, name: str, parameters: Parameters) -> None:
        """Load a model, or load it again: the old one answers until the new one does."""
        if parameters:
            raise RequestError(
                ErrorKind.UNSUPPORTED,
                f"Models are loaded as the server was told to; {in_brief(', '.join(parameters))} "
                "cannot be given.",
            )
        entry = self._entry(name, "")
        async with entry.lock:
            before = entry.runner
            if before is not None:
                before.share(True)
            try:
                await self._load(name, entry)
            except Exception as error:
                if before is not None:
                    before.share(False)
                if self._ending:
                    raise _about_to_end() from error
                _LOGGER.exception("%s could not be loaded", name)
                what = error.what if isinstance(error, GraphwrightError) else first_line(error)
                raise RequestError(
                    ErrorKind.FAILED, f"{name} could not be loaded: {what}"
                ) from error
            loaded = entry.runner
            if before is not None and loaded is not None:
                loaded.share(True)
                await self._retire(before)
                loaded.share(False)
            before = loaded = None
            await self._settle()

    async def unload(self, name: str) -> None:
        """Let a model answer what it was asked, then unload it."""
        entry = self._entry(name, "")
        async with entry.lock:
            runner, entry.runner = entry.runner, None
            entry.state, entry.reason = "UNLOADING", "being unloaded"
            try:
                if runner is not None:
                    await self._retire(runner)
            finally:
                entry.state, entry.reason = "UNAVAILABLE", "unloaded"
            runner = None
            await self._settle()

    def metrics(self) -> tuple[bytes, str]:
        """Prometheus' text and its content type."""
        return self._metrics.text()

    async def _load(self, name: str, entry: _Entry) -> None:
        """Make a model, and let it answer in the place of the one before it."""
        if self._ending:
            raise _about_to_end()
        if entry.runner is None:
            entry.state, entry.reason = "LOADING", "being loaded"
        try:
            model = await self._prepared(entry.source)
            if self._ending:
                raise _about_to_end()
        except BaseException as error:
            if entry.runner is None:
                entry.state, entry.reason = "UNAVAILABLE", first_line(error)
            raise
        entry.runner = ModelRunner(
            name,
            _VERSION,
            model,
            max_queue=self._max_queue,
            metrics=self._metrics,
            calls=self._calls,
        )
        entry.state, entry.reason = "READY", ""

    async def _prepared(self, source: Source) -> PreparedModel:
        """A model, prepared in a thread that ends with that, even if nobody waits for it.

        A thread that has called a model on the CPU keeps threads of OpenMP's; as long as these
        exist, those of the thread that answers take up to 1.6 times as long.
        """

        def prepared() -> PreparedModel:
            with self._loading:
                if not self._owns_process:
                    return PreparedModel(source())
                # Other models' instances may have changed it; what makes this one may, too.
                torch.set_num_threads(self._threads)
                config = source()
                self._threads = torch.get_num_threads()
                return PreparedModel(config, threads=self._threads)

        thread = ThreadPoolExecutor(1, "graphwright-load")
        try:
            load = thread.submit(prepared)
            self._calls.add(load)
            load.add_done_callback(self._calls.discard)
            return await asyncio.wrap_future(load)
        finally:
            thread.shutdown(wait=False)

    def _entry(self, name: str, version: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(self._entries) or "no model"
            raise RequestError(
                ErrorKind.NOT_FOUND, f"There is no model {in_brief(name)}; the server has {known}."
            )
        if version not in ("", _VERSION):
            raise RequestError(
                ErrorKind.NOT_FOUND,
                f"{name} has no version {in_brief(version)}, only {_VERSION!r}.",
            )
        return entry

    def _runner(self, name: str, version: str) -> ModelRunner:
        entry = self._entry(name, version)
        if entry.runner is None:
            raise RequestError(ErrorKind.UNAVAILABLE, f"{name} is not ready: {entry.reason}.")
        return entry.runner


def _about_to_end() -> RequestError:
    return RequestError(ErrorKind.UNAVAILABLE, "The server is about to end.")
