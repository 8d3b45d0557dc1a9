"""save() and load(): what comes back is what was saved, or a sentence why not."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from chosen import choosing
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim

import graphwright as gw
from graphwright.artifacts import container
from graphwright.artifacts.loading import start_device
from graphwright.calls.serialization import packed, read_tensors, unpacked, write_tensors
from graphwright.calls.written_trees import tree_of
from graphwright.fusion.serialization import read, stored
from graphwright.strategies.registry import parse_candidates

CPU = torch.device("cpu")


class Net(nn.Module):
    """Convolution, batch norm, a dictionary of results with a plain value among them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        y = torch.relu(self.norm(self.conv(x)))
        return {"y": self.head(y.mean((2, 3))) * scale, "n": 3}


class Rows(nn.Module):
    """Two linear layers on a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def net(device: torch.device = CPU, width: int = 8) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(width).eval().to(device)
    model.norm.running_mean.normal_()
    return model, torch.randn(2, 3, 8, 8, device=device)


def tuned_with(
    name: str, model: Any, args: tuple[Any, ...], kwargs: Any = None, **options: Any
) -> gw.TunedModule:
    given = {"strategies": [name], "remember": False, "isolate": False, "progress": False}
    quick = mock.patch.multiple("graphwright.tuning.tuner", SCREENING_S=0.02, FINAL_S_EACH=0.02)
    with choosing(name), quick:
        tuned = gw.tune(model, args, kwargs, **given | options)
    row = tuned.report.row(name)
    assert row is not None
    if row.status == "unavailable":
        pytest.skip(row.reason)
    assert tuned.report.chosen == name, row.reason
    return tuned


def same(actual: Any, expected: Any) -> None:
    assert set(actual) == set(expected)
    assert actual["n"] == expected["n"]
    torch.testing.assert_close(actual["y"], expected["y"], rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused model of the CPU, as it was saved."""
    path = tmp_path_factory.mktemp("saved") / "net.gw"
    model, x = net()
    gw.save(tuned_with("fused", model, (x,), {"scale": 3.0}), path)
    return path


# Each strategy, in another process.

LOADED = """
import json, sys, torch, graphwright as gw
from pathlib import Path
folder, device, tests, known = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
sys.path.insert(0, tests)
x, told = torch.load(folder / "x.pt", map_location=device), {}
for name, (trust, needs_model) in known.items():
    model = None
    if needs_model:
        from test_artifacts import Net
        model = Net().eval().to(device)
    tuned = gw.load(folder / name / "net.gw", model, trust=trust)
    torch.save(tuned(x, scale=3.0), folder / name / "y.pt")
    told[name] = [dict(tuned.calls), tuned._choice.loaded]
from torch._dynamo.utils import counters
print(json.dumps([told, counters["inductor"]["fxgraph_cache_miss"]]))
"""
STRATEGIES = {
    # The name, whether it needs trust, whether it needs the model.
    "eager:no_grad": (False, True),
    "fused": (False, False),
    "channels_last+fused": (False, False),
    "torchscript": (True, False),
    "torchscript:optimize": (True, False),
    "channels_last+torchscript:freeze": (True, False),
    "onnxruntime": (False, False),
    "aot_autograd": (False, True),
    "aot_inductor": (True, False),
    "inductor": (True, True),
    "fused+graph": (False, False),
    "inductor+graph": (True, True),
}


def saved_net(name: str, device: str, folder: str) -> None:
    """Tune, have a strategy chosen, and save."""
    model, x = net(torch.device(device))
    gw.save(tuned_with(name, model, (x,), {"scale": 3.0}), Path(folder) / "net.gw")


@pytest.mark.long
@pytest.mark.slow
def test_each_strategy_is_the_same_in_another_process(tmp_path: Path, device: torch.device) -> None:
    candidates = parse_candidates(list(STRATEGIES), ())
    names = [c.name for c in candidates if c.availability(device).available]
    # All but those that want a GPU, or the build of ONNX Runtime that goes with one.
    optional = "+graph" if device.type == "cpu" else "onnxruntime"
    assert {name for name in STRATEGIES if not name.endswith(optional)} <= set(names)
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join([tests, *filter(None, sys.path)])
    variables = os.environ | {"PYTHONPATH": paths}
    for name in names:
        (tmp_path / name).mkdir()
    # Its cache is found by all of torch.compile's options, which other strategies change here.
    mine = variables | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "mine")}
    for name in filter(lambda name: name.startswith("inductor"), names):
        given = repr((name, str(device), str(tmp_path / name)))
        code = f"import test_artifacts; test_artifacts.saved_net(*{given})"
        subprocess.run([sys.executable, "-c", code], env=mine, check=True)
    model, x = net(device)
    for name in names:
        if not name.startswith("inductor"):
            saved_net(name, str(device), str(tmp_path / name))
        trust, needs_model = STRATEGIES[name]
        if trust:
            with pytest.raises(gw.ArtifactError, match=r"is code.*\n.*trust=True"):
                gw.load(tmp_path / name / "net.gw", model)
        if needs_model:
            with pytest.raises(gw.ArtifactError, match=r"built from the model"):
                gw.load(tmp_path / name / "net.gw", trust=True)
    torch.save(x, tmp_path / "x.pt")
    known = json.dumps({name: STRATEGIES[name] for name in names})
    result = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path), str(device), tests, known],
        env=variables | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "other")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    told, compiled = json.loads(result.stdout.splitlines()[-1])
    assert compiled == 0
    for name in names:
        calls, how = told[name]
        assert calls == {"tuned": 1}, name  # Nothing went to eager.
        assert (how == ["as it was saved"]) is not STRATEGIES[name][1], name
        with torch.no_grad():
            same(torch.load(tmp_path / name / "y.pt", map_location=device), model(x, scale=3.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnxruntime", "aot_inductor"])
def test_what_was_saved_for_a_range_of_sizes_answers_all_of_them(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    torch.manual_seed(0)
    model, x = Rows().eval().to(device), torch.randn(32, 16, device=device)
    shapes = ({0: Dim("batch", min=1, max=32)},)
    buckets = gw.Buckets(batch=[1, 8, 32])
    tuned = tuned_with(name, model, (x,), dynamic_shapes=shapes, buckets=buckets)
    gw.save(tuned, tmp_path / "rows.gw")
    loaded = gw.load(tmp_path / "rows.gw", trust=name == "aot_inductor")
    for size in range(1, 33):
        x = torch.randn(size, 16, device=device)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(tuned(x), expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(loaded(x), expected, rtol=2e-4, atol=2e-5)
    assert loaded.calls == tuned.calls == {"tuned": 32}
    with pytest.raises(gw.SignatureError, match="batch is 33; what was built answers 1 to 32"):
        loaded(torch.randn(33, 16, device=device))
    with pytest.raises(gw.SignatureError, match="args"):
        loaded(torch.randn(16, 8, device=device).t()[:, :16])


class Parts(nn.Module):
    """Results of several kinds, each of the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, scale: float) -> dict[str, Any]:
        y = torch.relu(self.first(x))
        return {"y": self.second(y) * scale, "n": x.shape[0], "more": [y[:, :4], y.t() + 1, x]}


def saved_parts(path: Path, device: torch.device) -> tuple[nn.Module, str]:
    """A model tuned for three sizes of a batch and saved; and its strategy."""
    name = "fused" if device.type == "cpu" else "fused+graph"
    torch.manual_seed(0)
    model, x = Parts().eval().to(device), torch.randn(32, 16, device=device)
    shapes = ({0: Dim("batch", min=1, max=64)}, None)
    buckets = gw.Buckets(batch=[1, 8, 32])
    gw.save(tuned_with(name, model, (x, 2.0), dynamic_shapes=shapes, buckets=buckets), path)
    return model, name


def test_calls_between_buckets_are_padded_after_loading(
    tmp_path: Path, device: torch.device
) -> None:
    model, name = saved_parts(tmp_path / "parts.gw", device)
    loaded = gw.load(tmp_path / "parts.gw")
    assert loaded.report.chosen == name
    for size in range(1, 33):
        x = torch.randn(size, 16, device=device)
        with torch.no_grad():
            found, expected = loaded(x, 2.0), model(x, 2.0)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
        for mine, eager in zip(found["more"], expected["more"], strict=True):
            assert mine.stride() == eager.stride()
        assert found["more"][2] is x
    assert loaded.calls == {"tuned": 3, "tuned, padded to a bucket": 29}
    with pytest.raises(gw.SignatureError, match=r"args\[0\] is \(33, 16\)"):
        loaded(torch.randn(33, 16, device=device), 2.0)
    with pytest.raises(gw.SignatureError, match="strides"):
        loaded(torch.randn(16, 5, device=device).t(), 2.0)
    with pytest.raises(gw.SignatureError, match=r"3\.0"):
        loaded(torch.randn(5, 16, device=device), 3.0)
    both = gw.load(tmp_path / "parts.gw", model)
    with torch.no_grad():
        both(x[:5], 2.0)
        model.first.weight.mul_(2)
        torch.testing.assert_close(both(x[:5], 2.0), model(x[:5], 2.0))
    assert both.calls == {"tuned, padded to a bucket": 1, "eager: the module changed": 1}


def test_results_with_gaps_are_still_sliced_after_loading(tmp_path: Path) -> None:
    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.relu(self.linear(x))
            return y, (y > 0.1)[:, ::4]

    model, x = Gaps().eval(), torch.randn(2, 8)
    tuned = tuned_with("fused", model, (x,), buckets=gw.Buckets(batch=[1, 2, 4]))
    gw.save(tuned, tmp_path / "gaps.gw")
    loaded = gw.load(tmp_path / "gaps.gw", model)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for mine, eager in zip(loaded(x), model(x), strict=True):
            torch.testing.assert_close(mine, eager)
            assert mine.stride() == eager.stride()
    assert loaded.calls == {"tuned, padded to a bucket": 1}


def test_plans_that_lead_out_of_a_bucket_are_refused(tmp_path: Path) -> None:
    saved_parts(tmp_path / "parts.gw", CPU)
    path = tmp_path / "changed.gw"

    def refused(text: str, change: Callable[[dict[str, Any]], Any]) -> None:
        def inner(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
            known = json.loads(members["between.json"])
            change(known[3])
            members["between.json"] = json.dumps(known).encode()

        shutil.copy(tmp_path / "parts.gw", path)
        rewritten(path, inner)
        with pytest.raises(gw.ArtifactError, match=f"padded makes no sense: .*{text}"):
            gw.load(path)

    refused("cuts", lambda plan: plan["cuts"][0].update(shape=[99, 4]))
    refused("lays a result", lambda plan: plan["cuts"][0].update(stride=[10**9, 1]))
    refused("no sizes", lambda plan: plan["cuts"][0].update(stride=[-4, 1]))
    refused("whole number", lambda plan: plan.update(cuts=[{"whole": False, "number": "x"}]))
    refused("neither whole", lambda plan: plan["cuts"][1].update(whole="yes"))
    refused("whole and a number", lambda plan: plan["cuts"][1].update(whole=True))
    refused("for what is none", lambda plan: plan["cuts"].__setitem__(0, plan["cuts"][1]))
    refused("over each other", lambda plan: plan["cuts"][2].update(stride=[1, 1]))
    refused("other results", lambda plan: plan["cuts"].pop())
    refused("pads a tensor", lambda plan: plan.update(widths=[[0, 0, 0, 90], None]))
    refused("its widths", lambda plan: plan.update(widths=[[1, 0, 0, 3], None]))
    refused("what is no tensor", lambda plan: plan["widths"].__setitem__(1, [0, 1]))
    refused("no number", lambda plan: plan.update(fills=["0", 0]))
    refused("other arguments", lambda plan: plan.update(fills=[0]))
    refused("other tensors", lambda plan: plan.update(call=[None, None]))
    refused("IndexError", lambda plan: plan.update(bucket=9))


# What is loaded keeps the contracts of what was tuned.


@pytest.mark.slow
def test_with_the_model_other_calls_are_eager_and_it_gets_the_weights(saved: Path) -> None:
    right, x = net()
    torch.manual_seed(7)
    model = Net().eval()
    tuned = gw.load(saved, model)
    same(tuned(x, scale=3.0), right(x, scale=3.0))
    same(tuned(x[:1], scale=1.0), right(x[:1], scale=1.0))
    assert tuned.calls == {"tuned": 1, "eager: another signature": 1}
    assert "loaded from a file: as it was saved" in tuned.explain()
    with torch.no_grad():
        model.head.weight.add_(1.0)
    same(tuned(x, scale=3.0), model(x, scale=3.0))
    assert tuned.calls["eager: the module changed"] == 1


def test_without_the_model_other_calls_are_refused(saved: Path) -> None:
    _, x = net()
    tuned = gw.load(saved)
    for args, kwargs, why in (
        ((x[:1],), {"scale": 3.0}, r"args\[0\] is \(1, 3, 8, 8\)"),
        ((x,), {"scale": 1.0}, "scale is float 1.0"),
        ((x,), {}, r"no scale; saved with scale=3\.0"),
        ((x.double(),), {"scale": 3.0}, "float64"),
    ):
        with pytest.raises(gw.SignatureError, match=why):
            tuned(*args, **kwargs)
    assert list(tuned.parameters()) == []


def test_what_was_loaded_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    right, x = net()
    gw.save(gw.load(saved), tmp_path / "again.gw")
    same(gw.load(tmp_path / "again.gw")(x, scale=3.0), right(x, scale=3.0))


def test_parameters_keep_their_names_and_files_without_them_load(
    saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "net.gw"
    shutil.copy(saved, path)
    for _ in range(2):
        tuned = gw.load(path)
        assert tuned._choice.module.argument_names == ("x", "scale")
        gw.save(tuned, path)
    facts_without("argument_names")(path)  # As earlier versions saved it.
    right, x = net()
    tuned = gw.load(path)
    assert tuned._choice.module.argument_names == ()
    same(tuned(x, scale=3.0), right(x, scale=3.0))


@pytest.mark.slow
def test_what_was_loaded_can_be_saved_over_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.gw"
    torch.manual_seed(0)
    model, x = Rows().eval(), torch.randn(2, 16)
    gw.save(tuned_with("onnxruntime", model, (x,)), path)
    for _ in range(2):
        gw.save(gw.load(path), path)
    torch.testing.assert_close(gw.load(path)(x), model(x), rtol=2e-4, atol=2e-5)


class States(nn.Module):
    """Two buffers of the same bits, of which one is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.first(x) + self.offset, self.state.view(2, 2), self.state * 2


def test_equal_constants_stay_apart_where_a_caller_may_write(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = States().eval(), torch.randn(2, 4)
    gw.save(tuned_with("fused", model, (x,)), tmp_path / "states.gw")
    loaded = gw.load(tmp_path / "states.gw")
    loaded(x)[1].add_(5)
    torch.testing.assert_close(loaded(x)[0], model(x)[0])
    assert bool((loaded(x)[1] == 5).all())
    assert bool((loaded(x)[2] == 10).all())  # It is the same memory wherever it is used.


def test_what_was_saved_without_the_model_has_no_weights_for_one(
    saved: Path, tmp_path: Path
) -> None:
    gw.save(gw.load(saved), tmp_path / "again.gw")
    with pytest.raises(gw.ArtifactError, match="it has no weights for the one"):
        gw.load(tmp_path / "again.gw", net()[0])
    gw.save(gw.load(saved, net()[0]), tmp_path / "again.gw")
    gw.load(tmp_path / "again.gw", net()[0])


def test_an_interrupted_save_leaves_what_was_there(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "net.gw"
    shutil.copy(saved, target)
    before = target.read_bytes()
    tuned = gw.load(saved)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gw.save(tuned, target)
    assert target.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["net.gw"]


# Another machine, other versions.


def elsewhere(**others: str) -> Any:
    import graphwright.artifacts.loading as module

    plain = module.environment
    return mock.patch.object(module, "environment", lambda device: plain(device) | others)


def test_on_another_version_it_is_built_again_or_verified(saved: Path) -> None:
    right, x = net()
    with elsewhere(torch="9.9"):
        tuned = gw.load(saved, Net().eval())
        assert "built again: torch was" in tuned.explain()
        same(tuned(x, scale=3.0), right(x, scale=3.0))
        alone = gw.load(saved)
        assert "as it was saved: torch was" in alone.explain()
        same(alone(x, scale=3.0), right(x, scale=3.0))


def test_what_cannot_be_built_again_gives_way_to_eager(saved: Path) -> None:
    from graphwright.strategies.fused import FusedCompiler

    right, x = net()
    broken = mock.patch.object(FusedCompiler, "build", side_effect=RuntimeError("not here"))
    with elsewhere(gpu="another"), broken:
        tuned = gw.load(saved, Net().eval())
    assert tuned.report.chosen == "eager"
    assert "eager in its place: built again it is wrong" in tuned.explain()
    assert "not here" in tuned.explain()
    same(tuned(x, scale=3.0), right(x, scale=3.0))


def test_one_that_computes_something_else_here_is_refused(saved: Path) -> None:
    from graphwright.fusion.tracing import GraphCall

    plain = GraphCall.__call__

    def off(self: GraphCall, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        result["y"][0, 0] += 0.01
        return result

    with mock.patch.object(GraphCall, "__call__", off):
        with pytest.raises(gw.ArtifactError, match=r"output\['y'\] is off by"):
            gw.load(saved)
        assert gw.load(saved, Net().eval()).report.chosen == "eager"


# Damage: each with its own sentence, and nothing is executed.


def rewritten(path: Path, change: Callable[[dict[str, bytes], dict[str, Any]], None]) -> None:
    """Change an artifact's members, and its manifest, as somebody would who knows the format."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members.pop("manifest.json"))
    change(members, manifest)
    manifest["members"] = {
        name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in members.items()
    }
    manifest.pop("digest", None)
    manifest["digest"] = container._digest(manifest)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, data in members.items():
            archive.writestr(name, data)


def cut(quarter: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * quarter // 4])

    return damage


def flipped(member: str, place: float = 0.5) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            info, data = archive.getinfo(member), archive.read(member)
        whole = bytearray(path.read_bytes())
        start = whole.index(data, info.header_offset)
        whole[start + int(place * (len(data) - 1))] ^= 1
        path.write_bytes(whole)

    return damage


def header_changed(member: str, byte: int) -> Callable[[Path], None]:
    """Another byte in the header in front of a member: a name one shorter, another beginning."""

    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            start = archive.getinfo(member).header_offset
        whole = bytearray(path.read_bytes())
        whole[start + byte] -= 1
        path.write_bytes(whole)

    return damage


def in_place_of(member: str, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
            members[member] = data

        rewritten(path, change)

    return damage


def without(member: str, *, listed: bool) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        if listed:
            del members[member]
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            if not listed:
                archive.writestr("more.bin", b"more")

    return damage


def told(**facts: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        rewritten(path, lambda members, manifest: manifest.update(facts))

    return damage


def other_weights(path: Path) -> None:
    """Of the same shapes."""

    def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        file = path.with_suffix(".weights")
        torch.manual_seed(3)
        tensors = {n: t.detach() for n, t in Net().named_parameters()}
        tensors |= dict(Net().named_buffers())
        write_tensors(file, tensors)
        members["weights.safetensors"] = file.read_bytes()
        file.unlink()

    rewritten(path, change)


class Bomb:
    """Executes something where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['BOMB']}",)


def graph_naming(target: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
            known = json.loads(members["strategy/0/graph.json"])
            node = next(n for n in known["nodes"] if n["op"] == "call_function")
            node["target"] = target
            members["strategy/0/graph.json"] = json.dumps(known).encode()

        rewritten(path, change)

    return damage


def tree_naming(kind: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
            known = json.loads(members["evidence.json"])
            tree = json.loads(known["samples"][0]["spec"])
            tree[1]["type"] = kind
            known["samples"][0]["spec"] = json.dumps(tree)
            members["evidence.json"] = json.dumps(known).encode()

        rewritten(path, change)

    return damage


def constants_like(same: dict[str, str] | None) -> Callable[[Path], None]:
    """Constants of which some are said to be others; None: each is itself."""

    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, Any]:
        metadata["same"] = json.dumps({n: n for n in tensors} if same is None else same)
        return tensors

    return lambda path: in_constants(path, change)


def constants_renamed(path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, Any]:
        layouts = {f"1{name}": each for name, each in json.loads(metadata["layouts"]).items()}
        metadata["layouts"] = json.dumps(layouts)
        return {f"1{name}": tensor for name, tensor in tensors.items()}

    in_constants(path, change)


def size_below_zero(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    manifest["members"]["report.json"][0] = -1
    del manifest["digest"]
    manifest["digest"] = container._digest(manifest)
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def report_with(**facts: Any) -> Callable[[Path], None]:
    def inner(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        members["report.json"] = json.dumps(json.loads(members["report.json"]) | facts).encode()

    return lambda path: rewritten(path, inner)


def steps_of_nothing(path: Path) -> None:
    """A packed weight for a convolution of stride 0, by which oneDNN would divide."""

    def inner(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        known = json.loads(members["strategy/0/graph.json"])
        (packed,) = (node["packed"] for node in known["nodes"] if "packed" in node)
        packed[1][0] = 0
        members["strategy/0/graph.json"] = json.dumps(known).encode()

    rewritten(path, inner)


def in_constants(path: Path, change: Callable[..., dict[str, Any]]) -> None:
    def inner(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        file = path.with_suffix(".constants")
        file.write_bytes(members["constants.safetensors"])
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
        save_file(change(tensors, metadata), file, metadata=metadata)
        members["constants.safetensors"] = file.read_bytes()
        file.unlink()

    rewritten(path, inner)


def in_graph(path: Path, change: Callable[[str], str]) -> None:
    def inner(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        name = "strategy/0/graph.json"
        members[name] = change(members[name].decode()).encode()

    rewritten(path, inner)


BOMB = "__import__('os').system('touch $BOMB')"


def graph_renamed(path: Path) -> None:
    """A placeholder's name becomes an argument of a function; here one with a default."""
    in_graph(path, lambda text: text.replace("arg0_1", f"arg0_1={BOMB}"))


def graph_with_keyword(path: Path) -> None:
    in_graph(path, lambda text: text.replace('{"dict": {}}', f'{{"dict": {{"x={BOMB}, y": 1}}}}'))


def facts_without(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        manifest = json.loads(members["manifest.json"])
        del manifest[name], manifest["digest"]
        manifest["digest"] = container._digest(manifest)
        members["manifest.json"] = json.dumps(manifest).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for n, data in members.items():
                archive.writestr(n, data)

    return damage


def no_samples(path: Path) -> None:
    def change(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        known = json.loads(members["evidence.json"])
        members["evidence.json"] = json.dumps(known | {"samples": []}).encode()

    rewritten(path, change)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut to nothing": (cut(0), "is no artifact, or is cut short"),
    "cut at a quarter": (cut(1), "is no artifact, or is cut short"),
    "cut at a half": (cut(2), "is no artifact, or is cut short"),
    "cut at three quarters": (cut(3), "is no artifact, or is cut short"),
    "no file": (lambda path: path.unlink(), "There is no file"),
    "a folder": (as_directory, "is no file"),
    "another archive": (lambda path: zipfile.ZipFile(path, "w").close(), "without a manifest"),
    "a byte of the manifest": (flipped("manifest.json"), "manifest of .* is damaged"),
    "a byte of the weights": (
        flipped("weights.safetensors"),
        "member weights.safetensors of .* is damaged",
    ),
    "a byte of the evidence": (flipped("evidence.json"), "evidence.json of .* is damaged"),
    "a byte of the inputs": (flipped("evidence.safetensors"), "evidence.safetensors of .* damaged"),
    "a byte of the report": (flipped("report.json"), "report.json of .* is damaged"),
    "a byte of the graph": (flipped("strategy/0/graph.json"), "graph.json of .* is damaged"),
    "a byte of its constants": (
        flipped("constants.safetensors"),
        "constants.safetensors of .* is damaged",
    ),
    "the last byte of the weights": (
        flipped("weights.safetensors", 1.0),
        "weights.safetensors of .* is damaged",
    ),
    "a size below zero": (size_below_zero, "it lists no members"),
    "switches that are none": (told(switches={"dict": 5}), "'int' object has no attribute 'items'"),
    "an endless switch": (told(switches={"float": "0x1p99999"}), "hexadecimal value too large"),
    "an environment of numbers": (told(environment=[[1, 2]]), ""),
    "notes that are none": (
        report_with(notes="none"),
        "The report is damaged: TypeError.*its notes are no texts",
    ),
    "steps of nothing": (steps_of_nothing, "a convolution has no such steps"),
    "the beginning of a member": (
        header_changed("weights.safetensors", 0),
        "weights.safetensors of .* is damaged: it does not begin where it should",
    ),
    "the place of a member": (
        header_changed("weights.safetensors", 26),
        "weights.safetensors of .* is damaged: its hash is another one",
    ),
    "a missing member": (
        without("constants.safetensors", listed=True),
        "lacks its member constants.safetensors",
    ),
    "one member more": (without("", listed=False), "does not list: more.bin"),
    "another version": (told(schema_version=3), "schema version 3, and only 1 and 2 can be read"),
    "another schema": (told(schema="else"), "is no artifact of graphwright's"),
    "an unknown strategy": (told(strategy="magic"), "makes no sense: Unknown strategy 'magic'"),
    "a pickle for the constants": (
        in_place_of("constants.safetensors", pickle.dumps(Bomb)),
        "constants.safetensors holds no tensors that can be read",
    ),
    "a pickle for the inputs": (
        in_place_of("evidence.safetensors", pickle.dumps(Bomb)),
        "evidence.safetensors holds no tensors that can be read",
    ),
    "a pickle for the graph": (
        in_place_of("strategy/0/graph.json", pickle.dumps(Bomb)),
        "could not be loaded",
    ),
    "evidence of nothing": (in_place_of("evidence.json", b"[]"), "evidence makes no sense"),
    "a report of nothing": (in_place_of("report.json", b"{}"), "not a report of graphwright tune"),
    "no operation": (graph_naming("os.system"), "may not check what they are given: os.system"),
    "an operation that reads files": (graph_naming("aten.from_file.default"), "aten.from_file"),
    "an operation of TorchScript's": (graph_naming("aten.save.default"), "aten.save.default"),
    "a name that is Python": (graph_renamed, ""),
    "a keyword that is Python": (graph_with_keyword, "stored graph is damaged.*has no arguments"),
    "an operation that looks beyond its memory": (
        graph_naming("aten._reshape_alias.default"),
        "operations that may not check.*_reshape_alias",
    ),
    "an operation of which nothing is known": (
        graph_naming("aten.fbgemm_linear_fp16_weight.default"),
        r"may not check.*fbgemm.*\n.*trust=True",
    ),
    "no list of members": (facts_without("members"), "lists no members|lacks|makes no sense"),
    "no word on purity": (facts_without("pure"), "makes no sense: 'pure'"),
    "names that are none": (told(argument_names=["x", "a b"]), "name of an argument is none"),
    "ranges that are none": (told(ranges=[["q", 0, 5, 1, 2]]), "a range of sizes is none"),
    "weights that are shared with nothing": (told(shared_weights=7), "'int' object"),
    "constants that are the same as none": (
        constants_like({"0.more": "0.none"}),
        "constants.safetensors holds no tensors that can be read: '0.none'",
    ),
    "constants of which one is there twice": (constants_like(None), "one of them is there twice"),
    "constants of another bucket": (constants_renamed, "stored graph is damaged: KeyError"),
    "ranges of what has none": (told(ranges=[[0, 0, "b", 1, 9]]), "answers no ranges of sizes"),
    "evidence of no sample": (no_samples, "there are no samples"),
    "a class elsewhere": (tree_naming("this.That"), "made of this.That, which is not imported"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_nothing_is_executed(
    kind: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "bomb"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "net.gw"
    shutil.copy(saved, path)
    damage, text = DAMAGE[kind]
    damage(path)
    if not text:
        gw.load(path)  # What it was about is of no consequence.
    else:
        with pytest.raises(gw.ArtifactError, match=text):
            gw.load(path)
    assert not (tmp_path / "bomb").exists()
    # Nor is anything left behind.
    assert {file.name for file in tmp_path.iterdir()} <= {"net.gw"}


def test_the_damages_are_told_apart() -> None:
    assert len(DAMAGE) >= 20
    assert len({text for _, text in DAMAGE.values()}) >= 20


def test_other_weights_are_noticed(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.gw"
    shutil.copy(saved, path)
    with pytest.raises(gw.ArtifactError, match=r"conv.weight is 16×3×3×3 float32, and was 8×3×3×3"):
        gw.load(path, net(width=16)[0])
    with pytest.raises(gw.ArtifactError, match=r"it has no conv.weight"):
        gw.load(path, Rows().eval())
    other_weights(path)
    with pytest.raises(gw.ArtifactError, match="computes something else than the one"):
        gw.load(path, Net().eval())


def test_weights_that_are_in_the_graph_are_stored_once(saved: Path, tmp_path: Path) -> None:
    def held(file: str) -> dict[str, torch.Tensor]:
        with zipfile.ZipFile(saved) as archive:
            (tmp_path / "t.safetensors").write_bytes(archive.read(file))
        return read_tensors(tmp_path / "t.safetensors")

    with zipfile.ZipFile(saved) as archive:
        shared = json.loads(archive.read("manifest.json"))["shared_weights"]
    model = net()[0]
    assert {"head.weight", "head.bias"} <= set(shared)  # The norm is folded into the convolution.
    assert set(held("weights.safetensors")) == {*model.state_dict()} - set(shared)
    for name, other in shared.items():
        assert torch.equal(held("constants.safetensors")[other], model.state_dict()[name])
    path = tmp_path / "net.gw"
    shutil.copy(saved, path)
    lost = {"head.weight": "nothing"}
    rewritten(path, lambda members, manifest: manifest.update(shared_weights=lost))
    with pytest.raises(gw.ArtifactError, match=r"it lacks head\.weight"):
        gw.load(path, Net().eval())


def test_buckets_have_their_constants_once(tmp_path: Path, device: torch.device) -> None:
    saved_parts(tmp_path / "parts.gw", device)
    with zipfile.ZipFile(tmp_path / "parts.gw") as archive:
        archive.extract("constants.safetensors", tmp_path)
    with safe_open(tmp_path / "constants.safetensors", framework="pt") as file:
        stored, metadata = [*file.keys()], file.metadata()
    assert {name[:2] for name in stored} == {"0."}
    assert len(json.loads(metadata["same"])) == 2 * len(stored)

    loaded = gw.load(tmp_path / "parts.gw")
    kept = [built.save(tmp_path) for built in loaded._choice.origin.builts]
    memory = [{tensor.data_ptr() for tensor in each.tensors.values()} for each in kept]
    assert len(memory[0]) == len(stored)
    assert memory == memory[:1] * 3


def test_a_model_that_was_passed_and_refused_keeps_its_weights(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.gw"
    shutil.copy(saved, path)
    other_weights(path)
    model = Net().eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(gw.ArtifactError):
        gw.load(path, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


# What cannot be saved.


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    model, x = net()
    tuned = tuned_with("fused", model, (x,))
    with pytest.raises(gw.ArtifactError, match="given a Net"):
        gw.save(model, tmp_path / "net.gw")
    with pytest.raises(gw.ArtifactError, match="There is no folder"):
        gw.save(tuned, tmp_path / "nowhere" / "net.gw")
    frozen = next(c for c in gw.strategies.COMPILERS if c.name == "inductor:freeze")
    assert "frozen weights" in frozen.unsavable
    with torch.no_grad():
        model.head.bias.add_(1.0)
    with pytest.raises(gw.ArtifactError, match="changed after it was tuned"):
        gw.save(tuned, tmp_path / "net.gw")
    assert list(tmp_path.iterdir()) == []


def test_what_was_loaded_follows_the_model_that_was_passed(tmp_path: Path) -> None:
    model, x = net()
    gw.save(tuned_with("torchscript", model, (x,)), tmp_path / "net.gw")
    tuned = gw.load(tmp_path / "net.gw", model, trust=True)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    same(tuned(x), model(x))
    assert tuned.calls == {"eager: the module changed": 1}


def test_weights_that_were_changed_since_are_not_saved(tmp_path: Path) -> None:
    model, x = net()
    tuned = tuned_with("eager:no_grad", model, (x,))
    with torch.no_grad():
        model.head.bias.add_(1.0)
    with pytest.raises(gw.ArtifactError, match=r"head\.bias holds other values"):
        gw.save(tuned, tmp_path / "net.gw")


def test_other_settings_are_refused_by_name(saved: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(
            gw.ArtifactError, match=r"autocast on the CPU is torch\.bfloat16, and was False"
        ):
            gw.load(saved)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(
            gw.ArtifactError, match=r"use_deterministic_algorithms is True, and was False"
        ):
            gw.load(saved)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "name", ["onnxruntime", pytest.param("aot_inductor", marks=pytest.mark.gpu)]
)
def test_a_range_goes_no_further_than_what_was_verified(name: str) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 3
            return (y * 2 if x.shape[0] == 1 else y), y[:8], x[:8]

    model, x = Branches().eval(), torch.randn(8, 4)
    options = {
        "dynamic_shapes": ({0: Dim("b", min=1, max=32)},),
        "buckets": gw.Buckets(b=[4, 8]),
    }
    quick = mock.patch.multiple("graphwright.tuning.tuner", SCREENING_S=0.02, FINAL_S_EACH=0.02)
    given = {"strategies": [name], "remember": False, "isolate": False, "progress": False}
    with choosing(name), quick:
        tuned = gw.tune(model, (x,), **given, **options)
    for size in (1, 3, 4, 6, 8, 9, 20):
        x = torch.randn(size, 4)
        for mine, right in zip(tuned(x), model(x), strict=True):
            torch.testing.assert_close(mine, right)


def test_an_expanded_buffer_gets_its_values_and_a_refused_model_keeps_its_own(
    tmp_path: Path,
) -> None:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("shift", torch.randn(1, 4).expand(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.shift

    model, x = Expanded().eval(), torch.randn(3, 4)
    gw.save(tuned_with("fused", model, (x,)), tmp_path / "m.gw")
    other = Expanded().eval()
    torch.testing.assert_close(gw.load(tmp_path / "m.gw", other)(x), model(x))
    torch.testing.assert_close(other(x), model(x))


def test_results_that_json_would_change_are_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {("a", "b"): x * 2}

    with pytest.raises(gw.ArtifactError, match="structure of arguments or results"):
        gw.save(tuned_with("fused", Odd().eval(), (torch.randn(3),)), tmp_path / "m.gw")


# Parts.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(0, 3),
        torch.tensor(1.5),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(4).bfloat16(),
        torch.tensor([True, False]),
        torch.tensor([torch.nan, torch.inf, -0.0]),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_tensors_come_back_as_they_lay(tensor: torch.Tensor, tmp_path: Path) -> None:
    write_tensors(tmp_path / "t.safetensors", {"t": tensor})
    (found,) = read_tensors(tmp_path / "t.safetensors").values()
    assert found.dtype is tensor.dtype
    assert found.stride() == tensor.stride()
    torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)


def test_plain_values_come_back_with_their_types() -> None:
    tree = {"a": (1, 1.0, True, None, -0.0, float("inf")), "b": [torch.float16, "x", CPU, 2**70]}
    found = unpacked(json.loads(json.dumps(packed(tree, {}, ""))), {})
    assert repr(found) == repr(tree)
    x = torch.randn(4)
    with pytest.raises(gw.ArtifactError, match="share memory"):
        packed((x, x[1:]), {}, "")


def test_a_tree_imports_nothing() -> None:
    enum = json.dumps(
        [1, {"type": "builtins.dict", "context": {"__enum__": True, "fqn": "this:A", "name": "B"}}]
    )
    for text in ("[]", enum, '[1, {"type": "this.That", "context": null, "children_spec": []}]'):
        with pytest.raises(gw.ArtifactError):
            tree_of(text)
    assert "this" not in sys.modules


def test_a_graph_comes_back_from_json() -> None:
    from graphwright.fusion.tracing import trace

    def work(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.pad(x, (1, 1), value=float("-inf"))
        parts = y.to(torch.float64).split(2, 1)
        return torch.cat([parts[0], torch.full((2, 1), 2.5, dtype=torch.float64)], -1)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return work(x)

    x = torch.randn(2, 3)
    traced = trace(Model().eval(), (x,), {})
    nodes, tensors = stored(traced.graph)
    again = traced.call(read(json.loads(json.dumps(nodes)), tensors, CPU))
    assert torch.equal(again(x), work(x))


def test_what_fails_while_a_device_starts_fails_where_it_is_wanted() -> None:
    for device in (CPU, torch.device("cuda")):
        came: list[int] = []
        wait = start_device(device, lambda: 1 / 0, lambda: came.append(threading.get_ident()))  # noqa: B023  # waited for below
        wait()
        assert came
        assert came != [threading.get_ident()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_was_saved_on_a_gpu_says_so_where_there_is_none(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.gw"
    shutil.copy(saved, path)

    def on_gpu(members: dict[str, bytes], manifest: dict[str, Any]) -> None:
        members["evidence.json"] = members["evidence.json"].replace(b'"cpu"', b'"cuda"', 1)

    rewritten(path, on_gpu)
    with pytest.raises(
        gw.ArtifactError, match=r"on a GPU, and there is none here.*\n.*Pass the model"
    ):
        gw.load(path)
    gw.load(path, net()[0])


def test_constants_are_read_ahead_where_nothing_else_can_be_used(saved: Path) -> None:
    def reads(model: nn.Module | None) -> list[bool]:
        import graphwright.artifacts.loading as module

        plain, here, found = module.read_tensors, threading.get_ident(), []

        def noted(path: Path, *args: Any) -> dict[str, torch.Tensor]:
            if path.name == "constants.safetensors":
                found.append(threading.get_ident() == here)
            return plain(path, *args)

        with mock.patch.object(module, "read_tensors", noted):
            gw.load(saved, model)
        return found

    assert reads(None) == [False]
    assert set(reads(net()[0])) == {True}


class Counting(nn.Module):
    """Counts values over 100 in a buffer, which the sample leaves as it is."""

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))
        self.attribute = torch.zeros(())
        self.w = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        over = (x > 100).sum()
        if self.how == "replaced":
            self.n = self.n + over
        elif self.how == "a parameter":
            with torch.no_grad():
                self.linear.bias.add_(over)
        elif self.how == "an attribute":
            self.attribute.add_(over)
        elif self.how == "another attribute":
            self.attribute = self.attribute + over
        elif self.how == "another parameter":
            self._parameters["w"] = nn.Parameter(self.w + over, requires_grad=False)
        else:
            self.n.add_(over)
        return self.linear(x) + self.n + self.attribute + self.w


def after_many(model: Any, like: nn.Module) -> None:
    """It goes on as another of the same model does, whatever answers."""
    x, many = torch.randn(2, 4), torch.full((2, 4), 200.0)
    with torch.no_grad():
        for each in (x, many, x, x[:1], many[:1], x):
            torch.testing.assert_close(model(each), like(each))


SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
HOWS = ["in place", "replaced", "a parameter", "an attribute"]


# Each strategy with a third of the ways, and each way with several of the strategies.
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(
            name,
            how,
            marks=[] if (m + n) % 3 == 0 else [EXHAUSTIVE if (m + n) % 3 == 1 else SLOW],
        )
        for m, name in enumerate(
            ["torchscript", "torchscript:freeze", "onnxruntime", "fused", "aot_autograd"]
        )
        for n, how in enumerate([*HOWS, "another attribute", "another parameter"])
    ],
)
def test_what_a_sample_leaves_as_it_is_may_change_later(how: str, name: str) -> None:
    model = Counting(how).eval()
    like = copy.deepcopy(model)
    given = {"strategies": [name], "remember": False, "isolate": False, "progress": False}
    quick = mock.patch.multiple("graphwright.tuning.tuner", SCREENING_S=0.02, FINAL_S_EACH=0.02)
    with choosing(name), quick:
        tuned = gw.tune(model, (torch.randn(2, 4),), **given)
    row = tuned.report.row(name)
    assert row is not None
    other = how == "replaced" or how.startswith("another")
    taken = name == "aot_autograd" or (name == "torchscript" and not other)
    if row.status != "unavailable":
        assert (tuned.report.chosen == name) is taken, row.reason
    assert not tuned._choice.pure
    after_many(tuned, like)
    for a, b in zip(model.state_dict().values(), like.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_script_that_writes_to_a_buffer_is_built_again_from_the_model(tmp_path: Path) -> None:
    model = Counting().eval()
    again, like = copy.deepcopy(model), copy.deepcopy(model)
    path = tmp_path / "counting.gw"
    gw.save(tuned_with("torchscript", model, (torch.randn(2, 4),)), path)
    with pytest.raises(gw.ArtifactError, match="is built from the model"):
        gw.load(path, trust=True)
    loaded = gw.load(path, again, trust=True)
    after_many(loaded, like)
    assert again.n == like.n == 12
    gw.save(gw.load(path, copy.deepcopy(again).eval(), trust=True), path)
    with pytest.raises(gw.ArtifactError, match="is built from the model"):
        gw.load(path, trust=True)


def test_a_refused_model_keeps_weights_that_share_memory(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self, *tensors: torch.Tensor) -> None:
            super().__init__()
            for name, tensor in zip("ab", tensors, strict=True):
                self.register_buffer(name, tensor)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.a + self.b

    base, x = torch.arange(6.0), torch.randn(2, 4)
    path = tmp_path / "views.gw"
    gw.save(tuned_with("fused", Views(torch.randn(4), torch.randn(4)).eval(), (x,)), path)
    with pytest.raises(gw.ArtifactError, match="computes something else"):
        gw.load(path, Views(base[:4], base[2:]).eval())
    assert torch.equal(base, torch.arange(6.0))


@pytest.mark.parametrize("path", [None, 3, "", b"a.gw", "a\0b"])
def test_what_is_no_path_is_told(path: Any, saved: Path) -> None:
    with pytest.raises(gw.ArtifactError, match="is no path of a file"):
        gw.load(path)
    with pytest.raises(gw.ArtifactError, match="is no path of a file"):
        gw.save(gw.load(saved), path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(gw.ArtifactError, match="pipe is no file"):
        gw.load(tmp_path / "pipe")


def test_a_file_may_be_replaced_while_it_is_loaded(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "net.gw", tmp_path / "other.gw"
    shutil.copy(saved, path)
    gw.save(tuned_with("fused", nn.Linear(4, 4).eval(), (torch.randn(2, 4),)), other)
    known = container._manifest

    def replacing(*args: Any) -> dict[str, Any]:
        found = known(*args)
        other.replace(path)
        return found

    monkeypatch.setattr(container, "_manifest", replacing)
    model, x = net()
    same(gw.load(path)(x, scale=3.0), model(x, scale=3.0))


def test_a_model_without_memory_is_told(saved: Path) -> None:
    with torch.device("meta"):
        model = Net(8).eval()
    with pytest.raises(gw.ArtifactError, match=r"meta device.*\n.*to_empty"):
        gw.load(saved, model)


def test_weights_that_are_not_dense_are_not_left_out(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("s", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.s, x)

    tuned = tuned_with("eager", Sparse().eval(), (torch.randn(4, 2),))
    with pytest.raises(gw.ArtifactError, match="s of the model is sparse_coo"):
        gw.save(tuned, tmp_path / "sparse.gw")


def test_other_kinds_of_dictionaries_are_refused(tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            return given["x"] * 2

    tuned = tuned_with("fused", Named().eval(), (OrderedDict(x=torch.randn(2)),))
    with pytest.raises(gw.ArtifactError, match=r"of type OrderedDict .* cannot be saved"):
        gw.save(tuned, tmp_path / "named.gw")


def test_a_script_of_a_call_without_tensors_is_loaded(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, n: int) -> torch.Tensor:
            return self.w * n

    model = Scaled().eval()
    gw.save(tuned_with("torchscript", model, (3,)), tmp_path / "scaled.gw")
    assert torch.equal(gw.load(tmp_path / "scaled.gw", trust=True)(3), model(3))
