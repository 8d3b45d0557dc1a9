"""Lists that take the place of others: what is seen without a walk is what a walk sees."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphwright.calls.dependencies import Dependencies, _Exchange
from graphwright.calls.watch import ModuleWatch

PLACES, OBJECTS = 5, [object(), [1], torch.zeros(2)]
Items = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", 0, 1, 0.0, -0.0, True, None, float("nan")]),
        st.integers(0, len(OBJECTS) - 1).map(OBJECTS.__getitem__),
    ),
    max_size=2,
)
# Which of three lists each attribute holds, and the lists; one may hold another.
Patterns = st.lists(st.integers(0, 2), min_size=PLACES, max_size=PLACES)
Contents = st.lists(Items, min_size=3, max_size=3) | Items.map(lambda items: [items] * 3)
Nested = st.sampled_from([(), (0, 1), (1, 2), (0, 1, 2)])


class Holder(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, self.a0, self.a1, self.a2, self.a3, self.a4


# What holds a list, and is no place that somebody can write to.
Holders: dict[str, Any] = {
    "itself": lambda it: it,
    "tuple": lambda it: (1, it),
    "nested tuple": lambda it: ((it, 2), 3),
    "partial": lambda it: functools.partial(print, it),
    "default": lambda it: lambda given=it: given,
    "method": lambda it: types.MethodType(len, it),
    "method in C": lambda it: it.append,
    "error": lambda it: ValueError(it),
}


def put(
    module: nn.Module,
    pattern: list[int],
    lists: list[list[Any]],
    nested: Any,
    held_by: str = "itself",
) -> None:
    for outer, inner in itertools.pairwise(nested):
        lists[outer].append(lists[inner])
    for number, chosen in enumerate(pattern):
        setattr(module, f"a{number}", lists[chosen])
    module.a4 = {"list": module.a4}
    module.a3 = Holders[held_by](module.a3)


def by_walking(watch: ModuleWatch) -> str | None:
    """What a watch says that always walks."""
    with (
        mock.patch.object(Dependencies, "exchange", return_value=False),
        mock.patch.object(Dependencies, "surely_replaced", return_value=None),
    ):
        return watch.changed()


@settings(max_examples=300, deadline=None)
@given(Contents, Patterns, Nested, st.sampled_from(list(Holders)), st.data())
def test_what_is_seen_without_a_walk_is_what_a_walk_sees(
    contents: list[list[Any]],
    pattern: list[int],
    nested: Any,
    held_by: str,
    data: st.DataObject,
) -> None:
    module = Holder()
    put(module, pattern, [[*each] for each in contents], nested, held_by)
    watches = [ModuleWatch(module, values=False) for _ in range(2)]
    for _ in range(2):
        places = st.none() | st.integers(0, PLACES - 1)
        moves = data.draw(st.lists(places, min_size=PLACES, max_size=PLACES) | st.just([]))
        others = data.draw(Patterns | st.just(pattern))
        changed = data.draw(st.just(contents) | Contents)
        before = dict(vars(module))
        inner = data.draw(st.just(nested) | Nested)
        put(module, others, [[*each] for each in changed], inner, held_by)
        if held_by != "itself" and data.draw(st.booleans()):
            module.a3 = before["a3"]
        for number, origin in enumerate(moves):
            if origin is not None:
                setattr(module, f"a{number}", before[f"a{origin}"])
        mine, walked = watches[0].changed(), by_walking(watches[1])
        assert (mine is None) == (walked is None), (mine, walked)
        if mine is not None:
            return
        # Whatever is written to the lists from now on is seen, as it is by the other.
        module.a1.append("new")
        assert watches[0].changed() is not None
        assert by_walking(watches[1]) is not None
        module.a1.pop()
        assert watches[0].changed() is None
        assert by_walking(watches[1]) is None


@pytest.mark.parametrize("held_by", [name for name in Holders if name != "itself"])
def test_a_list_that_something_else_holds_too_is_watched_on(held_by: str) -> None:
    module, others = Holder(), ["a"]
    put(module, [0, 1, 1, 0, 1], [others, ["b"], []], (), held_by)
    watch, walked = (ModuleWatch(module, values=False) for _ in range(2))
    module.a0 = ["a"]
    assert (watch.changed() is None) == (by_walking(walked) is None)
    others[0] = "c"
    assert (watch.changed() is None) == (by_walking(walked) is None)


def test_what_another_thread_writes_meanwhile_is_seen() -> None:
    module = Holder()
    put(module, [0, 1, 1, 1, 1], [["a"], ["b"], []], ())
    watch, complete = ModuleWatch(module, values=False), _Exchange.is_complete

    def written(*args: Any) -> bool:
        found = complete(*args)
        module.a0[0] = "other"
        return found

    module.a0 = ["a"]
    with mock.patch.object(_Exchange, "is_complete", written):
        watch.changed()
    assert watch.changed() is not None


def test_a_list_of_another_place_is_a_change() -> None:
    """It holds the same, but what is written to one is by now written to the other."""
    module = Holder()
    put(module, [0, 1, 2, 2, 2], [["a"], ["a"], []], ())
    watch, walked = (ModuleWatch(module, values=False) for _ in range(2))
    module.a0 = module.a1
    assert watch.changed() is not None
    assert by_walking(walked) is not None


class Layer(nn.Module):
    active: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self.active)


@pytest.mark.parametrize("shared", [False, True])
def test_what_names_an_adapter_is_compared_without_a_walk(shared: bool) -> None:
    """As peft does it: all layers get the same list, or each one of its own."""

    def choose(name: str) -> None:
        names = [f"{name} of {len(name)}"]  # Another object each time.
        for layer in model:
            layer.active = names if shared else [*names]

    model: Any = nn.Sequential(*(Layer() for _ in range(4)))
    choose("a")
    watch = ModuleWatch(model, values=False)
    with mock.patch.object(watch, "_walk", side_effect=AssertionError("it walks")):
        for _ in range(3):
            choose("b")
            assert "changed from 'a of 1' to 'b of 1'" in (watch.changed() or "")
            choose("a")
            assert watch.changed() is None
            assert watch.unchanged()
        model[1].active = [*model[1].active]
        if not shared:
            assert watch.changed() is None
