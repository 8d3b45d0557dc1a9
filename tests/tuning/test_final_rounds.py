"""The finalists' common rounds: how many there are, and what the rows get of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import Row, Status
from graphwright.tuning.final_rounds import FinalRounds

QUIET, NOISY = (20.0,) * 6, (17.0, 24.0, 20.0, 23.0, 18.0, 21.0)
NAMES = {"eager": 0, "simple": 5, "inductor": 15}


def rounds(milliseconds: Sequence[float]) -> Measurement:
    seconds = tuple(each * 1e-3 for each in milliseconds)
    return Measurement(tuple((each,) for each in seconds), seconds)


def times_of(name: str, turn: Sequence[float]) -> Measurement:
    """Eager takes twice as long as torch.compile, and the other one as long as in a turn."""
    return rounds(turn if name == "simple" else [40.0 if name == "eager" else 20.0] * len(turn))


def final_rounds(
    monkeypatch: pytest.MonkeyPatch,
    turns: Sequence[Sequence[float]],
    samples: int = 1,
    deadline: float | None = None,
) -> tuple[Report, int]:
    """The report, and the sets of rounds that were run, where a simple one takes these times."""
    sets = itertools.count()
    weights = [Mock(weight=1.0, call=number) for number in range(samples)]
    for number, sample in enumerate(weights):
        sample.name = f"shape {number}"

    def measured(calls: dict[str, Any], *_: object, **__: object) -> dict[str, Measurement]:
        turn = turns[min(next(sets) // samples, len(turns) - 1)]
        return {name: times_of(name, turn) for name in calls}

    monkeypatch.setattr("graphwright.tuning.final_rounds.interleave_until_steady", measured)
    monkeypatch.setattr("graphwright.tuning.final_rounds.MOST_SETS", 3)
    report = Report("Model", [], "latency", [], {})
    for name, rank in NAMES.items():
        row = Row(name, Status.OK, complexity=rank, screening=rounds(QUIET))
        row.by_shape = {sample.name: Row(name, Status.OK) for sample in weights}
        report.rows.append(row)
    evaluator = Mock(samples=weights)
    kept = {name: [Mock()] * samples for name in NAMES}
    FinalRounds(report, evaluator, kept, {}, Mock(), 2.0, deadline)._time()
    return report, next(sets) // samples


@pytest.mark.parametrize("samples", [1, 2])
def test_rounds_are_added_until_noise_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    assert final_rounds(monkeypatch, [QUIET], samples)[1] == 1
    report, sets = final_rounds(monkeypatch, [NOISY, QUIET * 4], samples)
    assert sets == 2
    for row in report.rows:
        assert row.final is not None
        assert len(row.final.latency) == 6 + 24
        assert report.ratios(row)
        finals = [part.final for part in row.by_shape.values()]
        assert samples == 1 or all(each and len(each.latency) == 30 for each in finals)
    assert final_rounds(monkeypatch, [NOISY], samples)[1] == 3


def test_no_rounds_are_added_that_would_end_after_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The least rounds of three that take 20 ms a call, and some time to run this."""
    assert final_rounds(monkeypatch, [NOISY], deadline=time.monotonic() + 0.6)[1] == 1
    assert final_rounds(monkeypatch, [NOISY], deadline=time.monotonic() + 60)[1] == 3


def test_a_figure_without_checks_that_became_unsteady_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would have fewer rounds than what it is compared with."""

    def wild(name: str, turn: Sequence[float]) -> Measurement:
        is_late = name == "torch.compile without checks" and turn is not NOISY
        return rounds([20.0, 50.0, 50.0] * (len(turn) // 3)) if is_late else steady(name, turn)

    steady = times_of
    monkeypatch.setattr("graphwright.evaluation.measurement.MAX_SPREAD", 1.5)
    monkeypatch.setitem(globals(), "times_of", wild)
    late = QUIET * 4
    report, sets = final_rounds(monkeypatch, [NOISY, late])
    assert sets > 1
    compiled = report.row("inductor")
    assert compiled is not None
    assert compiled.bare is None
    assert len(report.ratios(compiled, "inductor")) > len(NOISY)
