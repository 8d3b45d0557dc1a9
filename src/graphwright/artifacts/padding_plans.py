"""How calls between the buckets are filled up and cut, as JSON; each plan is checked when read.

A plan writes and reads memory by shapes and strides: one that leaves a bucket's own tensors is
neither written nor taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..calls.signature import flatten
from ..errors import ArtifactError
from ..evaluation.reference import Sample
from ..shapes.padding import Cut, Factors, Geometry, PaddingPlan
from .padded_calls import Shapes

FILE = "between.json"
# By the shapes of calls: how each is filled up, and to which bucket.
Plans = Mapping[Shapes, tuple[PaddingPlan, int]]


def write(folder: Path, plans: Plans, samples: Sequence[Sample]) -> None:
    """Write plans, but those that lead out of their bucket."""
    found = [
        {
            "call": shapes,
            "bucket": place,
            "sizes": [plan.sizes, plan.bucket],
            "widths": plan.widths,
            "fills": plan.fills,
            "cuts": [_written(cut) for cut in plan.cuts],
        }
        for shapes, (plan, place) in plans.items()
        if _problem(plan, shapes, samples[place]) is None
    ]
    if found:
        (folder / FILE).write_text(json.dumps(found), encoding="ascii")


def read(folder: Path, samples: Sequence[Sample]) -> Plans:
    """What `write` has written, for samples that are the buckets' calls.

    Raises:
        ArtifactError: it makes no sense.
    """
    plans = {}
    try:
        for each in json.loads((folder / FILE).read_bytes()):
            call = tuple(None if leaf is None else _geometry(*leaf) for leaf in each["call"])
            (place,) = _whole([each["bucket"]])
            widths = tuple(None if added is None else _whole(added) for added in each["widths"])
            fills = tuple(each["fills"])
            if any(type(value) not in (bool, int, float) for value in fills):
                raise ValueError("it fills up with what is no number")
            sizes, bucket = map(_whole, each["sizes"])
            plan = PaddingPlan(sizes, bucket, widths, fills, tuple(map(_cut, each["cuts"])))
            problem = _problem(plan, call, samples[place])
            if problem is not None:
                raise ValueError(problem)
            plans[call] = plan, place
    except Exception as error:
        raise ArtifactError(f"How calls are filled up makes no sense: {error!r:.200}.") from error
    return plans


def _problem(plan: PaddingPlan, call: Shapes, sample: Sample) -> str | None:
    """How a plan does not go with the bucket's call and its results, in words; None if it does."""
    leaves, _ = flatten(sample.call.args, sample.call.kwargs)
    outputs = [*sample.reference.cases[0].eager.outputs.values()]
    if not len(leaves) == len(call) == len(plan.widths) == len(plan.fills):
        return "it has other arguments"
    for leaf, given, widths in zip(leaves, call, plan.widths, strict=True):
        if isinstance(leaf, torch.Tensor) is (given is None):
            return "it has other tensors"
        if given is None or not isinstance(leaf, torch.Tensor):
            if widths is not None:
                return "it fills up what is no tensor"
            continue
        shape, stride = given
        added = (0,) * 2 * len(shape) if widths is None else widths
        full = tuple(n + more for n, more in zip(shape, reversed(added[1::2]), strict=False))
        if not len(added) == 2 * len(shape) == 2 * len(stride) or any(added[::2]):
            return "its widths are not those of its tensors"
        if full != tuple(leaf.shape):
            return f"it fills a tensor up to {full}"
    if len(plan.cuts) != len(outputs):
        return "it has other results"
    told = (_outside(cut, output) for cut, output in zip(plan.cuts, outputs, strict=True))
    return next(filter(None, told), None)


def _outside(cut: Cut, output: Any) -> str | None:
    """Why a result is no part of what the bucket returns, or None."""
    if cut.owner is not None:
        return "it makes views of views"
    if cut.number is not None:
        return None if type(output) is int else "it gives a number for what is none"
    if cut.whole:
        return None
    if not isinstance(output, torch.Tensor) or len(cut.shape) != len(cut.stride):
        return "it cuts what is no tensor"
    if len(cut.shape) != output.dim() or any(
        n > m for n, m in zip(cut.shape, output.shape, strict=True)
    ):
        return f"it cuts {cut.shape} out of {tuple(output.shape)}"
    span = sum((n - 1) * step for n, step in zip(cut.shape, cut.stride, strict=True)) + 1
    if math.prod(cut.shape) and span > max(output.untyped_storage().nbytes(), 1):
        return f"it lays a result of shape {cut.shape} out by {cut.stride}"
    if not cut.is_prefix(output.stride()) and _overlaps(cut):
        return f"it lays elements of a result over each other, by {cut.stride}"
    return None


def _overlaps(cut: Cut) -> bool:
    """Whether two elements of a result might lie in one place."""
    reach = 0
    for step, n in sorted(zip(cut.stride, cut.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += (n - 1) * step
    return False


def _geometry(shape: Any, stride: Any) -> Geometry:
    return _whole(shape), _whole(stride)


def _written(cut: Cut) -> Any:
    if cut.whole or cut.number is not None:
        return {"whole": cut.whole, "number": cut.number}
    factors = cut.factors
    parts = None if factors is None else [factors.axis, factors.bucket, factors.true]
    return {"shape": cut.shape, "stride": cut.stride, "factors": parts}


def _cut(given: Any) -> Cut:
    if "whole" in given:
        whole, number = given["whole"], given["number"]
        if type(whole) is not bool or (number is not None and type(number) is not int):
            raise ValueError("a result is neither whole nor a whole number")
        if whole is (number is not None):
            raise ValueError("a result is whole and a number, or neither")
        return Cut(whole=whole, number=number)
    factors = given["factors"]
    if factors is not None:
        (axis,), full, true = _whole([factors[0]]), _whole(factors[1]), _whole(factors[2])
        factors = Factors(axis, full, true)
    return Cut(_whole(given["shape"]), _whole(given["stride"]), factors=factors)


def _whole(given: Any) -> tuple[int, ...]:
    """Whole numbers that are not negative."""
    if not isinstance(given, list) or any(type(n) is not int or n < 0 for n in given):
        raise ValueError(f"{given!r:.40} are no sizes")
    return tuple(given)
