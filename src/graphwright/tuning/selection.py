"""Which candidates are near the best, which of them is chosen, and why, in one sentence."""

from __future__ import annotations

import math

from ..evaluation.measurement import median_interval
from ..report.report import Report
from ..report.result import EAGER, OF_TIME, Row, Status
from ..report.table import duration

# Candidates within this factor of the best are timed again, and unsteady ones within a larger one.
FINALIST_FACTOR, UNSTEADY_FACTOR = 1.10, 1.5
# The note of a finalist that was not built in this process.
NO_TIME_LEFT = "a finalist, but not timed again: the budget left no time"
# A smaller gain is not worth a more complex candidate, however certain it is.
_WORTH_IT = 1.01


def eligible(report: Report) -> list[Row]:
    """Rows of candidates that are right and not slower than eager."""
    return [row for row in report.rows if row.status is Status.OK]


def near_best(report: Report) -> list[Row]:
    """The candidates to time again: those near the best by their ratio to eager or by their time.

    Both count, since ratios of different candidates cannot be compared when eager's own time varies
    from one screening to the next. Their time is the fastest that was seen: other work, such as
    set-ups of others, only makes calls longer. Candidates whose first answer was not timed yet are
    kept too.
    """
    rows = eligible(report)
    near = {row.strategy for row in rows if report.cost(row) == math.inf}
    limit = FINALIST_FACTOR * min(map(report.cost, rows), default=0.0)
    near |= {row.strategy for row in rows if report.cost(row) <= limit}
    if report.objective in OF_TIME:
        fastest = {
            row.strategy: row.screening.fastest(report.figure) for row in rows if row.screening
        }
        least = min(fastest.values(), default=0.0)
        for row in rows:
            factor = UNSTEADY_FACTOR if row.unsteady else FINALIST_FACTOR
            if fastest.get(row.strategy, math.inf) <= factor * least:
                near.add(row.strategy)
    return [row for row in rows if row.strategy in near]


def ranked(report: Report, rows: list[Row]) -> list[Row]:
    """The eligible ones of some rows: the simplest that none beats for sure, then best first.

    Those that were not timed in the common rounds, if there were any, come last. What is unsteady
    counts with its slowest rounds, against the fastest call of eager.
    """
    rows = [row for row in rows if row.status is Status.OK]
    timed_apart = [row for row in rows if row.final is None]
    finalists = [row for row in rows if row.final is not None]
    return _ranked(report, finalists) + _ranked(report, timed_apart)


def _ranked(report: Report, rows: list[Row]) -> list[Row]:
    # By complexity where the cost is not known: then eager comes first.
    rows = sorted(rows, key=lambda row: (report.cost(row), row.complexity))
    if not rows or report.cost(rows[0]) == math.inf:
        return rows
    eager = report.row(EAGER)
    most = math.inf if eager is None or eager not in rows else report.cost(eager)
    # One held-up round of the best must not tie it with what another one beats in all rounds.
    rivals = [rows[0], *(r for r in rows[1:] if not r.unsteady and report.cost(r) < math.inf)]
    tied = [
        row
        for row in rows
        # What seems slower than eager is not taken for being simple, whatever the noise.
        if report.cost(row) <= most and all(_ties(report, row, rival) for rival in rivals)
    ] or rows[:1]
    tied.sort(key=lambda row: row.complexity)
    return tied + [row for row in rows if row not in tied]


def _ties(report: Report, row: Row, best: Row) -> bool:
    """Whether a row is as good as another one within the noise."""
    if report.objective in ("memory", "cold_start"):
        return report.cost(row) <= _WORTH_IT * report.cost(best)
    if row.unsteady or best.unsteady:
        return row is best
    if row.final is not None and best.final is not None:
        # Compare them directly: the ratios to eager have eager's noise in addition.
        low, _ = median_interval(row.final.ratios(best.final, report.objective))
        return low <= _WORTH_IT
    mine, its = report.ratios(row), report.ratios(best)
    if not (mine and its):
        return row is best
    return median_interval(mine)[0] <= median_interval(its)[1] * _WORTH_IT


def reason_for(report: Report, chosen: Row, finalists: list[Row], load: str = "") -> str:
    """Why a candidate was chosen, for a reader who looks at nothing else.

    Args:
        report: the report of the run.
        chosen: the row of what was chosen.
        finalists: the rows that were timed in common rounds and are right.
        load: the load of the machine in words; named where figures are unsteady.
    """
    if report.objective == "cold_start":
        text = _reason_for_cold_start(report, chosen)
    else:
        text = _reason(report, chosen, finalists)
        text += _left_out(report, chosen)
    unsteady = [row.strategy for row in report.rows if row.unsteady]
    if unsteady:
        seen = f" ({load})" if load else ""
        text += (
            f" The machine was busy{seen}: {', '.join(unsteady)} stayed unsteady and "
            f"{'takes' if len(unsteady) == 1 else 'take'} part in no ratio. "
            "Tune again when less else runs."
        )
    return text


def _reason(report: Report, chosen: Row, finalists: list[Row]) -> str:
    what = {
        "latency": "the lowest latency",
        "throughput": "the highest throughput",
        "memory": "the lowest peak memory",
    }[report.objective]
    if chosen.strategy == EAGER:
        others = len([row for row in report.rows if row.measurement is not None]) - 1
        late = len([row for row in report.rows if row.status is Status.NOT_TRIED])
        untried = f" The budget was too small for {late} more." if late else ""
        if others < 1:
            return f"eager was chosen: nothing else could be measured here.{untried}"
        beaten = f"none of the {others} others that were measured beats it"
        if others == 1:
            beaten = "the other one that was measured does not beat it"
        if chosen.unsteady:
            beaten = "its own time is unsteady, and none is always faster than its fastest call"
            return f"eager was chosen: {beaten}.{untried}"
        return f"eager was chosen: {beaten} beyond the noise.{untried}"
    text = f"{chosen.strategy} was chosen: {what} that agrees with float64"
    speed = report.speedup(chosen)
    if speed is not None:
        text += f", {speed[0]:.2f} ({speed[1]:.2f} to {speed[2]:.2f}) times as fast as eager"
    elif report.objective != "memory" and report.cost(chosen) < 1:
        least = 1 / report.cost(chosen)
        text += f", at least {least:.2f} times as fast as eager's fastest call"
    best = min(finalists, key=report.cost, default=chosen)
    known = report.cost(best) < math.inf
    if known and best is not chosen and report.objective != "memory":
        text += f"; {best.strategy} is not faster beyond the noise, and less simple"
    return text + "."


def _left_out(report: Report, chosen: Row) -> str:
    """What seemed faster, where there was no time to build it in this process."""
    if report.objective not in OF_TIME or chosen.final is None or chosen.screening is None:
        return ""
    limit = chosen.screening.fastest(report.figure) / FINALIST_FACTOR
    left_out = {
        row.strategy: row.screening.fastest(report.figure)
        for row in eligible(report)
        if NO_TIME_LEFT in row.notes and row.screening is not None
    }
    best = min(left_out, key=left_out.__getitem__, default="")
    if not best or left_out[best] > limit:
        return ""
    return (
        f" {best} seemed faster ({duration(left_out[best])} against "
        f"{duration(chosen.screening.fastest(report.figure))} when screened), but the budget left "
        "no time to build it here: give a larger one."
    )


def _reason_for_cold_start(report: Report, chosen: Row) -> str:
    """Why a candidate was chosen for its early first answer."""
    text = f"{chosen.strategy} was chosen"
    late = len([row for row in report.rows if row.status is Status.NOT_TRIED])
    untried = f" The budget was too small for {late} more." if late else ""
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
