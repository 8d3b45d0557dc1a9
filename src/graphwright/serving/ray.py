"""application(): the server as an application of Ray Serve, with replicas on one machine or many.

Ray starts replicas, routes requests to them, scales them, checks their health and replaces those
that are lost. A replica is one process with all models: the repository and the HTTP application
that `serve` has, behind Ray's proxies in place of a port of its own.

Importing this imports no Ray: it takes seconds, and is not installed everywhere.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..artifacts.loading import load
from ..artifacts.tuned_module import TunedModule
from ..calls.options import in_brief, refuse
from ..errors import OptionError
from ..report.install_commands import install_extra
from . import launch
from .model_config import ModelConfig
from .node_files import NodeFile
from .options import Models, Source, options_of

if TYPE_CHECKING:
    from ray.serve import Application

# What Ray's proxies do in place of the server.
_OF_PROXIES = ("host", "http_port", "grpc_port", "tls")
# A model that cannot be served will not be served the next time either.
_STARTS = 3


def application(
    models: Mapping[str, ModelConfig | Source | str | os.PathLike[str]],
    *,
    replicas: int | tuple[int, int] = 1,
    gpus: float = 1,
    target_requests: float = 32,
    trust: bool = False,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """The server of `serve` as an application of Ray Serve: run it with `ray.serve.run`.

    Args:
        models: as `serve` takes them, by name; or the path of a file that `save` wrote. Functions
            are called in each replica. A ModelConfig is pickled and goes through Ray's controller,
            so it suits small models; its module is put on the replica's GPU.
        replicas: how many; or the least and the most, between which Ray scales.
        gpus: of each replica; half a one lets two share it, 0 is the CPU.
        target_requests: waiting and computed in a replica, at which Ray adds another one.
        trust: whether code that files hold may be executed, as `load` takes it.
        deployment: further options of `ray.serve.deployment`, which replace ours.
        options: of `ServerOptions`: max_queue, max_request_bytes, timeout_s, drain_s, token. Where
            to listen is said to Ray: `ray.serve.start(http_options=…)`.

    Raises:
        OptionError: an option makes no sense, or Ray is not installed.
        ArtifactError: a file is missing.
    """
    check_installed()
    from ray import serve

    from .replica import Replica

    _check(replicas, gpus, target_requests, options)
    chosen = options_of({"host": "", "http_port": None, "grpc_port": None, **options})
    sources = _sources(models, trust, on_gpu=gpus > 0)
    settings: dict[str, Any] = {
        "name": "graphwright",
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
        # A replica joins what waits and refuses what is too much: Ray is not to hold it back.
        "max_ongoing_requests": 2 * chosen.max_queue * len(sources),
        "max_queued_requests": chosen.max_queue,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "max_constructor_retry_count": _STARTS,
    }
    if chosen.drain_s is not None:
        settings["graceful_shutdown_timeout_s"] = chosen.drain_s
    if isinstance(replicas, int):
        settings["num_replicas"] = replicas
    else:
        settings["autoscaling_config"] = {
            "min_replicas": replicas[0],
            "max_replicas": replicas[1],
            "target_ongoing_requests": target_requests,
        }
    ingress = serve.ingress()(Replica)
    made: Application = serve.deployment(ingress, **(settings | dict(deployment or {}))).bind(
        sources, chosen
    )
    return made


def check_installed() -> None:
    """Refuse to go on where Ray is missing, or what a server needs.

    Raises:
        OptionError: one of them cannot be imported.
    """
    launch.check_installed()
    try:
        import ray.serve  # noqa: F401  # to see whether it is there
    except ImportError as error:
        raise OptionError(
            f"This needs Ray Serve, and a package of it is not installed: {error.name}.",
            remedy=f"Run {install_extra('ray')}",
        ) from error


def _check(replicas: Any, gpus: Any, target_requests: Any, options: Mapping[str, Any]) -> None:
    """Refuse what makes no sense, or is not the application's to say."""
    counts = replicas if isinstance(replicas, tuple) else (replicas, replicas)
    whole = len(counts) == 2 and all(type(n) is int for n in counts)
    of_proxies = [name for name in _OF_PROXIES if name in options]
    refuse(
        "application",
        None
        if whole and 0 <= counts[0] <= counts[1] and counts[1] > 0
        else f"replicas is {in_brief(replicas)}: give a number, or (least, most)",
        None if _is_number(gpus) and gpus >= 0 else f"gpus is {in_brief(gpus)}, no number of GPUs",
        None
        if _is_number(target_requests) and target_requests > 0
        else f"target_requests is {in_brief(target_requests)}, no number of requests",
        f"{of_proxies[0]} is said to Ray: ray.serve.start(http_options=…)" if of_proxies else None,
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _sources(models: Any, trust: bool, *, on_gpu: bool) -> Models:
    """What makes each model, in a replica."""
    given = models if isinstance(models, Mapping) else {"model": models}
    found = {
        name: functools.partial(_from_file, NodeFile.at(model), trust)
        if isinstance(model, str | os.PathLike)
        else model
        for name, model in given.items()
    }
    return {
        name: _sent(model, on_gpu) if isinstance(model, ModelConfig) else model
        for name, model in launch.named_models(found).items()
    }


def _from_file(file: NodeFile, trust: bool) -> ModelConfig:
    return ModelConfig(load(file.on_this_node(), trust=trust))


def _sent(config: ModelConfig, on_gpu: bool) -> Source:
    """A configuration that goes to another process."""
    if isinstance(config.model, TunedModule):
        raise OptionError(
            "What was tuned cannot be sent to replicas as it is.",
            remedy="Save it, and give the path of the file.",
        )
    return functools.partial(_placed, config, on_gpu)


def _placed(config: ModelConfig, on_gpu: bool) -> ModelConfig:
    if not on_gpu:
        return config
    if isinstance(config.model, nn.Module):
        config.model.to("cuda")
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to("cuda"), (tuple(config.args), dict(config.kwargs))
    )
    return replace(config, args=args, kwargs=kwargs)
