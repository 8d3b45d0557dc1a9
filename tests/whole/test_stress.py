"""Everything at once: threads, shapes, rebound weights, evictions, releases, closes."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.graphs.graph import GraphClosed

THREADS = 4
KEPT_INPUTS = 4


class Readers:
    """A lock that many readers or one writer may hold."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._reading = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._turn:
            self._reading += 1
        try:
            yield
        finally:
            with self._turn:
                self._reading -= 1
                self._turn.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(lambda: self._reading == 0)
            yield


@dataclass
class Subject:
    """A model with its inputs, and what eager makes of them with the present weights."""

    model: nn.Module
    inputs: list[dict[str, torch.Tensor]]
    graphed: gw.GraphedModule
    expected: list[torch.Tensor] = field(default_factory=list)

    def compute(self) -> None:
        with torch.no_grad():
            self.expected = [first(self.model(**x)) for x in self.inputs]


def first(result: Any) -> torch.Tensor:
    found = result if isinstance(result, torch.Tensor) else result[0]
    assert isinstance(found, torch.Tensor)
    return found


def text_model(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """MiniLM's architecture on a GPU, a small one of the kind elsewhere."""
    from transformers import BertConfig, BertModel

    full = device.type == "cuda"
    config = BertConfig(
        vocab_size=30522 if full else 100,
        hidden_size=384 if full else 32,
        num_hidden_layers=6 if full else 2,
        num_attention_heads=12 if full else 4,
        intermediate_size=1536 if full else 64,
    )

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, config.vocab_size, (rows, 8 * rows), device=device)
        mask = torch.ones_like(ids)
        mask[-1, 4 * rows :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    return BertModel(config).to(device, dtype).eval(), inputs


def image_model(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """ResNet-50 on a GPU, where torchvision is, a small network elsewhere."""
    if device.type == "cuda":
        import torchvision

        model, side = torchvision.models.resnet50(weights=None), 96
    else:
        side = 12
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
        )
        model.forward = lambda x, plain=model.forward: plain(x)  # called by name below

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        x = torch.randn(rows, 3, side, side, device=device, dtype=dtype)
        return {"x": x.to(memory_format=torch.channels_last)}

    model = model.to(device, dtype, memory_format=torch.channels_last)
    return model.eval(), inputs


def subject(make: Callable[..., Any], device: torch.device, pool: gw.MemoryPool) -> Subject:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, inputs = make(device, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    given = [inputs(rows) for rows in (1, 2, 3, 4) for _ in range(KEPT_INPUTS)]
    made = Subject(model, given, gw.graph(model, pool=pool, max_graphs=3))
    made.compute()
    return made


@pytest.mark.long
@pytest.mark.parametrize("calls", [2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_every_output_is_eager_s(device: torch.device, calls: int) -> None:
    if device.type == "cpu":
        calls = 120
    pool = gw.MemoryPool(evict=True)
    subjects = [subject(make, device, pool) for make in (text_model, image_model)]
    for one in subjects:
        one.graphed.prepare([one.inputs[-1]])
    # Too little for all shapes of both.
    pool.limit = int(pool.reserved * 1.02)
    turn, count = Readers(), iter(range(calls))
    counting = threading.Lock()
    highest: list[int] = []

    def rebind(one: Subject) -> None:
        with turn.writing():
            state = {
                name: value * random.uniform(0.9, 1.1) if value.is_floating_point() else value
                for name, value in one.model.state_dict().items()
            }
            one.model.load_state_dict(state, assign=True)
            one.compute()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        while True:
            with counting:
                number = next(count, None)
            if number is None:
                return
            one = dice.choice(subjects)
            if number % (calls // 10) == calls // 20:
                rebind(one)
            if number % (calls // 20) == calls // 40:
                dice.choice((pool.release, one.graphed.release))()
            if number % (calls // 20) == 0:
                with gw.capture(torch.neg, torch.ones(4, device=device), pool=pool) as brief:
                    # Another thread may release the pool, and this graph with it.
                    with contextlib.suppress(GraphClosed):
                        assert bool((brief(torch.ones(4, device=device)) == -1).all())
            index = dice.randrange(len(one.inputs))
            with turn.reading(), torch.no_grad():
                result = first(one.graphed(**one.inputs[index]))
                expected = one.expected[index]
                # What was computed with these weights; they may be gone when it is compared.
                close(result, expected, number)
            highest.append(pool.high_water)

    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(work, seed) for seed in range(THREADS)]:
            done.result()
    for one in subjects:
        statistics = one.graphed.statistics
        assert set(statistics.eager) <= {"the pool's limit"}, statistics
        answered = statistics.hits + statistics.after_capture + sum(statistics.eager.values())
        assert answered > calls // 4
        assert statistics.captures >= 4
    # The small models all fit into the arena's first segment.
    assert pool.evictions > 0 or device.type == "cpu"
    assert pool.reserved <= pool.limit
    for one in subjects:
        one.graphed.close()
        result = first(one.graphed(**one.inputs[0]))
        close(result, one.expected[0], calls)
    del one, result
    subjects.clear()
    gc.collect()
    pool.release()
    assert pool.in_use == 0
    assert pool.reserved == 0


def close(result: torch.Tensor, expected: torch.Tensor, number: int) -> None:
    """Equal but for what other kernels round otherwise; a stale result is far off."""
    limit = 2e-2 if result.dtype is torch.float16 else 1e-4
    scale = expected.float().square().mean().sqrt()
    error = (result.float() - expected.float()).square().mean().sqrt() / scale
    assert float(error) < limit, f"call {number}: {float(error):.2e}"
