"""Modules of a program that change between calls and back: adapters, scales, merged weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.programs import accelerated, acceleration, part_answer
from graphwright.programs.part_answer import TunedAnswer
from graphwright.programs.whole import WholeProgram

OPTIONS: dict[str, Any] = {
    "strategies": ["torchscript"],
    "remember": False,
    "isolate": False,
    "progress": False,
    "budget_s": 12.0,
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gw.FallbackWarning)
        yield


class Adapted(nn.Module):
    """Adds what the active adapter says; eager takes its time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8)
        self.adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"})
        self.active = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        made: torch.Tensor = self.base(x) + self.adapters[self.active](x)
        return made


class AdaptedProgram:
    def __init__(self, device: torch.device) -> None:
        self.net = Adapted().eval().to(device)

    def __call__(self, x: torch.Tensor, adapter: str | None = None) -> torch.Tensor:
        if adapter is not None:
            self.net.active = adapter
        made: torch.Tensor = self.net(x)
        return made


@pytest.fixture
def program(device: torch.device) -> AdaptedProgram:
    return AdaptedProgram(device)


def of_eager(program: AdaptedProgram, x: torch.Tensor) -> torch.Tensor:
    return Adapted.forward(program.net, x)


def test_states_among_the_calls_are_tuned_at_once(program: AdaptedProgram) -> None:
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    with mock.patch.object(acceleration, "tuned_for", wraps=acceleration.tuned_for) as tuned:
        found = gw.accelerate(program, [(x, "a"), (x, "b")], buckets=None, **OPTIONS)
        assert tuned.call_count == 2
    (part,) = found.parts
    assert part.kept, part.reason
    before = part.calls["tuned"]
    for number in range(20):
        torch.testing.assert_close(program(x, "ab"[number % 2]), of_eager(program, x))
    assert part.calls["tuned"] == before + 20
    assert not part.missed
    torch.testing.assert_close(program(x, "c"), of_eager(program, x))
    assert part.missed == 1
    found.undo()
    assert type(program.net) is Adapted


def test_a_state_seen_later_is_learned(program: AdaptedProgram) -> None:
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    found = gw.accelerate(program, [(x,)], buckets=None, **OPTIONS)
    (part,) = found.parts
    assert part.kept, part.reason
    with mock.patch.object(accelerated, "tuned_for", wraps=accelerated.tuned_for) as tuned:
        for adapter in "bc":
            torch.testing.assert_close(program(x, adapter), of_eager(program, x))
            assert part.missed == 1
            assert found.learn() == 1
            assert not part.missed
        assert tuned.call_count == 2
        before = part.calls["tuned"]
        for number in range(20):
            torch.testing.assert_close(program(x, "abc"[number % 3]), of_eager(program, x))
        assert part.calls["tuned"] == before + 20
        assert not found.learn()
        assert tuned.call_count == 2
    # Weights that are written to are no state of its own where the built code reads them.
    program.net.adapters["b"].weight.mul_(3)
    torch.testing.assert_close(program(x, "b"), of_eager(program, x))


def test_a_state_in_which_eager_is_faster_is_left(program: AdaptedProgram) -> None:
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    found = gw.accelerate(program, [(x,)], buckets=None, **OPTIONS)
    program(x, "b")
    eager = mock.Mock()
    eager.report.chosen = "eager"
    with mock.patch.object(accelerated, "tuned_for", return_value=eager):
        assert found.learn() == 0
    torch.testing.assert_close(program(x, "b"), of_eager(program, x))
    torch.testing.assert_close(program(x, "a"), of_eager(program, x))


def test_states_that_never_come_back_are_not_tuned_for_ever(
    program: AdaptedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(Adapted):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    net = Scaled().eval().to(next(program.net.parameters()).device)

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.scale = float(x[0, 0])
        made: torch.Tensor = net(x)
        return made

    monkeypatch.setattr(part_answer, "_MOST_STATES", 3)
    calls = [torch.rand(2, 8, device=net.base.weight.device) for _ in range(6)]
    with mock.patch.object(acceleration, "tuned_for", wraps=acceleration.tuned_for) as tuned:
        found = gw.accelerate(net, calls, run=run, buckets=None, **OPTIONS)
        assert tuned.call_count <= 3
    for call in calls:
        torch.testing.assert_close(run(net, call), Scaled.forward(net, call))
    found.undo()


def test_what_was_rejected_answers_nothing(program: AdaptedProgram) -> None:
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    found = gw.accelerate(program, [(x,)], buckets=None, **OPTIONS)
    (part,), more = found.parts, torch.rand(3, 8, device=x.device)
    before = part.answer
    program(more)
    assert part.missed == 1
    with mock.patch.object(WholeProgram, "why_wrong", return_value="it differs"):
        assert found.learn() == 0
    assert part.answer is before
    program(torch.rand(4, 8, device=x.device))
    assert part.missed == 2, "the one that answers is told of what it misses"
    program(x, "b")
    program(x, "a")
    assert part.calls["eager: the module changed"] == 1


def test_learning_leaves_the_program_in_its_state(program: AdaptedProgram) -> None:
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    found = gw.accelerate(program, [(x, "a"), (x, "b")], buckets=None, **OPTIONS)
    expected = program(x, "c")
    assert found.learn() == 1
    assert program.net.active == "c"
    torch.testing.assert_close(program(x), expected)
    assert not found.parts[0].missed


def test_states_that_cannot_come_back_are_given_up(program: AdaptedProgram) -> None:
    """A frozen script holds a copy of weights that were written to since."""
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    options = OPTIONS | {"strategies": ["torchscript:freeze"]}
    found = gw.accelerate(program, [(x,)], buckets=None, **options)
    (part,) = found.parts
    assert isinstance(part.answer, TunedAnswer)
    for _ in range(3):
        program.net.base.weight.mul_(1.5)
        torch.testing.assert_close(program(x), of_eager(program, x))
        assert found.learn() == 1
        torch.testing.assert_close(program(x), of_eager(program, x))
        assert len(part.answer._states) == 1


def test_in_a_state_without_anything_states_are_compared_now_and_then(
    program: AdaptedProgram,
) -> None:
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    found = gw.accelerate(program, [(x, "a"), (x, "b")], buckets=None, **OPTIONS)
    program(x, "c")
    looked = mock.Mock(wraps=part_answer._is_as_tuned)
    with mock.patch.object(part_answer, "_is_as_tuned", looked):
        for _ in range(64):
            program(x)
        assert looked.call_count <= 2 * (6 + 64 // 16)
    for adapter in "ab":
        before = found.parts[0].calls["tuned"]
        for _ in range(20):
            program(x, adapter)
        assert found.parts[0].calls["tuned"] >= before + 4


def test_what_was_tuned_in_the_present_state_is_saved(
    program: AdaptedProgram, tmp_path: Path
) -> None:
    """Though no call has come in it yet; and that nothing fits is no call that was missed."""
    x = torch.rand(2, 8, device=next(program.net.parameters()).device)
    found = gw.accelerate(program, [(x, "a"), (x, "b")], buckets=None, **OPTIONS)
    for adapter in "ab":
        program.net.active = adapter
        assert gw.save(found, tmp_path / "program.gw") == "torchscript"
    program.net.active = "c"
    with pytest.raises(gw.ArtifactError, match="changed"):
        gw.save(found, tmp_path / "program.gw")
    assert not found.parts[0].missed
