"""Random trees of objects through graph(): results and effects are those of eager.

A program of random changes runs on the objects that it is given, and returns some of them, some new
ones, and both inside of one another. Sharing, types and identities are compared, not values alone.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import graphwright as gw


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclasses.dataclass
class Record:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = None


class Pair(NamedTuple):
    a: Any
    b: Any = None


class Plain:
    def __init__(self, a: Any, b: Any = None) -> None:
        self.a = a
        self.b = b


class Private:
    __slots__ = ("__a", "__dict__")

    def __init__(self, a: Any, b: Any = None) -> None:
        self.__a = a
        self.b = b

    @property
    def a(self) -> Any:
        return self.__a


class Words(dict[str, Any]):
    """A dictionary with attributes."""

    def __init__(self, a: Any, b: Any = None) -> None:
        super().__init__(a=a)
        self.b = b


class Numbers(list[Any]):
    def __init__(self, a: Any, b: Any = None) -> None:
        super().__init__([a])
        self.b = b


CLASSES: tuple[Callable[..., Any], ...] = (
    Record, Frozen, Slotted, Pair, Plain, Private, Words, Numbers,
    lambda a, b=None: types.SimpleNamespace(a=a, b=b),
    lambda a, b=None: [a, b],
    lambda a, b=None: (a, b),
    lambda a, b=None: {"a": a, "b": b},
    lambda a, b=None: OrderedDict(a=a, b=b),
    lambda a, b=None: deque([a, b]),
)  # fmt: skip
WITH_B = (Record, Slotted, Plain, Private, Words, Numbers, types.SimpleNamespace)
PLAIN = (None, True, 1, 2.5, -0.0, "word", Mode.FAST, Mode.SLOW, torch.float32, {1, 2}, Record)


@st.composite
def plans(draw: st.DrawFn) -> Any:
    """How a tree is built: a list of steps, each of which may use what came before it."""
    steps: list[tuple[Any, ...]] = [("tensor", 3)]
    for _ in range(draw(st.integers(1, 8))):
        earlier = st.integers(0, len(steps) - 1)
        steps.append(
            draw(
                st.one_of(
                    st.tuples(st.just("tensor"), st.integers(1, 3)),
                    st.tuples(st.just("view"), earlier),
                    st.tuples(st.just("plain"), st.integers(0, len(PLAIN) - 1)),
                    st.tuples(
                        st.just("object"), st.integers(0, len(CLASSES) - 1), earlier, earlier
                    ),
                    st.tuples(
                        st.just("object"), st.integers(0, len(CLASSES) - 1), earlier, earlier
                    ),
                )
            )
        )
    return steps


def built(steps: Any, seed: int, device: torch.device) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    made: list[Any] = []
    for kind, *given_ in steps:
        if kind == "tensor":
            made.append(torch.randn(given_[0], 2, generator=generator).to(device))
        elif kind == "view":
            tensors = [each for each in made if isinstance(each, torch.Tensor)]
            made.append(tensors[given_[0] % len(tensors)][:1])
        elif kind == "plain":
            made.append(copy.copy(PLAIN[given_[0]]))
        else:
            made.append(CLASSES[given_[0]](made[given_[1]], made[given_[2]]))
    return made


changes = st.lists(
    st.tuples(
        st.sampled_from(
            ("set", "set", "new", "append", "store", "remove", "write", "plain", "swap", "move")
        ),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    max_size=5,
)


def objects_in(tree: Any, found: list[Any]) -> list[Any]:
    """All objects and tensors in a tree, in order."""
    if any(tree is each for each in found):
        return found
    if isinstance(tree, torch.Tensor):
        return [*found, tree]
    if isinstance(tree, type | enum.Enum) or not parts_of(tree):
        return [*found, tree] if type(tree) in (list, dict, deque, OrderedDict) else found
    if not isinstance(tree, tuple):  # Whether two places hold one tuple is nobody's business.
        found = [*found, tree]
    for _, part in parts_of(tree):
        found = objects_in(part, found)
    return found


def parts_of(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        found += [(("key", key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple | deque):
        found += [(("at", n), value) for n, value in enumerate(tree)]
    if isinstance(tree, Private):
        found.append((("of", "a"), tree.a))
    if isinstance(tree, Slotted):
        return [(("of", "a"), tree.a), (("of", "b"), tree.b)]
    if hasattr(tree, "__dict__") and not isinstance(tree, type | enum.Enum | torch.Tensor):
        found += [(("of", name), value) for name, value in vars(tree).items()]
    return found


def program(script: Any, ends: Any) -> Callable[..., Any]:
    """A function that changes what it is given by a script, and returns what `ends` selects."""

    def run(x: torch.Tensor, *given_: Any) -> Any:
        y = x * 2
        for how, where, what in script:
            found: list[Any] = []
            for each in given_:
                found = objects_in(each, found)
            targets = [each for each in found if not isinstance(each, torch.Tensor)]
            tensors = [each for each in found if isinstance(each, torch.Tensor)]
            y = y + sum((t.sum() for t in tensors), torch.zeros((), device=x.device))
            tensors = tensors or [y]
            if how == "write":
                tensors[what % len(tensors)].add_(1)
            if not targets:
                continue
            target = targets[where % len(targets)]
            value: Any = y
            if how == "new":
                value = Record([y, y + 1], tensors[what % len(tensors)])
            elif how == "move":
                value = found[what % len(found)]
                if any(target is each for each in objects_in(value, [])):
                    value = y  # It would hold itself.
            elif how == "plain":
                value = PLAIN[what % len(PLAIN)]
            elif how == "swap":
                value = tensors[what % len(tensors)]
            change(target, how, value)
        return ends(y, given_)

    return run


def change(target: Any, how: str, value: Any) -> None:
    if how == "remove":
        if isinstance(target, dict) and target:
            target.popitem()
        elif isinstance(target, list | deque) and target:
            target.pop()
    elif isinstance(target, list | deque) and how in ("append", "new"):
        target.append(value)
    elif isinstance(target, dict) and how in ("store", "new"):
        target["new"] = value
    elif isinstance(target, WITH_B):
        target.b = value


ENDS: tuple[Callable[..., Any], ...] = (
    lambda y, given_: y,
    lambda y, given_: (y, given_[0]),
    lambda y, given_: Record(y, given_[-1]),
    lambda y, given_: [Plain(y, 1), {"all": given_}],
    lambda y, given_: (shared := Plain(y), [shared, shared, y]),
    lambda y, given_: given_[0],
    lambda y, given_: Words(y, Numbers(y, given_[-1])),
)


def assert_alike(mine: Any, its: Any, pairs: dict[int, Any], name: str = "it") -> None:
    """Compare two trees: types, values, and what is the same object as what."""
    if isinstance(its, torch.Tensor):
        assert isinstance(mine, torch.Tensor), name
        torch.testing.assert_close(mine, its, msg=lambda text: f"{name}: {text}")
        return
    assert type(mine) is type(its), name
    if id(its) in pairs:
        assert pairs[id(its)] is mine or isinstance(its, tuple | str | int | float), name
        return
    mine_parts, parts = parts_of(mine), parts_of(its)
    if not parts:
        assert mine == its, name
    if type(its) in (list, dict, Record, Plain, Slotted, deque):
        pairs[id(its)] = mine
    assert [key for key, _ in mine_parts] == [key for key, _ in parts], name
    for (key, a), (_, b) in zip(mine_parts, parts, strict=True):
        assert_alike(a, b, pairs, f"{name}{key}")


def run_case(
    steps: Any, script: Any, places: Any, end: int, device: torch.device
) -> gw.GraphedCallable:
    run = program(script, ENDS[end])
    graphed = gw.graph(run)
    x = torch.ones(2, device=device)
    with torch.no_grad():
        for seed in range(3):
            mine, its = built(steps, seed, device), built(steps, seed, device)
            given_ = [mine[place % len(mine)] for place in places]
            expected = [its[place % len(its)] for place in places]
            if seed == 0:
                # Ahead of time: else the first call with objects is eager.
                graphed.prepare([(x, *built_again(steps, places, device))])
            result, wanted = graphed(x, *given_), run(x, *expected)
            pairs: dict[int, Any] = {}
            assert_alike(given_, expected, pairs, "given")
            assert_alike(result, wanted, pairs, "result")
    return graphed


def built_again(steps: Any, places: Any, device: torch.device) -> list[Any]:
    made = built(steps, 0, device)
    return [made[place % len(made)] for place in places]


@pytest.mark.parametrize(
    "examples",
    [pytest.param(300, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.exhaustive)],
)
@pytest.mark.filterwarnings("ignore")
def test_random_objects(examples: int, device: torch.device) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(), changes, st.lists(st.integers(0, 20), min_size=1, max_size=3),
           st.integers(0, len(ENDS) - 1))  # fmt: skip
    def search(steps: Any, script: Any, places: Any, end: int) -> None:
        graphed = run_case(steps, script, places, end, device)
        assert graphed.statistics.hits == 3

    search()
