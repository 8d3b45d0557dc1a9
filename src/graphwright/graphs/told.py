"""What work does once it is told that a capture is under way: it may be something else.

Libraries ask torch.cuda.is_current_stream_capturing(), and leave out what would read the device
then. The numbers have to stay the same but for rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..accuracy import OTHER_ROUNDING, ROUNDING, error_of, special_values
from ..errors import CaptureError, first_line, user_frame
from ..modes import OperationMode
from ..signature import SCALARS, describe
from .transfer import Inputs


class WithoutDropout(OperationMode):
    """Runs operations without dropout.

    Two attention kernels drop other elements, with the same random numbers; what they compute can
    be compared where they drop none.
    """

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with a chance of 0 to drop an element."""
        for index, name in _chances(func):
            if index < len(args):
                args = (*args[:index], 0.0, *args[index + 1 :])
            elif name in kwargs:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


@functools.cache
def _chances(func: Any) -> list[tuple[int, str]]:
    names = {"dropout_p", "dropout"} | ({"p"} if func._opname == "native_dropout" else set())
    return [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.name in names]


def run_told(work: Callable[[Inputs], Any], inputs: Inputs) -> Any:
    """Run work that is told that a capture is under way, and has run without being told."""
    try:
        return work(inputs)
    except Exception as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(
            f"The call works by itself and fails once it is told that a capture is under way: "
            f"{first_line(error)}",
            where=user_frame(error),
            remedy="It asks torch.cuda.is_current_stream_capturing(), and takes another way.",
        ) from error


def same_when_told(told: Any, eager: Sequence[Any]) -> None:
    """Refuse work that computes something else when it is told that a capture is under way."""
    mine = pytree.tree_leaves(told)
    alike = len(mine) == len(eager)
    for a, b in zip(mine, eager, strict=False):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            plain = isinstance(a, SCALARS) and isinstance(b, SCALARS)
            alike = alike and (not plain or describe(a) == describe(b))
            continue
        alike = alike and a.shape == b.shape and a.dtype == b.dtype
        if alike and a.numel():
            error, _ = error_of(a, b, b)
            real = a.dtype.to_real() if a.dtype.is_complex else a.dtype
            alike = error.rms <= ROUNDING.get(real, OTHER_ROUNDING)
            alike = alike and torch.equal(special_values(a), special_values(b))
    if not alike:
        raise CaptureError(
            "The call computes something else when it is told that a capture is under way.",
            remedy="It asks torch.cuda.is_current_stream_capturing(), and so does transformers for "
            "attention masks: try attn_implementation='eager', or pass the mask explicitly.",
        )
