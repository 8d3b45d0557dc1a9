"""One model at eight batch sizes: what their graphs share in one pool, and what a limit does."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.evaluation.measurement import Timer
from graphwright.graphs.captured_call import CapturedCall

from .. import cases

BATCHED = "resnet50"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK_SIZES = (1, 2, 4)


def _inputs(x: torch.Tensor, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    made = [torch.randn(size, *x.shape[1:]).to(device, x.dtype) for size in sizes]
    return [tensor.to(memory_format=torch.channels_last) for tensor in made]


def _pooled(model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[int, list[float]]:
    """Bytes of a pool with the graphs of these inputs, and how far each is off eager.

    That is the largest difference over eager's largest value, on other inputs, once all are there:
    each graph replays after the others were captured.
    """
    gaps = []
    with gw.MemoryPool() as pool:
        graphed = gw.graph(model, pool=pool, on_miss="error")
        graphed.prepare([(x,) for x in inputs], progress=False)
        for x in inputs:
            other = torch.empty_like(x).copy_(x.roll(1, -1))
            expected = model(other).double()
            gap = (graphed(other).double() - expected).abs().max() / expected.abs().max()
            gaps.append(float(gap))
        return pool.reserved, gaps


def _captures(model: nn.Module, inputs: Sequence[torch.Tensor], timer: Timer) -> dict[int, Any]:
    """Seconds and bytes of each capture after warm-up, the largest first, by batch size."""
    with gw.MemoryPool() as pool:
        graphs = {len(x): CapturedCall(model, (x,), {}, pool=pool) for x in inputs}
        for graph in graphs.values():
            graph.warm()
        largest_first = sorted(
            graphs, key=lambda size: sum(graphs[size].prediction.segments), reverse=True
        )
        found = {}
        for size in largest_first:
            graph = graphs[size]
            seconds = timer.once(lambda graph=graph: graph.record(share_inputs=True))
            found[size] = {
                "seconds": round(seconds, 6),
                "predicted": graph.memory.predicted,
                "added": graph.memory.nbytes,
            }
        return found


def _by_hand(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Bytes by which the reserved memory grows when a plain script captures these in one pool."""
    stream = torch.cuda.Stream()
    for x in inputs:  # The libraries' workspaces are one a stream: not counted.
        _warm(model, x, stream)
    before = _settled()
    pool = torch.cuda.graph_pool_handle()
    kept = []
    for x in inputs:
        static = x.clone()
        _warm(model, static, stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = model(static)
        kept.append((graph, static, result))
    return _settled() - before


def _warm(model: nn.Module, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)


def _settled() -> int:
    """Bytes that are reserved once nothing is that need not be."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _allocated(pool: gw.MemoryPool, timer: Timer) -> int:
    """Bytes that are allocated on the device; on the CPU those of the pool."""
    gc.collect()
    timer.synchronize()
    return torch.cuda.memory_allocated() if timer.device.type == "cuda" else pool.in_use


def _refusal(
    model: nn.Module, small: torch.Tensor, large: torch.Tensor, limit: int, timer: Timer
) -> dict[str, Any]:
    """What a pool does whose limit holds the small batch and not the large one."""
    with gw.MemoryPool(limit) as pool:
        # The libraries' workspaces of this stream stay: they have to be there before.
        first = gw.capture(model, small, pool=pool)
        before, held = _allocated(pool, timer), pool.reserved
        message = None
        try:
            gw.capture(model, large, pool=pool)
        except gw.MemoryBudgetExceeded as error:
            message = error.what
        after = _allocated(pool, timer)
        return {
            "limit": limit,
            "message": message,
            "allocated_before": before,
            "allocated_after": after,
            "reserved_before": held,
            "reserved_after": pool.reserved,
            "high_water": pool.high_water,
            "still_ready": first.state == "ready",
        }


@torch.no_grad()
def measure_batches(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """All figures of the model at its batch sizes."""
    model, (x,) = cases.load(BATCHED, device)
    timer = Timer(device)
    inputs = _inputs(x, QUICK_SIZES if quick else SIZES, device)
    for each in inputs:  # Libraries choose and load their kernels.
        timer.once(lambda each=each: model(each))
    alone, _ = _pooled(model, inputs[-1:])
    together, gaps = _pooled(model, inputs)
    captures = _captures(model, inputs, timer)
    by_hand: dict[str, Any] = {"unavailable": "needs a CUDA device"}
    if device.type == "cuda":
        by_hand = {
            "largest first": _by_hand(model, inputs[::-1]),
            "smallest first": _by_hand(model, inputs),
        }
    return {
        "model": BATCHED,
        "sizes": {
            len(x): captures[len(x)] | {"relative_difference": gap}
            for x, gap in zip(inputs, gaps, strict=True)
        },
        "alone": alone,
        "together": together,
        "by_hand": by_hand,
        "captures_s": sum(figures["seconds"] for figures in captures.values()),
        "refusal": _refusal(model, inputs[0], inputs[-1], alone * 3 // 4, timer),
    }
