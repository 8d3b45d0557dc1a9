"""Capture streams, with the workspaces that libraries keep for each stream."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...calls.modes import OperationMode
from . import driver


class CaptureStream:
    """A stream that only captures use, and the memory of the libraries' workspaces for it.

    cuBLAS keeps a workspace for each stream, and a graph keeps its address. The workspace lies in a
    memory pool from which nothing else is allocated: when somebody clears the workspaces, as
    Inductor's graph trees do, nothing else is put where our graphs write.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = driver.new_stream(device)
        self.memory = torch.cuda.MemPool()

    def prepare(self) -> None:
        """Have cuBLAS and cuBLASLt allocate this thread's workspaces for the stream."""
        device = self.stream.device
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.memory, device):
            x = torch.ones(16, 16, device=device)
            torch.mm(x, x)
            torch.addmm(x[0], x, x)


class PreparedThreads(OperationMode):
    """Prepares the capture stream for each thread that runs operations inside its block.

    Workspaces are kept for each thread too, and autograd runs a backward on its own thread.
    """

    def __init__(self, capture_stream: CaptureStream) -> None:
        super().__init__()
        self._capture_stream = capture_stream
        self._threads = {threading.get_ident()}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, after preparing the stream for a thread that is new."""
        if threading.get_ident() not in self._threads:
            self._threads.add(threading.get_ident())
            self._capture_stream.prepare()
        return func(*args, **kwargs)
