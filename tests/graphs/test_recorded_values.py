"""What is recorded, what runs it, and what the recording gives: values with tests of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import graphwright as gw
from graphwright.graphs.call_spec import CallSpec
from graphwright.graphs.call_work import CallWork
from graphwright.graphs.captured_call import CapturedCall
from graphwright.graphs.effects import Outcome
from graphwright.graphs.graph import GraphClosed
from graphwright.graphs.static_inputs import CopyPlan, StaticInputs


def spec_of(fn: Any, *args: Any, fresh: bool = True, **kwargs: Any) -> tuple[CallSpec, list[Any]]:
    return CallSpec.of(
        fn,
        args,
        kwargs,
        gw.MemoryPool(),
        objects=True,
        warmup=1,
        fresh=fresh,
        may_divide=False,
        may_look=True,
        streams=1,
        trusted=False,
    )


def inputs_of(sample: list[Any], device: torch.device) -> StaticInputs:
    return StaticInputs(
        sample, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
    )


def grows(items: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    items.append(x + 1)
    return x * 2


def test_a_spec_makes_the_arguments_again(device: torch.device) -> None:
    x, y = torch.ones(2, device=device), torch.zeros(3, device=device)
    spec, leaves = spec_of(grows, [x], y, scale={"of": y})
    args, kwargs = spec.arguments(leaves)
    assert args[0][0] is x
    assert args[1] is y
    assert kwargs["scale"]["of"] is y
    assert spec.name == "grows(2, 3, 3)"
    assert spec.device.type == device.type
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.fresh = False  # type: ignore[misc]  # it is frozen


def test_a_spec_tells_whether_leaves_are_the_arguments(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    assert spec_of(torch.add, x, x)[0].is_plain
    assert not spec_of(torch.add, x, other=x)[0].is_plain
    assert not spec_of(torch.cat, [x, x])[0].is_plain
    assert not spec_of(torch.add, x, x)[0].holds_objects
    assert spec_of(torch.cat, [x, x])[0].holds_objects


def test_one_spec_is_recorded_as_often_as_asked(device: torch.device) -> None:
    x = torch.arange(3.0, device=device)
    spec, leaves = spec_of(torch.neg, x)
    made = [CapturedCall.of(spec, leaves, gw.MemoryPool()) for _ in range(2)]
    for graph in made:
        graph.warm()
        graph.record()
    first, second = made
    assert first.recorded.inputs is not second.recorded.inputs
    first.close()
    assert torch.equal(second(x + 1), -(x + 1))
    with pytest.raises(GraphClosed):
        _ = first.recorded


def test_what_is_recorded_again_leaves_the_first_recording_alone(device: torch.device) -> None:
    x = torch.arange(3.0, device=device)
    with gw.capture(torch.neg, x) as graph:
        assert isinstance(graph, CapturedCall)
        before = graph.recorded
        with graph.recorded_again(leaves=[x + 5]) as twin:
            assert twin.spec.trusted
            twin.replay()
            assert torch.equal(twin.outputs, -(x + 5))
            assert twin.pool is not graph.pool
        assert twin.pool.closed
        assert graph.recorded is before
        assert torch.equal(graph(x), -x)


def test_a_run_tells_what_it_does_to_objects(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    spec, leaves = spec_of(grows, [x], x)
    work = CallWork(spec)
    made = work(inputs_of(leaves, device))
    assert work.has_effects
    assert isinstance(made, Outcome)
    given: list[torch.Tensor] = [x]
    assert torch.equal(made.happen([given]), x * 2)
    assert torch.equal(given[1], x + 1)
    assert isinstance(work.effects_so_far(), Outcome)


def test_static_results_of_a_recorded_call_have_no_effects(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    spec, leaves = spec_of(grows, [x], x, fresh=False)
    work = CallWork(spec)
    work(inputs_of(leaves, device))
    work.answers = True
    with pytest.raises(gw.CaptureError, match="outputs='static'"):
        work(inputs_of(leaves, device))


def test_a_run_that_gives_an_argument_another_shape_is_refused(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    spec, leaves = spec_of(lambda x: x.unsqueeze_(0) + 1, x)
    with pytest.raises(gw.CaptureError, match="changes the shape or memory"):
        CallWork(spec)(inputs_of(leaves, device))


@pytest.mark.parametrize("fresh", [True, False])
def test_arguments_that_are_written_to_are_copied_back(fresh: bool, device: torch.device) -> None:
    dense, gaps = torch.ones(4, device=device), torch.ones(4, 64, device=device)[:, 0]
    plan = CopyPlan.of(inputs_of([dense, gaps], device), (0, 1), fresh=fresh)
    assert plan.sources == [0]
    assert plan.by_element == [1]
    # The caller's own tensors are among what is copied out only where results are.
    assert plan.back == ([0] if fresh else [])
    assert plan.back_by_element == ([1] if fresh else [0, 1])


def test_many_arguments_that_are_written_to_are_copied_by_one_kernel(device: torch.device) -> None:
    caches = [torch.rand(2, 4, device=device).half() for _ in range(5)]
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    odd = [torch.zeros(3, dtype=torch.bool, device=device), torch.rand(4, 3, device=device)]
    read, inputs = torch.rand(4, device=device), [*caches, *counts, *odd]
    every = tuple(range(len(inputs)))
    plan = CopyPlan.of(inputs_of([*inputs, read], device), every, fresh=True, together=True)
    assert plan.together == [*range(7)]
    assert (plan.back, plan.sources) == ([7, 8], [7, 8, 9])
    assert not plan.is_simple
    # Results that are the graph's own, calls in segments, and a few copy each by itself.
    for options in ({"fresh": False, "together": True}, {"fresh": True}):
        assert not CopyPlan.of(inputs_of(inputs, device), every, **options).together
    few = CopyPlan.of(inputs_of(counts, device), (0, 1), fresh=True, together=True)
    assert not few.together


@pytest.mark.parametrize("where", ["plain", "inference", "off a word"])
def test_a_cache_of_many_tensors_is_written_to(where: str, device: torch.device) -> None:
    def step(token: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        for number, each in enumerate(cache):
            each.mul_(number).add_(token)
        return sum(cache[1:], start=cache[0])

    def cache(scale: float, where: str = where) -> list[torch.Tensor]:
        with torch.inference_mode(where == "inference"):
            whole = torch.arange(16.0, device=device).reshape(4, 4) * scale
            others = [torch.rand(17, device=device)[:16] for _ in range(8)]
            if where == "off a word":
                others = [torch.rand(17, device=device)[1:] for _ in range(8)]
            # Some share memory, and one lies otherwise in it.
            return [*(each.view(4, 4) for each in others), *whole, whole.t()]

    def copied(values: list[torch.Tensor]) -> list[torch.Tensor]:
        made = cache(1.0)
        with torch.inference_mode(where == "inference"):
            for one, other in zip(made, values, strict=True):
                one.copy_(other)
        return made

    token = torch.rand(1, device=device)
    with torch.no_grad():
        graph = gw.capture(step, token, cache(1.0, "plain"))
        for scale in (2.0, 3.0):
            mine, token = cache(scale), torch.rand(1, device=device)
            eager = copied(mine)
            with torch.inference_mode(where == "inference"):
                expected = step(token, eager)
            versions = [] if where == "inference" else [each._version for each in mine]
            torch.testing.assert_close(graph(token, mine), expected)
            for one, other in zip(mine, eager, strict=True):
                torch.testing.assert_close(one, other)
            # Autograd has to see these writes.
            assert all(a < b._version for a, b in zip(versions, mine, strict=bool(versions)))
