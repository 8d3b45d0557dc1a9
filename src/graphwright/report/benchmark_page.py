"""The page of a benchmark's results: many models, each in several ways, beside eager.

Read are results of `scripts/bench` that hold models with reports of `tune`, with ways to call them,
or rows with medians: tune, engines, training, capture, breaks and others of their form. Those of
buckets are read, too.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..calls.plurals import counted
from ..errors import GraphwrightError
from ..evaluation.measurement import Samples
from .markup import Html, element, facts, join, table
from .page import CHOSEN, PLAIN, Section, Tile, figure, legend, page, paragraphs, plots
from .plots import Curve, Group, Mark, PlotRow, Point, curves, rows, series, tradeoff
from .report import Report
from .result import EAGER
from .table import NO_FIGURE, duration, memory, ratio
from .tune_page import drawn, tables

SCHEMAS = ("graphwright.bench", "graphwright.benchmark")
# What graphwright's own ways begin with.
_OURS = "graphwright."
_TUNE = "graphwright.tune"
# Ways that show what is possible, and are nobody's to choose.
_OWN_GRAPH = "a graph of its own"
_BOUNDS = ("floor", "hand", _OWN_GRAPH)
# What the benchmark of buckets calls its ways to answer a call that is smaller than a bucket.
_PADDED = {
    "a smaller call, eager": EAGER,
    "a smaller call, padded to the bucket": "graphwright.padded to a bucket",
    "a smaller call, with a graph of its own size": _OWN_GRAPH,
}
# Benchmarks whose figure is the time of calls back to back.
_BACK_TO_BACK = ("training",)


@dataclass(frozen=True)
class Way:
    """One way to call a model: what became of it, its samples in seconds, and what else is known.

    `off` is how far its results are from eager's, in the benchmark's own measure.
    """

    name: str
    status: str
    samples: Samples | None
    setup_s: float | None = None
    peak_bytes: int | None = None
    off: float | None = None
    notes: Sequence[str] = ()
    losses: Sequence[float] = ()

    @property
    def seconds(self) -> float | None:
        """The median; None if there is none."""
        return None if self.samples is None else self.samples.median

    @property
    def ours(self) -> bool:
        """Whether it is graphwright's."""
        return self.name.startswith(_OURS)


@dataclass(frozen=True)
class BenchmarkCase:
    """One model: the ways to call it, and the report of `tune` where there is one.

    `measured` says whether the ways were timed beside the report, and not by it.
    """

    name: str
    ways: Sequence[Way]
    inputs: str = ""
    report: Report | None = None
    measured: bool = True

    def way(self, name: str) -> Way | None:
        """The way of a name."""
        return next((way for way in self.ways if way.name == name), None)

    def best(self, *, ours: bool) -> Way | None:
        """The fastest of graphwright's, or of the others; None if eager alone is another."""
        found = [
            way
            for way in self.ways
            if way.samples is not None and way.ours == ours and way.name not in _BOUNDS
        ]
        if all(way.name == EAGER for way in found):
            return None
        return min(found, key=lambda way: way.seconds or 0.0)

    def gain(self, way: Way | None, other: Way | None = None) -> float | None:
        """How many times as fast a way is as another one, or as eager."""
        other = other or self.way(EAGER)
        if way is None or other is None or way.seconds is None or other.seconds is None:
            return None
        return other.seconds / way.seconds

    def gain_over_others(self) -> float | None:
        """How many times as fast graphwright's best way is as the best other one."""
        other = self.best(ours=False)
        return None if other is None else self.gain(self.best(ours=True), other)


def is_benchmark(text: str) -> bool:
    """Whether a file's text is the result of a benchmark."""
    return any(f'"schema": "{schema}"' in text[:200] for schema in SCHEMAS)


def benchmark_to_page(text: str, *, with_samples: bool = False) -> str:
    """The results of a benchmark as a page.

    Args:
        text: of the file that `scripts/bench` wrote.
        with_samples: whether the file itself, with every raw sample, is in it.

    Raises:
        GraphwrightError: it is no such file, or holds nothing that can be drawn.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") not in SCHEMAS:
            raise GraphwrightError(
                "This is no result of a benchmark.", remedy="scripts/bench writes them."
            )
        cases = _cases(data)
        if not any(case.ways for case in cases):
            raise GraphwrightError(
                f"A result of the benchmark {data.get('benchmark', '')} has no page: it holds no "
                "models with times.",
                remedy="docs/results/ shows it.",
            )
        return _page(data, cases, text if with_samples else "")
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise GraphwrightError(f"The result of the benchmark is damaged: {error!r}.") from error


# ------------------------------------------------------------ reading


def _cases(data: Mapping[str, Any]) -> list[BenchmarkCase]:
    if data.get("benchmark") == "buckets":
        return list(_of_buckets(data["figures"]))
    models = data.get("models", {})
    back_to_back = data.get("benchmark") in _BACK_TO_BACK
    if isinstance(models, Mapping) and models:
        return [_case(name, model, back_to_back) for name, model in models.items()]
    return [_row(row) for row in data.get("rows", []) if isinstance(row, Mapping)]


def _case(name: str, model: Mapping[str, Any], back_to_back: bool) -> BenchmarkCase:
    report = None
    if "report" in model:
        report = Report.from_json(json.dumps(model["report"]))
    held = model.get("memory", {})
    ways = [
        _way(way, found, held.get(way, {}), back_to_back)
        for way, found in model.get("ways", {}).items()
        if isinstance(found, Mapping) and found.get("status") != "unavailable"
    ]
    measured = bool(ways)
    if report is not None:
        ways = [_with_memory(way, report) for way in ways] or _ways_of(report)
    inputs = model.get("inputs", report.inputs if report else [])
    if isinstance(inputs, Mapping):
        inputs = [f"{key}: {value}" for key, value in inputs.items()]
    return BenchmarkCase(name, ways, "; ".join(map(str, inputs)), report, measured)


def _way(name: str, found: Mapping[str, Any], held: Any, back_to_back: bool) -> Way:
    kept = found.get("back_to_back_samples" if back_to_back else "latency_samples") or []
    samples = [
        statistics.median(each) if isinstance(each, list) else float(each) for each in kept if each
    ]
    peak = held.get("with_setup", {}).get("reserved") if isinstance(held, Mapping) else None
    return Way(
        name,
        str(found.get("status", "ok")),
        Samples(tuple(samples)) if samples else None,
        found.get("setup_s"),
        peak,
        found.get("loss_relative_difference", found.get("max_abs_difference")),
        found.get("notes", ()),
        found.get("losses", ()),
    )


def _with_memory(way: Way, report: Report) -> Way:
    """A way with the memory that `tune` has measured of it."""
    row = report.chosen_row if way.name == _TUNE else report.row(way.name)
    if row is None or way.peak_bytes is not None:
        return way
    return replace(way, peak_bytes=row.peak_bytes)


def _ways_of(report: Report) -> list[Way]:
    """A report's rows as ways, in eager's time at the ratios of their own rounds."""
    found = []
    for row in report.rows:
        samples = None if row.measurement is None else row.measurement.typical(report.figure)
        name = _OURS + row.strategy if row.strategy == report.chosen else row.strategy
        error = None if row.error is None else row.error.rms
        found.append(Way(name, str(row.status), samples, row.setup_s, row.peak_bytes, error))
    return found


def _of_buckets(figures: Mapping[str, Any]) -> Iterator[BenchmarkCase]:
    """Many calls of random sizes, then single calls of models, each in a bucket and without."""
    seconds = figures["seconds"]
    ways = [
        Way(EAGER, "ok", Samples(tuple(seconds["eager"]))),
        Way("graphwright.buckets", "ok", Samples(tuple(seconds["graph"]))),
    ]
    what = "MiniLM, batch and length at random"
    yield BenchmarkCase(counted(figures["calls"], "call"), ways, what)
    for model, found in figures["padding"].items():
        ways = [_way(name, found[key], {}, False) for key, name in _PADDED.items()]
        yield BenchmarkCase(f"{model}, one call", ways, "a call that is smaller than its bucket")


def _by_bucket(figures: Mapping[str, Any]) -> Html:
    cells = [
        [bucket, f"{exact:,}", f"{padded:,}", f"{waste:.1%}"]
        for bucket, (exact, padded, waste) in figures["by_bucket"].items()
    ]
    whole = f"Over all calls, {figures['waste']:.1%} of what was computed was padding."
    headings = ["batch × length", "exact calls", "padded calls", "padding"]
    return join([table(headings, cells), paragraphs([whole])])


def _row(row: Mapping[str, Any]) -> BenchmarkCase:
    """A row of a benchmark that has a median and a spread for each way."""
    ways = []
    for name, figures in row.items():
        if isinstance(figures, Mapping) and {"median", "spread"} <= figures.keys():
            low, high = (figures["median"] + sign * figures["spread"] for sign in (-1, 1))
            samples = Samples((low, low, figures["median"], high, high))
            plain = name in (EAGER, *_BOUNDS)
            ways.append(Way(name if plain else _OURS + name, "ok", samples))
    return BenchmarkCase(str(row.get("model", row.get("name", ""))), ways)


# ------------------------------------------------------------ showing


def _page(data: Mapping[str, Any], cases: Sequence[BenchmarkCase], text: str) -> str:
    environment = {str(k): str(v) for k, v in data.get("environment", {}).items()}
    where = environment.get("gpu") or environment.get("processor", "")
    kind = str(data.get("benchmark", "")).capitalize()
    noun = "case" if data.get("benchmark") == "buckets" else "model"
    timed = [case for case in cases if any(way.samples for way in case.ways)]
    sections = [Section(f"All {noun}s", _overview(timed, kind))]
    for number, case in enumerate(timed):
        gain = case.gain(case.best(ours=True))
        aside = "" if gain is None else f"{ratio(gain)} as fast as eager"
        body = _of_case(case, f"case{number}")
        sections.append(Section(case.name, body, aside, folded=True, anchor=f"case{number}"))
    sections += _of_some_benchmarks(data)
    known = environment | ({"commit": str(data["commit"])} if "commit" in data else {})
    sections.append(Section("Environment", facts(known), folded=True))
    if text:
        sections.append(Section("Every sample, as JSON", element("pre", text), folded=True))
    # Of buckets, single calls come after the calls that it is about.
    verdict, tiles = _verdict(timed[:1] if data.get("benchmark") == "buckets" else timed)
    many = counted(len(timed), noun)
    return page(
        "graphwright benchmark",
        f"{kind} on {where}" if where else kind,
        f"{many}; torch {environment.get('torch', 'unknown')}",
        verdict,
        sections,
        tiles=tiles,
    )


def _of_some_benchmarks(data: Mapping[str, Any]) -> Iterator[Section]:
    """What some benchmarks have found beside their ways to call models."""
    if data.get("benchmark") == "buckets":
        figures = data["figures"]
        aside = counted(len(figures["by_bucket"]), "bucket")
        yield Section("By bucket", _by_bucket(figures), aside, folded=True)
    if targets := data.get("targets"):
        met = sum(bool(each.get("met")) for each in targets)
        aside = f"{met} of {len(targets)} met"
        yield Section("Targets", _targets(targets), aside, folded=True)


def _verdict(cases: Sequence[BenchmarkCase]) -> tuple[Html, list[Tile]]:
    gains = [g for case in cases if (g := case.gain(case.best(ours=True))) is not None]
    beside = [g for case in cases if (g := case.gain_over_others()) is not None]
    if not gains:
        return join([f"{counted(len(cases), 'model')} timed."]), []
    mean = statistics.geometric_mean(gains)
    over = f"over {len(gains)} models" if len(gains) > 1 else f"for {cases[0].name}"
    parts: list[str] = ["graphwright is ", element("strong", f"{ratio(mean)} as fast as eager")]
    tiles = [Tile("times as fast as eager", ratio(mean), _range(gains))]
    if beside:
        other = statistics.geometric_mean(beside)
        strong = element("strong", f"{ratio(other)} as fast as the best other way")
        parts += [" and ", strong]
        tiles.append(Tile("as fast as the best other way", ratio(other), _range(beside)))
    parts.append(f" {over}{' (geometric means)' * (len(gains) > 1)}.")
    return join(parts), tiles


def _range(gains: Sequence[float]) -> str:
    return f"{ratio(min(gains))} to {ratio(max(gains))}" if len(gains) > 1 else ""


def _chosen_name(case: BenchmarkCase, way: Way) -> str:
    """A way's name; of tune's, what was chosen."""
    if case.report is not None and case.report.chosen and way.name == _TUNE:
        return case.report.chosen
    return _short(way.name)


def _short(way: str) -> str:
    return way.removeprefix(_OURS)


def _overview(cases: Sequence[BenchmarkCase], kind: str) -> Html:
    lines = [_best_ways(case, f"case{number}") for number, case in enumerate(cases)]
    plot = rows(
        "overview",
        f"Bars: times as fast as eager, graphwright's best and the best other way, of {kind}",
        [Group("", [line for line in map(_gains, cases) if line.marks])],
        "times as fast as eager",
        lambda value: f"{value:.3g}×",
        reference=(1.0, EAGER),
    )
    colors = [(CHOSEN, "graphwright")]
    if any(case.best(ours=False) for case in cases):
        colors.append(("s1", "best other way"))
    found = [figure("Times as fast as eager", plot, "The upright line is eager.", legend(colors))]
    found += _memory_of_all(cases, kind)
    headings = ["model", "graphwright's best", "best other way", "eager", "other", "graphwright",
                "vs eager", "vs other"]  # fmt: skip
    return join([plots(found), _filled_table(headings, lines, texts=3)])


def _gains(case: BenchmarkCase) -> PlotRow:
    """The gains of the best ways to call a model, as bars."""
    ours, other = case.best(ours=True), case.best(ours=False)
    gain, theirs = case.gain(ours), case.gain(other)
    marks = []
    if ours is not None and gain is not None:
        marks.append(Mark(gain, color=CHOSEN, hint=f"{_short(ours.name)}: {ratio(gain)}"))
    if other is not None and theirs is not None:
        marks.append(Mark(theirs, color="s1", hint=f"{other.name}: {ratio(theirs)}"))
    text = " / ".join(ratio(each) for each in (gain, theirs) if each is not None)
    return PlotRow(case.name, text, marks)


def _best_ways(case: BenchmarkCase, anchor: str) -> list[str | Html]:
    """The best ways to call a model, as a line of the table of all."""
    ours, other = case.best(ours=True), case.best(ours=False)
    return [
        element("a", case.name, href=f"#{anchor}"),
        NO_FIGURE if ours is None else _chosen_name(case, ours),
        NO_FIGURE if other is None else other.name,
        _seconds(case.way(EAGER)),
        _seconds(other),
        _seconds(ours),
        _of(case.gain(ours), ratio),
        _of(case.gain_over_others(), ratio),
    ]


def _filled_table(
    headings: Sequence[str],
    lines: Sequence[Sequence[str | Html]],
    *,
    texts: int,
    emphasized: int | None = None,
) -> Html:
    """A table without the columns that are empty; the first columns, `texts` of all, hold words."""
    kept = [i for i in range(len(headings)) if any(line[i] != NO_FIGURE for line in lines)]
    return table(
        [headings[i] for i in kept],
        [[line[i] for i in kept] for line in lines],
        emphasized=emphasized,
        texts=sum(i < texts for i in kept),
    )


def _memory_of_all(cases: Sequence[BenchmarkCase], kind: str) -> list[Html]:
    lines = []
    for case in cases:
        ours, eager = case.best(ours=True), case.way(EAGER)
        if ours is None or ours.peak_bytes is None or eager is None or eager.peak_bytes is None:
            continue
        counts = (ours.peak_bytes, eager.peak_bytes)
        marks = [Mark(float(n), color=c) for n, c in zip(counts, (CHOSEN, PLAIN), strict=True)]
        lines.append(PlotRow(case.name, " / ".join(map(memory, counts)), marks))
    if not lines:
        return []
    plot = rows(
        "memory",
        f"Bars: peak memory, graphwright's best and eager, of {kind}",
        [Group("", lines)],
        "peak memory",
        lambda value: memory(int(value)),
        binary=True,
    )
    colors = legend([(CHOSEN, "graphwright"), (PLAIN, EAGER)])
    return [figure("Peak memory", plot, legend=colors)]


def _seconds(way: Way | None) -> str:
    if way is None or way.samples is None:
        return NO_FIGURE
    samples = way.samples
    return f"{duration(samples.median)} ± {samples.spread / samples.median:.0%}"


def _color(case: BenchmarkCase, way: Way) -> str:
    if way is case.best(ours=True):
        return CHOSEN
    return PLAIN if way.name in (EAGER, *_BOUNDS) else "s2" if way.ours else "s1"


def _of_case(case: BenchmarkCase, name: str) -> Html:
    parts = [element("p", case.inputs, class_="note")]
    if case.measured:
        makers = (_times, _against_memory, _losses, _differences)
        made = [plot for make in makers if (plot := make(case, name))]
        parts += [plots(made), _table(case), _notes(case)]
    if case.report is not None:
        if case.measured:
            parts.append(element("h3", "The report of tune"))
        parts.append(element("p", case.report.reason))
        parts.append(plots(drawn(case.report, name)))
        for section in tables(case.report, name):
            parts += [element("h3", section.title), section.body]
    return join(parts)


def _notes(case: BenchmarkCase) -> Html:
    noted: dict[str, list[str]] = {}
    for way in case.ways:
        for text in way.notes:
            noted.setdefault(text, []).append(_short(way.name))
    return paragraphs(f"{', '.join(names)}: {text}" for text, names in noted.items())


def _times(case: BenchmarkCase, name: str) -> Html:
    lines = []
    timed = [way for way in case.ways if way.samples is not None]
    for way in sorted(timed, key=lambda way: way.seconds or 0.0):
        assert way.samples is not None
        middle, spread = way.samples.median, way.samples.spread
        tone = _color(case, way)
        mark = Mark(middle, middle - spread, middle + spread, tone)
        gain = case.gain(way)
        beside = "" if gain is None or way.name == EAGER else f", {ratio(gain)}"
        lines.append(PlotRow(way.name, duration(middle) + beside, [mark], tone == CHOSEN))
    eager = case.way(EAGER)
    plot = rows(
        f"{name}-ways",
        f"Bars: the time of a call or step of {case.name} in each way",
        [Group("", lines)],
        "time",
        duration,
        reference=None if eager is None or eager.seconds is None else (eager.seconds, EAGER),
    )
    bounds = any(way.name in _BOUNDS for way in timed)
    plain = "eager, and what is possible" if bounds else EAGER
    colors = [(CHOSEN, "graphwright's best"), ("s2", "graphwright"), (PLAIN, plain),
              ("s1", "other ways")]  # fmt: skip
    met = {_color(case, way) for way in timed}
    return figure("Time", plot, "Median over the rounds; whiskers: half of the interquartile range "
                  "either way.", legend(each for each in colors if each[0] in met))  # fmt: skip


def _against_memory(case: BenchmarkCase, name: str) -> Html | None:
    points = [
        Point(_short(way.name), way.seconds, float(way.peak_bytes), _color(case, way))
        for way in case.ways
        if way.seconds is not None and way.peak_bytes is not None
    ]
    if len(points) < 2 or not any(held.peak_bytes for held in case.ways):
        return None
    plot = tradeoff(
        f"{name}-held",
        f"Points: peak memory over the time of {case.name} in each way",
        points,
        "time",
        "peak memory",
        duration,
        lambda value: memory(int(value)),
        binary=True,
    )
    return figure("Time against memory", plot, "Lower left is better; the dashed line joins those "
                  "that no other beats in both.")  # fmt: skip


def _losses(case: BenchmarkCase, name: str) -> Html | None:
    found = [
        Curve(_short(way.name), range(1, len(way.losses) + 1), way.losses, series(number))
        for number, way in enumerate(way for way in case.ways if len(way.losses) > 1)
    ]
    if not found:
        return None
    plot = curves(
        f"{name}-loss",
        f"Curves: the loss of {case.name} over its first steps, in each way",
        found,
        "step",
        "loss",
        lambda value: f"{value:.0f}",
        lambda value: f"{value:.3g}",
        floating=True,
    )
    colors = legend((curve.color, curve.name) for curve in found)
    caption = "Curves that lie on each other are the same training."
    return figure("Loss of the first steps", plot, caption, colors)


def _differences(case: BenchmarkCase, name: str) -> Html | None:
    known = [way for way in case.ways if way.off is not None and way.name != EAGER]
    if not known or not any(way.off for way in known):
        return None
    lines = [
        PlotRow(
            way.name,
            f"{way.off:.1e}" if way.off else "equal",
            [Mark(way.off or float("nan"), color=_color(case, way))],
        )
        for way in known
    ]
    plot = rows(
        f"{name}-off",
        f"Dots: how far the results of {case.name} are from eager's, in each way",
        [Group("", lines)],
        "difference from eager",
        lambda value: f"{value:.0e}",
        dots=True,
        logarithmic=True,
    )
    return figure("Difference from eager", plot)


def _table(case: BenchmarkCase) -> Html:
    best = case.best(ours=True)
    chosen = next((i for i, way in enumerate(case.ways) if way is best), None)
    headings = ["way", "status", "time", "vs eager", "set-up", "peak memory", "off eager's"]
    lines = [
        [
            way.name,
            way.status,
            _seconds(way),
            _of(case.gain(way), ratio),
            _of(way.setup_s, duration),
            memory(way.peak_bytes),
            _of(way.off, lambda value: f"{value:.1e}"),
        ]
        for way in case.ways
    ]
    return _filled_table(headings, lines, texts=2, emphasized=chosen)


def _of(value: float | None, form: Any) -> str:
    return NO_FIGURE if value is None else str(form(value))


def _targets(targets: Sequence[Mapping[str, Any]]) -> Html:
    cells = []
    for each in targets:
        met = each.get("met")
        word, tone = ("not measured", "dim") if met is None else (
            ("met", "good") if met else ("missed", "bad")
        )  # fmt: skip
        unit = str(each.get("unit", ""))
        figures = [_target_figure(each.get(key), unit) for key in ("value", "limit")]
        state = element("span", word, class_=tone)
        cells.append([str(each.get("model", "")), str(each.get("target", "")), state, *figures])
    return table(["model", "target", "result", "figure", "limit"], cells, texts=3, stacked=True)


def _target_figure(value: Any, unit: str) -> str:
    if not isinstance(value, int | float):
        return NO_FIGURE
    if unit == "s":
        return duration(value)
    if unit == "B":
        return memory(int(value))
    return re.sub(r"\.?0+$", "", f"{value:,.3f}")
