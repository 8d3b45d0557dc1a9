"""tune(background=True): a search in another process, while the model goes on answering."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.report.result import EAGER, Status
from graphwright.tuning.background import NOTHING_BETTER, BackgroundModule

UNKNOWN = f"eager: {NOTHING_BETTER}"
# Several times as fast as eager for a model of many small operations.
FAST = "onnxruntime"


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(6)]
        self.parts = nn.Sequential(*[part for several in parts for part in several])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.parts(x) + x
        return y


class Unpicklable(Chain):
    def __reduce__(self) -> Any:
        raise TypeError("it holds a socket")


def begin(model: Any, x: torch.Tensor, **options: Any) -> BackgroundModule:
    options = {"strategies": [FAST], "isolate": False, "remember": False} | options
    found = gw.tune(model, (x,), background=True, **options)
    assert isinstance(found, BackgroundModule)
    return found


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # A thread that has just ended.
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def left_in(folder: Path) -> list[str]:
    """Temporary files, without the cache of compilers and ONNX Runtime's own file."""
    names = [path.name for path in folder.iterdir()]
    return [name for name in names if not name.startswith(("torchinductor_", ".ses"))]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all temporary files, which must be empty again in the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = children()
    yield folder
    assert children() <= before
    assert left_in(folder) == []


def test_it_returns_at_once_and_is_the_model_until_something_is_found(scratch: Path) -> None:
    model, x = Chain().eval(), torch.randn(4, 32, requires_grad=True)
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    began = time.monotonic()
    with begin(model, x.detach()) as found:
        assert time.monotonic() - began < 1
        assert not found.done
        found(x).sum().backward()
        assert len(seen) == 1
        assert x.grad is not None
        assert found.calls == {UNKNOWN: 1}
        assert "searching" in repr(found)
        assert "searching" in found.explain()
        assert found.report.chosen == EAGER
        with pytest.raises(TimeoutError, match="goes on"):
            found.wait(0.0)
    assert found.done


def test_wrong_options_are_refused_at_once() -> None:
    model, x = Chain().eval(), torch.randn(4, 32)
    before = children()
    for options, told in (
        ({"strategies": ["onnxruntim"]}, "onnxruntime"),
        ({"objective": "cold_start"}, "cold_start"),
        ({"background": "yes"}, "background"),
        ({"buckets": gw.Buckets(batch=[1, 4]), "dynamic_shapes": {"x": {0: "batch"}}}, "buckets"),
    ):
        with pytest.raises(gw.OptionError, match=told):
            gw.tune(model, (x,), **({"background": True} | options))
    with pytest.raises(gw.OptionError, match="training"):
        gw.tune(Chain(), (x,), background=True)
    assert children() == before


def test_a_model_that_cannot_be_pickled_answers_eagerly_and_says_why(scratch: Path) -> None:
    model, x = Unpicklable().eval(), torch.randn(4, 32)
    with begin(model, x) as found:
        with pytest.raises(gw.GraphwrightError, match="it holds a socket"):
            found.wait(60)
        assert "it holds a socket" in found.explain()
        assert torch.equal(found(x), model(x))


def test_a_cancelled_search_ends_and_the_model_answers(scratch: Path) -> None:
    model, x = Chain().eval(), torch.randn(4, 32)
    found = begin(model, x)
    while not found._search._scratch:  # The process has begun.
        assert not found.done, found.explain()
        time.sleep(0.001)
    found.cancel()
    report = found.wait(60)
    found.close()
    assert report.interrupted
    assert "cancelled" in report.reason
    assert torch.equal(found(x), model(x))


def test_a_dropped_module_ends_its_search(scratch: Path) -> None:
    found = begin(Chain().eval(), torch.randn(4, 32))
    search = found._search
    del found
    assert search.ended.wait(60)
    assert search.report.interrupted
    search.close()


@pytest.mark.slow
def test_what_cannot_be_loaded_is_not_tried_and_says_why(scratch: Path) -> None:
    names = ["inductor", "torchscript", "eager+graph"]
    with begin(Chain().eval(), torch.randn(4, 32), strategies=names) as found:
        report = found.wait(120)
    assert report.chosen == EAGER
    for name in names:
        row = report.row(name)
        assert row is not None
        assert row.status is Status.NOT_TRIED
        assert "not in the background" in row.reason


def test_what_ends_the_search_is_raised_by_wait(scratch: Path) -> None:
    class Failing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("planted")

    with begin(Failing().eval(), torch.randn(4, 32)) as found:
        with pytest.raises(gw.ModelFailed, match="planted"):
            found.wait(120)
        assert "planted" in found.explain()


@pytest.mark.slow
def test_threads_get_right_results_all_the_while(scratch: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, x = Chain().eval(), torch.randn(4, 32)
    states = torch.random.get_rng_state(), random.getstate()
    wrong: list[float] = []
    counts = [0] * 4

    def call(number: int, found: BackgroundModule) -> None:
        inputs = [torch.full((4, 32), 0.1 * (number + k)) for k in range(4)]
        with torch.no_grad():
            wanted = [model(each) for each in inputs]
        while not found.done or counts[number] < 500:
            k = counts[number] % 4
            off = (found(inputs[k]) - wanted[k]).abs().max().item()
            if off > 1e-4:
                wrong.append(off)
            counts[number] += 1
            time.sleep(0.001)

    with begin(model, x) as found:
        threads = [threading.Thread(target=call, args=(n, found)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = found.wait()
        assert not wrong
        assert report.chosen == FAST, report.reason
        assert found.calls[UNKNOWN] > 0
        assert found.calls["tuned"] > 0
        found(torch.ones(5, 32))  # Another shape.
        assert found.calls["eager: another signature"] == 1
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.slow
def test_a_change_of_weights_during_the_search_is_never_answered_by_the_old_ones(
    scratch: Path,
) -> None:
    pytest.importorskip("onnxruntime")
    model, x = Chain().eval(), torch.randn(4, 32)
    with begin(model, x) as found:
        while "process" not in found._search.doing:  # The model is copied.
            time.sleep(0.001)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
            wanted = model(x)
        while not found.done:
            torch.testing.assert_close(found(x).detach(), wanted, atol=1e-4, rtol=1e-4)
        report = found.wait()
        assert any("changed during the search" in note for note in report.notes)
        assert report.chosen == FAST, report.reason
        torch.testing.assert_close(found(x).detach(), wanted, atol=1e-4, rtol=1e-4)
        assert found.calls["tuned"] > 0
        with torch.no_grad():
            model.parts[0].weight.mul_(2)
        torch.testing.assert_close(found(x), model(x).detach())
        assert found.calls["eager: the module changed"] == 1


@pytest.mark.slow
def test_two_searches_at_once_each_find_their_own(scratch: Path) -> None:
    pytest.importorskip("onnxruntime")
    models = [Chain().eval(), nn.Sequential(Chain(), Chain()).eval()]
    x = torch.randn(4, 32)
    both = [begin(model, x) for model in models]
    for found, model in zip(both, models, strict=True):
        assert found.wait().chosen == FAST
        torch.testing.assert_close(found(x), model(x).detach(), atol=1e-4, rtol=1e-4)
        assert found.calls["tuned"] == 1
        found.close()


@pytest.mark.slow
def test_a_remembered_choice_is_only_built_and_verified(scratch: Path) -> None:
    pytest.importorskip("onnxruntime")
    x = torch.randn(4, 32)
    with begin(Chain().eval(), x, remember=True) as first:
        created = first.wait().created
    model = Chain().eval()
    with begin(model, x, remember=True) as second:
        report = second.wait()
        assert report.recalled == created
        assert report.chosen == FAST
        torch.testing.assert_close(second(x), model(x).detach(), atol=1e-4, rtol=1e-4)
        assert second.calls["tuned"] == 1


@pytest.mark.slow
def test_a_model_that_draws_or_counts_is_left_alone(scratch: Path) -> None:
    class Counting(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x)

    class Drawing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(1)
            return super().forward(x)

    for model in (Counting().eval(), Drawing().eval()):
        state = torch.random.get_rng_state()
        with begin(model, torch.randn(4, 32)) as found:
            torch.random.set_rng_state(state)
            report = found.wait()
            assert report.chosen == EAGER
            assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(model, Drawing)
    assert "draws random numbers" in "".join(report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_process_may_end_in_the_middle_of_a_search(tmp_path: Path, end: str) -> None:
    text = f"""
        import os, sys, time, torch
        import graphwright as gw
        from test_background import Chain, begin
        torch.set_num_threads(1)
        found = begin(Chain().eval(), torch.randn(4, 32))
        while "reference" not in found._search.doing and "eager" not in found._search.doing:
            assert not found.done, found.explain()
            time.sleep(0.001)
        print(found._search._scratch)
        sys.stdout.flush()
        {end}
    """
    path = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == (-9 if "kill" in end else 0)
    scratch = Path(done.stdout.strip())
    assert scratch.parent == tmp_path
    limit = time.monotonic() + 30
    while (scratch.exists() or users_of(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert users_of(tmp_path) == []
    assert left_in(tmp_path) == []


def users_of(folder: Path) -> list[str]:
    """Processes that were started with this folder for temporary files."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and str(folder).encode() in (process / "environ").read_bytes()
            ):
                found.append(process.name)
        except OSError:
            continue
    return found
