"""Text encoders under a mask of ones, a ragged one, and none: what survives, and how fast it is.

    scripts/bench first-run --masks [--out DIR]

BERT, DistilBERT, MPNet and attention written by hand, at the size of MiniLM with random weights,
each tuned with three masks. The factor is the best candidate's beside eager.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphwright as gw
from graphwright.report.environment import environment

from ..common.record import SCHEMA, commit, write
from ..common.rendering import machine, marked

BATCH, LENGTH, WORDS, WIDTH, LAYERS = 4, 64, 5000, 384, 6
STRATEGIES = ("eager:no_grad", "fused", "torchscript", "torchscript:freeze", "onnxruntime")
# By how much the best factor may differ between masks: what two runs of one mask differ by.
NOISE = 1.1
_USUAL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "intermediate_size": 4 * WIDTH,
}


class Encoder(nn.Module):
    """Layers of attention written by hand, whose scores are masked by minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.products = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for product, norm in zip(self.products, self.norms, strict=True):
            q, k, v = product(x).unflatten(-1, (3, 12, -1)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT / 32**0.5
            if attention_mask is not None:
                scores = scores.masked_fill(attention_mask[:, None, None] == 0, -torch.inf)
            x = norm(x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_USUAL, vocab_size=WORDS))


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertModel

    sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 12, "hidden_dim": 4 * WIDTH}
    return DistilBertModel(DistilBertConfig(**sizes, vocab_size=WORDS))


def _mpnet() -> nn.Module:
    from transformers import MPNetConfig, MPNetModel

    return MPNetModel(MPNetConfig(**_USUAL, vocab_size=WORDS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BERT": _bert,
    "DistilBERT": _distilbert,
    "MPNet": _mpnet,
    "written by hand": Encoder,
}


def inputs() -> dict[str, dict[str, torch.Tensor]]:
    """The keyword arguments of a call, by its mask."""
    ids = torch.randint(5, WORDS, (BATCH, LENGTH))
    ones = torch.ones_like(ids)
    lengths = torch.tensor([LENGTH, LENGTH - 9, LENGTH // 2, LENGTH // 4])
    ragged = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {
        "ones": {"input_ids": ids, "attention_mask": ones},
        "ragged": {"input_ids": ids, "attention_mask": ragged},
        "none": {"input_ids": ids},
    }


def measured(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """What became of each candidate, by mask; and the factor of the fastest that is right."""
    torch.manual_seed(0)
    model, found = make().eval(), {}
    for mask, kwargs in inputs().items():
        tuned = gw.tune(
            model,
            kwargs=kwargs,
            strategies=list(STRATEGIES),
            remember=False,
            progress=False,
        )
        # Only what is right is timed. The fastest call: eager wavers most.
        timed = {each.strategy: each.measurement for each in tuned.report.rows if each.measurement}
        found[mask] = {
            "survive": sorted(timed),
            "chosen": tuned.report.chosen,
            "seconds": {name: each.fastest() for name, each in timed.items()},
        }
    return found


def to_markdown(result: dict[str, Any]) -> str:
    """What docs/results/search.md shows of it."""
    masks = ("ones", "ragged", "none")
    table = [["text encoder", *(f"mask: {mask}" for mask in masks), "strategies that are right"]]
    for name, found in result["models"].items():
        gains = []
        for mask in masks:
            seconds = found[mask]["seconds"]
            gains.append(f"{seconds['eager'] / min(seconds.values()):.2f}×")
        survive = [len(found[mask]["survive"]) for mask in masks]
        table.append([name, *gains, ", ".join(map(str, survive))])
    return "\n".join(
        [
            "### Masks of text encoders",
            "",
            "By how much the fastest of some strategies is faster than eager, under a mask of "
            "ones, a ragged one, and none; and how many strategies were right, eager included.",
            "",
            *marked(table),
            "",
            machine(result["environment"]),
            "",
        ]
    )


def benchmark(out: Path) -> int:
    """Measure all encoders and write; the number of targets that are missed."""
    device = torch.device("cpu")
    models = {name: measured(make) for name, make in MODELS.items()}
    targets = []
    for name, masks in models.items():
        alike = len({tuple(each["survive"]) for each in masks.values()}) == 1
        targets.append({"target": f"{name}: the same survive", "figure": alike, "met": alike})
        factors = [
            each["seconds"]["eager"] / min(each["seconds"].values()) for each in masks.values()
        ]
        spread = max(factors) / min(factors)
        targets.append(
            {
                "target": f"{name}: the best factors differ by",
                "figure": spread,
                "most": NOISE,
                "factors": dict(zip(masks, factors, strict=True)),
                "met": spread <= NOISE,
            }
        )
    result = {
        "schema": SCHEMA,
        "schema_version": 1,
        "benchmark": "masks",
        "commit": commit(),
        "environment": environment(device) | {"cores": str(os.cpu_count())},
        "models": models,
        "targets": targets,
    }
    where = out / "masks-cpu.json"
    write(where, result)
    for target in targets:
        print(json.dumps(target))
    print(f"wrote {where}")
    return sum(not target["met"] for target in targets)
