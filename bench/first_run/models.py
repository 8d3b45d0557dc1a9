"""Ten models with random weights in float32, as a new user might name them to the command.

Each function returns a model in eval mode and its inputs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from cnn import cnn as cnn  # examples/ is on the path: see bench/__init__.py
from conv_relu_pool import conv_relu_pool as conv_relu_pool  # as above
from mlp import mlp as mlp  # as above
from rnn import rnn as rnn  # as above
from torch import nn

MODELS = (
    *("mlp", "cnn", "rnn", "conv_relu_pool", "bert", "distilbert", "gpt2", "resnet"),
    *("mobilenet", "vit"),
)


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT-base and a mask of ones, as a tokenizer gives it for one text."""
    return _text("Bert")


def distilbert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """DistilBERT, likewise."""
    return _text("DistilBert")


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 without a cache, likewise."""
    return _text("GPT2", use_cache=False)


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet-50 of transformers, one image."""
    return _image("ResNet")


def mobilenet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """MobileNetV2 of transformers, one image."""
    return _image("MobileNetV2")


def vit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ViT-B/16 of transformers, one image."""
    return _image("ViT")


def _model(name: str, **config: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))
    model: nn.Module = made.eval()
    return model


def _text(name: str, **config: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(1000, 20_000, (1, 64))
    return _model(name, **config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _model(name), (torch.randn(1, 3, 224, 224),)
