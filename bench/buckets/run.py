"""Measure graph(buckets=…): a sentence-embedding model over batch × length, and what padding costs.

scripts/bench buckets runs this. Everything runs under torch.no_grad().
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.calls.plurals import counted
from graphwright.evaluation.garbage_collection import collection_held_off
from graphwright.evaluation.measurement import DIGITS, Measurement, Timer, interleave
from graphwright.report.environment import environment

from .. import cases
from ..common.record import write

SCHEMA = "graphwright.benchmark"
BATCHES, LENGTHS = (1, 32), (16, 256)
# Largest difference from eager's, over eager's largest value.
TOLERANCE = {torch.float16: 2e-2, torch.float32: 5e-3}
EXACT = (8, 64)
BELOW = (7, 50)

Inputs = dict[str, torch.Tensor]
Sizes = tuple[int, int]


def load(device: torch.device) -> tuple[nn.Module, list[int]]:
    """MiniLM with its real weights, in fp16 on a GPU, and the tokens of the real sentences."""
    import minilm  # of examples/

    model, tokenizer = minilm.load()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    tokens = [token for ids in tokenizer(minilm.SENTENCES)["input_ids"] for token in ids]
    return model.to(device, dtype), tokens


def inputs_of(sizes: Sizes, tokens: list[int], draw: random.Random, device: torch.device) -> Inputs:
    """Rows of real text, the first as long as the call, the others padded by their service."""
    batch, length = sizes
    lengths = [length, *(draw.randint(1, length) for _ in range(batch - 1))]
    begins = [draw.randrange(len(tokens) - n) for n in lengths]
    rows = [
        [*tokens[begin : begin + n], *[0] * (length - n)]
        for begin, n in zip(begins, lengths, strict=True)
    ]
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.tensor(rows).to(device), "attention_mask": mask.to(device)}


def log_uniform(high: int, draw: random.Random) -> int:
    """A size like those of traffic: the small ones are the common ones."""
    return min(high, int((high + 1) ** draw.random()))


def difference(actual: Any, expected: Any) -> float:
    """The largest difference of any output from eager's, over eager's largest value."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        assert a.shape == b.shape
        gap = (a.double() - b.double()).abs().max() / b.double().abs().max()
        worst = max(worst, float(gap))
    return worst


def over_sizes(model: nn.Module, buckets: gw.Buckets, **options: Any) -> Any:
    """The model answered by buckets over batch × length."""
    axes = {0: Dim("batch", max=BATCHES[1]), 1: Dim("length", max=LENGTHS[1])}
    return gw.graph(
        model,
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        buckets=buckets,
        pad={"attention_mask": 0},
        **options,
    )


def serve(model: nn.Module, graphed: Any, calls: list[Inputs], timer: Timer) -> dict[str, Any]:
    """Each call by eager and by a graph, in turns, twice; how far they are apart.

    Eager is slower at sizes that it has not met (why was not measured apart).
    """
    passes = []
    worst = 0.0
    for _ in range(2):
        found, gap = _served_once(model, graphed, calls, timer)
        passes.append(found)
        worst = max(worst, gap)
    return {"first_seconds": passes[0], "seconds": passes[1], "largest_difference": worst}


def _served_once(
    model: nn.Module, graphed: Any, calls: list[Inputs], timer: Timer
) -> tuple[dict[str, list[float]], float]:
    seconds: dict[str, list[float]] = {"eager": [], "graph": []}
    worst = 0.0
    with collection_held_off():
        for index, call in enumerate(calls):
            ways: list[tuple[str, Callable[..., Any]]] = [("eager", model), ("graph", graphed)]
            results = {}
            for name, way in ways if index % 2 else ways[::-1]:
                timer.synchronize()
                begun = time.perf_counter()
                results[name] = way(**call)
                timer.synchronize()
                seconds[name].append(round(time.perf_counter() - begun, DIGITS))
            worst = max(worst, difference(results["graph"], results["eager"]))
    return seconds, worst


def _timed(measured: Mapping[str, Measurement]) -> dict[str, Any]:
    return {
        name: {
            "latency_s": found.latencies.median,
            "spread": found.latencies.spread,
            "back_to_back_s": found.back_to_back.median,
            "latency_samples": found.latency,
            "back_to_back_samples": found.throughput,
        }
        for name, found in measured.items()
    }


def cost_of_padding(
    model: nn.Module, graphed: Any, tokens: list[int], timer: Timer, budget_s: float
) -> dict[str, Any]:
    """A bucket's own size with and without buckets; a smaller call, padded and as it is."""
    draw = random.Random(1)
    exact = inputs_of(EXACT, tokens, draw, timer.device)
    below = inputs_of(BELOW, tokens, draw, timer.device)
    alone = gw.graph(model)
    small = gw.graph(model)
    calls = {
        "a call of the bucket's size, with buckets": functools.partial(graphed, **exact),
        "a call of the bucket's size, without buckets": functools.partial(alone, **exact),
        "a smaller call, padded to the bucket": functools.partial(graphed, **below),
        "a smaller call, with a graph of its own size": functools.partial(small, **below),
        "a smaller call, eager": functools.partial(model, **below),
    }
    for call in calls.values():
        call()
    return _timed(interleave(calls, timer, budget_s=budget_s))


def small_model(timer: Timer, budget_s: float) -> dict[str, Any]:
    """The same for a model of which the host's time is all."""
    model, (x,) = cases.load("mlp", timer.device)
    bucket = len(x)
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[bucket]))
    alone, small = gw.graph(model), gw.graph(model)
    below = x[: bucket - 1].clone()
    calls = {
        "a call of the bucket's size, with buckets": functools.partial(graphed, x),
        "a call of the bucket's size, without buckets": functools.partial(alone, x),
        "a smaller call, padded to the bucket": functools.partial(graphed, below),
        "a smaller call, with a graph of its own size": functools.partial(small, below),
        "a smaller call, eager": functools.partial(model, below),
    }
    # The shortest way is for the kind of call that came last: each has a callable of its own.
    padded = gw.graph(model, buckets=gw.Buckets(batch=[bucket]))
    calls["a smaller call, padded to the bucket"] = functools.partial(padded, below)
    for call in calls.values():
        call()
    return _timed(interleave(calls, timer, budget_s=budget_s))


@torch.no_grad()
def measure(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """All figures."""
    model, tokens = load(device)
    timer = Timer(device)
    draw = random.Random(0)
    if quick:
        model.encoder.layer = model.encoder.layer[:1]
    buckets = (
        gw.Buckets(batch=[1, 8], length=[16, 64])
        if quick
        else gw.Buckets.powers_of_two(batch=BATCHES, length=LENGTHS)
    )
    most = buckets.largest
    pool = gw.MemoryPool()
    graphed = over_sizes(model, buckets, pool=pool)
    sizes = [
        (log_uniform(most["batch"], draw), log_uniform(most["length"], draw))
        for _ in range(20 if quick else 1000)
    ]
    calls = [inputs_of(each, tokens, draw, device) for each in sizes]
    begun = time.perf_counter()
    graphed.prepare(calls[:1], progress=False)
    timer.synchronize()
    prepared_s = time.perf_counter() - begun
    before = graphed.statistics
    served = serve(model, graphed, calls, timer)
    told = graphed.statistics
    seen = told.sizes
    better = gw.Buckets.from_sizes(seen, max_graphs=len(buckets.points))
    eager, graph = served["seconds"]["eager"], served["seconds"]["graph"]
    dtype = next(model.parameters()).dtype
    return {
        "dtype": str(dtype),
        "calls": len(calls),
        "sizes": sizes,
        "buckets": [list(point) for point in buckets.points],
        "prepare_s": prepared_s,
        "proof_s": before.proof_s,
        "proof_runs": before.proof_runs,
        "captures": {"prepared": before.captures, "after": told.captures - before.captures},
        "reserved_bytes": pool.reserved,
        "hits": told.hits,
        "padded": told.padded,
        "eager_calls": dict(told.eager),
        "waste": told.waste,
        "by_bucket": {
            "×".join(map(str, point)): [found.exact, found.padded, found.waste]
            for point, found in told.buckets.items()
        },
        "from_sizes": {
            "buckets": [list(point) for point in better.points],
            "waste": better.waste(seen),
        },
        "latency": {
            "eager_s": statistics.median(eager),
            "graph_s": statistics.median(graph),
            "ratio": statistics.median(a / b for a, b in zip(eager, graph, strict=True)),
            "eager_p99_s": statistics.quantiles(eager, n=100)[-1],
            "graph_p99_s": statistics.quantiles(graph, n=100)[-1],
            "sum_ratio": math.fsum(eager) / math.fsum(graph),
            "first_eager_s": statistics.median(served["first_seconds"]["eager"]),
            "first_graph_s": statistics.median(served["first_seconds"]["graph"]),
        },
        "within_tolerance": served["largest_difference"] <= TOLERANCE[dtype],
        **served,
        "padding": {
            "minilm": cost_of_padding(model, graphed, tokens, timer, 0.2 if quick else 6.0),
            "mlp": small_model(timer, 0.2 if quick else 4.0),
        },
    }


def benchmark(out: Path, commit: str, *, quick: bool) -> bool:
    """Measure and write; whether all results were right and nothing was captured meanwhile."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = measure(device, quick=quick)
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "buckets",
        "commit": commit,
        "quick": quick,
        "environment": environment(device),
        "figures": figures,
    }
    where = out / "buckets.json"
    write(where, result)
    print(f"{to_markdown(result)}\nwrote {where}")
    return bool(figures["within_tolerance"]) and not figures["captures"]["after"]


def to_markdown(result: Mapping[str, Any]) -> str:
    """The figures as a section of docs/results/buckets.md."""
    figures = result["figures"]
    latency, captures = figures["latency"], figures["captures"]
    model = f"MiniLM, {figures['dtype'].removeprefix('torch.')}"
    lines = [
        f"{model}, {figures['calls']:,} calls of random batch and length, twice: "
        f"{figures['hits']:,} answered by {captures['prepared']} graphs, {figures['padded']:,} of "
        f"these padded; {counted(captures['after'], 'capture')} after `prepare`; largest "
        f"difference from eager {figures['largest_difference']:.1e} of its largest value.",
        "",
        "| | median, sizes seen before | 99th percentile | median, first pass |",
        "| --- | ---: | ---: | ---: |",
        f"| eager | {_ms(latency['eager_s'])} | {_ms(latency['eager_p99_s'])} "
        f"| {_ms(latency['first_eager_s'])} |",
        f"| buckets | {_ms(latency['graph_s'])} | {_ms(latency['graph_p99_s'])} "
        f"| {_ms(latency['first_graph_s'])} |",
        "",
        f"Eager's time over that of buckets: {latency['ratio']:.2f} (median of the calls), "
        f"{latency['sum_ratio']:.2f} (sum of the calls). `prepare` took "
        f"{figures['prepare_s']:.1f} s, {figures['proof_s']:.1f} s of them "
        f"{figures['proof_runs']} runs that prove padding harmless. The graphs hold "
        f"{figures['reserved_bytes'] / 2**20:.0f} MiB. Padding is {figures['waste']:.1%} of what "
        "was computed; with as many buckets chosen by `Buckets.from_sizes` it would be "
        f"{figures['from_sizes']['waste']:.1%}.",
        "",
        "| batch × length | exact | padded | padding |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for bucket, (exact, padded, waste) in figures["by_bucket"].items():
        lines.append(f"| {bucket.replace('×', ' × ')} | {exact} | {padded} | {waste:.1%} |")
    lines += [
        "",
        f"One call, latency in µs (MiniLM: bucket {EXACT[0]} × {EXACT[1]}, smaller "
        f"{BELOW[0]} × {BELOW[1]}; mlp: all rows and all but one):",
        "",
        "| | MiniLM | mlp |",
        "| --- | ---: | ---: |",
    ]
    padding = figures["padding"]
    for way in padding["minilm"]:
        times = [1e6 * padding[name][way]["latency_s"] for name in ("minilm", "mlp")]
        lines.append(f"| {way} | {times[0]:.1f} | {times[1]:.1f} |")
    return "\n".join([*lines, ""])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
