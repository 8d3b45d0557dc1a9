"""A max pool with the ReLU before it."""

from __future__ import annotations

import torch
from torch import fx

from .convolutions import forget
from .nodes import arguments, calls, inputs, is_op, only_user, replace, value_of
from .passes import Change, Pass

aten = torch.ops.aten


def _pools(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """A max pool of what ReLU has left: in one pass over memory where nothing else wants that."""
    found = []
    for node in calls(graph, aten.max_pool2d.default):
        given = arguments(node)
        relu, x = given["self"], value_of(given["self"])
        if not is_op(relu, aten.relu.default) or x is None or x.dim() != 4:
            continue
        if given["ceil_mode"] or any(step != 1 for step in given["dilation"]):
            continue
        window = tuple(
            list(given[name]) * (2 if len(given[name]) == 1 else 1)
            for name in ("kernel_size", "stride", "padding")
        )
        # A ReLU behind a convolution costs nothing there, and once more nothing here.
        alone = only_user(relu) is node or only_user(relu, aten.max_pool2d.default) is node
        source = relu
        if alone and not is_op(inputs(relu)[0], aten.conv2d.default):
            source = inputs(relu)[0]
        operator = torch.ops.graphwright.relu_max_pool2d.default
        replace(graph, node, operator, (source, *window))
        found.append(Change("relu and max pool", (relu.name, node.name)))
        forget(graph, relu)
    return found


POOLS = Pass("pools", _pools, devices=("cuda",), starts=(aten.max_pool2d.default,))
