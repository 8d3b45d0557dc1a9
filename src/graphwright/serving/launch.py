"""serve(): what to serve, and how to listen; the server itself is loaded when it is needed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..calls.options import count_problem, refuse, shown
from ..dispatch.graphed_callable import GraphedCallable
from ..errors import OptionError
from .model import ModelConfig

if TYPE_CHECKING:
    from .server import RunningServer

_MAX_REQUEST_BYTES = 64 << 20

# What a model is made of: made anew each time that the model is loaded.
Source = Callable[[], ModelConfig]
Models = Mapping[str, ModelConfig | Source]


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens, and what it allows.

    Attributes:
        host: the address to listen on.
        http_port: of HTTP; 0 for any that is free, None for no HTTP.
        grpc_port: of gRPC; likewise.
        max_queue: how many requests may wait for each model; more are refused.
        max_request_bytes: the largest body or message.
        timeout_s: after which a request is dropped whose client gives no deadline; None for never.
        drain_s: how long to go on answering when the server is told to end.
        token: what clients have to send as "Authorization: Bearer …"; None if anybody may ask.
        tls: the files of a certificate chain and its private key, in PEM.
    """

    host: str = "127.0.0.1"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    max_queue: int = 1024
    max_request_bytes: int = _MAX_REQUEST_BYTES
    timeout_s: float | None = None
    drain_s: float | None = 30.0
    token: str | None = None
    tls: tuple[str, str] | None = None


def serve(
    models: Models | ModelConfig | Callable[..., Any], *, block: bool = True, **options: Any
) -> RunningServer | None:
    """Serve models by the Open Inference Protocol, over HTTP and gRPC.

    Requests that wait for the same model are joined into one call, whose results are cut apart.
    That this changes no answer is checked first, with requests like the sample; where it would,
    requests are not joined. Sizes are those that the model was tuned or captured for, or else any.
    On a GPU, modules are captured (`graph`) for sizes of powers of two.

    Args:
        models: a model, which is called "model"; or models by their names. A model is a
            ModelConfig, a function that makes one (called again when a client loads the model
            again), or what `tune()` returned, which knows its samples.
        block: whether to serve until SIGTERM or Ctrl-C; False returns at once, with the server in a
            thread.
        options: of `ServerOptions`: host, http_port, grpc_port, max_queue, max_request_bytes,
            timeout_s, drain_s, token, tls.

    Raises:
        OptionError: an option makes no sense, a model has no sample, or a port is taken.
    """
    named, chosen = _named(models), options_of(options)
    check_installed()
    from .server import RunningServer, serve_until_told

    if not block:
        return RunningServer(named, chosen)
    asyncio.run(serve_until_told(named, chosen))
    return None


def check_installed() -> None:
    """Refuse to serve where the packages for it are missing.

    Raises:
        OptionError: one of them cannot be imported.
    """
    try:
        import grpc  # noqa: F401  # all of these: to see whether they are there
        import httptools  # noqa: F401
        import open_inference.grpc.protocol  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"Serving needs a package that is not installed: {error.name}.",
            remedy="Run pip install 'graphwright[serve]'.",
        ) from error


def _named(models: Any) -> Models:
    named = models if isinstance(models, Mapping) else {"model": models}
    if not named or not all(isinstance(name, str) and name for name in named):
        raise OptionError(
            f"serve() takes models by name, not {shown(models)}.",
            remedy='Write {"name": ModelConfig(model, args)}.',
        )
    return {name: _config(model) for name, model in named.items()}


def _config(model: Any) -> ModelConfig | Source:
    if isinstance(model, nn.Module | GraphedCallable):
        return ModelConfig(model)
    if isinstance(model, ModelConfig):
        return model
    if not callable(model):
        raise OptionError(
            f"{shown(model)} cannot be served.",
            remedy="Give a ModelConfig, a function that makes one, or a tuned model.",
        )
    found: Source = model
    return found


def options_of(given: Mapping[str, Any]) -> ServerOptions:
    """The options of a server.

    Raises:
        OptionError: one is unknown or makes no sense.
    """
    known = ServerOptions.__dataclass_fields__
    unknown = [name for name in given if name not in known]
    options = ServerOptions(**{name: value for name, value in given.items() if name in known})
    refuse(
        "serve",
        f"there is no option {unknown[0]}; there are {', '.join(known)}" if unknown else None,
        count_problem("max_queue", options.max_queue),
        count_problem("max_request_bytes", options.max_request_bytes),
        *(
            f"{name} is {shown(port)}, no port"
            for name, port in (("http_port", options.http_port), ("grpc_port", options.grpc_port))
            if port is not None and not (isinstance(port, int) and 0 <= port < 1 << 16)
        ),
        *(
            f"{name} is {shown(value)}, no number of seconds"
            for name, value in (("timeout_s", options.timeout_s), ("drain_s", options.drain_s))
            if value is not None and not (isinstance(value, int | float) and value > 0)
        ),
    )
    if options.tls is not None:
        _check_tls(options.tls)
    return options


def _check_tls(files: tuple[str, str]) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*files)
    except (OSError, ssl.SSLError, TypeError) as error:
        raise OptionError(
            f"tls={shown(files)} cannot be read as a certificate and its key: {error}.",
            remedy="Give two PEM files: (certificate chain, private key).",
        ) from error
