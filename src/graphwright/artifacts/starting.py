"""What the first answer of a process waits for, begun while a file is read and checked.

CUDA's start is overlapped with the import of what defines a model's results: about half a second of
a BERT's first answer on an H200, and nothing of a ResNet's, in three noisy rounds.
To load cuBLAS and cuDNN here too showed no gain beyond it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable

import torch

from ..graphs.driver import primary_context


def begun(device: torch.device, *others: Callable[[], object]) -> Callable[[], None]:
    """Start CUDA in a thread, and then whatever else is given; returns what waits for its end.

    What the others issue to the device is done by then, whichever stream it is wanted on.
    """

    def start() -> None:
        works = [*others]
        if device.type == "cuda":
            works[:0] = [
                functools.partial(primary_context, device),
                lambda: torch.zeros(1, device=device),
            ]
            works.append(lambda: torch.cuda.current_stream(device).synchronize())
        for each in works:
            # What fails here fails where it is wanted, and says why there.
            with contextlib.suppress(Exception):
                each()

    thread = threading.Thread(target=start, name="graphwright: start of a device")
    thread.start()
    return thread.join
