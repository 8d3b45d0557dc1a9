"""Work that need not be done at every call: no-ops, constants, batch norms."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..nodes import (
    Op,
    add_constant,
    arguments,
    calls,
    constant,
    inputs,
    is_mutable,
    is_op,
    is_view,
    only_user,
    reaches_output,
    roots,
    value_of,
    written_by,
)
from .base import Change, Pass

aten = torch.ops.aten

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_IDENTITIES = (
    aten.detach.default,
    aten.detach_.default,
    aten.alias.default,
    aten.lift_fresh.default,
)
_CONVERSIONS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.contiguous.default,
)
# What they fill new memory with; None for what they are given.
_CREATED = {
    aten.new_zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_full.default: None,
    aten.full_like.default: None,
}
# Bytes up to which a computed constant is kept, beside what it was computed from.
_LARGEST_CONSTANT = 16 << 20


def _clean(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Take out what does nothing, and write nothing in place that nobody else sees."""
    found = []
    for kinds in ((aten.dropout.default, aten.dropout_.default, *_IDENTITIES), _CONVERSIONS):
        for node in calls(graph, *kinds):
            if _does_nothing(node):
                found.append(Change("does nothing", (node.name,)))
                node.replace_all_uses_with(inputs(node)[0])
                graph.graph.erase_node(node)
    written = [node.name for node in list(graph.graph.nodes) if _out_of_place(graph, node)]
    found += [Change("writes to new memory", (name,)) for name in written]
    # What is written piece by piece, a mask say, need not be either, if it is a constant.
    return found + (_constants(graph, device) if any(map(is_mutable, graph.graph.nodes)) else [])


def _does_nothing(node: fx.Node) -> bool:
    """Whether a dropout, detach() or conversion gives what it is given."""
    given = arguments(node)
    if not is_op(node, *_CONVERSIONS):
        # A result that is detached is another tensor than what it was made of.
        returned = any(user.op == "output" for user in node.users)
        return not given.get("train", False) and not (returned and is_op(node, *_IDENTITIES))
    source, result = value_of(inputs(node)[0]), value_of(node)
    if source is None or result is None or given.get("copy"):
        return False
    same = (source.dtype, source.device, source.stride(), source.layout)
    return same == (result.dtype, result.device, result.stride(), result.layout)


def _out_of_place(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Replace an operation in place by its twin, where nothing else sees what it writes to."""
    if node.op != "call_function" or not is_mutable(node) or not inputs(node):
        return False
    memory, twin = inputs(node)[0], _twin_of(node.target)
    if twin is None or not isinstance(memory, fx.Node) or [*memory.users] != [node]:
        return False
    if memory.op != "call_function" or is_view(memory):
        return False
    before, after = value_of(memory), value_of(node)
    if before is None or after is None or before.dtype != after.dtype:
        return False
    if not _gives_the_same(twin, node, before):
        return False
    node.target = twin
    return True


def _twin_of(target: Any) -> Op | None:
    """The operation that writes to new memory what another one writes in place."""
    assert isinstance(target, Op)
    name = target._opname
    if not name.endswith("_"):
        return None
    twin = getattr(getattr(aten, name[:-1], None), target._overloadname, None)
    if twin is None:
        return None
    return twin if len(twin._schema.arguments) == len(target._schema.arguments) else None


def _gives_the_same(twin: Op, node: fx.Node, before: torch.Tensor) -> bool:
    """Whether an operation's result is laid out as the memory that a node writes to.

    It may promote to another dtype, or broadcast what it writes to; but not relu and the like.
    """
    if len(node.all_input_nodes) == 1 and before.is_floating_point() and len(node.args) == 1:
        return True
    try:
        args, kwargs = fx.node.map_arg((inputs(node), node.kwargs), _without_data)
        made = twin(*args, **kwargs)
    except Exception:
        return False
    mine = (made.dtype, made.shape, made.stride())
    return bool(mine == (before.dtype, before.shape, before.stride()))


def _without_data(node: fx.Node) -> torch.Tensor:
    """A tensor like a node's on the meta device."""
    value: torch.Tensor = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _constants(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Compute what depends on constants alone, once."""
    changing: set[fx.Node] = set()
    while (values := _values(graph, changing)) is None:
        pass
    own = {v.untyped_storage()._cdata for n, v in values.items() if n.op == "get_attr"}
    found = []
    for node, value in values.items():
        # A view of a weight costs nothing.
        ends = [] if value.untyped_storage()._cdata in own else _ends(graph, node, values)
        if ends:
            kept = add_constant(graph, value, node)
            for user in ends:
                user.replace_input_with(node, kept)
            found.append(Change("computed once", (node.name,)))
    for node in reversed(graph.graph.nodes):
        # Unlike others, writes are not taken out for want of a user.
        if node in values and is_mutable(node) and not _is_read(node):
            graph.graph.erase_node(node)
    return found


def _ends(graph: fx.GraphModule, node: fx.Node, values: Container[fx.Node]) -> list[fx.Node]:
    """What uses a constant and is none itself, nor a result that would be the same at each call."""
    last = next(iter(reversed(graph.graph.nodes)))
    ends = [u for u in node.users if u not in values and u is not last]
    return [user for user in ends if not (is_view(user) and reaches_output(user))]


def _values(graph: fx.GraphModule, changing: set[fx.Node]) -> dict[fx.Node, torch.Tensor] | None:
    """The values of what depends on constants alone, when all writes to them have been made.

    Args:
        graph: whose constants.
        changing: nodes whose memory is no constant; those that are found to be such are added.

    Returns:
        None if any were added, so that the values are those of another moment.
    """
    values: dict[fx.Node, torch.Tensor] = {}
    written: dict[fx.Node, int] = {}
    known = len(changing)
    order = {node: n for n, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        memory = {root for each in written_by(node) for root in roots(each)}
        # The model's own memory may not be written to here.
        own = any(root.op == "get_attr" for root in memory)
        result = None if own or node in changing else _value(graph, node, values)
        if result is None:
            changing |= memory & values.keys()
        else:
            values[node] = result
            written |= dict.fromkeys(memory, order[node])
    for node in values:
        for root in roots(node) & written.keys():
            # What is read before the last write would be read as it is after it; and what is
            # returned is new at every call.
            early = _first_read(node, values, order) < written[root]
            if early or reaches_output(node):
                changing.add(root)
    return values if len(changing) == known else None


def _first_read(node: fx.Node, values: Collection[fx.Node], order: Mapping[fx.Node, int]) -> float:
    """When a value is first read by what has none; never is infinity."""
    return min((order[user] for user in node.users if user not in values), default=math.inf)


def _value(
    graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, torch.Tensor]
) -> torch.Tensor | None:
    """What a node gives for these values, if that is a tensor that may be kept."""
    if (known := constant(graph, node)) is not None:
        return known
    result: Any = None
    if node.op == "call_function" and node.target in _CREATED:
        result = _created(node)
    elif _is_fixed(node) and all(source in values for source in node.all_input_nodes):
        args, kwargs = fx.node.map_arg((inputs(node), node.kwargs), values.__getitem__)
        result = node.target(*args, **kwargs)  # type: ignore[operator]  # it is an operation
    kept = isinstance(result, torch.Tensor) and result.nbytes <= _LARGEST_CONSTANT
    return result if kept else None


def _is_read(node: fx.Node) -> bool:
    """Whether a node that stays uses it."""
    return any(is_mutable(user) or user.op == "output" or _is_read(user) for user in node.users)


def _created(node: fx.Node) -> torch.Tensor | None:
    """New memory with one value in it, where a tensor only tells what it is like."""
    like, given = value_of(node), arguments(node)
    assert isinstance(node.target, Op)
    fill = _CREATED[node.target]
    fill = given["fill_value"] if fill is None else fill
    if like is None or like.nbytes > _LARGEST_CONSTANT or isinstance(fill, fx.Node):
        return None
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.fill_(fill)


def _is_fixed(node: fx.Node) -> bool:
    """Whether an operation gives the same whenever it is called with the same."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, Op):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and not target._opname.startswith(("empty", "new_empty"))


def _batch_norms(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Put a batch norm's scale and shift into the weights of the convolution or linear before it.

    Computed in float32 and rounded once. torch.nn.utils.fuse_conv_bn_eval does it in the weights'
    own precision.
    """
    found = []
    for node in calls(graph, aten.batch_norm.default):
        norm = arguments(node)
        source = norm["input"]
        if norm["training"] or not _is_foldable(source) or only_user(source) is not node:
            continue
        own = _weight_and_bias(graph, source)
        scaled = None if own is None else _scale_and_shift(graph, norm, *own)
        if own is None or scaled is None or not _put_weights(graph, source, own[0], *scaled):
            continue
        found.append(Change("batch norm folded", (source.name, node.name)))
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
    return found


def _weight_and_bias(
    graph: fx.GraphModule, node: fx.Node
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of a linear or convolution; None if they are no constants of one dtype."""
    given = arguments(node)
    weight, bias = constant(graph, given["weight"]), constant(graph, given["bias"])
    if weight is None:
        return None
    if given["bias"] is not None and (bias is None or bias.dtype != weight.dtype):
        return None
    return weight, bias


def _scale_and_shift(
    graph: fx.GraphModule,
    norm: dict[str, Any],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a batch norm makes of each channel, the bias before it included.

    None if its tensors are no constants of the weight's precision.
    """
    mean, variance = (constant(graph, norm[n]) for n in ("running_mean", "running_var"))
    gamma, beta = constant(graph, norm["weight"]), constant(graph, norm["bias"])
    if mean is None or variance is None:
        return None
    named = (norm["weight"], gamma), (norm["bias"], beta)
    if any(n is not None and value is None for n, value in named):
        return None
    if any(t is not None and t.dtype != weight.dtype for t in (mean, gamma, beta)):
        return None
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(variance.to(wide) + norm["eps"])
    if gamma is not None:
        scale = scale * gamma.to(wide)
    shift = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    shift = shift * scale
    return scale, shift if beta is None else shift + beta.to(wide)


def _is_foldable(node: Any) -> bool:
    """Whether a batch norm's channels are the rows of a node's weight."""
    value = value_of(node)
    if is_op(node, *CONVOLUTIONS):
        weight = value_of(inputs(node)[1]) if len(inputs(node)) > 1 else None
        return value is not None and weight is not None and value.dim() == weight.dim()
    return is_op(node, aten.linear.default) and value is not None and value.dim() == 2


def _scales(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Put a constant factor a channel (ConvNeXt's layer scale) into the weights before it."""
    found = []
    for node in calls(graph, aten.mul.Tensor):
        for source, factor in (inputs(node)[:2], inputs(node)[1::-1]):
            change = _scale(graph, node, source, factor)
            if change is not None:
                found.append(change)
                break
    return found


def _scale(graph: fx.GraphModule, node: fx.Node, source: Any, factor: Any) -> Change | None:
    scale, value, result = constant(graph, factor), value_of(source), value_of(node)
    if scale is None or value is None or result is None or only_user(source) is not node:
        return None
    if value.shape != result.shape or value.dtype != result.dtype or scale.dtype != value.dtype:
        return None
    end, dims = _behind_permutes(source, value.dim())
    if not is_op(end, aten.linear.default, *CONVOLUTIONS):
        return None
    own = _weight_and_bias(graph, end)
    if own is None or own[0].dtype != scale.dtype:
        return None
    weight, bias = own
    factors = _of_channels(scale, dims, _channels(end, weight))
    if factors is None:
        return None
    row = factors.expand(weight.shape[0]).to(torch.promote_types(weight.dtype, torch.float32))
    shift = None if bias is None else bias.to(row.dtype) * row
    if not _put_weights(graph, end, weight, row, shift):
        return None
    names = (end.name, node.name)
    node.replace_all_uses_with(source)
    graph.graph.erase_node(node)
    return Change("scale folded", names)


def _behind_permutes(source: Any, count: int) -> tuple[Any, list[int]]:
    """What was permuted, if anything was, and the dimension of it that each of the result's is."""
    dims = list(range(count))
    while is_op(source, aten.permute.default) and only_user(inputs(source)[0]) is source:
        order = [d % count for d in inputs(source)[1]]
        dims = [order[d] for d in dims]
        source = inputs(source)[0]
    return source, dims


def _channels(node: fx.Node, weight: torch.Tensor) -> int | None:
    """The dimension of a linear's or convolution's result that is its weight's rows."""
    whole = value_of(node)
    if whole is None:
        return None
    if is_op(node, aten.linear.default):
        return whole.dim() - 1
    # A convolution of images without a batch has a dimension less.
    return 1 if whole.dim() == weight.dim() else None


def _of_channels(
    scale: torch.Tensor, dims: Sequence[int], channels: int | None
) -> torch.Tensor | None:
    """A factor a channel, or one for all; None where it differs along another dimension.

    Args:
        scale: what a result is multiplied by.
        dims: for each dimension of that, the one of the operation's result that it is.
        channels: the dimension of the operation's result that has the channels.
    """
    full = scale.reshape([1] * (len(dims) - scale.dim()) + list(scale.shape))
    if channels is None or any(n != 1 and dims[d] != channels for d, n in enumerate(full.shape)):
        return None
    return full.reshape(-1)


def _put_weights(
    graph: fx.GraphModule,
    node: fx.Node,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
) -> bool:
    """Give a linear or convolution its weight with scaled rows, and another bias.

    Computed in float32 and rounded once. False if that gives no finite numbers: what is no number
    after folding may be one before.
    """
    kept = torch.empty_like(weight).copy_(
        weight.to(scale.dtype) * scale.reshape(-1, *[1] * (weight.dim() - 1))
    )
    row = None if shift is None else shift.to(weight.dtype)
    if not (kept.isfinite().all() and (row is None or row.isfinite().all())):
        return False
    node.args = (
        inputs(node)[0],
        add_constant(graph, kept, node),
        None if row is None else add_constant(graph, row, node),
        *inputs(node)[3:],
    )
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("weight", "bias")}
    return True


CLEAN = Pass("clean", _clean)
CONSTANTS = Pass("constants", _constants)
BATCH_NORM = Pass("batch_norm", _batch_norms, starts=(aten.batch_norm.default,))
SCALES = Pass("scales", _scales, starts=(aten.mul.Tensor,))
