"""What the benchmarks of single models share: cases, PyTorch's own ways to be fast, the comparison.

Everything runs under torch.no_grad(), on other values of the inputs than those it was set up with.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphwright.calls.plurals import counted
from graphwright.errors import first_line
from graphwright.evaluation.measurement import Measurement, Timer

from .. import cases

Call = Callable[..., Any]
Figures = dict[str, Any]

# Largest difference from eager's, over eager's largest value. TF32 has fp16's precision; it is
# on by default for convolutions.
TOLERANCE = {torch.float16: 2e-2, torch.float32: 5e-3}
# What is further off eager's result is as good if it is off float64's by at most so many times as
# much as eager is: fp16 is coarse in deep models with random weights.
AS_EXACT = 3.0
# Runs after which TorchScript's profiling executor has specialised its graph, and torch.compile's
# CUDA graphs replay: they run, then record, then replay.
SETTLED = 3


@dataclass(frozen=True)
class Case:
    """A model on its device, the inputs to set it up with, and others of the same kind."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any]
    other_args: tuple[torch.Tensor, ...]
    other_kwargs: dict[str, Any]
    device: torch.device
    # What makers of ways want a reader to know; `set_up` moves it to their rows.
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, device: torch.device) -> Case:
        """A reference model by its name."""
        model, inputs = cases.load(name, device)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        return cls.made(model, args, kwargs, device)

    @classmethod
    def made(
        cls,
        model: nn.Module,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, torch.Tensor],
        device: torch.device,
    ) -> Case:
        """A model with its inputs, which are there already."""
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

    def settle(self, call: Call) -> None:
        """Call it until what it does at its first calls is done."""
        for _ in range(SETTLED):
            call(*self.args, **self.kwargs)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Copies of the inputs, keyword arguments last."""
        return tuple(tensor.clone() for tensor in (*self.args, *self.kwargs.values()))


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Other values with the same strides; a number stays what it is."""
    return torch.empty_like(tensor).copy_(tensor.roll(1, -1) if tensor.dim() else tensor)


def eager(case: Case) -> Call:
    return case.model


class _OfTensors(nn.Module):
    """A model from positional tensors to a tuple of tensors."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model
        self.positional = len(case.args)
        self.names = tuple(case.kwargs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the model's result."""
        named = zip(self.names, tensors[self.positional :], strict=True)
        return tuple(tensors_of(self.model(*tensors[: self.positional], **dict(named))))


def _on_tensors(function: Call) -> Call:
    """A function of positional tensors, called as the model is."""
    return lambda *args, **kwargs: function(*args, *kwargs.values())


def torchscript(case: Case) -> Call:
    """Traced, frozen and optimised for inference; without the last where that fails."""
    model = _OfTensors(case).eval()
    traced = torch.jit.trace(model, case.tensors(), check_trace=False, strict=False)
    try:
        call = _on_tensors(torch.jit.optimize_for_inference(torch.jit.freeze(traced)))
        case.settle(call)
        largest, close = difference(case.on_others(call)(), case.on_others(case.model)())
        if close:
            return call
        why = f"is off eager's result by {largest:.1e}"
    except Exception as error:
        why = first_line(error)
    case.notes.append(f"frozen without optimize_for_inference: {why}")
    call = _on_tensors(torch.jit.freeze(traced))
    case.settle(call)
    return call


def compiled(case: Case) -> Call:
    call: Call = torch.compile(case.model)
    case.settle(call)
    return call


def with_cuda_graphs(case: Case, mode: str) -> Call:
    """torch.compile in a mode with CUDA graphs, whose outputs the next call overwrites: cloned."""
    function = torch.compile(case.model, mode=mode)

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.clone()
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)

    case.notes.append("its results are copied out: the next call would overwrite them")
    case.settle(call)
    return call


reduce_overhead = functools.partial(with_cuda_graphs, mode="reduce-overhead")
max_autotune = functools.partial(with_cuda_graphs, mode="max-autotune")


def make_graphed_callables(case: Case) -> Call:
    case.notes.append("its results are the graph's own: the next call overwrites them")
    return _on_tensors(torch.cuda.make_graphed_callables(_OfTensors(case).eval(), case.tensors()))


# In an order in which they can be set up: hand-made graphs after Inductor, which clears cuBLAS's
# workspaces meanwhile: a graph captured before would work in memory that is no longer its own.
PEERS: Mapping[str, Callable[[Case], Call]] = {
    "eager": eager,
    "torch.jit": torchscript,
    "torch.compile": compiled,
    "reduce-overhead": reduce_overhead,
    "max-autotune": max_autotune,
    "make_graphed_callables": make_graphed_callables,
}
COMPILED = ("torch.compile", "reduce-overhead", "max-autotune")
NEED_CUDA = ("reduce-overhead", "max-autotune", "make_graphed_callables")


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def difference(result: Any, expected: Any) -> tuple[float, bool]:
    """Largest absolute difference of two results' tensors, and whether that is close enough."""
    mine, theirs = tensors_of(result), tensors_of(expected)
    largest, close = 0.0, len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=False):
        gap = float((a.double() - b.double()).abs().max())
        largest = max(largest, gap)
        # Not `gap > …`: a NaN is not close.
        close &= gap <= TOLERANCE[b.dtype] * float(b.double().abs().max())
    return largest, close


# What torch.compile counts: for one, and for several.
_COMPILATIONS = {
    "graph break": "graph breaks",
    "graph that runs without a CUDA graph": "graphs that run without a CUDA graph",
    "graph out of the compiler's cache": "graphs out of the compiler's cache",
}


def compilations() -> dict[str, int]:
    """What torch.compile has counted in this process."""
    from torch._dynamo.utils import counters

    found = (
        sum(counters["graph_break"].values()),
        counters["inductor"]["cudagraph_skips"],
        counters["inductor"]["fxgraph_cache_hit"],
    )
    return dict(zip(_COMPILATIONS, found, strict=True))


def compilations_since(before: Mapping[str, int]) -> list[str]:
    """What torch.compile has counted since then, in words."""
    more = {what: count - before[what] for what, count in compilations().items()}
    return [counted(n, what, _COMPILATIONS[what]) for what, n in more.items() if n > 0]


def set_up(
    case: Case,
    ways: Mapping[str, Callable[[Case], Call]],
    timer: Timer,
    left_out: Callable[[str], str | None],
    begun: Callable[[str, dict[str, Figures]], None] = lambda way, rows: None,
) -> tuple[dict[str, Any], dict[str, Figures]]:
    """Each way that works and agrees with eager, and a row for every one.

    Args:
        case: the model and its inputs.
        ways: how to make each, in the order in which they are made.
        timer: of the device.
        left_out: why a way is not tried; None where it is.
        begun: hears which way is begun, and the rows so far.
    """
    rows: dict[str, Figures] = {}
    calls: dict[str, Any] = {}
    for way, make in ways.items():
        why = left_out(way)
        if why is not None:
            rows[way] = {"status": "unavailable", "reason": why}
            continue
        begun(way, rows)
        before = compilations() if way in COMPILED else {}
        try:
            start = time.perf_counter()
            call = make(case)
            call(*case.args, **case.kwargs)
            timer.synchronize()
            rows[way] = {"status": "ok", "setup_s": round(time.perf_counter() - start, 6)}
            calls[way] = call
        except Exception as error:
            rows[way] = {"status": "failed", "reason": first_line(error)}
        rows[way]["notes"] = case.notes[:]
        case.notes.clear()
        if before:
            rows[way]["notes"] += compilations_since(before)
    # Once all are there: none may have spoilt another.
    begun("the comparison with eager", rows)
    expected = case.on_others(case.model)()
    for way, call in list(calls.items()):
        try:
            found = case.on_others(call)()
            largest, close = difference(found, expected)
        except Exception as error:
            rows[way] |= {"status": "failed", "reason": first_line(error)}
            del calls[way]
            continue
        rows[way]["max_abs_difference"] = largest
        if close:
            continue
        errors = errors_of(case, found, expected)
        if errors is not None and errors[0] <= AS_EXACT * errors[1]:
            mine, eagers = errors
            rows[way]["notes"].append(f"is off float64 by {mine:.1e}, and eager by {eagers:.1e}")
            continue
        rows[way] |= {"status": "wrong", "reason": f"is off eager's result by {largest:.1e}"}
        del calls[way]
    return calls, rows


def errors_of(case: Case, *results: Any) -> tuple[float, ...] | None:
    """By how much results for the other inputs are off those of the model in float64, at most.

    None where the model cannot run in float64, or gives other tensors then.
    """
    try:
        model = copy.deepcopy(case.model).double()
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
            (case.other_args, case.other_kwargs),
        )
        exact = tensors_of(model(*args, **kwargs))
        return tuple(
            max(
                (float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True)),
                key=lambda error: math.inf if math.isnan(error) else error,
            )
            for found in map(tensors_of, results)
        )
    except Exception:
        return None


def needs_cuda(way: str, device: torch.device) -> str | None:
    """Why a way cannot be tried on a device; None where it can."""
    return "needs a CUDA device" if way in NEED_CUDA and device.type != "cuda" else None


def timed(measurement: Measurement) -> Figures:
    """Medians and raw samples for a row."""
    return {
        "latency_s": measurement.latencies.median,
        "back_to_back_s": measurement.back_to_back.median,
        "latency_samples": measurement.latency,
        "back_to_back_samples": measurement.throughput,
    }
