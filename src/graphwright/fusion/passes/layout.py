"""Memory layout: convolutions in channels_last, and eager's strides for results."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx

from ...calls.switches import precision
from ...ops.fused.registry import OPERATORS
from ..nodes import (
    Op,
    add_constant,
    arguments,
    calls,
    constant,
    inputs,
    is_mutable,
    is_view,
    is_view_of,
    shared,
    value_of,
)
from .base import Change, Pass

aten = torch.ops.aten
_OWN = {name: getattr(torch.ops.graphwright, name).default for name in OPERATORS}
_POOL, _DEPTHWISE = _OWN["relu_max_pool2d"], _OWN["depthwise_conv2d"]
_TO_LAST = _OWN["to_channels_last"]
CONVOLUTIONS = (
    aten.conv2d.default,
    aten.cudnn_convolution_relu.default,
    aten.cudnn_convolution_add_relu.default,
    _DEPTHWISE,
)
# As often are copies of copies looked for.
_ROUNDS = 4
HALVES = (torch.float16, torch.bfloat16)


def _channels_last(graph: fx.GraphModule, device: torch.device) -> list[Change]:
    """Give convolutions weights in channels_last: cuDNN and PyTorch carry the layout on.

    For half precision and TF32, whose tensor cores read channels side by side. No transpose stands
    in the graph: the first convolution's input is turned by PyTorch, and what follows keeps it.
    """
    found = []
    for node in calls(graph, aten.conv2d.default):
        given = arguments(node)
        weight, x = constant(graph, given["weight"]), value_of(given["input"])
        if weight is None or weight.dim() != 4 or x is None or x.dim() != 4:
            continue
        if weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous():
            continue
        if not wants_channels_last(weight):
            continue
        turned = add_constant(graph, weight.contiguous(memory_format=torch.channels_last), node)
        node.replace_input_with(given["weight"], turned)
        found.append(Change("weights in channels_last", (node.name,)))
    return found


def wants_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the tensor cores compute convolutions of a dtype."""
    if tensor.dtype == torch.float32:
        # Not by torch.backends: its older switch raises once a newer one was used.
        return precision("cuda", "conv") == "tf32"
    return tensor.dtype in HALVES


class _Strides(fx.Interpreter):
    """Runs a graph and notes the strides of what it makes; where an operation wants others too."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[fx.Node, tuple[int, ...]] = {}
        self.wants: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except RuntimeError:
            if n.op != "call_function":
                raise
            # An operation on strides: view() of what lies in another order.
            again = fx.node.map_arg((n.args, n.kwargs), lambda a: _as_traced(self.env[a], a))
            result = n.target(*again[0], **again[1])  # type: ignore[operator]  # an operation
            self.wants.append(n)
        if isinstance(result, torch.Tensor) and result.layout is torch.strided:
            self.found[n] = result.stride()
        return result

    @classmethod
    def of(cls, graph: fx.GraphModule, samples: Sequence[torch.Tensor]) -> _Strides:
        """Run a graph."""
        seen = cls(graph)
        with torch.no_grad():
            seen.run(*samples)
        return seen

    def differs(self, node: fx.Node) -> bool:
        """Whether a result lies in another way than eager's."""
        expected, now = value_of(node), self.found.get(node)
        if expected is None or now is None or node.op != "call_function" or not expected.numel():
            return False
        return now != tuple(expected.stride())

    def shows(self, node: fx.Node, wanting: Container[fx.Node]) -> bool:
        """Whether that can be seen: in the result itself, or in a view of it."""
        if self.differs(node) and any(user in wanting for user in node.users):
            return True
        return any(self.shows(user, wanting) for user in node.users if is_view_of(user, node))


def _as_traced(value: Any, node: fx.Node) -> Any:
    """A tensor with the strides that it had when the graph was traced."""
    expected = value_of(node)
    if not isinstance(value, torch.Tensor) or expected is None or value.shape != expected.shape:
        return value
    if value.layout is not torch.strided or value.stride() == expected.stride():
        return value
    new = torch.empty_strided(
        expected.shape, expected.stride(), dtype=value.dtype, device=value.device
    )
    return new.copy_(value)


def restored(
    graph: fx.GraphModule, strides: Sequence[tuple[int, ...]], *samples: torch.Tensor
) -> tuple[Change, ...]:
    """Put eager's strides back where they can be seen.

    In results, where views need them, and before operations that are not known here. The graph is
    changed in place, but not its code.

    Args:
        graph: after passes that change layouts.
        strides: those of eager's results.
        samples: tensors to call it with.

    Raises:
        RuntimeError: copies do not bring all of them back.
    """
    seen = _Strides.of(graph, samples)
    last = next(iter(reversed(graph.graph.nodes)))
    for source, stride in zip(inputs(last)[0], strides, strict=True):
        value = value_of(source)
        if value is not None and value.stride() != stride:
            source.meta["val"] = value.new_empty_strided(value.shape, stride)
    found = new = _inputs_turned(graph, seen.found)
    # What was copied may turn what comes of it.
    for _ in range(_ROUNDS):
        if new:
            seen = _Strides.of(graph, samples)
        new = _copied(graph, seen)
        found = [*found, *new]
        if not new:
            return tuple(found)
    raise RuntimeError("its results cannot be laid out as eager's")


def _copied(graph: fx.GraphModule, seen: _Strides) -> list[Change]:
    """Copy what lies in another way than eager's and shows; what is a view of that can wait."""
    wanting = _wanting(graph, seen)
    found: list[Change] = []
    later: set[fx.Node] = set()
    for source in list(graph.graph.nodes):
        expected, users = value_of(source), list(source.users)
        if is_view(source) and not later.isdisjoint(shared(source)):
            later.add(source)
            continue
        if expected is None or not seen.differs(source) or not seen.shows(source, wanting):
            continue
        later.add(source)
        found.append(Change("eager's layout", (source.name,)))
        # All that may share its memory: results that are views of each other stay so.
        theirs = [u for u in users if u in wanting or is_view_of(u, source)]
        if _pools_contiguous(source, expected) and theirs == users:
            source.args = (*_pool_arguments(source), True)
            continue
        with graph.graph.inserting_after(source):
            empty = graph.graph.call_function(
                aten.new_empty_strided.default,
                (source, list(expected.shape), list(expected.stride())),
            )
        with graph.graph.inserting_after(empty):
            new = graph.graph.call_function(aten.copy_.default, (empty, source))
        empty.meta["val"] = new.meta["val"] = expected
        later |= {empty, new}
        for user in theirs:
            user.replace_input_with(source, new)
    return found


def _wanting(graph: fx.GraphModule, seen: _Strides) -> set[fx.Node]:
    """The nodes that want eager's layouts, or may: unknown operators, and the output."""
    last = next(iter(reversed(graph.graph.nodes)))
    unknown = [n for n in graph.graph.nodes if isinstance(n.target, Op) and not _is_known(n)]
    return {*seen.wants, *unknown, last}


def _pools_contiguous(node: fx.Node, expected: torch.Tensor) -> bool:
    """Whether a node is our pool, which can write its result as it has to lie."""
    return node.target is _POOL and expected.is_contiguous()


def _pool_arguments(node: fx.Node) -> tuple[Any, ...]:
    given = arguments(node)
    return tuple(given[name] for name in ("x", "kernel_size", "stride", "padding"))


def _inputs_turned(graph: fx.GraphModule, strides: dict[fx.Node, tuple[int, ...]]) -> list[Change]:
    """Turn what convolutions in channels_last find contiguous: PyTorch's own copy is slower."""
    found: list[Change] = []
    if any(map(is_mutable, graph.graph.nodes)):
        return found  # A copy would not see what is written later.
    turned: dict[fx.Node, fx.Node] = {}
    for node in calls(graph, *CONVOLUTIONS):
        source, weight = inputs(node)[:2]
        x, kept = value_of(source), constant(graph, weight)
        if x is None or kept is None or not _turns(kept) or source not in strides:
            continue
        if x.dim() != 4:
            continue
        lies = torch.empty_strided(x.shape, strides[source], device="meta")
        # A weight of single pixels lies either way, and says nothing.
        wanted = node.target is _DEPTHWISE or (_is_last(kept) and not kept.is_contiguous())
        if not wanted or not lies.is_contiguous() or _is_last(lies):
            continue
        if source not in turned:
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(_TO_LAST, (source,))
            new.meta["val"] = x
            turned[source] = new
            found.append(Change("turned to channels_last", (source.name,)))
        node.replace_input_with(source, turned[source])
    return found


def _turns(weight: torch.Tensor) -> bool:
    return weight.is_cuda and wants_channels_last(weight)


def _is_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _is_known(node: fx.Node) -> bool:
    """Whether an operation is of PyTorch or ours: others may work on memory as it lies."""
    return str(node.target).partition(".")[0] in ("aten", "mkldnn", "graphwright")


CHANNELS_LAST = Pass(
    "channels_last", _channels_last, devices=("cuda",), starts=(aten.conv2d.default,)
)
