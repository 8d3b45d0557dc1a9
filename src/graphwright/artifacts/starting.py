"""What the first answer of a process waits for on a GPU, begun while a file is read and checked.

CUDA's start is overlapped with the import of what defines a model's results: about half a second of
a BERT's first answer on an H200, and nothing of a ResNet's, in three noisy rounds.
To load cuBLAS and cuDNN here too showed no gain beyond it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch


def begun(device: torch.device, *others: Callable[[], object]) -> Callable[[], None]:
    """Start CUDA in a thread, and then whatever else is given; returns what waits for its end."""
    if device.type != "cuda":
        return lambda: None

    def start() -> None:
        for each in (lambda: torch.zeros(1, device=device), *others):
            # What fails here fails where it is wanted, and says why there.
            with contextlib.suppress(Exception):
                each()

    thread = threading.Thread(target=start, name="graphwright: start of CUDA")
    thread.start()
    return thread.join
