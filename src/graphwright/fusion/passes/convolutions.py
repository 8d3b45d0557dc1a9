"""Convolutions in a graph: their arguments, and the sum that follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..nodes import arguments, constant, inputs, is_op, only_user, value_of

aten = torch.ops.aten

_ADD = (aten.add.Tensor,)


@dataclass(frozen=True)
class Convolution:
    """A 2-d convolution with constant weights."""

    node: fx.Node
    x: fx.Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_node: fx.Node
    bias_node: fx.Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def how(self) -> tuple[list[int], list[int], list[int], int]:
        """Stride, padding, dilation and groups, in the order of operations' arguments."""
        return self.stride, self.padding, self.dilation, self.groups


def convolution_of(graph: fx.GraphModule, node: Any) -> Convolution | None:
    """The convolution that a node is, of images in a batch."""
    if not is_op(node, aten.conv2d.default):
        return None
    given = arguments(node)
    weight, bias = constant(graph, given["weight"]), constant(graph, given["bias"])
    x, result = value_of(given["input"]), value_of(node)
    if (
        weight is None
        or x is None
        or result is None
        or (given["bias"] is not None and bias is None)
    ):
        return None
    if x.dim() != 4 or x.dtype != weight.dtype or not x.numel() or not result.numel():
        return None
    stride, padding, dilation = (
        list(given[name]) * (2 if len(given[name]) == 1 else 1)
        for name in ("stride", "padding", "dilation")
    )
    return Convolution(
        node,
        given["input"],
        weight,
        bias,
        given["weight"],
        given["bias"],
        stride,
        padding,
        dilation,
        given["groups"],
    )


def added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The addition of another tensor of the same shape to a node, its only use; and that tensor."""
    add = only_user(node, *_ADD)
    if add is None or add.kwargs or len(inputs(add)) != 2:
        return None
    other = inputs(add)[1] if inputs(add)[0] is node else inputs(add)[0]
    mine, theirs = value_of(node), value_of(other)
    if mine is None or theirs is None or not isinstance(other, fx.Node):
        return None
    same = mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return (add, other) if same and mine.device == theirs.device else None


def forget(graph: fx.GraphModule, *nodes: fx.Node) -> None:
    """Erase what was replaced, the last first."""
    for node in nodes:
        if not node._erased and not node.users and node.op != "output":
            sources = node.all_input_nodes
            graph.graph.erase_node(node)
            forget(graph, *(s for s in sources if s.op in ("call_function", "get_attr")))


def without_bias(graph: fx.GraphModule, conv: Convolution) -> fx.Node:
    """The same convolution without its bias, in front of it."""
    args = (conv.x, conv.weight_node, None, *conv.how)
    with graph.graph.inserting_before(conv.node):
        bare = graph.graph.call_function(aten.conv2d.default, args)
    bare.meta["val"] = conv.node.meta["val"]
    return bare
