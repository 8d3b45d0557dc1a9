"""Residual connections with the norm behind them, and norms that are written out by hand."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .nodes import arguments, calls, constant, inputs, is_op, value_of
from .passes import Change, Pass

aten = torch.ops.aten


def _residuals(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Layer norm and RMS norm of a sum, with the sum, in one pass over memory."""
    found = []
    for node in calls(graph, aten.layer_norm.default):
        given = arguments(node)
        if _is_last_dimension(given["input"], given["normalized_shape"]):
            change = _with_sum(graph, node, given["input"], given["weight"], given["eps"], given)
            found += [] if change is None else [change]
    for node in calls(graph, aten.rms_norm.default):
        given = arguments(node)
        if given["eps"] is not None and _is_last_dimension(
            given["input"], given["normalized_shape"]
        ):
            change = _with_sum(graph, node, given["input"], given["weight"], given["eps"], None)
            found += [] if change is None else [change]
    return found


def _is_last_dimension(node: Any, shape: Any) -> bool:
    value = value_of(node)
    return value is not None and value.dim() > 0 and list(shape) == [value.shape[-1]]


def _with_sum(
    graph: fx.GraphModule,
    node: fx.Node,
    total: Any,
    weight: Any,
    eps: float,
    layer_norm: dict[str, Any] | None,
) -> Change | None:
    if not is_op(total, aten.add.Tensor) or total.kwargs or len(inputs(total)) != 2:
        return None
    x, residual = value_of(inputs(total)[0]), value_of(inputs(total)[1])
    if x is None or residual is None or x.shape != residual.shape or x.dtype != residual.dtype:
        return None
    # At the sum's place: what else uses it comes after.
    bias = None if layer_norm is None else layer_norm["bias"]
    later = [row for row in (weight, bias) if row is not None]
    for row in later:
        value = constant(graph, row)
        if value is None or value.dtype != x.dtype:
            return None
    with graph.graph.inserting_before(total):
        rows = [graph.graph.get_attr(n.target) for n in later]
        for row, old in zip(rows, later, strict=True):
            row.meta = dict(old.meta)
        places = iter(rows)
        at_hand = next(places) if weight is not None else None
        if layer_norm is not None:
            shift = next(places) if bias is not None else None
            both = graph.graph.call_function(
                torch.ops.graphwright.add_layer_norm.default,
                (inputs(total)[0], inputs(total)[1], at_hand, shift, eps),
            )
        else:
            both = graph.graph.call_function(
                torch.ops.graphwright.add_rms_norm.default,
                (inputs(total)[0], inputs(total)[1], at_hand, eps),
            )
        norm = graph.graph.call_function(operator.getitem, (both, 0))
        sum_ = graph.graph.call_function(operator.getitem, (both, 1))
    norm.meta["val"], sum_.meta["val"] = node.meta["val"], total.meta["val"]
    names = (total.name, node.name)
    node.replace_all_uses_with(norm)
    graph.graph.erase_node(node)
    total.replace_all_uses_with(sum_)
    graph.graph.erase_node(total)
    return Change(f"sum and {'layer' if layer_norm is not None else 'rms'} norm", names)


def _written_out(graph: fx.GraphModule, device: torch.device) -> list[Change]:
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
    if value is None or source is None or not given["keepdim"] or given["dtype"] is not None:
        return None
    if list(given["dim"]) not in ([-1], [source.dim() - 1]):
        return None
    by_power = is_op(square, aten.pow.Tensor_Scalar) and inputs(square)[1] == 2
    by_product = is_op(square, aten.mul.Tensor) and inputs(square)[0] is inputs(square)[1]
    squared = by_power or by_product or is_op(square, aten.square.default)
    return eps if squared and inputs(square)[0] is wide else None


def _through_conversion(node: Any) -> Any:
    """What was converted to another dtype and nothing else."""
    if is_op(node, aten.to.dtype, aten.to.dtype_layout):
        before, after = value_of(inputs(node)[0]), value_of(node)
        if before is not None and after is not None and before.device == after.device:
            return inputs(node)[0]
    return node


NORMS = Pass("norms", _written_out)
RESIDUALS = Pass("residuals", _residuals, devices=("cuda",))
