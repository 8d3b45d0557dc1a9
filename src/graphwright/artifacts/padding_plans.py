"""Padding plans of calls between the buckets, as JSON; each plan is checked when it is read.

A plan reads and writes memory by shapes and strides. One that would reach beyond a bucket's own
tensors, or make huge ones, is neither written nor accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..calls.split import flatten
from ..errors import ArtifactError
from ..evaluation.reference import Sample
from ..shapes.padding import Cut, Factors, Geometry, PaddingPlan
from .padded_calls import ShapeKey

FILE = "between.json"
# Bytes that a result may take with the gaps between its elements, or as many as the bucket's has.
_MOST_BYTES = 2**30
# Plans, each with the index of its bucket, by the shapes of calls.
Plans = Mapping[ShapeKey, tuple[PaddingPlan, int]]


def write(folder: Path, plans: Plans, samples: Sequence[Sample]) -> None:
    """Write all plans that stay within their bucket's tensors."""
    found = [
        {
            "call": shapes,
            "bucket": index,
            "sizes": [plan.sizes, plan.bucket],
            "widths": plan.widths,
            "fills": plan.fills,
            "cuts": [_to_json(cut) for cut in plan.cuts],
        }
        for shapes, (plan, index) in plans.items()
        if _problem(plan, shapes, samples[index]) is None
    ]
    if found:
        (folder / FILE).write_text(json.dumps(found), encoding="ascii")


def read(folder: Path, samples: Sequence[Sample]) -> Plans:
    """Read what `write` has written; the samples are the buckets' calls.

    Raises:
        ArtifactError: a plan makes no sense.
    """
    plans = {}
    try:
        for each in json.loads((folder / FILE).read_bytes()):
            call = tuple(None if leaf is None else _geometry(*leaf) for leaf in each["call"])
            (index,) = _sizes([each["bucket"]])
            widths = tuple(None if added is None else _sizes(added) for added in each["widths"])
            fills = tuple(each["fills"])
            if any(type(value) not in (bool, int, float) for value in fills):
                raise ValueError("it pads with what is no number")
            sizes, bucket = map(_sizes, each["sizes"])
            plan = PaddingPlan(sizes, bucket, widths, fills, tuple(map(_from_json, each["cuts"])))
            problem = _problem(plan, call, samples[index])
            if problem is not None:
                raise ValueError(problem)
            plans[call] = plan, index
    except Exception as error:
        raise ArtifactError(f"How calls are padded makes no sense: {error!r:.200}.") from error
    return plans


def _problem(plan: PaddingPlan, call: ShapeKey, sample: Sample) -> str | None:
    """Why a plan does not match the bucket's call and its results, in words; None if it does."""
    leaves, _ = flatten(sample.call.args, sample.call.kwargs)
    outputs = [*sample.reference.cases[0].eager.outputs.values()]
    if not len(leaves) == len(call) == len(plan.widths) == len(plan.fills):
        return "it has other arguments"
    for leaf, given, widths in zip(leaves, call, plan.widths, strict=True):
        if isinstance(leaf, torch.Tensor) is (given is None):
            return "it has other tensors"
        if given is None or not isinstance(leaf, torch.Tensor):
            if widths is not None:
                return "it pads what is no tensor"
            continue
        shape, stride = given
        added = (0,) * 2 * len(shape) if widths is None else widths
        full = tuple(n + more for n, more in zip(shape, reversed(added[1::2]), strict=False))
        if not len(added) == 2 * len(shape) == 2 * len(stride) or any(added[::2]):
            return "its widths are not those of its tensors"
        if full != tuple(leaf.shape):
            return f"it pads a tensor to {full}"
    if len(plan.cuts) != len(outputs):
        return "it has other results"
    problems = (_problem_of_cut(c, output) for c, output in zip(plan.cuts, outputs, strict=True))
    return next(filter(None, problems), None)


def _problem_of_cut(cut: Cut, output: Any) -> str | None:
    """Why a result cannot be sliced out of what the bucket returns, in words; None if it can."""
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
    most = max(output.untyped_storage().nbytes(), _MOST_BYTES)
    if math.prod(cut.shape) and span * output.element_size() > most:
        return f"it lays a result of shape {cut.shape} out by {cut.stride}"
    if not cut.is_prefix(output.stride()) and _overlaps(cut):
        return f"it lays elements of a result over each other, by {cut.stride}"
    return None


def _overlaps(cut: Cut) -> bool:
    """Whether two elements of a result may share memory."""
    reach = 0
    for step, n in sorted(zip(cut.stride, cut.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += (n - 1) * step
    return False


def _geometry(shape: Any, stride: Any) -> Geometry:
    return _sizes(shape), _sizes(stride)


def _to_json(cut: Cut) -> Any:
    if cut.whole or cut.number is not None:
        return {"whole": cut.whole, "number": cut.number}
    factors = cut.factors
    parts = None if factors is None else [factors.axis, factors.bucket, factors.true]
    return {"shape": cut.shape, "stride": cut.stride, "factors": parts}


def _from_json(given: Any) -> Cut:
    if "whole" in given:
        whole, number = given["whole"], given["number"]
        if type(whole) is not bool or (number is not None and type(number) is not int):
            raise ValueError("a result is neither whole nor a whole number")
        if whole is (number is not None):
            raise ValueError("a result is whole and a number, or neither")
        return Cut(whole=whole, number=number)
    factors = given["factors"]
    if factors is not None:
        (axis,), full, true = _sizes([factors[0]]), _sizes(factors[1]), _sizes(factors[2])
        factors = Factors(axis, full, true)
    return Cut(_sizes(given["shape"]), _sizes(given["stride"]), factors=factors)


def _sizes(given: Any) -> tuple[int, ...]:
    """Whole numbers that are not negative."""
    if not isinstance(given, list) or any(type(n) is not int or n < 0 for n in given):
        raise ValueError(f"{given!r:.40} are no sizes")
    return tuple(given)
