"""A ResNet-18 (He et al., 2015) with random weights: fused in one call, beside eager.

python examples/resnet.py
graphwright tune examples/resnet.py:images --strategies torchscript:optimize,fused
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import graphwright as gw


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            convolution = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


def resnet18(classes: int = 1000) -> nn.Sequential:
    """The model, in training mode."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    blocks = []
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


def images(count: int = 8, size: int = 224) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model in eval mode with statistics of random images, and a batch of such images."""
    torch.manual_seed(0)
    model, x = resnet18(), torch.randn(count, 3, size, size)
    with torch.no_grad():
        model.train()(x)
    return model.eval(), (x,)


def main(count: int = 8, size: int = 224, rounds: int = 15) -> float:
    """How many times as fast as eager it is, on the GPU if there is one."""
    model, (x,) = images(count, size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = model.to(device), x.to(device)
    fused = gw.fuse(model, (x,))
    print(fused.explain())
    seconds: dict[str, list[float]] = {"eager": [], "fused": []}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in (("eager", model), ("fused", fused)):
                began = time.perf_counter()
                call(x).sum().item()  # Waits for the GPU.
                seconds[name].append(time.perf_counter() - began)
    times = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in times.items():
        print(f"{name}: {median * 1e3:.1f} ms")
    gain = times["eager"] / times["fused"]
    print(f"fused is {gain:.2f} times as fast")
    return gain


if __name__ == "__main__":
    main()
