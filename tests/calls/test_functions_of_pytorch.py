"""Functions of PyTorch's that code names, replaced after a capture: `F.gelu = other`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn

import graphwright as gw


class Direct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.gelu(x))


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(torch.nn.functional.silu(x))


def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.special.expit(x)


class ByHelper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


def function(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x)


def by_text(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(F, "softsign")(x)  # noqa: B009  # it is the point
    return found


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], ModuleType, str]] = {
    "function of F": (Direct, F, "gelu"),
    "function of torch": (Direct, torch, "tanh"),
    "file in a file": (Nested, F, "gelu"),
    "file in two files": (Nested, F, "silu"),
    "function in a helper": (ByHelper, torch.special, "expit"),
    "plain function": (lambda: function, F, "softplus"),
    "name in a string": (lambda: by_text, F, "softsign"),
    "GELU": (nn.GELU, F, "gelu"),
    "Linear": (lambda: nn.Linear(4, 4), F, "linear"),
    "LayerNorm": (lambda: nn.LayerNorm(4), F, "layer_norm"),
    "Softmax": (lambda: nn.Softmax(-1), F, "softmax"),
    "Tanh": (nn.Tanh, torch, "tanh"),
    "LayerNorm through F": (lambda: nn.LayerNorm(4), torch, "layer_norm"),
    "Sequential": (lambda: nn.Sequential(nn.Linear(4, 4), nn.SiLU()), F, "silu"),
}


def other(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(x, 7.0)


def built(fn: Callable[..., Any]) -> Any:
    return fn.eval() if isinstance(fn, nn.Module) else fn


@pytest.mark.parametrize("case", CASES)
def test_a_replaced_function_is_noticed(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, file, name = CASES[case]
    torch.manual_seed(0)
    made, x = built(make()), torch.randn(2, 4, device=device)
    if isinstance(made, nn.Module):
        made.to(device)
    with torch.no_grad():
        graphed, fused = gw.graph(made), gw.fuse(made, (x,))
        captured, before = gw.capture(made, x), made(x)
        for each in (graphed, graphed, fused, captured):
            torch.testing.assert_close(each(x), before)
        with monkeypatch.context() as patch:
            patch.setattr(file, name, other)
            expected = made(x)
            assert not torch.equal(expected, before)
            for each in (graphed, graphed, fused, fused):
                torch.testing.assert_close(each(x), expected)
            with pytest.raises(gw.SignatureError, match=rf"{file.__name__}\.{name} was replaced"):
                captured(x)
        hits = graphed.statistics.hits
        for each in (graphed, fused):
            torch.testing.assert_close(each(x), before)
    assert graphed.statistics.hits == hits + 1


def test_training_notices_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(device)
    x = torch.randn(2, 4, device=device)
    gw.make_graphed_callables(module, (x,))
    module(x)
    monkeypatch.setattr(F, "gelu", other)
    torch.testing.assert_close(module(x), torch.full_like(x, 7.0))


def test_other_functions_of_the_file_are_no_change(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, x = gw.graph(Direct().eval()), torch.randn(2, 4, device=device)
    for _ in range(4):
        graphed(x)
    monkeypatch.setattr(F, "silu", other)
    monkeypatch.setattr(F, "made_up", other, raising=False)
    for _ in range(4):
        graphed(x)
    assert (graphed.statistics.captures, graphed.statistics.hits) == (1, 8)
