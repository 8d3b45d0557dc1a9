"""Helpers for passes: questions about a graph's nodes, and changes to them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

Op = torch._ops.OpOverload
# Composites whose results are new memory.
_NEW = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("linear", "matmul", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "softmax", "log_softmax", "relu6"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("scaled_dot_product_attention", "square", "silu", "hardswish", "repeat_interleave"),
}
_ADDED = "constant_"


def is_op(node: Any, *operations: Op) -> TypeGuard[fx.Node]:
    """Whether a node calls one of these operations."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in operations


def calls(graph: fx.GraphModule, *operations: Op) -> Iterator[fx.Node]:
    """The nodes that call one of these operations, in order; the graph may be changed meanwhile."""
    for node in list(graph.graph.nodes):
        if not node._erased and is_op(node, *operations):
            yield node


def inputs(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments."""
    return node.args


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation by name, defaults included."""
    target = node.target
    assert isinstance(target, Op)
    formal = target._schema.arguments
    given = {a.name: a.default_value for a in formal if a.has_default_value()}
    given |= {a.name: value for a, value in zip(formal, node.args, strict=False)}
    return given | node.kwargs


def is_mutable(node: fx.Node) -> bool:
    """Whether an operation writes to one of its arguments."""
    return isinstance(node.target, Op) and node.target._schema.is_mutable


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to."""
    if not is_mutable(node):
        return []
    given = arguments(node)
    formal = node.target._schema.arguments  # type: ignore[union-attr]  # it is an operation
    written = [given[a.name] for a in formal if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in pytree.tree_leaves(written) if isinstance(value, fx.Node)]


def is_view(node: fx.Node) -> bool:
    """Whether a node's result may lie in the memory of its arguments."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, Op):
        return False
    if any(result.alias_info is not None for result in target._schema.returns):
        return True
    # What PyTorch puts together from other operations says nothing of it: einsum and reshape
    # return their argument, a view or a copy, as it happens.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    )
    return bool(composite) and target._opname not in _NEW


def roots(node: fx.Node) -> set[fx.Node]:
    """The nodes whose memory a node's result may lie in."""
    found, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one.op == "call_function" and is_view(one):
            todo += shared(one)
        else:
            found.add(one)
    return found


def is_view_of(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node's result may lie in another one's memory."""
    return is_view(node) and other in shared(node)


def shared(node: fx.Node) -> list[fx.Node]:
    """The arguments in whose memory a view may lie."""
    if isinstance(node.target, Op):
        formal, given = node.target._schema.arguments, arguments(node)
        named = [given[a.name] for a in formal if a.alias_info is not None]
        if named:
            return [v for v in pytree.tree_leaves(named) if isinstance(v, fx.Node)]
    return node.all_input_nodes


def reaches_output(node: fx.Node) -> bool:
    """Whether what is returned may lie in a node's memory."""
    return any(
        user.op == "output" or (is_view(user) and reaches_output(user)) for user in node.users
    )


def value_of(node: Any) -> torch.Tensor | None:
    """A tensor without data of a node's shape, strides, dtype and device, when it was traced."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def constant(graph: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor that a node stands for, if it is a constant."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = graph
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value if isinstance(value, torch.Tensor) else None


def add_constant(graph: fx.GraphModule, tensor: torch.Tensor, before: fx.Node) -> fx.Node:
    """A node for a tensor, in front of another node."""
    number = 0
    while hasattr(graph, f"{_ADDED}{number}"):
        number += 1
    graph.register_buffer(f"{_ADDED}{number}", tensor.detach(), persistent=False)
    with graph.graph.inserting_before(before):
        # `get_attr` looks through all of the module for it.
        node = graph.graph.create_node("get_attr", f"{_ADDED}{number}")
    node.meta["val"] = tensor.detach()
    return node


def is_added(node: fx.Node) -> bool:
    """Whether a node stands for a constant that a pass has made, not for one of the model's."""
    return node.op == "get_attr" and str(node.target).startswith(_ADDED)


def only_user(node: Any, *operations: Op) -> fx.Node | None:
    """The one node that uses another one, and once; of these operations, where some are named."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    uses = sum(leaf is node for leaf in pytree.tree_leaves((user.args, user.kwargs)))
    if uses != 1 or user.op != "call_function":
        return None
    return user if not operations or user.target in operations else None


def replace(
    graph: fx.GraphModule, old: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any
) -> fx.Node:
    """Put another call in a node's place."""
    with graph.graph.inserting_before(old):
        new = graph.graph.call_function(target, args, kwargs)
    new.meta = copy.copy(old.meta)
    old.replace_all_uses_with(new)
    graph.graph.erase_node(old)
    return new


class _Draft(fx.GraphModule):
    """A graph without code, which would take longer to make than all else of a copy."""

    def recompile(self) -> Any:
        """Make nothing."""


def copy_of(graph: fx.GraphModule, *, code: bool = False) -> fx.GraphModule:
    """The same graph with the same constants, to be changed; without code it cannot be called."""
    return (fx.GraphModule if code else _Draft)(graph, copy.deepcopy(graph.graph))


def drop_dead_code(graph: fx.Graph) -> None:
    """Drop nodes whose results nobody uses, but for those that are there for what they do."""
    graph.eliminate_dead_code(_acts)


def _acts(node: fx.Node) -> bool:
    if node.is_impure():
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._opname in _SAY_NOTHING:
        return False
    # FX takes some assertions for nothing, and what a user's operator does without a result.
    return not target._schema.returns or target._opname == "_functional_assert_async"


# What tracing leaves behind, and no code asked for.
_SAY_NOTHING = frozenset(("_assert_tensor_metadata",))


def finished(graph: fx.GraphModule) -> fx.GraphModule:
    """Dead nodes and unused constants gone, and the code made: for inference, in eval mode.

    Raises:
        RuntimeError: the graph is not well formed.
    """
    drop_dead_code(graph.graph)
    graph.graph.lint()
    return fx.GraphModule(graph, graph.graph).eval()


def leaf_names(node: fx.Node) -> str:
    """What a node calls, in words."""
    return str(getattr(node.target, "_opname", node.target))
