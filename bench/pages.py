"""docs/results/: a page for each topic, made from bench/results/, with a plot at its top."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures.table import to_markdown as architectures_to_markdown
from .breaks.run import to_markdown as breaks_to_markdown
from .buckets.run import to_markdown as buckets_to_markdown
from .capture.table import to_markdown as capture_to_markdown
from .check.run import to_markdown as check_to_markdown
from .cold_start.run import to_markdown as answers_to_markdown
from .common.record import RESULTS, ROOT
from .engines.run import to_markdown as engines_to_markdown
from .fusion.run import to_markdown as fusion_to_markdown
from .objects.run import to_markdown as objects_to_markdown
from .operators.run import to_markdown as operators_to_markdown
from .search.table import to_markdown as search_to_markdown
from .training.table import to_markdown as training_to_markdown
from .tune.table import read, reports
from .tune.table import to_markdown as tune_to_markdown
from .unseen.run import to_markdown as unseen_to_markdown

DOCS = ROOT / "docs"
# Whose report README shows.
PICTURE = "minilm"
# A table or list that is longer is folded.
_LONG = 14
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")

Cells = Mapping[str, str]  # of a row, by their headings
Figure = Callable[[Cells], float | None]
Result = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """Bars for the rows of a table.

    Attributes:
        label: what they show.
        axis: what is measured.
        bars: figures of a row, by what they are of; the first one is graphwright's.
        marked: a figure that a dashed line marks, and what it is.
        form: a figure of the axis as text.
        most: rows, the first ones.
    """

    label: str
    axis: str
    bars: Mapping[str, Figure]
    marked: tuple[float, str] | None = None
    form: Callable[[float], str] = "{:.3g}".format
    most: int = 16


@dataclass(frozen=True)
class Topic:
    """A page.

    Attributes:
        name: of its file.
        title: of the page.
        says: what was measured, and what came of it.
        files: patterns of the results, each with what makes Markdown of one.
        plot: of the first table that has its columns.
    """

    name: str
    title: str
    says: str
    files: Mapping[str, Callable[[Result, str], str]]
    plot: Plot


def number(text: str) -> float | None:
    """The first number of a cell."""
    found = _NUMBER.search(text)
    return None if found is None else float(found[0].replace(",", ""))


def column(name: str) -> Figure:
    """The figure of a column."""
    return lambda cells: number(cells.get(name, ""))


def times(slow: str, quick: str) -> Figure:
    """How many times as fast one column is as another."""

    def figure(cells: Cells) -> float | None:
        a, b = number(cells.get(slow, "")), number(cells.get(quick, ""))
        return None if a is None or not b else a / b

    return figure


def _unnamed(to_markdown: Callable[[Result], str]) -> Callable[[Result, str], str]:
    return lambda data, _: to_markdown(data)


_EAGER = (1.0, "eager")
_TIMES = "{:.3g}×".format

TOPICS = (
    Topic(
        "tune",
        "Tuning",
        "Ten models, each tuned with its default options and timed in turns with PyTorch's own "
        "ways: the choice is the fastest on all ten.",
        {"tune*.json": _unnamed(tune_to_markdown)},
        Plot(
            "Times as fast as eager: what tune chose, and torch.compile's reduce-overhead",
            "times as fast as eager",
            {
                "what tune chose": times("eager", "tuned"),
                "reduce-overhead": times("eager", "reduce-overhead"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "search",
        "The default search",
        "What `tune()` finds in a minute, beside an exhaustive search and PyTorch's own; seven "
        "of twenty models are measured so far.",
        {"search*.json": _unnamed(search_to_markdown)},
        Plot(
            "Times as fast as eager: the choice of the default search, and reduce-overhead",
            "times as fast as eager",
            {
                "the default search": times("eager", "latency"),
                "reduce-overhead": times("eager", "reduce-overhead"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "capture",
        "Graphs",
        "`graph()` without any compiler, beside a CUDA graph that is captured by hand and "
        "PyTorch's own: as fast as by hand, with outputs that are yours.",
        {"capture-h*.json": _unnamed(capture_to_markdown)},
        Plot(
            "Times as fast as eager: graph(), and make_graphed_callables",
            "times as fast as eager",
            {
                "graph()": times("eager", "graph"),
                "make_graphed_callables": times("eager", "make_graphed_callables"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "buckets",
        "Buckets",
        "Calls of many sizes, answered by a few graphs after padding: several times as fast as "
        "eager, and first calls of a size wait for nothing.",
        {"buckets*.json": _unnamed(buckets_to_markdown)},
        Plot(
            "The median time of a call, in ms, at sizes that were met before",
            "ms",
            {"median": column("median at sizes met before")},
        ),
    ),
    Topic(
        "training",
        "Training",
        "Whole training steps under one graph, beside PyTorch's own ways: as fast as the best of "
        "them or faster, and exact.",
        {"training*.json": training_to_markdown},
        Plot(
            "Times as fast as eager: the best of graph_step(), and make_graphed_callables",
            "times as fast as eager",
            {
                "the best of graph_step()": column("eager / ours"),
                "make_graphed_callables": times("eager", "torch.cuda.make_graphed_callables"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "capturable",
        "Models that can be captured",
        "What `check()` finds in 88 models, and what a capture on a GPU then does; and ten models "
        "that no plain capture takes, divided at their breaks.",
        {"check*.json": check_to_markdown, "breaks*.json": breaks_to_markdown},
        Plot(
            "Times as fast as eager: models that no plain capture takes, by graph()",
            "times as fast as eager",
            {"graph()": times("eager", "graph")},
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "architectures",
        "Architectures that take buckets",
        "Which of 63 architectures of transformers may be padded in the batch, the length or both, "
        "and why the others may not.",
        {"architectures*.json": architectures_to_markdown},
        Plot(
            "Seconds to prove that padding is harmless, for one bucket",
            "s",
            {"proof": column("s")},
        ),
    ),
    Topic(
        "fusion",
        "Fusion",
        "`fuse()` beside TorchScript and Inductor on convolutional models: as fast as Inductor or "
        "faster, and set up in a second.",
        {"fusion*.json": _unnamed(fusion_to_markdown)},
        Plot(
            "Times as fast as eager: fuse(), and Inductor",
            "times as fast as eager",
            {
                "fuse()": times("eager", "fused"),
                "Inductor": times("eager", "inductor"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "operators",
        "Operators",
        "Our fused operators beside a plain copy of the same bytes, and beside what Inductor makes "
        "of the same lines.",
        {"operators*.json": _unnamed(operators_to_markdown)},
        Plot(
            "Bandwidth as a share of a copy's",
            "share of a copy's bandwidth",
            {"operator": column("share")},
            (1.0, "a copy"),
        ),
    ),
    Topic(
        "engines",
        "Other engines",
        "ONNX Runtime, TensorRT and XLA beside Inductor and ours, on a CPU and a GPU.",
        {"engines*.json": _unnamed(engines_to_markdown)},
        Plot(
            "Times as fast as eager: Inductor and ONNX Runtime, on a CPU",
            "times as fast as eager",
            {
                "Inductor": times("eager", "inductor"),
                "ONNX Runtime": times("eager", "onnxruntime"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "cold-start",
        "The first answer",
        "Seconds from the start of a process to its first right answer: a saved file, and "
        "`torch.compile` with filled caches.",
        {"answers*.json": _unnamed(answers_to_markdown)},
        Plot(
            "Seconds to the first answer",
            "s",
            {
                "a saved file": lambda cells: number(cells.get("saved", "").split("` ")[-1]),
                "torch.compile, filled caches": column("torch.compile, filled caches"),
            },
        ),
    ),
    Topic(
        "objects",
        "Calls with objects",
        "Models that take lists, data classes and caches, and set attributes on the way, by "
        "`graph()`.",
        {"objects*.json": _unnamed(objects_to_markdown)},
        Plot(
            "Times as fast as eager: models that take objects, by graph()",
            "times as fast as eager",
            {"graph()": times("eager, ms", "graph, ms")},
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "unseen",
        "Models nobody tuned for",
        "Models drawn by a seed from timm, torchvision and transformers: what `fuse()` adds to a "
        "graph of the same model.",
        {"unseen*.json": _unnamed(unseen_to_markdown)},
        Plot(
            "Times as fast as a graph of the model alone: a graph of what fuse() made, batch 1",
            "times as fast as a graph alone",
            {"fuse() and graph()": times("graph, 1", "fused, 1")},
            (1.0, "a graph alone"),
            _TIMES,
        ),
    ),
)


def write_pages(folder: Path = DOCS) -> None:
    """All pages and their plots, and README's picture."""
    from graphwright.report.terminal import to_svg

    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir(exist_ok=True)
    for topic in TOPICS:
        page, picture = page_of(topic)
        (folder / "results" / f"{topic.name}.md").write_text(page, encoding="utf-8")
        (folder / "images" / f"results-{topic.name}.svg").write_text(picture, encoding="utf-8")
    (folder / "results" / "index.md").write_text(_index(), encoding="utf-8")
    for _, data in _found("tune*.json"):
        shown = read(reports(data).get(PICTURE, {}))
        if shown is not None:
            picture = to_svg(shown, 84)
            (folder / "images" / f"{PICTURE}.svg").write_text(picture, encoding="utf-8")


def page_of(topic: Topic) -> tuple[str, str]:
    """A page as Markdown, and its plot as SVG."""
    bodies = []
    for pattern, to_markdown in topic.files.items():
        for file, data in _found(pattern):
            body = _demoted(to_markdown(data, file.name))
            bodies += [f"## `{file.name}`, commit {data['commit']}", "", _folded(body), ""]
    text = "\n".join(bodies)
    colors = ("Green", "Blue")[: len(topic.plot.bars)]
    said = [f"{color}: {name}." for color, name in zip(colors, topic.plot.bars, strict=True)]
    if topic.plot.marked is not None:
        said.append(f"Dashed: {topic.plot.marked[1]}.")
    lines = [
        f"# {topic.title}",
        "",
        topic.says,
        "",
        f"![{topic.plot.label}](../images/results-{topic.name}.svg)",
        "",
        f"*{topic.plot.label}. {' '.join(said)}*",
        "",
        "Made by `scripts/bench tables` from files under `bench/results/`, which hold every raw",
        "sample. [How the figures are taken](../explanation/measuring.md).",
        "",
        text,
    ]
    return "\n".join(lines).rstrip() + "\n", _drawn(topic, text)


def _found(pattern: str) -> Iterator[tuple[Path, Result]]:
    """Results of benchmarks; those of comparisons have tables of their own."""
    for file in sorted(RESULTS.glob(pattern)):
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.get("benchmark", "").isalpha():
            yield file, data


def _index() -> str:
    lines = [
        "# Results",
        "",
        "What was measured, a page a topic. `scripts/bench NAME` measures it again, and",
        "`scripts/bench tables` writes these pages from the files under `bench/results/`.",
        "",
        "| topic | what was measured, and what came of it |",
        "| --- | --- |",
        *(f"| [{topic.title}]({topic.name}.md) | {topic.says} |" for topic in TOPICS),
    ]
    return "\n".join(lines) + "\n"


def _demoted(body: str) -> str:
    """A section of a page: without a title of its own, and with headings below the page's."""
    lines = [line for line in body.splitlines() if not line.startswith("# ")]
    lines = [f"#{line}" if line.startswith("## ") else line for line in lines]
    return "\n".join(lines).strip().replace("](findings.md", "](../reference/findings.md")


def _folded(body: str) -> str:
    """The same, with long tables and lists folded."""
    found: list[str] = []
    depth = 0
    for block in re.split(r"((?:^\|.*\n?)+|(?:^- .*\n?)+)", body, flags=re.MULTILINE):
        depth += block.count("<details") - block.count("</details")
        rows = block.count("\n| ") - 1 if block.startswith("|") else block.count("\n- ") + 1
        if rows > _LONG and not depth and block.startswith(("|", "- ")):
            what = "rows" if block.startswith("|") else "remarks"
            summary = f'<details markdown="1">\n<summary>All {rows} {what}</summary>\n\n'
            block = f"{summary}{block.rstrip()}\n\n</details>\n"
        found.append(block)
    return "".join(found)


def _tables(text: str) -> Iterator[list[Cells]]:
    """The rows of each table of a text in Markdown."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        split = [re.split(r" *\| *", line.strip())[1:-1] for line in block.splitlines()]
        headings, _, *rows = split
        yield [dict(zip(headings, row, strict=False)) | {"": row[0]} for row in rows]


def _drawn(topic: Topic, text: str) -> str:
    """The plot of the first table that has its columns."""
    from graphwright.report.page import CHOSEN
    from graphwright.report.plots import Group, Line, Mark, rows

    plot = topic.plot
    colors: Sequence[str] = (CHOSEN, "s1")
    for table in _tables(text):
        lines = []
        for cells in table:
            values = [figure(cells) for figure in plot.bars.values()]
            marks = [
                Mark(v, color=c) for v, c in zip(values, colors, strict=False) if v is not None
            ]
            if values[0] is not None:
                said = " / ".join("–" if v is None else plot.form(v) for v in values)
                lines.append(Line(cells[""].replace("\\", ""), said, marks))
        if lines:
            groups = [Group("", lines[: plot.most])]
            return rows(
                topic.name,
                plot.label,
                groups,
                plot.axis,
                plot.form,
                reference=plot.marked,
                alone=True,
            )
    raise ValueError(f"{topic.name}: no table has {', '.join(plot.bars)}")
