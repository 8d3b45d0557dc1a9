"""Regional compilation: what it compiles, and that what comes of it is the model's own result."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.calls.objects import flatten_result
from graphwright.errors import StrategyFailed
from graphwright.fusion.regions import GraphRegion
from graphwright.strategies import regional
from graphwright.strategies.regional import REGIONAL

# Inductor's advice on precision.
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32")


class Layer(nn.Module):
    """Attention and an MLP, whose keys and values join a cache that is empty."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, cache: list[Any]) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        nothing = key[:, :, :0]
        key, value = (torch.cat([nothing, each], dim=-2) for each in (key, value))
        cache.append((key, value))
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.drop(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.drop(self.mlp(x))


class Model(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(layers))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> Any:
        x, cache = self.embed(ids), []  # type: ignore[var-annotated]  # a list of pairs
        for layer in self.layers:
            x = layer(x, cache)
        return {"logits": self.head(x), "cache": cache}


def close(mine: Any, its: Any) -> None:
    (found, spec), (expected, other) = flatten_result(mine), flatten_result(its)
    assert spec == other
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
        assert one.stride() == two.stride()


@pytest.fixture
def case(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Model().eval().to(device), torch.randint(0, 50, (2, 7), device=device)


def test_a_layer_is_compiled_once(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, ids = case
    compiled = mock.Mock(wraps=regional._compiled)
    with mock.patch.object(regional, "_compiled", compiled):
        built = REGIONAL.build(model, (ids,), {})
    assert compiled.call_count <= 3
    assert built.notes[0].endswith(f"of which {compiled.call_count} were compiled")
    with torch.no_grad():
        close(built.call(ids), model(ids))
        close(built.call(ids.flip(1)), model(ids.flip(1)))


def test_the_next_region_gets_what_it_was_compiled_for(
    case: tuple[nn.Module, torch.Tensor],
) -> None:
    """Inductor may give a result other strides than eager, and its code asks for the strides."""
    model, ids = case
    with mock.patch.object(regional, "_simplify"):
        built = REGIONAL.build(model, (ids,), {})
    with torch.no_grad():
        close(built.call(ids), model(ids))


def test_it_holds_weights_and_is_saved(
    case: tuple[nn.Module, torch.Tensor], tmp_path: Path
) -> None:
    model, ids = case
    tuned = gw.tune(model, (ids,), strategies=["inductor:regional"], remember=False)
    assert {row.strategy: row.status.value for row in tuned.report.rows}[REGIONAL.name] == "ok"
    built = REGIONAL.build(model, (ids,), {})
    assert built.holds_weights
    assert built.save is not None
    built.save(tmp_path)
    REGIONAL.warm(tmp_path)
    with torch.no_grad():
        close(REGIONAL.build(model, (ids,), {}).call(ids), model(ids))


def test_what_draws_random_numbers_is_refused(device: torch.device) -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    with pytest.raises(StrategyFailed, match=r"random numbers|no graph"):
        REGIONAL.build(Draws().eval(), (torch.rand(3, device=device),), {})


def test_a_model_in_which_nothing_repeats_is_compiled(device: torch.device) -> None:
    widths = range(4, 10)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(n, n + 1), nn.ReLU(), nn.LayerNorm(n + 1)) for n in widths)
    )
    model.eval().to(device)
    x = torch.rand(2, 4, device=device)
    with torch.no_grad():
        close(REGIONAL.build(model, (x,), {}).call(x), model(x))


def test_what_is_no_graph_is_refused(device: torch.device) -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum().item() > 0 else x - 1

    with pytest.raises(StrategyFailed, match="no graph"):
        REGIONAL.build(Reads().eval(), (torch.rand(3, device=device),), {})


def test_another_thread_s_compilation_has_its_kernels(
    case: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own torch.compile may be under way on another thread."""
    model, ids = case
    compiled, found = regional._compiled, []

    def beside(region: GraphRegion, given: Sequence[torch.Tensor]) -> Any:
        def other() -> None:
            torch._dynamo.reset()
            found.append(torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(4)))

        if not found:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return compiled(region, given)

    monkeypatch.setattr(regional, "_compiled", beside)
    with torch.no_grad():
        close(REGIONAL.build(model, (ids,), {}).call(ids), model(ids))
    torch.testing.assert_close(found[0], torch.sin(torch.ones(4)) + 1)


def test_a_region_that_fails_leaves_inductor_as_it_was(
    case: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    model, ids = case
    wait = AsyncCompile.wait
    monkeypatch.setattr(regional, "_compiled", mock.Mock(side_effect=[ValueError("no")]))
    with pytest.raises(ValueError, match="no"):
        REGIONAL.build(model, (ids,), {})
    assert AsyncCompile.wait is wait
