"""Compiling the kernels of a graph ahead of its first run, side by side."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from ..ops.fused import launch_cache
from ..ops.fused.fused_operator import LIBRARY, triton_works
from .nodes import value_of


def compile_kernels(graph: fx.GraphModule, device: torch.device) -> None:
    """Compile what our operators in a graph will launch on a GPU.

    It is for time alone: what fails here fails again when the graph runs, and is reported there.
    """
    nodes = [node for node in graph.graph.nodes if _is_ours(node)] if device.type == "cuda" else []
    if not nodes or not triton_works():
        return
    seen = set()
    with contextlib.suppress(Exception), launch_cache.compiling():
        for node in nodes:
            # Memory that nothing is read from; as aligned as all that PyTorch allocates.
            args = fx.map_arg(node.args, lambda each: _empty(each, device))
            kwargs = fx.map_arg(node.kwargs, lambda each: _empty(each, device))
            kind = launch_cache.kind_of(str(node.target), (*args, *kwargs.values()))
            if kind not in seen:
                seen.add(kind)
                node.target(*args, **kwargs)


def _is_ours(node: fx.Node) -> bool:
    """Whether it is an operator that launches a kernel of Triton's."""
    return bool(getattr(node.target, "namespace", "") == LIBRARY.ns)


def _empty(node: fx.Node, device: torch.device) -> Any:
    """Memory of a value's shape, strides and dtype."""
    value = value_of(node)
    if value is None:
        raise LookupError(f"{node.name} is no tensor")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
