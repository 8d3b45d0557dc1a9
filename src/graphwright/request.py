"""What tune() was asked to do: checked at once, and put into words."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import OptionError, SignatureError
from .snapshots import Call
from .strategies import LOSSY

OBJECTIVES = ("latency", "throughput", "memory")


def check_options(
    model: Any,
    args: Any,
    kwargs: Any,
    objective: str,
    tolerance: float | None,
    allow: Sequence[str],
    budget_s: float | None,
) -> None:
    """Name everything that is wrong with the options at once."""
    wrong = []
    if not callable(model):
        wrong.append(f"model is a {type(model).__name__}, which cannot be called")
    if not isinstance(args, tuple | list):
        wrong.append(f"args is a {type(args).__name__}: write (x,) for a single input")
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)
    ):
        wrong.append(f"kwargs is a {type(kwargs).__name__}, not a dictionary by names")
    if objective not in OBJECTIVES:
        wrong.append(f"objective is {objective!r}, not one of {', '.join(OBJECTIVES)}")
    if tolerance is not None and not _positive(tolerance):
        wrong.append(f"tolerance is {tolerance!r}, not a positive relative error")
    if isinstance(allow, str) or not isinstance(allow, Collection):
        wrong.append(f"allow is a {type(allow).__name__}: write ({allow!r},)")
    elif unknown := [name for name in allow if name not in LOSSY]:
        wrong.append(f"allow names {unknown}, but knows only {', '.join(LOSSY)}")
    if budget_s is not None and not _positive(budget_s):
        wrong.append(f"budget_s is {budget_s!r}, not a positive number of seconds")
    if wrong:
        raise OptionError(f"tune() cannot begin: {'; '.join(wrong)}.")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def device_of(module: nn.Module, call: Call) -> torch.device:
    """The one device that the model and its inputs are on.

    Raises:
        SignatureError: there are several, or one on which nothing can be measured.
    """
    places: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        places.setdefault(parameter.device, f"parameter {name}")
    for name, leaf in call.leaves().items():
        # 0-d tensors on the CPU act as plain numbers beside CUDA tensors.
        if isinstance(leaf, torch.Tensor) and not (leaf.dim() == 0 and leaf.device.type == "cpu"):
            places.setdefault(leaf.device, name)
    if len(places) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise SignatureError(
            f"The model and its inputs are on several devices: {where}.",
            remedy="Move them to one device, with model.to(device) and x.to(device).",
        )
    device = next(iter(places), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise SignatureError(
            f"The model is on {device}; only the CPU and CUDA devices can be measured.",
            remedy="Move model and inputs to the CPU or to a CUDA device.",
        )
    return device


def name_of(model: Callable[..., Any]) -> str:
    """Class of a module, name of a function."""
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__qualname__", type(model).__qualname__)


def input_in_words(name: str, leaf: Any) -> str:
    """One input by name, shape and dtype, or by value."""
    if isinstance(leaf, torch.Tensor):
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        return f"{name}: {shape} {str(leaf.dtype).removeprefix('torch.')}"
    return f"{name}: {leaf!r}"
