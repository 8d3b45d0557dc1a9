"""The nodes of a CPU tape: its operations, and which of them reads what another one wrote.

A tape replays its operations one after the other. Its edges are the data flow: from the last
operation that wrote to some bytes to each that reads them, or writes to a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...calls.operations import tensors, written
from ..inspection.node import Node
from ..inspection.origins import bytes_of
from ..static_inputs import span


class Repeated(Protocol):
    """One operation of a tape."""

    @property
    def func(self) -> Any: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def results(self) -> tuple[torch.Tensor | None, ...]: ...


class _Writes:
    """Who wrote last to which bytes."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # start, end, index of the writer

    def of(self, tensor: torch.Tensor) -> set[int]:
        """The operations that wrote to any byte of a tensor."""
        start, end = _range(tensor)
        return {by for low, high, by in self._ranges if low < end and start < high}

    def add(self, tensor: torch.Tensor, by: int) -> None:
        """An operation writes to a tensor; what it covers was written by no other any more."""
        start, end = _range(tensor)
        self.forget(start, end)
        if end > start:
            self._ranges.append((start, end, by))

    def forget(self, start: int, end: int) -> None:
        """Nothing holds what was written inside a range."""
        self._ranges = [r for r in self._ranges if not (start <= r[0] and r[1] <= end)]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + span(tensor)


def nodes_of(steps: Sequence[Repeated | tuple[int, int]]) -> list[Node]:
    """The operations of a tape as nodes.

    Args:
        steps: operations; and between them ranges of addresses that nobody used from there on.
    """
    writes, nodes = _Writes(), list[Node]()
    for step in steps:
        if isinstance(step, tuple):
            writes.forget(*step)
            continue
        given, made = (step.args, step.kwargs), [t for t in step.results if t is not None]
        outputs = [*made, *written(step.func, step.args, step.kwargs)]
        before: set[int] = set()
        for tensor in (*tensors(given), *written(step.func, step.args, step.kwargs)):
            before |= writes.of(tensor)
        index, name = len(nodes), str(step.func)
        for tensor in outputs:
            writes.add(tensor, index)
        edges = tuple(sorted(before))
        size = bytes_of(given, made)
        nodes.append(Node(index, "operation", name, edges, operation=name, bytes=size))
    return nodes
