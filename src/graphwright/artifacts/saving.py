"""save(): write a tuned model to one file, with the evidence that it is right."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..calls.serialization import digest_of, packed, write_tensors
from ..calls.signature import switches
from ..errors import ArtifactError, StrategyFailed
from ..report.environment import environment
from ..strategies.base import Kept
from ..strategies.registry import is_ours
from . import container, evidence, padding_plans
from .tuned_module import Absent, TunedModule

# Members of the file.
REPORT, STRATEGY = "report.json", "strategy"
CONSTANTS, WEIGHTS = "constants.safetensors", "weights.safetensors"


def save(tuned: TunedModule, path: str | os.PathLike[str]) -> None:
    """Save what `tune` has found: the choice, its evidence, the weights, and what was built.

    `load` needs neither the model nor a new build for what `fused`, TorchScript, ONNX Runtime and
    AOTInductor have built. Everything else is built again from the model; for torch.compile its
    cache is saved. The file is written as a whole or not at all.

    Args:
        tuned: what `tune` returned, not a copy of it.
        path: of the file; an existing file is replaced, and its permissions are kept.

    Raises:
        ArtifactError: it cannot be saved; the text says why.
    """
    if not isinstance(tuned, TunedModule):
        raise ArtifactError(
            f"save() was given a {type(tuned).__name__}.", remedy="Pass what tune() returned."
        )
    origin, target = tuned._choice.origin, container.path_of(path)
    if origin is None:
        raise ArtifactError(
            "This copy was not tuned, so that there is nothing to save.",
            remedy="Save what tune() itself returned.",
        )
    change = None if tuned._choice.watch is None else tuned._choice.watch.changed()
    if change is None:
        name = origin.samples[0].reference.state.changed()
        change = None if name is None else f"{name} holds other values"
    if change is not None:
        raise ArtifactError(
            f"The model was changed after it was tuned: {change}.", remedy="Tune it again."
        )
    candidate = origin.candidate
    if not is_ours(candidate):
        raise ArtifactError(
            f"{candidate.name} is a strategy of your own, which load() would not know.",
            remedy="Tune with strategies of graphwright's.",
        )
    other = _other_layout(tuned._choice.module)
    if other is not None:
        raise ArtifactError(
            f"{other[0]} of the model is {other[1]}, which cannot be saved.",
            remedy="Tune a model whose weights are dense tensors.",
        )
    unsavable = getattr(candidate.compiler, "unsavable", None)
    if unsavable is not None:
        raise ArtifactError(
            f"{candidate.name} cannot be saved: {unsavable}.",
            remedy="Tune without it: strategies=[…] names those to try.",
        )
    if not os.path.isdir(target.parent):  # Path.is_dir raises for impossible paths.
        raise ArtifactError(f"There is no folder {target.parent}.", remedy="Make it first.")
    with tempfile.TemporaryDirectory(prefix="graphwright-") as made, torch.no_grad():
        folder = Path(made)
        loads, keeps = False, not needs_model(tuned)
        constants: dict[str, torch.Tensor] = {}
        seen: set[str] = set()
        try:
            for index, built in enumerate(origin.builts[:1] if origin.ranges else origin.builts):
                if built.save is not None and (keeps or candidate.loader is None):
                    place = folder / STRATEGY / str(index)
                    place.mkdir(parents=True)
                    kept = built.save(place) or Kept({})
                    constants |= {prefix_of(index) + name: t for name, t in kept.tensors.items()}
                    seen |= {prefix_of(index) + name for name in kept.seen}
                    loads = keeps
        except StrategyFailed as error:
            raise ArtifactError(
                f"{candidate.name} cannot be saved: {error.what}.", remedy=error.remedy
            ) from error
        device = origin.device
        evidence.write(folder, origin.samples, device)
        padded = tuned._choice.padded
        if padded is not None:
            padding_plans.write(folder, padded.plans(), origin.samples)
        if constants:
            write_tensors(folder / CONSTANTS, constants, once=True, seen=seen)
        weights = weights_of(tuned._choice.module)
        shared = _shared(weights, constants)
        own = {name: tensor for name, tensor in weights.items() if name not in shared}
        write_tensors(folder / WEIGHTS, own)
        (folder / REPORT).write_text(tuned.report.to_json(), encoding="utf-8")
        facts: dict[str, Any] = {
            "strategy": candidate.name,
            "loads": loads,
            "model": tuned.report.model,
            "model_there": not isinstance(tuned._choice.module, Absent),
            "pure": tuned._choice.pure,
            "quiet": tuned._choice.same_under_no_grad,
            "environment": environment(device),
            "switches": packed(switches(), {}, ""),
            "shared_weights": shared,
            "ranges": [dataclasses.astuple(each) for each in origin.ranges],
        }
        container.write(target, folder, facts)


def needs_model(tuned: TunedModule) -> bool:
    """Whether `load` has to build it again from the model."""
    origin = tuned._choice.origin
    assert origin is not None  # `save` has checked.
    # Without the model, calls would write to other tensors than the model's.
    stateful = any(sample.reference.written for sample in origin.samples)
    return stateful or origin.candidate.loader is None


def prefix_of(index: int) -> str:
    """The prefix of the names of a bucket's constants."""
    return f"{index}."


def _shared(
    weights: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """The weights that are constants too: the names of both."""
    known = {digest_of(tensor): name for name, tensor in constants.items()}
    digests = {name: digest_of(tensor) for name, tensor in weights.items()} if known else {}
    return {name: known[digest] for name, digest in digests.items() if digest in known}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Dense parameters and buffers by name, each once."""
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in found if tensor.layout is torch.strided}


def _other_layout(module: nn.Module) -> tuple[str, str] | None:
    """Name and layout of a weight that is no dense tensor; None if there is none."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is not torch.strided:
            return name, str(tensor.layout).removeprefix("torch.")
    return None
