"""What the first answer of a process waits for on a GPU, begun while a file is read and checked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch


def begun(device: torch.device, *others: Callable[[], object]) -> Callable[[], None]:
    """Begin to start CUDA and its libraries in a thread, and then whatever else is given.

    Nearly all of it happens without Python's lock. Returns what waits for its end.
    """
    if device.type != "cuda":
        return lambda: None

    def start() -> None:
        for each in (lambda: _use_libraries(device), *others):
            # What fails here fails where it is wanted, and says why there.
            with contextlib.suppress(Exception):
                each()

    thread = threading.Thread(target=start, name="graphwright: start of CUDA")
    thread.start()
    return thread.join


def _use_libraries(device: torch.device) -> None:
    import os
    if os.environ.get("GW_START") == "none": return
    with torch.no_grad(), torch.cuda.device(device):
        some = torch.ones((1, 8, 8, 8), dtype=torch.float32, device=device)
        if os.environ.get("GW_START") != "init":
            torch.mm(some[0, 0], some[0, 0])
        if os.environ.get("GW_START") == "conv":
            torch.conv2d(some, some)
        torch.cuda.synchronize(device)
