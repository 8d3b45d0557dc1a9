"""What tune() was asked to do: checked at once, and put into words."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .dispatch import arguments_of
from .errors import OptionError, SignatureError
from .signature import Args, Kwargs
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
    timeout_s: float,
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
    if not _positive(timeout_s):
        wrong.append(f"timeout_s is {timeout_s!r}, not a positive number of seconds")
    if wrong:
        raise OptionError(f"tune() cannot begin: {'; '.join(wrong)}.")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def samples_of(
    args: Args, kwargs: Kwargs | None, samples: Any, weights: Any, names: Sequence[str] = ()
) -> list[tuple[float, Call]]:
    """The calls to tune for, with their weights; by these names where there are some.

    Raises:
        OptionError: there are none, or they make no sense.
    """
    if samples is None:
        if weights is not None:
            raise OptionError("weights are those of several samples, and there is one call.")
        return [(1.0, Call("the sample inputs", tuple(args), dict(kwargs or {})))]
    if len(args) or kwargs:
        raise OptionError(
            "There are samples as well as args or kwargs.", remedy="Make these one of the samples."
        )
    if isinstance(samples, Mapping) or not isinstance(samples, Sequence) or not samples:
        raise OptionError(
            f"samples is {samples!r:.60}, not a list of calls.",
            remedy="For example samples=[(x1,), (x8,)], or [{'x': x1}, ((x8,), {'flag': True})].",
        )
    given = [1.0] * len(samples) if weights is None else list(weights)
    if len(given) != len(samples) or not all(map(_positive, given)):
        raise OptionError(
            f"weights is {weights!r}, not a positive number for each of {len(samples)} samples."
        )
    calls: dict[str, tuple[float, Call]] = {}
    for index, (weight, sample) in enumerate(zip(given, samples, strict=True)):
        mine, named = arguments_of(sample)
        call = Call("", tuple(mine), dict(named))
        words = "; ".join(input_in_words(n, leaf) for n, leaf in call.leaves().items())
        name = words = names[index] if names else words
        while name in calls:
            name = f"{words} (another)" if name == words else f"{name}'"
        calls[name] = (float(weight), replace(call, name=name))
    return list(calls.values())


def device_of(module: nn.Module, calls: Iterable[Call]) -> torch.device:
    """The one device that the model and its inputs are on.

    Raises:
        SignatureError: there are several, or one on which nothing can be measured.
    """
    places: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        places.setdefault(parameter.device, f"parameter {name}")
    for name, leaf in (pair for call in calls for pair in call.leaves().items()):
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
