"""ModelConfig: what is served, and how its requests are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..calls.options import args_problem, kwargs_problem, refuse
from ..calls.split import Args, Kwargs
from ..shapes.buckets import Buckets
from .protocol import TensorMetadata, Value

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """A model to serve, and how its requests are joined.

    Attributes:
        model: a module or function; also what `tune`, `load` and `graph` return.
        args: of a sample call; may be left out where the model was tuned, which knows its samples.
        kwargs: likewise.
        buckets: the sizes that are computed; one of the dimensions is "batch". By default those
            that the model was tuned or captured for, or else powers of two up to 32 rows.
        dynamic_shapes: which dimensions vary, as `graph()` takes them; by default dimension 0 of
            every tensor is the batch.
        pad: what tensors are padded with, as `graph()` takes it.
        instances: how many batches of a plain module are computed side by side on a CPU, each with
            its share of the threads, by copies of the module that have its parameters. By default
            1, or where the process is the server's own as many as pay when they are timed.
        preprocess: makes the model's inputs of a request's, by name; it runs beside the event loop.
        postprocess: makes the outputs that are sent of the model's, by name; likewise.
        inputs: what clients send, where there is a `preprocess`.
        outputs: what clients get, where there is a `postprocess`.

    Raises:
        OptionError: the sample call is no call.
    """

    model: Callable[..., Any]
    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)
    buckets: Buckets | None = None
    dynamic_shapes: Any = None
    pad: Any = None
    instances: int | None = None
    preprocess: Callable[[Mapping[str, Value]], Mapping[str, torch.Tensor]] | None = None
    postprocess: Callable[[Tensors], Mapping[str, Value]] | None = None
    inputs: Sequence[TensorMetadata] = ()
    outputs: Sequence[TensorMetadata] = ()

    def __post_init__(self) -> None:
        refuse(
            "ModelConfig",
            args_problem("args", self.args),
            kwargs_problem("kwargs", self.kwargs),
        )
