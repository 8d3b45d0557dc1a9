"""The sentence-embedding model of minilm.py behind a server: texts in, embeddings out.

graphwright serve examples/serve_minilm.py:minilm
python examples/ask_minilm.py "What is a CUDA graph?"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from minilm import SENTENCES, embed, load

import graphwright as gw
from graphwright.serving.protocol import Strings, TensorMetadata

MAX_TOKENS = 128


class Embedder(torch.nn.Module):
    """Token ids and their mask, (sentences, tokens), to embeddings, (sentences, 384)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return embed(self.model, {"input_ids": input_ids, "attention_mask": attention_mask})


def embedder() -> gw.ModelConfig:
    """Token ids in: for clients that have the tokenizer."""
    model, tokenizer = load()
    batch: Any = tokenizer(
        SENTENCES[:2], padding="max_length", max_length=MAX_TOKENS, return_tensors="pt"
    )
    varying = {0: "batch", 1: "length"}
    return gw.ModelConfig(
        Embedder(model).eval(),
        kwargs={name: batch[name] for name in ("input_ids", "attention_mask")},
        dynamic_shapes={"input_ids": varying, "attention_mask": varying},
        pad={"attention_mask": 0},
    )


def minilm() -> gw.ModelConfig:
    """Texts in: the server has the tokenizer."""
    config = embedder()
    _, tokenizer = load()
    tokenize: Any = tokenizer

    def ids_of(inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        texts = inputs.get("text")
        if not isinstance(texts, Strings):
            raise ValueError("send the input 'text', BYTES, with one text a row")
        batch = tokenize(
            [value.decode() for value in texts.values],
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    return gw.ModelConfig(
        config.model,
        kwargs=config.kwargs,
        dynamic_shapes=config.dynamic_shapes,
        pad=config.pad,
        preprocess=ids_of,
        inputs=[TensorMetadata("text", "BYTES", (-1,))],
    )


if __name__ == "__main__":
    gw.serve({"minilm": minilm})
