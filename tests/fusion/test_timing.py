"""Passes are timed, and left out where they lose time."""

from __future__ import annotations

import copy
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.fusion import pass_manager, pass_timing
from graphwright.ops.fused import compiling, fused_operator, launch_cache
from graphwright.ops.fused.fused_operator import FusedOperator
from graphwright.strategies.fused import FUSED


def model(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(8 * 36))
    return body.to(device).eval(), torch.randn(4, 3, 8, 8, device=device)


def timed_as(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[int]:
    """Have groups of passes win these seconds of 1 s; says how many graphs were compared."""
    names = iter(seconds)
    asked: list[int] = []

    def compared(calls: Any, *rest: Any) -> list[float]:
        asked.append(len(calls))
        return [1.0, 1.0 + seconds[next(names)]]

    monkeypatch.setattr(pass_manager, "compared", compared)
    return asked


def changed_by(fused: gw.FusedModule) -> set[str]:
    return {name for region in fused.regions for name, _ in region.done}


def test_a_group_that_loses_time_is_left_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, x = model(device)
    everything = changed_by(gw.fuse(body, (x,), measure=False))
    groups = {
        name: {each.name for each in group} & everything
        for name, group in pass_timing.GROUPS.items()
    }
    groups = {name: passes for name, passes in groups.items() if passes}
    first = next(iter(groups))
    monkeypatch.setattr(pass_manager, "WORTH", 0.01)
    asked = timed_as(monkeypatch, dict.fromkeys(groups, 0.5) | {first: -0.2, pass_manager.ALL: 1.0})
    fused = gw.fuse(body, (x,), measure=True)
    assert not changed_by(fused) & groups[first]
    assert asked == [2] * len(asked)
    text = fused.explain()
    assert "it loses 200000 of 1000000 µs" in text
    with torch.no_grad():
        torch.testing.assert_close(fused(x), body(x), rtol=1e-3, atol=1e-3)


def test_what_a_group_wins_is_told(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    body, x = model(device)
    everything = changed_by(gw.fuse(body, (x,), measure=False))
    timed_as(monkeypatch, dict.fromkeys([*pass_timing.GROUPS, pass_manager.ALL], 0.25))
    fused = gw.fuse(body, (x,), measure=True)
    assert changed_by(fused) == everything
    assert fused.regions[0].gained
    for name, seconds in fused.regions[0].gained.items():
        assert seconds == 0.25
        assert f"{name}: 250000.0 µs won" in fused.explain()


def test_what_is_slower_than_the_model_is_left_as_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, x = model(device)

    def compared(calls: Any, *rest: Any) -> list[float]:
        return [1.0, 0.7 if calls[1] is body else 1.25]

    monkeypatch.setattr(pass_manager, "WORTH", 0.01)
    monkeypatch.setattr(pass_manager, "compared", compared)
    fused = gw.fuse(body, (x,), measure=True)
    assert not changed_by(fused)
    assert "it loses 300000 of 1000000 µs, beside the model as it is" in fused.explain()
    with torch.no_grad():
        assert torch.equal(fused(x), body(x))
    assert fused.calls["fused"] == 1


def test_what_cannot_be_timed_is_kept_and_told(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, x = model(device)
    everything = changed_by(gw.fuse(body, (x,), measure=False))

    def compared(*rest: Any) -> list[float]:
        raise RuntimeError("no clock here")

    monkeypatch.setattr(pass_manager, "compared", compared)
    fused = gw.fuse(body, (x,), measure=True)
    assert changed_by(fused) == everything
    assert "beside the model as it is: not timed, RuntimeError: no clock here" in fused.explain()


def test_nothing_is_timed_unless_asked_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, x = model(device)
    asked = timed_as(monkeypatch, {})
    gw.fuse(body, (x,), measure=False)
    gw.fuse(body, (x,))
    assert not asked


def test_a_gpu_is_timed_by_itself_unless_passes_are_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_manager, "MEASURED", frozenset({device.type}))
    body, x = model(device)
    asked = timed_as(monkeypatch, dict.fromkeys([*pass_timing.GROUPS, pass_manager.ALL], 0.25))
    gw.fuse(body, (x,), passes=["norms", "activations", "convolutions"])
    gw.fuse(body, (x,), measure=False)
    assert not asked
    copied = copy.deepcopy(gw.fuse(body, (x,)))
    before = len(asked)
    assert before
    monkeypatch.setattr(pass_manager, "compared", lambda *rest: asked.append(2) or [1.0, 1.25])
    with torch.no_grad():
        copied(x)
    assert len(asked) == 2 * before


def test_the_strategy_times_its_passes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_manager, "MEASURED", frozenset({device.type}))
    body, x = model(device)
    asked = timed_as(monkeypatch, dict.fromkeys([*pass_timing.GROUPS, pass_manager.ALL], 0.25))
    FUSED.build(body, (x,), {})
    assert asked


def another_assembler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor does: name another one, where Triton has asked the first for its version."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas_version

    major, minor = torch.cuda.get_device_capability()
    get_ptxas_version(10 * major + minor)
    own = knobs.nvidia.ptxas.path
    other = folder / "ptxas"
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo another && exit\nexec {own} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))


@pytest.mark.gpu
@pytest.mark.parametrize("assembler", ["its_own", "another"])
def test_kernels_are_compiled_by_other_processes(
    assembler: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from triton import knobs
    from triton.runtime import build

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if assembler == "another":
        another_assembler(tmp_path, monkeypatch)
    found: list[bool] = []

    def seen(*rest: Any, cache_hit: bool, **others: Any) -> None:
        found.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", seen)
    with_gcc: list[str] = []
    compiled = build._build
    monkeypatch.setattr(
        build, "_build", lambda name, *rest: (with_gcc.append(name), compiled(name, *rest))[1]
    )
    # Of sizes that no other test has: kernels are compiled once in a process.
    sizes = (1234, 88, 345, 2222) if assembler == "its_own" else (600, 40, 5000, 20)
    layers = [nn.Sequential(nn.LayerNorm(n), nn.Linear(n, m)) for n, m in pairwise(sizes)]
    body = nn.Sequential(*layers, nn.LayerNorm(sizes[-1])).to("cuda").eval()
    x = torch.randn(37, sizes[0], device="cuda")
    fused = gw.fuse(body, (x,))
    with torch.no_grad():
        torch.testing.assert_close(fused(x), body(x), rtol=1e-3, atol=1e-3)
    assert len(found) >= 4
    assert all(found), f"{caplog.text}; in {knobs.cache.dir}, not {tmp_path}"
    assert "__triton_launcher" not in with_gcc


def test_processes_that_compile_end_with_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = Path(compiling.compile_worker.__file__).read_text(encoding="utf-8")
    slow = tmp_path / "slow.py"
    there = str(tmp_path / "there")
    body = f"def _compile(job):\n    open({there!r} + job['n'], 'w').close()\n    time.sleep(600)\n"
    slow.write_text(own.replace("if __name__", f"import time\n{body}\nif __name__"))
    monkeypatch.setattr(compiling.compile_worker, "__file__", str(slow))
    monkeypatch.setattr(compiling, "_processors", lambda: 4)
    with compiling.Compiling() as work:
        work.begin()
        process = work._child
        assert process is not None
        work.jobs = {str(n): {"n": str(n)} for n in range(6)}
        work._send()
        assert work.running
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("there*"))) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3
        assert process.status_within(0) is None
    assert process.status_within(0) is not None
    assert not work.running

    def runs(child: str) -> bool:
        try:
            # Where process 1 takes in no orphans, something is left of one that has ended.
            return "State:\tZ" not in Path(f"/proc/{child}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    # They are killed by now, and the system takes a moment to end them.
    end = time.monotonic() + 30
    while any(map(runs, children)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_kernels_are_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = Path(compiling.compile_worker.__file__).read_text(encoding="utf-8")
    quick = tmp_path / "quick.py"
    there = str(tmp_path / "there")
    body = f"def _compile(job):\n    open({there!r} + job['n'], 'w').close()\n    1 / 0\n"
    quick.write_text(own.replace("if __name__", f"{body}\nif __name__"))
    monkeypatch.setattr(compiling.compile_worker, "__file__", str(quick))
    monkeypatch.setattr(compiling, "_processors", lambda: 3)
    monkeypatch.setattr(compiling, "_is_cached", lambda key: key in cached)
    cached = [str(n) for n in range(5)]
    with compiling.Compiling() as work:
        work.begin()
        assert work._child is None  # Too few processors for one that may be of no use.
        for n in range(5):
            work.jobs[str(n)] = {"n": str(n)}
            work._send()
        work.wait()
        assert not work.running
        assert len(list(tmp_path.glob("there*"))) == 5
        assert not work.problem
        cached.remove("3")
        work.wait()
        assert work.problem == "ZeroDivisionError: division by zero"
        process = work._child
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)  # It ends by itself, whatever the reason.
        assert process.status_within(20) == -signal.SIGKILL
        work.jobs["x"] = {"n": "x"}
        work._send()
        work.wait()
        assert not work.running


def test_without_triton_nothing_is_compiled_ahead() -> None:
    x = torch.randn(3, 8)
    with compiling.Compiling() as work:
        with work.asked():
            found = gw.ops.layer_norm(x)
        work.wait()
    assert not work.jobs
    torch.testing.assert_close(found, nn.functional.layer_norm(x, (8,)))


def test_what_is_asked_for_is_not_launched(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Kernel:
        def warmup(self, x: torch.Tensor, *, grid: tuple[int, ...]) -> None:
            asked.append(len(x))
            raise RuntimeError("it is compiled elsewhere")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise AssertionError("it is launched")

    def launch(x: torch.Tensor) -> torch.Tensor:
        result = torch.full_like(x, torch.nan)
        launch_cache.launched(Kernel(), (1,), x)
        return result

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    operator = FusedOperator("twice", doubled, doubled, lambda x: True, launch)
    monkeypatch.setattr(fused_operator, "triton_works", lambda: True)
    x = torch.randn(5, 4, device=device)
    with launch_cache.asking():
        for _ in range(3):
            assert torch.equal(operator.on_gpu(x), torch.zeros_like(x))
        assert operator.on_gpu(x.T).stride() == x.T.stride()
    assert asked == [5, 4]
    with pytest.raises(AssertionError, match="it is launched"):
        operator.on_gpu(x)


def test_the_faster_call_is_seen(device: torch.device) -> None:
    weight = torch.randn(256, 256, device=device)

    def once(x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    def often(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x @ weight
        return x

    few, many = pass_timing.compared((once, often), (weight,), {}, device)
    assert 4 * few < many
