"""Every row of the table of switches: calls, workers, cold starts and files under another value."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import planted
import pytest
import torch
from chosen import choosing
from planted import Planted, Small
from shares import share
from torch import nn
from torch.nn import functional as F  # noqa: N812

import graphwright as gw
from graphwright.calls import switches
from graphwright.calls.switches import TABLE
from graphwright.tuning.workers.settings import ProcessSettings

# Another value of each row than PyTorch's own, or a function of the present one.
OTHER: dict[str, Any] = {
    "autocast on the CPU": torch.bfloat16,
    "autocast on CUDA": torch.bfloat16,
    "autocast's cache": False,
    "torch.set_default_device": torch.device("meta"),
    "torch.set_flush_denormal": True,
    "the default dtype": torch.float64,
    "torch.nn.utils.parametrize.cached": True,
    "torch.use_deterministic_algorithms": True,
    "torch.use_deterministic_algorithms(warn_only)": True,
    "torch.utils.deterministic.fill_uninitialized_memory": False,
    "torch.backends.mkldnn.enabled": False,
    "torch.backends.cuda.flash_sdp": False,
    "torch.backends.cuda.math_sdp": False,
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": True,
    "torch.backends.mha.set_fastpath_enabled": False,
    "torch.backends.opt_einsum": lambda now: now and "greedy",
    "torch.set_num_threads": lambda now: now + 1,
    "torch.sparse.check_sparse_tensor_invariants": True,
    "torch.backends.quantized.engine": lambda now: next(
        (n for n in torch._C._supported_qengines() if n not in (0, now)), now
    ),
    "torch.backends.nnpack": False,
    "torch.backends.mkldnn.deterministic": True,
    "torch.set_float32_matmul_precision": "high",
    "torch.backends.mkldnn.matmul.fp32_precision": "bf16",
    "torch.backends.mkldnn.conv.fp32_precision": "bf16",
    "torch.backends.mkldnn.rnn.fp32_precision": "bf16",
    "torch.backends.cuda.matmul.fp32_precision": "tf32",
    "torch.backends.cudnn.conv.fp32_precision": "ieee",
    "torch.backends.cudnn.rnn.fp32_precision": "ieee",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda now: (
        (False, False) if isinstance(now, tuple) else not now
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda now: (
        (False, False) if isinstance(now, tuple) else not now
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": True,
    "torch.backends.cudnn.enabled": False,
    "torch.backends.cudnn.benchmark": True,
    "torch.backends.cudnn.deterministic": True,
    "torch.backends.cudnn.depthwise_kernel": "native",
    "torch.backends.cudnn.benchmark_limit": lambda now: now + 1,
    "torch.backends.cuda.mem_efficient_sdp": False,
    "torch.backends.cuda.cudnn_sdp": False,
    "torch.backends.cuda.fa3_sdp": True,
    # There is no other one without its package.
    "torch.nn.attention.activate_flash_attention_impl": lambda now: now,
    "torch.nn.attention.sdpa_kernel(set_priority=True)": (0, 1, 2, 3, 4),
    "torch.backends.cuda.preferred_linalg_library": lambda now: int(switches.CUDA),
    "torch.backends.cuda.preferred_blas_library": lambda now: (
        2 if switches.CUDA else 3 - 2 * (now == 3)
    ),
    "torch.backends.miopen.immediate": True,
}
# What has another value only with a package or a device that is not here.
ALIKE = {"torch.nn.attention.activate_flash_attention_impl"}
if not torch.backends.opt_einsum.is_available():
    ALIKE.add("torch.backends.opt_einsum")
CARRIED = [row.name for row in switches.CARRIED]
if not switches.CUDA:
    ALIKE.add("torch.backends.cuda.preferred_linalg_library")
COMPARED = [name for name in CARRIED if name not in ALIKE]
BY_NAME = {row.name: row for row in TABLE}


def other(name: str) -> Any:
    value = OTHER[name]
    return value(BY_NAME[name].get()) if callable(value) else value


@contextlib.contextmanager
def turned(*names: str) -> Iterator[None]:
    """Switches at their other values, in the order of the table."""
    before = switches.read()
    try:
        for row in switches.CARRIED:
            if row.name in names and row.set is not None and row.get() != other(row.name):
                row.set(other(row.name))
        yield
    finally:
        # As PyTorch has it from the start, or else the settings of precision stay apart.
        switches._set_cached(False)
        for row in switches.CARRIED:
            if row.set is not None and row.get() != before[row.name]:
                row.set(before[row.name])
        torch.set_default_device(None)
        torch.clear_autocast_cache()
        assert switches.read() == before


class Several(nn.Module):
    """One operation at least for each switch that the CPU knows, each with a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.convolution = nn.Linear(8, 8), nn.Conv1d(4, 4, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = torch.zeros(2, dtype=torch.int64, device=x.device)
        halves = q.bfloat16()
        return (
            self.linear(x),
            self.convolution(x[None]),
            self.attention(x[None], x[None], x[None])[0],
            self.parametrized(x),
            F.scaled_dot_product_attention(q, q, q),
            F.scaled_dot_product_attention(halves, halves, halves),
            torch.einsum("ij,kj,kl->il", x, x, x),
            torch.ones(3),
            x * 1e-36 * 1e-3 != 0,
            x.clone().put_(index, torch.ones_like(x[0, :2])),
        )


X = torch.linspace(-1, 1, 32).view(4, 8)
HEADS = torch.linspace(-1, 1, 512).sin().view(1, 2, 16, 16)


def chosen(name: str, model: nn.Module, *args: torch.Tensor) -> gw.TunedModule:
    with choosing(name):
        tuned = gw.tune(model, args, strategies=[name], isolate=False, remember=False)
    assert tuned.report.chosen == name, [row.reason for row in tuned.report.rows]
    return tuned


def answer(call: Callable[..., Any]) -> Any:
    """The results, or the type of the error."""
    with torch.no_grad():
        try:
            return call(X, HEADS)
        except RuntimeError as error:
            return type(error)


def same(got: Any, expected: Any, *, exact: bool = False) -> bool:
    if isinstance(got, type) or isinstance(expected, type):
        return got is expected
    for mine, its in zip(got, expected, strict=True):
        if (mine.dtype, mine.device, mine.shape) != (its.dtype, its.device, its.shape):
            return False
        error = 0.0 if exact else 2e-2 if mine.dtype is torch.bfloat16 else 1e-6
        if not mine.is_meta and not torch.allclose(mine, its, rtol=error, atol=error):
            return False
    return True


def test_each_row_has_another_value() -> None:
    for row in switches.CARRIED:
        after = other(row.name)
        assert row.name in ALIKE or row.get() != after
        with turned(row.name):
            assert row.get() == after


def test_other_processes_repeat_it() -> None:
    repeated = {row.name for row in switches.CARRIED}
    assert set(OTHER) - MAY_LACK <= repeated <= set(OTHER)


# A build without cuDNN cannot read its limit, and PyTorch 2.11 has no choice of kernels.
MAY_LACK = {"torch.backends.cudnn.benchmark_limit"}
if not hasattr(torch._C, "_get_cudnn_depthwise_kernel"):
    MAY_LACK.add("torch.backends.cudnn.depthwise_kernel")
LACKED = MAY_LACK - {row.name for row in switches.CARRIED}
HERE = [name for name in OTHER if name not in LACKED]
# What decides between ways of equal precision, or is read by all that runs, at each run.
ONLY_REPEATED = {
    "autocast's cache",
    "torch.set_flush_denormal",
    "torch.use_deterministic_algorithms(warn_only)",
    "torch.utils.deterministic.fill_uninitialized_memory",
    "torch.set_num_threads",
    "torch.sparse.check_sparse_tensor_invariants",
    "torch.backends.quantized.engine",
    "torch.backends.nnpack",
    "torch.backends.mkldnn.deterministic",
    "torch.set_float32_matmul_precision",
    "torch.backends.cudnn.benchmark_limit",
    "torch.backends.cuda.preferred_linalg_library",
    "torch.backends.cuda.preferred_blas_library",
}
if torch.version.hip is None:
    ONLY_REPEATED.add("torch.backends.miopen.immediate")
# The CPU's operations follow these, but what compilers built may not.
ONLY_IN_FILES = {
    f"torch.backends.mkldnn.{part}.fp32_precision" for part in ("matmul", "conv", "rnn")
}


@pytest.mark.parametrize("name", [n for n in HERE if n not in ONLY_REPEATED | ONLY_IN_FILES])
def test_a_call_on_a_build_for_gpus_compares_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # They raise once these settings differ from what they can say.
    monkeypatch.setattr(switches._OlderTf32Flags, "answers", False)
    read = switches._reader((*switches._AUTOCAST, *switches._at_calls(cuda=True)))
    before = read()
    with turned(name), monkeypatch.context() as patch:
        if name == "torch.nn.attention.activate_flash_attention_impl":
            patch.setattr("torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE", ("FA4",))
        if name == "torch.backends.opt_einsum" and name in ALIKE:
            patch.setitem(switches._NAMES["einsum"], "enabled", True)
            patch.setitem(switches._NAMES["einsum"], "strategy", "greedy")
        assert read() != before
    assert read() == before


def test_a_file_is_compared_in_it() -> None:
    either = switches.saved("cpu") | switches.saved("cuda")
    assert either == set(CARRIED) - ONLY_REPEATED
    assert {BY_NAME[name].device for name in either - switches.saved("cpu")} == {"cuda"}
    assert {BY_NAME[name].device for name in either - switches.saved("cuda")} == {"cpu"}


@pytest.fixture(scope="module")
def answerers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, nn.Module]]:
    """What answers calls in place of a model, with a model like it."""
    found: dict[str, tuple[Any, nn.Module]] = {}
    for part, make in {
        "graph": gw.graph,
        "capture": lambda model: gw.capture(model, X, HEADS),
        "fuse": lambda model: gw.fuse(model, (X, HEADS)),
        "tune": lambda model: chosen("fused", model, X, HEADS),
    }.items():
        with torch.no_grad():
            found[part] = make(Several().eval()), Several().eval()
    file = tmp_path_factory.mktemp("saved") / "several.gw"
    gw.save(found["tune"][0], file)
    return found | {"load": (file, Several().eval())}


PARTS = ["graph", "capture", "fuse", "tune", "load"]


# Each switch with one part or two in a quick run, and with another in CI for most.
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("name", "part"),
    share(
        (pytest.param(*each) for each in itertools.product(CARRIED, PARTS)),
        of=3,
        slow=3,
    ),
)
def test_a_call_under_another_value_is_eager_s_or_refused(
    name: str, part: str, answerers: dict[str, tuple[Any, nn.Module]]
) -> None:
    call, model = answerers[part]
    exact = part in ("graph", "capture")  # What is fused rounds otherwise.
    with turned(name):
        expected = answer(model)
        try:
            got = answer(gw.load(call, trust=True) if part == "load" else call)
        except gw.SignatureError:
            if part != "capture":
                raise
        except gw.ArtifactError as error:
            if part != "load":
                raise
            # The sample has denormals, so that what was saved is not verified.
            if "other settings" not in str(error) and name != "torch.set_flush_denormal":
                raise
        else:
            assert same(got, expected, exact=exact)
    if part != "load":
        assert same(answer(call), answer(model), exact=exact)


# What a fresh process says of a file that was saved under the other values of all rows.
FRESH = """
import json, pickle, sys, torch, graphwright as gw
from graphwright.calls import switches
refused = ""
try:
    gw.load(sys.argv[1], trust=True)
except gw.ArtifactError as error:
    refused = str(error)
with open(sys.argv[2], "rb") as file:
    pickle.load(file).apply()
loaded = gw.load(sys.argv[1], trust=True)
x = torch.linspace(-1, 1, 64, device="cpu", dtype=torch.float32).view(4, 16)
print(json.dumps([refused, loaded(x).float().tolist(), repr(switches.read())]))
"""


@pytest.mark.slow
def test_a_worker_a_cold_start_and_a_fresh_process_see_every_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows in one go: a worker, a process of a cold start, and one that loads the file."""
    monkeypatch.setattr("graphwright.tuning.tuner.ISOLATED", True)
    monkeypatch.setattr("graphwright.tuning.cold_start.ROUNDS", 1)
    x = torch.linspace(-1, 1, 64).view(4, 16)
    model, seen = Small().eval(), tmp_path / "seen"
    file, settings = tmp_path / "small.gw", tmp_path / "settings"
    with torch.no_grad(), turned(*CARRIED):
        here = switches.read()
        assert {name for name in here if here[name] != other(name)} <= ALIKE | {
            "torch.backends.opt_einsum",
            *(name for name in CARRIED if callable(OTHER[name])),
            # Newer settings disagree with what it says.
            "torch.set_float32_matmul_precision",
        }
        for objective in ("latency", "cold_start"):
            strategies = [Planted("settings", planted.Tells(str(seen)))]
            gw.tune(model, (x,), strategies=strategies, objective=objective, remember=False)
            assert seen.read_text() == repr((here, False))
            seen.unlink()
        settings.write_bytes(pickle.dumps(ProcessSettings.current()))
        gw.save(chosen("torchscript", model, x), file)
        expected = model(x)
    ran = subprocess.run(
        [sys.executable, "-c", FRESH, str(file), str(settings)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert ran.returncode == 0, ran.stderr
    refused, got, there = json.loads(ran.stdout)
    told = [name for name in switches.saved("cpu") if name in COMPARED]
    assert {name for name in told if f"{name} is " not in refused} == set()
    assert there == repr(here)
    torch.testing.assert_close(torch.tensor(got), expected.float(), rtol=2e-2, atol=2e-2)


# One row after the other, in one process.
EACH = """
import json, pickle, sys
from graphwright.calls import switches
wrong, before = [], switches.read()
for line in sys.stdin:
    values = pickle.loads(bytes.fromhex(line))
    switches.apply(values)
    if switches.read() != values:
        wrong.append(switches.differences(values, switches.read()))
    switches.apply(before)
print(json.dumps(wrong))
"""


@pytest.mark.slow
def test_each_value_is_repeated_in_another_process() -> None:
    lines = []
    for name in COMPARED:
        with turned(name):
            lines.append(pickle.dumps(switches.read()).hex())
    ran = subprocess.run(
        [sys.executable, "-c", EACH],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == []


def test_a_choice_is_saved_with_the_values_that_it_was_built_under(tmp_path: Path) -> None:
    x, model = torch.linspace(-1, 1, 64).view(4, 16), Small().eval()
    with torch.autocast("cpu", torch.bfloat16):
        tuned = chosen("torchscript", model, x)
    gw.save(tuned, tmp_path / "small.gw")  # Its numbers are those of autocast.
    with pytest.raises(gw.ArtifactError, match=r"autocast on the CPU is False, and was torch\.bf"):
        gw.load(tmp_path / "small.gw", trust=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert gw.load(tmp_path / "small.gw", trust=True)(x).dtype is model(x).dtype


def test_a_file_with_the_earlier_list_of_switches_is_still_loaded(tmp_path: Path) -> None:
    model, x = Small().eval(), torch.linspace(-1, 1, 64).view(4, 16)
    path = tmp_path / "small.gw"
    values = [switches.read()[name] for name in switches.OF_VERSION_1]
    with (
        mock.patch("graphwright.artifacts.container.SCHEMA_VERSION", 1),
        mock.patch("graphwright.artifacts.saving.dict", return_value=tuple(values), create=True),
    ):
        gw.save(chosen("torchscript", model, x), path)
    with torch.no_grad():
        torch.testing.assert_close(gw.load(path, trust=True)(x), model(x))
        # What it does not name is unknown.
        with turned("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp"):
            gw.load(path, trust=True)
    with turned("the default dtype"), pytest.raises(gw.ArtifactError, match="the default dtype is"):
        gw.load(path, trust=True)


# Who may read or set one of PyTorch's switches without the table, and why.
KNOWN = {
    "calls/switches.py": "the table",
    "calls/modes.py": "stands in for the cache of parametrize.cached() while something is recorded",
    "data/prefetch.py": "gives the modes of one thread to another of the same process",
    "fusion/passes/epilogues.py": "whether a library's kernel may be used",
    "graphs/conditions.py": "turns the fast path of attention off in captures",
    "graphs/cpu/recorder.py": "fills new memory as PyTorch does",
    "ops/fused/cpu_kernels.py": "the processor's instructions",
    "profiler/roofs.py": "measures the device in a precision",
    "profiler/timing.py": "times with other numbers of threads",
    "profiler/trials.py": "tries cudnn.benchmark",
    "report/environment.py": "versions and threads, for a report",
    "serving/instances.py": "divides threads among instances",
    "serving/prepared_model.py": "likewise",
    "serving/repository.py": "likewise",
    "strategies/inductor.py": "the processor's instructions",
    "strategies/onnxruntime/session.py": "threads and determinism for ONNX Runtime",
    "strategies/rewrites.py": "the rewrite tf32",
    "strategies/xla.py": "turns the fast path of attention off for a trace",
    "cli/doctor.py": "reports threads",
}
READS = re.compile(
    r"torch\.backends\.\w|_get_\w*(?:sdp|mkldnn|cudnn|cublas|deterministic|precision)|"
    r"[gs]et_num_threads|[gs]et_default_d|flush_denormal|_autocast_dtype|is_autocast_cache|"
    r"deterministic_algorithms|float32_matmul_precision|parametrize\._cache"
)


def test_no_other_list_of_switches_exists() -> None:
    source = Path(gw.__file__).parent
    found = set()
    for file in source.rglob("*.py"):
        code = [
            token.string
            for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
            if token.type not in (tokenize.COMMENT, tokenize.STRING)
        ]
        if READS.search("".join(code)):
            found.add(file.relative_to(source).as_posix())
    assert found - set(KNOWN) == set()
    assert set(KNOWN) - found == set()


def test_a_cached_choice_belongs_to_the_values_of_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path))
    from graphwright.calls.fingerprint import key_of

    model = Small().eval()
    x = torch.ones(2, 16, device="cpu", dtype=torch.float32)
    before = key_of(model, [((x,), {})], "cpu", {}, {})
    for name in COMPARED:
        with turned(name):
            assert key_of(model, [((x,), {})], "cpu", {}, {}) != before, name
    assert key_of(model, [((x,), {})], "cpu", {}, {}) == before
