"""A service that embeds sentences: batches of every size and length, answered by a few graphs.

Requests hold 1 to 8 sentences, padded to the longest of them. Buckets are chosen from the sizes of
past requests, and padding a request up to one is proved to change nothing before it is done.

    python examples/minilm_buckets.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
from minilm import SENTENCES, embed, load
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from graphwright.dispatch import CallStatistics

Request = dict[str, torch.Tensor]
MOST = 8  # sentences in a request


class Embedder(torch.nn.Module):
    """Token ids and their mask to unit-length sentence embeddings, (sentences, 384)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return embed(self.model, {"input_ids": input_ids, "attention_mask": attention_mask})


def traffic(tokenizer: Callable[..., Request], count: int, device: str) -> list[Request]:
    """Requests of random sentences, each padded to its longest sentence."""
    draw = random.Random(0)
    requests = []
    for _ in range(count):
        sentences = draw.sample(SENTENCES, draw.randint(1, MOST))
        batch = tokenizer(sentences, padding=True, return_tensors="pt")
        names = ("input_ids", "attention_mask")
        requests.append({name: batch[name].to(device) for name in names})
    return requests


def sizes_of(request: Request) -> dict[str, int]:
    batch, length = request["input_ids"].shape
    return {"batch": batch, "length": length}


def seconds(fn: Callable[..., torch.Tensor], request: Request) -> float:
    """One call, begun and ended with an idle device."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    begun = time.perf_counter()
    with torch.no_grad():
        fn(**request)
    wait()
    return time.perf_counter() - begun


def show(title: str, columns: list[str], rows: list[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("chosen", "buckets") else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def main(count: int | None = None, smallest: tuple[int, int] | None = None) -> CallStatistics:
    """Choose buckets, answer requests by their graphs; the statistics of these graphs.

    Args:
        count: requests; the first half is only looked at, the second half is answered.
        smallest: batch and length at which the powers of two begin; the more of them there are, the
            more buckets may be chosen.
    """
    import graphwright as gw

    on_gpu = torch.cuda.is_available()
    count = count or (1000 if on_gpu else 100)
    least_batch, least_length = smallest or ((1, 8) if on_gpu else (4, 16))
    model, tokenizer = load()
    device = "cuda" if on_gpu else "cpu"
    embedder = Embedder(model).to(device).eval()
    requests = traffic(tokenizer, count, device)
    past, now = requests[: count // 2], requests[count // 2 :]

    # The largest request that is allowed counts as seen, so that a bucket holds it.
    longest = max(map(len, tokenizer(SENTENCES)["input_ids"]))
    seen = [*map(sizes_of, past), {"batch": MOST, "length": longest}]
    powers = gw.Buckets.powers_of_two(batch=(least_batch, MOST), length=(least_length, longest))
    buckets = gw.Buckets.from_sizes(seen, max_graphs=len(powers.points))
    show(
        f"{len(buckets.points)} buckets (batch × length) for {len(past)} past requests",
        ["chosen", "buckets", "padding"],
        [
            (name, ", ".join(f"{b}×{n}" for b, n in some.points), f"{some.waste(seen):.1%}")
            for name, some in (("powers of two", powers), ("by the sizes seen", buckets))
        ],
    )

    graphed = gw.graph(
        embedder,
        dynamic_shapes={name: {0: "batch", 1: "length"} for name in past[0]},
        buckets=buckets,
        pad={"attention_mask": 0},
    )
    graphed.prepare(past[:1])
    worst = 0.0
    for request in now:
        with torch.no_grad():
            worst = max(worst, float((graphed(**request) - embedder(**request)).abs().max()))
    told = graphed.statistics
    show(
        f"{len(now)} requests, {told.waste:.1%} padding",
        ["bucket", "requests", "padded", "padding"],
        [
            ("×".join(map(str, b)), str(of.exact + of.padded), str(of.padded), f"{of.waste:.1%}")
            for b, of in told.buckets.items()
        ],
    )
    print(f"Padding proved harmless by {told.proof_runs} runs in {told.proof_s:.1f} s;", end=" ")
    print(f"all embeddings are eager's up to {worst:.0e}.")

    # The same requests once more, in turns.
    times = [(seconds(embedder, request), seconds(graphed, request)) for request in now]
    eager, graphs = (1e3 * median(column) for column in zip(*times, strict=True))
    print(f"Median of one request: {eager:.2f} ms eagerly, {graphs:.2f} ms by graphs.")
    if not on_gpu:
        print("On the CPU a graph is replayed from Python: to try it out, not for speed.")
    return told


if __name__ == "__main__":
    main()
