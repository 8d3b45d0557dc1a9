"""Graphs on several streams beside graphs on one: where do branches run faster side by side?

    scripts/bench streams [--out DIR] [--quick]

Inception-v3, GoogLeNet and a head of four branches, in half precision, batch 1 and 8; each captured
by capture() and by capture(streams=4), and replayed in turns, ten replays a sample. Every answer is
compared with eager's. Written are samples, numbers of nodes and branches, and bytes of both graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.evaluation.accuracy import ROUNDING, error_of
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import MIB, machine, marked
from ..common.timing import in_turns, times

STREAMS, ROUNDS, REPEATS, BATCHES = 4, 40, 10, (1, 8)
# Two of the models are to gain so much at some batch.
WANTED, MODELS = 1.1, 2


class FourHeads(nn.Module):
    """Four towers of convolutions on one feature map, one for each output of a detector."""

    def __init__(self, channels: int = 256, depth: int = 4) -> None:
        super().__init__()

        def tower(outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for _ in range(depth):
                layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(channels, outputs, 3, padding=1))

        self.towers = nn.ModuleList(tower(outputs) for outputs in (80, 4, 1, 32))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


def models(*, quick: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """What makes each model, and the shape of one of its inputs."""
    if quick:
        return {"head": (lambda: FourHeads(8, 1), (8, 8, 8))}
    from torchvision import models as vision

    image = {"weights": None, "init_weights": False, "aux_logits": True}
    return {
        "inception_v3": (lambda: vision.inception_v3(**image), (3, 299, 299)),
        "googlenet": (lambda: vision.googlenet(**image), (3, 224, 224)),
        "head": (FourHeads, (256, 28, 28)),
    }


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int) -> dict[str, Any]:
    """Both graphs of a model at a batch: times of a replay, and whether they are right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = make().eval().to(device, dtype)
    x = torch.randn(batch, *shape, device=device, dtype=dtype)
    expected = _tensors(model(x))
    graphs = {"one": gw.capture(model, x), "several": gw.capture(model, x, streams=STREAMS)}
    right = all(
        error_of(a, b, b)[0].rms <= ROUNDING[dtype]
        for graph in graphs.values()
        for a, b in zip(_tensors(graph(x)), expected, strict=True)
    )

    def replays(graph: gw.Graph) -> Callable[[], None]:
        def run() -> None:
            for _ in range(REPEATS):
                graph.replay()

        return run

    samples = in_turns({name: replays(graph) for name, graph in graphs.items()}, ROUNDS)
    ways = times(samples, REPEATS)
    for name, graph in graphs.items():
        ways[name] |= {"nodes": graph.node_count, "branches": graph.branches}
        ways[name] |= {"nbytes": graph.nbytes}
        graph.close()
    ratio = ways["one"]["median"] / ways["several"]["median"]
    return {"right": right, "ways": ways, "gain": ratio}


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [each for each in result if isinstance(each, torch.Tensor)]


def to_markdown(result: dict[str, Any]) -> str:
    """What docs/results/streams.md shows."""
    table = [["model", "batch", "one stream, ms", "several, ms", "gain"]]
    table[0] += ["branches", "graph on one, MiB", "on several, MiB"]
    for name, batches in result["models"].items():
        for batch, row in batches.items():
            one, several = row["ways"]["one"], row["ways"]["several"]
            table.append(
                [name, batch, f"{one['median'] * 1e3:.3f}", f"{several['median'] * 1e3:.3f}"]
                + [f"{row['gain']:.2f}×" if row["right"] else "wrong", str(several["branches"])]
                + [f"{way['nbytes'] / MIB:.0f}" for way in (one, several)]
            )
    return "\n".join(
        [
            "A replay, the median; the head has four branches of convolutions.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path, *, quick: bool) -> int:
    """Measure and write streams.json; the number of targets missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = quick or device.type == "cpu"
    rows: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for name, (make, shape) in models(quick=small).items():
            rows[name] = {str(n): measure(make, shape, n) for n in BATCHES}
            for batch, row in rows[name].items():
                took = [row["ways"][way]["median"] * 1e3 for way in ("one", "several")]
                print(
                    f"{name:14} batch {batch}: {took[0]:.3f} ms on one stream, {took[1]:.3f} on "
                    f"{row['ways']['several']['branches']}: {row['gain']:.2f} ×, "
                    f"{'right' if row['right'] else 'WRONG'}",
                    flush=True,
                )
    best = [max(row["gain"] for row in each.values()) for each in rows.values()]
    gained = sum(gain >= WANTED for gain in best)
    ok = all(row["right"] for each in rows.values() for row in each.values())
    targets = [
        {"target": "every answer is right", "figure": ok, "met": ok},
        {"target": f"{MODELS} models gain {WANTED} ×", "figure": gained, "met": gained >= MODELS},
    ]
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "streams",
        "commit": commit(),
        "quick": small,
        "environment": environment(device),
        "streams": STREAMS,
        "models": rows,
        "targets": targets,
    }
    write(out / "streams.json", result)
    return 0 if small and ok else sum(not target["met"] for target in targets)
