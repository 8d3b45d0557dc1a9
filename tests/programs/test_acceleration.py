"""accelerate(): what is kept, what is left as it is, and that all of it can be undone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.programs import part_tuning
from graphwright.programs.accelerated import Accelerated
from graphwright.programs.acceleration import accelerate


class Slow(nn.Module):
    """A layer that takes some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(z) * 2


class Program:
    def __init__(self, device: torch.device) -> None:
        self.encoder, self.decoder = Slow(4e-3).eval().to(device), Slow(2e-3).eval().to(device)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder.decode(self.encoder(x))
        return result


class Stub:
    """Stands for what tuning makes of a method."""

    def __init__(self, called: Callable[..., Any], kind: str) -> None:
        self.called, self.kind, self.calls = called, kind, Counter[str]()
        self.report = SimpleNamespace(
            chosen="eager" if kind == "eager" else "stub", eager_error=None
        )
        self._choice = SimpleNamespace(fallback=SimpleNamespace(missed=None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["tuned"] += 1
        module = getattr(self.called, "__self__", self.called)
        seconds, module.seconds = module.seconds, 0.0
        if self.kind == "slower":
            time.sleep(2 * seconds)
        try:
            result = self.called(*args, **kwargs)
        finally:
            module.seconds = seconds
        return result + 1 if self.kind == "wrong" else result


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `tune` makes of each method, by its name; and what it was asked."""
    kinds: dict[str, Any] = {"forward": "right", "decode": "right", "asked": []}

    def tune(called: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        if "buckets" in options:
            return Stub(called, "eager")
        kinds["asked"].append((called, args, options))
        kind = kinds["forward" if isinstance(called, nn.Module) else called.__name__]
        if isinstance(kind, BaseException):
            raise kind
        return Stub(called, kind)

    monkeypatch.setattr(part_tuning, "tune", tune)
    return kinds


@pytest.fixture
def program(device: torch.device) -> Program:
    torch.manual_seed(0)
    return Program(device)


def given(device: torch.device) -> list[Any]:
    return [(torch.rand(2, 4, device=device),), (torch.rand(3, 4, device=device),)]


def state(found: Accelerated) -> dict[str, bool]:
    return {str(part.target): part.kept for part in found.parts}


def test_what_is_right_and_faster_is_kept_and_undone(
    program: Program, tuned: dict[str, Any], device: torch.device
) -> None:
    calls, before = given(device), (program.encoder, program.decoder)
    expected = [program(*call) for call in calls]
    found = accelerate(program, calls, budget_s=9, allow=("bf16",))
    assert state(found) == {"encoder": True, "decoder.decode": True}
    assert found.after_s < 0.8 * found.before_s
    assert "answered by stub" in found.explain()
    for call, its in zip(calls, expected, strict=True):
        torch.testing.assert_close(program(*call), its)
    assert all(part.tuned.calls["tuned"] for part in found.parts if part.tuned)
    # The largest share first, each with its share of the budget, for both kinds of its calls.
    (first, _, options), (second, _, others) = tuned["asked"]
    assert isinstance(first, Slow)
    assert second.__name__ == "decode"
    assert len(options["samples"]) == 2
    assert options["budget_s"] + others["budget_s"] == pytest.approx(9.0, abs=0.5)
    assert options["allow"] == ("bf16",)
    found.undo()
    assert (program.encoder, program.decoder) == before
    assert type(program.encoder) is type(program.decoder) is Slow
    for call, its in zip(calls, expected, strict=True):
        assert torch.equal(program(*call), its)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("wrong", "the result of call 0 differs: off by"),
        ("slower", "the program gains nothing with"),
        ("eager", "eager is the fastest"),
        (gw.SignatureError("It cannot be compared."), "It cannot be compared."),
    ],
)
def test_what_does_not_pay_is_left(
    kind: Any, reason: str, program: Program, tuned: dict[str, Any], device: torch.device
) -> None:
    tuned["decode"] = kind
    found = accelerate(program, given(device))
    assert state(found) == {"encoder": True, "decoder.decode": False}
    (decode,) = (part for part in found.parts if part.target.method == "decode")
    assert decode.reason.startswith(reason)
    assert type(program.decoder) is Slow


def test_an_interruption_leaves_the_program_as_it_was(
    program: Program, tuned: dict[str, Any], device: torch.device
) -> None:
    tuned["decode"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        accelerate(program, given(device))
    assert type(program.encoder) is type(program.decoder) is Slow


@pytest.mark.parametrize("first", [0, 1])
def test_two_programs_that_share_a_module_are_undone_in_any_order(
    first: int, program: Program, tuned: dict[str, Any], device: torch.device
) -> None:
    other = Program(device)
    other.encoder = program.encoder
    x = torch.rand(2, 4, device=device)
    expected = program(x), other(x)

    def right() -> None:
        torch.testing.assert_close(program(x), expected[0])
        torch.testing.assert_close(other(x), expected[1])

    both = [accelerate(each, given(device)) for each in (program, other)]
    right()
    both[first].undo()
    right()
    both[1 - first].undo()
    assert torch.equal(program(x), expected[0])
    assert {type(each) for each in (program.encoder, program.decoder, other.decoder)} == {Slow}


def test_a_block_ends_with_undo(
    program: Program, tuned: dict[str, Any], device: torch.device
) -> None:
    with accelerate(program, given(device)) as found:
        assert any(state(found).values())
        assert type(program.encoder) is not Slow
    assert type(program.encoder) is Slow


def test_a_program_that_draws_random_numbers_is_compared_under_one_seed(
    tuned: dict[str, Any], device: torch.device
) -> None:
    program = Program(device)

    def run(program: Program, call: Any) -> torch.Tensor:
        return program(call + torch.rand(2, 4, device=device))

    state_before = torch.get_rng_state()
    found = accelerate(program, [torch.rand(2, 4, device=device)], run=run)
    assert all(state(found).values())
    assert not torch.equal(torch.get_rng_state(), state_before) or device.type == "cuda"


def test_what_tune_makes_answers(program: Program, device: torch.device) -> None:
    """With the real one: whatever it chooses, results are right, in place and after `undo`."""
    calls = given(device)
    expected = [program(*call) for call in calls]
    found = accelerate(
        program,
        calls,
        strategies=["eager:no_grad"],
        remember=False,
        progress=False,
        isolate=False,
        budget_s=5,
    )
    for call, its in zip(calls, expected, strict=True):
        torch.testing.assert_close(program(*call), its)
    program.encoder.layer.weight.data.zero_()
    changed = program(*calls[0])
    found.undo()
    torch.testing.assert_close(program(*calls[0]), changed)
