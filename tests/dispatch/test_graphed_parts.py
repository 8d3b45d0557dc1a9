"""Modules that no graph holds as a whole, whose submodules are answered by graphs."""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.dispatch import graphed_parts, payoff


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gw.FallbackWarning)
        yield


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few nodes stay, and win."""
    monkeypatch.setattr(payoff, "WORTH", 1e9)
    monkeypatch.setattr(graphed_parts, "_FEW_NODES", 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x))) + x
        return y


class Refused(nn.Module):
    """Counts its calls in a way that matters, so that no graph can answer it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Block()
        self.again = self.head
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks[:2]:
            x = block(x)
        x = self.again(self.head(self.blocks[2](x)))
        self.last = x
        return x * self.calls


def made(device: torch.device) -> tuple[Refused, gw.GraphedModule, Refused]:
    torch.manual_seed(0)
    model = Refused().to(device).eval()
    return model, gw.graph(model), copy.deepcopy(model)


def agree(graphed: Any, eager: nn.Module, device: torch.device, calls: int = 20) -> None:
    for _ in range(calls):
        x = torch.randn(4, 8, device=device)
        torch.testing.assert_close(graphed(x), eager(x))


def test_submodules_are_answered_by_graphs(device: torch.device) -> None:
    model, graphed, eager = made(device)
    agree(graphed, eager, device)
    assert model.calls == eager.calls == 20
    torch.testing.assert_close(model.last, eager.last)
    assert "last" in vars(model)
    found = graphed.statistics
    assert found.in_parts >= 15 - payoff._ROUNDS
    assert found.graphs == 4  # Three blocks, and the head under both of its names.
    assert "part blocks.0: " in graphed.explain()
    assert "in parts it takes" in graphed.explain()


def test_the_module_stays_as_it_is(device: torch.device) -> None:
    model, graphed, eager = made(device)
    agree(graphed, eager, device, 5)
    assert [type(each) for each in model.modules()] == [type(each) for each in eager.modules()]
    assert list(model.state_dict()) == list(eager.state_dict())
    assert type(model.blocks[0]) is Block
    assert type(graphed.module.head) is Block


def test_changes_of_the_parts_are_seen(device: torch.device) -> None:
    model, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    for each in (model, eager):
        each.head.first.weight.data = torch.full((8, 8), 0.5, device=device)
    agree(graphed, eager, device, 3)
    for each in (model, eager):
        each.blocks[1] = nn.Identity()
        torch.manual_seed(3)
        each.head = Block().to(device).eval()
    agree(graphed, eager, device, 3)
    handles = [
        each.blocks[0].register_forward_hook(lambda m, given, result: result + 1)
        for each in (model, eager)
    ]
    agree(graphed, eager, device, 3)
    for handle in handles:
        handle.remove()
    agree(graphed, eager, device, 3)


def test_results_of_a_call_stay(device: torch.device) -> None:
    _, graphed, eager = made(device)
    inputs = [torch.randn(4, 8, device=device) for _ in range(12)]
    mine = [graphed(x) for x in inputs]
    for one, x in zip(mine, inputs, strict=True):
        torch.testing.assert_close(one, eager(x))


def test_gradients_are_eager_s(device: torch.device) -> None:
    _, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    with torch.enable_grad():
        x = torch.randn(4, 8, device=device, requires_grad=True)
        mine, its = graphed(x), eager(x)
        (one,), (other,) = (torch.autograd.grad(y.sum(), x) for y in (mine, its))
    torch.testing.assert_close(one, other)


def test_an_error_of_the_module_is_its_own(device: torch.device) -> None:
    _, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        graphed(torch.randn(4, 9, device=device))
    eager.calls += 1
    agree(graphed, eager, device, 3)


def test_threads(device: torch.device) -> None:
    model = Refused().to(device).eval()
    graphed = gw.graph(model)
    blocks = copy.deepcopy(model)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(15):
                x = torch.randn(4, 8, generator=generator).to(device)
                ratio = graphed(x) / expected(blocks, x)
                if not torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio), atol=1e-3):
                    wrong.append(ratio)

    def expected(eager: Refused, x: torch.Tensor) -> torch.Tensor:
        for block in eager.blocks:
            x = block(x)
        y: torch.Tensor = eager.again(eager.head(x))
        return y

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_parts_that_do_not_pay_are_closed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "WORTH", 0.0)
    _, graphed, eager = made(device)
    agree(graphed, eager, device)
    found = graphed.statistics
    assert found.graphs == 0
    assert found.in_parts == graphed_parts._FIRST + payoff._ROUNDS
    assert "in parts it would take" in graphed.explain()


def test_small_parts_run_as_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_parts, "_FEW_NODES", 1000)
    _, graphed, eager = made(device)
    agree(graphed, eager, device)
    assert graphed.statistics.graphs == 0


def test_release_and_close_let_go_of_parts(device: torch.device) -> None:
    _, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    assert graphed.pool.in_use > 0
    graphed.release()
    assert graphed.statistics.graphs == 0
    assert graphed.pool.in_use == 0
    agree(graphed, eager, device, 6)
    assert graphed.statistics.graphs == 4
    graphed.close()
    assert graphed.pool.in_use == 0


def test_a_copy_has_parts_of_its_own(device: torch.device) -> None:
    _, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    other, mine = copy.deepcopy(graphed), copy.deepcopy(eager)
    agree(other, mine, device, 6)
    agree(graphed, eager, device, 3)


def test_no_parts_where_nothing_may_be_divided(device: torch.device) -> None:
    model = Refused().to(device).eval()
    graphed = gw.graph(model, breaks="never")
    for _ in range(6):
        graphed(torch.randn(4, 8, device=device))
    assert graphed.statistics.in_parts == 0
    assert graphed.statistics.eager["it cannot be captured"] == 6


def test_the_caller_is_told_once(device: torch.device) -> None:
    _, graphed, _ = made(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            graphed(torch.randn(4, 8, device=device))
    (one,) = caught
    assert "Refused runs in parts for this kind of call, since it cannot be captured" in str(
        one.message
    )


COLLECTED: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("c", default=None)


def collects(module: nn.Module, given: Any, result: torch.Tensor) -> None:
    found = COLLECTED.get()
    if found is not None:
        found.append(result)


class Base(nn.Module):
    """Counts calls in its result, around what it does with a block."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.does, self.calls = does, 0
        self.head = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.does(self, x) * self.calls
        return y


def collects_by_a_context_variable(self: Base, x: torch.Tensor) -> Any:
    if not self.head.first._forward_hooks:
        self.head.first.register_forward_hook(collects)
    found: list[Any] = []
    token = COLLECTED.set(found)
    try:
        y = self.head(x)
    finally:
        COLLECTED.reset(token)
    return y + sum(found)


def goes_backward(self: Base, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        self.head(x).pow(2).mean().backward()
    return x + sum(p.grad.abs().sum() for p in self.parameters() if p.grad is not None)


def adds_a_module(self: Base, x: torch.Tensor) -> Any:
    if "later" not in self._modules:
        torch.manual_seed(1)
        self.add_module("later", nn.Linear(8, 8).to(x.device))
    return self.later(self.head(x))


def knows_its_child(self: Base, x: torch.Tensor) -> Any:
    known = {self.head: 2.0}
    return self.head(x) * known[self.head] if type(self.head) is Block else x


def copies_its_child(self: Base, x: torch.Tensor) -> Any:
    return copy.deepcopy(self.head)(x) + self.head(x)


def keeps_its_child(self: Base, x: torch.Tensor) -> Any:
    self.pair = nn.Sequential(self.head)
    return self.pair(x)


def loses_its_child(self: Base, x: torch.Tensor) -> Any:
    if self.calls == 8:
        del self.head
    return self.head(x) if hasattr(self, "head") else x


def hooks_its_child(self: Base, x: torch.Tensor) -> Any:
    handle = self.head.register_forward_hook(lambda module, given, result: result + 1)
    y = self.head(x)
    handle.remove()
    return y + self.head(x)


DOES = [
    collects_by_a_context_variable,
    goes_backward,
    adds_a_module,
    knows_its_child,
    copies_its_child,
    keeps_its_child,
    loses_its_child,
    hooks_its_child,
]


@pytest.mark.parametrize("does", DOES)
def test_what_forward_does_with_a_part_is_eager_s(does: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Base(does).to(device).eval()
    eager = copy.deepcopy(model)
    graphed = gw.graph(model)
    agree(graphed, eager, device)
    assert list(model.state_dict()) == list(eager.state_dict())
    graphed.close()
    assert all("forward" not in vars(each) for each in model.modules())


def test_copies_and_pickles_of_the_model_while_parts_are_in_use(device: torch.device) -> None:
    model, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copied.modules():
        each.register_buffer("mark", torch.ones((), device=device))
    assert "mark" not in dict(model.head.named_buffers())
    nn.init.zeros_(copied.head.second.weight)
    nn.init.zeros_(loaded.head.second.weight)
    x = torch.randn(4, 8, device=device)
    torch.testing.assert_close(copied(x), loaded(x))
    agree(graphed, eager, device, 3)
    assert not torch.equal(copied(x), model(x) * copied.calls / model.calls)
    again = gw.graph(copied)
    for _ in range(6):
        again(x)
    assert again.statistics.in_parts > 0


def test_nothing_is_left_in_the_modules_between_calls(device: torch.device) -> None:
    model, graphed, eager = made(device)
    inside: list[set[str]] = []
    hook = model.blocks[0].register_forward_pre_hook(
        lambda *_: inside.append({n for n, m in model.named_modules() if "forward" in vars(m)})
    )
    agree(graphed, eager, device, 6)
    assert graphed.statistics.in_parts > 0
    assert set().union(*inside) >= {"head", "blocks.1"}
    assert all("forward" not in vars(each) for each in model.modules())
    hook.remove()
    stored = pickle.dumps(model)
    graphed.close()
    assert pickle.dumps(model) == stored


def test_a_graph_that_is_dropped_leaves_the_model_alone(device: torch.device) -> None:
    model, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    pool = graphed.pool
    del graphed
    gc.collect()
    assert all("forward" not in vars(each) for each in model.modules())
    assert pool.in_use == 0
    x = torch.randn(4, 8, device=device)
    torch.testing.assert_close(model(x), eager(x))


def test_parts_are_closed_by_several_threads_at_once(device: torch.device) -> None:
    _, graphed, eager = made(device)
    agree(graphed, eager, device, 6)
    parts = graphed._graphs._parts
    assert parts is not None
    raised: list[BaseException] = []

    def work(do: Any) -> None:
        try:
            for _ in range(20):
                do()
        except BaseException as error:
            raised.append(error)

    does = [parts.close, parts.close, parts.settle, lambda: graphed.statistics, graphed.explain]
    threads = [threading.Thread(target=work, args=(each,)) for each in does]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    agree(graphed, eager, device, 3)
