"""Reports whose pages the tests look at."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.evaluation.accuracy import ErrorMeasure
from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import BestSoFar, Row, Shape, Status
from graphwright.tuning.selection import reason_for

# What would end an element, an attribute or a script, if it were not escaped.
HOSTILE = '</script></title><img src=x onerror="window.broken=1">\'&<b>$x_1$'


def measured(seconds: float) -> Measurement:
    spread = (0.98, 0.99, 1.0, 1.0, 1.01, 1.02)
    return Measurement(
        tuple((seconds * each, seconds * each) for each in spread),
        tuple(seconds / 2 * each for each in spread),
    )


def row(
    name: str,
    seconds: float,
    setup_s: float,
    mib: int,
    *,
    final: bool = False,
    complexity: int = 0,
    beside: float = 2e-3,
) -> Row:
    return Row(
        name,
        Status.OK,
        complexity=complexity,
        setup_s=setup_s,
        peak_bytes=mib * 2**20,
        error=ErrorMeasure(1.1e-7, 4e-7),
        screening=measured(seconds),
        baseline=measured(beside),
        final=measured(seconds) if final else None,
    )


def report(model: str = "Model", why: str = "it is not here", objective: str = "latency") -> Report:
    """A run whose choice is third by its time, and whose screening met a slower eager once."""
    rows = [
        row("eager", 2e-3, 1e-4, 1, final=True),
        row("inductor", 1e-3, 5.0, 9, final=True, complexity=5),
        row("inductor:freeze+graph", 0.249e-3, 9.0, 60, final=True, complexity=7),
        row("channels_last+inductor+graph", 0.2485e-3, 8.0, 50, final=True, complexity=8),
        row("inductor+graph", 0.25e-3, 7.0, 40, final=True, complexity=6),
        row("torchscript", 4e-3, 0.2, 4, complexity=2, beside=9e-3),
        row("channels_last+inductor:max-autotune+graph", 0.4e-3, 20.0, 70, complexity=9),
        Row("off", Status.WRONG, why, "nothing would", repeat="graphwright tune x --strategies off",
            error=ErrorMeasure(1e-2, 4e-1)),
        Row("absent", Status.UNAVAILABLE, why, "pip install absent"),
        Row("also absent", Status.UNAVAILABLE, why, "pip install absent"),
    ]  # fmt: skip
    for number, each in enumerate(rows[:4] if objective == "cold_start" else []):
        each.cold_start_s, each.first_answers = 1.0 + number, [1.0 + number, 2.0 + number]
    found = Report(
        model,
        ["args[0]: 4×16 float32"],
        objective,
        rows,
        {"processor": "a CPU", "torch": "2.13"},
        chosen="inductor" if objective == "cold_start" else "inductor+graph",
        # What limits follow from; it is no row's error.
        eager_error=ErrorMeasure(0.9e-7, 4e-7),
        created="2026-11-26T04:44:10+00:00",
        seconds=50.0,
        curve=[
            BestSoFar(3.0, "eager", 1.0),
            BestSoFar(9.0, "inductor", 1.9),
            BestSoFar(30.0, "inductor+graph", 7.5),
        ],
    )
    assert found.chosen_row is not None
    finalists = [each for each in rows if each.final is not None]
    found.reason = reason_for(found, found.chosen_row, finalists)
    return found


def with_shapes(names: Sequence[str] = ("short", "long")) -> Report:
    found = report()
    found.shapes = [Shape(name, 1 / len(names), ["args[0]: 4×16 float32"]) for name in names]
    for each in found.rows:
        if each.measurement is not None:
            parts = {}
            for number, name in enumerate(names, 1):
                one = row(each.strategy, each.measurement.typical().median * number, 0.1, 2)
                one.final, one.baseline = each.final and one.screening, measured(2e-3 * number)
                parts[name] = one
            each.by_shape = parts
    return found
