"""Pooling: mean and factor of each channel (squeeze and excitation), and ReLU with max pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..nodes import arguments, calls, inputs, is_op, only_user, replace, value_of
from .base import Change, Pass
from .convolutions import convolution_of, forget, without_bias
from .layout import wants_channels_last

aten = torch.ops.aten

# A kernel's program reads all pixels of some channels; for more pixels PyTorch uses several.
_MOST_PIXELS = 4096
_GATES: dict[Any, str] = {
    aten.sigmoid.default: "sigmoid",
    aten.hardsigmoid.default: "hardsigmoid",
}


def _means(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """The mean of each channel of images that are in channels_last."""
    found = []
    for node in calls(graph, aten.adaptive_avg_pool2d.default, aten.mean.dim):
        x, result = value_of(inputs(node)[0]), value_of(node)
        if x is None or result is None or x.dim() != 4 or not wants_channels_last(x):
            continue
        if x.shape[2] * x.shape[3] > _MOST_PIXELS:
            continue
        if not x.numel() or tuple(result.shape) != (*x.shape[:2], 1, 1) or x.dtype != result.dtype:
            continue
        if is_op(node, aten.mean.dim) and {d % 4 for d in arguments(node)["dim"] or ()} != {2, 3}:
            continue
        name = node.name
        replace(graph, node, torch.ops.graphwright.channel_mean.default, (inputs(node)[0],))
        found.append(Change("mean of each channel", (name,)))
    return found


def _gates(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """An image times sigmoid(a factor a channel), with the bias of what makes the factors."""
    found = []
    for node in calls(graph, aten.mul.Tensor):
        for x, gate in (inputs(node)[:2], inputs(node)[1::-1]):
            change = _gated(graph, node, x, gate)
            if change is not None:
                found.append(change)
                break
    return found


def _gated(graph: fx.GraphModule, node: fx.Node, x: Any, gate: Any) -> Change | None:
    image = value_of(x)
    if image is None or only_user(gate) is not node or not is_op(gate, *_GATES):
        return None
    if not _is_factor_a_channel(image, value_of(gate), value_of(node)):
        return None
    source = inputs(gate)[0]
    gone, bias = [gate, node], None
    conv = convolution_of(graph, source)
    alone = conv is not None and only_user(source) is gate
    if conv is not None and alone and conv.bias is not None and conv.bias.dtype == image.dtype:
        gone, bias = [source, *gone], conv.bias_node
        source = without_bias(graph, conv)
    names = tuple(each.name for each in gone)
    args = x, source, bias, _GATES[gate.target]
    replace(graph, node, torch.ops.graphwright.channel_gate.default, args)
    forget(graph, *reversed(gone))
    return Change("a factor a channel" + (" with its bias" if bias is not None else ""), names)


def _is_factor_a_channel(
    image: torch.Tensor, factor: torch.Tensor | None, result: torch.Tensor | None
) -> bool:
    """Whether an image in channels_last times a factor for each of its channels is a result."""
    if factor is None or result is None or image.dim() != 4 or not wants_channels_last(image):
        return False
    if factor.shape != (*image.shape[:2], 1, 1) or image.shape != result.shape:
        return False
    return image.dtype == factor.dtype == result.dtype and image.numel() > 0


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
        # A ReLU after a convolution is fused with that, and repeating it here costs nothing.
        alone = only_user(relu) is node or only_user(relu, aten.max_pool2d.default) is node
        source = relu
        if alone and not is_op(inputs(relu)[0], aten.conv2d.default):
            source = inputs(relu)[0]
        operator = torch.ops.graphwright.relu_max_pool2d.default
        replace(graph, node, operator, (source, *window))
        found.append(Change("relu and max pool", (relu.name, node.name)))
        forget(graph, relu)
    return found


MEANS = Pass(
    "channel_means",
    _means,
    devices=("cuda",),
    starts=(aten.adaptive_avg_pool2d.default, aten.mean.dim),
)
CHANNEL_GATES = Pass("channel_gates", _gates, devices=("cuda",), starts=tuple(_GATES))
POOLS = Pass("pools", _pools, devices=("cuda",), starts=(aten.max_pool2d.default,))
