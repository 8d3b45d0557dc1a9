"""Calls with effects that the host has a say in: objects and attributes, in segments."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.snapshots import same_bits


@dataclass
class Box:
    seen: list[Any] = field(default_factory=list)
    last: Any = None


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Without gradients and warnings of eager calls."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gw.FallbackWarning)
        yield


class Model(nn.Module):
    """Does something with itself and a box that it is given."""

    def __init__(self, does: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.does = does
        self.last: Any = None
        self.pair: Any = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        return self.does(self, x, box)


def sets(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    y: torch.Tensor = self.linear(x)
    if x.sum() > 0:
        self.last = y * 2
        return y
    self.last = y - 1
    return y + self.last


def sets_before(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    self.last = self.linear(x)
    return self.last * 2 if x.sum() > 0 else self.last - 1


def sets_a_view(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    self.last = x[1:]
    return x * 2 if x.sum() > 0 else x - 1


def reads_on_one_path(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    if x.sum() > 0:
        self.last = x * 2
        return x
    result = x * 3 if self.last is None else x + self.last
    self.last = x * 4
    return result


def asks_on_one_path(self: Model, x: torch.Tensor, box: Any) -> Any:
    if x.sum() > 0:
        self.last = x * 2
        return x, True
    known = getattr(self, "last", None) is not None
    self.last = x * 4
    return x - 1, known


def writes_on_one_path(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    if x.sum() > 0:
        self.last = x * 2
    return x + 1


def writes_another_on_one_path(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    self.last = x * 2
    if x.sum() > 0:
        self.pair = self.last, x - 1
    return x + 1


def appends(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    y = x * 2
    if x.sum() > 0:
        box.seen.append(y)
        box.last = box.seen
    else:
        box.seen.clear()
        box.last = y
    return y + 1


def does_both(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
    box.last = self.last = x * 2
    return x.relu() if x.sum() > 0 else box.last


WAYS = [
    sets,
    sets_before,
    sets_a_view,
    reads_on_one_path,
    asks_on_one_path,
    writes_on_one_path,
    writes_another_on_one_path,
    appends,
    does_both,
]


def alike(mine: Any, its: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(its, torch.Tensor) and same_bits(mine, its)
    if isinstance(mine, list | tuple):
        return type(mine) is type(its) and len(mine) == len(its) and all(map(alike, mine, its))
    return type(mine) is type(its) and mine == its


@pytest.mark.parametrize("first", [1.0, -1.0])
@pytest.mark.parametrize("does", WAYS)
def test_results_and_effects_are_eager_s(does: Any, first: float, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model(does).eval().to(device)
    eager = copy.deepcopy(model)
    graphed = gw.graph(model)
    boxes = (Box(), Box()) if does in (appends, does_both) else (None, None)
    held: list[tuple[Any, Any, Any]] = []
    signs = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0]
    for n, sign in enumerate(signs * 2):
        x = torch.full((3, 4), (n + 1.0) * sign * first, device=device)
        mine, its = graphed(x, boxes[0]), eager(x, boxes[1])
        assert alike(mine, its)
        assert alike(model.last, eager.last)
        assert alike(model.pair, eager.pair)
        if boxes[0] is not None and boxes[1] is not None:
            assert alike(boxes[0].seen, boxes[1].seen)
            same_list = boxes[0].last is boxes[0].seen
            assert same_list == (boxes[1].last is boxes[1].seen)
            assert same_list or alike(boxes[0].last, boxes[1].last)
            if does is does_both:
                assert model.last is boxes[0].last
        if does is sets_a_view:
            assert model.last.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        held.append((mine, copy.deepcopy(its), model.last))
    for mine, its, _ in held:
        assert alike(mine, its)  # No later call has overwritten it.


@pytest.mark.parametrize("does", [sets, sets_before, sets_a_view, does_both, appends])
def test_such_calls_are_answered_by_graphs(does: Any, device: torch.device) -> None:
    model = Model(does).eval().to(device)
    graphed = gw.graph(model)
    given = (Box(),) if does in (appends, does_both) else ()
    for n in range(20):
        if does is appends:
            given = (Box(),)
        graphed(torch.full((3, 4), 1.0 if n % 3 else -1.0, device=device), *given)
    assert graphed.statistics.hits >= 17
    assert "break at" in graphed.explain()


def test_an_error_on_a_new_path_leaves_what_was_done_before_it(device: torch.device) -> None:
    def raises(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
        box.seen.append(x * 2)
        self.last = x * 3
        if x.sum() < 0:
            box.last = x
            raise ValueError("below zero")
        return x + 1

    model = Model(raises).eval().to(device)
    graphed, box = gw.graph(model), Box()
    x = torch.ones(3, 4, device=device)
    for _ in range(3):
        graphed(x, Box())
    hits = graphed.statistics.hits
    assert hits >= 2
    below = -x
    with pytest.raises(ValueError, match="below zero"):
        graphed(below, box)
    assert box.last is below
    (one,) = box.seen
    torch.testing.assert_close(one, -x * 2)
    torch.testing.assert_close(model.last, -x * 3)
    torch.testing.assert_close(graphed(x, Box()), x + 1)


def test_static_outputs_take_no_effects_on_a_new_path(device: torch.device) -> None:
    def later(self: Model, x: torch.Tensor, box: Any) -> torch.Tensor:
        if x.sum() < 0:
            box.last = x * 2
        return x + 1

    model = Model(later).eval().to(device)
    graphed = gw.graph(model, outputs="static")
    for _ in range(3):
        graphed(torch.ones(2, device=device), Box())
    boxes = []
    for n in range(1, 5):
        boxes.append(Box())
        graphed(torch.full((2,), -float(n), device=device), boxes[-1])
    for n, box in enumerate(boxes, 1):
        torch.testing.assert_close(box.last, torch.full((2,), -2.0 * n, device=device))


@pytest.mark.parametrize("does", [sets, does_both, reads_on_one_path])
def test_nothing_is_left_in_the_pool_after_close(does: Any, device: torch.device) -> None:
    graphed = gw.graph(Model(does).eval().to(device))
    gc.collect()
    gc.disable()
    try:
        for n in range(8):
            box = Box() if does is does_both else None
            graphed(torch.full((3, 4), (-1.0) ** n, device=device), box)
        graphed.close()
        assert graphed.pool.in_use == 0
    finally:
        gc.enable()


class Notes(nn.Module):
    """Keeps what it read as a plain value, which other calls go by."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.items = "", {"hot": False}

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "note":
            self.kind = "up" if x.sum() > 0 else "down"
            self.items["hot"] = bool(x.sum() > 0)
            return x + 1
        return x * (2 if self.kind == "up" else 3) * (5 if self.items["hot"] else 7)


def test_plain_values_that_a_path_leaves_are_those_of_each_call(device: torch.device) -> None:
    dice = random.Random(3)
    model, plain = Notes().eval(), Notes().eval()
    graphed = gw.graph(model)
    for _ in range(60):
        x = torch.full((4,), dice.choice((-1.0, 1.0)), device=device)
        how = dice.choice(("note", "use"))
        assert torch.equal(graphed(x, how), plain(x, how))
        assert (model.kind, model.items) == (plain.kind, plain.items)
    assert graphed.statistics.hits > 10
