"""Models that nobody has tuned for, chosen by a seed before anyone looks at them.

All that timm, torchvision and transformers list is shuffled with a seed; what a test, an example or
another benchmark names is left out. Each is built with its default configuration and random weights
and called with one kind of input.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ..common.record import ROOT

SEED = 29
# How many of each library are wanted, and parameters at most.
WANTED = {"timm": 12, "torchvision": 8, "transformers": 14}
PARAMETERS = 1_000_000_000
TOKENS, SAMPLES = 128, 16_000
# Folders whose models have been looked at.
SEEN = ("tests", "bench", "examples")


class Unusable(Exception):
    """Why a model takes no part."""


@cache
def _texts() -> str:
    files = [file for folder in SEEN for file in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def names(library: str) -> list[str]:
    """The names of a library's models in the order in which they are tried.

    Those of transformers are names of configurations.
    """
    if library == "timm":
        import timm

        found = timm.list_models()
    elif library == "torchvision":
        from torchvision import models

        found = [name for name in models.list_models() if not name.startswith("quantized")]
    else:
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        found = list(MODEL_MAPPING_NAMES)
    order = sorted(set(found))
    random.Random(SEED).shuffle(order)
    return [name for name in order if name not in _texts()]


def built(library: str, name: str, device: torch.device) -> tuple[nn.Module, Callable[[int], Any]]:
    """A model in eval mode, and what makes its arguments (args, kwargs) for a batch size.

    Raises:
        Unusable: it is too large, or its inputs are of no kind that is known here.
    """
    make, inputs = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[
        library
    ](name)
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in make().parameters())
    except Exception:
        count = 0  # Some read values while they are made; these are small.
    if count > PARAMETERS:
        raise Unusable(f"{count / 1e9:.1f} B parameters")
    torch.manual_seed(SEED)
    with torch.device(device):
        model = make()
    model = model.to(device).eval().requires_grad_(False)
    count = sum(p.numel() for p in model.parameters())
    if count > PARAMETERS:
        raise Unusable(f"{count / 1e9:.1f} B parameters")
    return model, inputs(model)


_Inputs = Callable[[nn.Module], Callable[[int], Any]]


def _images(*shape: int) -> Callable[[int], Any]:
    return lambda batch: ((torch.randn(batch, *shape),), {})


def _timm(name: str) -> tuple[Callable[[], nn.Module], _Inputs]:
    import timm

    def inputs(model: nn.Module) -> Callable[[int], Any]:
        return _images(*timm.data.resolve_model_data_config(model)["input_size"])

    return lambda: timm.create_model(name, pretrained=False), inputs


def _torchvision(name: str) -> tuple[Callable[[], nn.Module], _Inputs]:
    from torchvision import models

    kind = models.get_model_builder(name).__module__.split(".")[2]
    if kind in ("detection", "optical_flow"):
        raise Unusable(f"its inputs are those of {kind.replace('_', ' ')}")
    size = models.get_model_weights(name).DEFAULT.transforms()
    crop = getattr(size, "crop_size", None) or getattr(size, "resize_size", None) or [224]
    side = list(crop) if len(crop) == 2 else list(crop) * 2
    shape = (3, 16, *side) if kind == "video" else (3, *side)
    options = {} if kind == "video" else {"weights": None}
    if kind == "segmentation":
        options["weights_backbone"] = None
    return lambda: models.get_model(name, **options), lambda model: _images(*shape)


def _transformers(name: str) -> tuple[Callable[[], nn.Module], _Inputs]:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(name)

    def inputs(model: nn.Module) -> Callable[[int], Any]:
        main = next(iter(inspect.signature(model.forward).parameters))
        text = getattr(config, "text_config", None) or config
        vision = getattr(config, "vision_config", None) or config
        decodes = bool(getattr(config, "is_encoder_decoder", False))

        def of(batch: int) -> Any:
            if main == "input_ids":
                ids = torch.randint(10, max(11, text.vocab_size), (batch, TOKENS))
                given = {"input_ids": ids}
            elif main == "pixel_values":
                side = vision.image_size
                sides = (side, side) if isinstance(side, int) else tuple(side)
                channels = getattr(vision, "num_channels", 3)
                given = {"pixel_values": torch.randn(batch, channels, *sides)}
            elif main == "input_values":
                given = {"input_values": torch.randn(batch, SAMPLES)}
            else:
                raise Unusable(f"its input is {main}")
            if decodes:
                given["decoder_input_ids"] = torch.randint(
                    10, max(11, text.vocab_size), (batch, TOKENS // 4)
                )
            return (), given

        return of

    return lambda: AutoModel.from_config(config), inputs
