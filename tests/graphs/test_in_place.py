"""A captured call works on the sample's own cache where it is; others are copied in and back."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphwright as gw
from graphwright.graphs.captured_call import CapturedCall

LAYERS, LENGTH = 4, 6


@dataclasses.dataclass
class Cache:
    """Keys and values of some layers, and how many are there: as a static cache holds them."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, layers: int = LAYERS) -> Cache:
        made = [torch.randn(LENGTH, 4, device=device) for _ in range(2 * layers)]
        return cls(made[:layers], made[layers:], torch.zeros((), dtype=torch.int64, device=device))

    def tensors(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values, self.length]


def step(x: torch.Tensor, cache: Cache) -> torch.Tensor:
    for keys, values in zip(cache.keys, cache.values, strict=True):
        place = (cache.length % LENGTH).reshape(1)
        keys.index_copy_(0, place, x)
        values.index_copy_(0, place, x.sin())
        x = torch.softmax(x @ keys.T, -1) @ values
    cache.length += 1
    return x


def mixed(caches: list[Cache], order: list[int], one: int, turned: bool) -> Cache:
    """A cache of the tensors of several; turned, what were keys are values."""
    keys = [caches[order[n]].keys[n] for n in range(LAYERS)]
    values = [caches[order[LAYERS + n]].values[n] for n in range(LAYERS)]
    keys, values = (values, keys) if turned else (keys, values)
    return Cache(keys, values, caches[one].length)


def captured(fn: Callable[..., Any], *args: Any, **options: Any) -> CapturedCall:
    made = gw.capture(fn, *args, **options)
    assert isinstance(made, CapturedCall)
    return made


def assert_same(mine: Cache, its: Cache) -> None:
    for a, b in zip(mine.tensors(), its.tensors(), strict=True):
        torch.testing.assert_close(a, b)


def was_in_place(graph: CapturedCall) -> bool:
    """Whether the last call was answered without copies."""
    own = graph.recorded.for_sample
    return own is not None and graph._last is own


def test_the_samples_cache_is_neither_copied_nor_changed_by_a_capture(device: torch.device) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    before = copy.deepcopy(cache)
    graph = captured(step, x, cache)
    assert_same(cache, before)
    own = graph.recorded.for_sample
    assert own is not None
    assert own.sources == [0]
    assert len(own.in_place) == 2 * LAYERS + 1
    for turn in range(2 * LENGTH):
        torch.testing.assert_close(graph(x + turn, cache), step(x + turn, before))
        assert_same(cache, before)
        assert was_in_place(graph)
    graph(x, Cache.of(device))
    assert not was_in_place(graph)


def in_a_buffer(device: torch.device) -> Cache:
    """Its memory is a small part of what others may use."""
    rows = torch.randn(2 * LAYERS, 10 * LENGTH, 4, device=device).unbind()
    made = [each[:LENGTH] for each in rows]
    return Cache(made[:LAYERS], made[LAYERS:], torch.zeros((), dtype=torch.int64, device=device))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda device: Cache.of(device, layers=2), {}),
        (Cache.of, {"outputs": "static"}),
        (Cache.of, {"pool": "16MiB"}),
        (in_a_buffer, {}),
    ],
    ids=["few tensors", "static outputs", "a pool with a limit", "a part of a buffer"],
)
def test_what_is_copied_in_any_case(
    device: torch.device, make: Callable[[torch.device], Cache], options: dict[str, Any]
) -> None:
    if "pool" in options:
        options = {"pool": gw.MemoryPool(options["pool"])}
    x, cache = torch.randn(1, 4, device=device), make(device)
    graph, mine = captured(step, x, cache, **options), copy.deepcopy(cache)
    torch.testing.assert_close(graph(x, cache), step(x, mine))
    assert_same(cache, mine)
    assert graph.recorded.for_sample is None


@pytest.mark.parametrize("change", ["freed", "moved", "taken over"])
def test_memory_that_is_no_longer_there_is_not_used(device: torch.device, change: str) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph = captured(step, x, cache)
    storages = [each.untyped_storage() for each in cache.tensors()]
    if change == "moved":
        if device.type == "cuda":
            pytest.skip("memory of a GPU is shared where it is")
        for storage in storages:
            storage.share_memory_()
    else:
        sizes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        kept = [torch.zeros(LENGTH, 4, device=device) for _ in storages]
        other = Cache.of(device)
        graph(x, other)
        graph.nodes()
        graph.replay()
        graph.replay_sample()
        if change == "freed":
            assert not any(each.count_nonzero() for each in kept)
            return
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
        for each in cache.tensors():
            each.zero_()
    mine = copy.deepcopy(cache)
    torch.testing.assert_close(graph(x, cache), step(x, mine))
    assert_same(cache, mine)


def test_outputs_are_those_of_the_last_call(device: torch.device) -> None:
    x, caches = torch.randn(1, 4, device=device), [Cache.of(device) for _ in range(2)]
    graph = captured(step, x, caches[0])
    for number in (0, 1, 0):
        result = graph(x + number, caches[number])
        torch.testing.assert_close(graph.outputs, result)
    graph.inputs[0].copy_(x + 5)
    graph.replay()
    assert not torch.equal(graph.outputs, result)


@pytest.mark.parametrize("seed", range(8))
def test_calls_with_any_caches_are_as_eager(device: torch.device, seed: int) -> None:
    """Caches that are the sample's, others, and mixtures of both, in any order."""
    drawn = random.Random(seed)
    x, caches = torch.randn(1, 4, device=device), [Cache.of(device) for _ in range(3)]
    graph = captured(step, x, caches[0])
    memory = copy.deepcopy(caches)
    for _ in range(24):
        order = [drawn.randrange(3) for _ in range(2 * LAYERS)]
        one = drawn.randrange(3)
        if drawn.random() < 0.5:
            order = [one] * (2 * LAYERS)
        turned = drawn.random() < 0.3  # Keys where values were: the same memory elsewhere.

        x = torch.randn(1, 4, device=device)
        mine, its = (mixed(of, order, one, turned) for of in (caches, memory))
        torch.testing.assert_close(graph(x, mine), step(x, its))
        for mine, its in zip(caches, memory, strict=True):
            assert_same(mine, its)


def test_what_others_write_to_the_cache_is_seen(device: torch.device) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph, mine = captured(step, x, cache), copy.deepcopy(cache)
    for each in (cache, mine):
        each.keys[1].data.mul_(3.0)
        each.length.fill_(2)
    torch.testing.assert_close(graph(x, cache), step(x, mine))
    cache.keys[2], mine.keys[2] = (torch.ones(LENGTH, 4, device=device) for _ in range(2))
    torch.testing.assert_close(graph(x, cache), step(x, mine))
    assert_same(cache, mine)


def test_a_result_in_the_cache_is_the_caches_memory(device: torch.device) -> None:
    def last(x: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        return step(x, cache), cache.values[-1][1:]

    x, cache, other = torch.randn(1, 4, device=device), Cache.of(device), Cache.of(device)
    graph = captured(last, x, cache)
    for each in (cache, other, cache):
        assert graph(x, each)[1].data_ptr() == each.values[-1][1:].data_ptr()


def test_autograd_learns_of_the_writes(device: torch.device) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph = captured(step, x, cache)
    weight = torch.ones(4, device=device, requires_grad=True)
    loss = (cache.keys[0] * weight).sum()
    graph(x, cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_caches_of_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        x, cache, mine = torch.randn(1, 4, device=device), Cache.of(device), Cache.of(device)
        mine = copy.deepcopy(cache)
        graph = captured(step, x, cache)
        torch.testing.assert_close(graph(x, cache), step(x, mine))
        assert_same(cache, mine)


def test_looking_at_a_graph_leaves_the_cache(device: torch.device) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph, before = captured(step, x, cache), copy.deepcopy(cache)
    for look in (
        graph.nodes,
        lambda: graph.nodes(timed=True),
        graph.replay_sample,
        lambda: gw.diagnose(graph, (x, cache)),
        lambda: gw.diagnose(graph, (x, Cache.of(device))),
    ):
        look()
        assert_same(cache, before)


def test_a_replay_by_hand_works_on_copies(device: torch.device) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph, mine = captured(step, x, cache), copy.deepcopy(cache)
    graph(x, Cache.of(device))
    mine.length.fill_(1)
    for static, value in zip(graph.inputs, (x + 1, *mine.tensors()), strict=True):
        static.copy_(value)
    before = copy.deepcopy(cache)
    graph.replay()
    torch.testing.assert_close(graph.outputs, step(x + 1, mine))
    assert_same(cache, before)


def test_closing_lets_the_cache_go(device: torch.device) -> None:
    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph = captured(step, x, cache)
    graph(x, cache)
    seen = weakref.ref(cache.keys[0].untyped_storage())
    graph.close()
    del cache
    gc.collect()
    assert seen() is None
    with pytest.raises(gw.CaptureError, match="closed"):
        graph(x, Cache.of(device))


def test_what_shares_memory_with_the_cache_stays_with_it(device: torch.device) -> None:
    def tail(x: torch.Tensor, cache: Cache, ends: list[torch.Tensor]) -> torch.Tensor:
        return step(x, cache) + sum(end.sum() for end in ends)

    x, cache = torch.randn(1, 4, device=device), Cache.of(device)
    graph, mine = captured(tail, x, cache, [k[-1] for k in cache.keys]), copy.deepcopy(cache)
    for given, its in ((cache, mine), (copy.deepcopy(cache), copy.deepcopy(mine))):
        for _ in range(LENGTH):
            found = graph(x, given, [k[-1] for k in given.keys])
            torch.testing.assert_close(found, tail(x, its, [k[-1] for k in its.keys]))
            assert_same(given, its)


def test_threads_with_caches_of_their_own(device: torch.device) -> None:
    x, caches = torch.randn(1, 4, device=device), [Cache.of(device) for _ in range(4)]
    mine = copy.deepcopy(caches)
    graph = captured(step, x, caches[0])
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(12):
                    found = graph(x + turn, caches[number])
                    torch.testing.assert_close(found, step(x + turn, mine[number]))
                    assert_same(caches[number], mine[number])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
