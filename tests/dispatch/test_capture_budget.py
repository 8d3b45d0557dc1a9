"""Captures that do not pay off come to an end; answers stay eager's, and what pays is captured."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import graphwright as gw
from graphwright.calls.dependencies import Dependencies
from graphwright.dispatch import capture_budget
from graphwright.dispatch.capture_budget import FREE_CAPTURES, SHARE, WORTH_CALLS, CaptureBudget

CALLS = 400
# Those that are free, and a few more where eager calls take as long as twenty captures.
MOST = FREE_CAPTURES + 3


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
def without_gradients() -> Iterator[None]:
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
    assert graphed.statistics.captures <= MOST + 1
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
    assert graphed.statistics.captures <= MOST + 1
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
    assert graphed.statistics.captures <= MOST + 1


def test_more_sizes_than_graphs(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed = gw.graph(model, max_graphs=4)
    sizes = [1 + n * 7 % 20 for n in range(CALLS)]
    told = compared(graphed, model, ((torch.randn(n, 8, device=device),) for n in sizes))
    assert graphed.statistics.captures <= 4 + MOST
    assert len(told) == 1
    assert "raise max_graphs=4" in told[0]
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


def test_what_the_caller_changes_rarely_is_captured_each_time(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    times = 2 * FREE_CAPTURES
    for _ in range(times):
        model.linear.weight.data = torch.randn(8, 8, device=device)
        assert not compared(graphed, model, ((x,) for _ in range(WORTH_CALLS + 1)))
    assert graphed.statistics.captures == times
    assert graphed.statistics.hits == times * (WORTH_CALLS + 1)


def test_a_few_values_and_modes_are_all_captured(device: torch.device) -> None:
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    for _ in range(3):
        for training in (False, True):
            model.train(training)
            compared(graphed, model, iter([(x, 1.0), (x, 2.0)]))
    assert graphed.statistics.captures == 4
    assert graphed.statistics.hits == 12


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


def test_what_has_settled_is_captured_after_all(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_budget, "SHARE", 1.0)
    model = Net().to(device).eval()
    graphed, x = gw.graph(model), torch.randn(4, 8, device=device)
    compared(graphed, model, ((x, float(n)) for n in range(20)))
    hits, calls = graphed.statistics.hits, 0
    while graphed.statistics.hits < hits + 100:
        compared(graphed, model, iter([(x, -1.0)]))
        calls += 1
        assert calls < 100_000


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


# ------------------------------------------------------------ the budget alone


def waited(budget: CaptureBudget) -> float:
    """Seconds of eager calls until the next capture."""
    count = 0
    while budget.waits:
        budget.waited(0.5)
        count += 1
    return count / 2


def test_captures_that_do_not_pay_keep_to_their_share_of_time() -> None:
    budget, eager, captures = CaptureBudget(), 0.0, 0.0
    waits = []
    for n in range(FREE_CAPTURES + 5):
        budget.spend(1.0, 0, "it does not pay")
        captures += 1.0
        if n + 1 >= FREE_CAPTURES:
            waits.append(waited(budget))
            eager += waits[-1]
            # Another one still keeps to it.
            assert captures + 1.0 <= SHARE * eager + 1e-9
        else:
            assert not budget.waits
    assert waits == sorted(waits)
    assert budget.reason == "it does not pay"


def test_a_capture_that_paid_begins_anew() -> None:
    budget = CaptureBudget()
    for _ in range(FREE_CAPTURES + 1):
        budget.spend(1.0, 0, "")
        waited(budget)
    for times in range(1, 3 * FREE_CAPTURES):
        budget.spend(1.0, times * WORTH_CALLS, "")
        assert not budget.waits


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
    assert graphed._graphs._for_changes.waits
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
        for n in (5.0, 6.0, 7.0, 2.0, 3.0, 4.0, 8.0, 9.0):
            graphed(x, 2.0, n)
    assert len(told) == 1
    assert "args[2] is another value" in str(told[0].message)
