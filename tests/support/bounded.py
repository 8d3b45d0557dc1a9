"""Programs that are planted with one bound each, for profile() to name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the field's name for it

from graphwright.profiler.verdict import Cause


@dataclass(frozen=True)
class Planted:
    """A program with the one cause that bounds it.

    Attributes:
        make: returns the function and its arguments.
        cause: what bounds it.
        line: a piece of the line that is to blame; empty where no line is.
        threads: PyTorch's threads to run it with; 0 for those that are set.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    cause: Cause
    line: str = ""
    threads: int = 0


def many_small(x: torch.Tensor) -> torch.Tensor:
    for _ in range(300):
        x = x + 1.0  # many small operations
    return x


def much_python(x: torch.Tensor) -> torch.Tensor:
    total = 0
    for number in range(30_000):
        total += number * number % 7  # slow Python
    return x * float(total % 3)


def words(x: torch.Tensor) -> torch.Tensor:
    text = ["graph", "launch", "kernel"] * 400
    counted: dict[str, int] = {}
    for _ in range(20):
        for word in text:
            counted[word] = counted.get(word, 0) + len(word)  # words are counted
    return x + float(counted["graph"])


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x, y, out=x)  # large tensors


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y  # large products


def medium(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x = torch.mul(x, 1.0001)
    return x


CPU = {
    "small operations": Planted(
        lambda: (many_small, (torch.ones(16),)), Cause.DISPATCH, "small operations"
    ),
    "numbers in Python": Planted(
        lambda: (much_python, (torch.ones(16),)), Cause.PYTHON, "slow Python"
    ),
    "words in Python": Planted(
        lambda: (words, (torch.ones(16),)), Cause.PYTHON, "words are counted"
    ),
    "a large sum": Planted(
        lambda: (add, (torch.ones(1 << 24), torch.ones(1 << 24))), Cause.MEMORY, "large tensors"
    ),
    "a large product": Planted(
        lambda: (product, (torch.ones(800, 800), torch.ones(800, 800))),
        Cause.ARITHMETIC,
        "large products",
    ),
    "a convolution": Planted(
        lambda: (nn.Conv2d(64, 64, 3, padding=1), (torch.ones(2, 64, 56, 56),)), Cause.ARITHMETIC
    ),
    "too many threads": Planted(
        lambda: (medium, (torch.ones(1 << 16),)), Cause.TOO_MANY_THREADS, threads=16
    ),
    "too few threads": Planted(
        lambda: (product, (torch.ones(800, 800), torch.ones(800, 800))),
        Cause.TOO_FEW_THREADS,
        threads=1,
    ),
}


def small_products(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for _ in range(200):
        x = torch.addmm(b, x, w)  # many small products
    return x


def reads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        x = x @ w
        if x[0, 0].item() > 1e30:  # a read
            break
    return x


def searches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        x = x @ w
        found = torch.nonzero(x[0])  # a search
        x = x + float(found.shape[0] < 0)
    return x


def loads(x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    return x.to(there.device) + there  # a copy to the device


def stores(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).cpu()  # a copy to the host


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])  # large norms


def on_gpu(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return tuple(
        torch.randn(shape, device="cuda", dtype=dtype) / shape[-1] ** 0.5 for shape in shapes
    )


def replayed(work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], None]:
    """A function that replays a graph of the user's own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        kept.append(work(x))

    def replay() -> None:
        graph.replay()
        assert kept

    return replay


def squared(x: torch.Tensor) -> torch.Tensor:
    for _ in range(200):
        x = x @ x
    return x


def _fp16(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return on_gpu(*shapes, dtype=torch.float16)


def _conv() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    layer = nn.Conv2d(256, 256, 3, padding=1).cuda().half().to(memory_format=torch.channels_last)
    x = _fp16((64, 256, 56, 56))[0].contiguous(memory_format=torch.channels_last)
    return layer, (x,)


GPU = {
    "small operations": Planted(
        lambda: (many_small, on_gpu((16,))), Cause.LAUNCHES, "small operations"
    ),
    "small products": Planted(
        lambda: (small_products, on_gpu((8, 32), (32, 32), (32,))),
        Cause.LAUNCHES,
        "small products",
    ),
    "numbers in Python": Planted(lambda: (much_python, on_gpu((16,))), Cause.PYTHON, "slow Python"),
    "words in Python": Planted(lambda: (words, on_gpu((16,))), Cause.PYTHON, "words are counted"),
    "reads of a value": Planted(
        lambda: (reads, on_gpu((768, 768), (768, 768))), Cause.WAITS, "a read"
    ),
    "shapes from values": Planted(
        lambda: (searches, on_gpu((512, 512), (512, 512))), Cause.WAITS, "a search"
    ),
    "copies to the device": Planted(
        lambda: (loads, (torch.ones(1 << 24), torch.ones(1 << 24, device="cuda"))),
        Cause.TRANSFERS,
        "a copy to the device",
    ),
    "copies to the host": Planted(
        lambda: (stores, on_gpu((1 << 24,))), Cause.TRANSFERS, "a copy to the host"
    ),
    "a large sum": Planted(
        lambda: (add, on_gpu((1 << 28,), (1 << 28,))), Cause.MEMORY, "large tensors"
    ),
    "a large norm": Planted(lambda: (normed, _fp16((32768, 4096))), Cause.MEMORY, "large norms"),
    "a large product": Planted(
        lambda: (product, _fp16((8192, 8192), (8192, 8192))), Cause.ARITHMETIC, "large products"
    ),
    "a convolution": Planted(_conv, Cause.ARITHMETIC),
    "a graph of small operations": Planted(
        lambda: (replayed(many_small, torch.ones(16, device="cuda")), ()), Cause.CHAIN
    ),
    "a graph of small products": Planted(
        lambda: (replayed(squared, torch.eye(64, device="cuda")), ()), Cause.CHAIN
    ),
}
