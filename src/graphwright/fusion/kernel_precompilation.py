"""Asking for the kernels of a graph before it runs, so that they are compiled side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import fx

from ..ops.fused.compiling import Compiling
from ..ops.fused.fused_operator import LIBRARY, triton_works
from .nodes import is_op, value_of
from .passes.layout import CONVOLUTIONS

# Kinds of calls whose kernels this process has asked for.
_ASKED: set[str] = set()


def asking_for_kernels(
    graph: fx.GraphModule, samples: Sequence[torch.Tensor], work: Compiling
) -> AbstractContextManager[None]:
    """A block in which a graph runs to ask for the kernels of our operators.

    Args:
        graph: it is not changed.
        samples: what it is called with.
        work: what compiles them, if this process has not asked for all of them before.
    """
    kinds = {_kind(node) for node in graph.graph.nodes if _may_launch(node)} - _ASKED
    if not kinds or samples[0].device.type != "cuda" or not triton_works():
        return contextlib.nullcontext()
    _ASKED.update(kinds)
    return work.asked()


def _may_launch(node: fx.Node) -> bool:
    """Whether a kernel of ours computes it, or turns what it is given."""
    ours = getattr(node.target, "namespace", "") == LIBRARY.ns
    return ours or is_op(node, *CONVOLUTIONS)


def _kind(node: fx.Node) -> str:
    """An operator with its arguments, or their sizes."""
    values = map(value_of, node.all_input_nodes)
    sizes = [None if value is None else (value.dtype, *value.shape) for value in values]
    others = [arg for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
    return f"{node.target} {sizes} {others}"
