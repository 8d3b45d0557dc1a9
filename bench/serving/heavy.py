"""A model that takes as long as is wanted, with MiniLM's inputs: what replicas are measured with.

`python -m bench.serving.heavy REQUESTS JSON …` finds how often its layer is repeated for that.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import graphwright as gw

from ..common.record import write
from .apps.common import answers
from .traffic import LONGEST, WORDS, load

OUTPUTS, WARMUPS, CALLS = 64, 3, 10


class Heavy(nn.Module):
    """Token ids and their mask, (texts, tokens), to (texts, OUTPUTS).

    The layer is a contraction around a value of the text's own: however often it is repeated, each
    text has its own answer, and rounding does not add up.
    """

    def __init__(self, width: int, repeats: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS[1] + 1, 64)
        self.first = nn.Linear(64, width)
        self.layer = nn.Linear(width, width)
        self.repeats = repeats

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[..., None].to(torch.float32)
        given = self.first((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        state = given
        for _ in range(self.repeats):
            state = torch.tanh(self.layer(state) + given)
        return state[:, :OUTPUTS].contiguous()


def served(width: int, repeats: int, rows: int, device: str) -> gw.ModelConfig:
    """How the model is served, in batches of up to so many rows."""
    ids = torch.arange(1000, 1000 + LONGEST, device=device)[None]
    varying = {0: "batch", 1: "length"}
    sizes = [1 << n for n in range(rows.bit_length()) if 1 << n <= rows]
    return gw.ModelConfig(
        Heavy(width, repeats).eval().to(device),
        kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        dynamic_shapes={"input_ids": varying, "attention_mask": varying},
        buckets=gw.Buckets(batch=sizes, length=[LONGEST]),
        pad={"attention_mask": 0},
    )


def seconds_of(model: Heavy, rows: int, device: str) -> float:
    """The median of calls with so many rows."""
    ids = torch.full((rows, LONGEST), 1000, device=device)
    times = []
    with torch.inference_mode():
        for _ in range(WARMUPS + CALLS):
            began = time.perf_counter()
            model(ids, torch.ones_like(ids)).cpu()
            times.append(time.perf_counter() - began)
    return float(np.median(times[WARMUPS:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=Path)
    parser.add_argument("where", type=Path)
    parser.add_argument("--batch-s", type=float, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = Heavy(given.width, 10).eval().to(given.device)
    begin = seconds_of(model, given.rows, given.device)
    model.repeats = 60
    step = (seconds_of(model, given.rows, given.device) - begin) / 50
    model.repeats = max(1, math.ceil(given.batch_s / max(step, 1e-7)))
    found = answers(model, given.device, [ids.tobytes() for ids in load(given.requests)])
    np.save(given.answers, np.stack([np.frombuffer(one, np.float32) for one in found]))
    batch_s = seconds_of(model, given.rows, given.device)
    write(given.where, {"repeats": model.repeats, "batch_s": batch_s})


if __name__ == "__main__":
    main()
