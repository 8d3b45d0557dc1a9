"""What goes wrong with calls in segments: more of hazards.py, with number 17."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hazards import hazard, rand, same
from torch import nn

import graphwright as gw
from graphwright.graphs import python_state
from graphwright.graphs.segments import observing_tracer as observing
from graphwright.graphs.segments import recording, segment, steps, tracer
from graphwright.shapes import eligibility


def keep_on(graphed: Any, fn: Any, *inputs: torch.Tensor) -> None:
    """Check calls against the function; none of them is eager."""
    for x in inputs:
        same(graphed(x.clone()), fn(x.clone()))
    assert graphed.statistics.eager == {}


def the_first_way_is_always_gone(patch: pytest.MonkeyPatch) -> None:
    run = segment.Break.run

    def blind(self: segment.Break) -> Any:
        key, result = run(self)
        return next(iter(self.after), key), result

    patch.setattr(segment.Break, "run", blind)


@hazard(17, the_first_way_is_always_gone)
def a_guard_may_flip_back_and_forth(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    x = rand(device, 3, 4).abs()
    keep_on(gw.graph(fn), fn, x, -x, x, -x, -x, x)


def values_are_known_by_what_they_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segment, "key_of", lambda value: value)
    patch.setattr(steps, "key_of", lambda value: value)


@hazard(17, values_are_known_by_what_they_equal)
def zeros_of_both_signs_go_their_own_ways(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + math.copysign(1, x[0].item())

    keep_on(gw.graph(fn), fn, *(torch.tensor([v, 1.0], device=device) for v in (0.0, -0.0, 0.0)))


def nothing_lives_over_a_break(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer.Tracer, "living", lambda self: {})


@hazard(17, nothing_lives_over_a_break)
def what_lives_over_a_break_is_safe_from_other_ways(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        kept = [x * n for n in range(1, 4)]
        if x.sum() > 0:
            del kept[0]
            others = [x + n for n in range(6)]
            return torch.stack(kept).sum(0) + torch.stack(others).prod(0)
        return torch.stack(kept).prod(0) + (x - 7)

    x = rand(device, 3, 4).abs()
    keep_on(gw.graph(fn), fn, x, -x, x, -x, -x, x)


class Counting(nn.Module):
    """Counts its calls, before a break and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(()))
        self.register_buffer("after", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before += 1
        if x.sum() > 0:
            self.after += 1
            return x * self.before
        self.after += 10
        return x - self.after


def prefixes_are_run_again(patch: pytest.MonkeyPatch) -> None:
    def again(self: tracer.Tracer, step: steps.Step, given: list[torch.Tensor]) -> Any:
        if step.func is torch.ops.aten.add_.Tensor:
            with torch.no_grad():
                given[0].add_(1)
        return answered(self, step, given)

    answered = tracer.Tracer.answered
    patch.setattr(tracer.Tracer, "answered", again)


def recording_leaves_its_traces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(observing.ObservingTracer, "exchange", lambda self: None)
    patch.setattr(recording.RecordingTracer, "record", _recorded_by_force)


def _recorded_by_force(
    self: recording.RecordingTracer, work: Any, inputs: Any, finish: Any
) -> None:
    """As it does, with what it did to tensors from outside left there, on either device."""
    record(self, work, inputs, finish)
    with torch.no_grad():
        for step in self.nodes[0].steps:
            if step.func is torch.ops.aten.add_.Tensor:
                next(a.tensor for a in step.sources if isinstance(a, steps.Outside)).add_(1)


record = recording.RecordingTracer.record


@hazard(17, prefixes_are_run_again)
def what_comes_before_a_break_is_applied_once(device: torch.device) -> None:
    net, plain = Counting().to(device).eval(), Counting().to(device).eval()
    graphed, x = gw.graph(net), rand(device, 3, 4).abs()
    for given in (x, -x, x, -x):
        same(graphed(given), plain(given))
        same(net.before, plain.before, "the counter before the break")


@hazard(17, recording_leaves_its_traces)
def what_comes_after_a_new_value_is_applied_once(device: torch.device) -> None:
    net, plain = Counting().to(device).eval(), Counting().to(device).eval()
    graphed, x = gw.graph(net), rand(device, 3, 4).abs()
    for given in (x, -x, x, -x):
        same(graphed(given), plain(given))
        same(net.after, plain.after, "the counter after the break")


def hoisted_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segment.HoistedConstant, "refresh", lambda self: None)


@hazard(17, hoisted_for_ever, only="cuda")
def a_tensor_on_the_host_is_followed(device: torch.device) -> None:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * scale.to(device)

    graphed, x = gw.graph(fn), rand(device, 3, 4)
    keep_on(graphed, fn, x)
    scale.numpy()[2] = 10
    keep_on(graphed, fn, x)


def python_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(python_state.PythonState, "check", lambda self, read=None: None)


@hazard(17, python_is_not_looked_at)
def python_s_state_on_a_new_way_is_not_frozen(device: torch.device) -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                self.seen.append(1)
                return x * 2
            return x

    net = Listing().eval()
    graphed, x = gw.graph(net), rand(device, 3, 4).abs()
    graphed(-x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            graphed(x)
    assert len(net.seen) == 4


def reads_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eligibility, "reads_of_arguments", lambda *args: None)


@hazard(17, reads_are_not_seen)
def a_call_that_goes_by_values_is_not_divided(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        # The proof of a split tries neither such values nor infinite ones: only the read shows it.
        return x * 3 if (x < -1e30).any() else x * 2

    graphed = gw.graph(fn, buckets=gw.Buckets(batch=[2, 4]), split=True)
    x = rand(device, 8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(graphed(x), fn(x))
        x[7, 0] = -1e35
        same(graphed(x), fn(x))
