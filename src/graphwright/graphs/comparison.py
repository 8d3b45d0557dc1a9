"""Comparison: whether a call computes the same when a capture seems to be under way.

The results of two runs of warm-up may differ by rounding only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls.leaves import SCALARS, describe
from ..calls.modes import OperationMode
from ..errors import CaptureError
from ..evaluation.accuracy import OTHER_ROUNDING, ROUNDING, error_of, special_values
from .static_outputs import refuse_results

# Arguments that are the chance of a dropout, and the value that drops nothing, by operation; other
# operations have `dropout_p`.
_KEEP_ALL = {
    "native_dropout": ("p", 0.0),
    "bernoulli_": ("p", 1.0),
    "bernoulli": ("p", 1.0),
    "_cudnn_rnn": ("dropout", 0.0),
    "_cudnn_rnn_backward": ("dropout", 0.0),
}


class Comparison:
    """Compares the results of a run that pretends to be captured with those of a plain one."""

    def keep(self, result: Any) -> Any:
        """Copy what a later run is compared with.

        Raises:
            CaptureError: a result is nothing that a graph could give again.
        """
        refuse_results(result)
        return [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf in pytree.tree_leaves(result)
        ]

    def check(self, result: Any, kept: Any, dtypes: Iterable[torch.dtype]) -> None:
        """Raise CaptureError if the two differ by more than rounding.

        Args:
            result: what the work returned.
            kept: what `keep` kept of eager's result.
            dtypes: those that the work computed in.
        """
        check_same_result(result, kept, rounding_of(dtypes))

    def compare(self, kept: Any, eager: Any, dtypes: Iterable[torch.dtype]) -> None:
        """As `check`, for what `keep` kept of both runs."""
        check_same_result(kept, eager, rounding_of(dtypes))


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """The relative error that rounding in the coarsest of some dtypes may cause."""
    return max((ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def check_same_result(result: Any, eager: Sequence[Any], rounding: float = 0.0) -> None:
    """Refuse work that computes something else while a capture seems to be under way.

    Args:
        result: what it returns then.
        eager: the leaves of what it returns otherwise.
        rounding: relative error that is always allowed; coarser dtypes are allowed more.
    """
    mine = pytree.tree_leaves(result)
    if len(mine) != len(eager) or not all(
        _alike(a, b, rounding) for a, b in zip(mine, eager, strict=True)
    ):
        raise different_result()


def _alike(a: Any, b: Any, rounding: float) -> bool:
    """Whether two leaves are the same but for rounding."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        plain = isinstance(a, SCALARS) and isinstance(b, SCALARS)
        same_kind = isinstance(a, torch.Tensor) is isinstance(b, torch.Tensor)
        same_kind = same_kind and (a is None) is (b is None)
        return same_kind and (not plain or describe(a) == describe(b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    error, _ = error_of(a, b, b)
    real = a.dtype.to_real() if a.dtype.is_complex else a.dtype
    close = error.rms <= max(rounding, ROUNDING.get(real, OTHER_ROUNDING))
    return close and torch.equal(special_values(a), special_values(b))


def different_result() -> CaptureError:
    """The error for work that computes something else while a capture seems to be under way."""
    return CaptureError(
        "The call computes something else when it is told that a capture is under way.",
        remedy="It asks torch.cuda.is_current_stream_capturing(), and so does transformers for "
        "attention masks: try attn_implementation='eager', or pass the mask explicitly.",
    )


class WithoutDropout(OperationMode):
    """Runs operations without dropout, for comparisons.

    Two attention kernels drop different elements with the same random numbers, so their results can
    only be compared where they drop none.
    """

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that keeps all elements."""
        for index, name, chance in _chances(func):
            if index < len(args):
                args = (*args[:index], chance, *args[index + 1 :])
            elif name in kwargs:
                kwargs[name] = chance
        return func(*args, **kwargs)


@functools.cache
def _chances(func: Any) -> list[tuple[int, str, float]]:
    """The dropout arguments of an operation: position, name, and the value that drops nothing."""
    name, chance = _KEEP_ALL.get(func._opname, ("dropout_p", 0.0))
    arguments = enumerate(func._schema.arguments)
    return [(i, name, chance) for i, a in arguments if a.name == name]
