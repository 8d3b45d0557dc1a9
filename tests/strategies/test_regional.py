"""Regional compilation: what a model repeats is compiled once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.errors import StrategyFailed
from graphwright.report.result import Status
from graphwright.strategies.base import Built
from graphwright.strategies.regional import Twin
from graphwright.strategies.registry import COMPILERS, default_candidates, parse_candidates


class DropPath(nn.Module):
    """As vision models have it: each layer with another probability, idle in eval mode."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        return x * (torch.rand(len(x), 1, device=x.device) >= self.drop_prob)


class Layer(nn.Module):
    """A residual layer; `number` is one that no call reads."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = DropPath(0.1 * number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Deep(nn.Module):
    """Layers of each width, with something between them, and a dictionary of results."""

    def __init__(self, widths: tuple[int, ...] = (16,), each: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*(Layer(n, width) for n in range(each))) for width in widths
        )
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for stage in self.stages:
            x = stage(x)
            x = torch.cat([x, x + self.shift], -1)
        return {"y": x}


class Counted(Layer):
    """Counts its calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return super().forward(x)


class Last(Deep):
    """Keeps its last result."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)
        self.last = found["y"]
        return found


def built(model: nn.Module, x: torch.Tensor, name: str = "inductor:regional") -> Built:
    (candidate,) = parse_candidates([name], ())
    return candidate.build(model, (x,), {})


@pytest.mark.parametrize("runner", ["", "+graph"])
def test_layers_that_are_alike_are_compiled_once(device: torch.device, runner: str) -> None:
    if runner and device.type == "cpu":
        pytest.skip("graphs need a GPU")
    model = Deep().eval().to(device)
    x = torch.randn(3, 16, device=device)
    before = [dict(vars(module)) for module in model.modules()]
    found = built(model, x, f"inductor:regional{runner}")
    assert "4 × Layer, compiled as 1 graph" in found.notes
    assert before == [vars(module) for module in model.modules()]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(found.call(x), model(x))
            # Weights and buffers are the model's own.
            model.stages[0][1].up.weight.mul_(-1)
            model.shift.add_(1)


def test_each_kind_of_layer_is_compiled_and_none_goes_eager() -> None:
    widths = tuple(4 << n for n in range(5))
    model, x = Deep(widths, each=2).eval(), torch.randn(3, 4)
    with torch._dynamo.config.patch(recompile_limit=2):
        found = built(model, x)
    assert "10 × Layer, compiled as 5 graphs" in found.notes
    with torch.no_grad():
        torch.testing.assert_close(found.call(x), model(x))


def test_layers_of_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval()
    x = torch.randn(2, 6, 16)
    found = built(model, x)
    assert "5 × TransformerEncoderLayer, compiled as 1 graph" in found.notes
    with torch.no_grad():
        torch.testing.assert_close(found.call(x), model(x))


def test_tune_tries_it_by_name() -> None:
    model, x = Deep().eval(), torch.randn(3, 16)
    tuned = gw.tune(model, (x,), strategies=["inductor:regional"], remember=False)
    row = tuned.report.row("inductor:regional")
    assert row is not None
    assert row.status in (Status.OK, Status.SLOWER), row.reason


def test_what_was_compiled_is_saved(tmp_path: Path) -> None:
    model, x = Deep().eval(), torch.randn(3, 16)
    found = built(model, x)
    assert found.save is not None
    found.save(tmp_path)
    (candidate,) = parse_candidates(["inductor:regional"], ())
    torch._dynamo.reset()
    candidate.compiler.warm(tmp_path)  # type: ignore[attr-defined]  # an Inductor
    assert any("cache" in note for note in built(model, x).notes)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Sequential(Layer(0, 8), Layer(1, 8), Layer(2, 8)), "repeats no part 4 times"),
        (lambda: Deep((2, 4, 8, 16), each=1), "repeats no part 4 times"),
        (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), "repeats no part 4 times"),
        (lambda: nn.Sequential(*(Counted(0, 8) for _ in range(4))), "attribute number of Counted"),
        (lambda: Last((8,)), "sets the attribute last of Last"),
    ],
)
def test_what_cannot_be_compiled_by_parts_says_why(make: Callable[[], nn.Module], why: str) -> None:
    model = make().eval()
    width = 2 if isinstance(model, Deep) and len(model.stages) > 1 else 8
    with pytest.raises(StrategyFailed, match=why):
        built(model, torch.randn(3, width))


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_are_refused(everywhere: bool) -> None:
    model = Deep().eval()
    hook = (
        nn.modules.module.register_module_forward_hook(lambda *_: None)
        if everywhere
        else model.stages[0][2].up.register_forward_pre_hook(lambda *_: None)
    )
    try:
        with pytest.raises(StrategyFailed, match="forward hooks"):
            built(model, torch.randn(3, 16))
    finally:
        hook.remove()


def test_a_twin_shares_all_but_the_tree() -> None:
    model = Deep().eval()
    model.again = model.stages  # one module in two places
    model.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    made = Twin(model).module
    assert made is not model
    assert type(made) is Deep
    assert made.again is made.stages is not model.stages
    assert made.scripted is model.scripted
    assert made.stages[0][3].up is model.stages[0][3].up
    assert list(made.state_dict()) == list(model.state_dict())
    assert list(map(id, made.parameters())) == list(map(id, model.parameters()))
    assert made._buffers is model._buffers
    # Of a layer that is idle the twin's need no probability; the model's own has it.
    assert made.stages[0][3].drop.drop_prob == 0
    assert model.stages[0][3].drop.drop_prob == pytest.approx(0.3)


def test_what_drops_in_training_is_not_touched() -> None:
    model = Deep()
    assert Twin(model).module.stages[0][3].drop.drop_prob == pytest.approx(0.3)


def test_it_is_tried_on_request() -> None:
    model, device = Deep().eval(), torch.device("cpu")
    names = [c.name for c in default_candidates(model, device, ())]
    assert "inductor:regional" in {c.name for c in COMPILERS}
    assert "inductor:regional" not in names
