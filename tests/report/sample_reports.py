"""Reports whose pages the tests look at."""

from __future__ import annotations

from collections.abc import Sequence

from graphwright.evaluation.accuracy import ErrorMeasure
from graphwright.evaluation.measurement import Measurement
from graphwright.report.report import Report
from graphwright.report.result import Row, Shape, Status, Step

# What would end an element, an attribute or a script, if it were not escaped.
HOSTILE = '</script></title><img src=x onerror="window.broken=1">\'&<b>$x_1$'


def measured(seconds: float) -> Measurement:
    spread = (0.98, 0.99, 1.0, 1.0, 1.01, 1.02)
    return Measurement(
        tuple((seconds * each, seconds * each) for each in spread),
        tuple(seconds / 2 * each for each in spread),
    )


def row(name: str, seconds: float, setup_s: float, mib: int, *, final: bool = False) -> Row:
    return Row(
        name,
        Status.OK,
        setup_s=setup_s,
        peak_bytes=mib * 2**20,
        error=ErrorMeasure(1e-7, 4e-7),
        screening=measured(seconds),
        baseline=measured(2e-3),
        final=measured(seconds) if final else None,
    )


def report(model: str = "Model", why: str = "it is not here") -> Report:
    rows = [
        row("eager", 2e-3, 1e-4, 1, final=True),
        row("inductor", 1e-3, 5.0, 9, final=True),
        row("inductor+graph", 0.25e-3, 7.0, 40, final=True),
        row("torchscript", 1.5e-3, 0.2, 4),
        Row("off", Status.WRONG, why, "nothing would", repeat="graphwright tune x --strategies off",
            error=ErrorMeasure(1e-2, 4e-1)),
        Row("absent", Status.UNAVAILABLE, why, "pip install absent"),
        Row("also absent", Status.UNAVAILABLE, why, "pip install absent"),
    ]  # fmt: skip
    return Report(
        model,
        ["args[0]: 4×16 float32"],
        "latency",
        rows,
        {"processor": "a CPU", "torch": "2.13"},
        chosen="inductor+graph",
        reason="inductor+graph was chosen: it is fast.",
        eager_error=ErrorMeasure(1e-7, 4e-7),
        created="2026-11-26T04:44:10+00:00",
        seconds=50.0,
        curve=[
            Step(3.0, "eager", 1.0),
            Step(9.0, "inductor", 2.0),
            Step(30.0, "inductor+graph", 8),
        ],
    )


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
