"""CUDA graphs as recordings: replay, and copies between the caller's memory and the graph's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...errors import CaptureError
from ..inspection.node import Node
from ..marks import mark, wanted
from ..static_inputs import byte_view
from . import driver, node_times, reading
from .driver import CopyNode


class CudaRecording:
    """A CUDA graph.

    The copies into its feeds and out of its drains are nodes of the graph if the driver lets us set
    their addresses; else they are made before and after the launch.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        feeds: Sequence[torch.Tensor],
        drains: Sequence[torch.Tensor],
        nodes: Sequence[CopyNode | None] | None,
        external: list[torch.UntypedStorage],
        on_close: Callable[[], None],
        order: Callable[[], None],
    ) -> None:
        self.name = "graph"
        self.order = order
        self.external = external
        self._graph: torch.cuda.CUDAGraph | None = graph
        # The C++ method, without the Python method around it.
        self._launch = super(torch.cuda.CUDAGraph, graph).replay
        self._feeds = feeds
        self._drains = drains
        self._nodes = nodes
        self._pair: tuple[CopyNode, CopyNode] | None = None
        if nodes is not None and len(feeds) == 1 and len(nodes) == 2:
            first, last = nodes
            if first is not None and last is not None:
                self._pair = first, last
        self._copying = True
        self._on_close = on_close

    @property
    def nodes(self) -> int:
        """Nodes of the graph; 0 if the driver does not say."""
        if self._graph is None or driver.libcuda() is None:
            return 0
        return driver.node_count(self._graph.raw_cuda_graph())

    def inspect(self) -> tuple[list[Node], list[int]]:
        """The nodes that the driver tells of, and their handles."""
        if self._graph is None or driver.libcuda() is None:
            raise CaptureError("There is no CUDA driver to ask what the graph consists of.")
        nodes, handles = reading.nodes_of(self._graph.raw_cuda_graph())
        copies = self._copies()
        named = [
            node if handle not in copies else replace(node, name=copies[handle])
            for node, handle in zip(nodes, handles, strict=True)
        ]
        return named, handles

    def dump(self, path: Path) -> None:
        """Have the driver write the graph to a file."""
        assert self._graph is not None
        reading.dump(self._graph.raw_cuda_graph(), path)

    def constants(self) -> list[tuple[bytes, ...] | None]:
        """What is written into each node, in the order of `inspect`; None where nobody tells."""
        assert self._graph is not None
        return reading.constants_of(reading.handles_of(self._graph.raw_cuda_graph()))

    @contextlib.contextmanager
    def patched(self, place: int, arguments: Sequence[bytes]) -> Iterator[None]:
        """Launch the graph with other arguments of one kernel, inside the block.

        Args:
            place: of the node, in the order of `inspect`.
            arguments: as in `constants`.
        """
        assert self._graph is not None
        handle = reading.handles_of(self._graph.raw_cuda_graph())[place]
        (before,) = reading.constants_of([handle])
        assert before is not None
        executable = self._graph.raw_cuda_graph_exec()
        reading.set_arguments(executable, handle, arguments)
        try:
            yield
        finally:
            reading.set_arguments(executable, handle, before)

    def timed(self, nodes: Sequence[Node]) -> list[Node] | None:
        """The nodes with the times that CUPTI tells of one replay."""
        assert self._graph is not None
        copies, handles = self._copies(), reading.handles_of(self._graph.raw_cuda_graph())
        off = {index for index, handle in enumerate(handles) if handle in copies}
        device = next((feed.device for feed in self._feeds), None)
        return node_times.with_times(nodes, node_times.spans_of(self.replay, device), off)

    def _copies(self) -> dict[int, str]:
        """Handles of the nodes that copy arguments in and results out, and what they do."""
        found = {}
        for place, node in enumerate(self._nodes or ()):
            if node is not None:
                result = place - len(self._feeds)
                what = f"argument {place} in" if result < 0 else f"result {result} out"
                found[node.handle] = what
        return found

    def replay(self) -> None:
        """Launch the graph without its copies."""
        assert self._graph is not None
        if self._copying and self._nodes is not None:
            self._enable_copies(False)
        if wanted():
            with mark(self.name):
                self._launch()
            return
        self._launch()

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Launch the graph with its copies between the caller's memory and its own."""
        if wanted():
            with mark(self.name):
                self._run(sources, targets)
            return
        self._run(sources, targets)

    def _run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        assert self._graph is not None
        nodes = self._nodes
        if nodes is not None:
            if not self._copying:
                self._enable_copies(True)
            if self._pair is not None:
                # One argument, one result: the loop below, unrolled.
                first, last = self._pair
                address = sources[0].data_ptr()
                if address != first.address:
                    first.point_at(address)
                address = targets[0].data_ptr()
                if address != last.address:
                    last.point_at(address)
                self._launch()
                return
            for node, tensor in zip(nodes, (*sources, *targets), strict=True):
                if node is not None:
                    address = tensor.data_ptr()
                    if address != node.address:
                        node.point_at(address)
            self._launch()
            return
        with torch.no_grad():
            for feed, source in zip(self._feeds, sources, strict=True):
                feed.copy_(byte_view(source))
            self._launch()
            for drain, target in zip(self._drains, targets, strict=True):
                byte_view(target).copy_(drain)

    def close(self) -> None:
        """Destroy the graph."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            del self._launch
            self._on_close()
        self._nodes = self._pair = None
        self._feeds = self._drains = ()
        self.external = []

    def _enable_copies(self, on: bool) -> None:
        for node in self._nodes or ():
            if node is not None:
                node.enable(on)
        self._copying = on


def find_copies(
    graph: torch.cuda.CUDAGraph,
    into: Sequence[torch.Tensor],
    out_of: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[CopyNode | None] | None:
    """Find the nodes that copy into the feeds and out of the drains; None if any is missing.

    Args:
        graph: the captured graph.
        into: the feeds, which were copied onto themselves as there was no source yet.
        out_of: the drains, each with the memory that it was copied into.
    """
    found: dict[tuple[int, int, int], list[Any]] = {}
    for node, params in driver.copies(graph.raw_cuda_graph()):
        key = params.srcDevice, params.dstDevice, params.WidthInBytes
        found.setdefault(key, []).append((node, params))
    executable = graph.raw_cuda_graph_exec()
    nodes: list[CopyNode | None] = []
    onto_itself = [*zip(into, into, strict=True)]
    for end, pairs in (("src", onto_itself), ("dst", out_of)):
        for source, target in pairs:
            if not source.numel():
                nodes.append(None)
                continue
            matches = found.get((source.data_ptr(), target.data_ptr(), source.numel()), [])
            if len(matches) != 1:
                return None
            node, params = matches[0]
            nodes.append(CopyNode(executable, node, params, end))
    return nodes
