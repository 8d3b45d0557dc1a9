"""The ten reference models, and ten that no benchmark has used, chosen by a seed."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import cases
from ..calls.run import unet
from ..common.peers import Case
from ..common.record import RESULTS
from ..unseen.models import built, names
from ..unseen.run import on
from .table import COMPARED, MODELS

SEED = 32
# How many new models of each library.
NEW = {"timm": 4, "torchvision": 2, "transformers": 4}


@dataclass(frozen=True)
class Place:
    """One of the twenty: a reference model, or the next of a library that can take part."""

    number: int
    names: tuple[str, ...]

    @property
    def reference(self) -> bool:
        """Whether it is one of the ten reference models."""
        return self.number < len(cases.MODELS)

    @property
    def compared(self) -> bool:
        """Whether other searches run beside the default one, as the seed has it."""
        return self.number in random.Random(SEED).sample(range(MODELS), COMPARED)

    @property
    def searches(self) -> tuple[str, ...]:
        """The names of the searches that run here, the default one first."""
        other = ("throughput",) if self.reference else ()
        return ("default", *other, *(("30 s", "exhaustive") if self.compared else ()))


def places() -> Iterator[Place]:
    """The twenty, the reference models first."""
    for number, name in enumerate(cases.MODELS):
        yield Place(number, (name,))
    number = len(cases.MODELS)
    for library, count in NEW.items():
        order = tuple(f"{library}/{name}" for name in _new(library))
        for _ in range(count):
            yield Place(number, order)
            number += 1


def _new(library: str) -> list[str]:
    """A library's models that no result of the benchmark of unseen models names, shuffled.

    None where the library is not installed.
    """
    if importlib.util.find_spec(library) is None:
        return []
    used = {
        name
        for file in RESULTS.glob("unseen*.json")
        for name in json.loads(file.read_text(encoding="utf-8"))["models"]
    }
    order = sorted(name for name in names(library) if f"{library}/{name}" not in used)
    random.Random(SEED).shuffle(order)
    return order


def case_of(name: str, device: torch.device) -> Case:
    """A model by its name, with one input; new ones in half precision on a GPU.

    The one of diffusers is Stable Diffusion 1.5's UNet.

    Raises:
        Unusable: it is too large, or its inputs are of no kind that is known.
    """
    library, _, rest = name.partition("/")
    if not rest:
        return Case.of(name, device)
    if library == "diffusers":
        plain, sample = unet(device)
        model, (args, kwargs) = plain.eval().to(device), on(device, (sample, {}))
    else:
        model, inputs = built(library, rest, device)
        args, kwargs = on(device, inputs(1))
    return Case.made(model.half() if device.type == "cuda" else model, args, kwargs, device)
