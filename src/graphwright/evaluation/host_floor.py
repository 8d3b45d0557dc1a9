"""What the host needs for a call, which no way to run the same kernels can go below.

On a GPU that is the time until the call returns. On a CPU the call runs on the meta device, where
operations have shapes and no data: Python and PyTorch's dispatcher do what they always do.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.snapshots import Call
from .clock import fastest_s, synchronize

# Calls that are timed, at least (the first one imports things) and at most, and seconds after which
# there is no other.
_LEAST, _MOST, _LIMIT_S = 3, 10, 0.5


def host_seconds(module: nn.Module, call: Call, device: torch.device) -> float | None:
    """Seconds of a call that the host needs, the least of some; None if they cannot be told.

    They are no less than what the host really needs, as far as operations on the meta device take
    no less than they do with data, without their computing.

    Args:
        module: the model; it is called as it is on a GPU, and a copy of it on a CPU.
        call: what it is called with.
        device: where both are.
    """
    try:
        with torch.no_grad():
            if device.type == "cpu":
                function, args, kwargs = _without_data(module, call)
            else:
                mine = call.clone()
                function, args, kwargs = module, mine.args, dict(mine.kwargs)
            return fastest_s(
                functools.partial(function, *args, **kwargs),
                limit_s=_LIMIT_S,
                most=_MOST,
                least=_LEAST,
                ready=functools.partial(synchronize, device),
            )
    except Exception:
        return None  # It reads values, say, or has tensors where they cannot be replaced.


def _without_data(module: nn.Module, call: Call) -> tuple[nn.Module, Any, Any]:
    """A copy of a model, and its arguments, on the meta device."""
    known: dict[int, Any] = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        empty: torch.Tensor = torch.empty_like(tensor, device="meta")
        known[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: torch.empty_like(t, device="meta"), (call.args, dict(call.kwargs))
    )
    return copy.deepcopy(module, known), args, kwargs
