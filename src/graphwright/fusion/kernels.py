"""Asking for the kernels of a graph before it runs, so that they are compiled side by side."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from ..calls.first_use import unseen
from ..ops.fused import launch_cache
from ..ops.fused.compiling import compiling
from ..ops.fused.fused_operator import LIBRARY, triton_works
from .nodes import value_of


def compiling_kernels(graph: fx.GraphModule, device: torch.device) -> AbstractContextManager[Any]:
    """Compile what our operators in a graph launch on a GPU while a block runs."""
    nodes = [node for node in graph.graph.nodes if _is_ours(node)] if device.type == "cuda" else []
    if not nodes or not triton_works():
        return contextlib.nullcontext()
    return compiling(functools.partial(_call_each, nodes, device))


def _call_each(nodes: list[fx.Node], device: torch.device) -> None:
    """Call each operator as the graph does, once for a kind of call."""
    seen = set()
    with unseen(), torch.no_grad():
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _memory(n, device))
            kind = launch_cache.kind_of(str(node.target), (*args, *kwargs.values()))
            if kind not in seen:
                seen.add(kind)
                node.target(*args, **kwargs)  # type: ignore[operator]  # it is an operator


def _is_ours(node: fx.Node) -> bool:
    """Whether it is an operator that launches a kernel of Triton's."""
    return bool(getattr(node.target, "namespace", "") == LIBRARY.ns)


def _memory(node: fx.Node, device: torch.device) -> torch.Tensor:
    """Memory like a value's: nothing is read from it."""
    value = value_of(node)
    if value is None:
        raise LookupError(f"{node.name} is no tensor")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
