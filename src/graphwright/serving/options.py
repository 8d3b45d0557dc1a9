"""ServerOptions: how a server listens and what it allows, and what it is to serve."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..calls.options import count_problem, in_brief, names_problems, refuse
from ..errors import OptionError
from .model_config import ModelConfig

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


def options_of(given: Mapping[str, Any]) -> ServerOptions:
    """The options of a server.

    Raises:
        OptionError: one is unknown or makes no sense.
    """
    known = ServerOptions.__dataclass_fields__
    options = ServerOptions(**{name: value for name, value in given.items() if name in known})
    refuse(
        "serve",
        *names_problems(given, known),
        count_problem("max_queue", options.max_queue),
        count_problem("max_request_bytes", options.max_request_bytes),
        *(
            f"{name} is {in_brief(port)}, no port"
            for name, port in (("http_port", options.http_port), ("grpc_port", options.grpc_port))
            if port is not None and not (isinstance(port, int) and 0 <= port < 1 << 16)
        ),
        f"http_port and grpc_port are both {options.http_port}"
        if options.http_port and options.http_port == options.grpc_port
        else None,
        *(
            f"{name} is {in_brief(value)}, no number of seconds"
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
            f"tls={in_brief(files)} cannot be read as a certificate and its key: {error}.",
            remedy="Give two PEM files: (certificate chain, private key).",
        ) from error
