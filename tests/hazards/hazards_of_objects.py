"""Hazards of objects that a call is given, changes and returns."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hazards import any_call_fits, hazard, rand, refused, results_are_copies, same
from torch import nn

import graphwright as gw
from graphwright.calls import objects, split
from graphwright.dispatch import carried_state
from graphwright.graphs import call_spec, captured_call, effects, observed_runs, static_outputs


@dataclasses.dataclass
class Cache:
    """Grows by what it is given, as a language model's does."""

    keys: torch.Tensor
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    scale: float = 1.0

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, x * self.scale])
        self.seen.append(x + 1)
        return self.keys


def step(x: torch.Tensor, cache: Cache) -> Any:
    return cache.update(x).sum(0), cache


def cache_of(*rows: torch.Tensor) -> Cache:
    return Cache(torch.cat(rows))


def prepared(fn: Any, *args: Any, **options: Any) -> Any:
    """What graph() made, with a graph for such calls: the first one with objects is eager."""
    graphed = gw.graph(fn, **options)
    graphed.prepare([args])
    return graphed


# Switches.


def effects_do_not_happen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effects.Outcome, "happen", lambda self, given: self.result)


def objects_stay_static(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        static_outputs.StaticOutputs,
        "build",
        lambda self, leaves, copies, finish=None: self.again(finish),
    )


def objects_are_those_of_the_first_call(patch: pytest.MonkeyPatch) -> None:
    first: list[Any] = []
    found = split.Pattern.split

    def once(self: split.Pattern, args: Any, kwargs: Any) -> split.Split | None:
        made = found(self, args, kwargs)
        if made is None or not any(isinstance(each, Cache) for each in made.objects):
            return made
        first.append(made.objects)
        return split.Split(made.leaves, first[0])

    patch.setattr(split.Pattern, "split", once)


def captures_run_on_the_callers_objects(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    flatten = call_spec.flatten

    def flattened(args: Any, kwargs: Any, **options: Any) -> Any:
        kept[:] = [(args, kwargs)]
        return flatten(args, kwargs, **options)

    patch.setattr(call_spec, "flatten", flattened)
    patch.setattr(call_spec, "unflatten", lambda leaves, spec: kept[0])


def places_are_told_apart(patch: pytest.MonkeyPatch) -> None:
    for module in (objects, split):
        patch.setattr(module, "matters", lambda value: False)


def threads_share_what_they_build_with(patch: pytest.MonkeyPatch) -> None:
    class Shared:
        is_on = False
        given: Any = ()
        shared: dict[int, Any] = {}  # noqa: RUF012  # it is to be shared

    patch.setattr(objects, "_BUILDING", Shared())


# Checks.


@hazard(21, objects_stay_static)
def a_cache_of_call_1_is_right_after_call_2(device: torch.device) -> None:
    a, b = rand(device, 2, 4), rand(device, 2, 4)
    x = rand(device, 1, 4)
    graphed = prepared(step, x, cache_of(a))
    first, second = cache_of(a), cache_of(b)
    result, returned = graphed(x, first)
    graphed(x * 3, second)
    assert returned is first
    same(first.keys, torch.cat([a, x]))
    same(first.seen[0], x + 1)
    same(second.keys, torch.cat([b, x * 3]))
    same(result, torch.cat([a, x]).sum(0))


@hazard(21, effects_do_not_happen)
def a_cache_that_was_passed_in_has_grown(device: torch.device) -> None:
    a, x = rand(device, 2, 4), rand(device, 1, 4)
    graphed = prepared(step, x, cache_of(a))
    cache = cache_of(a)
    for n in range(1, 4):
        graphed(x * n, cache)
    same(cache.keys, torch.cat([a, x, x * 2, x * 3]))
    assert len(cache.seen) == 3


@hazard(21, any_call_fits)
def a_plain_value_of_an_object_counts(device: torch.device) -> None:
    a, x = rand(device, 2, 4), rand(device, 1, 4)
    graphed = prepared(step, x, cache_of(a))
    for scale in (1.0, -2.0, 0.0, -0.0, 1.0):
        cache, its = cache_of(a), cache_of(a)
        cache.scale = its.scale = scale
        result, _ = graphed(x, cache)
        same(result, step(x, its)[0])
        same(cache.keys, its.keys)
        assert str(cache.keys.sum() * scale) == str(its.keys.sum() * scale)


@hazard(21, places_are_told_apart)
def two_objects_share_a_list(device: torch.device) -> None:
    def both(x: torch.Tensor, one: Cache, other: Cache) -> torch.Tensor:
        one.seen.append(x * 2)
        return sum((each.sum() for each in other.seen), torch.zeros((), device=x.device))

    def pair() -> tuple[Cache, Cache]:
        one = Cache(torch.ones(1, device=device), [torch.ones(1, device=device)])
        return one, Cache(torch.ones(1, device=device), one.seen)

    x = rand(device, 3)
    graphed = prepared(both, x, *pair())
    one, other = pair()
    same(graphed(x, one, other), (x * 2).sum() + 1)
    assert one.seen is other.seen
    same(other.seen[-1], x * 2)


@hazard(22, objects_are_those_of_the_first_call)
def an_object_that_the_caller_has_replaced(device: torch.device) -> None:
    a, x = rand(device, 2, 4), rand(device, 1, 4)
    graphed = prepared(step, x, cache_of(a))
    first = cache_of(a)
    graphed(x, first)
    second = cache_of(a * 2)
    _, returned = graphed(x, second)
    assert returned is second
    same(second.keys, torch.cat([a * 2, x]))
    same(first.keys, torch.cat([a, x]))


@hazard(22, captures_run_on_the_callers_objects)
def a_capture_leaves_the_callers_objects_alone(device: torch.device) -> None:
    a, x = rand(device, 2, 4), rand(device, 1, 4)
    cache = cache_of(a)
    prepared(step, x, cache)
    same(cache.keys, a)
    assert cache.seen == []

    def fails(x: torch.Tensor, cache: Cache) -> None:
        cache.keys = x
        raise ValueError("between two effects")

    refused(gw.CaptureError, lambda: gw.capture(fails, x, cache))
    same(cache.keys, a)


@hazard(22, captures_run_on_the_callers_objects)
def an_exception_between_two_effects_leaves_the_first(device: torch.device) -> None:
    def fails(x: torch.Tensor, cache: Cache) -> None:
        cache.seen.append(x)
        if cache.scale > 1:
            raise ValueError("between two effects")
        cache.keys = x * 2

    a, x = rand(device, 2, 4), rand(device, 1, 4)
    graphed = prepared(fails, x, cache_of(a))
    for _ in range(3):
        cache = cache_of(a)
        cache.scale = 2.0
        refused(ValueError, lambda: graphed(x, cache))  # noqa: B023  # called at once
        assert len(cache.seen) == 1
        same(cache.keys, a)
    cache = cache_of(a)
    graphed(x, cache)
    same(cache.keys, x * 2)


@hazard(22, threads_share_what_they_build_with)
def threads_have_objects_of_their_own(device: torch.device) -> None:
    a, x = rand(device, 2, 4), rand(device, 1, 4)
    graphed = prepared(step, x, cache_of(a))
    caches = [cache_of(a * n) for n in range(2)]
    both = threading.Barrier(2)
    returned: dict[int, Any] = {}
    giving = captured_call.giving

    @contextlib.contextmanager
    def meeting(given: Any) -> Iterator[None]:
        with giving(given):
            both.wait(20)
            yield
            both.wait(20)

    def call(n: int) -> None:
        returned[n] = graphed(x, caches[n])[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_call, "giving", meeting)
        threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for n, cache in enumerate(caches):
        assert returned[n] is cache
        same(cache.keys, torch.cat([a * n, x]))


# Attributes that forward sets.


class Keeps(nn.Module):
    """Keeps a view of its input, what it computed in a list, and one thing more in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first: Any = None
        self.levels: list[torch.Tensor] = []
        self.table: dict[str, Any] = {"mean": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.first = x[:1]
        self.levels = [y]
        self.levels.append(y * 2)
        self.table["mean"] = y.mean(0)
        return y + self.levels[1]


def pair_of(make: Any, device: torch.device) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make().eval().to(device)
    return model, copy.deepcopy(model)


def calls_are_not_tried_without_what_they_set(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(observed_runs.ObservedRuns, "find_written", lambda *given: None)


@hazard(21, objects_stay_static)
def attributes_of_call_1_are_right_after_call_2(device: torch.device) -> None:
    model, its = pair_of(Keeps, device)
    graphed = gw.graph(model)
    with torch.no_grad():
        graphed(rand(device, 2, 4))
        x = rand(device, 2, 4)
        graphed(x)
        its(x)
        held = model.levels, model.table["mean"], model.first
        graphed(x * 3)
    assert graphed.statistics.hits == 3
    assert graphed.statistics.captures == 1
    for mine, other in zip(held[0], its.levels, strict=True):
        same(mine, other)
    same(held[1], its.table["mean"])
    same(held[2], its.first)


@hazard(22, effects_do_not_happen)
def attributes_are_what_eager_leaves(device: torch.device) -> None:
    model, its = pair_of(Keeps, device)
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(3):
            x = rand(device, 2, 4)
            same(graphed(x), its(x))
            assert type(model.levels) is list
            for mine, other in zip(model.levels, its.levels, strict=True):
                same(mine, other)
            same(model.table["mean"], its.table["mean"])
    assert graphed.statistics.hits == 3


@hazard(22, results_are_copies)
def an_attribute_is_a_view_of_an_input(device: torch.device) -> None:
    model, _ = pair_of(Keeps, device)
    graphed = gw.graph(model)
    with torch.no_grad():
        for _ in range(2):
            x = rand(device, 2, 4)
            graphed(x)
            x.fill_(7.0)
            same(model.first, torch.full((1, 4), 7.0, device=device))


@hazard(22, calls_are_not_tried_without_what_they_set)
def an_attribute_that_the_caller_gave_another_kind_of_value(device: torch.device) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            twice = self.last is not None and self.last.dim() == 1
            self.last = x + 1
            return x * 2 if twice else x * 1

    model, its = pair_of(Branches, device)
    graphed = gw.graph(model)
    with torch.no_grad():
        for value in (None, None, torch.ones(3, device=device), None):
            x = rand(device, 2, 4)
            if value is not None:
                model.last = its.last = value
            same(graphed(x), its(x))
            same(model.last, its.last)


# Attributes that forward reads before it sets them.


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(2, 4))
        self.before: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before, self.h = self.h, torch.tanh(self.linear(x) + self.h)
        return self.h * 2


def graphed_after_two_calls(model: nn.Module, its: nn.Module, device: torch.device) -> Any:
    graphed = gw.graph(model)
    for _ in range(3):
        x = rand(device, 2, 4)
        same(graphed(x), its(x))
    assert graphed.statistics.hits >= 1
    return graphed


def state_is_what_it_was_at_first(patch: pytest.MonkeyPatch) -> None:
    leave = carried_state.CarriedState._leave
    first: list[Any] = []

    def once(self: Any, values: Any) -> None:
        first.append(values)
        leave(self, first[0])

    patch.setattr(carried_state.CarriedState, "_leave", once)


def state_is_left_nowhere(patch: pytest.MonkeyPatch) -> None:
    def call(self: Any, answer: Any, args: Any, kwargs: Any) -> Any:
        return answer((*self.held(), *args), kwargs)[0]

    patch.setattr(carried_state.CarriedState, "call", call)


def state_is_that_of_the_first_call(patch: pytest.MonkeyPatch) -> None:
    """As if it were enough not to watch what changes."""

    def call(self: Any, answer: Any, args: Any, kwargs: Any) -> Any:
        first = vars(self).setdefault("first", self.held())
        result, left = answer((*first, *args), kwargs)
        self._leave(left)
        return result

    patch.setattr(carried_state.CarriedState, "call", call)


@hazard(21, state_is_left_nowhere)
def each_call_goes_on_from_the_last(device: torch.device) -> None:
    model, its = pair_of(Recurs, device)
    with torch.no_grad():
        graphed = graphed_after_two_calls(model, its, device)
        for _ in range(3):
            x = rand(device, 2, 4)
            same(graphed(x), its(x))
            same(model.h, its.h)
            same(model.before, its.before)


@hazard(22, state_is_that_of_the_first_call)
def the_caller_sets_the_state_anew(device: torch.device) -> None:
    model, its = pair_of(Recurs, device)
    with torch.no_grad():
        graphed = graphed_after_two_calls(model, its, device)
        for n in range(3):
            start = rand(device, 2, 4) * n
            model.h, its.h = start, start.clone()
            x = rand(device, 2, 4)
            same(graphed(x), its(x))
            same(model.before, its.before)
            assert model.before is start


@hazard(21, objects_stay_static)
def a_state_of_call_1_is_right_after_call_2(device: torch.device) -> None:
    model, its = pair_of(Recurs, device)
    with torch.no_grad():
        graphed = graphed_after_two_calls(model, its, device)
        x = rand(device, 2, 4)
        graphed(x)
        its(x)
        held, expected = model.h, its.h.clone()
        graphed(x * 3)
        same(held, expected)


@hazard(22, state_is_what_it_was_at_first)
def captures_leave_the_state_as_it_was(device: torch.device) -> None:
    model, its = pair_of(Recurs, device)
    graphed = gw.graph(model)
    x = rand(device, 2, 4)
    with torch.no_grad():
        for _ in range(2):
            model.h, its.h = x, x.clone()
            same(graphed(x), its(x))
        start = rand(device, 2, 4)
        model.h, its.h = start, start.clone()
        graphed.release()
        graphed.prepare([(x,)])
        assert model.h is start
        same(graphed(x), its(x))
        same(model.h, its.h)
