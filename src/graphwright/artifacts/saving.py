"""save(): write a tuned model to one file, with the evidence that it is right."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..calls.dependencies import Called
from ..calls.options import names_checked
from ..calls.serialization import digest_of, packed, write_tensors
from ..errors import ArtifactError, StrategyFailed, levels_above
from ..report.environment import environment
from ..report.report import Report
from ..shapes.dimensions import parameters_of
from ..strategies.base import SavedTensors
from . import container, evidence, object_calls, padding_plans
from .substitute import substitutes, unsavable
from .tuned_module import Origin, TunedModule, choice_of, of_tensors
from .untuned_calls import Absent, model_sees_order

# Members of the file.
REPORT, STRATEGY = "report.json", "strategy"
CONSTANTS, WEIGHTS = "constants.safetensors", "weights.safetensors"


@dataclass(frozen=True)
class Saved:
    """What was written to a file.

    Attributes:
        strategy: the candidate that it holds.
        needs_model: whether `load` has to build it again from the model.
        note: if it is not the choice, both with their times, and why; else empty.
    """

    strategy: str
    needs_model: bool
    note: str = ""


@names_checked
def save(tuned: TunedModule, path: str | os.PathLike[str]) -> str:
    """Save what `tune` has found, as `graphwright.save` says.

    Args:
        tuned: what `tune` returned, not a copy of it.
        path: of the file; an existing file is replaced, and its permissions are kept.

    Returns:
        the name of the strategy that the file holds.

    Raises:
        ArtifactError: nothing can be saved; the text says why.
    """
    saved = save_best(tuned, path)
    if saved.note:
        warnings.warn(saved.note, RuntimeWarning, stacklevel=levels_above())
    return saved.strategy


def save_best(tuned: TunedModule, path: str | os.PathLike[str]) -> Saved:
    """Save the choice, or in its place the best candidate that can be saved.

    Raises:
        ArtifactError: nothing can be saved; the text says why.
    """
    origin, target = _checked(tuned, path), container.path_of(path)
    try:
        return _write(tuned, origin, tuned.report, target)
    except StrategyFailed as error:
        problem = error
    failures: list[str] = []
    for found in substitutes(of_tensors(tuned), origin, failures):
        note = found.note(tuned.report, problem.what, failures)
        try:
            saved = _write(tuned, found.origin, found.report(tuned.report, note), target)
        except StrategyFailed as error:
            failures.append(f"{found.row.strategy} cannot be saved: {error.what}")
        else:
            return replace(saved, note=note)
    raise _not_saved(origin, problem, failures) from problem


def save_choice(tuned: TunedModule, path: str | os.PathLike[str]) -> None:
    """Save the choice, and nothing in its place.

    Raises:
        ArtifactError: it cannot be saved; the text says why.
    """
    origin = _checked(tuned, path)
    try:
        _write(tuned, origin, tuned.report, container.path_of(path))
    except StrategyFailed as error:
        raise _not_saved(origin, error) from error


def _not_saved(
    origin: Origin, error: StrategyFailed, failures: Sequence[str] = ()
) -> ArtifactError:
    others = "".join(f"; {each.rstrip('.')}" for each in failures)
    return ArtifactError(
        f"{origin.candidate.name} cannot be saved: {error.what.rstrip('.')}{others}.",
        remedy=error.remedy,
    )


def _checked(tuned: TunedModule, path: str | os.PathLike[str]) -> Origin:
    """What a tuned module was made of, if it may be saved to a path.

    Raises:
        ArtifactError: it may not; the text says why.
    """
    if not isinstance(tuned, TunedModule):
        raise ArtifactError(
            f"save() was given a {type(tuned).__name__}.", remedy="Pass what tune() returned."
        )
    choice = choice_of(of_tensors(tuned))
    origin = choice.origin
    if origin is None:
        raise ArtifactError(
            "This copy was not tuned, so that there is nothing to save.",
            remedy="Save what tune() itself returned.",
        )
    change = None if choice.watch is None else choice.watch.changed()
    if change is None:
        name = origin.samples[0].reference.state.changed()
        change = None if name is None else f"{name} holds other values"
    if change is not None:
        raise ArtifactError(
            f"The model was changed after it was tuned: {change}.", remedy="Tune it again."
        )
    other = _other_layout(choice.module)
    if other is not None:
        raise ArtifactError(
            f"{other[0]} of the model is {other[1]}, which cannot be saved.",
            remedy="Tune a model whose weights are dense tensors.",
        )
    folder = container.path_of(path).parent
    if not os.path.isdir(folder):  # Path.is_dir raises for impossible paths.
        raise ArtifactError(f"There is no folder {folder}.", remedy="Make it first.")
    return origin


def _write(tuned: TunedModule, origin: Origin, report: Report, target: Path) -> Saved:
    """Write a candidate to a file.

    Args:
        tuned: the tuned module.
        origin: the candidate, and what was built of it.
        report: that has it as the choice.
        target: the file.

    Raises:
        StrategyFailed: this candidate cannot be saved.
        ArtifactError: no candidate can be.
    """
    whole, choice = choice_of(tuned), choice_of(of_tensors(tuned))
    candidate, device, apart, padded = origin.candidate, origin.device, whole.apart, choice.padded
    why = unsavable(candidate)
    if why is not None:
        raise StrategyFailed(
            why, remedy=f"Tune without it: exclude=[{candidate.name!r}], or --exclude."
        )
    with tempfile.TemporaryDirectory(prefix="graphwright-") as made, torch.no_grad():
        folder, keeps = Path(made), not _needs_model(origin)
        constants, wrote = _write_built(origin, folder, keeps=keeps)
        evidence.write(folder, origin.samples, device)
        if apart is not None:
            object_calls.write(folder, apart)
        if padded is not None:
            padding_plans.write(folder, padded.plans(), origin.samples)
        weights = weights_of(choice.module)
        shared = _shared(weights, constants)
        own = {name: tensor for name, tensor in weights.items() if name not in shared}
        write_tensors(folder / WEIGHTS, own)
        (folder / REPORT).write_text(report.to_json(), encoding="utf-8")
        facts: dict[str, Any] = {
            "strategy": candidate.name,
            "loads": keeps and wrote,
            "model": report.model,
            "model_there": not isinstance(choice.module, Absent),
            "argument_names": argument_names_of(whole.module),
            "sees_order": model_sees_order(whole.module),
            "pure": choice.pure,
            "quiet": choice.same_under_no_grad,
            "environment": environment(device),
            "switches": packed(dict(origin.switches), {}, ""),
            "shared_weights": shared,
            "ranges": [dataclasses.astuple(each) for each in origin.ranges],
        }
        container.write(target, folder, facts)
    return Saved(candidate.name, not keeps)


def _write_built(
    origin: Origin, folder: Path, *, keeps: bool
) -> tuple[dict[str, torch.Tensor], bool]:
    """Write what was built for each bucket: its constants, and whether any wrote something.

    Args:
        origin: what was built.
        folder: where to.
        keeps: whether `load` can use it; else it is a cache for building it again, if at all.
    """
    constants: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    wrote = False
    for index, built in enumerate(origin.builts[:1] if origin.ranges else origin.builts):
        if built.save is not None and (keeps or origin.candidate.loader is None):
            place = folder / STRATEGY / str(index)
            place.mkdir(parents=True)
            kept = built.save(place) or SavedTensors({})
            constants |= {prefix_of(index) + name: t for name, t in kept.tensors.items()}
            seen |= {prefix_of(index) + name for name in kept.seen}
            wrote = True
    if constants:
        write_tensors(folder / CONSTANTS, constants, once=True, seen=seen)
    return constants, wrote


def argument_names_of(module: nn.Module) -> list[str]:
    """The names of the parameters of what was tuned; they may be fewer than it takes."""
    if isinstance(module, Absent):
        return list(module.argument_names)
    names, _ = parameters_of(module.function_of() if isinstance(module, Called) else module)
    return names


def _needs_model(origin: Origin) -> bool:
    """Whether `load` has to build it again from the model."""
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
