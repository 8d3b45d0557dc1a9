"""Linear layers: with their activation in one kernel, and several of one input as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .nodes import (
    add_constant,
    arguments,
    calls,
    constant,
    inputs,
    is_op,
    only_user,
    replace,
    value_of,
)
from .passes import Change, Pass

aten = torch.ops.aten


def _activations(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Linear + bias + ReLU or tanh-GELU by cuBLASLt; other GELU and SiLU by a kernel of ours."""
    found = []
    for node in calls(graph, aten.linear.default):
        given = arguments(node)
        weight, bias = constant(graph, given["weight"]), constant(graph, given["bias"])
        x, result = value_of(given["input"]), value_of(node)
        user = only_user(node, aten.relu.default, aten.gelu.default, aten.silu.default)
        if user is None or weight is None or bias is None or x is None or result is None:
            continue
        if x.dtype != weight.dtype or bias.dtype != weight.dtype or not result.numel():
            continue
        named = (node.name, user.name)
        exact = is_op(user, aten.gelu.default) and arguments(user)["approximate"] == "none"
        if exact or is_op(user, aten.silu.default):
            # One kernel for product and bias would leave the bias to the product.
            with graph.graph.inserting_before(node):
                product = graph.graph.call_function(
                    aten.linear.default, (given["input"], given["weight"])
                )
            product.meta["val"] = result
            if exact:
                replace(
                    graph,
                    user,
                    torch.ops.graphwright.bias_gelu.default,
                    (product, given["bias"], "none"),
                )
                found.append(Change("bias and gelu", named))
            else:
                operator = torch.ops.graphwright.bias_silu.default
                replace(graph, user, operator, (product, given["bias"]))
                found.append(Change("bias and silu", named))
            graph.graph.erase_node(node)
            continue
        turned = add_constant(graph, weight.t(), node)
        with graph.graph.inserting_before(user):
            rows = given["input"]
            if x.dim() != 2:
                rows = graph.graph.call_function(aten.reshape.default, (rows, [-1, x.shape[-1]]))
                rows.meta["val"] = x.reshape(-1, x.shape[-1])
            new = graph.graph.call_function(
                aten._addmm_activation.default,
                (given["bias"], rows, turned),
                {"use_gelu": is_op(user, aten.gelu.default)},
            )
            new.meta["val"] = result.new_empty(
                (result.numel() // result.shape[-1], result.shape[-1])
            )
            if x.dim() != 2:
                new = graph.graph.call_function(aten.view.default, (new, list(result.shape)))
                new.meta["val"] = result
        user.replace_all_uses_with(new)
        graph.graph.erase_node(user)
        graph.graph.erase_node(node)
        found.append(Change("linear and activation by cuBLASLt", named))
    return found


def _projections(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Several linear layers of one input (queries, keys, values; gate and up) as one."""
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in calls(graph, aten.linear.default):
        if isinstance(inputs(node)[0], fx.Node):
            by_input.setdefault(inputs(node)[0], []).append(node)
    found = []
    for source, nodes in by_input.items():
        kinds: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            given = arguments(node)
            weight, bias = constant(graph, given["weight"]), constant(graph, given["bias"])
            if weight is None or (given["bias"] is not None and bias is None):
                continue
            if bias is not None and bias.dtype != weight.dtype:
                continue
            kinds.setdefault((weight.dtype, weight.device, bias is None), []).append(node)
        for same in kinds.values():
            if len(same) > 1:
                found.append(_as_one(graph, source, same))
    return found


def _as_one(graph: fx.GraphModule, source: fx.Node, nodes: list[fx.Node]) -> Change:
    first = nodes[0]
    given = [arguments(node) for node in nodes]
    weights = [constant(graph, a["weight"]) for a in given]
    biases = [constant(graph, a["bias"]) for a in given]
    weight = torch.cat([w for w in weights if w is not None])
    args: list[fx.Node] = [source, add_constant(graph, weight, first)]
    if biases[0] is not None:
        bias = torch.cat([b for b in biases if b is not None])
        args.append(add_constant(graph, bias, first))
    x, sizes = value_of(source), [w.shape[0] for w in weights if w is not None]
    assert x is not None
    with graph.graph.inserting_before(first):
        merged = graph.graph.call_function(aten.linear.default, tuple(args))
        merged.meta["val"] = x.new_empty((*x.shape[:-1], sum(sizes)))
        begin = 0
        for node, size in zip(nodes, sizes, strict=True):
            part = graph.graph.call_function(aten.narrow.default, (merged, -1, begin, size))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            begin += size
    names = tuple(node.name for node in nodes)
    for node in nodes:
        graph.graph.erase_node(node)
    return Change("several linear layers as one", names)


def _gates(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """silu(gate) * up, in one pass over memory."""
    found = []
    for node in calls(graph, aten.mul.Tensor):
        for gated, up in (inputs(node)[:2], inputs(node)[1::-1]):
            a, b = value_of(gated), value_of(up)
            if is_op(gated, aten.silu.default) and only_user(gated) is node and a is not None:
                if b is None or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
                    continue
                names = gated.name, node.name
                replace(graph, node, torch.ops.graphwright.swiglu.default, (inputs(gated)[0], up))
                graph.graph.erase_node(gated)
                found.append(Change("silu and product", names))
                break
    return found


GATES = Pass("gates", _gates, devices=("cuda",))
ACTIVATIONS = Pass("activations", _activations, devices=("cuda",))
PROJECTIONS = Pass("projections", _projections, devices=("cuda",))
