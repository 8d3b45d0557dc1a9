"""prefetch() before a graph of ResNet-50: how much of copying and loading does computing hide?

    scripts/bench feeding [--out DIR] [--quick]

Loops over the same batches of images (64 × 3 × 224 × 224 in float32, 38 MB; --quick: less of all),
in turns: computing alone, on a batch that is there; copying alone, from pinned memory; a plain
loop; PyTorch's own way, a DataLoader with pin_memory and copies with non_blocking; and prefetch(),
over that loader without pin_memory and over one with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphwright as gw
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked

BATCH, ROUNDS, COUNT = 64, 5, 200
# Different batches, which a loop takes in turns.
DIFFERENT = 8
# prefetch() may take so many times as long as the larger of copying and computing.
LIMIT = 1.03

Loop = Callable[[], object]


class Batches(Dataset[torch.Tensor]):
    """Batches that are in memory already."""

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        self.batches = [torch.randn(shape) for _ in range(min(DIFFERENT, count))]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[index % len(self.batches)]


class InHalf(nn.Module):
    """A model in half precision, and channels last, of images in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.half().to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x.half().to(memory_format=torch.channels_last))
        return result


def model_of(device: torch.device, *, quick: bool) -> nn.Module:
    """ResNet-50 on a GPU; else something small."""
    torch.manual_seed(0)
    if quick or device.type == "cpu":
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*layers).to(device).eval()
    from torchvision import models

    return InHalf(models.resnet50(weights=None)).to(device).eval()


def loops(device: torch.device, data: Batches, model: Callable[..., Any]) -> dict[str, Loop]:
    """Each way to go over all batches."""
    pin = device.type == "cuda"
    plain = DataLoader(data, batch_size=None)
    pinned = DataLoader(data, batch_size=None, pin_memory=pin)
    there = data[0].to(device)
    source = data[0].pin_memory() if pin else data[0].clone()

    def over(batches: Iterable[torch.Tensor], **how: Any) -> Loop:
        def loop() -> None:
            for x in batches:
                model(x.to(device, **how))

        return loop

    def computing() -> None:
        for _ in range(len(data)):
            model(there)

    def copying() -> None:
        for _ in range(len(data)):
            there.copy_(source, non_blocking=True)

    return {
        "computing": computing,
        "copying": copying,
        "plain": over(plain),
        "pinned": over(pinned, non_blocking=True),
        "prefetch": over(gw.prefetch(plain, device)),
        "prefetch, pinned by the loader": over(gw.prefetch(pinned, device)),
    }


def seconds(ways: dict[str, Loop], rounds: int, count: int, device: torch.device) -> dict[str, Any]:
    """Seconds a batch of each way, in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, loop in ways.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            loop()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # The first round warms up.
                found[name].append((time.perf_counter() - began) / count)
    return {
        name: {"median": statistics.median(each), "samples": each} for name, each in found.items()
    }


def right(device: torch.device, data: Batches, model: Callable[..., Any]) -> bool:
    """Whether every answer is that of the model for that very batch."""
    loader = DataLoader(data, batch_size=None)
    mine = [model(x).clone() for x in gw.prefetch(loader, device)]
    theirs = [model(x.to(device)).clone() for x in loader]
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# What the ways are, for a reader.
SHOWN = {
    "prefetch": "prefetch()",
    "prefetch, pinned by the loader": "prefetch() over a loader with pin_memory",
    "pinned": "pin_memory and non_blocking",
    "plain": "a plain loop",
    "computing": "computing alone",
    "copying": "copying alone",
}


def to_markdown(result: dict[str, Any]) -> str:
    """What docs/results/feeding.md shows."""
    ways = result["ways"]
    computing = ways["computing"]["median"]
    table = [["loop", "ms a batch", "of computing alone"]]
    for way, name in SHOWN.items():
        median = ways[way]["median"]
        table.append([name, f"{median * 1e3:.2f}", f"{median / computing:.2f}"])
    return "\n".join(
        [
            f"Batches of 64 images, {result['batch_bytes'] / 1e6:.0f} MB each.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path, *, quick: bool) -> int:
    """Measure and write feeding.json; the number of targets missed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = quick or device.type == "cpu"
    count, rounds = (6, 2) if small else (COUNT, ROUNDS)
    data = Batches((4, 3, 32, 32) if small else (BATCH, 3, 224, 224), count)
    with torch.no_grad():
        model = gw.graph(model_of(device, quick=quick))
        ok = right(device, data, model)
        ways = seconds(loops(device, data, model), rounds, count, device)
    floor = max(ways["computing"]["median"], ways["copying"]["median"])
    ratio = ways["prefetch"]["median"] / floor
    targets = [
        {"target": "every answer is right", "figure": ok, "met": ok},
        {"target": f"prefetch ≤ {LIMIT} × the larger", "figure": ratio, "met": ratio <= LIMIT},
    ]
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "feeding",
        "commit": commit(),
        "quick": small,
        "environment": environment(device),
        "batch_bytes": data[0].nbytes,
        "ways": ways,
        "targets": targets,
    }
    write(out / "feeding.json", result)
    for name, way in ways.items():
        print(f"{name:34} {way['median'] * 1e3:9.3f} ms a batch")
    for target in targets:
        print(f"{target['target']:34} {target['figure']!s:>12}  {'yes' if target['met'] else 'NO'}")
    return 0 if small else sum(not target["met"] for target in targets)
