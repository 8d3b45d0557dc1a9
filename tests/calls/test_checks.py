"""checks=: what is looked at before what was built answers a call."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from torch import nn

import graphwright as gw
from graphwright.calls import watch
from graphwright.calls.watch import ModuleWatch


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.by = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.by


def tuned(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    with choosing("torchscript:freeze"):
        given = {"strategies": ["torchscript:freeze"], "remember": False, "isolate": False}
        return gw.tune(model, (x,), **given, progress=False, **options)


def graphed(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    return gw.graph(model, **options).prepare([(x,)])


WAYS: dict[str, Callable[..., Any]] = {
    "graph": graphed,
    "tune": tuned,
    "fuse": lambda model, x, **options: gw.fuse(model, (x,), **options),
}


def made(device: torch.device) -> tuple[Scaled, torch.Tensor]:
    return Scaled().to(device).eval(), torch.randn(3, 4, device=device)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("checks", ["full", "signature", "none"])
def test_a_change_of_the_module_is_noticed_by_full_checks_alone(
    way: str, checks: str, device: torch.device
) -> None:
    model, x = made(device)
    fast = WAYS[way](model, x, checks=checks)
    with torch.no_grad():
        before = model(x)
        for _ in range(3):
            torch.testing.assert_close(fast(x), before)
        model.by = 3.0
        expected = model(x) if checks == "full" else before
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected)
        assert ("not checked for changes" in fast.explain()) is (checks != "full")


@pytest.mark.parametrize("way", WAYS)
def test_another_call_is_told_apart_by_its_signature(way: str, device: torch.device) -> None:
    model, x = made(device)
    fast = WAYS[way](model, x, checks="signature")
    other = torch.randn(5, 4, device=device)
    with torch.no_grad():
        for each in (x, other, x):
            torch.testing.assert_close(fast(each), model(each))
    wanted = fast(x.clone().requires_grad_())
    assert wanted.requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_copies_look_at_as_much(way: str, device: torch.device) -> None:
    model, x = made(device)
    if way == "tune":
        return  # Copies of what was tuned are the module itself.
    fast = WAYS[way](model, x, checks="signature")
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            before = copied(x)
            inner = copied._graphwright_stands_for if way == "graph" else copied.module
            inner.by = 5.0
            assert torch.equal(copied(x), before)


def test_a_loaded_file_looks_at_as_much(tmp_path: Path) -> None:
    model, x = made(torch.device("cpu"))
    gw.save(tuned(model, x), tmp_path / "model.gw")
    fast = gw.load(tmp_path / "model.gw", model, trust=True, checks="signature")
    with torch.no_grad():
        before = fast(x)
        model.by = 3.0
        assert torch.equal(fast(x), before)


def test_it_is_built_once_there_are_many_looks(
    checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checks == "compiled":
        return
    asked: list[int] = []
    monkeypatch.setattr(watch, "WANTED", [lambda: asked.append(1)])
    monkeypatch.setattr(watch, "_looks", itertools.count(1))
    model, _ = made(torch.device("cpu"))
    looked = ModuleWatch(model, values=False)
    for n in range(watch._MANY + 100):
        assert looked.unchanged()
        assert len(asked) == (n >= watch._MANY)
