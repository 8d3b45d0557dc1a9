"""What compiled code returns lies in memory as eager's results do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from graphwright.calls.snapshots import Call, layout
from graphwright.evaluation.reference import reference
from graphwright.evaluation.verification import verify
from graphwright.strategies.expected import laid_out_as
from graphwright.strategies.registry import parse_candidates

Function = Callable[..., Any]
NAMES = ["inductor", "inductor:freeze", "inductor:reduce-overhead", "inductor+graph"]


@dataclass
class Cache:
    """As transformers' caches: an object that holds what later calls need."""

    keys: torch.Tensor
    length: int


class Attention(nn.Module):
    """Its cache begins as an empty tensor, to which the keys are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        keys = self.key(x).unflatten(-1, (4, 4)).transpose(1, 2)
        empty = torch.tensor([], dtype=keys.dtype, device=keys.device)
        return x * 2, Cache(torch.cat([empty, keys], dim=-2), x.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_in_the_result_has_eagers_strides(name: str, device: torch.device) -> None:
    (candidate,) = parse_candidates([name], ())
    if not candidate.availability(device).available:
        assert device.type == "cpu", f"{name} ought to run on CUDA"
        return
    model, x = Attention().eval().to(device), torch.randn(2, 5, 16, device=device)
    with torch.no_grad():
        built = candidate.build(model, (x,), {})
        _, cache = built.call(x)
        assert cache.keys.stride() == model(x)[1].keys.stride() == (80, 20, 4, 1)
        ref = reference(model, model, Call("the sample", (x,), {}))
        assert verify(built.call, ref).ok


def laid_out(model: Function, compiled: Function, *args: torch.Tensor) -> Function:
    return laid_out_as(model, compiled, compiled(*args), args, {})


def test_what_lies_as_eagers_results_costs_nothing() -> None:
    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1, x[:0].T]

    def compiled(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1, x[:0].T.contiguous()]  # Without elements, strides say nothing.

    assert laid_out(model, compiled, torch.ones(2, 3)) is compiled


def test_only_what_lies_in_another_way_is_copied() -> None:
    def model(x: torch.Tensor) -> dict[str, object]:
        return {"as is": x, "turned": x.T.contiguous(), "name": "a"}

    def compiled(x: torch.Tensor) -> dict[str, object]:
        return {"as is": x, "turned": x.T, "name": "a"}

    x = torch.randn(2, 3)
    found = laid_out(model, compiled, torch.ones(2, 3))(x)
    assert found["as is"] is x
    assert found["name"] == "a"
    assert found["turned"].is_contiguous()
    assert torch.equal(found["turned"], x.T)


def test_results_of_another_structure_are_left_to_the_verification() -> None:
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x.T

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.T.contiguous()]

    assert laid_out(model, compiled, torch.ones(2, 3)) is compiled


@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_where_a_shape_depends_on_values_nothing_is_cut_off(count: int) -> None:
    """Its dimensions lie in the order in which eager's lie in the sample."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].T.contiguous()

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].T

    x = torch.randn(9, 4).abs()
    call = laid_out(model, compiled, torch.cat([x[:5], -x[5:]]))
    varied = torch.cat([x[:count], -x[count:]])
    found, wanted = call(varied), model(varied)
    assert torch.equal(found, wanted)
    assert layout(found) == layout(wanted) or count == 0


def test_a_result_of_another_structure_than_the_samples_is_returned_as_it_is() -> None:
    def model(x: torch.Tensor) -> object:
        return x.T.contiguous() if x.sum() > 0 else [x, x]

    def compiled(x: torch.Tensor) -> object:
        return x.T if x.sum() > 0 else [x, x]

    x = -torch.ones(2, 3)
    first, second = laid_out(model, compiled, torch.ones(2, 3))(x)
    assert first is second is x


def test_eager_is_called_in_the_callers_gradient_mode() -> None:
    """Attention of PyTorch's own lays its results out in another way without gradients."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.T if torch.is_grad_enabled() else x.T.contiguous()

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x.T

    assert laid_out(model, compiled, torch.ones(2, 3)) is compiled
    with torch.no_grad():
        assert laid_out(model, compiled, torch.ones(2, 3)) is not compiled
