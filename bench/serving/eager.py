"""MiniLM as PyTorch runs it: what the servers serve in the mode "eager".

`model` takes input_ids and attention_mask, (texts, tokens), and gives unit-length embeddings: it is
what the peers serve. `served` says how graphwright serves it.
"""

from __future__ import annotations

import torch
from minilm import load  # examples/ is on the path: see bench/__init__.py
from minilm_buckets import Embedder  # as above

import graphwright as gw

model = Embedder(load()[0]).eval()


def served() -> gw.ModelConfig:
    """The model, at any size up to 128 tokens."""
    ids = torch.arange(1000, 1128)[None]
    varying = {0: "batch", 1: "length"}
    return gw.ModelConfig(
        model,
        kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        dynamic_shapes={"input_ids": varying, "attention_mask": varying},
        pad={"attention_mask": 0},
    )
