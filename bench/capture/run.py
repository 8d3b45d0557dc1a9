"""Measure capture() and graph() beside eager, a capture by hand and PyTorch's own ways to one.

scripts/bench capture runs this module for each model, in a process of its own. Everything runs
under torch.no_grad(), on other values of the inputs than those that were captured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import first_line
from graphwright.evaluation.garbage_collection import collection_held_off
from graphwright.evaluation.measurement import DIGITS, Timer, interleave
from graphwright.report.environment import environment

from .. import cases
from ..common.peers import (
    Call,
    Case,
    Figures,
    eager,
    make_graphed_callables,
    needs_cuda,
    reduce_overhead,
    set_up,
    timed,
)
from .batches import measure_batches

BATCHES = "batches"
MAX_BLOCKS = 300


class Hand:
    """A capture as it is written by hand: copy in, replay, clone what comes out."""

    def __init__(self, case: Case) -> None:
        args = [tensor.clone() for tensor in case.args]
        kwargs = {key: tensor.clone() for key, tensor in case.kwargs.items()}
        self.inputs = (*args, *kwargs.values())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Libraries ask whether a capture is under way, and run other kernels where it is not.
        capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        with torch.cuda.stream(stream), capturing:
            for _ in range(3):
                case.model(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            result = case.model(*args, **kwargs)
        self.result = result if isinstance(result, torch.Tensor) else None
        self.leaves, self.spec = pytree.tree_flatten(result)

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """What the model returns, in tensors of the caller's own."""
        for mine, given in zip(self.inputs, (*args, *kwargs.values()), strict=True):
            mine.copy_(given)
        self.graph.replay()
        if self.result is not None:
            return self.result.clone()
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(copies, self.spec)


def _capture(case: Case) -> Call:
    return gw.capture(case.model, *case.args, **case.kwargs)


def _graph(case: Case) -> Call:
    graphed = gw.graph(case.model)
    graphed(*case.args, **case.kwargs)
    if graphed.statistics.eager:
        raise RuntimeError(f"graph() went eager: {dict(graphed.statistics.eager)}")
    return graphed


# In the order in which they are set up. Inductor clears cuBLAS's workspaces meanwhile: a graph that
# was captured by hand before would work in memory that is no longer its own.
WAYS: Mapping[str, Callable[[Case], Call]] = {
    "eager": eager,
    "reduce-overhead": reduce_overhead,
    "hand": Hand,
    "graphwright.capture": _capture,
    "graphwright.graph": _graph,
    "make_graphed_callables": make_graphed_callables,
}
PEERS = ("reduce-overhead", "make_graphed_callables")


def _left_out(way: str, device: torch.device, peers: bool) -> str | None:
    """Why a way is not tried; None where it is."""
    if way == "hand" and device.type != "cuda":
        return "needs a CUDA device"
    if way in PEERS and not peers and needs_cuda(way, device) is None:
        return "left out by --no-peers"
    return needs_cuda(way, device)


def host_times(
    calls: Mapping[str, Callable[[], object]], timer: Timer, *, in_flight: int, budget_s: float
) -> dict[str, list[float]]:
    """Host seconds per call of calls that nobody waits for, in turns; one sample a block."""
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.monotonic() + budget_s
    with collection_held_off():
        for turn in range(MAX_BLOCKS):
            if turn > 1 and time.monotonic() >= deadline:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                call = calls[name]
                timer.synchronize()
                start = time.perf_counter()
                for _ in range(in_flight):
                    call()
                taken = (time.perf_counter() - start) / in_flight
                if turn:  # The first turn is for the caches.
                    found[name].append(round(taken, DIGITS))
    timer.synchronize()
    return found


def prediction(case: Case) -> Figures:
    """What an empty pool predicts for the call, and by how much its capture grows the pool."""
    try:
        with gw.MemoryPool() as pool:
            predicted = gw.predict_memory(case.model, *case.args, pool=pool, **case.kwargs).nbytes
            graph = gw.capture(case.model, *case.args, pool=pool, **case.kwargs)
            return {"predicted": predicted, "measured": graph.nbytes}
    except gw.GraphwrightError as error:
        return {"reason": first_line(error)}


@torch.no_grad()
def measure(name: str, device: torch.device, *, quick: bool, peers: bool) -> Figures:
    """All figures of one model."""
    case = Case.of(name, device)
    timer = Timer(device)
    for _ in range(3):
        timer.once(case.on_others(case.model))
    memory = prediction(case)
    calls, rows = set_up(case, WAYS, timer, lambda way: _left_out(way, device, peers))
    on_others = {way: case.on_others(call) for way, call in calls.items()}
    measured = interleave(on_others, timer, budget_s=0.2 if quick else 6.0)
    for way, measurement in measured.items():
        rows[way] |= timed(measurement)
    ours = {way: call for way, call in on_others.items() if way not in ("eager", *PEERS)}
    if "hand" in calls:
        ours["replay"] = calls["hand"].graph.replay
    in_flight, budget_s = (2, 0.1) if quick else (20, 2.0)
    host = host_times(ours, timer, in_flight=in_flight, budget_s=budget_s) if ours else {}
    if "graphwright.graph" in calls:
        counts = calls["graphwright.graph"].statistics
        rows["graphwright.graph"] |= {"captures": counts.captures, "eager_calls": counts.eager}
    inputs = [*enumerate(case.args), *case.kwargs.items()]
    return {
        "inputs": {str(key): f"{tuple(t.shape)} {t.dtype}" for key, t in inputs},
        "ways": rows,
        "host_s": {way: statistics.median(samples) for way, samples in host.items()},
        "host_samples": host,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=(*cases.MODELS, BATCHES))
    parser.add_argument("file", type=Path, help="the JSON to write")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.what == BATCHES:
        figures = measure_batches(device, quick=given.quick)
    else:
        figures = measure(given.what, device, quick=given.quick, peers=not given.no_peers)
    result = {"environment": environment(device), "figures": figures}
    given.file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
