"""MiniLM as PyTorch runs it: what the servers serve in the mode "eager".

`model` takes input_ids and attention_mask, (texts, tokens), and gives unit-length embeddings.
"""

from __future__ import annotations

from minilm import load  # examples/ is on the path: see bench/__init__.py
from minilm_buckets import Embedder  # as above

model = Embedder(load()[0]).eval()
