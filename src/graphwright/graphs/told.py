"""What work does once it is told that a capture is under way: it may be something else.

Libraries ask torch.cuda.is_current_stream_capturing(), and leave out what would read the device
then. The numbers have to stay the same but for rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..accuracy import OTHER_ROUNDING, ROUNDING, error_of, special_values
from ..errors import CaptureError, first_line, user_frame
from ..modes import OperationMode
from ..signature import SCALARS, describe
from .transfer import Inputs


class WithoutDropout(OperationMode):
    """Runs operations without dropout; for comparisons only.

    Two attention kernels drop other elements, with the same random numbers; what they compute can
    be compared where they drop none.
    """

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with a chance of 1 to keep an element."""
        for index, name, chance in _chances(func):
            if index < len(args):
                args = (*args[:index], chance, *args[index + 1 :])
            elif name in kwargs:
                kwargs[name] = chance
        return func(*args, **kwargs)


# Names of arguments that are a chance, and which value drops nothing; by operation, else for all.
_KEEP_ALL = {
    "native_dropout": ("p", 0.0),
    "bernoulli_": ("p", 1.0),
    "bernoulli": ("p", 1.0),
    "_cudnn_rnn": ("dropout", 0.0),
    "_cudnn_rnn_backward": ("dropout", 0.0),
}


@functools.cache
def _chances(func: Any) -> list[tuple[int, str, float]]:
    name, chance = _KEEP_ALL.get(func._opname, ("dropout_p", 0.0))
    arguments = enumerate(func._schema.arguments)
    return [(i, name, chance) for i, a in arguments if a.name == name]


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


class Comparison:
    """Compares what work returns when it is told of a capture with what eager has returned."""

    def keep(self, result: Any) -> Any:
        """What a later run is compared with."""
        return [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in pytree.tree_leaves(result)
        ]

    def check(self, told: Any, kept: Any, dtypes: Iterable[torch.dtype]) -> None:
        """Raise CaptureError if the two differ by more than rounding.

        Args:
            told: what the work has returned.
            kept: what `keep` has kept of eager's.
            dtypes: those that it has computed in.
        """
        same_when_told(told, kept, rounding_of(dtypes))


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """The relative error that rounding in the coarsest of some dtypes may make."""
    return max((ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def same_when_told(told: Any, eager: Sequence[Any], rounding: float = 0.0) -> None:
    """Refuse work that computes something else when it is told that a capture is under way.

    Args:
        told: what it returns when it is told.
        eager: the leaves of what it returns else.
        rounding: relative error that is allowed in any case; more where their dtype is coarser.
    """
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
            alike = error.rms <= max(rounding, ROUNDING.get(real, OTHER_ROUNDING))
            alike = alike and torch.equal(special_values(a), special_values(b))
    if not alike:
        raise another_result()


def another_result() -> CaptureError:
    """The error for work that computes something else when it is told."""
    return CaptureError(
        "The call computes something else when it is told that a capture is under way.",
        remedy="It asks torch.cuda.is_current_stream_capturing(), and so does transformers for "
        "attention masks: try attn_implementation='eager', or pass the mask explicitly.",
    )
