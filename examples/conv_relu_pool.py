r"""Conv(32 → 64) + ReLU + MaxPool at (64, 32, 56, 56): eager, scripted, fused.

The classic question of operator fusion: does scripting the block make it faster, and by how much?

    graphwright tune examples/conv_relu_pool.py:conv_relu_pool \
        --strategies torchscript:optimize,fused
"""

from __future__ import annotations

import torch
from torch import nn


def conv_relu_pool() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The block in eval mode and a batch of 64 feature maps of 32×56×56."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return model.eval(), (torch.randn(64, 32, 56, 56),)


def main(strategies: list[str] | None = None, budget_s: float | None = None) -> str | None:
    """Tune on the GPU if there is one; the name of what was chosen."""
    import graphwright as gw

    model, inputs = conv_relu_pool()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = inputs[0].to(device)
    fast = gw.tune(model.to(device), (x,), strategies=strategies, budget_s=budget_s)
    report = fast.report
    print(report)
    for row in report.rows:
        speedup = report.speedup(row)
        if speedup is not None and row.strategy.startswith(("torchscript", "fused")):
            print(f"{row.strategy}: {100 * (speedup[0] - 1):+.1f} % against eager")
    return report.chosen


if __name__ == "__main__":
    main()
