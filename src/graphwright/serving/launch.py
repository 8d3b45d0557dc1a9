"""serve(): what to serve, and how to listen; the server itself is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..calls.options import in_brief
from ..dispatch.answerer import answerer_of
from ..errors import OptionError
from ..report.install_commands import install_extra
from . import interpreter
from .model_config import ModelConfig
from .options import Models, Source, options_of

if TYPE_CHECKING:
    from .server import RunningServer


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
    named, chosen = named_models(models), options_of(options)
    check_installed()
    from .server import RunningServer, serve_until_told

    if not block:
        return RunningServer(named, chosen)
    interpreter.run(serve_until_told(named, chosen))
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
            remedy=f"Run {install_extra('serve')}",
        ) from error


def named_models(models: Any) -> Models:
    """Models by name, each a configuration or what makes one.

    Raises:
        OptionError: there is none, or one of them cannot be served.
    """
    named = models if isinstance(models, Mapping) else {"model": models}
    if not named or not all(isinstance(name, str) and name for name in named):
        raise OptionError(
            f"A server takes models by name, not {in_brief(models)}.",
            remedy='Write {"name": ModelConfig(model, args)}.',
        )
    return {name: _config(model) for name, model in named.items()}


def _config(model: Any) -> ModelConfig | Source:
    if isinstance(model, nn.Module) or answerer_of(model) is not None:
        return ModelConfig(model)
    if isinstance(model, ModelConfig):
        return model
    if not callable(model):
        raise OptionError(
            f"{in_brief(model)} cannot be served.",
            remedy="Give a ModelConfig, a function that makes one, or a tuned model.",
        )
    found: Source = model
    return found
