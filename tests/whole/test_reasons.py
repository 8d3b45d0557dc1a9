"""docs/reference/reasons.md: why calls are eager. All makers say the same of the same condition."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from torch import nn
from torch.autograd import forward_ad

import graphwright as gw
from graphwright.dispatch.decision import (
    CAPTURED,
    CHANGED,
    CLOSED,
    GRADIENTS,
    TRANSFORMED,
    UNFITTING,
    UNPAID,
)
from graphwright.graphs.conditions import as_captured

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reasons.md"
X = torch.linspace(-1, 1, 32).view(4, 8)
# More kinds of calls than are waited for before a caller is told that captures do not pay off.
MANY = 48
# Where a call is not eager, and where there is no such thing.
ANSWERED, NONE = "answered", "–"
# What the model itself does with such a call.
AS_THE_MODEL = "raises as the model does"
# What holds for one maker alone.
OWN = {
    "above the largest bucket",
    "max_kinds=1 allows no more kinds of calls to be fused",
    "many kinds of calls are fused, and one more only when it comes again",
    "another signature",
    "an argument requires grad",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.first(x) * scale).relu().exp().sum(-1)


@dataclass
class Made:
    """What a maker made, the model inside, and why its calls were eager so far."""

    part: Any
    model: nn.Module
    eager: Callable[[], dict[str, int]]


def _of_calls(part: Any) -> Callable[[], dict[str, int]]:
    def eager() -> dict[str, int]:
        found = part.calls.items()
        return {why.removeprefix("eager: "): n for why, n in found if why.startswith("eager: ")}

    return eager


def graph(model: nn.Module, on_miss: str) -> Made:
    part: Any = gw.graph(model, on_miss=on_miss)  # type: ignore[arg-type]  # one of its words
    part.prepare([(X,)])
    return Made(part, model, lambda: part.statistics.eager)


def buckets(model: nn.Module, on_miss: str) -> Made:
    part: Any = gw.graph(model, on_miss=on_miss, buckets=gw.Buckets(batch=[2, 4]))  # type: ignore[arg-type]  # one of its words
    part.prepare([(X,)])
    return Made(part, model, lambda: part.statistics.eager)


def fuse(model: nn.Module, on_miss: str) -> Made:
    part: Any = gw.fuse(model, (X,), max_kinds=1 if on_miss == "eager" else 64)
    return Made(part, model, _of_calls(part))


def tune(model: nn.Module, on_miss: str) -> Made:
    name = "torchscript:freeze"
    with choosing(name):
        part: Any = gw.tune(model, (X,), strategies=[name], isolate=False, remember=False)
    return Made(part, model, _of_calls(part))


def load(model: nn.Module, on_miss: str) -> Made:
    with tempfile.TemporaryDirectory() as folder:
        gw.save(tune(model, on_miss).part, Path(folder) / "model.gw")
        part: Any = gw.load(Path(folder) / "model.gw", model, trust=True)
    return Made(part, model, _of_calls(part))


def make_graphed_callables(model: nn.Module, on_miss: str) -> Made:
    part: Any = gw.make_graphed_callables(model, (X,), on_miss=on_miss)  # type: ignore[call-overload]  # one of its words
    return Made(part, model, lambda: part.forward.statistics.eager)


def graph_step(model: nn.Module, on_miss: str) -> Made:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x, scale).sum()
        loss.backward()
        optimizer.step()
        return loss

    part: Any = gw.graph_step(step, X, optimizer=optimizer, on_miss=on_miss)  # type: ignore[arg-type]  # one of its words
    return Made(part, model, lambda: part.statistics.eager)


MAKERS = (graph, buckets, fuse, tune, load, make_graphed_callables, graph_step)


def closed(made: Made) -> None:
    made.part.close()
    made.part(X)


def _inside(around: Callable[[], AbstractContextManager[Any]], made: Made) -> None:
    with around():
        made.part(X)


def vmap(made: Made) -> None:
    torch.vmap(made.part)(X[None])


def functional_grad(made: Made) -> None:
    torch.func.grad(lambda x: made.part(x).sum())(X)


def wants_gradients(made: Made) -> None:
    with torch.enable_grad():
        made.part(X.clone().requires_grad_())


def changed(made: Made) -> None:
    weight, made.model.first.weight = made.model.first.weight, nn.Parameter(torch.eye(8))  # type: ignore[union-attr]  # its first layer
    try:
        made.part(X)
    finally:
        made.model.first.weight = weight  # type: ignore[union-attr]  # its first layer


def another_shape(made: Made) -> None:
    made.part(torch.cat([X, X]))


def another_device(made: Made) -> None:
    made.part(X.to("meta"))


def too_many_kinds(made: Made) -> None:
    for n in range(MANY):
        made.part(X, 2.0 + n)


@dataclass(frozen=True)
class Condition:
    """What is different about a call, and what is to be done with one that was not prepared."""

    name: str
    meet: Callable[[Made], None]
    # What all makers say whose calls are eager then.
    says: tuple[str, ...]
    on_miss: str = "capture"


CONDITIONS = (
    Condition("it was closed", closed, (CLOSED,)),
    Condition("in a capture", functools.partial(_inside, as_captured), (CAPTURED,)),
    Condition("in `torch.vmap`", vmap, (TRANSFORMED,)),
    Condition("in `torch.func.grad`", functional_grad, (TRANSFORMED,)),
    Condition("in forward AD", functools.partial(_inside, forward_ad.dual_level), (TRANSFORMED,)),
    Condition("gradients are wanted", wants_gradients, (GRADIENTS,)),
    # Of graphs there may be one for the module as it is.
    Condition("the module changed", changed, (CHANGED, UNFITTING), "eager"),
    Condition("another shape", another_shape, (UNFITTING,), "eager"),
    Condition("another device", another_device, ()),
    Condition("no call is like another", too_many_kinds, (UNPAID,)),
)


@functools.cache
def _tuned(maker: Callable[[nn.Module, str], Made]) -> Made:
    """To tune takes seconds, and what these conditions change is put back."""
    return maker(Net().eval(), "capture")


def _error(made: Made, condition: Condition) -> Exception | None:
    """The error of a call under a condition."""
    try:
        condition.meet(made)
    except Exception as error:
        return error
    return None


def outcome(maker: Callable[[nn.Module, str], Made], condition: Condition) -> str:
    """What comes of a call under a condition, as the page has it."""
    tuned = maker in (tune, load)
    made = _tuned(maker) if tuned else maker(Net().eval(), condition.on_miss)
    if condition.meet is closed and not callable(getattr(made.part, "close", None)):
        return NONE
    made.part(X)
    before = Counter(made.eager())
    error = _error(made, condition)
    if isinstance(error, gw.GraphwrightError):
        return f"raises {type(error).__name__}"
    if error is not None:
        itself = _error(Made(made.model, made.model, dict), condition)
        assert (type(error), str(error)) == (type(itself), str(itself))
        return AS_THE_MODEL
    found = Counter(made.eager()) - before
    return found.most_common(1)[0][0] if found else ANSWERED


def documented() -> dict[str, dict[str, str]]:
    """The table of the page, by condition and maker."""
    parts = PAGE.read_text("utf-8").split("\n\n")
    table = next(part for part in parts if part.startswith("|"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    makers = [name.strip("`") for name in rows[0][1:]]
    return {name: dict(zip(makers, cells, strict=True)) for name, *cells in rows[2:]}


def cases() -> list[object]:
    """Each maker under each condition; to save and load once more shows little."""
    return [
        pytest.param(maker, condition, marks=[pytest.mark.slow] * (maker is load))
        for maker in MAKERS
        for condition in CONDITIONS
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("maker", "condition"), cases())
def test_why_calls_are_eager(
    maker: Callable[[nn.Module, str], Made], condition: Condition, clock: Any
) -> None:
    clock.capture_s = 1.0
    with torch.no_grad():
        found = outcome(maker, condition)
    assert found == documented()[condition.name][maker.__name__]


@pytest.mark.parametrize("maker", [graph, make_graphed_callables, graph_step])
def test_each_kind_is_told_of_once_in_the_same_words(
    maker: Callable[[nn.Module, str], Made],
) -> None:
    made = maker(Net().eval(), "eager")
    says = rf"runs eagerly for this kind of call, since {UNFITTING}: .* \(8, 8\).* count"
    with torch.no_grad():
        made.part(X)
        with pytest.warns(gw.FallbackWarning, match=says):
            another_shape(made)
        another_shape(made)  # A second warning would be an error.


def test_all_makers_say_the_same_of_the_same() -> None:
    for condition in CONDITIONS:
        cells = documented()[condition.name]
        said = {cell for cell in cells.values() if cell not in (ANSWERED, NONE, AS_THE_MODEL)}
        said = {cell for cell in said if not cell.startswith("raises ")}
        assert said - OWN == {*condition.says}, condition.name


def test_the_page_has_each_maker_and_each_condition() -> None:
    makers = [maker.__name__ for maker in MAKERS]
    assert list(documented()) == [condition.name for condition in CONDITIONS]
    assert all(list(cells) == makers for cells in documented().values())
