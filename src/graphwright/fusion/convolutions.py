"""Convolutions with what follows them: bias, activation, another tensor added, a pool.

On the GPU by cuDNN's fused convolutions, on the CPU by oneDNN's, whose weights are packed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

_ADD = (aten.add.Tensor,)


@dataclass(frozen=True)
class _Convolution:
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


def _convolution(graph: fx.GraphModule, node: Any) -> _Convolution | None:
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
    return _Convolution(
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


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
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


# What follows a convolution, as oneDNN names it: with its numbers, and its algorithm. Not ReLU and
# others that compare: oneDNN makes 0 of NaN. They work in place on what the convolution has made.
_Attributes = tuple[str, list[float], str]
_ONEDNN: dict[Any, Callable[[dict[str, Any]], _Attributes]] = {
    aten.sigmoid.default: lambda a: ("sigmoid", [], ""),
    aten.tanh.default: lambda a: ("tanh", [], ""),
    aten.silu.default: lambda a: ("swish", [], ""),
    aten.hardswish.default: lambda a: ("hardswish", [], ""),
    aten.leaky_relu.default: lambda a: ("leaky_relu", [a["negative_slope"]], ""),
    aten.gelu.default: lambda a: ("gelu", [], a["approximate"]),
}


def _onednn_works(conv: _Convolution) -> bool:
    return (
        conv.weight.dtype == torch.float32
        and conv.weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
    )


def _by_onednn(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Convolutions with packed weights, and what follows done while results are in the cache."""
    found = []
    pointwise = torch.ops.mkldnn._convolution_pointwise
    for node in calls(graph, aten.conv2d.default):
        conv = _convolution(graph, node)
        if conv is None or not _onednn_works(conv):
            continue
        how = conv.padding, conv.stride, conv.dilation, conv.groups
        shape = value_of(conv.x)
        assert shape is not None
        packed = torch.ops.mkldnn._reorder_convolution_weight(
            conv.weight.contiguous(), *how, list(shape.shape)
        )
        weight = add_constant(graph, packed, node)
        adds = _added(node)
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
            if is_op(user, aten.leaky_relu.default) and not arguments(user)["negative_slope"]:
                user = None  # A ReLU.
            attributes = ("none", [], "") if user is None else _ONEDNN[user.target](arguments(user))
            end = node if user is None else user
            alone = (conv.x, weight, conv.bias_node, *how, *attributes)
            made = replace(graph, end, pointwise.default, alone)
            gone = [node] if user is None else [node, user]
            what = f"convolution and {attributes[0]}" if user is not None else "packed convolution"
        names = [n.name for n in gone]
        _forget(graph, *reversed(gone))
        relu = only_user(made, aten.relu.default)
        if relu is not None:
            relu.target = aten.relu_.default
            names.append(relu.name)
            what += ", relu in place"
        found.append(Change(f"{what} by oneDNN", tuple(names)))
    return found


def _forget(graph: fx.GraphModule, *nodes: fx.Node) -> None:
    """Erase what was replaced, the last first."""
    for node in nodes:
        if not node._erased and not node.users and node.op != "output":
            sources = node.all_input_nodes
            graph.graph.erase_node(node)
            _forget(graph, *(s for s in sources if s.op in ("call_function", "get_attr")))


def _by_cudnn(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Convolution + bias (+ another tensor) + ReLU as one kernel."""
    found = []
    for node in calls(graph, aten.conv2d.default):
        conv = _convolution(graph, node)
        if conv is None or not _cudnn_works(conv):
            continue
        how = conv.stride, conv.padding, conv.dilation, conv.groups
        relu = only_user(node, aten.relu.default)
        adds = _added(node)
        if relu is not None:
            args: tuple[Any, ...] = conv.x, conv.weight_node, conv.bias_node, *how
            replace(graph, relu, aten.cudnn_convolution_relu.default, args)
            gone, what = [node, relu], "convolution and relu"
        elif adds is not None:
            add, other = adds
            relu = only_user(add, aten.relu.default)
            if relu is None:
                change = _with_kernel(graph, conv, add, other)
                found += [] if change is None else [change]
                continue
            args = conv.x, conv.weight_node, other, 1.0, conv.bias_node, *how
            replace(graph, relu, aten.cudnn_convolution_add_relu.default, args)
            gone, what = [node, add, relu], "convolution, sum and relu"
        else:
            change = _with_kernel(graph, conv, node, None)
            found += [] if change is None else [change]
            continue
        found.append(Change(f"{what} by cuDNN", tuple(n.name for n in gone)))
        _forget(graph, *reversed(gone))
    return found


def _with_kernel(
    graph: fx.GraphModule, conv: _Convolution, end: fx.Node, other: fx.Node | None
) -> Change | None:
    """A convolution without its bias; that, a sum and an activation in one pass over memory.

    PyTorch adds a bias in a pass of its own. In channels_last alone: our kernel takes no other.
    """
    if conv.bias_node is None or conv.bias is None or conv.bias.dtype != conv.weight.dtype:
        return None
    if not conv.weight.is_contiguous(memory_format=torch.channels_last):
        return None
    user = only_user(end, *_KERNELS)
    activation = "none" if user is None else _activation_of(user)
    if activation is None:
        user, activation = None, "none"
    if user is None and other is None:
        return None  # One pass either way.
    last = end if user is None else user
    with graph.graph.inserting_before(conv.node):
        how = conv.stride, conv.padding, conv.dilation, conv.groups
        args = (conv.x, conv.weight_node, None, *how)
        bare = graph.graph.call_function(aten.conv2d.default, args)
    bare.meta["val"] = conv.node.meta["val"]
    gone = list(dict.fromkeys([conv.node, end, last]))
    names = tuple(node.name for node in gone)
    operator = torch.ops.graphwright.channel_activation.default
    replace(graph, last, operator, (bare, conv.bias_node, other, activation))
    _forget(graph, *reversed(gone))
    what = "bias" + (", sum" if other is not None else "")
    return Change(what + (f" and {activation}" if user is not None else ""), names)


_KERNELS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.hardtanh.default: "relu6",
}


def _activation_of(node: fx.Node) -> str | None:
    """The name of an activation that our kernel has."""
    given = arguments(node)
    if is_op(node, aten.hardtanh.default) and (given["min_val"], given["max_val"]) != (0, 6):
        return None
    if is_op(node, aten.gelu.default) and given["approximate"] == "tanh":
        return "gelu_tanh"
    return _KERNELS[node.target]


def _cudnn_works(conv: _Convolution) -> bool:
    return (
        conv.weight.is_cuda
        and conv.weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.version.hip is None
        and torch.backends.cudnn.is_available()
        and torch.backends.cudnn.enabled
    )


def _epilogues(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Convolutions with what follows them."""
    return (_by_onednn if device.type == "cpu" else _by_cudnn)(graph, device)


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
        _forget(graph, relu)
    return found


EPILOGUES = Pass("convolutions", _epilogues)
POOLS = Pass("pools", _pools, devices=("cuda",))
