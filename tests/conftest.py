"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Tuning collects garbage often: it need not look at what was there before the test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short timing rounds: no test asserts on a time."""
    monkeypatch.setattr("graphwright.tuner.SCREENING_S", 0.05)
    monkeypatch.setattr("graphwright.tuner.FINAL_S_EACH", 0.05)
    monkeypatch.setattr("graphwright.measurement.WARMUP_S", 0.0)
    monkeypatch.setattr("graphwright.measurement.MAX_CALLS_PER_BLOCK", 10)
