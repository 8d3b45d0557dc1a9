"""The choice and the reason for it, in one sentence."""

from __future__ import annotations

import statistics

from .result import EAGER, Report, Row, Status


def sentence(report: Report, chosen: Row, finalists: list[Row]) -> str:
    """Why this one, for a reader who looks at nothing else."""
    if report.objective == "cold_start":
        return _first_answer(report, chosen)
    what = {
        "latency": "the lowest latency",
        "throughput": "the highest throughput",
        "memory": "the lowest peak memory",
    }[report.objective]
    if chosen.strategy == EAGER:
        others = len([row for row in report.rows if row.measurement is not None]) - 1
        late = len([row for row in report.rows if row.status is Status.NOT_TRIED])
        untried = f" The budget did not suffice for {late} more." if late else ""
        if others < 1:
            return f"eager was chosen: nothing else could be measured here.{untried}"
        beaten = f"none of the {others} others that were measured beats it"
        if others == 1:
            beaten = "the other one that was measured does not beat it"
        return f"eager was chosen: {beaten} beyond the noise.{untried}"
    text = f"{chosen.strategy} was chosen: {what} that agrees with float64"
    speed = report.speedup(chosen)
    if speed is not None:
        text += f", {speed[0]:.2f} ({speed[1]:.2f} to {speed[2]:.2f}) times as fast as eager"
    best = min(
        finalists,
        key=lambda row: statistics.median(report.ratios(row)),
        default=chosen,
    )
    if best is not chosen and report.objective != "memory":
        text += f"; {best.strategy} is not faster beyond the noise, and less simple"
    return text + "."


def _first_answer(report: Report, chosen: Row) -> str:
    """Why this one, where the first answer of a process is what counts."""
    text = f"{chosen.strategy} was chosen"
    late = len([row for row in report.rows if row.status is Status.NOT_TRIED])
    untried = f" The budget did not suffice for {late} more." if late else ""
    if chosen.cold_start_s is None:
        return f"{text}: no first answer was timed.{untried}"
    text += f": the earliest first answer: {chosen.cold_start_s:.1f} s from the start of a process"
    eager = report.row(EAGER)
    speed = report.speedup(chosen)
    if chosen.strategy != EAGER and eager is not None and eager.cold_start_s is not None:
        text += f", eager {eager.cold_start_s:.1f} s"
    if chosen.strategy != EAGER and speed is not None:
        text += f"; once it runs, {speed[0]:.2f} ({speed[1]:.2f} to {speed[2]:.2f}) times as fast"
    return f"{text}.{untried}"
