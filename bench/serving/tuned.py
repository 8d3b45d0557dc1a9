"""MiniLM as tune() made it: what the servers serve in the mode "tuned".

`python -m bench.serving.tuned FILE.gw JSON --device D --threads N` makes the file. Where the
variable FILE names it, it is loaded: `model` for the peers, `served` for graphwright.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import graphwright as gw
from bench.common.record import write
from bench.serving import eager
from bench.serving.apps.common import FILE

# On a GPU a graph for each size, of which small ones take as long as each other. On a CPU one
# package answers all sizes in between, as they are.
ROWS = {"cpu": (1, 8, 32), "cuda": (1, 4, 16, 32)}
TOKENS = {"cpu": (8, 32, 128), "cuda": (32, 64, 128)}
STRATEGIES = {"cpu": ["aot_inductor:freeze"], "cuda": ["fused+graph"]}


def loaded() -> gw.TunedModule:
    """The model of the file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return gw.load(os.environ[FILE], eager.model.to(device), trust=True)


def served() -> gw.ModelConfig:
    """As it was tuned."""
    return gw.ModelConfig(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("where", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = eager.served()
    began = time.perf_counter()
    tuned = gw.tune(
        eager.model.to(given.device),
        kwargs={name: value.to(given.device) for name, value in config.kwargs.items()},
        buckets=gw.Buckets(batch=ROWS[given.device], length=TOKENS[given.device]),
        dynamic_shapes=config.dynamic_shapes,
        pad=config.pad,
        strategies=STRATEGIES[given.device],
        remember=False,
        progress=False,
    )
    gw.save(tuned, given.file)
    seconds = time.perf_counter() - began
    write(given.where, {"chosen": tuned.report.chosen, "seconds": seconds})


if FILE in os.environ:
    model = loaded()

if __name__ == "__main__":
    main()
