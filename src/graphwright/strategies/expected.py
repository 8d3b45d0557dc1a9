"""Eager's results, which strategies that use another runtime have to match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calls.objects import build, flatten_result
from ..calls.snapshots import clone_leaves, layout
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..calls.switches import precision
from ..errors import StrategyFailed


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that eager returns, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Expected:
    """What eager returns for a sample: its tree, its plain values, and a Result for each tensor."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, model: nn.Module, args: Args, kwargs: Kwargs) -> Expected:
        """Run the model eagerly on copies of the sample.

        Raises:
            StrategyFailed: elements of a result overlap, which cannot be laid out again.
        """
        with torch.no_grad():
            outputs, spec = _called(model, args, kwargs)
        return cls(tuple(_described(leaf) for leaf in outputs), spec)

    @property
    def results(self) -> list[ExpectedTensor]:
        """Its tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, ExpectedTensor)]

    def tensors(self, outputs: Any) -> list[Any]:
        """The tensors among the outputs of a call, which must be where eager's are.

        Raises:
            StrategyFailed: it is another tree, or has tensors elsewhere.
        """
        leaves, spec = flatten_result(outputs)
        if spec != self.spec:
            raise StrategyFailed("the compiled model returns another structure")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) is not isinstance(expected, ExpectedTensor):
                raise StrategyFailed("the compiled model returns tensors in other places")
        for tensor, result in zip(tensors, self.results, strict=True):
            if tensor.shape != result.shape:
                raise StrategyFailed(
                    f"the compiled model returns {tuple(tensor.shape)} for {tuple(result.shape)}"
                )
        return tensors

    def restored(self, tensors: Sequence[torch.Tensor]) -> Any:
        """These tensors as eager gives them: dtype, device, strides, and the tree around them."""
        rest = iter(tensors)
        leaves = [_as(next(rest), e) if isinstance(e, ExpectedTensor) else e for e in self.leaves]
        return build(leaves, self.spec)


def laid_out_as(
    model: Callable[..., Any],
    compiled: Callable[..., Any],
    made: Any,
    args: Args,
    kwargs: Kwargs,
) -> Callable[..., Any]:
    """The compiled callable; where its results have other strides than the model's, with these.

    Of `torch.cat` of an empty tensor and another one, as in transformers' caches, eager mode makes
    a contiguous tensor, and Inductor one with the strides of the other.

    Args:
        model: is called once, with copies of the arguments, in the caller's gradient mode.
        compiled: computes the same.
        made: what it has returned for these arguments.
        args: of the sample.
        kwargs: likewise.

    Raises:
        StrategyFailed: elements of such a result overlap, which cannot be laid out again.
    """
    mine, spec = flatten_result(made)
    theirs, eagers_spec = _called(model, args, kwargs)
    if spec != eagers_spec:
        return compiled
    results = {
        number: _described(wanted)
        for number, (leaf, wanted) in enumerate(zip(mine, theirs, strict=True))
        if _differ_in_layout(leaf, wanted)
    }
    if not results:
        return compiled

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        leaves, found = flatten_result(result)
        if found != spec:
            return result
        for number, wanted in results.items():
            leaves[number] = _laid_out(leaves[number], wanted)
        return build(leaves, spec)

    return laid_out


def tf32_allowed() -> bool:
    """Whether torch's own switches let both products and convolutions on CUDA use TF32."""
    return all(precision("cuda", kind) == "tf32" for kind in ("matmul", "conv"))


def _called(
    function: Callable[..., Any], args: Args, kwargs: Kwargs
) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of what it returns for copies of the arguments, and their tree."""
    leaves, spec = flatten(args, kwargs)
    mine, named = unflatten(clone_leaves(leaves), spec)
    return flatten_result(function(*mine, **named))


def _differ_in_layout(a: Any, b: Any) -> bool:
    """Whether two results are alike but for strides that matter."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return alike and a.numel() > 0 and layout(a) != layout(b)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    reach = 0
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride <= reach:
                raise StrategyFailed("elements of a result overlap in memory")
            reach += stride * (size - 1)
    return ExpectedTensor(leaf.shape, leaf.stride(), leaf.dtype, leaf.device)


def _laid_out(tensor: torch.Tensor, wanted: ExpectedTensor) -> torch.Tensor:
    """The same values with eager's strides; for another shape, its dimensions in eager's order."""
    if tensor.shape == wanted.shape:
        return _as(tensor, wanted)
    steps, step = [0] * tensor.dim(), 1
    for axis in sorted(range(tensor.dim()), key=lambda axis: (wanted.stride[axis], -axis)):
        steps[axis], step = step, step * max(1, tensor.shape[axis])
    if list(tensor.stride()) == steps:
        return tensor
    made = torch.empty_strided(tensor.shape, steps, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _as(tensor: torch.Tensor, expected: ExpectedTensor) -> torch.Tensor:
    tensor = tensor.to(device=expected.device, dtype=expected.dtype)
    if tensor.stride() == expected.stride:
        return tensor
    # An expanded result of eager's is stored once.
    once = tensor[tuple(slice(1 if stride == 0 else None) for stride in expected.stride)]
    laid = torch.empty_strided(
        once.shape, expected.stride, dtype=expected.dtype, device=expected.device
    )
    return laid.copy_(once).as_strided(expected.shape, expected.stride)
