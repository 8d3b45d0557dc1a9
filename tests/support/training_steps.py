"""Training steps that tests run eagerly and as graphs: models, optimizers, batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it
from torch.optim import Optimizer

Batch = tuple[torch.Tensor, ...]


@dataclass
class Training:
    """A step and what it works with, as new."""

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Optimizer
    batches: Iterator[Batch]
    scheduler: Any = None
    scaler: Any = None
    parts: dict[str, Any] = field(default_factory=dict)


Make = Callable[[torch.device], Training]


def fused(parameters: Any, device: torch.device, lr: Any = 1e-2) -> Optimizer:
    """AdamW as a graph takes it on either device."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def images(device: torch.device, n: int = 8) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(n, 3, 12, 12, generator=generator)
        yield x.to(device), torch.randint(0, 5, (n,), generator=generator).to(device)


def rows(device: torch.device, n: int = 8) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(n, 16, generator=generator)
        yield x.to(device), torch.randint(0, 5, (n,), generator=generator).to(device)


def sequences(device: torch.device, n: int = 4) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(n, 6, 16, generator=generator)
        yield x.to(device), torch.randint(0, 5, (n,), generator=generator).to(device)


def plain(model: nn.Module, optimizer: Optimizer) -> Callable[..., torch.Tensor]:
    """zero_grad, forward, loss, backward, step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def mlp(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5)
    return nn.Sequential(*layers).to(device)


def mlp_with_dropout(device: torch.device) -> Training:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)
    return Training(plain(model, optimizer), model, optimizer, rows(device))


def mlp_with_adamw(device: torch.device) -> Training:
    model = mlp(device)
    optimizer = fused(model.parameters(), device)
    return Training(plain(model, optimizer), model, optimizer, rows(device))


def cnn_with_batch_norm(device: torch.device) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(200, 5),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    return Training(plain(model, optimizer), model, optimizer, images(device))


class LastOfLSTM(nn.Module):
    """The last output of an LSTM, classified."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def lstm(device: torch.device, dropout: float = 0.0) -> Training:
    torch.manual_seed(0)
    model = LastOfLSTM(dropout).to(device)
    optimizer = fused(model.parameters(), device)
    return Training(plain(model, optimizer), model, optimizer, sequences(device))


def lstm_with_dropout(device: torch.device) -> Training:
    """On a GPU cuDNN has random numbers of its own, which begin anew after each seed."""
    return lstm(device, 0.1)


class Block(nn.Module):
    """A transformer's layer, its mean classified."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(x).mean(1))
        return out


def transformer_in_bf16(device: torch.device) -> Training:
    torch.manual_seed(0)
    model = Block().to(device)
    optimizer = fused(model.parameters(), device)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, model, optimizer, sequences(device))


def fp16_with_scaler(device: torch.device) -> Training:
    """The scale begins so high that the first steps overflow, and grows until others do."""
    model = mlp(device)
    optimizer = fused(model.parameters(), device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=7)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss, scaler._scale

    return Training(step, model, optimizer, rows(device), scaler=scaler)


def adamw_with_cosine(device: torch.device) -> Training:
    model = mlp(device)
    optimizer = fused(model.parameters(), device, torch.tensor(1e-2, device=device))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    step = plain(model, optimizer)
    return Training(step, model, optimizer, rows(device), scheduler)


def clipped(device: torch.device) -> Training:
    model = mlp(device)
    optimizer = fused(model.parameters(), device)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return Training(step, model, optimizer, rows(device))


def accumulated_over_4(device: torch.device) -> Training:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for one, its in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(one), its) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return Training(step, model, optimizer, rows(device, 16))


def with_moving_average(device: torch.device) -> Training:
    model = mlp(device)
    optimizer = fused(model.parameters(), device)
    average = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        return loss

    made = Training(step, model, optimizer, rows(device))
    made.parts["average"] = average
    return made


def zeroed_in_place(device: torch.device) -> Training:
    """zero_grad() that keeps the gradients' memory: a step goes on from what was there."""
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, model, optimizer, rows(device))


TRAININGS: list[Make] = [
    mlp_with_dropout,
    mlp_with_adamw,
    cnn_with_batch_norm,
    lstm,
    lstm_with_dropout,
    transformer_in_bf16,
    fp16_with_scaler,
    adamw_with_cosine,
    clipped,
    accumulated_over_4,
    with_moving_average,
    zeroed_in_place,
]


def run(training: Training, step: Callable[..., Any], steps: int) -> list[torch.Tensor]:
    """What each step returns, as numbers in a row; on the CPU."""
    torch.manual_seed(7)
    seen = []
    for batch in itertools.islice(training.batches, steps):
        result = step(*batch)
        parts = result if isinstance(result, tuple) else (result,)
        seen.append(torch.stack([part.detach().float().reshape(()) for part in parts]))
    return [row.cpu() for row in seen]


def eagerly(make: Make, device: torch.device, steps: int) -> tuple[Training, list[torch.Tensor]]:
    """The same without graphs."""
    training = make(device)

    def step(*batch: torch.Tensor) -> Any:
        result = training.step(*batch)
        if training.scheduler is not None:
            training.scheduler.step()
        parts = result if isinstance(result, tuple) else (result,)
        return tuple(part.detach().clone() for part in parts)

    return training, run(training, step, steps)
