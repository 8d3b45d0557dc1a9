"""Operations that models write out by hand: RMS norm, and GELU with tanh."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..nodes import arguments, calls, constant, inputs, is_op, replace, value_of
from .base import Change, Pass

aten = torch.ops.aten


def _by_hand(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Norms and activations."""
    return [*_rms_norms(graph), *_gelus(graph)]


def _rms_norms(graph: fx.GraphModule) -> list[Change]:
    """X * rsqrt(mean(x²) + eps) * weight, in float32 or in x's dtype, as PyTorch's rms_norm."""
    found = []
    for node in calls(graph, aten.mul.Tensor):
        parts = _rms_norm(graph, node)
        if parts is not None:
            x, weight, eps, names = parts
            value = value_of(x)
            assert value is not None
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(
                    aten.rms_norm.default, (x, [value.shape[-1]], weight, eps)
                )
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
            found.append(Change("rms norm written out by hand", names))
    return found


def _rms_norm(
    graph: fx.GraphModule, node: fx.Node
) -> tuple[Any, Any, float, tuple[str, ...]] | None:
    """What a product is the RMS norm of: (x, weight, eps, names); None if it is none."""
    for weight, scaled in (inputs(node)[:2], inputs(node)[1::-1]):
        row, result = constant(graph, weight), value_of(node)
        if row is None or row.dim() != 1 or result is None or row.dtype != result.dtype:
            continue
        product = _through_conversion(scaled)
        if not is_op(product, aten.mul.Tensor):
            continue
        for wide, root in (inputs(product)[:2], inputs(product)[1::-1]):
            eps = _eps_of_root(root, wide)
            if eps is None:
                continue
            x = _through_conversion(wide)
            value = value_of(x)
            if value is None or value.dtype != result.dtype or value.shape != result.shape:
                continue
            if row.shape != value.shape[-1:]:
                continue
            return x, weight, eps, (root.name, product.name, node.name)
    return None


def _eps_of_root(root: Any, wide: Any) -> float | None:
    """The eps of rsqrt(mean(wide², -1, keepdim=True) + eps)."""
    if not is_op(root, aten.rsqrt.default):
        return None
    inner = inputs(root)[0]
    if not (is_op(inner, aten.add.Tensor) and len(inputs(inner)) == 2 and not inner.kwargs):
        return None
    mean, eps = inputs(inner)
    if not is_op(mean, aten.mean.dim) or not isinstance(eps, float):
        return None
    given = arguments(mean)
    square, value = given["self"], value_of(mean)
    source = value_of(square)
    if not _is_square(square) or inputs(square)[0] is not wide:
        return None
    if value is None or source is None or not given["keepdim"] or given["dtype"] is not None:
        return None
    if list(given["dim"]) not in ([-1], [source.dim() - 1]):
        return None
    return eps


def _is_square(node: Any) -> bool:
    """Whether a node is the square of its first input."""
    if is_op(node, aten.pow.Tensor_Scalar):
        return bool(inputs(node)[1] == 2)
    if is_op(node, aten.mul.Tensor):
        return inputs(node)[0] is inputs(node)[1]
    return is_op(node, aten.square.default)


def _through_conversion(node: Any) -> Any:
    """What was converted to another dtype and nothing else."""
    if is_op(node, aten.to.dtype, aten.to.dtype_layout):
        before, after = value_of(inputs(node)[0]), value_of(node)
        if before is None or after is None or before.device != after.device:
            return node
        if before.is_floating_point() and after.is_floating_point():
            return inputs(node)[0]
    return node


def _gelus(graph: fx.GraphModule) -> list[Change]:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks and Gimpel, 2016)."""
    found = []
    for node in calls(graph, aten.mul.Tensor):
        for half, one in (inputs(node)[:2], inputs(node)[1::-1]):
            x = _times(half, 0.5)
            tanh = _plus(one, 1.0)
            if x is None or not is_op(tanh, aten.tanh.default):
                continue
            inner = _times(inputs(tanh)[0], math.sqrt(2.0 / math.pi))
            if not is_op(inner, aten.add.Tensor) or inner.kwargs or x not in inputs(inner):
                continue
            cube = inputs(inner)[1] if inputs(inner)[0] is x else inputs(inner)[0]
            power = _times(cube, 0.044715)
            if not is_op(power, aten.pow.Tensor_Scalar) or inputs(power) != (x, 3.0):
                continue
            names = (tanh.name, node.name)
            replace(graph, node, aten.gelu.default, (x,), approximate="tanh")
            found.append(Change("gelu written out by hand", names))
            break
    return found


def _times(node: Any, number: float) -> Any:
    """What is multiplied by a number; None if nothing is."""
    if not is_op(node, aten.mul.Tensor, aten.mul.Scalar) or node.kwargs:
        return None
    x, factor = inputs(node)
    return x if isinstance(factor, int | float) and math.isclose(factor, number) else None


def _plus(node: Any, number: float) -> Any:
    """What a number is added to; None if nothing is."""
    if not is_op(node, aten.add.Tensor, aten.add.Scalar) or node.kwargs or len(inputs(node)) != 2:
        return None
    x, added = inputs(node)
    return x if isinstance(added, int | float) and added == number else None


BY_HAND = Pass("by_hand", _by_hand, starts=(aten.mul.Tensor,))
