"""Ways to call what a compiler made. Plain calls need none; `graph` replays a CUDA graph."""

from __future__ import annotations

import torch

from ..graphs.cuda import CudaGraph
from ..signature import Args, Kwargs
from .base import AVAILABLE, Availability, Built, Runner, tiny_model, without_grad


def _probe(device: torch.device) -> Availability:
    if device.type != "cuda":
        return Availability(False, "CUDA graphs need a GPU", "Run on a GPU.")
    model, x = tiny_model(device)
    CudaGraph(without_grad(model), (x,), {})(x)
    return AVAILABLE


def _wrap(built: Built, args: Args, kwargs: Kwargs) -> Built:
    graph = CudaGraph(without_grad(built.call), args, kwargs)
    return Built(graph, built.notes, built.holds_weights)


GRAPH = Runner("graph", 5, _probe, _wrap)
