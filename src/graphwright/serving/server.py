"""Server: models behind HTTP and gRPC, until they are told to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import uvicorn

from ..calls.options import in_brief
from ..calls.plurals import counted
from ..errors import OptionError, first_line
from . import grpc as grpc_transport
from . import http as http_transport
from . import interpreter
from .example_request import curl
from .http_connection import Connection
from .model_config import ModelConfig
from .options import Models, ServerOptions, Source
from .prepared_model import PreparedModel
from .repository import Repository

# What was answered is still being sent when the server ends.
_LAST_ANSWERS_S = 5


class Server:
    """A server on the running event loop.

    Args:
        models: by their names.
        options: how to listen.
        owns_process: whether the process is there for the server alone.

    Attributes:
        repository: its models.
        http_port: where it listens, once it was started.
        grpc_port: likewise.
    """

    def __init__(
        self, models: Models, options: ServerOptions, *, owns_process: bool = False
    ) -> None:
        self.options = options
        self.repository = Repository(
            {name: source_of(model) for name, model in models.items()},
            max_queue=options.max_queue,
            drain_s=options.drain_s,
            owns_process=owns_process,
        )
        self._settings = contextlib.ExitStack()
        self.http_port: int | None = None
        self.grpc_port: int | None = None
        self._http: _Uvicorn | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._grpc: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Load the models and listen; ready when this returns.

        Raises:
            GraphwrightError: a model cannot be served, or an address cannot be listened on.
        """
        self._settings.enter_context(interpreter.short_turns())
        try:
            # Listens first: a port that is taken is known at once, and health can be asked for.
            check_ports(self.options)
            await self._listen()
            await self.repository.load_all()
        except BaseException:
            await self.stop()
            raise

    async def _listen(self) -> None:
        options = self.options
        if options.http_port is not None:
            bound = _bound(options.host, options.http_port, "http")
            self.http_port = bound.getsockname()[1]
            files = options.tls
            config = uvicorn.Config(
                http_transport.application(self.repository, options),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
                proxy_headers=False,
                server_header=False,
                ssl_certfile=files[0] if files else None,
                ssl_keyfile=files[1] if files else None,
            )
            self._http = _Uvicorn(config)
            self._http_task = asyncio.create_task(self._http.serve([bound]), name="http")
            while not self._http.started and not self._http_task.done():
                await asyncio.sleep(0.005)
        if options.grpc_port is not None:
            self._grpc = grpc_transport.server(self.repository, options)
            address = _address(options.host, options.grpc_port)
            try:
                if options.tls is None:
                    self.grpc_port = self._grpc.add_insecure_port(address)
                else:
                    chain, key = (Path(file).read_bytes() for file in options.tls)
                    self.grpc_port = self._grpc.add_secure_port(
                        address, grpc.ssl_server_credentials([(key, chain)])
                    )
            except RuntimeError as error:
                raise _taken(options.host, options.grpc_port, "grpc", error) from error
            await self._grpc.start()

    async def stop(self) -> bool:
        """Answer what was asked, and end; whether all threads ended, too.

        A call that takes longer than the time to drain cannot be ended: its thread goes on.
        """
        await self.repository.drain()
        if self._grpc is not None:
            await self._grpc.stop(1.0)
            self._grpc = None  # Its thread ends with it.
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await asyncio.gather(self._http_task, return_exceptions=True)
        ended = await self.repository.close()
        self._settings.close()
        return ended

    def addresses(self) -> list[str]:
        """Where clients find it."""
        scheme = "http" if self.options.tls is None else "https"
        found = []
        if self.http_port is not None:
            found.append(f"{scheme}://{_address(self.options.host, self.http_port)}")
        if self.grpc_port is not None:
            found.append(f"grpc://{_address(self.options.host, self.grpc_port)}")
        return found

    def describe(self) -> str:
        """What is served, at which sizes, and where; and how to ask the first model."""
        models = self.repository.prepared()
        lines = [_description(name, model) for name, model in models.items()]
        lines.append("Listening on " + " and ".join(self.addresses()))
        if self.http_port is not None and models:
            name, model = next(iter(models.items()))
            token = self.options.token is not None
            own = model.inputs, model.outputs, model.sample
            lines.append(f"Try it:  {curl(self.addresses()[0], name, *own, token=token)}")
        return "\n".join(lines)


class RunningServer:
    """A server in a thread of its own; `close()` ends it, or leaving a `with` block.

    Attributes:
        http_port: where it listens for HTTP; None if it does not.
        grpc_port: likewise for gRPC.
    """

    def __init__(self, models: Models, options: ServerOptions) -> None:
        started: threading.Event = threading.Event()
        problem: list[BaseException] = []

        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            server = Server(models, options)
            try:
                await server.start()
            except BaseException as error:
                problem.append(error)
                return
            finally:
                self.http_port, self.grpc_port = server.http_port, server.grpc_port
                started.set()
            await self._stop.wait()
            await server.stop()

        self._thread = threading.Thread(
            target=lambda: interpreter.run(main()), name="graphwright-serve", daemon=True
        )
        self._thread.start()
        started.wait()
        if problem:
            self._thread.join()
            raise problem[0]

    def close(self) -> None:
        """Answer what was asked, and end; may be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # It has just ended by itself.
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def serve_until_told(
    models: Models,
    options: ServerOptions,
    tell: Callable[[str], None] = print,
    ending: Callable[[], None] = lambda: None,
) -> bool:
    """Serve until SIGTERM or SIGINT; then answer what was asked, and end.

    Args:
        models: by their names.
        options: of the server.
        tell: is told what is served and where.
        ending: called on the first of these signals; the next SIGINT is no longer handled here.

    Returns:
        whether all its threads ended: else the process ends only after them, or by `os._exit`.
    """
    server, stop = Server(models, options, owns_process=True), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        if loop.remove_signal_handler(signal.SIGINT):
            ending()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
    starting = asyncio.create_task(server.start())
    told = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return await server.repository.close()
    try:
        await starting
        tell(server.describe())
        await told
    except BaseException:
        await server.stop()
        raise
    finally:
        told.cancel()
    return await server.stop()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def source_of(model: ModelConfig | Source) -> Source:
    """What makes a model: each time anew where a function was given."""

    def made() -> ModelConfig:
        config = model if isinstance(model, ModelConfig) else model()
        if not isinstance(config, ModelConfig):
            raise OptionError(
                f"{in_brief(model)} returned {in_brief(config)}, not a ModelConfig.",
                remedy="Return ModelConfig(model, args).",
            )
        return config

    return made


def check_ports(options: ServerOptions) -> None:
    """Refuse ports that are taken, before anything is done, and before gRPC prints lines about it.

    Raises:
        OptionError: one of them cannot be listened on.
    """
    for transport, port in (("http", options.http_port), ("grpc", options.grpc_port)):
        if port:
            _bound(options.host, port, transport).close()


def _bound(host: str, port: int, transport: str) -> socket.socket:
    with contextlib.ExitStack() as undo:
        try:
            # With the protocol asyncio sets TCP_NODELAY; else an answer waits 40 ms for an ACK.
            family, kind, tcp, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, tcp))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        except OSError as error:
            raise _taken(host, port, transport, error) from error
        undo.pop_all()
        return bound


def _taken(host: str, port: int, transport: str, error: Exception) -> OptionError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        option = f"--{transport}-port, in Python {transport}_port"
        remedy = f"Choose another with {option} (0: any free one)."
        return OptionError(f"Port {port} is in use.", remedy=remedy)
    what = f"{_address(host, port)} cannot be listened on: {first_line(error)}."
    return OptionError(what, remedy="Choose another address or port (0: any free one).")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _description(name: str, model: PreparedModel) -> str:
    def of(tensors: Any) -> str:
        return ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in tensors)

    names = " × ".join(model.joiner.layout.names)
    sizes = sorted(model.timings.seconds)
    found = ", ".join("×".join(map(str, point)) for point in sizes[:8])
    more = "" if len(sizes) <= 8 else f" … {'×'.join(map(str, sizes[-1]))}"
    computed = "computed at" if model.timings.exact else "any up to the largest, timed at"
    lines = [
        f"{name}: {of(model.inputs)} -> {of(model.outputs)}",
        f"  {counted(len(sizes), 'size')} ({names}), {computed} {found}{more}",
        *_side_by_side(model),
        *(f"  {note}" for note in model.notes),
    ]
    return "\n".join(lines)


def _side_by_side(model: PreparedModel) -> list[str]:
    count, threads = len(model.instances), model.instances[0].threads
    if count == 1:
        return []
    return [f"  {count} batches at a time, with {counted(threads or 1, 'thread')} each"]
