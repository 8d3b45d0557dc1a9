"""The model itself: as the user calls it, under no_grad, and under inference_mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..calls.split import Args, Kwargs
from .base import AVAILABLE, Availability, Built, tiny_model


@dataclass(frozen=True)
class Eager:
    """Plain PyTorch under one gradient mode; `mode=None` leaves the mode as it is."""

    mode: Callable[[], contextlib.AbstractContextManager[Any]] | None
    name: str
    complexity: int

    def probe(self, device: torch.device) -> Availability:
        """Call a tiny model on the device."""
        model, x = tiny_model(device)
        self.build(model, (x,), {}).call(x)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """The model itself, with its mode around it."""
        if self.mode is None:
            return Built(model, plain=True)
        mode = self.mode

        def call(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return model(*args, **kwargs)

        notes = []
        if mode is torch.inference_mode:
            notes.append("outputs are inference tensors: autograd refuses them")
        return Built(call, notes, plain=True)


EAGER = Eager(None, "eager", 0)
NO_GRAD = Eager(torch.no_grad, "eager:no_grad", 1)
INFERENCE_MODE = Eager(torch.inference_mode, "eager:inference_mode", 2)
