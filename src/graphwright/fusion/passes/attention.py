"""Attention: its masks, and attention that a model writes out by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...calls.snapshots import same_bits
from ..nodes import add_constant, arguments, calls, inputs, is_op, only_user, replace, value_of
from .base import Change, Pass

aten = torch.ops.aten


def _attention(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """softmax(q kᵀ · scale + mask) v; each step used by the next one alone.

    Where eager gives NaN (a row that is masked altogether, a NaN in a query), PyTorch's operation
    may give 0: so this pass has to be asked for.
    """
    found = []
    for node in calls(graph, aten.matmul.default):
        parts = _parts(node)
        if parts is None:
            continue
        query, turned, value, mask, scale, names = parts
        key = _transposed(turned)
        if key is None:
            with graph.graph.inserting_before(node):
                key = graph.graph.call_function(aten.transpose.int, (turned, -2, -1))
        replace(
            graph,
            node,
            aten.scaled_dot_product_attention.default,
            (query, key, value, mask),
            scale=scale,
        )
        found.append(Change("attention written out by hand", names))
    return found


def _parts(
    node: fx.Node,
) -> tuple[fx.Node, fx.Node, Any, fx.Node | None, float, tuple[str, ...]] | None:
    """Query, turned key, value, mask, scale of an attention that a product ends."""
    given, values = inputs(node)
    weights = _before_conversion(given)
    sums = _scores(weights)
    scores, mask = _without_mask(sums)
    found = _scaled(scores)
    if found is None:
        return None
    product, scale = found
    if any(len(n.users) != 1 for n in (scores, product)):
        return None
    query, key = inputs(product)
    tensors = [value_of(each) for each in (query, key, values, node)]
    if not _are_of_one_attention(*tensors):
        return None
    q, k = tensors[:2]
    assert q is not None
    assert k is not None
    if weights is not given and weights.meta["val"].dtype != torch.float32:
        return None
    if mask is not None and not _is_bias(mask, q.dtype, (*q.shape[:3], k.shape[3])):
        return None
    # A name each, though there may be no mask, or no scale.
    names = dict.fromkeys(each.name for each in (product, scores, sums, weights, node))
    return query, key, values, mask, scale, tuple(names)


def _before_conversion(weights: Any) -> Any:
    """What was converted to another dtype for one use; the node itself if it is no conversion."""
    converts = is_op(weights, aten.to.dtype) and only_user(weights) is None
    return inputs(weights)[0] if converts and len(weights.users) == 1 else weights


def _scores(weights: Any) -> Any:
    """What a softmax over the last of four dimensions is of; None if it is another operation."""
    if not is_op(weights, aten.softmax.int) or len(weights.users) != 1:
        return None
    given, shape = arguments(weights), value_of(weights)
    if shape is None or shape.dim() != 4 or given["dim"] not in (-1, 3):
        return None
    return given["self"] if given["dtype"] in (None, torch.float32) else None


def _without_mask(scores: Any) -> tuple[Any, fx.Node | None]:
    """Scores without the mask that is added to them, and the mask, if there is one."""
    if not is_op(scores, aten.add.Tensor) or scores.kwargs or len(scores.users) != 1:
        return scores, None
    sides = [side for side in inputs(scores) if isinstance(side, fx.Node)]
    inner = next((side for side in sides if _scaled(side) is not None), None)
    if len(sides) != 2 or inner is None:
        return None, None
    return inner, sides[1] if inner is sides[0] else sides[0]


def _are_of_one_attention(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    result: torch.Tensor | None,
) -> bool:
    """Whether these may be query, turned key, value and result."""
    if q is None or k is None or v is None or result is None or q.dim() != 4 or k.dim() != 4:
        return False
    if len({q.dtype, k.dtype, v.dtype, result.dtype}) != 1:
        return False
    return q.shape[:2] == k.shape[:2] == v.shape[:2]


def _is_bias(mask: fx.Node, dtype: torch.dtype, whole: tuple[int, ...]) -> bool:
    """Whether PyTorch's operation takes a mask for scores of these sizes."""
    bias = value_of(mask)
    if bias is None or bias.dtype != dtype or not 2 <= bias.dim() <= 4:
        return False
    sizes = zip(reversed(bias.shape), reversed(whole), strict=False)
    return all(size in (1, full) for size, full in sizes)


def _scaled(node: Any) -> tuple[fx.Node, float] | None:
    """A product of matrices, and the number that it is scaled by."""
    if is_op(node, aten.matmul.default):
        return node, 1.0
    if is_op(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        inner, number = inputs(node)[:2]
        if isinstance(number, int | float) and is_op(inner, aten.matmul.default):
            if node.kwargs or not number:
                return None
            divides = is_op(node, aten.div.Tensor, aten.div.Scalar)
            return inner, 1.0 / number if divides else float(number)
    return None


def _transposed(node: Any) -> Any:
    """What was transposed in its last two dimensions; None if nothing was."""
    value = value_of(node)
    if value is None or value.dim() != 4:
        return None
    if is_op(node, aten.transpose.int):
        dims = {d % 4 for d in inputs(node)[1:3]}
        return inputs(node)[0] if dims == {2, 3} else None
    if is_op(node, aten.permute.default):
        return inputs(node)[0] if [d % 4 for d in inputs(node)[1]] == [0, 1, 3, 2] else None
    return None


def _masks(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Masks of true and false as PyTorch's operation adds them to the scores.

    It makes them anew in each layer, in three passes over memory.
    """
    found = []
    known: dict[tuple[Any, ...], fx.Node] = {}
    masked: dict[tuple[Any, ...], float | None] = {}
    for node in calls(graph, aten.scaled_dot_product_attention.default):
        given = arguments(node)
        query, mask = value_of(given["query"]), value_of(given["attn_mask"])
        if query is None or mask is None or mask.dtype != torch.bool or given["dropout_p"]:
            continue
        kind = tuple(_kind(given[name]) for name in ("query", "key", "value", "attn_mask"))
        kind = (*kind, given["is_causal"], given["scale"], given["enable_gqa"])
        if kind not in masked:
            masked[kind] = _masked_with(given)
        if masked[kind] is None:
            continue
        key = given["attn_mask"], query.dtype, masked[kind]
        if key not in known:
            known[key] = _as_sum(graph, key[0], query, masked[kind], node)
        node.replace_input_with(key[0], known[key])
        found.append(Change("mask made once", (node.name,)))
    return found


def _kind(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, value.device, tuple(value.shape), tuple(value.stride())


def _masked_with(given: dict[str, Any]) -> float | None:
    """What PyTorch adds to scores that are masked, in this very operation.

    Minus infinity, but -65504 where cuDNN computes it: rows that are masked altogether show that.
    None where it is neither.
    """
    tensors = [_like(given[name]) for name in ("query", "key", "value")]
    _, device, shape, _ = _kind(given["attn_mask"])
    if len(shape) < 2 or not math.prod(shape) or any(tensor is None for tensor in tensors):
        return None
    some = (torch.arange(math.prod(shape)) % 3 > 0).view(shape).to(device)
    none = some.clone()
    none[..., 0, :] = False
    how = {name: given[name] for name in ("is_causal", "scale", "enable_gqa")}

    def attention(mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = aten.scaled_dot_product_attention.default(*tensors, mask, **how)
        return result

    zero = torch.zeros((), dtype=_kind(given["query"])[0], device=device)
    for fill in (-torch.inf, -65504.0):
        sums = [(mask, torch.where(mask, zero, fill)) for mask in (some, none)]
        if all(same_bits(attention(mask), attention(added)) for mask, added in sums):
            return fill
    return None


def _like(node: fx.Node) -> torch.Tensor | None:
    """A tensor of other numbers; None for one that lies over itself."""
    dtype, device, shape, strides = _kind(node)
    if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)):
        return None
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(numbers)


def _as_sum(
    graph: fx.GraphModule, mask: fx.Node, query: torch.Tensor, fill: float | None, before: fx.Node
) -> fx.Node:
    """0 where a mask is true, what PyTorch adds elsewhere."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    shown = add_constant(graph, zero, before)
    base = inputs(mask)[0] if is_op(mask, aten.expand.default) else mask
    with graph.graph.inserting_before(before):
        new = graph.graph.call_function(aten.where.ScalarOther, (base, shown, fill))
        new.meta["val"] = base.meta["val"].new_empty(base.meta["val"].shape, dtype=query.dtype)
        if base is not mask:
            value = new.meta["val"].expand(mask.meta["val"].shape)
            new = graph.graph.call_function(aten.expand.default, (new, *inputs(mask)[1:]))
            new.meta["val"] = value
    return new


ATTENTION = Pass("attention", _attention, starts=(aten.matmul.default,))
MASKS = Pass("masks", _masks, starts=(aten.scaled_dot_product_attention.default,))
