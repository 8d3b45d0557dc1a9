"""Norms, and residual connections with the norm behind them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..nodes import arguments, calls, constant, inputs, is_op, replace, value_of
from .base import Change, Pass

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
    if not _are_constants(graph, later, x.dtype):
        return None
    with graph.graph.inserting_before(total):
        copies = {old: graph.graph.get_attr(old.target) for old in later}
        for old, new in copies.items():
            new.meta = dict(old.meta)
        given = [*inputs(total), copies.get(weight)]
        if layer_norm is None:
            kind, op = "rms", torch.ops.graphwright.add_rms_norm.default
        else:
            kind, op = "layer", torch.ops.graphwright.add_layer_norm.default
            given.append(copies.get(bias))
        both = graph.graph.call_function(op, (*given, eps))
        norm = graph.graph.call_function(operator.getitem, (both, 0))
        sum_ = graph.graph.call_function(operator.getitem, (both, 1))
    norm.meta["val"], sum_.meta["val"] = node.meta["val"], total.meta["val"]
    names = (total.name, node.name)
    node.replace_all_uses_with(norm)
    graph.graph.erase_node(node)
    total.replace_all_uses_with(sum_)
    graph.graph.erase_node(total)
    return Change(f"sum and {kind} norm", names)


def _are_constants(graph: fx.GraphModule, rows: list[fx.Node], dtype: torch.dtype) -> bool:
    """Whether weight and bias are constants of a precision."""
    known = [constant(graph, row) for row in rows]
    return all(row is not None and row.dtype == dtype for row in known)


def _norms(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Layer norms of no sum, by a kernel of ours."""
    found = []
    for node in calls(graph, aten.layer_norm.default):
        given = arguments(node)
        x = value_of(given["input"])
        if x is None or not _is_last_dimension(given["input"], given["normalized_shape"]):
            continue
        rows = [row for row in (given["weight"], given["bias"]) if row is not None]
        if not _are_constants(graph, rows, x.dtype):
            continue
        args = given["input"], given["weight"], given["bias"], given["eps"]
        name = node.name
        replace(graph, node, torch.ops.graphwright.layer_norm.default, args)
        found.append(Change("layer norm", (name,)))
    return found


NORMS = Pass("norms", _norms, devices=("cuda",), starts=(aten.layer_norm.default,))
RESIDUALS = Pass(
    "residuals",
    _residuals,
    devices=("cuda",),
    starts=(aten.layer_norm.default, aten.rms_norm.default),
)
