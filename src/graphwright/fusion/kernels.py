"""Asking for the kernels of a graph before it runs, so that they are compiled side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ..calls.first_use import unseen
from ..ops.fused import launch_cache
from ..ops.fused.compiling import Compiling, compiling
from ..ops.fused.fused_operator import LIBRARY, triton_works
from .nodes import value_of

# Kinds of calls whose kernels this process has asked for.
_ASKED: set[str] = set()


@contextlib.contextmanager
def compiling_kernels(
    graph: fx.GraphModule, samples: Sequence[torch.Tensor]
) -> Iterator[Compiling | None]:
    """Compile what our operators in a graph launch on a GPU, while a block runs.

    Args:
        graph: it is not changed.
        samples: what it is called with.
    """
    nodes = [node for node in graph.graph.nodes if _is_ours(node)]
    kinds = set(map(_kind, nodes)) - _ASKED
    if not kinds or samples[0].device.type != "cuda" or not triton_works():
        yield None
        return
    with compiling(lambda: _Asking(graph).ask(samples)) as work:
        yield work
    _ASKED.update(kinds)


class _Asking(fx.Interpreter):
    """Runs a graph without data, but for calls of our operators: these get memory as they would.

    What nodes were like when they were traced is of no use here: passes have changed how they lie.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._mode = FakeTensorMode(allow_fallback_kernels=True)
        self._seen: set[str] = set()

    def ask(self, samples: Sequence[torch.Tensor]) -> None:
        """Call each of our operators, once for a kind of call."""
        with unseen(), torch.no_grad():
            fakes = [self._mode.from_tensor(sample, static_shapes=True) for sample in samples]
            with self._mode:
                self.run(*fakes)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A constant without data."""
        return self._mode.from_tensor(super().get_attr(target, args, kwargs), static_shapes=True)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation returns, without data."""
        if getattr(target, "namespace", "") == LIBRARY.ns:
            with unset_fake_temporarily():
                mine = [_memory(value) for value in args]
                named = {name: _memory(value) for name, value in kwargs.items()}
                kind = launch_cache.kind_of(str(target), (*mine, *named.values()))
                if kind not in self._seen:
                    self._seen.add(kind)
                    target(*mine, **named)
        return super().call_function(target, args, kwargs)


def _is_ours(node: fx.Node) -> bool:
    """Whether it is an operator that launches a kernel of Triton's."""
    return bool(getattr(node.target, "namespace", "") == LIBRARY.ns)


def _kind(node: fx.Node) -> str:
    """An operator with its arguments, or their sizes."""
    values = map(value_of, node.all_input_nodes)
    sizes = [None if value is None else (value.dtype, *value.shape) for value in values]
    others = [arg for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
    return f"{node.target} {sizes} {others}"


def _memory(value: Any) -> Any:
    """Memory like a tensor's: nothing is read from it."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
