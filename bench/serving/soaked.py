"""What the soak test serves: a small encoder with a mask, of which some requests fail."""

from __future__ import annotations

import torch
from torch import nn

import graphwright as gw

VOCABULARY, LENGTH = 100, 32


class Encoder(nn.Module):
    """Ids and their mask, (rows, length), to 5 numbers a row; fails where a row begins with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens that the mask leaves."""
        if bool((ids[:, 0] == 0).any()):
            raise ValueError("a row begins with 0")
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=mask == 0)
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def model() -> Encoder:
    """The same weights each time."""
    torch.manual_seed(0)
    return Encoder().eval()


def served() -> gw.ModelConfig:
    """The model, at any size up to 32 rows of 32."""
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    varying = {0: "batch", 1: "length"}
    return gw.ModelConfig(
        model(), (ids, torch.ones_like(ids)), dynamic_shapes={"ids": varying, "mask": varying}
    )
