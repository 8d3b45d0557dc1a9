"""Regions of a graph: runs of operations that follow each other, of which equal ones are one.

Layers that a model repeats are the same operations on tensors of the same kinds. A compiler that
gets each such region once, with the weights as inputs, takes a fraction of the time that it takes
for the whole. PyTorch calls this regional compilation and has users name the module; here the
regions are found in the graph of a call.

A graph is cut where few results are needed later: between residual blocks that is one, inside of
them more. Parts that always follow each other are joined again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .nodes import roots, written_by


@dataclass(frozen=True)
class GraphRegion:
    """Some operations of a graph that follow each other.

    Attributes:
        nodes: the operations, in order.
        inputs: what they take from elsewhere: arguments, constants and results, in order of use.
        outputs: those of them that others use.
        key: equal for regions of one graph that are the same on other inputs.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    key: int

    def graph(self) -> fx.GraphModule:
        """A graph of its own, from its inputs to a tuple of its outputs."""
        made = fx.Graph()
        new = {node: made.placeholder(f"input_{n}") for n, node in enumerate(self.inputs)}
        for node in self.nodes:
            new[node] = made.node_copy(node, new.__getitem__)
        made.output(tuple(new[node] for node in self.outputs))
        return fx.GraphModule(nn.Module(), made)


class TensorKind(NamedTuple):
    """What compiled code depends on, of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """A tensor's kind; one without strides has none."""
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return cls(tensor.shape, strides, tensor.dtype, tensor.device, tensor.layout)


def kinds_of(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, TensorKind]:
    """The kinds of all tensors in a graph, seen in a run of it on some inputs."""
    run = _ObservedRun(graph)
    run.run(*inputs)
    return run.kinds


def regions_of(graph: fx.GraphModule, kinds: Mapping[fx.Node, TensorKind]) -> list[GraphRegion]:
    """The regions of a graph, in order; together they are all of its operations."""
    return _Cutting(graph, kinds).regions()


class _ObservedRun(fx.Interpreter):
    """Runs a graph and notes what kinds of tensors there are."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.kinds: dict[fx.Node, TensorKind] = {}

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, torch.Tensor):
            self.kinds[n] = TensorKind.of(found)
        return found


class _Cutting:
    """Finds the regions of one graph."""

    def __init__(self, graph: fx.GraphModule, kinds: Mapping[fx.Node, TensorKind]) -> None:
        self._kinds = kinds
        self._operations = [node for node in graph.graph.nodes if node.op == "call_function"]
        self._place = {node: number for number, node in enumerate(self._operations)}
        self._keys: dict[Hashable, int] = {}
        # Where each result is used last.
        self._ends = [
            max((self._place.get(user, len(self._operations)) for user in node.users), default=-1)
            for node in self._operations
        ]
        self._whole = self._kept_whole()

    def regions(self) -> list[GraphRegion]:
        parts = self._split([self._region(part) for part in self._parts()])
        count = 0
        while count != len(parts):
            count = len(parts)
            parts = self._joined(parts)
        return parts

    def _parts(self) -> Iterator[Sequence[fx.Node]]:
        """The operations, cut where the number of results that are needed later is least."""
        alive, before, fell, begin = 0, 0, False, 0
        ending = Counter(self._ends)
        for number, end in enumerate(self._ends):
            alive += (end > number) - ending[number]
            if alive > before and fell and number not in self._whole:
                yield self._operations[begin:number]
                begin, fell = number, False
            fell = alive < before or (fell and alive == before)
            before = alive
        yield self._operations[begin:]

    def _split(self, parts: Sequence[GraphRegion]) -> list[GraphRegion]:
        """The parts, with those split that begin or end with another one.

        The first layer and the last one have something before them, or after.
        """
        count = Counter(part.key for part in parts)
        known = {part.key: len(part.nodes) for part in parts}
        sizes = sorted({*known.values()}, reverse=True)
        made: list[GraphRegion] = []
        for part in parts:
            if count[part.key] > 1:
                made.append(part)
                continue
            nodes, count_of = part.nodes, len(part.nodes)
            cuts = (size for size in sizes if size < count_of)
            begin = next((n for n in cuts if self._is_known(nodes[:n], nodes[n], known)), 0)
            cuts = (count_of - size for size in sizes if begin < count_of - size)
            end = next((n for n in cuts if self._is_known(nodes[n:], nodes[n], known)), count_of)
            pieces = nodes[:begin], nodes[begin:end], nodes[end:]
            made += [self._region(piece) for piece in pieces if piece]
        return made

    def _is_known(self, nodes: Sequence[fx.Node], cut: fx.Node, known: Mapping[int, int]) -> bool:
        """Whether some nodes are a known region, and a cut may be in front of one."""
        return self._place[cut] not in self._whole and self._region(nodes).key in known

    def _kept_whole(self) -> set[int]:
        """Places in front of which no cut may be.

        What is no tensor is taken apart in the region that makes it; and what is written to in
        place is written to there, so that no region writes to its inputs.
        """
        found: set[int] = set()
        for number, (node, end) in enumerate(zip(self._operations, self._ends, strict=True)):
            if node not in self._kinds:
                found.update(range(number + 1, end + 1))
            for written in written_by(node):
                made = [self._place.get(root, number) for root in roots(written)]
                found.update(range(min(made, default=number) + 1, number + 1))
        return found

    def _region(self, nodes: Sequence[fx.Node]) -> GraphRegion:
        inside = {node: number for number, node in enumerate(nodes)}
        inputs: dict[fx.Node, int] = {}

        def named(value: Any) -> Hashable:
            if isinstance(value, fx.Node):
                if value in inside:
                    return inside[value]
                return "input", inputs.setdefault(value, len(inputs))
            if isinstance(value, (tuple, list)):
                return type(value), tuple(map(named, value))
            if isinstance(value, dict):
                return dict, tuple((key, named(each)) for key, each in value.items())
            return type(value), repr(value)

        written = tuple((each.target, named(each.args), named(each.kwargs)) for each in nodes)
        kinds = tuple(self._kinds.get(node, node) for node in inputs)  # Else like no other.
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        key = (written, kinds, tuple(inside[node] for node in outputs))
        return GraphRegion(nodes, [*inputs], outputs, self._keys.setdefault(key, len(self._keys)))

    def _joined(self, parts: Sequence[GraphRegion]) -> list[GraphRegion]:
        """The parts, with those joined that always follow each other in the same way."""
        count = Counter(part.key for part in parts)
        pairs = Counter((a.key, b.key) for a, b in itertools.pairwise(parts))
        always = {(a, b) for (a, b), n in pairs.items() if a != b and n == count[a] == count[b]}
        found: dict[tuple[int, int], set[int]] = {}
        for a, b in itertools.pairwise(parts):
            if (pair := (a.key, b.key)) in always:
                found.setdefault(pair, set()).add(self._region([*a.nodes, *b.nodes]).key)
        made: list[GraphRegion] = []
        for part in parts:
            made.append(part)
            if len(made) > 1:
                pair = made[-2].key, part.key
                if len(found.get(pair, ())) == 1:
                    second, first = made.pop(), made.pop()
                    made.append(self._region([*first.nodes, *second.nodes]))
        return made
