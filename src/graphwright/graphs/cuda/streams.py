"""Streams for captures, with the memory that the libraries keep for each of them."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...calls.modes import OperationMode
from . import driver


class CaptureStream:
    """A stream of our own and the memory of the libraries' workspaces on it.

    cuBLAS keeps a workspace for each stream, and a graph its address. It lies in a memory pool from
    which nothing else is ever allocated: when somebody clears the workspaces, as Inductor's graph
    trees do, nothing else comes to lie where our graphs write.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = driver.new_stream(device)
        self.memory = torch.cuda.MemPool()

    def prepare(self) -> None:
        """Let cuBLAS and cuBLASLt have their workspace for this stream here, for this thread."""
        device = self.stream.device
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.memory, device):
            x = torch.ones(16, 16, device=device)
            torch.mm(x, x)
            torch.addmm(x[0], x, x)


class PreparedThreads(OperationMode):
    """Inside of its block no thread works on a bench that was not prepared for it.

    There is a workspace for each thread too, and autograd runs a backward on one of its own.
    """

    def __init__(self, bench: CaptureStream) -> None:
        super().__init__()
        self._bench = bench
        self._threads = {threading.get_ident()}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare the thread, where it is a new one."""
        if threading.get_ident() not in self._threads:
            self._threads.add(threading.get_ident())
            self._bench.prepare()
        return func(*args, **kwargs)
