"""graphwright's own fusion passes as a strategy: fewer kernels without a compiler."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from ..calls.objects import flatten_result
from ..calls.serialization import TreeTemplate
from ..calls.snapshots import ModuleState, clone_leaves
from ..calls.split import Args, Kwargs, flatten, tensors_of, unflatten
from ..errors import StrategyFailed
from ..evaluation.accuracy import ROUNDING, error_of
from ..fusion.pass_manager import PASSES, Fused, fused_call
from ..fusion.tracing import GraphCall
from ..ops.fused import launch_cache
from ..ops.fused.fused_operator import prepare_triton
from ..ops.fused.launch_cache import Launch
from .base import AVAILABLE, Availability, Built, SavedTensors, tiny_model

_GRAPH, _KERNELS = "graph.json", "kernels.json"


@dataclass(frozen=True)
class FusedCompiler:
    """What `graphwright.fuse` does, for one kind of call."""

    name: str = "fused"
    complexity: int = 9
    holds_code: ClassVar[bool] = False
    # Which of cuDNN's and cuBLAS's kernels may be taken was asked of those of that machine.
    bound_to: ClassVar[tuple[str, ...]] = ("graphwright", "torch", "gpu", "cudnn")
    portable: ClassVar[bool] = True
    code: ClassVar[tuple[str, ...]] = (_KERNELS,)

    def probe(self, device: torch.device) -> Availability:
        """Fuse a tiny model."""
        model, x = tiny_model(device)
        self.build(model, (x,), {}).call(x)
        return AVAILABLE

    def build(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Built:
        """Fuse, with passes timed on a GPU; verified here only if the whole is off from eager.

        The tuner verifies what comes of it in any case.
        """
        fused = fused_call(model, args, kwargs, PASSES, check=False)
        with launch_cache.noting() as kept:
            near = fused.call is None or _near(fused, model, args, kwargs)
        if not near:
            fused = fused_call(model, args, kwargs, PASSES, check=True)
        elif isinstance(fused.call, GraphCall):
            # What is saved is what the tuner verifies.
            fused.call.launches = kept
        if fused.call is None:
            raise StrategyFailed(f"no part of the model is a graph: {fused.untraced[0][1]}")
        before, after = (sum(region.operations[n] for region in fused.regions) for n in (0, 1))
        notes = [f"{before} operations became {after}"] if after < before else []
        notes += [
            f"{path or 'the model'} is no graph as a whole: {why}"
            for path, why in fused.untraced[:1]
        ]
        for region in fused.regions:
            notes += [f"pass {name} was left out: {why}" for name, why in region.left_out]
        save = functools.partial(_save, fused.call) if isinstance(fused.call, GraphCall) else None
        return Built(
            fused.call,
            notes,
            holds_weights=True,
            plain=True,
            save=save,
            packed=fused.packed,
            self_contained=save is not None,  # Else some modules run as they are.
        )

    def doubtful(self, folder: Path) -> str | None:
        """What a saved graph has that is not known to be harmless, in words; None where all is."""
        from ..fusion.serialization import unlisted

        found = unlisted(json.loads((folder / _GRAPH).read_bytes())["nodes"])
        if not found:
            return None
        return f"operations that may not check what they are given: {', '.join(found)}"

    def prepare(self) -> None:
        """Begin what the first kernel in a process waits for, if it was not saved."""
        prepare_triton()

    def load(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], args: Args, kwargs: Kwargs
    ) -> Built:
        """The graph that was saved, with its constants.

        Raises:
            ArtifactError: it cannot be made again here.
            StrategyFailed: likewise.
        """
        from ..fusion.serialization import read

        known = json.loads((folder / _GRAPH).read_bytes())
        device = tensors_of((args, kwargs))[0].device
        graph = read(known["nodes"], tensors, device)
        slots = [int(n) for n in known["slots"]]
        call = GraphCall(graph, slots, TreeTemplate.read(known["out"]), _kernels(folder, device))
        save = functools.partial(_save, call)
        return Built(
            call,
            holds_weights=True,
            plain=True,
            save=save,
            packed=call.packed,
            self_contained=True,
        )


def _kernels(folder: Path, device: torch.device) -> dict[str, Launch]:
    """The kernels that were saved, where they are there and this GPU takes them all."""
    file = folder / _KERNELS
    kept = launch_cache.read(file.read_text("ascii")) if file.exists() else {}
    return kept if all(each.function(device) for each in kept.values()) else {}


def _save(call: GraphCall, folder: Path) -> SavedTensors:
    """Write a fused call as operations; its constants."""
    from ..fusion.serialization import seen, stored

    nodes, constants = stored(call.graph)
    known = {"nodes": nodes, "slots": [*call.slots], "out": call.out.written()}
    (folder / _GRAPH).write_text(json.dumps(known), encoding="ascii")
    if call.launches:
        (folder / _KERNELS).write_text(launch_cache.written(call.launches), encoding="ascii")
    return SavedTensors(constants, seen(call.graph))


def _near(fused: Fused, model: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether the sample's results are eager's, as far as other kernels may differ."""
    state = ModuleState(model, weights=False)
    results = []
    try:
        for call in (model, fused.call):
            leaves, spec = flatten(args, kwargs)
            mine, named = unflatten(clone_leaves(leaves), spec)
            assert call is not None
            with torch.no_grad():
                results.append(flatten_result(call(*mine, **named))[0])
            state.restore()
    except Exception:
        return False
    for eager, other in zip(*results, strict=False):
        if isinstance(eager, torch.Tensor) and isinstance(other, torch.Tensor):
            error, _ = error_of(other, eager, eager)
            # Each is off in its own way, by as much as the layers make of their rounding.
            if not error.rms <= 4 * ROUNDING.get(eager.dtype, 0.0):
                return False
    return len(results[0]) == len(results[1])


FUSED = FusedCompiler()
