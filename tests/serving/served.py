"""Models for the tests of serving, and requests for them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from graphwright.serving import repository
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.protocol import TensorMetadata, Value

VOCABULARY = 100
BY_LENGTH = {
    "ids": {0: "batch", 1: "length"},
    "mask": {0: "batch", 1: "length"},
}


class Encoder(nn.Module):
    """A transformer with a mask: padding and other rows change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=mask == 0)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.head(mean), "tokens": self.head(self.embedding(ids))}


class WithoutMask(Encoder):
    """Padding changes its answers."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embedding(ids)).cumsum(1).mean(1)}


class AmongRows(Encoder):
    """Other rows change its answers."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embedding(ids)) - self.embedding(ids).mean()}


class HardlyAmongRows(Encoder):
    """Other rows change its answers by less than another kernel's rounding may."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        answer = super().forward(ids, mask)["logits"]
        return {"logits": answer + 1e-4 * ids.float().mean() / VOCABULARY}


class Picky(Encoder):
    """Fails where a row begins with 0."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        if bool((ids[:, 0] == 0).any()):
            raise ValueError("a row begins with 0")
        return super().forward(ids, mask)


class Lasting(Encoder):
    """Takes half a minute where a row begins with 0."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        if bool((ids[:, 0] == 0).any()):
            time.sleep(30)
        return super().forward(ids, mask)


def made(kind: type[Encoder] = Encoder) -> Encoder:
    torch.manual_seed(0)
    return kind().eval()


def sample(rows: int = 2, length: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    return ids, torch.ones(rows, length, dtype=torch.int64)


def config(kind: type[Encoder] = Encoder) -> ModelConfig:
    return ModelConfig(made(kind), sample(), dynamic_shapes=BY_LENGTH)


def lasting() -> ModelConfig:
    return config(Lasting)


# Rows of this length take the GPU from the process that answers them, as far as it can tell.
FATAL = 13


def in_a_process() -> ModelConfig:
    """The model, which says as "pid" which process answers."""

    def postprocess(outputs: dict[str, torch.Tensor]) -> Mapping[str, Value]:
        if outputs["tokens"].shape[1] == FATAL:
            repository.devices_answer = lambda: False
        return outputs | {"pid": torch.tensor([float(os.getpid())])}

    outputs = [
        TensorMetadata("logits", "FP32", (-1, 5)),
        TensorMetadata("tokens", "FP32", (-1, -1, 5)),
        TensorMetadata("pid", "FP32", (1,)),
    ]
    return replace(config(), postprocess=postprocess, outputs=outputs)
