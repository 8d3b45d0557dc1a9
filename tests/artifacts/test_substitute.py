"""A choice that cannot be saved: what save() writes in its place, and what it says of that."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from planted import Planted, corrupts_weights, off_by_one_per_cent, raises
from torch import nn
from torch.export import Dim

import graphwright as gw
from graphwright.artifacts import saving, substitute
from graphwright.errors import StrategyFailed
from graphwright.evaluation.measurement import Measurement
from graphwright.report.result import Results, Row
from graphwright.strategies.base import Availability, Built, Candidate
from graphwright.strategies.registry import parse_candidates, savable_form

CHOICE = "eager:no_grad"
WHY = "it is of this moment"


class Net(nn.Module):
    """Two linear layers, and a list that a build may not change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        self.scales = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scales[0]


@pytest.fixture
def model() -> nn.Module:
    return Net().eval()


X = torch.randn(3, 16)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substitute, "TIMING_S", 0.02)


def tuned_with(
    name: str | Planted, model: nn.Module, others: tuple[str, ...] = (), **options: Any
) -> gw.TunedModule:
    given = {"remember": False, "isolate": False, "progress": False} | options
    if "samples" not in given:
        given["args"] = (X,)
    with choosing(name if isinstance(name, str) else name.name):
        return gw.tune(model, strategies=[name, *others], **given)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plant what cannot be saved, the form of it that can, and all figures."""

    def planted(
        *unsavable: str,
        form: Candidate | None = None,
        slower: float = 1.0,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        def why(candidate: Candidate) -> str | None:
            return WHY if candidate.name in unsavable else None

        def interleave(calls: Mapping[str, Any], *_: object, **__: object) -> dict[str, Any]:
            for call in calls.values():
                call()
            seconds = {"choice": 1e-3, "substitute": slower * 1e-3, "eager": 2e-3}
            return {name: Measurement(((seconds[name],),) * 6, (1.0,) * 6) for name in calls}

        def cost(report: Results, row: Row) -> float:
            return (costs or {}).get(row.strategy, 9.0)

        monkeypatch.setattr(saving, "unsavable", why)
        monkeypatch.setattr(substitute, "unsavable", why)
        monkeypatch.setattr(substitute, "savable_form", lambda candidate: form)
        monkeypatch.setattr(substitute, "interleave", interleave)
        monkeypatch.setattr(Results, "cost", cost)

    return planted


def saved(tuned: gw.TunedModule, path: Path) -> tuple[str, str]:
    """The strategy that the file holds, and the warning."""
    with pytest.warns(RuntimeWarning, match="cannot be saved") as caught:
        name = gw.save(tuned, path)
    (said,) = [each for each in caught if each.category is RuntimeWarning]  # torch has its own.
    assert said.filename == __file__
    return name, str(said.message)


def named(name: str) -> Candidate:
    (candidate,) = parse_candidates([name], ())
    return candidate


def test_the_best_that_can_be_saved_is_and_both_are_named(
    model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    tuned = tuned_with(CHOICE, model, ("fused", "torchscript"))
    plant(CHOICE, slower=1.5, costs={"eager": 3.0, "fused": 2.0, "torchscript": 1.0})
    name, said = saved(tuned, tmp_path / "net.gw")
    assert name == "torchscript"
    note = (
        f"{CHOICE}, 1.00 ms a call, cannot be saved: {WHY}. "
        "Saved in its place: torchscript, 1.50 ms a call."
    )
    assert said == note
    loaded = gw.load(tmp_path / "net.gw", trust=True)
    assert loaded.report.chosen == "torchscript"
    assert loaded.report.reason.endswith(note)
    assert CHOICE in loaded.report.reason
    torch.testing.assert_close(loaded(X), model(X))
    assert loaded.calls == {"tuned": 1}
    # What was tuned goes on as it was.
    assert tuned.report.chosen == CHOICE
    assert note not in tuned.report.reason
    tuned(X)
    assert tuned.calls == {"tuned": 1}


def test_what_can_be_saved_is_saved_without_a_word(model: nn.Module, tmp_path: Path) -> None:
    tuned = tuned_with("fused", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gw.save(tuned, tmp_path / "net.gw") == "fused"
    assert gw.load(tmp_path / "net.gw").report.chosen == "fused"


@pytest.mark.parametrize(
    ("slower", "other", "expected"),
    [
        (1.02, 0.5, "fused"),  # As good as the choice: whatever else there is.
        (1.5, 1.2, "torchscript"),
        (1.5, 1.7, "fused"),
    ],
)
def test_the_form_that_can_be_saved_goes_first_if_it_is_as_fast(
    slower: float,
    other: float,
    expected: str,
    model: nn.Module,
    plant: Callable[..., None],
    tmp_path: Path,
) -> None:
    tuned = tuned_with(CHOICE, model, ("torchscript",))
    costs = {CHOICE: 1.0, "torchscript": other}
    plant(CHOICE, form=named("fused"), slower=slower, costs=costs)
    assert saved(tuned, tmp_path / "net.gw")[0] == expected
    report = gw.load(tmp_path / "net.gw", trust=True).report
    row = report.chosen_row
    assert row is not None
    assert row.strategy == expected
    # The form was not tried when the model was tuned: its figures are those of saving it.
    if expected == "fused":
        assert row.setup_s is not None
        assert report.speedup(row) == pytest.approx((2 / slower,) * 3)


class Unwritable:
    """A strategy whose result cannot be written."""

    name, complexity = "unwritable", 3

    def probe(self, device: torch.device) -> Availability:
        return Availability(True)

    def build(self, model: nn.Module, args: Any, kwargs: Any) -> Built:
        def save(folder: Path) -> None:
            raise StrategyFailed("planted failure to write")

        return Built(model, save=save)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (Planted("form", raises), "form failed: ValueError: planted failure"),
        (Planted("form", off_by_one_per_cent), "form failed: "),
        (Planted("form", corrupts_weights), "form failed: parameter up.weight was changed"),
        (Unwritable(), "unwritable cannot be saved: planted failure to write"),
    ],
    ids=["raises", "wrong", "writes", "unwritable"],
)
def test_a_form_that_fails_gives_way_and_is_named(
    form: Any, why: str, model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = tuned_with(CHOICE, model)
    plant(CHOICE, form=Candidate(form))
    name, said = saved(tuned, tmp_path / "net.gw")
    assert name == "eager"
    assert why in said
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
    torch.testing.assert_close(gw.load(tmp_path / "net.gw", model)(X), model(X))


def test_what_a_build_does_to_the_model_is_put_back_and_later_changes_stay(
    model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    def touches(model: nn.Module) -> Callable[..., Any]:
        model.scales[0] = 3.0
        return raises(model)

    tuned = tuned_with("eager", model)
    model.scales = [2.0]
    plant("eager", form=Candidate(Planted("form", touches)))
    with pytest.raises(gw.ArtifactError, match=f"eager cannot be saved: {WHY}; form failed: "):
        gw.save(tuned, tmp_path / "net.gw")
    assert model.scales == [2.0]
    assert list(tmp_path.iterdir()) == []


def test_several_samples_are_all_answered(
    model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    calls = [(torch.randn(n, 16),) for n in (2, 5)]
    tuned = tuned_with(CHOICE, model, samples=calls)
    plant(CHOICE, form=named("fused"))
    assert saved(tuned, tmp_path / "net.gw")[0] == "fused"
    loaded = gw.load(tmp_path / "net.gw")
    for args in calls:
        torch.testing.assert_close(loaded(*args), model(*args))
    assert loaded.calls == {"tuned": 2}


@pytest.mark.parametrize("name", ["fused", "eager"])
def test_calls_between_buckets_are_answered_too(
    name: str, model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    shapes = ({0: Dim("batch", min=1, max=5)},)
    tuned = tuned_with(CHOICE, model, dynamic_shapes=shapes, buckets=gw.Buckets(batch=[2, 5]))
    plant(CHOICE, form=named("fused") if name == "fused" else None)
    assert saved(tuned, tmp_path / "net.gw")[0] == name
    loaded = gw.load(tmp_path / "net.gw", model)
    for size in (2, 3, 5):
        x = torch.randn(size, 16)
        torch.testing.assert_close(loaded(x), model(x))
    if name == "fused":
        assert loaded.calls == {"tuned": 2, "tuned, padded to a bucket": 1}


def test_without_the_model_nothing_takes_its_place(
    model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    gw.save(tuned_with("fused", model), tmp_path / "net.gw")
    loaded = gw.load(tmp_path / "net.gw")
    plant("fused")
    with pytest.raises(gw.ArtifactError, match=f"fused cannot be saved: {WHY}.\n.*exclude="):
        gw.save(loaded, tmp_path / "other.gw")


def test_a_strategy_of_the_user_s_is_replaced_too(model: nn.Module, tmp_path: Path) -> None:
    def plain(model: nn.Module) -> Callable[..., Any]:
        return torch.no_grad()(model)

    tuned = tuned_with(Planted("mine", plain), model)
    name, said = saved(tuned, tmp_path / "net.gw")
    assert name == "eager"
    assert "mine, " in said
    assert "is a strategy of your own" in said


def test_where_the_choice_itself_is_wanted_nothing_takes_its_place(
    model: nn.Module, plant: Callable[..., None], tmp_path: Path
) -> None:
    """As for the first answers of cold starts, which would be those of another strategy."""
    tuned = tuned_with(CHOICE, model)
    plant(CHOICE)
    with pytest.raises(gw.ArtifactError, match=f"{CHOICE} cannot be saved: {WHY}"):
        saving.save_choice(tuned, tmp_path / "net.gw")


@pytest.mark.parametrize(
    "name", ["inductor:freeze", "inductor:freeze+graph", "bf16+inductor:freeze"]
)
def test_frozen_inductor_has_a_form_that_can_be_saved(name: str) -> None:
    (candidate,) = parse_candidates([name], ("bf16",))
    form = savable_form(candidate)
    assert substitute.unsavable(candidate) is not None
    assert form is not None
    assert form.name == name.replace("inductor", "aot_inductor")
    assert substitute.unsavable(form) is None
    assert savable_form(form) is None


LOADED = """
import sys, torch, graphwright as gw
tuned = gw.load(sys.argv[1], trust=True)
torch.save((tuned(torch.load(sys.argv[2])), dict(tuned.calls), tuned.report.chosen), sys.argv[3])
"""


@pytest.mark.long
@pytest.mark.slow
def test_frozen_inductor_is_saved_as_a_package_and_right_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolution and batch norm, and linear layers, whose frozen weights oneDNN packs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.tail = Net()
            self.head = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
            return {"y": self.tail(self.head(y)), "n": 3}

    model, x = Block().eval(), torch.randn(4, 3, 12, 12)
    model.norm.running_mean.normal_()
    # Which of two is faster is no question of a test.
    monkeypatch.setattr(substitute, "_AS_GOOD", float("inf"))
    with choosing("inductor:freeze"):
        tuned = gw.tune(model, (x,), strategies=["inductor:freeze"], remember=False)
    assert tuned.report.chosen == "inductor:freeze"
    name, said = saved(tuned, tmp_path / "net.gw")
    assert name == "aot_inductor:freeze", said
    tuned(x)
    assert tuned.calls == {"tuned": 1}
    torch.save(x, tmp_path / "x.pt")
    files = [tmp_path / each for each in ("net.gw", "x.pt", "y.pt")]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", LOADED, *files], env=os.environ | caches, check=True)
    y, calls, chosen = torch.load(tmp_path / "y.pt")
    with torch.no_grad():
        torch.testing.assert_close(y["y"], model(x)["y"])
    assert calls == {"tuned": 1}
    assert chosen == "aot_inductor:freeze"
    # In place of the model its weights are stored once, and answer other calls.
    loaded = gw.load(tmp_path / "net.gw", model, trust=True)
    torch.testing.assert_close(loaded(x[:2])["y"], model(x[:2])["y"])
