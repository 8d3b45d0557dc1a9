"""Convolutions whose windows lie side by side (ViT's patches), as linear layers."""

from __future__ import annotations

import torch
from torch import fx

from .convolutions import Convolution, convolution_of
from .layout import HALVES
from .nodes import add_constant, calls, replace, value_of
from .passes import Change, Pass

aten = torch.ops.aten


def _patches(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """A convolution that takes each pixel once is a product of matrices.

    In half precision alone: cuDNN may compute float32 in TF32, cuBLAS not.
    """
    found = []
    for node in calls(graph, aten.conv2d.default):
        conv = convolution_of(graph, node)
        if conv is not None and conv.weight.dtype in HALVES and _side_by_side(conv):
            found.append(_as_linear(graph, conv))
    return found


def _side_by_side(conv: Convolution) -> bool:
    window, x = list(conv.weight.shape[2:]), value_of(conv.x)
    if x is None or conv.groups != 1 or conv.stride != window or max(window) == 1:
        return False
    whole = all(size % step == 0 for size, step in zip(x.shape[2:], window, strict=True))
    return whole and not any(conv.padding) and conv.dilation == [1, 1]


def _as_linear(graph: fx.GraphModule, conv: Convolution) -> Change:
    """Each window as a row: its channels last if they lie side by side, else first."""
    x, result = value_of(conv.x), value_of(conv.node)
    assert x is not None
    assert result is not None
    images, channels = x.shape[:2]
    outputs, _, height, width = conv.weight.shape
    down, across = result.shape[2:]
    last = x.stride(1) == 1
    weight = conv.weight.permute(0, 2, 3, 1) if last else conv.weight
    turned = add_constant(graph, weight.reshape(outputs, -1), conv.node)
    split = [images, channels, down, height, across, width]
    order = [0, 2, 4, 3, 5, 1] if last else [0, 2, 4, 1, 3, 5]
    name, call = conv.node.name, graph.graph.call_function
    with graph.graph.inserting_before(conv.node):
        # A dimension that is split is a view whatever the strides.
        windows = call(aten.unflatten.int, (conv.x, 3, [across, width]))
        windows = call(aten.unflatten.int, (windows, 2, [down, height]))
        windows.meta["val"] = x.new_empty(split)
        windows = call(aten.permute.default, (windows, order))
        rows = call(aten.reshape.default, (windows, [-1, channels * height * width]))
        rows.meta["val"] = x.new_empty((images * down * across, channels * height * width))
        args = (rows, turned) if conv.bias_node is None else (rows, turned, conv.bias_node)
        product = call(aten.linear.default, args)
        product.meta["val"] = result.new_empty((images * down * across, outputs))
        pixels = call(aten.view.default, (product, [images, down, across, outputs]))
    replace(graph, conv.node, aten.permute.default, (pixels, [0, 3, 1, 2]))
    return Change("windows side by side as a linear layer", (name,))


PATCHES = Pass("patches", _patches, devices=("cuda",), starts=(aten.conv2d.default,))
