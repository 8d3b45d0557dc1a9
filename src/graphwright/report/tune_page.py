"""The page of a report of tune: the verdict, plots of what was measured, the rows, the machine."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..calls.plurals import counted
from .markup import Html, element, facts, join, table
from .page import CHOSEN, PLAIN, Section, Tile, figure, legend, note, page, paragraphs, plots
from .plots import Curve, Group, Mark, PlotRow, Point, curves, rows, short, tradeoff
from .result import EAGER, Results, Row, Status
from .table import (
    calls_per_second,
    closing,
    columns,
    duration,
    footnotes,
    mark,
    memory,
    ordered,
    ratio,
    shapes,
    title,
    tried,
)

# Shapes that a plot shows.
_SHAPES = 24
_FAULTS = (Status.WRONG, Status.FAILED, Status.CRASHED, Status.TIMED_OUT, Status.MEMORY_EXCEEDED)


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
        tiles=tiles(report),
        footer=closing(report)[-1] if report.environment else "",
    )


# What stands out of a verdict.
_GAIN = re.compile(r"(?:at least )?[\d.]+× as fast as eager")


def verdict(report: Results) -> Html:
    """What was chosen and why; its name and its gain stand out."""
    if report.chosen is None:
        if report.interrupted:
            return join(["Interrupted before anything could be chosen."])
        return join(["No strategy was chosen: see what became of each."])
    name = report.chosen
    text = report.reason or f"{name} was chosen."
    if not text.startswith(name):
        return join([text])
    before, gain, after = text.removeprefix(name), "", ""
    if found := _GAIN.search(before):
        before, gain, after = before[: found.start()], found[0], before[found.end() :]
    return join([element("strong", name), before, element("strong", gain) if gain else "", after])


def tiles(report: Results) -> list[Tile]:
    """The figures of the choice, each with eager's."""
    row, eager = report.chosen_row, report.row(EAGER)
    if row is None or eager is None:
        return []
    found = []
    if row.measurement is not None and report.figure == "throughput":
        theirs = None if eager.measurement is None else calls_per_second(eager)
        found.append(Tile("calls/s", calls_per_second(row), _beside(theirs, str, row)))
    elif (seconds := _latency(row)) is not None:
        found.append(Tile("latency", duration(seconds), _beside(_latency(eager), duration, row)))
    if row.cold_start_s is not None:
        beside = _beside(eager.cold_start_s, duration, row)
        found.append(Tile("first answer", duration(row.cold_start_s), beside))
    if row.peak_bytes is not None:
        found.append(Tile("peak memory", memory(row.peak_bytes),
                          _beside(eager.peak_bytes, memory, row)))  # fmt: skip
    if row.setup_alone_s is not None:
        calls = report.break_even(row)
        beside = (
            "no break-even"
            if calls is None
            else f"break-even after {counted(max(calls, 1), 'call')}"
        )
        found.append(Tile("set-up", duration(row.setup_alone_s), "" if row is eager else beside))
    if row.error is not None:
        own = report.own_error
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
    makers = (_gains, _first_answers, _against_memory, _against_setup, _errors, _search)
    return [plot for make in makers if (plot := make(report, name))]


def _latency(row: Row) -> float | None:
    return None if row.measurement is None else row.measurement.typical().median


def _color(report: Results, row: Row) -> str:
    if row.strategy == report.chosen:
        return CHOSEN
    return PLAIN if row.strategy == EAGER else "s1"


_AXIS = "times as fast as eager"


def _gains(report: Results, name: str) -> Html | None:
    """How many times as fast as eager each row is: the figure by which all can be compared."""
    in_calls = report.figure == "throughput"
    lines = []
    for row in ordered(report):
        seconds, speed = _latency(row), report.speedup(row)
        if seconds is None:
            continue
        text = mark(report, row)
        text += f"{calls_per_second(row)} calls/s" if in_calls else duration(seconds)
        gain = "" if speed is None or row.strategy == EAGER else f", {ratio(speed[0])}"
        text += ", unsteady" if row.unsteady else gain
        marks = []
        if speed is not None:
            hint = f"{row.strategy}: {ratio(speed[0])}, {ratio(speed[1])} to {ratio(speed[2])}"
            low, high = (None, None) if row.strategy == EAGER else speed[1:]
            marks.append(Mark(speed[0], low, high, _color(report, row), hint))
        lines.append(PlotRow(row.strategy, text, marks, row.strategy == report.chosen))
    if not any(line.marks for line in lines):
        return None
    plot = rows(
        f"{name}-gain",
        f"Bars: how many times as fast as eager {report.model} is by strategy",
        [Group("", lines)],
        _AXIS,
        "{:.3g}×".format,
        reference=(1.0, EAGER),
    )
    caption = "Median over the rounds; whiskers: its 95 % interval."
    colors = [(CHOSEN, "chosen"), (PLAIN, "eager"), ("s1", "other strategies")]
    return figure("Speed", plot, " ".join([caption, *footnotes(report, report.rows)]),
                  legend(colors))  # fmt: skip


def _first_answers(report: Results, name: str) -> Html | None:
    timed = [row for row in ordered(report) if row.cold_start_s is not None]
    lines = []
    for row in sorted(timed, key=lambda row: row.cold_start_s or 0.0):
        seconds = row.cold_start_s or 0.0
        high = max(row.first_answers, default=seconds)
        mark = Mark(seconds, seconds, high, _color(report, row))
        lines.append(
            PlotRow(row.strategy, duration(seconds), [mark], row.strategy == report.chosen)
        )
    if not lines:
        return None
    plot = rows(
        f"{name}-first",
        f"Bars: seconds until the first right answer of {report.model} by strategy",
        [Group("", lines)],
        "from the start of a process",
        duration,
    )
    return figure("First answer", plot, "The shortest of several; whiskers: up to the longest.")


def _against_memory(report: Results, name: str) -> Html | None:
    known = [(row, float(row.peak_bytes)) for row in ordered(report) if row.peak_bytes is not None]
    return _against(report, f"{name}-memory", "peak memory", known, lambda n: memory(int(n)), True)


def _against_setup(report: Results, name: str) -> Html | None:
    known = [(row, row.setup_alone_s) for row in ordered(report) if row.setup_alone_s is not None]
    return _against(report, f"{name}-setup", "set-up", known, duration, False)


def _against(
    report: Results,
    name: str,
    what: str,
    known: Sequence[tuple[Row, float]],
    form: Callable[[float], str],
    binary: bool,
) -> Html | None:
    """The gain over eager against something that strategies cost."""
    points = []
    for row, value in known:
        speed = report.speedup(row)
        if speed is not None and row.status in (Status.OK, Status.SLOWER):
            strong = row.strategy in (report.chosen, EAGER)
            points.append(Point(row.strategy, speed[0], value, _color(report, row), strong))
    if len(points) < 2:
        return None
    label = f"Points: {what} over how many times as fast as eager {report.model} is by strategy"
    plot = tradeoff(name, label, points, _AXIS, what, ratio, form, binary=binary, gain=True)
    caption = "Lower right is better; the dashed line joins those that no other beats in both."
    return figure(f"Speed against {what}", plot, caption)


def _errors(report: Results, name: str) -> Html | None:
    own = report.own_error
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
        lines.append(PlotRow(row.strategy, text, marks, row.strategy == report.chosen))
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
        caption += " The upright line is eager's own error."
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
        "times as fast, when screened",
        lambda value: f"{value:.0f} s",
        lambda value: f"{value:.3g}×",
        steps=True,
        names=[(step.strategy, step.seconds, step.speedup) for step in steps],
    )
    return figure("The search", plot, "The best so far, before the finalists were timed together.")


def _tables(report: Results) -> Html:
    """Rows with figures; those without stand with their reasons in a section of their own."""
    kept = tried(report)
    shown = columns(report, kept)
    cells = [[column.cell(report, row) for column in shown] for row in kept]
    chosen = next((i for i, row in enumerate(kept) if row.strategy == report.chosen), None)
    found = [table([c.heading for c in shown], cells, emphasized=chosen)] if shown else []
    notes = [*footnotes(report, kept), *closing(report)[:-1]]
    return join([*found, paragraphs(notes)])


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
        lines.append(PlotRow(f"{shape.name}, {shape.weight:.0%}", " → ".join(times), marks))
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
            lines.append(PlotRow(shape.name, short(best, 34), [mark for _, mark in marks[:4]]))
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
