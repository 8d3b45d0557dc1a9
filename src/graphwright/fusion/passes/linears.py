"""Linear layers: with their activation, several of one input merged, and patches as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ..nodes import (
    add_constant,
    arguments,
    calls,
    constant,
    inputs,
    is_op,
    only_user,
    reaches_output,
    replace,
    value_of,
)
from .base import Change, Pass
from .convolutions import Convolution, convolution_of
from .layout import HALVES
from .nans import Known, keeps_nan

aten = torch.ops.aten
# Activations that are fused with the linear layer before them.
_FOLLOWING = (aten.relu.default, aten.gelu.default, aten.silu.default)
# Elements of 16 bits that 16 bytes hold; from which width on a copy of the result is worth it.
_ALIGNED, _WIDE = 8, 2048


def _activations(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Linear + bias + ReLU or tanh-GELU by cuBLASLt; other GELU and SiLU by a kernel of ours."""
    found = []
    kept: Known = {}
    for node in calls(graph, aten.linear.default, aten.addmm.default):
        product = _product(graph, node)
        if product is None:
            continue
        # transformers' Conv1D gives its result the shape of its input again.
        view = only_user(node, aten.view.default, aten.reshape.default)
        end = node if view is None or value_of(view) is None else view
        user = only_user(end, *_FOLLOWING)
        if user is None and end is not node:
            end, user = node, only_user(node, *_FOLLOWING)
        result, after = value_of(end), value_of(user)
        if user is None or result is None or after is None or not result.numel():
            continue
        names = (node.name, user.name)
        if is_op(user, aten.silu.default) or not _by_cublas(kept, graph, product, user):
            if result.shape[-1:] != product.bias_shape or is_op(user, aten.relu.default):
                continue
            found.append(_with_kernel(graph, product, end, user, names))
        else:
            found.append(_with_cublas(graph, product, user, after, names))
    return found


@dataclass(frozen=True)
class _Product:
    """x W + bias with constants W, as (inputs, outputs), and bias."""

    node: fx.Node
    x: fx.Node
    weight: torch.Tensor
    bias: fx.Node
    bias_shape: torch.Size


def _product(graph: fx.GraphModule, node: fx.Node) -> _Product | None:
    given = arguments(node)
    if is_op(node, aten.linear.default):
        source, weight_node, bias_node = given["input"], given["weight"], given["bias"]
    else:
        source, weight_node, bias_node = given["mat1"], given["mat2"], given["self"]
        if given["alpha"] != 1 or given["beta"] != 1:
            return None
    weight, bias = constant(graph, weight_node), constant(graph, bias_node)
    x = value_of(source)
    if weight is None or bias is None or x is None or weight.dim() != 2 or bias.dim() != 1:
        return None
    if x.dtype != weight.dtype or bias.dtype != weight.dtype or weight.device != x.device:
        return None
    if is_op(node, aten.linear.default):
        weight = weight.t()
    if bias.shape[0] != weight.shape[1]:
        return None
    return _Product(node, source, weight, bias_node, bias.shape)


def _by_cublas(kept: Known, graph: fx.GraphModule, product: _Product, user: fx.Node) -> bool:
    """Whether cuBLASLt has an activation, and keeps NaN: GELU with tanh, short of float32's digits.

    Whether NaN is kept is asked of the kernel that it takes for this very product.
    """
    x, bias, weight = value_of(product.x), constant(graph, product.bias), product.weight
    gelu = is_op(user, aten.gelu.default)
    assert x is not None
    assert bias is not None
    if gelu and (x.dtype not in HALVES or arguments(user)["approximate"] != "tanh"):
        return False

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch._addmm_activation(bias, x, weight, use_gelu=gelu)

    rows = x.reshape(-1, x.shape[-1])
    kind = rows.shape, x.dtype, weight.shape, weight.stride(), gelu
    if kind not in kept:
        kept[kind] = keeps_nan(rows, lambda x: torch.addmm(bias, x, weight), fused)
    return kept[kind]


def _with_kernel(
    graph: fx.GraphModule, product: _Product, end: fx.Node, user: fx.Node, names: tuple[str, ...]
) -> Change:
    """The product without its bias, then bias and activation in one kernel."""
    node = product.node
    with graph.graph.inserting_before(node):
        if is_op(node, aten.linear.default):
            bare = graph.graph.call_function(aten.linear.default, inputs(node)[:2])
        else:
            bare = graph.graph.call_function(aten.mm.default, inputs(node)[1:3])
    bare.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(bare)
    last = bare if end is node else end
    if is_op(user, aten.silu.default):
        operator, args = torch.ops.graphwright.bias_silu.default, (last, product.bias)
    else:
        approximate = arguments(user)["approximate"]
        operator = torch.ops.graphwright.bias_gelu.default
        args = (last, product.bias, approximate)  # type: ignore[assignment]  # one more
    what = "bias and silu" if is_op(user, aten.silu.default) else "bias and gelu"
    replace(graph, user, operator, args)
    graph.graph.erase_node(node)
    return Change(what, names)


def _with_cublas(
    graph: fx.GraphModule,
    product: _Product,
    user: fx.Node,
    after: torch.Tensor,
    names: tuple[str, ...],
) -> Change:
    """Product, bias and activation as one kernel."""
    x = value_of(product.x)
    assert x is not None
    width = product.weight.shape[1]
    turned = add_constant(graph, product.weight, product.node)
    with graph.graph.inserting_before(user):
        rows = product.x
        if x.dim() != 2:
            rows = graph.graph.call_function(aten.reshape.default, (rows, [-1, x.shape[-1]]))
            rows.meta["val"] = x.reshape(-1, x.shape[-1])
        new = graph.graph.call_function(
            aten._addmm_activation.default,
            (product.bias, rows, turned),
            {"use_gelu": is_op(user, aten.gelu.default)},
        )
        new.meta["val"] = after.new_empty((after.numel() // width, width))
        if after.dim() != 2 or tuple(after.shape) != tuple(new.meta["val"].shape):
            new = graph.graph.call_function(aten.view.default, (new, list(after.shape)))
            new.meta["val"] = after
    user.replace_all_uses_with(new)
    graph.graph.erase_node(user)
    return Change("linear and activation by cuBLASLt", names)


def _padded(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Wide linear layers whose outputs do not come in eights (a vocabulary of 50,257).

    Rows of results that lie on no multiple of 16 bytes keep cuBLAS from its fast kernels: zeros are
    added to the weight, and what comes of them is cut off.
    """
    found = []
    for node in calls(graph, aten.linear.default):
        given = arguments(node)
        weight, bias = constant(graph, given["weight"]), constant(graph, given["bias"])
        result, dtype = value_of(node), None if weight is None else weight.dtype
        if weight is None or result is None or weight.dim() != 2 or dtype not in HALVES:
            continue
        if given["bias"] is not None and (bias is None or bias.shape != weight.shape[:1]):
            continue
        width = weight.shape[0]
        more = -width % _ALIGNED
        if not more or width < _WIDE:
            continue
        args = [given["input"], add_constant(graph, functional.pad(weight, (0, 0, 0, more)), node)]
        if bias is not None:
            args.append(add_constant(graph, functional.pad(bias, (0, more)), node))
        with graph.graph.inserting_before(node):
            wide = graph.graph.call_function(aten.linear.default, tuple(args))
            wide.meta["val"] = result.new_empty((*result.shape[:-1], width + more))
        name = node.name
        replace(graph, node, aten.narrow.default, (wide, -1, 0, width))
        found.append(Change("outputs in eights", (name,)))
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
            if weight.dim() != 2 or node.meta["val"].dim() < 2 or reaches_output(node):
                continue
            if bias is not None and (bias.dtype, *bias.shape) != (weight.dtype, weight.shape[0]):
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


PADDED = Pass("padded", _padded, devices=("cuda",), starts=(aten.linear.default,))
GATES = Pass("gates", _gates, devices=("cuda",), starts=(aten.silu.default,))
ACTIVATIONS = Pass("activations", _activations, devices=("cuda",), starts=_FOLLOWING)
PROJECTIONS = Pass("projections", _projections, devices=("cuda",), starts=(aten.linear.default,))
PATCHES = Pass("patches", _patches, devices=("cuda",), starts=(aten.conv2d.default,))
