"""Nodes: what a captured graph consists of, as a list, table, JSON, DOT and SVG."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import overload

from .drawing import to_dot, to_svg
from .node import Node, idle_us
from .table import to_table

SCHEMA, SCHEMA_VERSION = "graphwright.nodes", 1


class Nodes(Sequence[Node]):
    """The nodes of a graph, in an order that keeps each after its predecessors.

    `str()` is a table of at most 80 columns.

    Attributes:
        name: of the graph.
        notes: what is not known, and why, as sentences.
    """

    name: str
    notes: tuple[str, ...]

    def __init__(self, name: str, nodes: Sequence[Node], notes: Sequence[str] = ()) -> None:
        self.name = name
        self.notes = tuple(notes)
        self._nodes = tuple(nodes)

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | Sequence[Node]:
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    @property
    def kinds(self) -> Counter[str]:
        """How many nodes there are of each kind."""
        return Counter(node.kind for node in self)

    @property
    def branches(self) -> int:
        """The largest number of chains of nodes in a segment."""
        return max((node.branch + 1 for node in self), default=0)

    @property
    def idle_us(self) -> float | None:
        """Microseconds of the timed replay in which no node ran; None if it was not timed."""
        return idle_us(self)

    def to_json(self) -> str:
        """The nodes as JSON, with the version of the schema."""
        nodes = [asdict(node) for node in self]
        head = {"schema": SCHEMA, "version": SCHEMA_VERSION, "name": self.name}
        return json.dumps(head | {"notes": self.notes, "nodes": nodes}, indent=1) + "\n"

    def to_dot(self) -> str:
        """The graph in the language of graphviz: branches side by side, a frame per module."""
        return to_dot(self.name, self)

    def to_svg(self) -> str:
        """The graph as a picture, laid out by graphviz.

        Raises:
            GraphwrightError: graphviz is not installed, or fails.
        """
        return to_svg(self.name, self)

    def __str__(self) -> str:
        return to_table(self.name, self, self.notes)

    def __repr__(self) -> str:
        return f"<Nodes of {self.name}: {len(self)}>"
