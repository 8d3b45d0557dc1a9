"""The reference models, by the names that are used everywhere.

Each function returns a model in eval mode and its inputs on the CPU, with weights from a fixed
seed, so that `graphwright tune bench/cases.py:NAME` works and every benchmark runs the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from cnn import cnn as cnn  # examples/ has to be on the path first
from conv_relu_pool import conv_relu_pool as conv_relu_pool  # as above
from mlp import mlp as mlp  # as above
from rnn import rnn as rnn  # as above

CLASSICS = ("mlp", "cnn", "rnn", "conv_relu_pool")


def minilm() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """MiniLM's architecture with random weights in fp16, 8 sentences of 12 to 33 tokens."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    model = BertModel(config).half().eval()
    lengths = torch.tensor([12, 33, 18, 25, 29, 14, 21, 30])
    mask = (torch.arange(33) < lengths[:, None]).long()
    ids = torch.randint(999, 30522, (8, 33)) * mask
    return model, {"input_ids": ids, "attention_mask": mask}


TUNED = (*CLASSICS, "minilm")
