"""Captures that do not pay off come to an end; answers stay eager's, and what pays is captured."""

from __future__ import annotations

import functools
import gc
import math
import os
import random
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import graphwright as gw
from graphwright.calls.dependencies import Dependencies
from graphwright.graphs import capture_budget
from graphwright.graphs.capture_budget import (
    FREE_LOOKS,
    SHARE,
    SHARE_OF_LOOKS,
    WORTH_CALLS,
    CaptureBudget,
    Looks,
)

CALLS = 400
FREE_CAPTURES = 3
# Those that are free; the clock stands still, so that no other is paid.
MOST = FREE_CAPTURES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * scale
        return y


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.count += 1
        return super().forward(x, scale)


@pytest.fixture(autouse=True)
def limited(clock: Any) -> Iterator[None]:
    """Captures are limited, and gradients off."""
    with torch.no_grad():
        yield


def compared(graphed: Any, model: nn.Module, calls: Iterator[tuple[Any, ...]]) -> list[str]:
    """Make calls and compare each with eager; the warnings that these gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args in calls:
            expected = model(*args)
            torch.testing.assert_close(graphed(*args), expected, rtol=0, atol=0)
    return [str(warning.message) for warning in caught]


def test_a_number_that_is_new_in_each_call(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    told = compared(graphed, model, ((x, float(n)) for n in range(CALLS)))
    assert graphed.statistics.captures <= MOST
    assert len(told) == 1
    assert "args[1] is another value in most calls; pass it as a tensor" in told[0]


def test_weights_that_are_swapped_for_each_call(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)

    def calls() -> Iterator[tuple[Any, ...]]:
        for _ in range(CALLS):
            model.linear.weight.data = torch.randn(8, 8, device=device)
            yield (x,)

    told = compared(graphed, model, calls())
    assert graphed.statistics.captures <= MOST
    assert len(told) == 1
    assert "change weights in place" in told[0]


@pytest.mark.parametrize("buckets", [None, gw.Buckets(batch=[4, 8])])
def test_weights_by_functional_call(device: torch.device, buckets: gw.Buckets | None) -> None:
    model = Net().to(device).eval()
    graphed = gw.graph(model, buckets=buckets)
    x = torch.randn(3, 8, device=device)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for _ in range(CALLS):
            weights = {n: torch.randn_like(p) for n, p in model.named_parameters()}
            made = functional_call(graphed, weights, (x,))
            torch.testing.assert_close(made, functional_call(model, weights, (x,)))
    assert graphed.statistics.captures <= MOST


def test_more_sizes_than_graphs(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed = gw.graph(model, max_graphs=4)
    sizes = [1 + n * 7 % 20 for n in range(CALLS)]
    told = compared(graphed, model, ((torch.randn(n, 8, device=device),) for n in sizes))
    assert graphed.statistics.captures == 4
    # Once while there is room for more, and once for the room.
    assert len(told) == 2
    assert "name sizes that vary as buckets" in told[0]
    assert "raise max_graphs=4" in told[1]
    # Those that have a graph go on using it.
    assert graphed.statistics.hits > CALLS / 10


def test_families_of_buckets_without_end(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed = gw.graph(model, buckets=gw.Buckets(batch=[4]))
    calls = ((torch.randn(3, 8, device=device), float(n)) for n in range(CALLS))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for args in calls:
            torch.testing.assert_close(graphed(*args), model(*args))
    assert graphed.statistics.captures <= 1 + MOST


def test_what_the_caller_changes_rarely_is_captured_each_time(
    device: torch.device, clock: Any
) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    times = 3 * FREE_CAPTURES
    for _ in range(times):
        model.linear.weight.data = torch.randn(8, 8, device=device)
        assert not compared(graphed, model, ((x,) for _ in range(WORTH_CALLS + 1)))
        clock.now_s += 1.1 * clock.capture_s / SHARE
    assert graphed.statistics.captures == times
    assert graphed.statistics.hits == times * (WORTH_CALLS + 1)


def test_a_few_values_and_modes_are_all_captured(device: torch.device) -> None:
    """Three when they come first, the fourth when it comes back."""
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    for _ in range(3):
        for training in (False, True):
            model.train(training)
            assert not compared(graphed, model, iter([(x, 1.0), (x, 2.0)]))
    assert graphed.statistics.captures == 4
    assert graphed.statistics.hits == 11
    assert graphed.statistics.eager == {"not captured yet": 1}


def test_what_has_a_graph_in_another_mode_keeps_it(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    for training in (False, True):
        model.train(training)
        graphed(x, -1.0)
    compared(graphed, model, ((x, float(n)) for n in range(20)))
    assert "capturing does not pay off" in graphed.statistics.eager
    hits = graphed.statistics.hits
    for n in range(20):
        model.train(bool(n % 2))
        compared(graphed, model, iter([(x, -1.0)]))
    assert graphed.statistics.hits == hits + 20


def test_state_that_changes_with_each_call(device: torch.device) -> None:
    graphed, x = gw.graph(Counting().to(device).eval()), torch.randn(4, 8, device=device)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for _ in range(CALLS):
            graphed(x)
    assert graphed.count == CALLS


def test_what_has_settled_is_captured_after_all(device: torch.device, clock: Any) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    compared(graphed, model, ((x, float(n)) for n in range(20)))
    hits, calls = graphed.statistics.hits, 0
    while graphed.statistics.hits < hits + 100:
        compared(graphed, model, iter([(x, -1.0)]))
        clock.now_s += 0.01
        calls += 1
        assert calls < 2 * clock.capture_s / SHARE / 0.01


@pytest.mark.parametrize("wanted", [True, False])
def test_gradients_are_what_they_would_be_while_calls_wait(
    device: torch.device, wanted: bool
) -> None:
    model = Net().to(device).train(wanted)
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    with warnings.catch_warnings(record=True), torch.enable_grad():
        warnings.simplefilter("always")
        for _ in range(20):
            model.linear.weight.data = torch.randn(8, 8, device=device)
            assert graphed(x).requires_grad is wanted


def test_release_forgets_that_calls_wait() -> None:
    model = Net().eval()
    graphed, x = gw.graph(model), torch.randn(4, 8)
    compared(graphed, model, ((x, float(n)) for n in range(20)))
    graphed.release()
    before = graphed.statistics.captures
    graphed(x, 1.0)
    graphed(x, 2.0)
    assert graphed.statistics.captures == before + 2


@pytest.mark.parametrize("maker", ["make_graphed_callables", "graph_step"])
def test_release_makes_captures_for_training_free_again(maker: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graphed: Any
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if maker == "graph_step":
            graphed = gw.graph_step(step, (torch.randn(4, 8),))
            release, statistics = graphed.release, graphed.statistics
        else:
            graphed = gw.make_graphed_callables(model, (torch.randn(4, 8),))
            release, statistics = graphed.forward.close, graphed.forward.statistics
        for size in range(5, 30):
            graphed(torch.randn(size, 8))
        release()
        before = statistics.captures
        for size in (4, 5, 6):
            graphed(torch.randn(size, 8))
    assert statistics.captures == before + 3


def test_weights_that_were_replaced_are_let_go_while_calls_of_a_training_wait() -> None:
    model = Net()
    gw.make_graphed_callables(model, (torch.randn(4, 8),))
    old = []
    with torch.enable_grad():
        for _ in range(10):
            model.linear.weight = nn.Parameter(torch.randn(8, 8))
            old.append(weakref.ref(model.linear.weight))
            model(torch.randn(4, 8)).sum().backward()
    gc.collect()
    assert [weight() is not None for weight in old] == [False] * 9 + [True]


# ------------------------------------------------------------ the budget alone


class Asker:
    """What asks for captures."""

    def __init__(self) -> None:
        self.answers = 0

    def answered(self) -> int:
        return self.answers

    def asks(self, budget: CaptureBudget, *, comes_back: bool = False) -> bool:
        with budget.capture(self.answered, comes_back=comes_back) as capture:
            return capture.allowed


def test_captures_that_do_not_pay_keep_to_their_share_of_time(clock: Any) -> None:
    budget, asker = CaptureBudget(), Asker()
    assert [asker.asks(budget) for _ in range(5)] == [True] * FREE_CAPTURES + [False] * 2
    began, waits, last = clock.now_s, [], clock.now_s
    while len(waits) < 6:
        clock.now_s += 0.05
        if asker.asks(budget):
            waits.append(clock.now_s - last)
            last = clock.now_s
            assert len(waits) * clock.capture_s <= SHARE * (clock.now_s - began)
    assert waits == sorted(waits)  # Ever more rarely, as none of them answers a call.
    assert waits[-1] > 8 * waits[0]


def test_captures_that_pay_keep_to_the_share_and_no_more(clock: Any) -> None:
    budget, asker = CaptureBudget(), Asker()
    for _ in range(FREE_CAPTURES):
        assert asker.asks(budget)
    for _ in range(20):
        asker.answers += WORTH_CALLS
        assert not asker.asks(budget)
        clock.now_s += clock.capture_s / SHARE
        assert asker.asks(budget)


def test_what_comes_back_is_free_and_takes_no_other_s_turn(clock: Any) -> None:
    budget, asker = CaptureBudget(), Asker()
    assert all(asker.asks(budget, comes_back=True) for _ in range(20))
    assert [asker.asks(budget) for _ in range(4)] == [True, True, True, False]
    assert asker.asks(budget, comes_back=True)


def test_two_that_share_a_pool_share_its_budget(device: torch.device) -> None:
    pool = gw.MemoryPool()
    models = [Net().to(device).eval() for _ in range(2)]
    graphed = [gw.graph(model, pool=pool) for model in models]
    for n in range(100):
        for model, each in zip(models, graphed, strict=True):
            compared(each, model, iter([(torch.randn(4, 8, device=device), float(n))]))
    assert sum(each.statistics.captures for each in graphed) == FREE_CAPTURES


def test_threads_share_the_budget_of_their_pool(clock: Any) -> None:
    budget, askers = CaptureBudget(), [Asker() for _ in range(8)]
    allowed: list[bool] = []

    def ask(asker: Asker) -> None:
        for _ in range(50):
            allowed.append(asker.asks(budget))

    threads = [threading.Thread(target=ask, args=(asker,)) for asker in askers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == 400
    # Each capture moves the clock, by which others may have become due.
    assert sum(allowed) <= FREE_CAPTURES + SHARE * clock.now_s / clock.capture_s


def test_one_thread_s_paid_capture_lets_no_other_begin_meanwhile(clock: Any) -> None:
    budget, asker, other = CaptureBudget(), Asker(), Asker()
    for _ in range(FREE_CAPTURES):
        asker.asks(budget)
    clock.now_s += 100.0
    found: list[bool] = []
    with budget.capture(asker.answered) as capture:
        assert capture.allowed
        thread = threading.Thread(target=lambda: found.append(other.asks(budget)))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_child_waits_for_no_capture_of_its_parent_s_threads() -> None:
    budget, asker = CaptureBudget(), Asker()
    for _ in range(FREE_CAPTURES):
        asker.asks(budget)
    budget._at_s = -math.inf
    began, over = threading.Event(), threading.Event()

    def capture() -> None:
        with budget.capture(asker.answered) as found:
            assert found.allowed
            began.set()
            over.wait()

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Newer Pythons warn of threads.
        child = os.fork()
    if not child:
        os._exit(0 if asker.asks(budget) else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_looks_in_vain_keep_to_their_share_of_time(clock: Any) -> None:
    looks, took, began = Looks(), 0.0, clock.now_s
    for _ in range(100_000):
        clock.now_s += 0.001
        if not looks.rests:
            clock.now_s += 0.002
            took += 0.002
            looks.failed(0.002)
    assert 0.5 < (took - FREE_LOOKS * 0.002) / (clock.now_s - began) / SHARE_OF_LOOKS < 1.1
    looks.found()
    assert not looks.rests


# ------------------------------------------------------------ states and sizes in turns


class Heads(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.active = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.heads[self.active](x)
        return y


@pytest.mark.parametrize("each", [1, 2, 10])
@pytest.mark.parametrize("count", [2, 3, 4, 6, 12])
def test_states_in_turns_are_answered_from_the_third_visit_on(
    device: torch.device, count: int, each: int
) -> None:
    model = Heads(count).to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    for visit in range(6):
        for model.active in range(count):
            hits = graphed.statistics.hits
            assert not compared(graphed, model, ((x,) for _ in range(each)))
            if visit >= 2 or visit * each >= 20:
                assert graphed.statistics.hits == hits + each
    assert graphed.statistics.captures == count


@pytest.mark.parametrize("each", [1, 3])
def test_sizes_in_turns_are_answered_from_the_third_visit_on(
    device: torch.device, each: int
) -> None:
    model = Net().to(device).eval()
    graphed = gw.graph(model)
    for visit in range(4):
        for size in range(1, 10):
            hits, x = graphed.statistics.hits, torch.randn(size, 8, device=device)
            assert not compared(graphed, model, ((x,) for _ in range(each)))
            assert graphed.statistics.hits == hits + each or visit < 2
    assert graphed.statistics.captures == 9


def test_states_in_any_order_among_others_that_never_come_back(
    device: torch.device, clock: Any
) -> None:
    model = Heads(5).to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    order, new = random.Random(0), 0
    for n in range(600):
        clock.now_s += 1e-3
        model.active = order.randrange(5)
        if n % 7 == 0:
            new += 1
            model.extra = new
        compared(graphed, model, iter([(x,)]))
        if n % 7 == 0:
            model.extra = 0
    paid = SHARE * clock.now_s / clock.capture_s
    assert graphed.statistics.captures <= FREE_CAPTURES + 5 + paid
    assert graphed.statistics.hits > 450


@pytest.mark.parametrize("each", [1, 2])
def test_a_stream_of_states_stays_within_the_budget(
    device: torch.device, clock: Any, each: int
) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    for n in range(300):
        model.linear.weight.data = torch.randn(8, 8, device=device)
        model.step = n
        clock.now_s += 1e-3
        compared(graphed, model, ((x,) for _ in range(each)))
    assert graphed.statistics.captures <= FREE_CAPTURES + SHARE * clock.now_s / clock.capture_s


class LastSize(nn.Module):
    """Keeps a table for the size of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x), device=x.device).float().unsqueeze(1)
        y: torch.Tensor = self.linear(x) + self.table
        return y


def test_a_table_for_the_last_size_comes_to_an_end(device: torch.device) -> None:
    model, reference = LastSize().to(device).eval(), LastSize().to(device).eval()
    reference.load_state_dict(model.state_dict())
    graphed = gw.graph(model)
    xs = [torch.randn(4 * n, 8, device=device) for n in (1, 2)]
    told = compared(graphed, reference, ((xs[n % 2],) for n in range(CALLS)))
    assert graphed.statistics.captures == FREE_CAPTURES
    assert len(told) == 1
    assert "table" in told[0]


def test_threads_that_leave_it_in_other_states_come_to_an_end() -> None:
    model, reference = LastSize().eval(), LastSize().eval()
    reference.load_state_dict(model.state_dict())
    graphed = gw.graph(model)
    problems: list[object] = []

    def call(size: int) -> None:
        # The tables of other threads may be of another size in between, as for eager calls.
        x = torch.randn(size, 8)
        for _ in range(100):
            try:
                with torch.no_grad():
                    graphed(x)
            except RuntimeError as error:
                if "must match" not in str(error):
                    problems.append(error)
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=call, args=(4 * n,)) for n in range(1, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems


# ------------------------------------------------------------ what waiting calls must not lose


def swaps(graphed: Any, x: torch.Tensor, times: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(times):
            weight = graphed.linear.weight
            weight.data = torch.randn_like(weight)
            graphed(x)


def test_waiting_calls_run_in_the_caller_s_gradient_mode(device: torch.device) -> None:
    class Outer(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y

    model = Outer().to(device).eval()
    model.inner = nn.Linear(8, 8).to(device).eval()
    graphed, x = gw.graph(model), torch.randn(2, 5, 8, device=device)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        for _ in range(5):
            model.inner = nn.Linear(8, 8).to(device).eval()
            graphed(x)
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, device=device).eval()
        mask = torch.tensor([[False] * 5, [False] * 2 + [True] * 3], device=device)
        model.inner = layer
        layer.forward = functools.partial(layer.forward, src_key_padding_mask=mask)
        torch.testing.assert_close(graphed(x), model(x).detach(), rtol=0, atol=0)


def test_a_graph_that_fits_again_is_used_again(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    swaps(graphed, x, 6)
    assert "not captured yet" in graphed.statistics.eager
    graphed.prepare([(x,)])
    hits = graphed.statistics.hits
    compared(graphed, model, ((x,) for _ in range(20)))
    assert graphed.statistics.hits == hits + 20


def test_one_other_call_does_not_end_the_use_of_a_graph(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    swaps(graphed, x, 3)  # The last one is captured, and the next one would wait.
    hits = graphed.statistics.hits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(1000):
            graphed(torch.randn(3 if n == 500 else 4, 8, device=device))
    assert graphed.statistics.hits > hits + 950


def test_prepared_calls_are_answered_whatever_waits(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model, max_graphs=16), torch.randn(4, 8, device=device)
    graphed.prepare([(x, float(n)) for n in range(10)])
    compared(graphed, model, ((x, 100.0 + n) for n in range(10)))
    hits = graphed.statistics.hits
    compared(graphed, model, ((x, float(n)) for n in range(10)))
    assert graphed.statistics.hits == hits + 10


@pytest.mark.parametrize(
    "call",
    [
        lambda n: ((float(n), 1),),
        lambda n: (complex(n),),
        lambda n: (float("nan") if n % 2 else float(n),),
    ],
)
def test_values_of_any_kind_come_to_an_end(device: torch.device, call: Any) -> None:
    def multiplied(x: torch.Tensor, value: Any) -> torch.Tensor:
        value = value[0] if isinstance(value, tuple) else value
        return x * abs(value)

    graphed, x = gw.graph(multiplied), torch.randn(4, 8, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(100):
            graphed(x, *call(n))
    assert graphed.statistics.captures <= 1 + MOST
    assert len(graphed._quick) <= 1 + MOST


@pytest.mark.slow
def test_graphs_that_the_pool_evicts_come_to_an_end(device: torch.device) -> None:
    model = Net().to(device).eval()
    whole = gw.graph(model)
    sizes = [100_000 * n for n in (4, 5, 6, 7)]
    whole.prepare([(torch.randn(n, 8, device=device),) for n in sizes])
    limit = int(0.85 * whole.pool.reserved)
    whole.close()
    graphed = gw.graph(model, pool=gw.MemoryPool(limit, evict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(40):
            graphed(torch.randn(sizes[n % 4], 8, device=device))
    assert graphed.statistics.captures <= 4 + MOST


def test_refusals_come_to_an_end(device: torch.device) -> None:
    def reads(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * x.sum().item() * scale

    graphed, x = gw.graph(reads, breaks="never"), torch.randn(4, 8, device=device)
    tried = []
    capture = graphed._entries.capture
    graphed._entries.capture = lambda *given: tried.append(1) or capture(*given)  # type: ignore[method-assign, assignment, func-returns-value]  # counts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(100):
            torch.testing.assert_close(graphed(x, float(n)), reads(x, float(n)))
    assert len(tried) <= MOST


class Rebuilding(nn.Module):
    """Makes equal dictionaries in each call: only a walk tells that nothing has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(300))
        self.sizes = {1: 2, 3: 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes = dict(self.sizes)
        y: torch.Tensor = self.layers[0](x)
        return y * y.sum().item()


@pytest.mark.parametrize("breaks", ["never", "auto"])
def test_what_is_refused_is_not_compared_with_each_call(
    breaks: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_budget, "CLOCK", time.perf_counter)
    model = Rebuilding().to(device).eval()
    graphed = gw.graph(model, breaks=breaks)
    walks = []
    init = Dependencies.__init__

    def counted(*args: Any, **kwargs: Any) -> None:
        walks.append(1)
        init(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            x = torch.randn(4, 8, device=device)
            torch.testing.assert_close(graphed(x), model(x))
        monkeypatch.setattr(Dependencies, "__init__", counted)
        for _ in range(200):
            graphed(torch.randn(4, 8, device=device))
    assert graphed.statistics.eager["it cannot be captured"] > 200
    assert len(walks) < 40


def test_the_argument_that_varies_is_named(device: torch.device) -> None:
    def f(x: torch.Tensor, a: float, n: float) -> torch.Tensor:
        return x * a * n

    graphed, x = gw.graph(f), torch.randn(4, 8, device=device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(2, 40):
            graphed(x, 2.0, float(n))
    assert len(told) == 1
    assert "args[2] is another value" in str(told[0].message)
