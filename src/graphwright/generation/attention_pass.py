"""A pass over a traced step: our operator in the place of attention of one query."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ops.fused.decode_attention import applies


def use_decode_attention(graph: fx.GraphModule) -> int:
    """Put our operator in the place of attention of one query; gives how often.

    Args:
        graph: as TorchDynamo has traced it; it is changed.
    """
    count = 0
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.nn.functional.scaled_dot_product_attention
    ):
        arguments = _attention(*node.args, **node.kwargs)
        if arguments is None:
            continue
        with graph.graph.inserting_before(node):
            ours = graph.graph.call_function(
                torch.ops.graphwright.decode_attention.default, arguments
            )
        ours.meta = dict(node.meta)
        node.replace_all_uses_with(ours)
        graph.graph.erase_node(node)
        count += 1
    # What nobody needs any more stays: fx takes writes in place for needless, too.
    graph.recompile()
    return count


def _attention(
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...] | None:
    """What our operator takes in the place of PyTorch's; None if it does not compute the same."""
    if dropout_p or is_causal:
        return None
    key, value = _unrepeated(key), _unrepeated(value)
    asked, keys, values, mask = map(_value_of, (query, key, value, attn_mask))
    scale = asked.shape[-1] ** -0.5 if scale is None else scale
    if not applies(asked, keys, values, mask, scale):
        return None
    return query, key, value, attn_mask, scale


def _unrepeated(node: fx.Node) -> fx.Node:
    """Keys or values, before each was repeated for all heads that share them."""
    parts = [node]
    for name in ("reshape", "expand"):
        if parts[-1].op != "call_method" or parts[-1].target != name:
            return node
        source = parts[-1].args[0]
        assert isinstance(source, fx.Node)
        parts.append(source)
    repeated, spread, grouped = map(_value_of, parts)
    batch, groups, *rest = grouped.shape
    if grouped.dim() != 5 or spread.shape != (batch, groups, spread.shape[2], *rest[1:]):
        return node
    if rest[0] != 1 or repeated.shape != (batch, groups * spread.shape[2], *rest[1:]):
        return node
    with node.graph.inserting_after(parts[-1]):
        found = node.graph.call_method("squeeze", (parts[-1], 2))
    found.meta["example_value"] = grouped.squeeze(2)
    return found


def _value_of(node: fx.Node | None) -> Any:
    """The tensor without values that TorchDynamo has traced a node with."""
    return None if node is None else node.meta["example_value"]
