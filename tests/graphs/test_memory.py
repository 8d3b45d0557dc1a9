"""Pools: limits, prediction, what each graph added, eviction, release."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import graphwright as gw
from graphwright.graphs import observed_runs
from graphwright.graphs.cpu.arena import LARGE_SEGMENT, MIB, SMALL_SEGMENT, Arena
from graphwright.graphs.graph import Graph, GraphState
from graphwright.graphs.memory import format_bytes, parse_bytes, predict, recording_in


def model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device).eval()


def rows(device: torch.device, n: int) -> torch.Tensor:
    return torch.randn(n, 256, device=device)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (5, 5),
        ("512", 512),
        ("1KiB", 1024),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3m", 3 << 20),
    ],
)
def test_limits_are_numbers_or_texts(value: int | str, nbytes: int) -> None:
    assert parse_bytes(value) == nbytes
    assert gw.MemoryPool(value).limit == nbytes


@pytest.mark.parametrize("value", [0, -1, "", "many", "1 PiB", True, 1.5])
def test_other_limits_are_refused(value: Any) -> None:
    with pytest.raises(gw.OptionError, match="1GiB"):
        gw.MemoryPool(value)


def test_bytes_read_well() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B",
        "2 KiB",
        "3 MiB",
        "5 GiB",
    ]


def test_smaller_graphs_fit_into_the_largest_one_s_memory(device: torch.device) -> None:
    net = model(device)
    alone = gw.MemoryPool()
    gw.graph(net, pool=alone).prepare([(rows(device, 8192),)])
    together = gw.MemoryPool()
    graphed = gw.graph(net, pool=together)
    graphed.prepare([(rows(device, n),) for n in (64, 8192, 1, 1024)])
    assert together.reserved <= 1.08 * alone.reserved
    assert "8192×256" in together.graphs[0].name
    assert sum(m.nbytes for m in together.graphs) == together.reserved == together.high_water
    for n in (64, 8192, 1, 1024):
        x = rows(device, n)
        torch.testing.assert_close(graphed(x), net(x).detach())
    assert graphed.statistics.captures == 4


def test_prediction_is_what_is_then_measured(device: torch.device) -> None:
    net, pool = model(device), gw.MemoryPool()
    x = rows(device, 4096)
    prediction = gw.predict_memory(net, x, pool=pool)
    assert pool.graphs == []
    assert pool.reserved == 0
    graph = gw.capture(net, x, pool=pool)
    assert abs(graph.nbytes - prediction.nbytes) <= max(0.15 * graph.nbytes, 8 * MIB)
    assert "4096×1024" in prediction.contributors[0][0]
    assert graph.nbytes == pool.reserved > 0


def test_a_limit_below_the_need_is_refused_before_anything_is_captured(
    device: torch.device,
) -> None:
    net, x = model(device), rows(device, 8192)
    gw.capture(net, x).close()  # library workspaces persist
    pool = gw.MemoryPool("10MiB", evict=True)
    gc.collect()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with pytest.raises(gw.MemoryBudgetExceeded) as error:
        gw.capture(net, x, pool=pool)
    assert "10 MiB" in str(error.value)
    assert "8192×1024" in str(error.value)
    assert pool.reserved == pool.in_use == 0
    gc.collect()
    if device.type == "cuda":
        assert torch.cuda.memory_allocated() == before


def test_a_graph_keeps_none_of_the_copies_that_warm_up_ran_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[StorageWeakRef] = []

    def noted(nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        copies.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(observed_runs, "_ordinary_allocator", lambda device: noted)
    graph = gw.capture(model(device), rows(device, 8))
    assert len(copies) >= 2
    assert all(copy.expired() for copy in copies)
    graph.close()


@pytest.mark.gpu
def test_what_runs_leave_over_is_handed_back_in_their_midst() -> None:
    """Where it is much, and more than when that was last done."""
    from graphwright.graphs.cuda.recorder import CudaRecorder

    recorder = CudaRecorder(torch.device("cuda"))
    torch.cuda.empty_cache()
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    least = torch.cuda.memory_reserved()
    for _ in range(2):
        left = [torch.empty(2 * least, dtype=torch.uint8, device="cuda") for _ in range(2)]
        del left
        assert torch.cuda.memory_reserved() >= 3 * least
        recorder.relieve()
        assert torch.cuda.memory_reserved() == least
    few = torch.empty(least // 8, dtype=torch.uint8, device="cuda")
    del few
    # What other tests have left may have had room for it.
    before = torch.cuda.memory_reserved()
    recorder.relieve()
    assert torch.cuda.memory_reserved() == before
    del kept
    recorder.close()


def test_only_a_training_step_s_set_up_hands_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a call: others may be using what the allocator keeps."""
    from graphwright.graphs.cpu.recorder import CpuRecorder

    count = [0]
    monkeypatch.setattr(CpuRecorder, "relieve", lambda self: count.__setitem__(0, count[0] + 1))
    one, x = nn.Linear(4, 4), torch.randn(2, 4)
    with gw.capture(one.eval(), x):
        assert not count[0]
    optimizer = torch.optim.SGD(one.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = one(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with gw.graph_step(step, (x,), optimizer=optimizer):
        assert count[0] > 10


def test_the_least_recently_used_graph_gives_way(device: torch.device) -> None:
    net = model(device)
    size = gw.predict_memory(net, rows(device, 6000)).nbytes
    pool = gw.MemoryPool(int(1.1 * size), evict=True)
    first, second = gw.graph(net, pool=pool), gw.graph(model(device), pool=pool)
    x = rows(device, 4096)
    for _ in range(2):
        torch.testing.assert_close(first(x), net(x).detach())
        second(rows(device, 6000))
        assert pool.limit is not None
        assert pool.reserved <= pool.limit
    assert pool.evictions >= 1
    assert first.statistics.captures == 2


def test_without_eviction_the_call_goes_eager_and_says_so(device: torch.device) -> None:
    net, pool = model(device), gw.MemoryPool("1MiB")
    graphed = gw.graph(net, pool=pool)
    x = rows(device, 8192)
    with pytest.warns(RuntimeWarning, match="the pool's limit"):
        torch.testing.assert_close(graphed(x), net(x).detach())
    graphed(x)  # Neither tried nor warned of again.
    assert graphed.statistics.eager == {"the pool's limit": 2}
    assert "may hold 1 MiB" in graphed.explain()


def test_release_hands_the_memory_back(device: torch.device) -> None:
    pool, net = gw.MemoryPool(), model(device)
    graph, graphed = gw.capture(net, rows(device, 4), pool=pool), gw.graph(net, pool=pool)
    x = rows(device, 4096)
    expected = graphed(x)
    high = pool.high_water
    pool.release()
    assert pool.in_use == pool.reserved == 0
    assert pool.high_water == high
    with pytest.raises(gw.CaptureError, match="closed"):
        graph.replay()
    assert torch.equal(graphed(x), expected)
    pool.close()
    assert pool.reserved == 0
    with pytest.warns(RuntimeWarning, match="The pool is closed"):
        torch.testing.assert_close(graphed(x), expected)


def test_a_pool_is_of_one_device() -> None:
    pool = gw.MemoryPool(device="meta")
    with pytest.raises(gw.CaptureError, match="on meta, the call on cpu"):
        gw.capture(torch.neg, torch.ones(2), pool=pool)
    with pytest.raises(gw.CaptureError, match="no recorder for meta"):
        gw.capture(torch.neg, torch.ones(2, device="meta"))


def test_an_arena_reuses_and_spoils_what_is_freed() -> None:
    arena = Arena()
    first = arena.allocate(1000)
    view = torch.empty(0).set_(first, 0, (250,), (1,))
    view.fill_(1.0)
    address = view.data_ptr()
    copy = view.detach()
    del first, view
    assert arena.in_use == 1024
    assert bool((copy == 1).all())
    del copy
    assert arena.in_use == 0
    again = torch.empty(0).set_(arena.allocate(1000), 0, (250,), (1,))
    assert again.data_ptr() == address
    assert bool(again.isnan().all())
    assert arena.reserved == SMALL_SEGMENT


def test_an_arena_s_segments_are_cuda_s() -> None:
    arena = Arena()
    kept = [arena.allocate(n) for n in (1, 2 * MIB, 3 * MIB, 17 * MIB)]
    assert arena.segments() == (SMALL_SEGMENT, LARGE_SEGMENT, 18 * MIB)
    assert arena.free_ranges() == [SMALL_SEGMENT, 15 * MIB]
    del kept
    arena.trim()
    assert arena.reserved == 0


DURING = list[Callable[[], object]]()


# Not a `custom_op`, whose code is watched, and `DURING` with it.
torch.library.define("graphwright_tests::double_and_call", "(Tensor x) -> Tensor")


@torch.library.impl("graphwright_tests::double_and_call", "CPU")
def double_and_call(x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor; calls what `DURING` holds."""
    for call in DURING:
        call()
    return 2 * x


@torch.library.register_fake("graphwright_tests::double_and_call")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_dies_during_a_replay_is_spoiled_after_it(elsewhere: bool) -> None:
    """Another graph's results may lie where this one has what it no longer needs when it ends."""

    def work(x: torch.Tensor) -> torch.Tensor:
        plus = x + 1
        doubled: torch.Tensor = torch.ops.graphwright_tests.double_and_call(plus)
        return doubled + plus

    pool, x = gw.MemoryPool(), torch.randn(2048)
    graph = gw.capture(work, x, pool=pool)
    kept = [gw.capture(torch.neg, x[:64], pool=pool, outputs="static") for _ in range(4)]
    in_use = pool.in_use

    def close_all() -> None:
        while kept:
            kept.pop().close()

    def retire_all() -> None:
        # What close() does on a thread that waits for the pool then.
        while kept:
            kept.pop()._retire()

    def on_a_thread() -> None:
        thread = threading.Thread(target=retire_all)
        thread.start()
        thread.join()

    DURING.append(on_a_thread if elsewhere else close_all)
    try:
        assert torch.equal(graph(x), 3 * (x + 1))
    finally:
        DURING.clear()
    assert not kept
    assert pool.in_use < in_use


def test_a_block_that_dies_while_another_is_taken_is_taken_back_afterwards() -> None:
    arena = Arena()
    first = arena.allocate(1000)
    with arena.work():
        del first
        assert arena.in_use == 1024
        second = arena.allocate(1000)
    assert arena.in_use == 1024
    del second
    assert arena.in_use == 0
    assert arena.free_ranges() == [SMALL_SEGMENT]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def as_a_block(a: torch.Tensor, b: torch.Tensor) -> None:
    with gw.capturing(device=a.device) as graph:
        product(a, b)
    graph.replay()
    graph.close()


def as_a_call(a: torch.Tensor, b: torch.Tensor) -> None:
    graph = gw.capture(product, a, b)
    graph(a, b)
    graph.close()


def as_a_callable(a: torch.Tensor, b: torch.Tensor) -> None:
    graphed = gw.graph(product)
    graphed(a, b)
    assert graphed.statistics.captures == 1
    graphed.close()


def dropped(a: torch.Tensor, b: torch.Tensor) -> None:
    with gw.capturing(device=a.device) as graph:
        product(a, b)
    graph.replay()


@pytest.mark.parametrize("once", [as_a_block, as_a_call, as_a_callable])
def test_a_pool_of_one_owner_is_closed_with_it(
    device: torch.device, once: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[gw.MemoryPool] = []
    made = gw.MemoryPool.__init__

    def noted(pool: gw.MemoryPool, *args: Any, **kwargs: Any) -> None:
        pools.append(pool)
        made(pool, *args, **kwargs)

    monkeypatch.setattr(gw.MemoryPool, "__init__", noted)
    once(torch.rand(8, 4, device=device), torch.rand(4, 2, device=device))
    assert pools
    assert all(pool.closed and pool.reserved == 0 for pool in pools)


def test_a_pool_that_was_given_stays_open(device: torch.device) -> None:
    pool = gw.MemoryPool(device=device)
    a, b = torch.rand(8, 4, device=device), torch.rand(4, 2, device=device)
    gw.capture(product, a, b, pool=pool).close()
    with gw.capturing(pool=pool) as graph:
        product(a, b)
    graph.close()
    graphed = gw.graph(product, pool=pool)
    graphed(a, b)
    graphed.close()
    assert not pool.closed
    assert torch.equal(gw.capture(product, a, b, pool=pool)(a, b), product(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("once", [as_a_block, as_a_call, as_a_callable, dropped])
def test_captures_that_are_closed_leave_no_memory_behind(once: Callable[..., None]) -> None:
    """As in PyTorch's test of cuBLAS's workspaces: 100 captures take no more than 0.1 GB."""
    a, b = torch.rand(1024, 512, device="cuda"), torch.rand(512, 64, device="cuda")
    once(a, b)
    gc.collect()

    def taken() -> int:
        """Bytes that 100 captures leave behind on the device, for other processes too."""
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for _ in range(100):
            once(a, b)
        torch.cuda.synchronize()
        return int(before - torch.cuda.mem_get_info()[0])

    reserved = torch.cuda.memory_reserved()
    # Other tests take memory of this device meanwhile: what is kept each time counts.
    assert any(taken() < 100e6 for _ in range(5))
    assert torch.cuda.memory_reserved() - reserved < 20e6


@pytest.mark.gpu
def test_a_closed_graph_leaves_the_workspace_of_others_alone() -> None:
    """PyTorch #193402: the workspace of cuBLAS is one for all graphs of a stream."""
    pool = gw.MemoryPool()
    # Sizes for which cuBLAS splits the sum, and adds the parts up in its workspace.
    x, w = torch.randn(16, 16384, device="cuda"), torch.randn(16384, 16, device="cuda")
    first, second = (gw.capture(product, x, w, pool=pool) for _ in range(2))
    want = second(x, w)
    first.close()
    gc.collect()
    torch.cuda.empty_cache()
    rest = [torch.full((2**21,), float("nan"), device="cuda") for _ in range(64)]
    for _ in range(3):
        assert torch.equal(second(x, w), want)
        for each in rest:
            assert each.isnan().all()


def test_what_fails_while_it_is_recorded_leaves_nothing_in_the_pool(device: torch.device) -> None:
    pool, kept = gw.MemoryPool(), []
    graph = Graph(pool, "work")
    x = torch.ones(3, device=device)
    with (  # noqa: PT012  # what fails comes after what was recorded
        pytest.raises(KeyError),
        recording_in(pool, graph, device) as admission,
    ):
        made = admission.recorder.record(lambda: x + 1, [], lambda tree: kept.append(tree) or [])
        assert pool.in_use
        graph._take(made, admission.before, 0)
        kept.clear()
        raise KeyError
    assert graph.state is GraphState.CLOSED
    assert not pool.graphs
    assert not pool.in_use


def test_what_is_recorded_is_one_of_the_pool_s_graphs(device: torch.device) -> None:
    pool = gw.MemoryPool()
    graph = Graph(pool, "work")
    with recording_in(pool, graph, device) as admission:
        memory = admission.recorder.allocate(1 << 20)
        assert not pool.graphs
    assert [each.name for each in pool.graphs] == ["work"]
    assert pool.high_water >= memory.nbytes
    graph.close()
    assert not pool.graphs


def test_what_grows_past_the_limit_while_it_is_recorded_is_refused(device: torch.device) -> None:
    pool = gw.MemoryPool("4MiB")
    graph = Graph(pool, "work")
    with (  # noqa: PT012  # it is refused at the end of the block
        pytest.raises(gw.MemoryBudgetExceeded, match="Capturing work"),
        recording_in(pool, graph, device) as admission,
    ):
        assert admission.fits()
        memory = admission.recorder.allocate(64 << 20)
        assert not admission.fits()
    del memory
    assert graph.state is GraphState.CLOSED
    assert not pool.graphs


@pytest.mark.parametrize("evictable", [True, False])
def test_admission_closes_graphs_that_may_be_closed(evictable: bool, device: torch.device) -> None:
    pool = gw.MemoryPool("48MiB", evict=True)
    old, new = Graph(pool, "old", evictable=evictable), Graph(pool, "new", evictable=True)
    with recording_in(pool, old, device) as admission:
        old._held = [admission.recorder.allocate(32 << 20)]  # Closing it lets go of this.
    prediction = predict(pool, (32 << 20,), [("torch.add", 7)])
    assert prediction.nbytes == 32 << 20
    expected = pytest.raises(gw.MemoryBudgetExceeded, match=r"torch\.add 7 B")
    with (
        contextlib.nullcontext() if evictable else expected,
        recording_in(pool, new, device) as admission,
    ):
        admission.admit(prediction)
    assert (old.state is GraphState.CLOSED) is evictable
    assert (new.state is GraphState.CLOSED) is not evictable
    assert pool.evictions == evictable
