"""The short way into a graph: one function in which every name and attribute counts.

It answers the common case, a call whose arguments are tensors and maybe plain values, of a graph
that mutates nothing: check the arguments, launch, and look over the module while the device works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..calls.signature import Args, CallSignature, Kwargs, Mixed, fitting, lasting_switches
from ..graphs.graph import GraphClosed

# What a shortcut says to whatever needs a closer look.
MISS = object()

Shortcut = Callable[[Args, Kwargs], Any]
Launch = Callable[[Sequence[torch.Tensor]], Any]
_NONE: Kwargs = {}


def shortcut(
    signature: CallSignature,
    launch: Launch | None,
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
    if launch is None or any(signature.switches[:2]):  # Autocast's dtype might change.
        return None
    quiet = not (training or signature.wants_grad)
    expected = signature.switches[2:]
    mixed = signature.mixed
    if mixed is not None:
        between = _between(mixed, launch)
        inner = _fast(mixed.guard, len(mixed.places), (), between, unchanged, quiet, expected)

        def fast(args: Args, kwargs: Kwargs) -> Any:
            row = mixed.values(args, kwargs)
            return MISS if row is None else inner(mixed.tensors(row), _NONE)

        return fast
    if signature.guard is None or signature.flat is None:
        return None
    count, names = len(signature.flat[0]), tuple(signature.flat[1])
    return _fast(signature.guard, count, names, launch, unchanged, quiet, expected)


def _between(mixed: Mixed, launch: Launch) -> Launch:
    """Launch for the tensors alone: with the plain values put between them."""
    template: list[Any] = [None] * (len(mixed.plain) + len(mixed.places))
    for index, value in mixed.plain:
        template[index] = value

    def between(tensors: Sequence[torch.Tensor]) -> Any:
        row = template.copy()
        for index, tensor in zip(mixed.places, tensors, strict=True):
            row[index] = tensor
        return launch(row)

    return between


def _fast(
    guard: Callable[..., bool],
    count: int,
    names: tuple[str, ...],
    launch: Launch,
    unchanged: Callable[[], bool],
    quiet: bool,
    expected: tuple[Any, ...],
) -> Shortcut:
    """The function for calls whose arguments are all tensors.

    Args:
        guard: checks them.
        count: how many are positional.
        names: of the others, in order.
        launch: as for `shortcut`.
        unchanged: likewise.
        quiet: whether no gradients can be wanted.
        expected: the switches that last.
    """
    grad_is_on = torch.is_grad_enabled
    modes = torch._C._len_torch_dispatch_stack  # make_fx's does not show in the guard.

    def fast(args: Args, kwargs: Kwargs) -> Any:
        if len(args) != count or len(kwargs) != len(names):
            return MISS
        if kwargs:
            try:
                args = (*args, *[kwargs[name] for name in names])
            except KeyError:
                return MISS
        if modes() or not fitting(guard, args) or lasting_switches() != expected:
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
