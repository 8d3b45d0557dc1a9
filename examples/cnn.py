"""A small CNN on 1×28×28 images.

graphwright tune examples/cnn.py:cnn
"""

from __future__ import annotations

import torch
from torch import nn


def cnn() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model in eval mode and a batch of 32 images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return model.eval(), (torch.randn(32, 1, 28, 28),)


def main(strategies: list[str] | None = None, budget_s: float | None = None) -> str | None:
    """Tune on the GPU if there is one; the name of what was chosen."""
    import graphwright as gw

    model, inputs = cnn()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = inputs[0].to(device)
    fast = gw.tune(model.to(device), (x,), strategies=strategies, budget_s=budget_s)
    print(fast.report)
    print("classes of the images:", fast(x).argmax(-1).tolist())
    return fast.report.chosen


if __name__ == "__main__":
    main()
