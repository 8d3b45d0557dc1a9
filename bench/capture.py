"""Measure capture() and graph() beside eager, a capture by hand and PyTorch's own ways to one.

scripts/bench capture runs this file for each model, in a process of its own. Everything runs under
torch.no_grad(), on other values of the inputs than those that were captured.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import torch
from capture_batches import measure_batches
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.errors import first_line
from graphwright.measurement import DIGITS, Measurement, Timer, collection_held_off, interleave
from graphwright.report.environment import environment

Call = Callable[..., Any]
Figures = dict[str, Any]

BATCHES = "batches"
MAX_BLOCKS = 300
# Largest difference from eager's, over eager's largest value. TF32 has fp16's precision; it is
# on by default for convolutions.
TOLERANCE = {torch.float16: 2e-2, torch.float32: 5e-3}


@dataclass(frozen=True)
class Case:
    """A model on its device, the inputs to capture it with, and others of the same kind."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any]
    other_args: tuple[torch.Tensor, ...]
    other_kwargs: dict[str, Any]
    device: torch.device

    @classmethod
    def of(cls, name: str, device: torch.device) -> Case:
        """A reference model by its name."""
        model, inputs = cases.load(name, device)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        return cls(
            model,
            args,
            kwargs,
            tuple(_other(tensor) for tensor in args),
            {key: _other(tensor) for key, tensor in kwargs.items()},
            device,
        )

    def on_others(self, call: Call) -> Call:
        """The call on the other inputs, without arguments."""
        return functools.partial(call, *self.other_args, **self.other_kwargs)


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Other values with the same strides."""
    return torch.empty_like(tensor).copy_(tensor.roll(1, -1))


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


def _eager(case: Case) -> Call:
    return case.model


def _capture(case: Case) -> Call:
    return gw.capture(case.model, *case.args, **case.kwargs)


def _graph(case: Case) -> Call:
    graphed = gw.graph(case.model)
    graphed(*case.args, **case.kwargs)
    if graphed.statistics.eager:
        raise RuntimeError(f"graph() went eager: {dict(graphed.statistics.eager)}")
    return graphed


def _reduce_overhead(case: Case) -> Call:
    compiled = torch.compile(case.model, mode="reduce-overhead")

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.clone()
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)

    for _ in range(3):  # It runs, then records, then replays.
        call(*case.args, **case.kwargs)
    return call


class _OfTensors(nn.Module):
    """A model as make_graphed_callables takes it: positional tensors in, tensors out."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model
        self.positional = len(case.args)
        self.names = tuple(case.kwargs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the model's result."""
        named = zip(self.names, tensors[self.positional :], strict=True)
        return tuple(_tensors(self.model(*tensors[: self.positional], **dict(named))))


def _make_graphed_callables(case: Case) -> Call:
    sample = tuple(tensor.clone() for tensor in (*case.args, *case.kwargs.values()))
    graphed = torch.cuda.make_graphed_callables(_OfTensors(case).eval(), sample)
    return lambda *args, **kwargs: graphed(*args, *kwargs.values())


# In the order in which they are set up. Inductor clears cuBLAS's workspaces meanwhile: a graph that
# was captured by hand before would work in memory that is no longer its own.
WAYS: Mapping[str, Callable[[Case], Call]] = {
    "eager": _eager,
    "reduce-overhead": _reduce_overhead,
    "hand": Hand,
    "graphwright.capture": _capture,
    "graphwright.graph": _graph,
    "make_graphed_callables": _make_graphed_callables,
}
PEERS = ("reduce-overhead", "make_graphed_callables")
NEED_CUDA = ("hand", *PEERS)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def difference(result: Any, expected: Any) -> tuple[float, bool]:
    """Largest absolute difference of two results' tensors, and whether that is close enough."""
    mine, theirs = _tensors(result), _tensors(expected)
    largest, close = 0.0, len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=False):
        gap = float((a.double() - b.double()).abs().max())
        largest = max(largest, gap)
        # Not `gap > …`: a NaN is not close.
        close &= gap <= TOLERANCE[b.dtype] * float(b.double().abs().max())
    return largest, close


def _notes(way: str) -> list[str]:
    """What a reader of its figures should know about a way that was just set up."""
    if way == "make_graphed_callables":
        return ["its results are the graph's own: the next call overwrites them"]
    if way != "reduce-overhead":
        return []
    from torch._dynamo.utils import counters

    counts = {
        "graph breaks": sum(counters["graph_break"].values()),
        "graphs that run without a CUDA graph": counters["inductor"]["cudagraph_skips"],
        "graphs out of the compiler's cache": counters["inductor"]["fxgraph_cache_hit"],
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _left_out(way: str, device: torch.device, peers: bool) -> str | None:
    """Why a way is not tried; None where it is."""
    if way in NEED_CUDA and device.type != "cuda":
        return "needs a CUDA device"
    if way in PEERS and not peers:
        return "left out by --no-peers"
    return None


def set_up(case: Case, timer: Timer, peers: bool) -> tuple[dict[str, Any], dict[str, Figures]]:
    """Each way that works and agrees with eager, and a row for every one."""
    rows: dict[str, Figures] = {}
    calls: dict[str, Any] = {}
    for way, make in WAYS.items():
        why = _left_out(way, case.device, peers)
        if why is not None:
            rows[way] = {"status": "unavailable", "reason": why}
            continue
        try:
            start = time.perf_counter()
            call = make(case)
            call(*case.args, **case.kwargs)
            timer.synchronize()
            rows[way] = {"status": "ok", "setup_s": round(time.perf_counter() - start, 6)}
            calls[way] = call
        except Exception as error:
            rows[way] = {"status": "failed", "reason": first_line(error)}
        rows[way]["notes"] = _notes(way)
    # Once all are there: none may have spoilt another.
    expected = case.on_others(case.model)()
    for way, call in list(calls.items()):
        largest, close = difference(case.on_others(call)(), expected)
        rows[way]["max_abs_difference"] = largest
        if not close:
            rows[way] |= {"status": "wrong", "reason": f"is off eager's result by {largest:.1e}"}
            del calls[way]
    return calls, rows


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


def _timed(measurement: Measurement) -> Figures:
    return {
        "latency_s": measurement.latencies.median,
        "back_to_back_s": measurement.back_to_back.median,
        "latency_samples": measurement.latency,
        "back_to_back_samples": measurement.throughput,
    }


def prediction(case: Case) -> Figures:
    """What an empty pool predicts for the call, and by how much its capture grows the pool."""
    try:
        with gw.MemoryPool() as pool:
            predicted = pool.predict(case.model, *case.args, **case.kwargs).nbytes
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
    calls, rows = set_up(case, timer, peers)
    on_others = {way: case.on_others(call) for way, call in calls.items()}
    measured = interleave(on_others, timer, budget_s=0.2 if quick else 6.0)
    for way, measurement in measured.items():
        rows[way] |= _timed(measurement)
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
