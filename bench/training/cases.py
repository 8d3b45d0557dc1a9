"""What the training benchmark trains: models that give their loss, optimizers and batches.

Weights, tokens and images are random from a fixed seed; none of the data is constant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]

# Batches that are gone through again and again.
BATCHES = 8


@dataclass(frozen=True)
class Task:
    """A model on the CPU, whose call on a batch gives the loss, with all that trains it."""

    model: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batches: tuple[Batch, ...]
    device: torch.device

    def copy_of_model(self) -> nn.Module:
        """The model with its first weights, on the device."""
        # Moved and not only copied: an LSTM lays its weights out anew.
        return copy.deepcopy(self.model).to(self.device)


class WithLoss(nn.Module):
    """A network and the loss of what it answers; the last tensor of a batch is the target."""

    def __init__(self, network: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        *inputs, target = batch
        return self.loss(self.network(*inputs), target)


class Language(nn.Module):
    """A model of transformers, which knows its loss itself, in bf16 by autocast."""

    def __init__(self, network: nn.Module, names: tuple[str, ...], kind: str) -> None:
        super().__init__()
        self.network = network
        self.names = names
        self.kind = kind

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, whose tensors have `names`."""
        # Inside, so that the casts it remembers are forgotten before any graph ends.
        with torch.autocast(self.kind, torch.bfloat16):
            return self.network(**dict(zip(self.names, batch, strict=True))).loss


class LastStep(nn.Module):
    """Two LSTM layers, and classes from what they say at the last step."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of sequences (batch, steps, features)."""
        return self.head(self.lstm(x)[0][:, -1])


def mlp(device: torch.device, *, quick: bool) -> Task:
    """Three hidden layers with dropout; AdamW."""
    batch, width = (8, 32) if quick else (64, 256)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    network = nn.Sequential(*layers, nn.Linear(width, 10))
    return _classes(network, torch.optim.AdamW, {"lr": 1e-3}, (batch, width), device)


def resnet18(device: torch.device, *, quick: bool, batch: int) -> Task:
    """torchvision's ResNet-18, channels last, in fp32; SGD with momentum."""
    from torchvision import models

    shape = (2, 3, 32, 32) if quick else (batch, 3, 224, 224)
    network = models.resnet18(weights=None, num_classes=100)
    network = network.to(memory_format=torch.channels_last)
    options = {"lr": 0.01, "momentum": 0.9}
    return _classes(network, torch.optim.SGD, options, shape, device, count=100)


def resnet18_b8(device: torch.device, *, quick: bool) -> Task:
    """ResNet-18 on 8 images."""
    return resnet18(device, quick=quick, batch=8)


def resnet18_b64(device: torch.device, *, quick: bool) -> Task:
    """ResNet-18 on 64 images."""
    return resnet18(device, quick=quick, batch=64)


def gpt2(device: torch.device, *, quick: bool) -> Task:
    """GPT-2 small on 2 texts of 128 tokens; AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, Any] = {}
    if quick:
        small = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 500}
        small |= {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(use_cache=False, **small)
    shape = (1, 16) if quick else (2, 128)
    batches = []
    for _ in range(BATCHES):
        ids = _tokens(shape, config.vocab_size)
        batches.append((ids, ids.clone()))
    model = GPT2LMHeadModel(config)
    # Else a warning is logged in forward, at which torch.compile breaks the graph.
    model.loss_type = "ForCausalLM"
    network = Language(model, ("input_ids", "labels"), device.type)
    return _task(network, torch.optim.AdamW, {"lr": 1e-4}, batches, device)


def bert(device: torch.device, *, quick: bool) -> Task:
    """BERT base on 4 texts of up to 128 tokens, of which 15 % are to be guessed; AdamW."""
    from transformers import BertConfig, BertForMaskedLM

    small: dict[str, Any] = {}
    if quick:
        small = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 500}
        small |= {"hidden_size": 32, "intermediate_size": 64}
    config = BertConfig(**small)
    rows, length = (2, 16) if quick else (4, 128)
    batches = []
    for _ in range(BATCHES):
        lengths = torch.randint(length // 2, length + 1, (rows, 1))
        lengths[0] = length
        mask = torch.arange(length) < lengths
        ids = _tokens((rows, length), config.vocab_size) * mask
        guessed = (torch.rand(rows, length) < 0.15) & mask
        guessed[:, 1] = True
        labels = ids.where(guessed, torch.tensor(-100))
        batches.append((ids.masked_fill(guessed, 103), mask.long(), labels))
    names = ("input_ids", "attention_mask", "labels")
    network = Language(BertForMaskedLM(config), names, device.type)
    return _task(network, torch.optim.AdamW, {"lr": 1e-4}, batches, device)


def lstm(device: torch.device, *, quick: bool) -> Task:
    """Two LSTM layers on sequences of 32 steps; Adam."""
    shape, width = ((4, 8, 8), 16) if quick else ((64, 32, 128), 256)
    return _classes(LastStep(shape[-1], width), torch.optim.Adam, {"lr": 1e-3}, shape, device)


MODELS: dict[str, Callable[..., Task]] = {
    "mlp": mlp,
    "lstm": lstm,
    "resnet18_b8": resnet18_b8,
    "resnet18_b64": resnet18_b64,
    "gpt2": gpt2,
    "bert": bert,
}


def task(name: str, device: torch.device, *, quick: bool) -> Task:
    """What a name stands for; `quick` makes all sizes tiny."""
    torch.manual_seed(0)
    return MODELS[name](device, quick=quick)


def _tokens(shape: tuple[int, int], words: int) -> torch.Tensor:
    """Tokens of which a few are common and most are rare, as in a text; none of the first 110."""
    ranks = torch.rand(shape).mul(torch.tensor(float(words - 110)).log()).exp()
    return (110 + ranks.long()).clamp(max=words - 1)


def _classes(
    network: nn.Module,
    kind: type[torch.optim.Optimizer],
    options: dict[str, float],
    shape: tuple[int, ...],
    device: torch.device,
    count: int = 10,
) -> Task:
    """A classifier of inputs around a mean that is their class's own."""
    means = torch.randn(count, *shape[1:])
    batches = []
    for _ in range(BATCHES):
        target = torch.randint(count, shape[:1])
        x = 0.3 * means[target] + torch.randn(shape)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        batches.append((x, target))
    return _task(WithLoss(network, nn.functional.cross_entropy), kind, options, batches, device)


def _task(
    network: nn.Module,
    kind: type[torch.optim.Optimizer],
    options: dict[str, float],
    batches: list[Batch],
    device: torch.device,
) -> Task:
    # The fused optimizers are eager's fastest, and every way has the same.
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, fused=True, **options)  # type: ignore[call-arg]

    moved = tuple(tuple(tensor.to(device) for tensor in batch) for batch in batches)
    return Task(network.train(), optimizer, moved, device)
