"""A command by which anybody can ask a model that is served, with values like its sample's."""

from __future__ import annotations

import json
import math
import shlex
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .protocol import BYTES, TensorMetadata

# A longer request is made by Python, as it would fill the screen.
_LONGEST = 400
# Datatypes without a form in JSON.
_BINARY_ONLY = ("FP16", "BF16")


def curl(
    address: str,
    name: str,
    inputs: Sequence[TensorMetadata],
    outputs: Sequence[TensorMetadata],
    sample: Mapping[str, torch.Tensor],
    *,
    token: bool,
) -> str:
    """A line for a shell.

    Args:
        address: of the server, with its scheme.
        name: of the model.
        inputs: what clients send.
        outputs: what they get; if JSON cannot hold either, the line asks what the model takes.
        sample: inputs that the model is known to answer; the others are made up.
        token: whether one has to be sent, which is to be in $TOKEN.
    """
    words = ["curl", "-s"]
    words += ["-k"] if address.startswith("https") else []  # Its certificate is known to its owner.
    words += ["-H", '"Authorization: Bearer $TOKEN"'] if token else []
    url = f"{address}/v2/models/{urllib.parse.quote(name, safe='')}"
    if any(each.datatype in _BINARY_ONLY for each in (*inputs, *outputs)):
        return " ".join([*words, shlex.quote(url)])
    words.append(shlex.quote(f"{url}/infer"))
    found = [_request(each, sample.get(each.name)) for each in inputs]
    whole = json.dumps({"inputs": [{**head, "data": data} for head, data in found]})
    if len(whole) <= _LONGEST:
        return " ".join([*words, "-d", shlex.quote(whole)])
    tensors = []
    for head, data in found:
        most = json.dumps(max(data)) if isinstance(data[0], str) else repr(max(data))
        tensors.append(f'{json.dumps(head)[:-1]}, "data": [{most}] * {len(data)}}}')
    code = f'import json; print(json.dumps({{"inputs": [{", ".join(tensors)}]}}))'
    return f"python3 -c {shlex.quote(code)} | {' '.join([*words, '-d', '@-'])}"


def _request(
    wanted: TensorMetadata, sample: torch.Tensor | None
) -> tuple[dict[str, Any], list[Any]]:
    """An input of a request, and its data."""
    if sample is None:
        shape = [abs(size) for size in wanted.shape]
        values = {BYTES: "Hello", "BOOL": True, "FP32": 0.5, "FP64": 0.5}
        data: list[Any] = [values.get(wanted.datatype, 1)] * math.prod(shape)
    else:
        shape = [*sample.shape]
        data = [float(f"{v:.3g}") if isinstance(v, float) else v for v in sample.flatten().tolist()]
    return {"name": wanted.name, "shape": shape, "datatype": wanted.datatype}, data
