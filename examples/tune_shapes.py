"""A small convolutional network tuned over buckets, to answer batches of every size.

Three sizes are measured, each by its share of all calls; batches between them are padded to the
next one, once it is proved that this changes nothing.

    python examples/tune_shapes.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

SHARES = {1: 0.5, 4: 0.3, 16: 0.2}  # of all calls, by the size of their batch


def network() -> nn.Module:
    """Three convolutions with batch norms, and a classifier for ten classes; in eval mode."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


def main(strategies: list[str] | None = None, budget_s: float | None = None) -> Mapping[str, int]:
    """Tune on the GPU if there is one, call it with batches of all sizes; how the calls went."""
    import graphwright as gw

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network().to(device)
    fast = gw.tune(
        model,
        (torch.randn(4, 3, 16, 16, device=device),),
        buckets=gw.Buckets(batch=list(SHARES)),
        weights=SHARES,
        strategies=strategies,
        budget_s=budget_s,
    )
    print(fast.report)
    for batch in range(1, 19):
        fast(torch.randn(batch, 3, 16, 16, device=device))
    print(fast.explain())
    return fast.calls


if __name__ == "__main__":
    main()
