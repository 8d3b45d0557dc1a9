"""What a pass is, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from ..nodes import Op, copy_of, drop_dead_code, finished, is_op


@dataclass(frozen=True)
class Change:
    """Something that a pass did.

    Attributes:
        what: in words.
        where: the names of the graph's nodes that it was done to.
    """

    what: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {' + '.join(self.where)}"


@dataclass(frozen=True)
class PassResult:
    """What a pass made of a graph.

    Attributes:
        model: another graph module with the same tensors in and out; the old one if `changes` is
            empty.
        changes: what was done.
    """

    model: fx.GraphModule
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Pass:
    """A rewriting of graphs that leaves their numbers as they are.

    Attributes:
        name: by which it is asked for.
        rewrite: changes a graph for a device in place and says what it did.
        devices: kinds of device that it is for.
        starts: operations; a graph without any of these has nothing for it. () for any graph.
    """

    name: str
    rewrite: Callable[[fx.GraphModule, torch.device], list[Change]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    starts: tuple[Op, ...] = ()

    def __call__(
        self, graph: fx.GraphModule, device: torch.device, *, in_place: bool = False
    ) -> PassResult:
        """Rewrite a copy of a graph; the graph itself, without making its code, if `in_place`.

        Before and after, the graph has the same arguments and the same number of results, and it is
        well formed (which is not looked at if `in_place`: one look after all passes is enough):
        else ValueError or RuntimeError is raised.
        """
        here = not self.starts or any(is_op(node, *self.starts) for node in graph.graph.nodes)
        if device.type not in self.devices or not here:
            return PassResult(graph, ())
        # Somebody else's may run what it changes, print it, or leave it in pieces.
        ours = getattr(self.rewrite, "__module__", "").startswith(__package__)
        in_place = in_place and ours
        if not in_place:
            graph.graph.lint()
        changed, ends = graph if in_place else copy_of(graph, code=not ours), _ends(graph)
        with torch.no_grad():
            changes = tuple(self.rewrite(changed, device))
        if not changes:
            return PassResult(graph, ())
        if in_place:
            drop_dead_code(changed.graph)
        else:
            changed = finished(changed)
        if _ends(changed) != ends:
            raise ValueError(f"{self.name} has changed what goes in or comes out")
        return PassResult(changed, changes)


def _ends(graph: fx.GraphModule) -> tuple[int, int]:
    nodes = graph.graph.nodes
    outputs = next(iter(reversed(nodes))).args[0]
    assert isinstance(outputs, list | tuple)
    return sum(node.op == "placeholder" for node in nodes), len(outputs)
