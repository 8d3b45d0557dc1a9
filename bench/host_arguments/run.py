"""A diffusion model whose time steps are on the host, as schedulers give them, beside on the GPU.

    scripts/bench host-arguments [--out DIR] [--rounds N] [--quick]

diffusers' UNet as Stable Diffusion 1.5 configures it, with random weights in half precision; ten
steps of DDIM make a sample. Eager and graph() get the same time steps, on the host and on the GPU,
in turns; each sample begins and ends with an idle GPU, and no step waits for the one before. Every
result is compared with eager's. Without a GPU, a small model runs: that tries the script only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import graphwright as gw
from graphwright.evaluation.accuracy import ROUNDING, error_of
from graphwright.report.environment import environment

from ..calls.run import unet
from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked
from ..common.timing import times

STEPS, ROUNDS, WARMUPS = 10, 20, 2
# How much longer ten steps may take with their time steps on the host.
LIMIT = 1.03
EAGER_HOST, EAGER_GPU = "eager, on the host", "eager, on the GPU"
GRAPH_HOST, GRAPH_GPU = "graph, on the host", "graph, on the GPU"


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    """The times of each way, in seconds of a step, and whether their results are right."""
    from diffusers import DDIMScheduler

    torch.manual_seed(0)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, (sample, _, context) = unet(device)
    model = model.eval().to(device, dtype)
    sample, context = sample.to(device, dtype), context.to(device, dtype)
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    steps = {"on the host": scheduler.timesteps.cpu(), "on the GPU": scheduler.timesteps.to(device)}
    graphs = {where: gw.graph(model) for where in steps}
    ways: dict[str, Callable[[], list[torch.Tensor]]] = {}
    for where, ts in steps.items():
        for name, call in (("eager", model), ("graph", graphs[where])):
            ways[f"{name}, {where}"] = lambda call=call, ts=ts: [  # type: ignore[misc]  # its defaults
                call(sample, t, context).sample for t in ts
            ]
    results = {name: run() for name, run in ways.items()}
    right = {
        name: all(
            error_of(a, b, b)[0].rms <= ROUNDING[dtype]
            for a, b in zip(made, results[EAGER_HOST], strict=True)
        )
        for name, made in results.items()
    }
    del results
    samples = _in_turns(ways, rounds, device)
    found = times(samples, STEPS)
    for name, way in found.items():
        way["right"] = right[name]
    captured = {where: graphs[where].statistics for where in graphs}
    return {
        "ways": found,
        "eager_calls": {where: sum(each.eager.values()) for where, each in captured.items()},
        "captures": {where: each.captures for where, each in captured.items()},
    }


def _in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each way by the clock, the first of a round another each time."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARMUPS, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wait()
            began = time.perf_counter()
            ways[name]()
            wait()
            if number >= 0:
                found[name].append(time.perf_counter() - began)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    table = [["time steps", "a step, ms", "spread, ms", "beside eager on the host"]]
    ways = result["ways"]
    eager = ways[EAGER_HOST]["median"]
    for name, way in ways.items():
        factor = f"{eager / way['median']:.2f}×" if way["right"] else "wrong"
        table.append([name, f"{way['median'] * 1e3:.3f}", f"{way['spread'] * 1e3:.3f}", factor])
    head = [
        "### Time steps on the host",
        "",
        "Stable Diffusion 1.5's UNet, ten steps of DDIM. A scheduler of diffusers keeps its time "
        "steps on the host; `graph()` copies them to the GPU within the graph.",
        "",
    ]
    return "\n".join([*head, *marked(table), "", machine(result["environment"]), ""])


def benchmark(out: Path, *, rounds: int, quick: bool) -> int:
    """Measure and write host-arguments.json; the number of targets missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = quick or device.type == "cpu"
    with torch.no_grad():
        found = measure(device, 3 if quick else rounds)
    ways = found["ways"]
    ratio = ways[GRAPH_HOST]["median"] / ways[GRAPH_GPU]["median"]
    ok = all(way["right"] for way in ways.values())
    no_eager = not any(found["eager_calls"].values())
    targets = [
        {"target": "every answer is right", "figure": ok, "met": ok},
        {"target": "graphs answer every call", "figure": no_eager, "met": no_eager},
        {
            "target": f"on the host at most {LIMIT} × as long as on the GPU",
            "figure": ratio,
            "met": ratio <= LIMIT,
        },
    ]
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "host-arguments",
        "commit": commit(),
        "quick": small,
        "environment": environment(device),
        "steps": STEPS,
        "targets": targets,
        **found,
    }
    write(out / "host-arguments.json", result)
    print(to_markdown(result))
    for target in targets:
        print(f"{'met' if target['met'] else 'MISSED'}: {target['target']}: {target['figure']}")
    return sum(not target["met"] for target in (targets[:2] if small else targets))
