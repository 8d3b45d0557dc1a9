"""The reference models, by the names that are used everywhere.

Each function returns a model in eval mode and its inputs on the CPU, with weights from a fixed
seed, so that `graphwright tune bench.cases:NAME` works and every benchmark runs the same.
"""

from __future__ import annotations

from typing import Any

import torch
from cnn import cnn as cnn  # examples/ is on the path: see bench/__init__.py
from conv_relu_pool import conv_relu_pool as conv_relu_pool  # as above
from mlp import mlp as mlp  # as above
from rnn import rnn as rnn  # as above
from torch import nn
from torch.utils import _pytree as pytree

MODELS = (
    "mlp",
    "cnn",
    "rnn",
    "conv_relu_pool",
    "resnet50",
    "mobilenet_v3_large",
    "vit_b_16",
    "bert",
    "gpt2",
    "minilm",
)


def resnet50() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """torchvision's ResNet-50 with random weights in fp16, channels last, one image."""
    return _convolutional("resnet50")


def mobilenet_v3_large() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """torchvision's MobileNetV3 with random weights in fp16, channels last, one image."""
    return _convolutional("mobilenet_v3_large")


def _convolutional(name: str) -> tuple[nn.Module, tuple[torch.Tensor]]:
    from torchvision import models

    torch.manual_seed(0)
    model = _calibrated(models.get_model(name, weights=None)).half()
    x = torch.randn(1, 3, 224, 224).half()
    return (
        model.to(memory_format=torch.channels_last),
        (x.to(memory_format=torch.channels_last),),
    )


def _calibrated(model: nn.Module) -> nn.Module:
    """The model in eval mode with the statistics of random images in its batch norms.

    With those that it is made with, activations vanish in fp16: any output would be right.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 224, 224))
    return model.eval()


def vit_b_16() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """torchvision's ViT-B/16 with random weights in fp16, one image."""
    from torchvision import models

    torch.manual_seed(0)
    model = models.vit_b_16(weights=None)
    # Made as zeros, which would make every output zero.
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model.half().eval(), (torch.randn(1, 3, 224, 224).half(),)


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT's architecture with random weights in fp16, one text of 117 tokens, padded to 128."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig()).half().eval()
    mask = (torch.arange(128) < 117).long()[None]
    return model, {"input_ids": torch.randint(999, 30522, (1, 128)) * mask, "attention_mask": mask}


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2's architecture with random weights in fp16, one text of 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).half().eval()
    return model, {"input_ids": torch.randint(0, 50257, (1, 64))}


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


def load(name: str, device: torch.device) -> tuple[nn.Module, Any]:
    """A reference model and its inputs on a device; in fp32 on CPUs, where fp16 may be emulated."""
    model, inputs = globals()[name]()
    dtype = torch.float32 if device.type == "cpu" else None

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return model.to(device, dtype), pytree.tree_map(moved, inputs)
