"""Lists that code makes anew, holding the same: no change, and no reason to walk again."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from graphwright.calls import watch as watching
from graphwright.calls.watch import ModuleWatch


class Anchors(nn.Module):
    """As torchvision's AnchorGenerator does it: a list that each call makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = [torch.ones(2), torch.full((2,), 2.0)]
        self.nested = [[torch.ones(2)], [torch.zeros(2), 3.0]]
        self.twice = self.cells_again = [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cells = [cell.to(x.device) for cell in self.cells]
        nested = self.nested[0][0] + self.nested[1][0] * self.nested[1][1]
        y: torch.Tensor = x + self.cells[0] + self.cells[1] + nested
        return y + self.twice[0] * self.cells_again[0]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one at each walk."""
    found: list[None] = []
    plain = watching.Dependencies

    def counted(*args: object, **kwargs: object) -> object:
        found.append(None)
        return plain(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(watching, "Dependencies", counted)
    return found


def test_a_list_made_anew_is_no_change_and_needs_no_walk(walks: list[None]) -> None:
    module = Anchors()
    watch = ModuleWatch(module, values=False)
    before = len(walks)
    for _ in range(3):
        module(torch.ones(2))
        assert not watch.unchanged()
        assert watch.changed() is None
        assert watch.unchanged()
    module.nested = [list(part) for part in module.nested]
    assert watch.changed() is None
    assert len(walks) == before


def another_item(module: Anchors) -> None:
    module.cells[1] = torch.ones(2)


def one_item_more(module: Anchors) -> None:
    module.cells.append(torch.ones(2))


def an_inner_list(module: Anchors) -> None:
    module.nested[1][1] = 4.0


def another_list(module: Anchors) -> None:
    module.cells = [module.cells[1], module.cells[0]]


@pytest.mark.parametrize(
    "change", [another_item, one_item_more, an_inner_list, another_list], ids=lambda f: f.__name__
)
def test_changes_of_the_new_list_are_noticed(change: Callable[[Anchors], None]) -> None:
    module = Anchors()
    watch = ModuleWatch(module, values=False)
    module(torch.ones(2))
    module.nested = [list(part) for part in module.nested]
    assert watch.changed() is None
    change(module)
    assert watch.changed() is not None


def test_a_list_in_two_places_is_not_exchanged_in_one_of_them() -> None:
    module = Anchors()
    watch = ModuleWatch(module, values=False)
    module.twice = list(module.twice)
    module.twice[0] = torch.zeros(2)
    assert watch.changed() is not None
    module.twice = module.cells_again
    assert watch.changed() is None
    module.twice = list(module.twice)
    watch.changed()
    module.cells_again[0] = torch.zeros(2)
    assert watch.changed() is not None


def test_one_list_where_there_were_two_is_a_change() -> None:
    module = Anchors()
    shared = module.cells[0]
    module.nested = [[shared], [shared, 3.0]]
    module.cells = [shared]
    module.nested[1] = [shared]
    watch = ModuleWatch(module, values=False)
    one = [shared]
    module.nested = [one, one]
    assert watch.changed() is not None


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns after a few microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_threads_that_look_at_once_agree() -> None:
    module = Anchors()
    watch = ModuleWatch(module, values=False)
    said: list[object] = []

    def look() -> None:
        try:
            for _ in range(200):
                module(torch.ones(2))
                said.append(watch.changed())
        except BaseException as error:
            said.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(said) == {None}
    assert watch.changed() is None
    module.cells[0] = torch.zeros(2)
    assert watch.changed() is not None


FunctionType = types.FunctionType


def names_a_class_of_c(x: torch.Tensor) -> str:
    return FunctionType.__module__ + FunctionType.__name__


class Logged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names_a_class_of_c(x)
        return x * 2


def test_a_class_of_c_that_code_names_is_quick_to_look_at() -> None:
    assert ModuleWatch(Logged(), values=False).unchanged()
