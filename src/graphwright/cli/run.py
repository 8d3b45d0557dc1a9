"""`graphwright run`: load an artifact, run it on its own sample inputs, and show the times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..artifacts.loading import load
from ..artifacts.tuned_module import choice_of, of_tensors
from ..calls.plurals import counted
from ..errors import TargetError
from ..evaluation.garbage_collection import collection_held_off
from ..evaluation.measurement import Samples, Timer
from ..report.report import Report
from ..report.result import EAGER
from ..report.table import duration

_WARMUP = 5


@dataclass
class ArtifactRun:
    """How loading and calling an artifact went.

    Attributes:
        file: the file that was loaded.
        report: the report of tuning, from the file.
        device: where it runs.
        how: how it was loaded and why, in words.
        load_s: seconds to load and verify it.
        first_s: seconds of the first call after that.
        latencies: times of synchronized calls of each sample, by name.
        fallbacks: calls that were not answered by what was tuned, in words.
    """

    file: Path
    report: Report
    device: torch.device
    how: list[str]
    load_s: float
    first_s: float
    latencies: dict[str, Samples]
    fallbacks: list[str]


def run_artifact(
    file: Path,
    model: Callable[..., Any] | None,
    *,
    trust: bool,
    device: torch.device | None,
    calls: int,
) -> ArtifactRun:
    """Load an artifact, and time its answers to its own samples, or to the tensors of these.

    Args:
        file: the artifact.
        model: as for `load`.
        trust: likewise.
        device: where it is to run; None for where it was saved.
        calls: to time, of each sample, in turns.

    Raises:
        ArtifactError: it cannot be loaded.
        TargetError: without the model it runs on another device only.
    """
    began = time.perf_counter()
    chosen = device is not None and device.type == "cuda"
    with torch.cuda.device(device) if chosen else contextlib.nullcontext():
        tuned = of_tensors(load(file, model, trust=trust))
    load_s = time.perf_counter() - began
    origin = choice_of(tuned).origin
    assert origin is not None
    if device is not None and origin.device.type != device.type:
        raise TargetError(
            f"{file.name} was saved on {origin.device.type}, and runs there without its model.",
            remedy=f"Give the model, which is put on {device.type}, with --model TARGET.",
        )
    timer = Timer(origin.device)
    bound = {each.name: _bound(tuned, each.call.clone()) for each in origin.samples}
    first_s = timer.once(next(iter(bound.values())))
    taken: dict[str, list[float]] = {name: [] for name in bound}
    with collection_held_off():
        for turn in range(-_WARMUP, calls):
            for name, call in bound.items():
                seconds = timer.once(call)
                if turn >= 0:
                    taken[name].append(seconds)
    latencies = {name: Samples(tuple(seconds)) for name, seconds in taken.items()}
    fallbacks = [
        f"{counted(n, 'call')} {way}"
        for way, n in tuned.calls.items()
        if not way.startswith("tuned")
    ]
    how = [*choice_of(tuned).loaded]
    return ArtifactRun(
        file, tuned.report, origin.device, how, load_s, first_s, latencies, fallbacks
    )


def _bound(function: Callable[..., Any], call: Any) -> Callable[[], object]:
    args, kwargs = call.args, dict(call.kwargs)
    return lambda: function(*args, **kwargs)


def show(trial: ArtifactRun, console: Console | None = None) -> None:
    """Print it: a few lines, then a table with a row for each sample."""
    console = console or Console()
    report = trial.report
    console.print(f"{trial.file.name}: {report.model} by {report.chosen}", style="bold")
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    for name, text in _facts(trial).items():
        lines.add_row(name, escape(text))
    console.print(lines)
    table = Table("call")
    table.add_column("latency here", justify="right", no_wrap=True)
    table.add_column("eager, when tuned", justify="right", no_wrap=True)
    for words, samples, eager in _times(trial):
        table.add_row(escape(words), _spread(samples), _spread(eager))
    console.print(table)


def to_page(trial: ArtifactRun) -> str:
    """The same as a page: the times beside eager's of the tuning, how it was loaded, the report."""
    from ..report import markup, plots, tune_page
    from ..report.page import CHOSEN, PLAIN, Section, figure, legend, page

    report, lines = trial.report, []
    for words, samples, eager in _times(trial):
        marks = [_mark(samples, CHOSEN)] + ([] if eager is None else [_mark(eager, PLAIN)])
        text = " / ".join(duration(each.median) for each in (samples, eager) if each is not None)
        lines.append(plots.PlotRow(words, text, marks))
    plot = plots.rows(
        "run", "Bars: the time of a call here, and eager's when it was tuned",
        [plots.Group("", lines)], "time of a call", duration,
    )  # fmt: skip
    colors = legend([(CHOSEN, "here"), (PLAIN, "eager, when it was tuned")])
    caption = "Median of the calls; whiskers: half of the interquartile range either way."
    _, first, _ = next(iter(_times(trial)))
    return page(
        "graphwright run",
        report.model,
        f"{trial.file.name}, {report.chosen}, on {trial.device}",
        f"It answers in {duration(first.median)}, {duration(trial.load_s)} after the load began.",
        [
            Section("What was measured", figure("Latency", plot, caption, colors)),
            Section("How it was loaded", markup.facts(_facts(trial))),
            *(replace(each, folded=True) for each in tune_page.tables(report, "tuning")),
        ],
    )


def _mark(samples: Samples, color: str) -> Any:
    from ..report.plots import Mark

    middle, half = samples.median, samples.spread
    return Mark(middle, max(0.0, middle - half), middle + half, color)


def _times(trial: ArtifactRun) -> Iterator[tuple[str, Samples, Samples | None]]:
    """Each sample, its times here, and eager's when the model was tuned."""
    for name, samples in trial.latencies.items():
        words = name if len(trial.latencies) > 1 else "; ".join(trial.report.inputs)
        yield words, samples, eager_samples(trial.report, name)


def _facts(trial: ArtifactRun) -> dict[str, str]:
    report = trial.report
    kept = ("gpu", "processor", "threads", "torch", "cuda")
    machine = [f"{k} {report.environment[k]}" for k in kept if k in report.environment]
    facts = {
        "loaded": "; ".join(trial.how),
        "saved on": f"{', '.join(machine)}; {report.created}",
        "evidence": report.reason,
        "runs on": str(trial.device),
        "load": f"{duration(trial.load_s)}, verified on its own inputs",
        "first answer": duration(trial.first_s),
        "fallbacks": "; ".join(trial.fallbacks),
    }
    return {name: text for name, text in facts.items() if text}


def eager_samples(report: Report, sample: str) -> Samples | None:
    """Eager's latency for a sample, as it was measured when the model was tuned."""
    row = report.row(EAGER)
    if row is not None:
        row = row.by_shape.get(sample, row)
    return None if row is None or row.measurement is None else row.measurement.typical()


def _spread(samples: Samples | None) -> str:
    if samples is None:
        return "–"
    return f"{duration(samples.median)} ± {samples.spread / samples.median:.0%}"
