"""Convolutions by oneDNN: weights packed once, and what follows done in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .convolutions import Convolution, added, convolution_of, forget
from .nodes import add_constant, arguments, calls, is_op, only_user, replace, value_of
from .passes import Change

aten = torch.ops.aten

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
            if is_op(user, aten.leaky_relu.default) and not arguments(user)["negative_slope"]:
                user = None  # A ReLU.
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
