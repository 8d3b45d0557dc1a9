"""TensorRT by torch_tensorrt's Dynamo front end. Written from its documentation, not run yet."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..calls.split import Args, Kwargs
from ..errors import StrategyFailed, first_line
from .base import AVAILABLE, Availability, Built, tiny_model, without_grad
from .expected import Expected, tf32_allowed

_INDEX = "--extra-index-url https://pypi.nvidia.com"


@dataclass(frozen=True)
class TensorRT:
    """TensorRT engines where it can run the graph, PyTorch for the rest of it."""

    name: str = "tensorrt"
    complexity: int = 45
    unsavable: str = (
        "TensorRT's engines belong to one kind of GPU and one version of TensorRT: compile anew "
        "where the model is loaded"
    )

    def probe(self, device: torch.device) -> Availability:
        """Compare versions, then compile and run a tiny model."""
        if device.type != "cuda":
            return Availability(False, "TensorRT needs an NVIDIA GPU", "Run on a GPU.")
        problem = version_problem(torch.__version__, _installed())
        if problem is not None:
            return Availability(False, problem, _remedy())
        model, x = tiny_model(device)
        try:
            importlib.import_module("torch_tensorrt")
        except Exception as error:
            reason = f"torch_tensorrt cannot be imported: {first_line(error)}"
            return Availability(False, reason, _remedy())
        with torch.no_grad():
            # A model of two layers would stay with PyTorch by default.
            result = _compiled(model, (x,), {}, min_block_size=1)(x)
            if not torch.allclose(result, model(x), atol=1e-3):
                return Availability(False, "a tiny model gives different results through TensorRT")
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Compile in the model's own dtypes: a lower precision is a rewrite's business."""
        problem = version_problem(torch.__version__, _installed())
        if problem is not None:
            raise StrategyFailed(problem, remedy=_remedy())
        expected = Expected.of(model, args, kwargs)
        with torch.no_grad():
            compiled = _compiled(model, args, kwargs)
            expected.tensors(compiled(*args, **kwargs))

        def call(*args: Any, **kwargs: Any) -> Any:
            return expected.restored(expected.tensors(compiled(*args, **kwargs)))

        return Built(without_grad(call), holds_weights=True)


def version_problem(torch_version: str, tensorrt_version: str | None) -> str | None:
    """Why a torch-tensorrt does not go with a torch, or None: each is built for one minor version.

    `tensorrt_version` is None where torch-tensorrt is not installed.
    """
    if tensorrt_version is None:
        return "torch-tensorrt is not installed"
    if _minor(torch_version) == _minor(tensorrt_version):
        return None
    return (
        f"torch-tensorrt {tensorrt_version} is built for torch {_minor(tensorrt_version)}, and "
        f"this is torch {torch_version}"
    )


def _minor(version: str) -> str:
    """`2.11` of `2.11.0.dev20260101+cu130`; the whole where it is no such version."""
    found = re.match(r"(\d+\.\d+)(?!\d)", version)
    return found[1] if found else version


def _installed() -> str | None:
    try:
        return importlib.metadata.version("torch-tensorrt")
    except importlib.metadata.PackageNotFoundError:
        return None


def _remedy() -> str:
    # TensorRT's own libraries are on NVIDIA's index alone.
    return f"pip install torch-tensorrt=={_minor(torch.__version__)}.* {_INDEX}"


def _compiled(model: nn.Module, args: Args, kwargs: Kwargs, **options: Any) -> Any:
    torch_tensorrt = importlib.import_module("torch_tensorrt")
    return torch_tensorrt.compile(
        model,
        ir="dynamo",
        arg_inputs=tuple(args),
        kwarg_inputs=dict(kwargs),
        use_explicit_typing=True,
        truncate_double=False,
        disable_tf32=not tf32_allowed(),
        **options,
    )


TENSORRT = TensorRT()
