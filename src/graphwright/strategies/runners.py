"""Ways to call what a compiler made. Plain calls need none; `graph` replays a captured graph."""

from __future__ import annotations

from typing import Any

import torch

from ..graphs.callgraph import CallGraph
from ..graphs.capture import capture
from ..signature import Args, Kwargs
from .base import AVAILABLE, Availability, Built, Runner, tiny_model


def _probe(device: torch.device) -> Availability:
    if device.type != "cuda":
        # The CPU recorder repeats the same operations one by one: it is there to test with.
        return Availability(False, "CUDA graphs need a GPU", "Run on a GPU.")
    model, x = tiny_model(device)
    with capture(model, x) as graph:
        graph(x)
    return AVAILABLE


def _wrap(built: Built, args: Args, kwargs: Kwargs) -> Built:
    graph = CallGraph(built.call, args, kwargs)
    graph.warm()
    graph.record()

    def call(*args: Any, **kwargs: Any) -> Any:
        # Whoever calls a candidate has found that the call fits.
        return graph.run(args, kwargs)

    return Built(call, built.notes, built.holds_weights, graph.launcher())


GRAPH = Runner("graph", 5, _probe, _wrap)
