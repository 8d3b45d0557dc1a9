"""The short way into a graph: one function in which every name and attribute counts.

It answers the common case, a call whose arguments are all tensors, of a graph that mutates nothing:
check the arguments, launch, and look over the module while the device works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .graphs.graph import GraphClosed
from .signature import Args, CallSignature, Kwargs, fitting, lasting_switches

# What a shortcut says to whatever needs a closer look.
MISS = object()

Shortcut = Callable[[Args, Kwargs], Any]


def shortcut(
    signature: CallSignature,
    launch: Callable[[Sequence[torch.Tensor]], Any] | None,
    unchanged: Callable[[], bool],
    *,
    training: bool,
) -> Shortcut | None:
    """A function of a call's arguments that answers it or returns `MISS`; None where none can be.

    Args:
        signature: of the calls that it answers.
        launch: replays the graph for positional tensors; it raises GraphClosed where it cannot.
        unchanged: whether the module is as it was, its mode included.
        training: whether the module is in training mode then.
    """
    guard, flat, mixed = signature.guard, signature.flat, signature.mixed
    if mixed is not None:
        guard, flat = mixed.guard, None
    if guard is None or (flat is None and mixed is None) or launch is None:
        return None
    if any(signature.switches[:2]):  # Autocast is on, and its dtype might change.
        return None
    quiet = not (training or signature.wants_grad)
    expected = signature.switches[2:]
    count, names = (0, ()) if flat is None else (len(flat[0]), tuple(flat[1]))
    grad_is_on = torch.is_grad_enabled
    modes = torch._C._len_torch_dispatch_stack  # make_fx's does not show in the guard.

    def fast(args: Args, kwargs: Kwargs) -> Any:
        if mixed is not None:
            values = mixed.values(args, kwargs)
            if values is None:
                return MISS
            return answered(values, mixed.tensors(values))
        if len(args) != count or len(kwargs) != len(names):
            return MISS
        if kwargs:
            try:
                args = (*args, *[kwargs[name] for name in names])
            except KeyError:
                return MISS
        return answered(args, args)

    def answered(args: Args, tensors: Sequence[Any]) -> Any:
        if modes() or not fitting(guard, tensors) or lasting_switches() != expected:
            return MISS
        if not quiet and grad_is_on():
            return MISS
        try:
            result = launch(args)
        except GraphClosed:
            return MISS
        except Exception:
            if not unchanged():
                return MISS
            raise
        return result if unchanged() else MISS

    return fast
