"""An RNN(64, 32) with a linear head: many small steps, each a few tiny kernels.

graphwright tune examples/rnn.py:rnn
"""

from __future__ import annotations

import torch
from torch import nn


class Rnn(nn.Module):
    """A recurrent layer, and a linear head on its last step."""

    def __init__(self, inputs: int = 64, hidden: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (batch, classes) of sequences (batch, steps, inputs)."""
        steps, _ = self.rnn(x)
        return self.head(steps[:, -1])


def rnn() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model in eval mode and a batch of 32 sequences of 50 steps."""
    torch.manual_seed(0)
    return Rnn().eval(), (torch.randn(32, 50, 64),)


def main(strategies: list[str] | None = None, budget_s: float | None = None) -> str | None:
    """Tune on the GPU if there is one; the name of what was chosen."""
    import graphwright as gw

    model, inputs = rnn()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = inputs[0].to(device)
    fast = gw.tune(model.to(device), (x,), strategies=strategies, budget_s=budget_s)
    print(fast.report)
    print("classes of the sequences:", fast(x).argmax(-1).tolist())
    return fast.report.chosen


if __name__ == "__main__":
    main()
