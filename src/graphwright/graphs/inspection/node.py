"""Node: one node of a captured graph, as data; and the branches and gaps of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Node:
    """One node of a graph. What cannot be known is None.

    Attributes:
        index: its place in the list, from 0; predecessors come before it.
        kind: "kernel", "copy", "memset", "operation" (on the CPU), "empty", "host", "graph",
            "event record", "event wait", "allocation", "free", "conditional" or "other".
        name: the kernel's name, demangled; the kind of copy; on the CPU the operation.
        predecessors: indices of the nodes that must end before it begins.
        branch: number of the chain that it is in, from 0: chains run side by side where the edges
            let them. A chain follows a captured stream as far as its edges show it.
        operation: the ATen operation that it belongs to.
        module: path of the submodule that ran the operation, as named_modules() has it; "" is the
            captured module itself.
        line: `file:line` of the user's code that ran it, the innermost one.
        bytes: of a copy or memset, what it moves; on the CPU, of the tensors that the operation is
            given and makes. The driver does not tell what a kernel moves.
        grid: blocks of a kernel, in x, y and z.
        block: threads of a block, in x, y and z.
        shared_bytes: shared memory of a block, static and dynamic.
        registers: of a thread.
        start_us: when it began in the timed replay, in microseconds after the first node.
        duration_us: how long it took there, in microseconds.
        segment: number of the graph that it is in, where a call is divided into segments.
    """

    index: int
    kind: str
    name: str
    predecessors: tuple[int, ...] = ()
    branch: int = 0
    operation: str | None = None
    module: str | None = None
    line: str | None = None
    bytes: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    start_us: float | None = None
    duration_us: float | None = None
    segment: int = 0

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two captures of the same work have in common, addresses left out."""
        edges = self.predecessors
        return self.kind, self.name, self.grid, self.block, self.shared_bytes, self.bytes, edges


def gaps(nodes: Sequence[Node]) -> list[float | None]:
    """Microseconds, before each node, in which none ran; None for a node that was not timed."""
    found: list[float | None] = [None] * len(nodes)
    timed = [node for node in nodes if node.start_us is not None and node.duration_us is not None]
    end: float | None = None
    for node in sorted(timed, key=lambda node: node.start_us or 0.0):
        start, took = node.start_us or 0.0, node.duration_us or 0.0
        found[node.index] = 0.0 if end is None else max(0.0, start - end)
        end = start + took if end is None else max(end, start + took)
    return found


def idle_us(nodes: Sequence[Node]) -> float | None:
    """Microseconds of the timed replay in which no node ran; None if it was not timed."""
    if not any(node.duration_us is not None for node in nodes):
        return None
    return sum(gap for gap in gaps(nodes) if gap)


def in_order(nodes: Sequence[Node]) -> list[int]:
    """Positions of nodes in an order that keeps each after its predecessors, else as they are.

    Args:
        nodes: with the positions of their predecessors.
    """
    if all(before < node.index for node in nodes for before in node.predecessors):
        return [*range(len(nodes))]
    following: list[list[int]] = [[] for _ in nodes]
    waits = [len(node.predecessors) for node in nodes]
    for node in nodes:
        for before in node.predecessors:
            following[before].append(node.index)
    ready = [node.index for node in reversed(nodes) if not node.predecessors]
    order: list[int] = []
    while ready:
        place = ready.pop()
        order.append(place)
        for after in reversed(following[place]):
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return order


def arranged(nodes: Sequence[Node]) -> list[Node]:
    """Nodes in an order that keeps each after its predecessors, with the branches that they form.

    A node continues the branch of a predecessor that no other node continues, else one whose last
    node has ended before it begins; one that finds neither begins a branch.
    """
    order = in_order(nodes)
    place = {old: new for new, old in enumerate(order)}
    moved = [
        replace(
            nodes[old],
            index=new,
            predecessors=tuple(sorted(place[before] for before in nodes[old].predecessors)),
        )
        for new, old in enumerate(order)
    ]
    earlier: list[int] = []  # of each node, a bit for each one that ends before it begins
    branch: list[int] = []
    tips: list[int] = []  # the last node of each branch
    for node in moved:
        known = 0
        for before in node.predecessors:
            known |= earlier[before] | 1 << before
        earlier.append(known)
        after = [number for number, tip in enumerate(tips) if known >> tip & 1]
        # Where several branches meet, the oldest one goes on.
        direct = [number for number in after if tips[number] in node.predecessors]
        chosen = min(direct or after or [len(tips)])
        branch.append(chosen)
        tips[chosen : chosen + 1] = [node.index]
    return [replace(node, branch=branch[node.index]) for node in moved]
