"""save() and load() of what was tuned for calls with objects among their arguments."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_artifacts import choosing, rewritten
from torch import nn

import graphwright as gw

SIZE = 4


@dataclasses.dataclass
class Rows:
    """Grows, is written to in place, counts and forgets."""

    rows: torch.Tensor
    table: torch.Tensor
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)
    steps: int = 0
    old: torch.Tensor | None = None


@dataclasses.dataclass
class Answer:
    y: torch.Tensor
    cache: Rows
    name: str = "answer"


class Cached(nn.Module):
    """Starts a cache, or goes on with one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, cache: Rows | None = None) -> Answer:
        y = torch.relu(self.first(x))
        if cache is None:
            return Answer(y, Rows(y * 2, y[0] + 1, [y]))
        cache.rows = torch.cat([cache.rows, y])
        cache.table.add_(1)
        cache.seen.append(y * 2)
        cache.steps += 1
        cache.__dict__.pop("old", None)
        return Answer(self.second(cache.rows).sum(0) + cache.table, cache)


class Holding(Cached):
    """Returns an object of its own, which no file can name."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = Rows(torch.ones(1), torch.ones(1))

    def forward(self, x: torch.Tensor, cache: Rows | None = None) -> Any:
        return super().forward(x, cache), self.kind


def cache_of(rows: int, device: torch.device | str = "cpu") -> Rows:
    torch.manual_seed(rows)
    return Rows(torch.randn(rows, SIZE, device=device), torch.ones(SIZE, device=device))


def tuned_by(name: str, model: nn.Module, device: torch.device | str = "cpu") -> gw.TunedModule:
    """It as a strategy answers calls without a cache, and with one of two lengths."""
    x = torch.ones(1, SIZE, device=device)
    quick = mock.patch.multiple("graphwright.tuning.tuner", SCREENING_S=0.02, FINAL_S_EACH=0.02)
    with choosing(name), quick, torch.no_grad():
        tuned = gw.tune(
            model,
            samples=[(x,), (x, cache_of(2, device)), (x, cache_of(3, device))],
            strategies=[name],
            remember=False,
            isolate=False,
            progress=False,
        )
    assert tuned.report.chosen == name, tuned.report.row(name)
    return tuned


def assert_alike(mine: Any, its: Any) -> None:
    assert type(mine) is type(its)
    if isinstance(its, torch.Tensor):
        torch.testing.assert_close(mine, its)
        assert not mine.requires_grad
    elif isinstance(its, Rows | Answer):
        assert vars(mine).keys() == vars(its).keys()
        for name, value in vars(its).items():
            assert_alike(getattr(mine, name), value)
    elif isinstance(its, list):
        assert len(mine) == len(its)
        for pair in zip(mine, its, strict=True):
            assert_alike(*pair)
    else:
        assert mine == its


def same_as_eager(loaded: Any, model: nn.Module, device: torch.device | str = "cpu") -> None:
    """All calls that it was tuned for, with other values, and their effects."""
    with torch.no_grad():
        for rows in (2, 3, 2):
            x, cache = torch.randn(1, SIZE, device=device), cache_of(rows, device)
            other = copy.deepcopy(cache)
            result = loaded(x, cache)
            assert_alike(result, model(x, other))
            assert_alike(cache, other)
            assert result.cache is cache
        assert_alike(loaded(x), model(x))
    assert loaded.calls == {"tuned": 4}


def model_on(device: torch.device | str = "cpu", kind: type[nn.Module] = Cached) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval().to(device)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It by a strategy whose files are no code, which loads without the model."""
    path = tmp_path_factory.mktemp("saved") / "cached.gw"
    assert gw.save(tuned_by("torchscript", model_on()), path) == "torchscript"
    return path


LOADED = """
import sys, torch, graphwright as gw
sys.path[:0] = sys.argv[3:]
path, needs_model = sys.argv[1], sys.argv[2] == "model"
model = None
if needs_model:
    from test_object_calls import model_on
    model = model_on()
    with torch.no_grad():
        model.second.weight.zero_()  # The file's are other ones.
loaded = gw.load(path, model, trust=True)
from test_object_calls import model_on, same_as_eager
same_as_eager(loaded, model_on())
print(*loaded._choice.loaded)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["eager", "torchscript", "aot_autograd"])
def test_what_was_saved_answers_calls_with_objects_in_another_process(
    strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "cached.gw"
    tuned = tuned_by(strategy, model_on())
    assert gw.save(tuned, path) == strategy
    for needs_model in ["model"] + ["alone"] * (strategy == "torchscript"):
        places = [str(Path(__file__).parent), *sys.path]
        done = subprocess.run(
            [sys.executable, "-c", LOADED, str(path), needs_model, *places],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        how = "as it was saved" if strategy == "torchscript" else "built again"
        assert done.stdout.strip() == how


def test_it_is_loaded_and_saved_again(device: torch.device, tmp_path: Path) -> None:
    model, first, second = model_on(device), tmp_path / "first.gw", tmp_path / "second.gw"
    gw.save(tuned_by("torchscript", model, device), first)
    for given in (None, copy.deepcopy(model)):
        loaded = gw.load(first, given, trust=True)
        same_as_eager(loaded, model, device)
        gw.save(loaded, second)
        same_as_eager(gw.load(second, trust=True), model, device)
    assert copy.deepcopy(loaded)(torch.ones(1, SIZE, device=device)).name == "answer"


@pytest.mark.slow
def test_other_calls_than_those_that_were_saved(saved: Path) -> None:
    model, x = model_on(), torch.ones(1, SIZE)
    with torch.no_grad():
        alone, beside = gw.load(saved, trust=True), gw.load(saved, model, trust=True)
        with pytest.raises(gw.SignatureError, match=r"cache\.rows|args\[1\]\.rows"):
            alone(x, cache_of(4))
        with pytest.warns(RuntimeWarning, match="another signature"):
            assert_alike(beside(x, cache_of(4)), model(x, cache_of(4)))


def test_objects_of_a_file_are_made_for_those_who_allow_it_only(tmp_path: Path) -> None:
    path, model = tmp_path / "eager.gw", model_on()
    gw.save(tuned_by("eager", model), path)
    with pytest.raises(gw.ArtifactError, match=r"objects of .*Rows.*may not make"):
        gw.load(path)
    same_as_eager(gw.load(path, model), model)


def test_results_that_no_file_can_name_need_the_model(tmp_path: Path) -> None:
    path, model = tmp_path / "holding.gw", model_on(kind=Holding)
    gw.save(tuned_by("torchscript", model), path)
    with pytest.raises(gw.ArtifactError, match="could not be written"):
        gw.load(path, trust=True)
    mine, x = gw.load(path, model, trust=True), torch.ones(1, SIZE)
    with torch.no_grad():
        found, expected = mine(x, cache_of(2)), model(x, cache_of(2))
    assert found[1] is model.kind
    assert_alike(found[0], expected[0])
    assert mine.calls == {"tuned": 1}


def made_of(stored: list[Any]) -> Any:
    """What is written of the second call's result and effects."""
    return stored[1]["made"]


def attributes_of(stored: list[Any]) -> Any:
    """Its change of the cache's attributes."""
    return next(each for each in made_of(stored)["changes"] if each[1])


def put(place: Any, key: Any, value: Any) -> None:
    place[key] = value


def node_of(tree: Any, kind: str) -> Any:
    """The first node of a kind in a tree."""
    if isinstance(tree, dict):
        if tree.get("node") == kind:
            return tree
        return next(filter(None, (node_of(each, kind) for each in tree["children"])), None)
    return None


def given_object(stored: list[Any], position: Any) -> None:
    tree = json.loads(made_of(stored)["tree"]["tree"])
    node_of(tree, "GivenNode")["context"] = position
    made_of(stored)["tree"]["tree"] = json.dumps(tree)


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: put(attributes_of(stored), 0, 99),
        lambda stored: put(attributes_of(stored), 0, -1),
        lambda stored: put(attributes_of(stored), 0, True),
        lambda stored: put(attributes_of(stored), 1, 1),
        lambda stored: put(attributes_of(stored), 2, {"list": ["__class__"]}),
        lambda stored: put(attributes_of(stored), 2, {"list": [{"int": "1"}]}),
        lambda stored: put(attributes_of(stored), 3, -1),
        lambda stored: made_of(stored)["changes"].pop(),
        lambda stored: made_of(stored)["tree"]["slots"].pop(),
        lambda stored: put(
            made_of(stored)["tree"],
            "tree",
            made_of(stored)["tree"]["tree"].replace("rows", "__class__"),
        ),
        lambda stored: given_object(stored, 99),
        lambda stored: given_object(stored, -1),
        lambda stored: given_object(stored, "0"),
        lambda stored: stored[1].pop("call"),
        lambda stored: stored.pop(),
        lambda stored: put(stored, slice(None), []),
    ],
)
def test_effects_that_no_one_wrote_are_refused(change: Any, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.gw"
    path.write_bytes(saved.read_bytes())

    def changed(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        stored = json.loads(members["objects.json"])
        change(stored)
        members["objects.json"] = json.dumps(stored).encode()

    rewritten(path, lambda members, manifest: None)
    gw.load(path, trust=True)
    rewritten(path, changed)
    with pytest.raises(gw.ArtifactError):
        gw.load(path, trust=True)
