"""Ask the server of serve_minilm.py which of the sentences is nearest to a text.

    python examples/ask_minilm.py "What is a CUDA graph?" [ADDRESS]

Any client of the Open Inference Protocol does; this one needs Python alone.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

SENTENCES = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()


def embeddings(texts: list[str], address: str) -> list[list[float]]:
    """One embedding a text."""
    body = {"inputs": [{"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}]}
    request = urllib.request.Request(
        f"{address}/v2/models/minilm/infer",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        output = json.load(answer)["outputs"][0]
    rows, width = output["shape"]
    return [output["data"][n * width : (n + 1) * width] for n in range(rows)]


def main(text: str, address: str = "http://127.0.0.1:8000") -> str:
    """The sentence that is nearest in meaning."""
    asked, *others = embeddings([text, *SENTENCES[:31]], address)
    likeness = [sum(a * b for a, b in zip(asked, other, strict=True)) for other in others]
    nearest = SENTENCES[likeness.index(max(likeness))]
    print(f"{max(likeness):.2f}  {nearest}")
    return nearest


if __name__ == "__main__":
    main(*sys.argv[1:])
