"""Tracing a call to a graph of ATen operations, with the model's tensors as its constants.

The operations are those that the model's Python calls (conv2d, batch_norm, linear, layer_norm),
before PyTorch decomposes them, so that patterns are short. They are found by running the call
once. Nothing is compiled: a graph of some hundred operations takes some tenths of a second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..calls.dependencies import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS, Dependencies
from ..calls.first_use import unseen
from ..calls.leaves import describe
from ..calls.objects import flatten_result
from ..calls.serialization import TreeTemplate
from ..calls.snapshots import ModuleState, clone_leaves
from ..calls.split import Args, Kwargs, flatten, unflatten
from ..errors import GraphwrightError, first_line
from ..graphs.conditions import answering_as_eager, pretend_capturing, questions
from ..graphs.python_state import PythonState
from ..graphs.segments.observing_tracer import reads_of_arguments
from ..ops.fused.launch_cache import Launch, answering
from .nodes import constant, leaf_names, roots, written_by

# Literals: what a constant is that was made during the call.
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_EMPTY = torch.ops.aten.empty_strided.default
_CONTEXTS = (torch._C._set_grad_enabled,)


class NotTraced(Exception):
    """Why there is no graph of a call."""


@dataclass
class Traced:
    """A graph from the tensors among a call's leaves to those among its results.

    `strides` are those of eager's results, `out` is what these belong to.
    """

    graph: fx.GraphModule
    strides: Sequence[tuple[int, ...]]
    slots: Sequence[int]
    out: TreeTemplate

    def call(self, graph: fx.GraphModule) -> GraphCall:
        """A function that is called as the model is, by a graph that came of this one."""
        return GraphCall(graph, self.slots, self.out)


class GraphCall:
    """A graph that is called as the model is.

    Args:
        graph: from the tensors among a call's leaves to those among its results.
        slots: which of the leaves these are.
        out: what the results belong to.
        launches: of kernels that are used instead of compiling them.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        slots: Sequence[int],
        out: TreeTemplate,
        launches: Mapping[str, Launch] | None = None,
    ) -> None:
        self.graph, self.slots, self.out = graph, tuple(slots), out
        self.launches = launches or {}
        # Not as a module, at whose calls global hooks run.
        self._forward = graph.forward

    @property
    def packed(self) -> list[torch.Tensor]:
        """Constants in a library's layout."""
        return [t for t in self.graph.buffers() if t.layout is not torch.strided]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten(args, kwargs)
        with torch.no_grad(), answering(self.launches):
            return self.out.fill(self._forward(*[leaves[slot] for slot in self.slots]))


def trace(model: nn.Module, args: Args, kwargs: Kwargs, state: ModuleState | None = None) -> Traced:
    """The graph of a call: of what eager code runs, if that reads nothing from the arguments.

    Else of what libraries run in captures, where they leave reads out.

    Args:
        model: what is called.
        args: of the call.
        kwargs: likewise.
        state: the model's state, if it is known already.

    Raises:
        NotTraced: there is none that stands for the call.
    """
    before = questions()
    try:
        with answering_as_eager():
            return _trace(model, args, kwargs, state)
    except NotTraced:
        if questions() == before:
            raise
    return _trace(model, args, kwargs, state)


def _trace(model: nn.Module, args: Args, kwargs: Kwargs, state: ModuleState | None) -> Traced:
    _refuse_surroundings(model)
    leaves, spec = flatten(args, kwargs)
    slots = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not slots:
        raise NotTraced("no tensor among the arguments")
    kept: list[Any] = []

    def on_leaves(given: Sequence[Any]) -> Any:
        mine, named = unflatten(list(given), spec)
        return model(*mine, **named)

    def on_tensors(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = list(leaves)
        for slot, tensor in zip(slots, tensors, strict=True):
            given[slot] = tensor
        found, tree = flatten_result(on_leaves(given))
        for place, leaf in enumerate(found):
            describe(leaf, f"result {place}")  # An object that may hold tensors is refused.
        kept[:] = [TreeTemplate.of(found, tree)]
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    with unseen():
        state = ModuleState(model, weights=False) if state is None else state
        undo = PythonState(model)
    device = leaves[slots[0]].device
    generators = [device] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(generators), pretend_capturing():
            # The first call may fill caches, which are no part of the work.
            with state.watching(), state.watching_addresses(), undo.refusing_advances():
                on_leaves(clone_leaves(leaves))
            undo.check()
            with state.watching():
                first, _ = flatten_result(on_leaves(clone_leaves(leaves)))
                undo.check()
                read = reads_of_arguments(on_leaves, leaves, device)
                undo.check()
                if read is not None:
                    where = "" if read.place is None else f" at {read.place}"
                    raise NotTraced(f"the host reads a value of the arguments{where}")
                graph = _graph_of(on_tensors, leaves)
                undo.check()
    except NotTraced:
        raise
    except GraphwrightError as error:
        raise NotTraced(first_line(error)) from error
    except Exception as error:
        raise NotTraced(f"{type(error).__name__}: {first_line(error)}") from error
    finally:
        state.restore()
        undo.restore(python=True)
    if _unwatched(graph, model):
        # A cache that was empty, and is again: what it is filled with comes from the model.
        try:
            with torch.no_grad(), torch.random.fork_rng(generators), pretend_capturing():
                with state.watching():
                    graph = _graph_of(on_tensors, leaves)
        except Exception as error:
            raise NotTraced(f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            state.restore()
            undo.restore(python=True)
    _check(graph, model)
    strides = [leaf.stride() for leaf in first if isinstance(leaf, torch.Tensor)]
    return Traced(graph, strides, slots, kept[0])


def _refuse_surroundings(model: nn.Module) -> None:
    """Refuse hooks, which no graph runs, and autocast, which it would not follow."""
    if global_hooks():
        raise NotTraced("there are global forward hooks")
    for name, child in model.named_modules():
        if any(getattr(child, kind, None) for kind in FORWARD_HOOKS):
            raise NotTraced(f"{name or 'the module'} has forward hooks")
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise NotTraced("autocast is on: convert the model instead")


def global_hooks() -> bool:
    """Whether there are hooks that run at calls of all modules."""
    return any(getattr(torch.nn.modules.module, kind, None) for kind in GLOBAL_FORWARD_HOOKS)


def _graph_of(on_tensors: Callable[..., Any], leaves: Sequence[Any]) -> fx.GraphModule:
    """The operations of one run."""
    given = [leaf for leaf in clone_leaves(leaves) if isinstance(leaf, torch.Tensor)]
    # One mode for what the graph's nodes are like: else there is one for each of them, a third of
    # the time.
    with tracing(TracingContext(_Likenesses(allow_fallback_kernels=True))):
        graph: fx.GraphModule = make_fx(on_tensors, pre_dispatch=True)(*given)
    return graph


class _Likenesses(FakeTensorMode):
    """Makes what the nodes of a trace are like, without all that a fake mode does for operations.

    A trace asks it for one thing: an empty tensor like a node's.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is not _EMPTY:
            return super().__torch_dispatch__(func, types, args, options)
        device = torch.device(options.pop("device"))
        return FakeTensor(self, func(*args, **options, device="meta"), device)


def _unwatched(graph: fx.GraphModule, model: nn.Module) -> bool:
    """Whether the graph holds a tensor that could change without anybody's notice."""
    own = {t.untyped_storage()._cdata for _, t in Dependencies(model).tensors if _has_memory(t)}
    for node in graph.graph.nodes:
        tensor = constant(graph, node)
        if tensor is None or all(user.target in _LITERALS for user in node.users):
            continue
        if not _has_memory(tensor) or tensor.untyped_storage()._cdata not in own:
            return True
    return False


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage to know it by; sparse and wrapped ones have none."""
    return tensor.layout is torch.strided and not is_wrapped(tensor)


def _check(graph: fx.GraphModule, model: nn.Module) -> None:
    """Refuse what a graph of operations would not repeat, and take out what it needs not."""
    if _unwatched(graph, model):
        raise NotTraced("it works with a tensor that neither the model nor what it holds has")
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _CONTEXTS:
            graph.graph.erase_node(node)  # All of it runs without gradients.
        elif node.op not in ("placeholder", "get_attr", "output", "call_function"):
            raise NotTraced(f"it has a {node.op} of {node.target}")
        elif node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
            if node.target is not operator.getitem:
                raise NotTraced(f"{leaf_names(node)} is no operation of tensors")
        elif node.target is torch.ops.aten.as_strided.default:
            raise NotTraced("as_strided depends on where its argument lies")
        elif node.op == "call_function":
            for value in written_by(node):
                if any(root.op in ("placeholder", "get_attr") for root in roots(value)):
                    raise NotTraced(f"{leaf_names(node)} writes to what is not the call's own")
    graph.recompile()
