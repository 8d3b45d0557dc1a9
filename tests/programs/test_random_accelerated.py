"""Random programs: modules in lists, dictionaries, closures and objects, shared, called twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import graphwright as gw
from graphwright.programs import acceleration, part_tuning

HOLDERS = ("attribute", "list", "dictionary", "object", "closure", "module")
METHODS = ("forward", "decode")


class Part(nn.Module):
    """One of a random program's modules."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x).tanh()
        return made

    def decode(self, z: torch.Tensor, shift: float = 0.5) -> torch.Tensor:
        made: torch.Tensor = self.layer(z) + shift
        return made


class Whole(nn.Module):
    """Holds a module, and calls it by any of its methods."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class RandomProgram:
    """Calls its modules, by their methods, one after the other."""

    def __init__(self, holders: list[str], shared: list[int], steps: list[tuple[int, str]]) -> None:
        made = [Part(seed).eval() for seed in range(len(holders))]
        modules = [made[number % len(made)] for number in shared]
        self.steps = steps
        self.parts: list[Any] = []
        self.table: dict[str, Any] = {}
        self.calls: list[Callable[[str, torch.Tensor], torch.Tensor]] = []
        for number, (holder, module) in enumerate(zip(holders, modules, strict=True)):
            self.calls.append(self._held(number, holder, module))

    def _held(
        self, number: int, holder: str, module: Part
    ) -> Callable[[str, torch.Tensor], torch.Tensor]:
        if holder == "attribute":
            setattr(self, f"part_{number}", module)
            return lambda method, x: called(getattr(self, f"part_{number}"), method, x)
        if holder == "list":
            self.parts.append([module])
            place = len(self.parts) - 1
            return lambda method, x: called(self.parts[place][0], method, x)
        if holder == "dictionary":
            self.table[str(number)] = module
            return lambda method, x: called(self.table[str(number)], method, x)
        if holder == "object":
            kept = SimpleNamespace(module=module)
            self.parts.append(kept)
            return lambda method, x: called(kept.module, method, x)
        if holder == "module":
            whole = Whole(module)
            setattr(self, f"whole_{number}", whole)
            return lambda method, x: called(whole.inner, method, x)
        return lambda method, x: called(module, method, x)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for number, method in self.steps:
            x = self.calls[number](method, x)
        return x


def called(module: Any, method: str, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module(x) if method == "forward" else module.decode(x, shift=0.25)
    return made


class Tuned:
    """Stands for what tuning makes of a method: it computes the same, and counts."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method, self.calls = method, Counter[str]()
        self.report = SimpleNamespace(chosen="a strategy", eager_error=None)
        self._choice = SimpleNamespace(fallback=SimpleNamespace(missed=None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["tuned"] += 1
        return self.method(*args, **kwargs)


def classes(program: RandomProgram) -> list[type]:
    found = acceleration.Inspecting(program, [torch.zeros(1, 4)], None)
    return [type(m) for root in found.modules.values() for m in root.modules()]


@st.composite
def programs(draw: st.DrawFn) -> RandomProgram:
    holders = draw(st.lists(st.sampled_from(HOLDERS), min_size=1, max_size=4))
    places = st.integers(0, len(holders) - 1)
    shared = draw(st.lists(places, min_size=len(holders), max_size=len(holders)))
    step = st.tuples(places, st.sampled_from(METHODS))
    return RandomProgram(holders, shared, draw(st.lists(step, min_size=1, max_size=6)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_a_random_program_is_right_and_undone_wholly(program: RandomProgram) -> None:
    inputs = [torch.rand(n, 4) for n in (2, 3)]
    expected = [program(x) for x in inputs]
    before = classes(program)
    with (
        mock.patch.object(part_tuning, "tune", lambda called, *_, **__: Tuned(called)),
        mock.patch.object(acceleration, "_LEAST_GAIN", float("-inf")),
        mock.patch.object(acceleration, "_LEAST_SHARE", 0.0),
        mock.patch.object(acceleration.WholeProgram, "timed_in_turns", return_value=(1.0, 0.5)),
    ):
        found = gw.accelerate(program, inputs, remember=False, buckets=None)
        methods = {str(part.target) for part in found.parts if part.kept}
        assert methods, "nothing takes part"
        counted = sum(part.calls["tuned"] for part in found.parts)
        for x, its in zip(inputs, expected, strict=True):
            assert torch.equal(program(x), its)
        answered = sum(part.calls["tuned"] for part in found.parts) - counted
        assert answered == 2 * len(program.steps), "a call went past what was installed"
        found.undo()
    assert classes(program) == before
    for x, its in zip(inputs, expected, strict=True):
        assert torch.equal(program(x), its)
