"""What the arguments of a call say about its capture, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, SignatureError
from ..signature import (
    Args,
    CallSignature,
    Kwargs,
    argument_names,
    flatten,
    refuse_weights,
    tensors_of,
)
from ..watch import in_training
from .memory import MemoryPool


def name_of(fn: Callable[..., Any], leaves: Sequence[Any]) -> str:
    """What a graph is called: its function, with the shapes of the arguments."""
    own = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
    shapes = [
        "×".join(map(str, leaf.shape)) or "()" for leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    return f"{own}({', '.join(shapes)})"


def signature_of(args: Args, kwargs: Kwargs, module: nn.Module) -> CallSignature:
    """The call's signature; refuse weights that no graph can hold, and what is for training."""
    try:
        signature = CallSignature.of(args, kwargs)
        refuse_weights(module)
    except SignatureError as error:
        raise CaptureError(error.what, where=error.where, remedy=error.remedy) from error
    if torch.is_grad_enabled():
        training = next((m for m in module.modules() if in_training(m)), None)
        if signature.wants_grad or training is not None:
            what = (
                "An argument requires grad"
                if training is None
                else f"{type(training).__name__} is in training mode while gradients are on"
            )
            raise CaptureError(
                f"{what}; a captured call gives no gradients.",
                remedy="Call eval(), or capture under torch.no_grad().",
            )
    return signature


def device_of(args: Args, kwargs: Kwargs, module: nn.Module, pool: MemoryPool) -> torch.device:
    """The one device of a call: its tensors', else the module's, else the pool's."""
    found = {tensor.device: None for tensor in tensors_of((args, dict(kwargs)))}
    if len(found) > 1:
        names = argument_names(args, kwargs)
        leaves, _ = flatten(args, kwargs)
        each = [
            f"{name} on {leaf.device}"
            for name, leaf in zip(names, leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        raise CaptureError(
            f"The arguments are on several devices: {', '.join(each)}.",
            remedy="Move them to one device: a graph would keep a CPU tensor's value for ever.",
        )
    for tensor in (*module.parameters(), *module.buffers()):
        found.setdefault(tensor.device)
    device = next(iter(found), pool.device)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
