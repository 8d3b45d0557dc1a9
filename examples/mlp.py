"""The MLP 1024-512-256-10 at batch 32: plain calls against a CUDA graph.

Three small matrix products: on a GPU nearly all of the time is spent launching them.

    graphwright tune examples/mlp.py:mlp --strategies eager,eager:no_grad,eager+graph
"""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model in eval mode and a batch of 32 vectors of 1024 numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return model.eval(), (torch.randn(32, 1024),)


def main(strategies: list[str] | None = None, budget_s: float | None = None) -> str | None:
    """Tune on the GPU if there is one; the name of what was chosen."""
    import graphwright as gw

    model, inputs = mlp()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = inputs[0].to(device)
    fast = gw.tune(model.to(device), (x,), strategies=strategies, budget_s=budget_s)
    print(fast.report)
    print("logits of the first vector:", fast(x)[0].tolist())
    return fast.report.chosen


if __name__ == "__main__":
    main()
