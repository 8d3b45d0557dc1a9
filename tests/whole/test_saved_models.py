"""`tune --save` on the reference models: a file that loads, and is right, in a fresh process.

With `-rP` pytest prints what was chosen, what was saved, and the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.cases import MODELS
from graphwright.report.report import Report
from graphwright.report.table import duration

ROOT = Path(__file__).parents[2]
# The one that cannot be saved, and one that can; all that there is would take long.
ON_CPUS = ("--strategies", "inductor:freeze,fused")
TARGET = """
import torch
from bench import cases

def target():
    return cases.load({name!r}, torch.device({device!r}))
"""
ANSWERS = """
import json, sys, torch, graphwright as gw
from torch.utils import _pytree as pytree
from target import target
model, given = target()
args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
with torch.no_grad():
    right = model(*args, **kwargs)
tuned = gw.load(sys.argv[1], model, trust=True)
pairs = zip(*(pytree.tree_leaves(each) for each in (tuned(*args, **kwargs), right)), strict=True)
pairs = [(a.double(), b.double()) for a, b in pairs if isinstance(a, torch.Tensor)]
errors = [float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs]
print(json.dumps([dict(tuned.calls), tuned.report.chosen, tuned._choice.loaded, errors]))
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_tune_saves_of_a_reference_model_is_right_in_a_fresh_process(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    if device.type == "cpu" and name != "mlp":
        pytest.skip("takes minutes on a CPU")
    if name in ("resnet50", "mobilenet_v3_large", "vit_b_16"):
        pytest.importorskip("torchvision")
    (tmp_path / "target.py").write_text(TARGET.format(name=name, device=device.type))
    paths = os.pathsep.join([str(ROOT), str(tmp_path), *filter(None, sys.path)])
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "tuning")}
    variables = {**os.environ, **caches, "PYTHONPATH": paths}
    file, report = tmp_path / "model.gw", tmp_path / "report.json"
    tune = [sys.executable, "-m", "graphwright", "tune", f"{tmp_path / 'target.py'}:target"]
    tune += ["--device", device.type, "--fresh", "--json", str(report), "--save", str(file)]
    began = time.monotonic()
    result = subprocess.run(
        [*tune, *(ON_CPUS if device.type == "cpu" else ())],
        env=variables,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - began
    assert result.returncode == 0, result.stderr
    answers = subprocess.run(
        [sys.executable, "-c", ANSWERS, str(file)],
        env=variables | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "loading")},
        capture_output=True,
        text=True,
    )
    assert answers.returncode == 0, answers.stderr
    calls, chosen, how, errors = json.loads(answers.stdout.splitlines()[-1])
    assert calls == {"tuned": 1}
    assert max(errors) < (1e-4 if device.type == "cpu" else 2e-2)
    found = Report.from_json(report.read_text(encoding="utf-8"))
    winner = found.chosen_row
    assert winner is not None
    assert winner.measurement is not None
    latency = duration(winner.measurement.latencies.median)
    print(f"{name}: chosen {winner.strategy}, {latency}; tuned in {found.seconds:.0f} s")
    print(f"  saved {chosen}, loaded {how}; {seconds:.0f} s in all")
    print(f"  {result.stdout.strip().splitlines()[-1]}")
    if winner.strategy != chosen:
        assert f"{winner.strategy}, " in result.stdout
        assert f"Saved in its place: {chosen}, " in result.stdout
