"""CallSpec, what is to be recorded: a function, its call taken apart, and how to record it.

Checked here, before anything runs: the call's signature and device. What it was called with is no
part of it: every recording begins with values of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.binding import sees_order
from ..calls.modules import FunctionModule, first_in_training
from ..calls.signature import CallSignature
from ..calls.split import (
    Args,
    Kwargs,
    argument_names,
    flatten,
    objects_of,
    tensors_of,
    unflatten,
)
from ..calls.weights import refuse_weights
from ..errors import CaptureError, SignatureError
from .comparison import Comparison
from .memory import MemoryPool


@dataclass(frozen=True, eq=False)
class CallSpec:
    """What to record, and how.

    Attributes:
        fn: the function or module.
        module: what holds what it reaches: itself, or a FunctionModule.
        name: of its graphs.
        signature: of its calls.
        shape: of its arguments; with leaves, these are arguments again.
        names: of the leaves.
        device: where it runs.
        takes_objects: whether objects among the arguments and results are taken apart.
        holds_objects: whether there is anything among the arguments that it may change in place.
        is_plain: whether the leaves are the arguments themselves.
        warmup: how many runs of warm-up are not observed.
        fresh: whether the caller gets new tensors, not the graph's own.
        may_divide: whether it may be divided into segments.
        may_look: whether segments are taken in place of one graph where they are faster.
        streams: how many streams independent operations are captured on.
        trusted: whether the owner looks at all that the function reads from outside.
        in_place: whether it may work on arguments that it writes to where the sample has them.
        trained: parameters whose gradients it sets; None for inference.
        comparison: how warm-up compares its results.
    """

    fn: Callable[..., Any]
    module: nn.Module
    name: str
    signature: CallSignature
    shape: pytree.TreeSpec
    names: Sequence[str]
    device: torch.device
    takes_objects: bool
    holds_objects: bool
    is_plain: bool
    warmup: int
    fresh: bool
    may_divide: bool
    may_look: bool
    streams: int
    trusted: bool
    in_place: bool = False
    trained: Sequence[torch.Tensor] | None = None
    comparison: Comparison | None = None

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        pool: MemoryPool,
        *,
        objects: bool,
        warmup: int,
        fresh: bool,
        may_divide: bool,
        may_look: bool,
        streams: int,
        trusted: bool,
        in_place: bool = False,
    ) -> tuple[CallSpec, list[Any]]:
        """What to record of a call, and the leaves of its arguments.

        Args:
            fn: the function or module.
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            pool: where it is to be recorded; it may have a device.
            objects: `takes_objects`.
            warmup: this and what follows as the attributes.
            fresh: likewise.
            may_divide: likewise.
            may_look: likewise.
            streams: likewise.
            trusted: likewise.
            in_place: likewise.

        Raises:
            CaptureError: it cannot be captured, as its arguments show.
        """
        module = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
        signature = signature_of(args, kwargs, module, objects=objects)
        leaves, shape = flatten(args, kwargs, objects=objects)
        same = len(args) == len(leaves) and all(map(operator.is_, args, leaves))
        made = cls(
            fn=fn,
            module=module,
            name=name_of(fn, leaves),
            signature=signature,
            shape=shape,
            names=argument_names(args, kwargs, objects=objects),
            device=device_of(args, kwargs, module, pool),
            takes_objects=objects,
            holds_objects=bool(objects_of(args, kwargs)),
            is_plain=same and not kwargs,
            warmup=warmup,
            fresh=fresh,
            may_divide=may_divide,
            may_look=may_look,
            streams=streams,
            trusted=trusted,
            in_place=in_place and streams == 1 and not may_divide,
        )
        return made, leaves

    def arguments(self, leaves: Sequence[Any]) -> tuple[Args, Kwargs]:
        """The arguments of a call, from their leaves."""
        return unflatten(leaves, self.shape)


def name_of(fn: Callable[..., Any], leaves: Sequence[Any]) -> str:
    """The name of a graph: its function, with the shapes of the arguments."""
    own = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
    shapes = [
        "×".join(map(str, leaf.shape)) or "()" for leaf in leaves if isinstance(leaf, torch.Tensor)
    ]
    return f"{own}({', '.join(shapes)})"


def signature_of(
    args: Args, kwargs: Kwargs, module: nn.Module, *, objects: bool = False
) -> CallSignature:
    """The call's signature; refuse weights that no graph can hold, and calls for training."""
    try:
        any_order = len(kwargs) > 1 and not sees_order(module)
        signature = CallSignature.of(args, kwargs, objects=objects, any_order=any_order, lasts=True)
        refuse_weights(module)
    except SignatureError as error:
        raise CaptureError(error.what, where=error.where, remedy=error.remedy) from error
    if torch.is_grad_enabled():
        training = first_in_training(module)
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
    """The device of a call: its tensors', else the module's, else the pool's, else the default.

    Tensors on the host may be among those on a GPU, or given to a module that is there.

    Raises:
        CaptureError: the arguments are on several devices beside the host.
    """
    found = {tensor.device: None for tensor in tensors_of((args, dict(kwargs)))}
    on_host = [device for device in found if device.type == "cpu"]
    if len(found) - len(on_host) > 1:
        names = argument_names(args, kwargs, objects=True)
        leaves, _ = flatten(args, kwargs, objects=True)
        each = [
            f"{name} on {leaf.device}"
            for name, leaf in zip(names, leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        raise CaptureError(
            f"The arguments are on several devices: {', '.join(each)}.",
            remedy="Move them to one device.",
        )
    for tensor in (*module.parameters(), *module.buffers()):
        found.setdefault(tensor.device)
    on_device = (device for device in found if device.type != "cpu")
    device = next(on_device, next(iter(found), pool.device))
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
