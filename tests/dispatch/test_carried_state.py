"""Attributes that a forward reads before it sets them: graphs are given what they hold."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphwright as gw
from graphwright.dispatch import payoff
from graphwright.evaluation import clock

SIZE = 4


class Recurrent(nn.Module):
    """Has a state of its own; subclasses say how it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class LastHidden(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.h: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.zeros_like(x) if self.h is None else self.h
        self.h = torch.tanh(self.linear(x) + h)
        return self.h * 2, self.h


class Created(Recurrent):
    """Its first call makes the attribute."""

    def forward(self, x: torch.Tensor) -> Any:
        before = getattr(self, "h", None)
        self.h = self.linear(x) if before is None else self.linear(x) + before
        return self.h * 2


class Pair(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(2, SIZE), {"c": torch.ones(2, SIZE)}

    def forward(self, x: torch.Tensor) -> Any:
        h, more = self.state
        c = torch.sigmoid(self.linear(x)) * more["c"]
        self.state = h + c, {"c": c}
        return h.sum(1), c


class Average(Recurrent):
    """A buffer that is bound again."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> Any:
        self.mean = self.mean * 0.5 + x.mean(0)
        return self.linear(x) - self.mean


class Exchanged(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"a": torch.zeros(2, SIZE), "b": torch.ones(2, SIZE)}

    def forward(self, x: torch.Tensor) -> Any:
        self.held["a"], self.held["b"] = self.held["b"], self.held["a"] + self.linear(x)
        return self.held["a"] * 1


class Delayed(Recurrent):
    """Keeps a view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(2, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        before, self.before = self.before, x[:, :SIZE]
        return self.linear(before) + x


class InPlace(Recurrent):
    """Writes to what it has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(2, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        before = self.h.mul_(0.5)
        self.h = before + self.linear(x)
        return before + 1


@dataclasses.dataclass
class State:
    h: Any
    steps: list[Any]


class Object(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.state = State(torch.zeros(2, SIZE), [torch.ones(2, SIZE)])

    def forward(self, x: torch.Tensor) -> Any:
        self.state = State(self.state.h + self.linear(x), [self.state.steps[0] + self.state.h])
        return self.state.h * 1


class AttributeOfAnObject(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.state = State(torch.zeros(2, SIZE), [])

    def forward(self, x: torch.Tensor) -> Any:
        self.state.h = self.state.h + self.linear(x)
        return self.state.h * 1


class Stack(nn.Module):
    """One of its parts is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([LastHidden(), LastHidden()])

    def forward(self, x: torch.Tensor) -> Any:
        for n in (0, 1, 0):
            x = self.parts[n](x)[0]
        return x


class Branching(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(2, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        self.h = self.h + self.linear(x)
        if (self.h.sum() > 0).item():
            self.h = self.h * 0.5
        return self.h - 1


class Beside(Recurrent):
    """One attribute is only set, another counts."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(2, SIZE)
        self.last: Any = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.linear(x)
        self.h = self.h + self.last
        self.calls += 1
        return self.h * 2


KINDS: list[type[nn.Module]] = [
    LastHidden, Created, Pair, Average, Exchanged, Delayed, InPlace, Object, AttributeOfAnObject,
    Stack, Branching, Beside,
]  # fmt: skip


def attributes(module: nn.Module) -> dict[str, Any]:
    """What the module and its parts hold, weights and parts aside."""
    found = {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in (vars(part) | part._buffers).items()
        if name[0] != "_"
    }
    return dict(sorted(found.items()))


def alike(mine: Any, its: Any) -> None:
    """Compare types, order, values and what shares memory with what."""
    assert type(mine) is type(its)
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, its)
        assert mine.stride() == its.stride()
    elif isinstance(mine, dict):
        assert list(mine) == list(its)
        for key in mine:
            alike(mine[key], its[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(its)
        for a, b in zip(mine, its, strict=True):
            alike(a, b)
    elif isinstance(mine, State):
        alike(vars(mine), vars(its))
    else:
        assert mine == its


def shared(values: Any) -> list[int]:
    """For each tensor, the first one with the same memory."""
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
    memory = [each.untyped_storage().data_ptr() for each in tensors]
    return [memory.index(each) for each in memory]


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device) for each in value)
    return State(**moved(vars(value), device)) if isinstance(value, State) else value


def start(module: nn.Module, device: torch.device) -> None:
    """Let a module hold what a new one does."""
    for part, new in zip(module.modules(), type(module)().modules(), strict=True):
        for name in [name for name in vars(part) if name[0] != "_" and name != "training"]:
            if name in vars(new):
                setattr(part, name, moved(vars(new)[name], device))
            else:
                delattr(part, name)
        for name, value in new._buffers.items():
            part._buffers[name] = moved(value, device)


def made(kind: type[nn.Module], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """A module and its like."""
    module = kind().eval().to(device)
    start(module, device)
    return module, copy.deepcopy(module)


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_attributes_are_eager_s(kind: type[nn.Module], device: torch.device) -> None:
    module, its = made(kind, device)
    graphed = gw.graph(module)
    held = []
    with torch.no_grad():
        for n in range(12):
            if n == 8:
                start(module, device)
                start(its, device)
            x = torch.randn(2, SIZE + 2, device=device)
            x = x[:, :SIZE] if n < 10 else x[:, :SIZE].contiguous()
            y, expected = graphed(x), its(x)
            alike([y, attributes(module)], [expected, attributes(its)])
            assert shared([x, y, attributes(module)]) == shared([x, expected, attributes(its)])
            held.append((y, copy.deepcopy(expected)))
        for y, expected in held:
            alike(y, expected)
    assert graphed.statistics.hits >= 6, graphed.explain()
    assert "is given" in graphed.explain()


class Growing(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(0, SIZE)

    def forward(self, x: torch.Tensor) -> Any:
        self.rows = torch.cat([self.rows, self.linear(x)])
        return self.rows.sum(0)


class Failing(LastHidden):
    fails = False

    def forward(self, x: torch.Tensor) -> Any:
        made = super().forward(x)
        if self.fails:
            raise ValueError("in the middle")
        return made


def test_a_state_that_grows_is_right_and_captured_by_few_graphs(device: torch.device) -> None:
    module, its = made(Growing, device)
    graphed = gw.graph(module)
    with torch.no_grad():
        for _ in range(60):
            x = torch.randn(1, SIZE, device=device)
            alike(graphed(x), its(x))
            alike(module.rows, its.rows)
    assert graphed.statistics.captures <= 8, graphed.explain()


def test_an_error_leaves_the_state_of_eager(device: torch.device) -> None:
    module, its = made(Failing, device)
    graphed = gw.graph(module)
    x = torch.randn(2, SIZE, device=device)
    with torch.no_grad():
        for _ in range(4):
            alike(graphed(x), its(x))
        module.fails = its.fails = True
        for called in (graphed, its):
            with pytest.raises(ValueError, match="in the middle"):
                called(x)
        alike(module.h, its.h)
        module.fails = its.fails = False
        alike(graphed(x), its(x))


def test_prepared_calls_are_answered_by_graphs_alone(device: torch.device) -> None:
    module, its = made(Pair, device)
    before = copy.deepcopy(attributes(module))
    graphed = gw.graph(module, on_miss="error")
    x = torch.randn(2, SIZE, device=device)
    graphed.prepare([(x,)])
    alike(attributes(module), before)
    with torch.no_grad():
        for _ in range(3):
            alike([graphed(x), attributes(module)], [its(x), attributes(its)])
        with pytest.raises(gw.SignatureError, match="No graph of Pair fits"):
            graphed(x[:1])
    assert graphed.statistics.hits == 3
    assert graphed.statistics.captures == 1
    graphed.release()
    assert graphed.statistics.graphs == 0
    assert graphed.statistics.hits == 3


def test_a_copy_goes_on_from_the_same_state_by_itself(device: torch.device) -> None:
    module, its = made(LastHidden, device)
    graphed, x = gw.graph(module), torch.randn(2, SIZE, device=device)
    with torch.no_grad():
        for _ in range(3):
            graphed(x), its(x)
        other = copy.deepcopy(graphed)
        expected = copy.deepcopy(its)
        for _ in range(3):
            alike(graphed(x), its(x))
        for _ in range(3):
            alike(other(x), expected(x))
    assert other.statistics.hits >= 1


def test_training_goes_through_the_state(device: torch.device) -> None:
    module, its = made(LastHidden, device)
    graphed, x = gw.graph(module), torch.randn(2, SIZE, device=device)
    with torch.no_grad():
        for _ in range(4):
            alike(graphed(x), its(x))
    for called, own in ((graphed, module), (its, its)):
        own.train()
        (called(x)[0] + called(x)[0]).sum().backward()
        own.eval()
    alike(module.linear.weight.grad, its.linear.weight.grad)
    assert module.h.requires_grad
    with torch.no_grad():
        module.h, its.h = module.h.detach(), its.h.detach()
        alike(graphed(x), its(x))


def test_another_part_with_a_state_of_its_own(device: torch.device) -> None:
    module, its = made(Stack, device)
    graphed, x = gw.graph(module), torch.randn(2, SIZE, device=device)
    with torch.no_grad():
        for n in range(9):
            if n in (3, 6):
                torch.manual_seed(n)
                module.parts[1] = LastHidden().eval().to(device)
                its.parts[1] = copy.deepcopy(module.parts[1])
            alike([graphed(x), attributes(module)], [its(x), attributes(its)])
    assert graphed.statistics.hits >= 3, graphed.explain()


class Keyword(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(2, SIZE)

    def forward(self, x: torch.Tensor, state: Any = 1.0) -> Any:
        self.h = torch.tanh(self.linear(x) + self.h) * state
        return self.h * 2


def test_an_argument_may_be_called_state(device: torch.device) -> None:
    module, its = made(Keyword, device)
    graphed, x = gw.graph(module), torch.randn(2, SIZE, device=device)
    with torch.no_grad():
        for state in (2.0, 2.0, 2.0, x, x, x):
            alike(graphed(x, state=state), its(x, state=state))
    assert graphed.statistics.hits >= 3


class Holder:
    def __init__(self) -> None:
        self.h: Any = torch.zeros(2, SIZE)


class HoldsAnother(Recurrent):
    """Its state is in an object that others replace."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Holder()

    def forward(self, x: torch.Tensor) -> Any:
        self.held.h = torch.tanh(self.linear(x) + self.held.h)
        return self.held.h * 2


def test_owners_of_the_state_are_replaced_again_and_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphwright.dispatch.graphed_callable.WORTH_CALLS", 0)
    module, its = made(HoldsAnother, device)
    graphed, gone = gw.graph(module), []
    with torch.no_grad():
        for n in range(60):
            if n % 6 == 0:
                gone.append(weakref.ref(module.held))
                for each in (module, its):
                    each.held = Holder()
                    each.held.h = each.held.h.to(device)
            x = torch.randn(2, SIZE, device=device)
            alike(graphed(x), its(x))
            alike(module.held.h, its.held.h)
    assert graphed.statistics.hits >= 20, graphed.explain()
    gc.collect()
    assert sum(each() is not None for each in gone) <= 1


def test_what_is_closed_captures_nothing_more(device: torch.device) -> None:
    module, its = made(LastHidden, device)
    graphed, x = gw.graph(module), torch.randn(2, SIZE, device=device)
    with torch.no_grad():
        for _ in range(6):
            alike(graphed(x), its(x))
        captures = graphed.statistics.captures
        assert captures
        graphed.close()
        for _ in range(6):
            alike(graphed(x), its(x))
    assert graphed.statistics.captures == captures
    assert graphed.statistics.graphs == 0


def test_prepare_goes_on_from_what_calls_leave(device: torch.device) -> None:
    module, its = made(LastHidden, device)
    graphed = gw.graph(module, on_miss="error")
    graphed.prepare([(torch.randn(n, SIZE, device=device),) for n in (2, 3)])
    assert module.h is None
    with torch.no_grad():
        for n in (2, 2, 2, 3, 3, 3):
            if n == 3 and module.h is not None and len(module.h) == 2:
                module.h = its.h = None
            x = torch.randn(n, SIZE, device=device)
            alike([graphed(x), module.h], [its(x), its.h])
    assert graphed.statistics.hits == 6


@pytest.mark.parametrize(("other", "pays"), [(0.5, True), (1.2, False)])
def test_a_state_is_carried_where_that_is_faster(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, other: float, pays: bool
) -> None:
    monkeypatch.setattr("graphwright.dispatch.graphed_callable._TIMED", {"cuda"})
    ticks, now = itertools.cycle([0.0, other, 0.0, 1.0]), [0.0]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            now[0] += next(ticks)
            return now[0]

    monkeypatch.setattr(clock, "time", Clock)
    module, its = made(Pair, device)
    graphed = gw.graph(module)
    with torch.no_grad():
        for _ in range(40):
            x = torch.randn(2, SIZE, device=device)
            alike([graphed(x), attributes(module)], [its(x), attributes(its)])
    eager = graphed.statistics.eager
    assert eager["timed beside calls that are given what others have left"] == payoff._ROUNDS
    assert ("it cannot be captured" in eager) is not pays
    assert (graphed.statistics.hits > 20) is pays
