"""torch.compile's cache in a saved file: it is taken where it was written for such a processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chosen import choosing
from torch import nn

import graphwright as gw
from graphwright.strategies import inductor

VECTORS = inductor._vectors()


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch.compile is given; a cache is in the folder."""
    found: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", found.append)
    inductor.save_cache(tmp_path)
    return found


def test_it_is_taken_on_the_same_processor(taken: list[bytes], tmp_path: Path) -> None:
    inductor.load_cache(tmp_path)
    assert taken == [b"code"]


@pytest.mark.parametrize(
    "vectors", [["AVX2", "AVX2"], [*VECTORS, "AVX10"], VECTORS[1:], []], ids=repr
)
def test_it_is_not_taken_where_vectors_are_others(
    vectors: list[str], taken: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vectors == VECTORS:
        pytest.skip("those of this processor")
    monkeypatch.setattr(inductor, "_vectors", lambda: vectors)
    inductor.load_cache(tmp_path)
    assert taken == []


def test_it_is_not_taken_where_nothing_is_said(taken: list[bytes], tmp_path: Path) -> None:
    (tmp_path / inductor._PROCESSOR).unlink()
    inductor.load_cache(tmp_path)
    assert taken == []


@pytest.mark.long
@pytest.mark.slow
def test_elsewhere_it_is_compiled_again_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8)
    with choosing("inductor"):
        tuned = gw.tune(model, (x,), strategies=["inductor"], remember=False)
    gw.save(tuned, tmp_path / "model.gw")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(inductor, "_vectors", lambda: ["shorter"])
    loaded = gw.load(tmp_path / "model.gw", model, trust=True)
    assert "compiled again" in str(loaded.report.notes)
    torch.testing.assert_close(loaded(x), model(x))
