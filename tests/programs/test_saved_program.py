"""An accelerated program is saved, loaded into another object of it, and remembered."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.programs import acceleration, remembered
from graphwright.programs.accelerated import PartLearner

OPTIONS: dict[str, Any] = {
    "strategies": ["torchscript:freeze"],
    "isolate": False,
    "progress": False,
    "budget_s": 12.0,  # Enough on a busy machine too, where eager would be taken otherwise.
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::graphwright.FallbackWarning", "ignore::DeprecationWarning"
)


class Stage(nn.Module):
    """Eager takes its time, a trace does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        made: torch.Tensor = self.layer(x).relu()
        return made

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        made: torch.Tensor = self.layer(z).tanh()
        return made


class Stages:
    def __init__(self, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.encoder, self.decoder = Stage().eval().to(device), Stage().eval().to(device)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder.decode(self.encoder(x))


def calls(device: torch.device) -> list[Any]:
    return [torch.ones(2, 8, device=device) / 3]


def tuned_calls(found: gw.Accelerated) -> int:
    return sum(part.calls["tuned"] for part in found.parts)


def test_it_is_loaded_into_another_object(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, (x,) = Stages(device), calls(device)
    expected = program(x)
    found = gw.accelerate(program, [x], remember=False, buckets=None, **OPTIONS)
    names = gw.save(found, tmp_path / "program.gw")
    assert names == "torchscript:freeze, torchscript:freeze"
    with pytest.raises(gw.ArtifactError, match="coder has other weights than the one that was"):
        gw.load(tmp_path / "program.gw", Stages(device, seed=1), trust=True)
    other = Stages(device)
    with pytest.raises(gw.ArtifactError, match="trust"):
        gw.load(tmp_path / "program.gw", other)
    assert type(other.encoder) is Stage
    loaded = gw.load(tmp_path / "program.gw", other, trust=True)
    torch.testing.assert_close(other(x), expected)
    assert tuned_calls(loaded) == 2
    assert loaded.speedup == found.speedup
    y = torch.ones(5, 8, device=device)
    torch.testing.assert_close(other(y), program(y))
    monkeypatch.setattr(loaded, "_learner", PartLearner(OPTIONS, buckets=False))
    assert loaded.learn() == 2
    assert tuned_calls(loaded) == 0
    torch.testing.assert_close(other(y), program(y))
    assert tuned_calls(loaded) == 2
    loaded.undo()
    assert type(other.encoder) is Stage
    torch.testing.assert_close(other(x), expected)


def test_what_cannot_be_saved_or_loaded_is_said(device: torch.device, tmp_path: Path) -> None:
    program, file = Stages(device), tmp_path / "program.gw"
    found = gw.accelerate(program, calls(device), remember=False, buckets=None, **OPTIONS)
    gw.save(found, file)
    with pytest.raises(gw.ArtifactError, match="holds an accelerated program, and none was given"):
        gw.load(file)

    class Other:
        def __init__(self) -> None:
            self.encoder = program.encoder

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.encoder(x)
            return made

    other = Other()
    with pytest.raises(gw.ArtifactError, match="Other has no module 'decoder', which was saved"):
        gw.load(file, other, trust=True)
    with pytest.raises(gw.ArtifactError, match="cannot be written"):
        gw.save(found, tmp_path / "no such folder" / "program.gw")
    found.undo()
    with pytest.raises(gw.ArtifactError, match="there is nothing to save"):
        gw.save(found, file)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["program.gw"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 99}, "another version"),
        ({"parts": [{"path": "encoder"}]}, "damaged"),
        ({"parts": 3}, "damaged"),
        ({"name": None}, ""),
    ],
)
def test_a_file_that_was_tampered_with(
    change: dict[str, Any], reason: str, device: torch.device, tmp_path: Path
) -> None:
    known = {
        "schema": "graphwright.program",
        "schema_version": 1,
        "graphwright": "0",
        "name": "Stages",
        "before_s": 2.0,
        "after_s": 1.0,
        "weights": {},
        "parts": [],
    }
    with zipfile.ZipFile(tmp_path / "program.gw", "w") as archive:
        archive.writestr("program.json", json.dumps(known | change))
    if not reason:
        assert gw.load(tmp_path / "program.gw", Stages(device)).parts == []
        return
    with pytest.raises(gw.ArtifactError, match=reason):
        gw.load(tmp_path / "program.gw", Stages(device))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path / "programs"


def test_a_second_time_takes_what_was_found(
    cache: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = calls(device)
    program = Stages(device)
    expected = program(x)
    gw.accelerate(program, [x], buckets=None, **OPTIONS).undo()
    assert len(list(cache.glob("*.gw"))) == 1
    looked: list[Any] = []
    original = remembered.load_program
    monkeypatch.setattr(
        remembered,
        "load_program",
        lambda *given, **named: looked.append(given) or original(*given, **named),
    )
    again = Stages(device)
    found = gw.accelerate(again, [x], buckets=None, **OPTIONS)
    assert len(looked) == 1
    assert not found.inspection.rows  # Nothing was looked at once more.
    torch.testing.assert_close(again(x), expected)
    assert all(part.kept for part in found.parts)
    # With other weights, calls or options it is found again.
    gw.accelerate(Stages(device, seed=1), [x], buckets=None, **OPTIONS)
    gw.accelerate(Stages(device), [x + 1], buckets=None, **OPTIONS)
    gw.accelerate(Stages(device), [x], buckets=None, tolerance=1e-2, **OPTIONS)
    gw.accelerate(Stages(device), [x], fresh=True, buckets=None, **OPTIONS)
    assert len(looked) == 1
    assert len(list(cache.glob("*.gw"))) == 4


@pytest.mark.slow
def test_what_is_wrong_by_now_is_found_again(
    cache: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = calls(device)
    gw.accelerate(Stages(device), [x], buckets=None, **OPTIONS).undo()
    (file,) = cache.glob("*.gw")
    whole_file = file.read_bytes()
    half = len(whole_file) // 2
    flipped = whole_file[:half] + bytes([whole_file[half] ^ 1]) + whole_file[half + 1 :]
    for content in (flipped, whole_file[:900], b"", b"no zip"):
        file.write_bytes(content)
        program = Stages(device)
        expected = program(x)
        found = gw.accelerate(program, [x], buckets=None, **OPTIONS)
        torch.testing.assert_close(program(x), expected)
        assert found.inspection.rows
    monkeypatch.setattr(remembered.WholeProgram, "difference", lambda *_: "it differs")
    monkeypatch.setattr(remembered.WholeProgram, "__init__", lambda *_: None)
    program = Stages(device)
    whole: Any = remembered.WholeProgram
    assert remembered.recall(file.stem, program, whole(), PartLearner({})) is None
    assert type(program.encoder) is Stage


@pytest.mark.slow
def test_the_key_is_the_same_in_every_process(cache: Path) -> None:
    code = (
        "import torch, graphwright as gw; from graphwright.programs import remembered;"
        "from torch import nn; torch.manual_seed(0); m = {'m': nn.Linear(2, 2).eval()};"
        "print(remembered.key_of(m, [torch.ones(3), 'a text'], lambda p, c: p(c), "
        "torch.device('cpu'), {'a': 1, 'b': None}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


NAMED = "SentenceTransformer"


class SentenceTransformer(nn.Module):
    """Takes longer for large batches, as padding may."""

    __module__ = "sentence_transformers.models"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        return made

    def encode(self, texts: list[str], batch_size: int = 32) -> torch.Tensor:
        time.sleep(2e-4 * batch_size)
        return self(torch.tensor([[float(len(text))] * 4 for text in texts]))


def test_a_batch_size_is_saved_loaded_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = SentenceTransformer().eval()
    with torch.no_grad():
        found = gw.accelerate(model, [["a", "bcd"]], modules=[f"{NAMED}.encode"], **OPTIONS)
        assert {part.chosen for part in found.parts if part.kept} == {"batch_size=4"}
        assert gw.save(found, tmp_path / "program.gw") == "batch_size=4"
        found.undo()
        loaded = gw.load(tmp_path / "program.gw", model)
        assert {part.chosen for part in loaded.parts if part.kept} == {"batch_size=4"}
        loaded.undo()
        with mock.patch.object(acceleration, "_Asked", side_effect=AssertionError("anew")):
            again = gw.accelerate(model, [["a", "bcd"]], modules=[f"{NAMED}.encode"], **OPTIONS)
        assert "batch_size=4" in str(again.parts[0])
        again.undo()
