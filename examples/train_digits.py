"""A small CNN learns scikit-learn's digits, eagerly and with a training step that is one graph.

python examples/train_digits.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
EPOCHS, BATCH, HELD_OUT = 15, 64, 360


def network() -> nn.Module:
    """Two convolutions with batch norms, dropout, and a classifier for ten digits."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10)]
    return nn.Sequential(*layers)


def digits(device: str) -> tuple[Batch, Batch]:
    """The 1797 images of 8×8 with their digits, in an order of our own: to learn, and held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None].to(device) / 16
    target = torch.tensor(data.target)[order].to(device)
    return (images[HELD_OUT:], target[HELD_OUT:]), (images[:HELD_OUT], target[:HELD_OUT])


def train(data: Batch, epochs: int, *, graphed: bool) -> tuple[nn.Module, list[float], float]:
    """The network, the loss of every step, and seconds a step after the first epoch."""
    import graphwright as gw

    torch.manual_seed(0)
    model = network().to(data[0].device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    def step(images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    run: Callable[..., torch.Tensor] = step
    if graphed:
        run = gw.graph_step(step, (data[0][:BATCH], data[1][:BATCH]), optimizer=optimizer)
    losses: list[torch.Tensor] = []
    shuffled = torch.Generator().manual_seed(1)
    torch.manual_seed(1)  # for dropout
    for epoch in range(epochs):
        if epoch == 1:
            losses[-1].item()  # waits for the device
            begun, before = len(losses), time.perf_counter()
        order = torch.randperm(len(data[0]), generator=shuffled).to(data[0].device)
        # The last batch of an epoch is smaller, and gets a graph of its own.
        for rows in order.split(BATCH):
            losses.append(run(data[0][rows], data[1][rows]).detach())
    curve = torch.stack(losses).tolist()
    return model, curve, (time.perf_counter() - before) / (len(losses) - begun)


@torch.no_grad()
def accuracy(model: nn.Module, data: Batch) -> float:
    """The share of images whose digit is told."""
    return float((model.eval()(data[0]).argmax(-1) == data[1]).float().mean())


def main(epochs: int = EPOCHS) -> tuple[float, float]:
    """Train both ways; the accuracy on held-out digits, and the largest difference of a loss."""
    learnt, held_out = digits("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{len(learnt[0])} digits, {epochs} epochs, eager ...")
    _, expected, eager_s = train(learnt, epochs, graphed=False)
    print("... and with gw.graph_step ...")
    model, losses, graphed_s = train(learnt, epochs, graphed=True)
    print("step    eager  graphed")
    for number in range(0, len(losses), len(losses) // 8):
        print(f"{number:4}  {expected[number]:7.4f}  {losses[number]:7.4f}")
    off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    share = accuracy(model, held_out)
    print(f"largest difference of a loss: {off:.1e}")
    print(f"ms a step: eager {eager_s * 1e3:.2f}, graphed {graphed_s * 1e3:.2f}")
    print(f"held-out digits told: {share:.1%}")
    return share, off


if __name__ == "__main__":
    main()
