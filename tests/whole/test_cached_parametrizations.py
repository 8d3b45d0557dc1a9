"""`torch.nn.utils.parametrize.cached()`: inside a block, eager computes each weight once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chosen import choosing
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import graphwright as gw

PARAMETRIZATIONS = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral norm": parametrizations.spectral_norm,
}
eager_inside = pytest.mark.filterwarnings("ignore:.*runs eagerly:RuntimeWarning")


def made(name: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(PARAMETRIZATIONS[name](nn.Linear(4, 4)), nn.ReLU()).to(device)


def both(name: str, device: torch.device) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Two modules that are alike, and an input."""
    return made(name, device), made(name, device), torch.randn(3, 4, device=device)


def check(mine: Callable[..., Any], eager: Callable[..., Any], x: torch.Tensor) -> None:
    torch.testing.assert_close(mine(x), eager(x))


def scale(*models: nn.Module) -> None:
    with torch.no_grad():
        for model in models:
            for weight in model.parameters():
                weight.mul_(1.5)


def answered(part: str, model: nn.Module, x: torch.Tensor) -> Any:
    def tuned() -> gw.TunedModule:
        with choosing("torchscript"):
            return gw.tune(model, (x,), strategies=["torchscript"], remember=False)

    return {
        "graph": lambda: gw.graph(model),
        "fuse": lambda: gw.fuse(model, (x,)),
        "tune": tuned,
        "function": lambda: gw.graph(lambda x: model(x)),
    }[part]()


@eager_inside
@torch.no_grad()
@pytest.mark.parametrize("part", ["graph", "fuse", "tune", "function"])
@pytest.mark.parametrize("name", ["weight norm", "orthogonal"])
def test_a_block_s_weights_are_not_used_outside(name: str, part: str, device: torch.device) -> None:
    mine, eager, x = both(name, device)
    mine.eval(), eager.eval()
    if part == "tune":
        fast = answered(part, mine, x)
    else:
        with parametrize.cached():  # The first call is one inside.
            fast = answered(part, mine, x) if part != "fuse" else gw.fuse(mine)
            for _ in range(3):
                check(fast, eager, x)
    for _ in range(2):
        scale(mine, eager)
        for _ in range(3):
            check(fast, eager, x)
        with parametrize.cached():
            for _ in range(3):
                check(fast, eager, x)


@eager_inside
@torch.no_grad()
def test_a_weight_is_computed_once_in_a_block(device: torch.device) -> None:
    mine, eager, x = both("spectral norm", device)
    graphed = gw.graph(mine)  # In training mode, each computation changes the vectors.
    check(graphed, eager, x)
    with parametrize.cached():
        check(graphed, eager, x)
        check(graphed, eager, x)
    for own, its in zip(mine.buffers(), eager.buffers(), strict=True):
        assert torch.equal(own, its)


@eager_inside
@torch.no_grad()
@pytest.mark.parametrize("part", ["graph", "fuse", "tune"])
def test_a_weight_that_changes_in_a_block_is_as_it_was(part: str, device: torch.device) -> None:
    mine, eager, x = both("weight norm", device)
    mine.eval(), eager.eval()
    fast = answered(part, mine, x)
    fast(x)
    with parametrize.cached():
        check(fast, eager, x)
        scale(mine, eager)
        check(fast, eager, x)
    check(fast, eager, x)


@torch.no_grad()
def test_calls_in_a_block_are_eager_for_one_reason(device: torch.device) -> None:
    (mine, _), (eager, _), x = both("weight norm", device)
    graphed = gw.graph(mine.eval())
    with parametrize.cached():
        with pytest.warns(RuntimeWarning, match=r"parametrize\.cached"):
            check(graphed, eager.eval(), x)
        for _ in range(2):
            check(graphed, eager, x)
    found = graphed.statistics
    assert (found.hits, found.in_parts + sum(found.eager.values())) == (0, 3)
    check(graphed, eager, x)
    check(graphed, eager, x)
    assert graphed.statistics.hits == 2


@torch.no_grad()
def test_a_module_without_parametrizations_has_graphs_in_a_block(device: torch.device) -> None:
    graphed, x = gw.graph(nn.Linear(4, 4).to(device).eval()), torch.randn(3, 4, device=device)
    for _ in range(3):
        with parametrize.cached():
            graphed(x)
        graphed(x)
    assert graphed.statistics.captures == 2
    assert not graphed.statistics.eager


@torch.no_grad()
def test_a_block_inside_of_the_call_is_part_of_it(device: torch.device) -> None:
    mine, eager, x = both("weight norm", device)

    def twice(model: nn.Module) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            with parametrize.cached():
                return model(model(x))

        return call

    graphed = gw.graph(twice(mine.eval()))
    for _ in range(3):
        check(graphed, twice(eager.eval()), x)
        scale(mine, eager)
    assert graphed.statistics.captures == 1
    assert not parametrize._cache


def test_a_step_that_opens_a_block_is_captured(device: torch.device) -> None:
    def step_of(model: nn.Module) -> tuple[Callable[..., Any], torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with parametrize.cached():
                loss = model(x).sum() + model(x * 2).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step, optimizer

    mine, eager, x = both("weight norm", device)
    (my_step, optimizer), (its, _) = step_of(mine), step_of(eager)
    graphed = gw.graph_step(my_step, (x,), optimizer=optimizer)
    for _ in range(4):
        torch.testing.assert_close(graphed(x), its(x).detach())
    assert graphed.statistics.replays == 4


@eager_inside
def test_a_step_inside_of_a_block_is_eager(device: torch.device) -> None:
    def step_of(model: nn.Module) -> tuple[Callable[..., Any], torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step, optimizer

    mine, eager, x = both("weight norm", device)
    (my_step, optimizer), (its, _) = step_of(mine), step_of(eager)
    graphed = gw.graph_step(my_step, (x,), optimizer=optimizer)
    for _ in range(2):
        torch.testing.assert_close(graphed(x), its(x).detach())
    for _ in range(2):
        with parametrize.cached():
            torch.testing.assert_close(graphed(x), its(x).detach())
    torch.testing.assert_close(graphed(x), its(x).detach())


def test_what_is_captured_alone_is_refused_in_a_block(device: torch.device) -> None:
    mine, _, x = both("weight norm", device)
    mine.eval()
    with parametrize.cached():
        mine(x)
        kept = dict(parametrize._cache)
        for make in (
            lambda: gw.capture(mine, x),
            lambda: gw.make_graphed_callables(mine, (x,)),
            lambda: gw.tune(mine, (x,), remember=False),
        ):
            with pytest.raises(gw.GraphwrightError, match=r"parametrize\.cached"):
                make()
        assert parametrize._cache == kept
    captured = gw.capture(mine, x)
    with parametrize.cached(), pytest.raises(gw.SignatureError, match=r"parametrize\.cached"):
        captured(x)


@pytest.mark.filterwarnings("ignore:.*runs eagerly:graphwright.FallbackWarning")
def test_pairs_inside_of_a_block_are_eager_s(device: torch.device) -> None:
    mine, eager, x = both("weight norm", device)
    graphed = gw.make_graphed_callables(mine, (x,))

    def gradients(call: Callable[..., Any], model: nn.Module) -> list[torch.Tensor | None]:
        model.zero_grad()
        with parametrize.cached():
            (call(x) + call(x)).pow(2).sum().backward()
        return [weight.grad for weight in model.parameters()]

    for _ in range(2):
        expected = gradients(eager, eager)
        torch.testing.assert_close(gradients(graphed, mine), expected)
        scale(mine, eager)
