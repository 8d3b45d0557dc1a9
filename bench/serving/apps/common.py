"""What every peer does: read its options, load the target, answer a batch."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

# The variable that names the file of the tuned model.
FILE = "GRAPHWRIGHT_BENCH_TUNED"
Target = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Options:
    """How a server is run.

    Attributes:
        target: FILE.py:NAME, what answers (input_ids, attention_mask).
        port: on 127.0.0.1.
        batch: the most requests of a batch.
        wait_s: for which a batch waits for more of them.
        threads: of PyTorch.
        device: "cpu" or "cuda".
    """

    target: str
    port: int
    batch: int
    wait_s: float
    threads: int
    device: str


def options() -> Options:
    """Those of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--wait-s", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", required=True)
    return Options(**vars(parser.parse_args()))


def imported(target: str, device: str, threads: int) -> Target:
    """The callable that a target names; a module moves to the device."""
    torch.set_num_threads(threads)
    file, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name)
    return found.to(device) if isinstance(found, torch.nn.Module) else found


def answers(target: Target, device: str, bodies: Sequence[bytes]) -> list[bytes]:
    """The answers to a batch of requests, padded to the longest of them."""
    texts = [np.frombuffer(body, np.int64) for body in bodies]
    ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
    mask = np.zeros_like(ids)
    for number, text in enumerate(texts):
        ids[number, : len(text)], mask[number, : len(text)] = text, 1
    named = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    with torch.inference_mode():
        found = target(**{name: value.to(device) for name, value in named.items()})
    return [row.tobytes() for row in found.float().cpu().numpy()]
