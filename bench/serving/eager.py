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
    """The model with its sizes."""
    names = ("input_ids", "attention_mask")
    return gw.ModelConfig(
        model,
        kwargs={name: torch.ones(1, 8, dtype=torch.long) for name in names},
        buckets=gw.Buckets.powers_of_two(batch=(1, 16), length=(8, 128)),
        dynamic_shapes={name: {0: "batch", 1: "length"} for name in names},
        pad={"attention_mask": 0},
    )
