"""What an artifact is verified with: sample inputs, and their results in eager and float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from ..calls.serialization import packed, read_tensors, unpacked, write_tensors
from ..calls.snapshots import Call, CallOutcome, ModuleState
from ..calls.written_trees import tree_of, tree_text
from ..errors import ArtifactError
from ..evaluation.accuracy import ErrorMeasure
from ..evaluation.reference import Case, Reference, Sample

FILES = _FILE, _TENSORS = "evidence.json", "evidence.safetensors"
# Cases stored of each sample: its own values, and others, which show results that are stale.
_CASES = 2


def write(folder: Path, samples: Sequence[Sample], device: torch.device) -> None:
    """Write samples with their references.

    Raises:
        ArtifactError: they hold something that cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    found = []
    for index, sample in enumerate(samples):
        ref, prefix = sample.reference, str(index)
        cases = []
        for case in ref.cases[:_CASES]:
            call, eager = case.call, case.eager
            given = {"args": tuple(call.args), "kwargs": dict(call.kwargs)}
            came: dict[str, Any] = {
                "outputs": eager.outputs,
                "inputs": eager.inputs,
                "buffers": eager.buffers,
            }
            came |= {"exact": case.exact, "written": sorted(eager.written)}
            cases.append(
                {
                    "name": call.name,
                    **{n: packed(tree, tensors, prefix) for n, tree in given.items()},
                    **{n: packed(t, tensors, prefix, shared=True) for n, t in came.items()},
                }
            )
        found.append(
            {
                "name": sample.name,
                "weight": sample.weight,
                "cases": cases,
                "spec": tree_text(ref.cases[0].eager.spec),
                "eager_error": {n: [e.rms, e.max] for n, e in ref.eager_error.items()},
                "aliases": sorted(ref.aliases),
                "tolerance": None if ref.tolerance is None else float(ref.tolerance),
                "tf32": ref.tf32,
            }
        )
    text = json.dumps({"device": device.type, "samples": found})
    (folder / _FILE).write_text(text, encoding="ascii")
    write_tensors(folder / _TENSORS, tensors)


def read(
    folder: Path,
    module: nn.Module,
    device: Callable[[], torch.device],
    *,
    imports: bool,
    objects: Collection[str] | None,
) -> list[Sample]:
    """Read the samples that `write` has written, with their tensors on a device.

    Args:
        folder: that was written to.
        module: the module to verify, or a stand-in for it.
        device: returns the device; called once everything is imported.
        imports: whether modules that define the results' classes may be imported.
        objects: packages whose classes may be built among the results.

    Raises:
        ArtifactError: the files make no sense.
    """
    try:
        known = json.loads((folder / _FILE).read_bytes())
        texts = [each["spec"] for each in known["samples"]]
        specs = [tree_of(text, imports=imports, objects=objects) for text in texts]
        tensors = read_tensors(folder / _TENSORS, device())
        pairs, state = zip(known["samples"], specs, strict=True), ModuleState(module)
        samples = [_sample(each, spec, tensors, state) for each, spec in pairs]
        if not samples:
            raise ValueError("there are no samples")
        return samples
    except ArtifactError:
        raise
    except Exception as error:  # A damaged file may raise anything.
        raise ArtifactError(f"The evidence makes no sense: {error!r:.200}.") from error


def device_type(folder: Path) -> str:
    """The type of the device that the samples were on."""
    try:
        return str(json.loads((folder / _FILE).read_bytes())["device"])
    except Exception as error:
        raise ArtifactError(f"The evidence makes no sense: {error!r:.200}.") from error


def _sample(
    known: Any, spec: TreeSpec, tensors: dict[str, torch.Tensor], state: ModuleState
) -> Sample:
    cases = []
    for case in known["cases"]:
        parts = {n: unpacked(v, tensors) for n, v in case.items() if n != "name"}
        if not isinstance(parts["args"], tuple) or not isinstance(parts["kwargs"], dict):
            raise ValueError("the arguments are none")
        call = Call(str(case["name"]), parts["args"], parts["kwargs"])
        written = frozenset(map(str, parts["written"]))
        outcome = CallOutcome(spec, parts["outputs"], parts["inputs"], parts["buffers"], written)
        cases.append(Case(call, outcome, parts["exact"]))
    errors = {n: ErrorMeasure(float(r), float(m)) for n, (r, m) in known["eager_error"].items()}
    aliases = frozenset((str(a), str(b)) for a, b in known["aliases"])
    tolerance, tf32 = known["tolerance"], bool(known["tf32"])
    if tolerance is not None and not (type(tolerance) is float and math.isfinite(tolerance)):
        raise ValueError(f"the tolerance is {tolerance!r}")
    ref = Reference(cases, state, errors, aliases, tolerance, tf32)
    return Sample(str(known["name"]), float(known["weight"]), cases[0].call, ref)
