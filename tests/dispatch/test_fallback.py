"""Calls that fall back to the model itself say so, once for each kind."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import Planted, Small, directly
from torch import nn

import graphwright as gw


def fused(model: nn.Module, x: torch.Tensor) -> Any:
    return gw.fuse(model, (x,))


def graphed(model: nn.Module, x: torch.Tensor) -> Any:
    found = gw.graph(model, on_miss="eager")
    found.prepare([((x,), {})])
    return found


def told(call: Callable[[], object]) -> list[str]:
    """What a call warns of falling back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if each.category is gw.FallbackWarning]


def test_another_shape_warns_once(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Small().eval().to(device), torch.randn(4, 16, device=device)
    part = graphed(model, x)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "graphwright"):
        assert not told(lambda: part(x))
        (text,) = told(lambda: part(x[:2]))
        assert "runs eagerly for this kind of call" in text
        assert not told(lambda: part(x[:2]))
        assert not told(lambda: part(x))
    assert [record.message for record in caplog.records] == [text]
    assert sum(part.statistics.eager.values()) == 2


@pytest.mark.parametrize("make", [graphed, fused])
def test_gradients_warn_once(
    make: Callable[[nn.Module, torch.Tensor], Any], device: torch.device
) -> None:
    model, x = Small().eval().to(device), torch.randn(4, 16, device=device)
    part = make(model, x)
    wants = x.clone().requires_grad_()
    (text,) = told(lambda: part(wants))
    assert "gradients are wanted" in text
    assert not told(lambda: part(wants))


def test_a_change_of_the_module_warns_once(device: torch.device) -> None:
    model, x = Small().eval().to(device), torch.randn(4, 16, device=device)
    part = fused(model, x)
    with torch.no_grad():
        assert not told(lambda: part(x))
        model.first.weight.mul_(2)
        (text,) = told(lambda: part(x))
        assert "the module changed" in text
        assert "weight of Linear (first)" in text
        assert not told(lambda: part(x))


def assembled(model: nn.Module, x: torch.Tensor, **options: Any) -> gw.TunedModule:
    """What tune() returns where another candidate than eager wins, without its timings."""
    from graphwright.tuning.tuner import Tuning

    tuning = Tuning(
        model, (x,), strategies=[Planted("direct", directly)], remember=False, isolate=False
    )
    tuning.run()
    object.__setattr__(tuning.asked.answering, "on_miss", options.get("on_miss", "eager"))
    tuning.report.chosen = "direct"
    return tuning._tuned("direct", [tuning.asked.candidates[-1].build(model, (x,), {})])


def test_a_tuned_module_warns_once_for_each_kind(device: torch.device) -> None:
    model, x = Small().eval().to(device), torch.randn(4, 16, device=device)
    part = assembled(model, x)
    with torch.no_grad():
        assert not told(lambda: part(x))
        (text,) = told(lambda: part(x[:2]))
        assert "another signature" in text
        assert "(2, 16)" in text
        assert not told(lambda: part(x[:3]))
    assert "gradients are wanted" in told(lambda: part(x.clone().requires_grad_()))[0]
    assert part.calls["eager: another signature"] == 2


def test_a_tuned_module_refuses_where_it_is_asked_to(device: torch.device) -> None:
    model, x = Small().eval().to(device), torch.randn(4, 16, device=device)
    part = assembled(model, x, on_miss="error")
    with torch.no_grad():
        part(x)
        with pytest.raises(gw.SignatureError, match=r"another signature.*\(2, 16\)"):
            part(x[:2])
    wants = x.clone().requires_grad_()
    part(wants).sum().backward()
    assert wants.grad is not None


def test_what_on_miss_may_be() -> None:
    with pytest.raises(gw.OptionError, match="on_miss"):
        gw.tune(Small().eval(), (torch.randn(4, 16),), on_miss="never")


def test_where_eager_won_nothing_is_lost() -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    part = gw.tune(model, (x,), strategies=["eager"], remember=False, isolate=False)
    with torch.no_grad():
        assert not told(lambda: part(x[:2]))
    assert not told(lambda: part(x[:2]))
    part(x[:2].clone().requires_grad_()).sum().backward()


def test_a_build_for_cuda_without_a_gpu_is_not_asked_for_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    fused, graphed = gw.fuse(model, (x,)), gw.graph(model)
    with torch.no_grad():
        assert torch.equal(graphed(x), model(x))
        torch.testing.assert_close(fused(x), model(x))
    assert fused.calls["fused"] == 1
