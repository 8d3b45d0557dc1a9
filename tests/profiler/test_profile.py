"""profile() on a CPU: it leaves the model as it was, refuses bad input, and shows what it found."""

from __future__ import annotations

import html
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.profiler import roofs as roof_room
from graphwright.profiler.roofs import roofs_of
from graphwright.profiler.sentences import told
from graphwright.profiler.timing import thread_times
from graphwright.profiler.trace import TracedCall
from graphwright.profiler.verdict import Cause, CpuFigures, of_cpu
from graphwright.profiler.wait_clock import WaitClock
from graphwright.report.table import duration


class Net(nn.Module):
    """Batch norm and dropout in training mode: each forward changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        random.random()
        x = self.drop(self.norm(self.conv(x)).relu())
        return self.head(x.mean((2, 3)))


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Short measurements: no test here asserts on a time."""
    patch.setattr("graphwright.profiler.timing._LIMIT_S", 0.02)
    patch.setattr("graphwright.profiler.timing._ROUNDS", 2)
    patch.setattr("graphwright.profiler.profiler._SAMPLED_S", 0.02)
    patch.setattr("graphwright.profiler.profiler._WATCHED", 3)
    patch.setattr("graphwright.profiler.profiler._TRIALS_S", 0.1)
    patch.setattr("graphwright.profiler.profiler.cores", lambda: 1)
    # What else runs here decides nothing.
    patch.setattr("graphwright.profiler.roofs.CROWDED", 1.0)
    patch.setattr("graphwright.profiler.roofs._CPU_COPIES", (1 << 14, 1 << 20))
    patch.setattr("graphwright.profiler.roofs._GPU_COPIES", (1 << 14, 1 << 20))
    patch.setattr("graphwright.profiler.roofs._GPU_SIZES", {"float32": 1024, "bfloat16": 1024})
    patch.setattr("graphwright.profiler.roofs._CPU_SIZES", {"float32": 128, "bfloat16": 32})


@pytest.fixture(autouse=True)
def quick_profile(monkeypatch: pytest.MonkeyPatch, quick: None, one_thread: None) -> None:
    shorten(monkeypatch)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {k: (p.grad, None if p.grad is None else p.grad.clone()) for k, p in
                  model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": (torch.get_rng_state(), random.getstate()),
        "threads": torch.get_num_threads(),
        "interval": sys.getswitchinterval(),
        "calls": model.calls,
    }  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model, x = Net().train(), torch.randn(2, 3, 8, 8)
    model(x).sum().backward()  # There are gradients already.
    given = x.clone()
    before = state_of(model)
    found = gw.profile(model, (x,), training=training)
    after = state_of(model)
    assert found.training is training
    assert torch.equal(x, given)
    assert x.grad is None
    for name, tensor in before["tensors"].items():
        assert torch.equal(tensor, after["tensors"][name]), name
    for name, (grad, value) in before["grads"].items():
        assert after["grads"][name][0] is grad, name
        assert torch.equal(grad, value), name
    assert torch.equal(before["random"][0], after["random"][0])
    assert before["random"][1] == after["random"][1]
    for key in ("modes", "hooks", "threads", "interval", "calls"):
        assert before[key] == after[key], key


def test_inputs_that_the_call_writes_to_are_the_caller_s_no_more() -> None:
    x = torch.zeros(4)
    gw.profile(lambda t: t.add_(1), (x,))
    assert torch.equal(x, torch.zeros(4))


def test_an_error_puts_everything_back() -> None:
    model, x = Net().train(), torch.randn(2, 3, 1, 1)
    before = state_of(model)
    with pytest.raises(gw.ModelFailed, match="raises by itself"):
        gw.profile(model, (x,))
    after = state_of(model)
    assert before["calls"] == after["calls"]
    assert torch.equal(before["random"][0], after["random"][0])


@pytest.fixture(scope="module", name="profiled")
def _profiled(tmp_path_factory: pytest.TempPathFactory) -> gw.Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        shorten(patch)
        return gw.profile(Net().eval(), (torch.randn(2, 3, 8, 8),))


def test_tables_count_the_same_by_all_groups(profiled: gw.Profile) -> None:
    totals = []
    for by in ("module", "operation", "line"):
        rows = profiled.table(by)
        assert sum(row.share for row in rows) == pytest.approx(1)
        totals.append((sum(row.flops for row in rows), sum(row.operations for row in rows)))
    assert len(set(totals)) == 1
    modules = {row.key: row for row in profiled.table("module")}
    # 2 images, 6 × 6 places, 4 channels of 3 × 3 × 3 products, two operations each.
    assert modules["conv"].flops == 2 * 36 * 4 * 27 * 2
    assert modules["head"].flops == 2 * 4 * 2 * 2
    assert any(row.key.endswith(".py:33") or "test_profile.py" in row.key
               for row in profiled.table("line"))  # fmt: skip


def test_bytes_are_those_read_and_written(profiled: gw.Profile) -> None:
    rows = {row.key: row for row in profiled.table("operation")}
    assert rows["aten::relu"].nbytes == 2 * (2 * 4 * 6 * 6) * 4


def test_text_is_readable_in_80_columns(profiled: gw.Profile) -> None:
    text = str(profiled)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("share of the time", "remedy", "by module", "by line", "roofs"):
        assert part in text
    assert len(repr(profiled)) < 100


def test_a_call_has_one_time(profiled: gw.Profile) -> None:
    """On a CPU that of the fastest call, to which all others in the text belong."""
    head = str(profiled).partition("share of the time")[0]
    assert len(re.findall(r"\d (?:s|ms|µs)\b", head)) == 1
    assert f" {duration(profiled.figures.call_s)} a call" in head
    assert f" {duration(profiled.figures.call_s)} a call" in profiled._repr_html_()
    assert "fastest call<" not in profiled.to_html()


def test_another_number_of_threads_is_told_as_a_factor() -> None:
    threads = thread_times(1, [{1: 2e-3, 4: 1e-3}] * 9, cores=8)
    figures = CpuFigures(2e-3, 2e-4, 1e-4, {Cause.MEMORY: 1.7e-3}, threads)
    assert told(of_cpu(figures), figures, [], TracedCall()) == (
        "The call is bound by too few threads. Operations compute and move data for 85% of it, "
        "starting them takes 5%, Python between them 10%. With 4 threads in place of 1 it is 2.00 "
        "times as fast."
    )


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, "0"])
def test_the_profiler_s_library_prints_nothing_unless_asked_to(
    chosen: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from graphwright.profiler.subject import Subject\n"
        "from graphwright.profiler.trace import traced\n"
        "before = dict(os.environ)\n"
        "traced(Subject(torch.relu, (torch.ones(4),), {}, training=False))\n"
        "assert dict(os.environ) == before\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    environment |= {} if chosen is None else {"KINETO_LOG_LEVEL": chosen}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert bool(done.stderr) == (chosen is not None)
    assert not done.stdout


def test_json_holds_everything(profiled: gw.Profile, tmp_path: Path) -> None:
    profiled.save(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["schema"] == "graphwright.profile"
    assert {"verdict", "remedies", "roofs", "tables", "operations", "figures"} <= {*data}
    assert data["tables"]["module"]
    assert data["verdict"]["causes"]


def test_the_trace_bears_our_names(profiled: gw.Profile, tmp_path: Path) -> None:
    profiled.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(str(event.get("name", "")).startswith("conv: aten::") for event in events)


def test_plots_are_svg(profiled: gw.Profile, tmp_path: Path) -> None:
    for name in ("roofline", "timeline"):
        getattr(profiled, f"save_{name}")(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert text.startswith("<svg")
        assert "NaN" not in text


def test_files_that_cannot_be_written_are_named(profiled: gw.Profile, tmp_path: Path) -> None:
    with pytest.raises(gw.GraphwrightError, match="cannot be written"):
        profiled.save(tmp_path / "no" / "file.json")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: gw.profile(3), "fn is 3"),
        (lambda: gw.profile(gw.graph(torch.sin), (torch.ones(2),)), "the model that it was made"),
        (lambda: gw.profile(torch.sin, torch.ones(2)), "args is a Tensor"),
        (lambda: gw.profile(torch.sin, (), {1: 2}), "kwargs has the key"),
        (lambda: gw.profile(torch.sin, (), training=1), "training is 1"),
    ],
)
def test_bad_arguments_are_named_with_the_fix(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(gw.OptionError, match=named):
        call()


def test_unknown_groups_and_remedies_are_named(profiled: gw.Profile) -> None:
    with pytest.raises(gw.OptionError, match="'module', 'operation' or 'line'"):
        profiled.table("modules")
    with pytest.raises(gw.OptionError, match="'graph'"):
        profiled.remedy("grph")


def test_only_reports_are_compared(profiled: gw.Profile) -> None:
    with pytest.raises(gw.OptionError, match=r"pass tuned\.report"):
        profiled.compare(3)  # type: ignore[arg-type]


def test_training_needs_something_to_train() -> None:
    with pytest.raises(gw.OptionError, match="training=True"):
        gw.profile(torch.sin, (torch.ones(3),), training=True)


def test_a_backward_pass_belongs_to_the_modules_of_its_forward() -> None:
    found = gw.profile(Net().eval(), (torch.randn(2, 3, 8, 8),), training=True)
    rows = {row.key: row for row in found.table("module")}
    # Twice the forward's products: for the weight's gradient alone, as the input needs none.
    assert rows["conv"].flops == 2 * (2 * 36 * 4 * 27 * 2)


def test_roofs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = roofs_of(torch.device("cpu"))
    assert not first.recalled

    def again(name: str) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(roof_room, "_measure_cpu", again)
    second = roofs_of(torch.device("cpu"))
    assert second.recalled
    assert second.copies == first.copies


def test_roofs_beside_other_work_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphwright.profiler.roofs.CROWDED", -1.0)
    roofs_of(torch.device("cpu"))
    assert not roofs_of(torch.device("cpu")).recalled


def test_roofs_rise_to_what_operations_reach() -> None:
    roofs = roofs_of(torch.device("cpu"))
    higher = roof_room.raised(roofs, {"float32": 1e15, "int8": 1.0})
    assert higher.flops["float32"] == 1e15
    assert "int8" not in higher.flops
    assert roof_room.raised(roofs, {"float32": 1.0}).flops == roofs.flops


def test_damaged_roofs_are_measured_anew() -> None:
    roofs_of(torch.device("cpu"))
    (file,) = roof_room.folder().iterdir()
    file.write_text("{")
    assert not roofs_of(torch.device("cpu")).recalled


def test_replays_bear_the_name_of_what_was_captured() -> None:
    model = nn.Linear(4, 4).eval()
    graph = gw.capture(model, torch.randn(2, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        graph(torch.randn(2, 4))
    assert graph.name in {event.name for event in profiler.events()}


def test_waits_are_timed_without_a_trace_of_it() -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("item", "__bool__", "cpu")}
    clock = WaitClock(operation_s=0.0)
    x = torch.ones(3)
    with clock.running():
        assert x.sum().item() == 3
        assert bool(x[0] > 0)
        assert x.nonzero().shape == (3, 1)
        assert [*map(int, x)] == [1, 1, 1]
    assert clock.seconds > 0
    for name, method in before.items():
        assert getattr(torch.Tensor, name) is method
        assert name not in vars(torch.Tensor) or name == "__bool__"


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_on_a_gpu_nothing_is_captured_and_all_is_put_back(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured")

    roofs_of(torch.device("cuda"))  # A graph of empty kernels is among what is measured here.
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    model, x = Net().cuda().train(), torch.randn(2, 3, 8, 8, device="cuda")
    model(x).sum().backward()
    before, drawn = state_of(model), torch.cuda.get_rng_state()
    found = gw.profile(model, (x,), training=training)
    after = state_of(model)
    for name, tensor in before["tensors"].items():
        assert torch.equal(tensor, after["tensors"][name]), name
    for name, (grad, value) in before["grads"].items():
        assert after["grads"][name][0] is grad, name
        assert torch.equal(grad, value), name
    assert torch.equal(drawn, torch.cuda.get_rng_state())
    assert found.device == "cuda:0"
    assert found.remedy("graph").likely is not None
    assert sum(row.launches for row in found.table("operation")) > 5
    modules = {row.key: row for row in found.table("module")}
    assert modules["conv"].seconds > 0
    assert found.roofs.kernel_s > 0


@pytest.mark.gpu
def test_replays_on_a_gpu_bear_the_name_of_what_was_captured(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4).cuda().eval(), torch.randn(2, 4, device="cuda")
    graph = gw.capture(model, x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        graph(x)
        torch.cuda.synchronize()
    assert graph.name in {event.name for event in profiler.events()}
    with torch.autograd.profiler.emit_nvtx():
        graph(x)


def test_a_page_holds_the_verdict_remedies_and_tables(profiled: gw.Profile, tmp_path: Path) -> None:
    profiled.save(tmp_path / "profile.html")
    page = (tmp_path / "profile.html").read_text(encoding="utf-8")
    for heading in ("Shares of the time", "Roofline", "One call", "Remedies", "By module", "Roofs"):
        assert f">{heading}<" in page
    assert page.count("<svg") in (3, 4)  # Where no remedy gains anything there is no plot of them.


def test_a_profile_is_saved_by_its_suffix(profiled: gw.Profile, tmp_path: Path) -> None:
    profiled.save(tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_text(encoding="utf-8") == profiled.to_json()
    with pytest.raises(gw.GraphwrightError, match=r"End it with \.json or \.html\."):
        profiled.save(tmp_path / "profile")


def test_a_notebook_shows_the_verdict(profiled: gw.Profile) -> None:
    shown = profiled._repr_html_()
    assert html.escape(profiled.verdict.text) in shown
    assert "<script" not in shown
