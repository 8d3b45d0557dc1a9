"""A way that a call has gone, and that is to be recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .breaks import Node
from .steps import Step
from .transfer import Inputs

if TYPE_CHECKING:
    from .branches import Branches

Work = Callable[[Inputs], Any]


class Way:
    """A way that a call has gone, to be recorded.

    Args:
        branches: what it belongs to.
        node: the last segment that was known.
        arrival: the break after it, with its new outcome.
        script: what came then.
        mutated: positions of the arguments that were written to.
        work: runs the call on static inputs.

    Attributes:
        nodes: the segments that were recorded.
        external: memory from outside that they use.
        frozen: likewise on the host, with what it held.
        culprit: an operation that cannot be recorded.
    """

    def __init__(
        self,
        branches: Branches,
        node: Node,
        arrival: Step,
        script: Sequence[Step],
        mutated: Sequence[int],
        work: Work,
    ) -> None:
        self.nodes: list[Node] = []
        self.external: dict[int, torch.UntypedStorage] = {}
        self.frozen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self.culprit: Any = None
        self._of = branches, node, arrival, script, mutated, work

    def record(self) -> None:
        """Record it."""
        branches, node, arrival, script, mutated, work = self._of
        recorder, inputs = branches.recorder, branches.inputs
        child = Node.after(node, arrival, recorder.allocate)
        memory = node.memory_so_far() | child.memory
        known = [*node.known(), arrival]
        tracing = branches.tracing(child, script, recorder, (), known, memory, inputs)
        finish = functools.partial(branches.finish, inputs, branches.copies, mutated)
        try:
            tracing.record(work, inputs, finish)
        except Exception:
            self.culprit = tracing.culprit
            raise
        self.nodes, self.external, self.frozen = tracing.nodes, tracing.external, tracing.frozen

    def size(self) -> tuple[int, ...]:
        """Bytes of each memory segment that it would take in an empty pool."""
        branches = self._of[0]
        with branches.recorder.scratch() as sizes:
            self.record()
            taken = sizes()
            self.forget()
        return taken

    def forget(self) -> None:
        """Give up what was recorded."""
        nodes, self.nodes = self.nodes, []
        for node in nodes:
            node.close()
