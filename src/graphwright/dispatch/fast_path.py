"""The fast path to a graph: one function that does as little as possible for each call.

It answers the common case: a graph that changes nothing, called with tensors and maybe plain
values. It checks the arguments, launches, and checks the rest while the device works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..calls import watch
from ..calls.leaves import fitting
from ..calls.signature import CallSignature, has_function_mode
from ..calls.split import Args, Kwargs, MixedArguments, Pattern, in_order_of
from ..calls.switches import lasting_switches
from ..calls.watch import Checks, FittingTensors
from ..graphs.graph import GraphClosed
from ..graphs.static_outputs import Launch

# What a shortcut returns for a call that it cannot answer.
MISS = object()

# How often the check of the arguments in C++ is made for one graph.
_MAKES = 4

Shortcut = Callable[[Args, Kwargs], Any]
_NO_KWARGS: Kwargs = {}


def shortcut(
    signature: CallSignature,
    launch: Launch | None,
    unchanged: Callable[[], bool],
    *,
    training: bool,
    checks: Checks = "full",
) -> Shortcut | None:
    """Make a function that answers calls of a signature or returns `MISS`; None if impossible.

    Args:
        signature: of the calls.
        launch: replays the graph for positional tensors; it raises GraphClosed where it cannot.
        unchanged: whether the module is as it was, its mode included.
        training: whether the module is in training mode then.
        checks: with "none", all calls of as many arguments are taken for calls of the signature.
    """
    if checks == "none" and launch is not None and signature.flat is not None:
        return _unchecked(len(signature.flat[0]), signature.names, signature.any_order, launch)
    if launch is None or any(signature.switches[:2]):  # Autocast's dtype might change.
        return None
    quiet = not (training or signature.wants_grad)
    expected = signature.switches[2:]
    known: MixedArguments | Pattern | None = signature.mixed
    if known is None and not signature.has_objects:
        known = signature.pattern
    if known is not None:
        apart, tensors = known.values, known.tensors
        with_values = _with_plain_values(known, launch)
        count = len(known.places)
        inner = _fast(known.guard, count, (), True, with_values, unchanged, quiet, expected)

        def fast(args: Args, kwargs: Kwargs) -> Any:
            values = apart(args, kwargs)
            return MISS if values is None else inner(tensors(values), _NO_KWARGS)

        return fast
    if signature.guard is None or signature.flat is None:
        return None
    count, names, any_order = len(signature.flat[0]), signature.names, signature.any_order
    return _fast(signature.guard, count, names, any_order, launch, unchanged, quiet, expected)


def _unchecked(count: int, names: tuple[str, ...], any_order: bool, launch: Launch) -> Shortcut:
    """The function for calls of which nothing is looked at."""

    def fast(args: Args, kwargs: Kwargs) -> Any:
        if len(args) != count or len(kwargs) != len(names):
            return MISS
        if kwargs:
            named = in_order_of(names, kwargs, any_order)
            if named is None:
                return MISS
            args = (*args, *named)
        try:
            return launch(args)
        except GraphClosed:
            return MISS

    return fast


def _with_plain_values(known: MixedArguments | Pattern, launch: Launch) -> Launch:
    """A launch that takes the tensors alone, and puts the plain values between them."""
    template, places = known.template, known.places

    def launch_all(tensors: Sequence[torch.Tensor]) -> Any:
        values = [*template]
        for index, tensor in zip(places, tensors, strict=True):
            values[index] = tensor
        return launch(values)

    return launch_all


def _fast(
    guard: Callable[..., bool],
    count: int,
    names: tuple[str, ...],
    any_order: bool,
    launch: Launch,
    unchanged: Callable[[], bool],
    quiet: bool,
    expected: tuple[Any, ...],
) -> Shortcut:
    """The function for calls whose arguments are all tensors.

    Args:
        guard: checks the tensors.
        count: how many arguments are positional.
        names: of the keyword arguments, in order.
        any_order: whether these may come in another order.
        launch: as for `shortcut`.
        unchanged: as for `shortcut`.
        quiet: whether nobody can want gradients.
        expected: what `lasting_switches` has to return.
    """
    # Local names are found faster than globals and attributes.
    functions, unseen = torch._C._len_torch_function_stack, torch._C.DisableTorchFunction
    in_python = _fitting_in_python(guard, count, names, any_order, quiet)
    changed_last_time = False
    compiled: FittingTensors | None = None
    made = 0

    def as_before() -> bool:
        return lasting_switches() == expected and unchanged()

    def answered_otherwise(error: Exception) -> bool:
        return isinstance(error, GraphClosed) or not as_before()

    def fast(args: Args, kwargs: Kwargs) -> Any:
        nonlocal changed_last_time, compiled, made
        tensors = None if compiled is None else compiled(args, kwargs)
        if tensors is None:
            tensors = in_python(args, kwargs)
            if tensors is None:
                return MISS
            # That of the default device is none that looks on.
            seen = functions() > 0 and has_function_mode()
            # It may have been made under other settings, which now differ for good.
            if watch.COMPILED_ARGUMENTS and made < _MAKES and not seen:
                compiled = watch.COMPILED_ARGUMENTS[0](tensors, names, any_order, quiet)
                made += 1
        else:
            seen = False
        # The same kernels run whatever has changed since: so launch now, and look while the device
        # works. A function mode would see the launch; and what has changed mostly stays changed.
        if (changed_last_time or seen) and not as_before():
            return MISS
        try:
            if functions():
                with unseen():
                    result = launch(tensors)
            else:
                result = launch(tensors)
        except Exception as error:
            if answered_otherwise(error):
                return MISS
            raise
        changed_last_time = not as_before()
        return MISS if changed_last_time else result

    return fast


def _fitting_in_python(
    guard: Callable[..., bool], count: int, names: tuple[str, ...], any_order: bool, quiet: bool
) -> Callable[[Args, Kwargs], Args | None]:
    """What gives the tensors of a call that fits, keyword arguments last; else None.

    The arguments are as for `_fast`.
    """
    grad_is_on, modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack

    def in_python(args: Args, kwargs: Kwargs) -> Args | None:
        if len(args) != count or len(kwargs) != len(names):
            return None
        if kwargs:
            if (*kwargs,) == names:  # Written out, since it is done at each call.
                args = (*args, *kwargs.values())
            elif (named := in_order_of(names, kwargs, any_order)) is not None:
                args = (*args, *named)
            else:
                return None
        # The guard sees neither make_fx's mode nor the tangents of forward AD.
        if modes() or forward_ad._current_level >= 0 or not fitting(guard, args):
            return None
        return None if not quiet and grad_is_on() else args

    return in_python
