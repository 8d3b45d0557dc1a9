"""Models for profile(), with random weights, in float32: twenty for a GPU, a few tiny ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _image(name: str, batch: int, size: int = 224) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        model = getattr(torchvision.models, name)(weights=None)
        return model, (torch.randn(batch, 3, size, size),), {}

    return build


def _text(
    kind: str, batch: int, length: int, *, vocabulary: str = "vocab_size", **config: Any
) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        settings = getattr(transformers, f"{kind.removesuffix('Encoder')}Config")(**config)
        model = getattr(transformers, f"{kind}Model")(settings)
        ids = torch.randint(5, getattr(settings, vocabulary) - 5, (batch, length))
        more = {"use_cache": False} if kind == "GPT2" else {}
        return model, (ids,), more

    return build


def _tiny() -> Built:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(2, 16),), {}


def _tiny_image() -> Built:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return model, (torch.randn(1, 3, 16, 16),), {}


_HEADS = {"hidden_size": 768, "num_attention_heads": 12}
_SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}

MODELS: dict[str, Callable[[], Built]] = {
    "resnet18-b1": _image("resnet18", 1),
    "resnet50-b1": _image("resnet50", 1),
    "resnet50-b32": _image("resnet50", 32),
    "mobilenet_v3_large-b1": _image("mobilenet_v3_large", 1),
    "efficientnet_b0-b8": _image("efficientnet_b0", 8),
    "densenet121-b1": _image("densenet121", 1),
    "regnet_y_400mf-b8": _image("regnet_y_400mf", 8),
    "vgg16-b8": _image("vgg16", 8),
    "vit_b_16-b8": _image("vit_b_16", 8),
    "swin_t-b8": _image("swin_t", 8),
    "convnext_tiny-b8": _image("convnext_tiny", 8),
    "bert-1x128": _text("Bert", 1, 128),
    "bert-8x128": _text("Bert", 8, 128),
    "minilm-8x64": _text("Bert", 8, 64, num_hidden_layers=6, **_SMALL),
    "gpt2-1x64": _text("GPT2", 1, 64),
    "distilbert-8x64": _text("DistilBert", 8, 64),
    "roberta-4x128": _text("Roberta", 4, 128),
    "electra-8x128": _text("Electra", 8, 128),
    "albert-1x64": _text("Albert", 1, 64, intermediate_size=3072, **_HEADS),
    "t5-encoder-4x64": _text("T5Encoder", 4, 64),
}
# Models that nothing here was fitted to: so many images and texts are drawn by this seed.
SEED, DRAWN = 34, 5
_TEXTS = (
    *("Camembert", "MPNet", "XLMRoberta", "Ernie", "RoFormer", "MobileBert", "SqueezeBert"),
    *("Data2VecText", "OPT", "GPTNeo", "MegatronBert", "LayoutLM", "ConvBert", "FNet"),
)


def unseen() -> dict[str, Callable[[], Built]]:
    """Ten models drawn by the seed: torchvision's classifiers, and texts of transformers."""
    import torchvision

    used = {name.partition("-b")[0] for name in MODELS}
    # Larger ones would take more than a second a call.
    images = [
        name
        for name in sorted(torchvision.models.list_models(module=torchvision.models))
        if name not in used and not name.startswith(("vit_h", "vit_l", "regnet_y_128gf"))
    ]
    drawn = random.Random(SEED)
    found: dict[str, Callable[[], Built]] = {}
    for place, name in enumerate(drawn.sample(images, DRAWN)):
        batch = (1, 8)[place % 2]
        found[f"{name}-b{batch}"] = _image(name, batch)
    for place, kind in enumerate(drawn.sample(_TEXTS, DRAWN)):
        batch, length = ((1, 64), (8, 64))[place % 2]
        found[f"{kind.lower()}-{batch}x{length}"] = _text(kind, batch, length)
    return found


TINY: dict[str, Callable[[], Built]] = {"tiny": _tiny, "tiny-image": _tiny_image}


def built(name: str, device: torch.device) -> Built:
    """A model in eval mode with its inputs, on a device; the same at each call."""
    torch.manual_seed(0)
    known = MODELS | TINY
    model, args, kwargs = (known if name in known else unseen())[name]()
    return model.to(device).eval(), tuple(each.to(device) for each in args), kwargs
