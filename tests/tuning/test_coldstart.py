"""The objective cold_start: first answers of fresh processes, and whatever goes wrong there."""

from __future__ import annotations

import getpass
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from planted import Planted
from torch import nn

import graphwright as gw
from graphwright.artifacts import evidence
from graphwright.evaluation.reference import Sample
from graphwright.processes.environment_variables import CANDIDATE
from graphwright.report.markdown import to_markdown
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.report.table import duration
from graphwright.strategies.base import Candidate
from graphwright.strategies.registry import default_candidates
from graphwright.tuning import cold_start
from graphwright.tuning.cold_start import ColdStarts
from graphwright.tuning.selection import near_best, ranked, reason_for
from graphwright.tuning.tuner import Tuning


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One round; and no file stays behind but what the compiler keeps of this process."""
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr("graphwright.tuning.cold_start.ROUNDS", 1)
    yield
    left = [path.name for path in scratch.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []


def tune(
    strategies: Sequence[Any], model: nn.Module | None = None, **options: Any
) -> gw.TunedModule:
    model = Rows().eval() if model is None else model
    given = {"objective": "cold_start", "remember": False, "progress": False}
    return gw.tune(model, (torch.randn(4, 16),), strategies=strategies, **given | options)


def directly(model: nn.Module) -> Callable[..., Any]:
    return torch.no_grad()(model)


def row_of(report: Report, name: str) -> Row:
    row = report.row(name)
    assert row is not None
    return row


def elsewhere(harm: Callable[[], object]) -> Callable[[nn.Module], Callable[..., Any]]:
    """What does harm in a fresh process only."""

    def make(model: nn.Module) -> Callable[..., Any]:
        if CANDIDATE in os.environ:
            harm()
        return directly(model)

    return make


def wrong(model: nn.Module) -> Callable[..., Any]:
    call, off = directly(model), CANDIDATE in os.environ
    return lambda x: call(x) * 1.01 if off else call(x)


def stops() -> None:
    raise RuntimeError("not in a process of its own")


def hangs() -> None:
    time.sleep(600)


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.slow
def test_the_least_is_chosen_and_stands_in_table_and_reason() -> None:
    tuned = tune(["torchscript:freeze", "fused"])
    report = tuned.report
    times = {row.strategy: row.cold_start_s for row in report.rows}
    assert set(times) == {"eager", "torchscript:freeze", "fused"}
    assert all(row.status is Status.OK for row in report.rows), report
    assert all(seconds is not None and 0.1 < seconds < 100 for seconds in times.values())
    least = min(seconds for seconds in times.values() if seconds is not None)
    assert times[str(report.chosen)] <= 1.01 * least  # type: ignore[operator]  # asserted above
    took = duration(times[str(report.chosen)])
    assert f"its first answer comes {took} after a process starts" in report.reason
    assert "its first answer was measured from the saved file" in row_of(report, "fused").notes
    assert Report.from_json(report.to_json()) == report
    assert "first answer" in str(report)
    torch.testing.assert_close(tuned(torch.ones(4, 16)).shape, torch.Size((4, 4)))


@pytest.mark.slow
def test_torch_compile_is_timed_with_empty_and_with_filled_caches() -> None:
    row = row_of(tune(["inductor"]).report, "inductor")
    assert row.status is Status.OK, row.reason
    assert row.cold_start_s == min(row.first_answers)
    assert any(note.startswith("first answer with filled caches: ") for note in row.notes)


@pytest.mark.slow
def test_what_goes_wrong_in_a_fresh_process_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    harms = {
        "raise": (elsewhere(stops), Status.FAILED, "not in a process of its own"),
        "wrong": (wrong, Status.WRONG, "is off by"),
        "crash": (elsewhere(crashes), Status.CRASHED, "SIGSEGV"),
        "hang": (elsewhere(hangs), Status.TIMED_OUT, "took over 5"),
    }
    strategies = [Planted(name, make) for name, (make, _, _) in harms.items()]
    first_answer = ColdStarts.time

    def timed(starts: ColdStarts, row: Row, candidate: Candidate) -> None:
        """A slow host may need long for what does not hang."""
        starts.timeout_s = 5.0 if row.strategy == "hang" else 120.0
        first_answer(starts, row, candidate)

    monkeypatch.setattr(ColdStarts, "time", timed)
    report = tune(strategies).report
    for name, (_, status, why) in harms.items():
        row = row_of(report, name)
        assert (row.status, row.cold_start_s) == (status, None), row.reason
        assert row.reason.startswith("no first answer: ")
        assert why in row.reason
        assert name in row.repeat
    assert report.chosen == "eager"


@pytest.mark.slow
def test_an_artifact_that_answers_wrongly_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = evidence.write

    def off(folder: Path, samples: Sequence[Sample], device: torch.device) -> None:
        outputs = [o for s in samples for o in s.reference.cases[0].eager.outputs.values()]
        exact = [e for s in samples for e in s.reference.cases[0].exact.values()]
        for tensor in (*outputs, *exact):
            tensor += 1
        plain(folder, samples, device)
        for tensor in (*outputs, *exact):
            tensor -= 1

    monkeypatch.setattr(evidence, "write", off)
    report = tune(["fused"]).report
    row = row_of(report, "fused")
    assert row.status is Status.FAILED
    assert "it is wrong: output is off by" in row.reason
    assert report.chosen == "eager"


@pytest.mark.slow
def test_without_a_pickled_model_what_was_saved_is_timed_still() -> None:
    model = Rows().eval()
    model.lock = threading.Lock()
    report = tune(["fused", "eager:no_grad"], model).report
    assert row_of(report, "fused").cold_start_s is not None
    assert report.chosen == "fused"
    row = row_of(report, "eager:no_grad")
    assert row.status is Status.FAILED
    assert "cannot be given the model: it cannot be pickled" in row.reason
    eager = row_of(report, "eager")
    assert (eager.status, eager.cold_start_s) == (Status.OK, None)
    assert "cannot be pickled" in eager.reason


def test_a_spent_budget_leaves_eager() -> None:
    report = tune([Planted("quick", directly)], budget_s=0.001).report
    assert report.chosen == "eager"
    assert row_of(report, "quick").status is Status.NOT_TRIED
    assert report.reason == (
        "eager was chosen: no first answer was timed. The budget was too small for 1 more."
    )


def some(**seconds: float | None) -> Report:
    rows = [
        Row(name, Status.OK, complexity=rank, cold_start_s=value)
        for rank, (name, value) in enumerate(seconds.items())
    ]
    return Report("model", [], "cold_start", rows, {})


def test_the_simplest_within_a_hundredth_of_the_least_comes_first() -> None:
    report = some(eager=4.6, a=2.11, b=2.1, c=None)
    assert [row.strategy for row in ranked(report, report.rows)] == ["a", "b", "eager", "c"]
    assert [row.strategy for row in near_best(report)] == ["a", "b", "c"]
    chosen = ranked(report, report.rows)[0]
    assert reason_for(report, chosen, []) == (
        "a was chosen: its first answer comes 2.11 s after a process starts, eager's 4.60 s."
    )
    report.chosen = "a"
    assert "| first answer |" in to_markdown(report)
    assert "2.11 s" in str(report)


def test_reports_of_before_are_read_and_have_no_such_column() -> None:
    data = json.loads(some(eager=None).to_json())
    for row in data["rows"]:
        del row["cold_start_s"], row["first_answers"]
    report = Report.from_json(json.dumps(data))
    assert row_of(report, "eager").cold_start_s is None
    assert "first answer" not in to_markdown(report)


def test_a_compiled_library_is_among_the_candidates_where_loading_counts() -> None:
    names = {
        objective: [
            c.name for c in Tuning(Rows().eval(), (torch.ones(4, 16),), **given).asked.candidates
        ]
        for objective, given in (("latency", {}), ("cold_start", {"objective": "cold_start"}))
    }
    assert set(names["cold_start"]) - set(names["latency"]) == {"aot_inductor"}
    assert "aot_inductor" not in {
        c.name for c in default_candidates(Rows(), torch.device("cpu"), ())
    }


def test_an_answer_is_waited_for_no_longer_than_the_budget_lasts() -> None:
    began = time.monotonic()
    starts = ColdStarts(Mock(), {}, Mock(), 600.0, began + 0.05)
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as ours, open(writing, "wb", buffering=0):
        with pytest.raises(cold_start._NoRightAnswer) as refused:
            starts._read_answer(ours)
    assert refused.value.status is Status.NOT_TRIED
    assert refused.value.reason == "the budget was spent before its first answer was timed"
