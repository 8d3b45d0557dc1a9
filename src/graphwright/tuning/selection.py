"""Which candidates are near the best, which of them is chosen, and why, in one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..evaluation.measurement import median_interval
from ..report.report import Report
from ..report.result import EAGER, OF_TIME, Row, Status
from ..report.table import duration, memory, ratio

# Candidates within this factor of the best are timed again, and unsteady ones within a larger one.
FINALIST_FACTOR, UNSTEADY_FACTOR = 1.10, 1.5
# The note of a finalist that was not built in this process.
NO_TIME_LEFT = "a finalist, but not timed again: the budget left no time"
# A smaller gain is not worth a more complex candidate, however certain it is.
_WORTH_IT = 1.01
# The simplest takes at most so many times as long as the best, also where noise hides any loss.
_MOST_LOSS = 1.02
# Noise hides too much if the simpler one may be as fast, and may take so many times as long.
_HIDDEN_LOSS = 1.05
# So many strategies are named in a sentence; more are counted.
_NAMED = 3
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


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
    """The eligible ones of some rows, the choice first.

    The choice is eager, unless others are faster for sure: then it is the best of these, or the
    simplest of those as good as the best. Rows that were not timed in the common rounds, if there
    were any, come last. What is unsteady counts with its slowest rounds, against the fastest call
    of eager.
    """
    rows = [row for row in rows if row.status is Status.OK]
    timed_apart = [row for row in rows if row.final is None]
    finalists = [row for row in rows if row.final is not None]
    return _ranked(report, finalists) + _ranked(report, timed_apart)


def undecided(report: Report) -> bool:
    """Whether noise hides if a finalist that is simpler than the best is much slower."""
    rows = [row for row in eligible(report) if row.final is not None and not row.unsteady]
    best = min(rows, key=report.cost, default=None)
    if best is None or best.final is None or report.objective not in OF_TIME:
        return False
    for row in rows:
        if row.complexity < best.complexity and row.final is not None:
            low, high = median_interval(row.final.ratios(best.final, report.objective))
            if low <= _WORTH_IT and high > _HIDDEN_LOSS:
                return True
    return False


def _ranked(report: Report, rows: list[Row]) -> list[Row]:
    ahead = _ahead_of_eager(report, rows)
    tied = sorted(_as_good_as_the_best(report, ahead), key=lambda row: row.complexity)
    behind = [row for row in _best_first(report, rows) if row not in ahead]
    behind.sort(key=lambda row: row.strategy != EAGER)
    return [*tied, *(row for row in ahead if row not in tied), *behind]


def _best_first(report: Report, rows: list[Row]) -> list[Row]:
    # By complexity where the cost is not known: then eager comes first.
    return sorted(rows, key=lambda row: (report.cost(row), row.complexity))


def _ahead_of_eager(report: Report, rows: list[Row]) -> list[Row]:
    """Of some rows, the best first, those that are faster than eager for sure.

    All of them if eager is not among them, or something else than time is wanted.
    """
    eager, rows = report.row(EAGER), _best_first(report, rows)
    if eager is None or eager not in rows or report.objective not in OF_TIME:
        return rows
    return [
        row
        for row in rows
        if report.cost(row) < report.cost(eager) and not _ties(report, eager, row)
    ]


def _as_good_as_the_best(report: Report, rows: list[Row]) -> list[Row]:
    """Of some rows, the best first, those that may be chosen for being simple.

    None of the others beats them for sure. That alone would let noise decide for the simplest: they
    are not far from the best either, as far as noise lets that be seen.
    """
    if not rows or report.cost(rows[0]) == math.inf:
        return rows[:1]
    best = rows[0]
    # One held-up round of the best must not tie it with what another one beats in all rounds.
    rivals = [best, *(r for r in rows[1:] if not r.unsteady and report.cost(r) < math.inf)]
    return [
        row
        for row in rows
        if _loss(report, row, best) <= _MOST_LOSS
        and all(_ties(report, row, rival) for rival in rivals)
    ] or [best]


def _loss(report: Report, row: Row, best: Row) -> float:
    """How many times the cost of the best a row seems to have."""
    if report.objective in OF_TIME and row.final is not None and best.final is not None:
        return statistics.median(row.final.ratios(best.final, report.objective))
    return report.cost(row) / report.cost(best) if report.cost(best) else 1.0


def _ties(report: Report, row: Row, best: Row) -> bool:
    """Whether a row may be as good as another one: noise hides any difference."""
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
    elif chosen.strategy == EAGER:
        text = _reason_for_eager(report, chosen)
    else:
        text = _reason(report, chosen, finalists)
        text += _left_out(report, chosen)
    late = len([r for r in report.rows if r.status is Status.NOT_TRIED and "budget" in r.reason])
    if late:
        text += f" The budget was too small for {late} more."
    unsteady = [row.strategy for row in report.rows if row.unsteady]
    if unsteady:
        seen = f" ({load})" if load else ""
        who = ", ".join(unsteady) if len(unsteady) <= _NAMED else f"{len(unsteady)} strategies"
        text += (
            f" The machine was busy{seen}: {who} stayed unsteady and "
            f"{'is' if len(unsteady) == 1 else 'are'} not compared. Tune again when it is idle."
        )
    return text


def _reason_for_eager(report: Report, chosen: Row) -> str:
    others = len([row for row in report.rows if row.measurement is not None]) - 1
    if others < 1:
        return "eager was chosen: nothing else could be measured here."
    if chosen.unsteady:
        return (
            "eager was chosen: its own time is unsteady, and nothing was always faster than its "
            "fastest call."
        )
    late = [row for row in eligible(report) if NO_TIME_LEFT in row.notes]
    best = min(late, key=report.cost, default=chosen)
    if report.cost(best) < report.cost(chosen):
        return (
            f"eager was chosen: {best.strategy} seemed faster when screened, but the budget left "
            "no time to build it here. Give a larger one."
        )
    text = f"none of the {others} others timed is faster beyond the noise"
    if others == 1:
        text = "the only other strategy timed is not faster beyond the noise"
    best = min(
        (r for r in eligible(report) if r.final is not None), key=report.cost, default=chosen
    )
    speed = report.speedup(best)
    if speed is None or speed[0] <= _MOST_LOSS:
        return f"eager was chosen: {text}."
    return (
        f"eager was chosen: {text}. {best.strategy} seems {ratio(speed[0])} as fast "
        f"({speed[1]:.2f} to {speed[2]:.2f}): a larger budget or an idle machine may show it."
    )


def _reason(report: Report, chosen: Row, finalists: list[Row]) -> str:
    eager, gain = report.row(EAGER), _gain(report, chosen)
    if report.objective == "memory" and chosen.peak_bytes is not None:
        text = f"{chosen.strategy} was chosen: it needs {memory(chosen.peak_bytes)} at its peak"
        if eager is not None and eager.peak_bytes is not None:
            text += f", eager {memory(eager.peak_bytes)}"
        return f"{text}; it is {gain}." if gain else f"{text}."
    text = f"{chosen.strategy} was chosen"
    if gain:
        text += f", {gain}"
    elif report.cost(chosen) < 1:
        text += f", at least {ratio(1 / report.cost(chosen))} as fast as eager's fastest call"
    beside = _beside(report, chosen, finalists)
    return f"{text}: {beside}." if beside else f"{text}."


def _gain(report: Report, row: Row) -> str:
    """How many times as fast as eager a row is, in words; empty if that is not known."""
    speed = report.speedup(row)
    if speed is None:
        return ""
    return f"{ratio(speed[0])} as fast as eager ({speed[1]:.2f} to {speed[2]:.2f})"


def _beside(report: Report, chosen: Row, finalists: list[Row]) -> str:
    """What tells the choice from the others, in words; empty where nothing does for sure."""
    best = _as_good_as_the_best(report, _ahead_of_eager(report, finalists))
    if chosen in best:
        equal = [row for row in best if row is not chosen]
        text = _as_fast(chosen, equal) or _hidden_by_noise(report, chosen, finalists)
        if text:
            return text
    right = [row for row in report.rows if row.status in (Status.OK, Status.SLOWER)]
    is_best = min(eligible(report), key=report.cost) is chosen
    if is_best and len(right) > 2 and report.ratios(chosen):
        return f"the fastest of the {len(right)} that agree with float64"
    return ""


def _as_fast(chosen: Row, equal: list[Row]) -> str:
    """What of others that are as good as the choice; empty if there are none."""
    simplest = all(chosen.complexity < row.complexity for row in equal)
    if len(equal) == 1:
        more = f", and {chosen.strategy} is simpler" if simplest else ""
        return f"{equal[0].strategy} is as fast within the noise{more}"
    if equal:
        count = _NUMBERS[len(equal)] if len(equal) < len(_NUMBERS) else f"{len(equal)}"
        more = "it is the simplest" if simplest else "none is simpler"
        return f"{count} others are as fast within the noise, and {more}"
    return ""


def _hidden_by_noise(report: Report, chosen: Row, finalists: list[Row]) -> str:
    """What of a simpler one that may be as fast, but seems slower; empty if there is none."""
    for row in _best_first(report, finalists):
        simpler = row.strategy != EAGER and row.complexity < chosen.complexity
        if simpler and row.final and chosen.final and _ties(report, row, chosen):
            times = row.final.ratios(chosen.final, report.objective)
            low, high = median_interval(times)
            return (
                f"{row.strategy} is simpler, but seems to take {ratio(statistics.median(times))} "
                f"as long ({low:.2f} to {high:.2f})"
            )
    return ""


def _left_out(report: Report, chosen: Row) -> str:
    """What seemed faster when screened, and why it was not chosen for that."""
    if report.objective not in OF_TIME or chosen.final is None or chosen.screening is None:
        return ""
    apart = [row for row in eligible(report) if row.final is None and row.screening is not None]
    return _not_built(report, chosen, apart) or _screened_better(report, chosen, apart)


def _not_built(report: Report, chosen: Row, apart: Sequence[Row]) -> str:
    """What no time was left to build; empty if that hardly matters."""
    late = {
        row.strategy: row.screening.fastest(report.figure)
        for row in apart
        if NO_TIME_LEFT in row.notes and row.screening is not None
    }
    best = min(late, key=late.__getitem__, default="")
    if not best or chosen.screening is None:
        return ""
    fastest = chosen.screening.fastest(report.figure)
    if late[best] > fastest / FINALIST_FACTOR:
        return ""
    return (
        f" When screened, {best} seemed {ratio(fastest / late[best])} as fast as "
        f"{chosen.strategy}, but the budget left no time to build it here: give a larger one."
    )


def _screened_better(report: Report, chosen: Row, apart: Sequence[Row]) -> str:
    """What gained more when screened than what was chosen does now; empty if nothing did."""
    gains = {row.strategy: 1 / report.cost(row) for row in apart if report.ratios(row)}
    best = max(gains, key=gains.__getitem__, default="")
    if not best or not report.ratios(chosen) or gains[best] <= 1 / report.cost(chosen):
        return ""
    # Else a table that has both figures would contradict the choice.
    if chosen.baseline is not None and chosen.screening is not None:
        own = chosen.screening.ratios(chosen.baseline, report.figure)
        if 1 / statistics.median(own) >= gains[best]:
            return (
                f" The {ratio(gains[best])} of {best} is of its screening, in which "
                f"{chosen.strategy} did better still."
            )
    return (
        f" The {ratio(gains[best])} of {best} was measured at another moment, and without per-call "
        "checks."
    )


def _reason_for_cold_start(report: Report, chosen: Row) -> str:
    """Why a candidate was chosen for its early first answer."""
    text = f"{chosen.strategy} was chosen"
    if chosen.cold_start_s is None:
        return f"{text}: no first answer was timed."
    text += f": its first answer comes {duration(chosen.cold_start_s)} after a process starts"
    eager, gain = report.row(EAGER), _gain(report, chosen)
    if chosen.strategy != EAGER and eager is not None and eager.cold_start_s is not None:
        text += f", eager's {duration(eager.cold_start_s)}"
    if chosen.strategy != EAGER and gain:
        text += f"; once it runs, it is {gain}"
    return f"{text}."
