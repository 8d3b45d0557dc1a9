"""The page of a report of tune: the verdict, plots of what was measured, the rows, the machine."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..calls.words import counted
from .markup import Html, element, facts, join, table
from .page import CHOSEN, PLAIN, Section, Tile, figure, legend, note, page, paragraphs, plots
from .plots import Curve, Group, Line, Mark, Point, curves, rows, short, tradeoff
from .result import EAGER, Results, Row, Status
from .table import (
    blocks,
    closing,
    columns,
    duration,
    memory,
    ordered,
    ratio,
    shapes,
    title,
)

# Shapes that a plot shows.
_SHAPES = 24
_FAULTS = (Status.WRONG, Status.FAILED, Status.CRASHED, Status.TIMED_OUT, Status.MEMORY_EXCEEDED)
_WITHOUT_FIGURES = (Status.UNAVAILABLE, Status.NOT_TRIED)


def to_page(report: Results, *, with_samples: bool = False) -> str:
    """A report as a page of its own.

    Args:
        report: of one run of `tune`.
        with_samples: whether every raw sample is in it.

    Raises:
        GraphwrightError: matplotlib is not installed.
    """
    where = report.environment.get("gpu") or report.environment.get("processor", "")
    return page(
        "graphwright tune",
        report.model,
        ", ".join(filter(None, (title(report).removeprefix(f"{report.model}, "), where))),
        verdict(report),
        sections(report, "tune", with_samples=with_samples),
        more=report.reason,
        tiles=tiles(report),
        footer=closing(report)[-1] if report.environment else "",
    )


def verdict(report: Results) -> Html:
    """The result in one sentence."""
    row, eager = report.chosen_row, report.row(EAGER)
    if row is None:
        if report.interrupted:
            return join(["Interrupted before anything could be chosen."])
        return join(["No strategy was chosen: see what became of each."])
    name = element("strong", row.strategy)
    if row.strategy == EAGER:
        return join(["Stay with ", name, ": nothing else that was measured is better."])
    if report.objective == "cold_start" and row.cold_start_s is not None:
        text = f" gives its first answer after {duration(row.cold_start_s)}"
        if eager is not None and eager.cold_start_s is not None:
            text += f", eager after {duration(eager.cold_start_s)}"
        return join([name, f"{text}."])
    if report.objective == "memory" and row.peak_bytes is not None:
        text = f" needs {memory(row.peak_bytes)} at its peak"
        if eager is not None and eager.peak_bytes is not None:
            text += f", eager {memory(eager.peak_bytes)}"
        return join([name, f"{text}."])
    speed, mine, theirs = report.speedup(row), _time(report, row), _time(report, eager)
    if speed is None or mine is None:
        return join([name, " was chosen."])
    beside = "" if theirs is None else f" instead of {duration(theirs)}"
    if speed[1] <= 1 <= speed[2] and theirs is not None:
        same = "as fast as eager within the noise"
        return join([name, f" is {same}: {duration(mine)} a call, eager {duration(theirs)}."])
    gain = element("strong", f"{ratio(speed[0])} as fast as eager")
    return join([name, " is ", gain, f": {duration(mine)} a call{beside}."])


def tiles(report: Results) -> list[Tile]:
    """The figures of the choice, each with eager's."""
    row, eager = report.chosen_row, report.row(EAGER)
    if row is None or eager is None:
        return []
    found = []
    mine, theirs = _time(report, row), _time(report, eager)
    if mine is not None:
        found.append(Tile(report.figure, duration(mine), _beside(theirs, duration, row)))
    speed = report.speedup(row)
    if speed is not None and row is not eager:
        low, high = (ratio(each) for each in speed[1:])
        found.append(Tile("times as fast", ratio(speed[0]), f"{low} to {high}"))
    if row.cold_start_s is not None:
        beside = _beside(eager.cold_start_s, duration, row)
        found.append(Tile("first answer", duration(row.cold_start_s), beside))
    if row.peak_bytes is not None:
        found.append(Tile("peak memory", memory(row.peak_bytes),
                          _beside(eager.peak_bytes, memory, row)))  # fmt: skip
    if row.setup_s is not None:
        calls = report.break_even(row)
        beside = (
            "no break-even"
            if calls is None
            else f"break-even after {counted(max(calls, 1), 'call')}"
        )
        found.append(Tile("set-up", duration(row.setup_s), "" if row is eager else beside))
    if row.error is not None:
        own = report.eager_error
        beside = "" if own is None or row is eager else f"eager {own.rms:.1e}"
        found.append(Tile("error", f"{row.error.rms:.1e}", beside))
    return found


def _beside(figure: Any, form: Callable[[Any], str], row: Row) -> str:
    return "" if figure is None or row.strategy == EAGER else f"eager {form(figure)}"


def sections(report: Results, name: str, *, with_samples: bool = False) -> list[Section]:
    """What the verdict rests on.

    Args:
        report: of `tune`.
        name: what the names of its plots begin with.
        with_samples: whether every raw sample is among them.
    """
    found = [Section("What was measured", plots(drawn(report, name))), *tables(report, name)]
    found.append(Section("Environment", _environment(report), folded=True))
    if with_samples:
        pre = element("pre", report.to_json())
        found.append(Section("Every sample, as JSON", pre, folded=True))
    return found


def tables(report: Results, name: str) -> list[Section]:
    """The sections with rows: figures, those by shape, and what was refused."""
    timed = sum(row.measurement is not None for row in report.rows)
    aside = f"{timed} of {len(report.rows)} timed"
    found = [Section("Strategies", _tables(report), aside)]
    if by_shape := _by_shape(report, name):
        found.append(by_shape)
    if refused := _refused(report):
        found.append(refused)
    return found


def drawn(report: Results, name: str) -> list[Html]:
    """The plots of a report, those without figures left out."""
    makers = (_latencies, _first_answers, _against_memory, _against_setup, _errors, _search)
    return [plot for make in makers if (plot := make(report, name))]


def _time(report: Results, row: Row | None) -> float | None:
    if row is None or row.measurement is None:
        return None
    return row.measurement.typical(report.figure).median


def _relative_time(report: Results, row: Row) -> float | None:
    """A row's time by its ratio to eager, so that rows of different moments can be compared."""
    eager, ratios = _time(report, report.row(EAGER)), report.ratios(row)
    return eager * statistics.median(ratios) if eager is not None and ratios else None


def _color(report: Results, row: Row) -> str:
    if row.strategy == report.chosen:
        return CHOSEN
    return PLAIN if row.strategy == EAGER else "s1"


def _latencies(report: Results, name: str) -> Html | None:
    groups = []
    for block in blocks(report):
        lines = []
        for row in block.rows:
            if row.measurement is None:
                continue
            samples = row.measurement.typical(report.figure)
            low, high = samples.median - samples.spread, samples.median + samples.spread
            speed = report.speedup(row)
            beside = f", {ratio(speed[0])}" if speed and row.strategy != EAGER else ""
            text = duration(samples.median) + (", unsteady" if row.unsteady else beside)
            hint = f"{row.strategy}: {duration(low)} to {duration(high)}"
            mark = Mark(samples.median, low, high, _color(report, row), hint)
            lines.append(Line(row.strategy, text, [mark], row.strategy == report.chosen))
        if lines:
            groups.append(Group(block.heading.partition(":")[0], lines))
    if not groups:
        return None
    if len(groups) == 1:
        groups = [Group("", groups[0].lines)]
    eager = _time(report, report.row(EAGER))
    plot = rows(
        f"{name}-latency",
        f"Bars: the time of a call of {report.model} by strategy",
        groups,
        "time of a call",
        duration,
        reference=None if eager is None else (eager, EAGER),
    )
    caption = "Median over the rounds; whiskers: half of the interquartile range either way."
    if len(groups) > 1:
        caption += " Do not compare screening times with those of finalists."
    heading = "Latency" if report.figure == "latency" else "Time of a call, back to back"
    colors = [(CHOSEN, "chosen"), (PLAIN, "eager"), ("s1", "other strategies")]
    return figure(heading, plot, caption, legend(colors))


def _first_answers(report: Results, name: str) -> Html | None:
    timed = [row for row in ordered(report) if row.cold_start_s is not None]
    lines = []
    for row in sorted(timed, key=lambda row: row.cold_start_s or 0.0):
        seconds = row.cold_start_s or 0.0
        high = max(row.first_answers, default=seconds)
        mark = Mark(seconds, seconds, high, _color(report, row))
        lines.append(Line(row.strategy, duration(seconds), [mark], row.strategy == report.chosen))
    if not lines:
        return None
    plot = rows(
        f"{name}-first",
        f"Bars: seconds until the first right answer of {report.model} by strategy",
        [Group("", lines)],
        "from the start of a process",
        duration,
    )
    return figure("First answer", plot, "The shortest of some; whiskers: up to the longest.")


def _points(report: Results, figures: Sequence[tuple[Row, float]]) -> list[Point]:
    found = []
    for row, value in figures:
        seconds = _relative_time(report, row)
        if seconds is not None and row.status in (Status.OK, Status.SLOWER):
            chosen = row.strategy == report.chosen
            strong = chosen or row.strategy == EAGER
            hollow = row.final is None
            found.append(Point(row.strategy, seconds, value, _color(report, row), strong, hollow))
    return found


_FRONT = "Lower left is better; the dashed line joins those that no other beats in both."


def _against_memory(report: Results, name: str) -> Html | None:
    known = [(row, float(row.peak_bytes)) for row in ordered(report) if row.peak_bytes is not None]
    return _against(report, f"{name}-memory", "peak memory", known, lambda n: memory(int(n)), True)


def _against_setup(report: Results, name: str) -> Html | None:
    known = [(row, row.setup_s + row.build_s) for row in ordered(report) if row.setup_s is not None]
    return _against(report, f"{name}-setup", "set-up", known, duration, False)


def _against(
    report: Results,
    name: str,
    what: str,
    known: Sequence[tuple[Row, float]],
    form: Callable[[float], str],
    binary: bool,
) -> Html | None:
    """The time of a call against something else that strategies cost."""
    points = _points(report, known)
    if len(points) < 2:
        return None
    label = f"Points: {what} over the time of a call of {report.model} by strategy"
    plot = tradeoff(name, label, points, "time of a call", what, duration, form, binary=binary)
    hollow = any(point.hollow for point in points)
    caption = _FRONT + " Hollow: timed in the screening only." * hollow
    return figure(f"Latency against {what}", plot, caption)


def _errors(report: Results, name: str) -> Html | None:
    own = report.eager_error
    lines = []
    for row in ordered(report):
        if row.error is None:
            continue
        rms = row.error.rms
        tone = "s2" if row.status is Status.WRONG else _color(report, row)
        value = rms if rms > 0 else math.nan
        hint = f"{row.strategy}: root mean square {rms:.1e}, largest {row.error.max:.1e}"
        text = f"{rms:.1e}" if rms > 0 else "exact"
        text += ", wrong" if row.status is Status.WRONG else ""
        marks = [Mark(value, color=tone, hint=hint)]
        lines.append(Line(row.strategy, text, marks, row.strategy == report.chosen))
    if not lines:
        return None
    reference = None if own is None or not own.rms > 0 else (own.rms, EAGER)
    plot = rows(
        f"{name}-error",
        f"Dots: the error of each strategy for {report.model}, with eager's own",
        [Group("", lines)],
        "error, relative to float64",
        lambda value: f"{value:.0e}",
        dots=True,
        logarithmic=True,
        reference=reference,
    )
    caption = "Root mean square."
    if reference is not None:
        caption += f" The dashed line is eager's own error, {reference[0]:.1e}."
    return figure("Error against float64", plot, caption)


def _search(report: Results, name: str) -> Html | None:
    steps = report.curve
    if len(steps) < 2:
        return None
    end = max(report.seconds, steps[-1].seconds)
    curve = Curve(
        "best known",
        [*(step.seconds for step in steps), end],
        [*(step.speedup for step in steps), steps[-1].speedup],
        CHOSEN,
    )
    plot = curves(
        f"{name}-search",
        f"A curve: the best that was known of {report.model} as the search went on",
        [curve],
        "time since the start",
        "times as fast as eager",
        lambda value: f"{value:.0f} s",
        lambda value: f"{value:.3g}×",
        steps=True,
        names=[(step.strategy, step.seconds, step.speedup) for step in steps],
    )
    return figure("The search", plot, "The best so far, by screening times.")


def _tables(report: Results) -> Html:
    """Rows with figures; those without stand with their reasons in a section of their own."""
    parts: list[Html] = []
    for block in blocks(report):
        kept = [row for row in block.rows if row.status not in _WITHOUT_FIGURES or not row.reason]
        if not kept:
            continue
        if block.heading:
            parts.append(element("h3", block.heading))
        shown = columns(report, kept)
        cells = [[column.cell(report, row) for column in shown] for row in kept]
        chosen = next((i for i, row in enumerate(kept) if row.strategy == report.chosen), None)
        parts.append(table([c.heading for c in shown], cells, emphasized=chosen, texts=2))
    return join([*parts, paragraphs(closing(report)[:-1] or [])])


def _by_shape(report: Results, name: str) -> Section | None:
    headings, *cells = shapes(report) or [[]]
    chosen, eager = report.chosen_row, report.row(EAGER)
    if not cells or chosen is None or eager is None:
        return None
    lines = []
    for shape in report.shapes[:_SHAPES]:
        marks, times = [], []
        for row, tone in ((eager.by_shape.get(shape.name), PLAIN),
                          (chosen.by_shape.get(shape.name), CHOSEN)):  # fmt: skip
            if row is None or row.measurement is None:
                continue
            samples = row.measurement.typical(report.figure)
            low, high = samples.median - samples.spread, samples.median + samples.spread
            marks.append(Mark(samples.median, low, high, tone, duration(samples.median)))
            times.append(duration(samples.median))
        lines.append(Line(f"{shape.name}, {shape.weight:.0%}", " → ".join(times), marks))
    plot = rows(
        f"{name}-shapes",
        f"Bars: the time of a call of {report.model} by shape, eager's and the choice's",
        [Group("", lines)],
        "time of a call",
        duration,
    )
    caption = "The share of calls follows the shape's name."
    if len(report.shapes) > _SHAPES:
        caption += f" The first {_SHAPES} of {len(report.shapes)} shapes."
    colors = legend([(PLAIN, EAGER), (CHOSEN, chosen.strategy)])
    parts = [figure("Latency by shape", plot, caption, colors)]
    parts += _gains_by_shape(report, name)
    body = join([plots(parts), table(headings, cells)])
    return Section("Shapes", body, f"{len(report.shapes)} shapes by their weights")


def _gains_by_shape(report: Results, name: str) -> list[Html]:
    """Each strategy's gain for each shape, as dots in the shape's row."""
    lines = []
    candidates = [row for row in ordered(report) if row.by_shape and row.strategy != EAGER]
    for shape in report.shapes[:_SHAPES]:
        by_shape = [row.by_shape[shape.name] for row in report.rows if shape.name in row.by_shape]
        alone = replace(report, rows=by_shape, shapes=[])
        marks = []
        for row in candidates:
            one = row.by_shape.get(shape.name)
            speed = None if one is None else alone.speedup(one)
            if speed is not None:
                tone = _color(report, row)
                text = f"{row.strategy}: {ratio(speed[0])}"
                marks.append((speed[0], Mark(speed[0], speed[1], speed[2], tone, text)))
        marks.sort(key=lambda pair: -pair[0])
        if marks:
            best = marks[0][1].hint
            lines.append(Line(shape.name, short(best, 34), [mark for _, mark in marks[:4]]))
    if not lines:
        return []
    plot = rows(
        f"{name}-gains",
        f"Bars: how many times as fast as eager strategies are for each shape of {report.model}",
        [Group("", lines)],
        "times as fast as eager",
        lambda value: f"{value:.3g}×",
        reference=(1.0, EAGER),
    )
    colors = legend([(CHOSEN, "chosen"), ("s1", "other strategies")])
    caption = "The best four strategies of each shape; whiskers: the 95 % interval of the median."
    return [figure("Gain by shape", plot, caption, colors)]


def _refused(report: Results) -> Section | None:
    """Rows with a reason, those with the same one together, then remarks on rows."""
    reasons: dict[tuple[str, str, str], list[Row]] = {}
    remarks: dict[str, list[Row]] = {}
    for row in ordered(report):
        if row.reason or row.remedy:
            key = (str(row.status), row.reason, row.remedy)
            reasons.setdefault(key, []).append(row)
        if row.unsteady:
            remarks.setdefault(f"unsteady, so not compared: {row.unsteady}", []).append(row)
        for text in row.notes:
            remarks.setdefault(text, []).append(row)
    if not reasons and not remarks:
        return None
    cells = [
        [
            _names(found),
            element("span", status, class_="bad" if status in map(str, _FAULTS) else "dim"),
            reason,
            _remedy(remedy, found),
        ]
        for (status, reason, remedy), found in reasons.items()
    ]
    cells += [
        [_names(found), element("span", "remark", class_="dim"), text, ""]
        for text, found in remarks.items()
    ]
    counts = Counter(str(row.status) for row in report.rows if row.status is not Status.OK)
    aside = ", ".join(f"{count} {status}" for status, count in counts.items())
    body = table(
        ["strategies", "status", "why", "what would change it"], cells, texts=4, stacked=True
    )
    return Section("Refused, and remarks", body, aside, folded=True)


def _names(found: Sequence[Row]) -> Html:
    return join((element("code", row.strategy) for row in found), ", ")


def _remedy(remedy: str, found: Sequence[Row]) -> Html:
    """What to do, and the commands that repeat these rows alone."""
    again = [row.repeat for row in found if row.repeat]
    if not remedy and not again:
        return Html("")
    commands = (element("pre", command) for command in again)
    return join([remedy, " Repeat it with:" if again else "", *commands])


def _environment(report: Results) -> Html:
    pairs = dict(report.environment)
    if report.created:
        when = report.created.replace("T", " ").replace("+00:00", " UTC")
        pairs["measured"] = f"{when}, in {report.seconds:.0f} s"
    if report.recalled:
        pairs["cached on"] = report.recalled
    pairs["inputs"] = "; ".join(report.inputs)
    predicted = (f"Profile: {each}." for each in report.predictions)
    return join([facts(pairs), *map(note, (*report.notes, *predicted))])
