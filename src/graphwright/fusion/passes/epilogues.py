"""Convolutions with what follows them: bias, activation, sum; by cuDNN, oneDNN or our kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from ...ops.fused.operands import LARGEST_WINDOW
from ..nodes import add_constant, arguments, calls, is_op, only_user, replace, value_of
from .base import Change, Pass
from .convolutions import Convolution, added, convolution_of, forget, without_bias
from .layout import HALVES, wants_channels_last
from .nans import Known, keeps_nan

aten = torch.ops.aten
# Activations that our kernels have, by operation.
_KERNELS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.hardtanh.default: "relu6",
}
# What may follow a convolution, as oneDNN names it, with its numbers and its algorithm. ReLU and
# others that compare are not among them, since oneDNN turns NaN into 0: they work in place instead.
_Attributes = tuple[str, list[float], str]
_ONEDNN: dict[Any, Callable[[dict[str, Any]], _Attributes]] = {
    aten.sigmoid.default: lambda a: ("sigmoid", [], ""),
    aten.tanh.default: lambda a: ("tanh", [], ""),
    aten.silu.default: lambda a: ("swish", [], ""),
    aten.hardswish.default: lambda a: ("hardswish", [], ""),
    aten.leaky_relu.default: lambda a: ("leaky_relu", [a["negative_slope"]], ""),
    aten.gelu.default: lambda a: ("gelu", [], a["approximate"]),
}


def on_gpu(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Each convolution in the first way that it can be computed, with what follows it."""
    found = []
    kept: Known = {}
    for node in calls(graph, aten.conv2d.default):
        conv = convolution_of(graph, node)
        if conv is None or not _cudnn_works(conv):
            continue
        for way in (_depthwise, partial(_with_relu, kept), _pointwise, _with_kernel):
            change = way(graph, conv)
            if change is not None:
                found.append(change)
                break
    return found


def _with_relu(kept: Known, graph: fx.GraphModule, conv: Convolution) -> Change | None:
    """Convolution + bias (+ another tensor) + ReLU as one kernel of cuDNN, if that keeps NaN."""
    relu, adds = only_user(conv.node, aten.relu.default), added(conv.node)
    gone = [conv.node]
    if relu is None and adds is not None:
        relu = only_user(adds[0], aten.relu.default)
        gone.append(adds[0])
    if relu is None:
        return None
    gone.append(relu)
    names = tuple(node.name for node in gone)
    if not _cudnn_keeps_nan(kept, conv, adds is not None):
        return None
    if adds is None:
        args: tuple[Any, ...] = conv.x, conv.weight_node, conv.bias_node, *conv.how
        replace(graph, relu, aten.cudnn_convolution_relu.default, args)
    else:
        args = conv.x, conv.weight_node, adds[1], 1.0, conv.bias_node, *conv.how
        replace(graph, relu, aten.cudnn_convolution_add_relu.default, args)
    forget(graph, *reversed(gone))
    return Change(f"convolution{', sum' if adds else ''} and relu by cuDNN", names)


def _cudnn_keeps_nan(kept: Known, conv: Convolution, summed: bool) -> bool:
    """Whether the kernel that cuDNN takes for this very convolution does."""
    x, (weight, bias, how) = value_of(conv.x), (conv.weight, conv.bias, conv.how)
    assert x is not None

    def eager(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = aten.conv2d.default(x, weight, bias, *how).relu()
        return result

    def fused(x: torch.Tensor) -> torch.Tensor:
        if not summed:
            return torch.cudnn_convolution_relu(x, weight, bias, *how)
        other = torch.zeros_like(aten.conv2d.default(x, weight, None, *how))
        return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *how)

    layouts = tuple(x.stride()), tuple(weight.stride())
    kind = x.shape, x.dtype, weight.shape, bias is None, *layouts, str(how), summed
    if kind not in kept:
        kept[kind] = keeps_nan(x, eager, fused)
    return kept[kind]


def _depthwise(graph: fx.GraphModule, conv: Convolution) -> Change | None:
    """A filter for each channel, with bias and activation, by a kernel of ours."""
    channels, inputs_each, height, width = conv.weight.shape
    if inputs_each != 1 or conv.groups != channels or conv.dilation != [1, 1]:
        return None
    if height * width > LARGEST_WINDOW or not _kernels_work(conv):
        return None
    if not conv.weight.isfinite().all():
        return None  # Times zeros beyond the edge it is NaN here, and nothing elsewhere.
    user, activation = _following(conv.node)
    # The channels of a tap side by side, as those of an image.
    weight = conv.weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    shown = add_constant(graph, weight, conv.node)
    gone = [conv.node] if user is None else [conv.node, user]
    names = tuple(node.name for node in gone)
    args = conv.x, shown, conv.bias_node, conv.stride, conv.padding, activation
    replace(graph, gone[-1], torch.ops.graphwright.depthwise_conv2d.default, args)
    forget(graph, *reversed(gone))
    return Change("depthwise convolution" + (f" and {activation}" if user else ""), names)


def _pointwise(graph: fx.GraphModule, conv: Convolution) -> Change | None:
    """A convolution of single pixels with its bias alone, as a linear layer.

    PyTorch adds a convolution's bias in a pass of its own. In half precision: cuDNN may compute
    float32 in TF32, cuBLAS not.
    """
    if conv.bias_node is None or conv.weight.dtype not in HALVES or conv.groups != 1:
        return None
    if list(conv.weight.shape[2:]) != [1, 1] or conv.stride != [1, 1] or any(conv.padding):
        return None
    if added(conv.node) is not None or _following(conv.node)[0] is not None:
        return None
    result, x = value_of(conv.node), value_of(conv.x)
    assert result is not None
    assert x is not None
    images, outputs, height, width = result.shape
    weight = add_constant(graph, conv.weight.flatten(1), conv.node)
    call, name = graph.graph.call_function, conv.node.name
    with graph.graph.inserting_before(conv.node):
        pixels = call(aten.permute.default, (conv.x, [0, 2, 3, 1]))
        rows = call(aten.reshape.default, (pixels, [-1, x.shape[1]]))
        rows.meta["val"] = x.new_empty((images * height * width, x.shape[1]))
        product = call(aten.linear.default, (rows, weight, conv.bias_node))
        product.meta["val"] = result.new_empty((images * height * width, outputs))
        pixels = call(aten.view.default, (product, [images, height, width, outputs]))
    replace(graph, conv.node, aten.permute.default, (pixels, [0, 3, 1, 2]))
    return Change("convolution of single pixels as a linear layer", (name,))


def _with_kernel(graph: fx.GraphModule, conv: Convolution) -> Change | None:
    """A convolution without its bias; that, a sum and an activation in one pass over memory."""
    if conv.bias_node is None or not _kernels_work(conv):
        return None
    adds = added(conv.node)
    end, other = (conv.node, None) if adds is None else adds
    user, activation = _following(end)
    gone = list(dict.fromkeys([conv.node, end, end if user is None else user]))
    names = tuple(node.name for node in gone)
    args = (without_bias(graph, conv), conv.bias_node, other, activation)
    replace(graph, gone[-1], torch.ops.graphwright.channel_activation.default, args)
    forget(graph, *reversed(gone))
    what = "bias" + (", sum" if other is not None else "")
    return Change(what + (f" and {activation}" if user is not None else ""), names)


def _following(node: fx.Node) -> tuple[fx.Node | None, str]:
    """The activation that is a node's only use, and its name in our kernels."""
    user = only_user(node, *_KERNELS)
    name = None if user is None else _activation_of(user)
    return (None, "none") if name is None else (user, name)


def _kernels_work(conv: Convolution) -> bool:
    """Whether it will run in channels_last, as our kernels have to have it."""
    if conv.bias is not None and conv.bias.dtype != conv.weight.dtype:
        return False
    last = conv.weight.is_contiguous(memory_format=torch.channels_last)
    return last and wants_channels_last(conv.weight)


def _activation_of(node: fx.Node) -> str | None:
    """The name of an activation that our kernel has."""
    given = arguments(node)
    if is_op(node, aten.hardtanh.default) and (given["min_val"], given["max_val"]) != (0, 6):
        return None
    if is_op(node, aten.gelu.default) and given["approximate"] == "tanh":
        return "gelu_tanh"
    return _KERNELS[node.target]


def _cudnn_works(conv: Convolution) -> bool:
    return (
        conv.weight.is_cuda
        and conv.weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.version.hip is None
        and torch.backends.cudnn.is_available()
        and torch.backends.cudnn.enabled
    )


def _epilogues(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Convolutions with what follows them."""
    return (by_onednn if device.type == "cpu" else on_gpu)(graph, device)


def _onednn_works(conv: Convolution) -> bool:
    return (
        conv.weight.dtype == torch.float32
        and conv.weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
    )


def by_onednn(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Convolutions with packed weights, and what follows done while results are in the cache."""
    found = []
    pointwise = torch.ops.mkldnn._convolution_pointwise
    for node in calls(graph, aten.conv2d.default):
        conv = convolution_of(graph, node)
        if conv is None or not _onednn_works(conv):
            continue
        how = conv.padding, conv.stride, conv.dilation, conv.groups
        shape = value_of(conv.x)
        assert shape is not None
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            conv.weight.contiguous(), *how, list(shape.shape)
        )
        weight = add_constant(graph, packed, node)
        adds = added(node)
        if adds is not None:
            add, other = adds
            with_other: tuple[Any, ...] = (
                conv.x,
                other,
                weight,
                conv.bias_node,
                *how,
                "add",
                None,
                None,
                [],
                None,
            )
            made = replace(graph, add, pointwise.binary, with_other)
            gone, what = [node, add], "convolution and sum"
        else:
            user = only_user(node, *_ONEDNN)
            if is_op(user, aten.leaky_relu.default):
                slope = abs(arguments(user)["negative_slope"])
                if slope < torch.finfo(torch.float32).tiny:
                    user = None  # A ReLU to oneDNN, whose slope is a float.
            attributes = ("none", [], "") if user is None else _ONEDNN[user.target](arguments(user))
            end = node if user is None else user
            alone = (conv.x, weight, conv.bias_node, *how, *attributes)
            made = replace(graph, end, pointwise.default, alone)
            gone = [node] if user is None else [node, user]
            what = f"convolution and {attributes[0]}" if user is not None else "packed convolution"
        names = [n.name for n in gone]
        forget(graph, *reversed(gone))
        relu = only_user(made, aten.relu.default)
        if relu is not None:
            relu.target = aten.relu_.default
            names.append(relu.name)
            what += ", relu in place"
        found.append(Change(f"{what} by oneDNN", tuple(names)))
    return found


EPILOGUES = Pass("convolutions", _epilogues, starts=(aten.conv2d.default,))
