"""What was loaded without the model says truly why it refuses a call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_artifacts import Rows, saved_parts, tuned_with

import graphwright as gw

X = torch.ones(2, 16)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused model, as it was saved."""
    path = tmp_path_factory.mktemp("rows") / "rows.gw"
    torch.manual_seed(0)
    gw.save(tuned_with("fused", Rows().eval(), (X,)), path)
    return path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for batches of 1, 8 and 32, and those between."""
    path = tmp_path_factory.mktemp("parts") / "parts.gw"
    saved_parts(path, torch.device("cpu"))
    return path


def hooked(tuned: gw.TunedModule) -> Callable[[], Any]:
    return tuned.register_forward_hook(lambda *_: None).remove


def trained(tuned: gw.TunedModule) -> Callable[[], Any]:
    tuned.train()
    return tuned.eval


def named(tuned: gw.TunedModule) -> Callable[[], Any]:
    tuned.name = "mine"
    return lambda: delattr(tuned._choice.module, "name")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (trained, r"in training mode.*\n.*eval\(\)"),
        (hooked, r"a forward hook.*\n.*Remove the hook"),
        (named, r"changed since: .*attribute.*\n.*Take the change back"),
    ],
)
def test_a_change_is_told_with_its_remedy_and_may_be_taken_back(
    change: Callable[[Any], Callable[[], Any]], text: str, grad: bool, rows: Path
) -> None:
    tuned = gw.load(rows)
    expected = tuned(X)
    with torch.set_grad_enabled(grad):
        back = change(tuned)
        with pytest.raises(gw.SignatureError, match=text):
            tuned(X)
        back()
        assert torch.equal(tuned(X), expected)
    assert sum(n for way, n in tuned.calls.items() if way.startswith("refused: ")) == 1
    assert not any(way.startswith("eager") for way in tuned.calls)


def test_between_buckets_too_a_change_is_what_is_told(parts: Path) -> None:
    tuned = gw.load(parts)
    x = torch.ones(5, 16)
    tuned(x, 2.0)
    tuned.train()
    with pytest.raises(gw.SignatureError, match="in training mode"):
        tuned(x, 2.0)
    tuned.eval()
    hooked(tuned)
    with pytest.raises(gw.SignatureError, match="a forward hook"):
        tuned(x, 2.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tuned: pickle.loads(pickle.dumps(tuned))])
def test_a_copy_says_that_it_is_one(copied: Callable[[Any], Any], rows: Path) -> None:
    other = copied(gw.load(rows))
    with pytest.raises(gw.SignatureError, match=r"is a copy.*\n.*Call the original"):
        other(X)
    assert other.calls == {"refused: nothing tuned": 1}
    assert "This copy was not tuned: every call is refused." in other.explain()


def test_gradients_are_refused_as_such(rows: Path) -> None:
    tuned = gw.load(rows)
    x = X.clone().requires_grad_()
    with pytest.raises(gw.SignatureError, match=r"an input requires grad.*\n.*detach"):
        tuned(x)
    tuned(x.detach())
    assert tuned.calls == {"refused: gradients are wanted": 1, "tuned": 1}


def test_the_nearest_bucket_is_named(parts: Path) -> None:
    tuned = gw.load(parts)
    with pytest.raises(gw.SignatureError, match=r"\(33, 16\).*saved for \(32, 16\)"):
        tuned(torch.ones(33, 16), 2.0)
    assert tuned.calls == {"refused: no bucket": 1}
    text = tuned.explain()
    assert "1 call refused: no bucket" in text
    assert "loaded without the model: whatever else is called is refused" in text
    assert "last call that did not match: args[0] is (33, 16)" in text
    assert "itself" not in text


def test_with_the_model_the_nearest_is_named_as_well() -> None:
    model = Rows().eval()
    samples = [(torch.ones(n, 16),) for n in (1, 8, 32)]
    tuned = tuned_with("fused", model, (), samples=samples)
    tuned(torch.ones(33, 16))
    assert "tuned for (32, 16)" in tuned.explain()
    assert tuned.calls == {"eager: another signature": 1}


def test_a_file_that_needs_the_model_is_named(tmp_path: Path) -> None:
    gw.save(tuned_with("eager", Rows().eval(), (X,)), tmp_path / "mine.gw")
    text = r"mine\.gw holds nothing that runs here without.*\n.*load\(path, model\).*--model"
    with pytest.raises(gw.ArtifactError, match=text):
        gw.load(tmp_path / "mine.gw")


@pytest.mark.parametrize(
    ("model", "told"),
    [("x", "model is 'x', which cannot be called"), (3, "model is 3"), (Rows, "the class Rows")],
)
def test_what_is_no_model_is_told(model: Any, told: str, rows: Path) -> None:
    with pytest.raises(gw.OptionError, match=told):
        gw.load(rows, model)
