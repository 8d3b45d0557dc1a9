"""Requests that are drawn by a seed, and how they and their answers go over the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MODEL = "minilm"
# Tokens of a request: most are short, few are long.
SHORTEST, LONGEST, MEDIAN, SPREAD = 8, 128, 24, 0.7
# Token ids of BERT's vocabulary: what begins a text, what ends it, and the first and last word.
BEGIN, END, WORDS = 101, 102, (1996, 29612)
LENGTH_HEADER = "Inference-Header-Content-Length"


def drawn(count: int, seed: int) -> list[np.ndarray]:
    """So many requests: token ids, int64, of lengths that are distributed log-normally."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(MEDIAN), SPREAD, count)).round().astype(int)
    requests = [draw.integers(*WORDS, size) for size in lengths.clip(SHORTEST, LONGEST)]
    for ids in requests:
        ids[0], ids[-1] = BEGIN, END
    return requests


def save(where: Path, requests: list[np.ndarray]) -> None:
    """Keep requests, one after another."""
    np.savez(where, ids=np.concatenate(requests), lengths=[len(ids) for ids in requests])


def load(where: Path) -> list[np.ndarray]:
    """What `save` has kept."""
    with np.load(where) as kept:
        return np.split(kept["ids"], np.cumsum(kept["lengths"])[:-1])


@dataclass(frozen=True)
class Wire:
    """How requests and answers are written.

    Attributes:
        path: to which requests are posted.
        encode: a request as a body and its headers.
        decode: an answer out of a body and its headers, whose names are in small letters.
    """

    path: str
    encode: Callable[[np.ndarray], tuple[bytes, dict[str, str]]]
    decode: Callable[[bytes, Mapping[str, str]], np.ndarray]


def _raw(ids: np.ndarray) -> tuple[bytes, dict[str, str]]:
    return ids.tobytes(), {"Content-Type": "application/octet-stream"}


def _of_raw(body: bytes, headers: Mapping[str, str]) -> np.ndarray:
    return np.frombuffer(body, np.float32)


def _v2(ids: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """A request of the Open Inference Protocol with binary tensors."""
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    described = [
        {
            "name": name,
            "shape": [1, len(values)],
            "datatype": "INT64",
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in inputs.items()
    ]
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = b"".join([header, *(values.tobytes() for values in inputs.values())])
    return body, {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(header))}


def _of_v2(body: bytes, headers: Mapping[str, str]) -> np.ndarray:
    return np.frombuffer(body[int(headers[LENGTH_HEADER.lower()]) :], np.float32)


WIRES = {
    "raw": Wire("/infer", _raw, _of_raw),
    "v2": Wire(f"/v2/models/{MODEL}/infer", _v2, _of_v2),
}


def message(wire: Wire, ids: np.ndarray) -> bytes:
    """A request with all that HTTP wants."""
    body, headers = wire.encode(ids)
    headers |= {"Host": "127.0.0.1", "Content-Length": str(len(body))}
    lines = [f"POST {wire.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
