"""docs/results/: a page for each topic, made from bench/results/, with a plot at its top."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from graphwright.report.plots import Line

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
        plot: of the longest table that has its columns.
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


def paired(name: str) -> Figure:
    """How many times as fast as eager, from the share in brackets, which was timed in turns."""

    def figure(cells: Cells) -> float | None:
        share = number(cells.get(name, "").partition("(")[2])
        return None if not share else 1 / share

    return figure


def _unnamed(to_markdown: Callable[[Result], str]) -> Callable[[Result, str], str]:
    return lambda data, _: to_markdown(data)


_EAGER = (1.0, "eager")
_TIMES = "{:.3g}×".format

TOPICS = (
    Topic(
        "tune",
        "Tuning",
        "Ten models on an H200, each tuned over five strategies, then timed in turns with "
        "PyTorch's own methods. What `tune` chose is the fastest on all ten.",
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
        "What `tune()` finds in its default budget of about a minute, compared with an exhaustive "
        "search and PyTorch's own methods. Seven of twenty models are measured so far, and six of "
        "17 targets are missed.",
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
        "`graph()`, which uses no compiler, compared with a CUDA graph captured by hand and with "
        "PyTorch's own methods. It is as fast as the graph captured by hand, and its outputs are "
        "yours.",
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
        "MiniLM called at random sizes, which 30 graphs answer after padding: 4.5 times as fast "
        "as eager (median), and no call waits for a capture.",
        {"buckets*.json": _unnamed(buckets_to_markdown)},
        Plot(
            "Median time of a call at sizes seen before, in ms",
            "ms",
            {"median": column("median, sizes seen before")},
        ),
    ),
    Topic(
        "training",
        "Training",
        "Whole training steps as one graph, compared with PyTorch's own methods. Back to back they "
        "are as fast as the best of these or faster; a step that is waited for takes up to 6% "
        "longer than the best of these. After 20 steps the loss of `graph_step()` equals eager's; "
        "with `torch.compile` inside it differs as `torch.compile`'s does.",
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
        "What `check()` finds in 88 models, compared with what a capture on a GPU then does; and "
        "ten models that no single capture can hold, run as segments between their breaks.",
        {"check*.json": check_to_markdown, "breaks*.json": breaks_to_markdown},
        Plot(
            "Times as fast as eager: graph() on models that no single capture can hold",
            "times as fast as eager",
            {"graph()": times("eager", "graph")},
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "architectures",
        "Architectures that take buckets",
        "Which of 63 architectures of transformers can be padded in the batch, the length or both, "
        "and why the others cannot.",
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
        "`fuse()` compared with TorchScript and Inductor. On an H200, under CUDA graphs, it takes "
        "0.71 to 0.85 of Inductor's time; on a CPU about as long as Inductor (1.01 to 1.03). "
        "Set-up takes 0.6 to 1.7 s once caches are filled.",
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
        "Our fused operators: their bandwidth as a share of a plain copy's, and their time "
        "compared with what Inductor generates from the same lines.",
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
        "ONNX Runtime and XLA compared with Inductor and `fuse()`. `tune` chose ONNX Runtime for "
        "four of five models on a CPU, and for none of ten on an H200. TensorRT was not installed "
        "there.",
        {"engines*.json": _unnamed(engines_to_markdown)},
        Plot(
            "Times as fast as eager on a CPU: fuse() and ONNX Runtime",
            "times as fast as eager",
            {
                "fuse()": paired("fused"),
                "ONNX Runtime": paired("onnxruntime"),
            },
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "cold-start",
        "The first answer",
        "Seconds from the start of a process to its first right answer: from a saved file, and "
        "from `torch.compile` with empty and with filled caches.",
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
        "`graph()` on models that take lists, data classes and caches, and that set attributes "
        "while they run.",
        {"objects*.json": _unnamed(objects_to_markdown)},
        Plot(
            "Times as fast as eager: graph() on models that take objects",
            "times as fast as eager",
            {"graph()": times("eager, ms", "graph, ms")},
            _EAGER,
            _TIMES,
        ),
    ),
    Topic(
        "unseen",
        "Models nobody tuned for",
        "Models that nobody had tuned for, drawn by a seed from timm, torchvision and "
        "transformers: what `fuse()` adds to a graph of the same model.",
        {"unseen*.json": _unnamed(unseen_to_markdown)},
        Plot(
            "Times as fast as a graph of the model alone: a graph of what fuse() made, batch 1",
            "times as fast as a graph alone",
            {"fuse() and graph()": times("graph, 1", "fused, 1")},
            (1.0, "a graph alone"),
            _TIMES,
            most=40,
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
    bodies = {}
    for pattern, to_markdown in topic.files.items():
        for file, data in _found(pattern):
            body = _folded(_demoted(to_markdown(data, file.name)))
            bodies[file.name] = f"## `{file.name}`, commit {data['commit']}\n\n{body}\n"
    chosen, drawn = max(
        ((name, _lines(topic.plot, table)) for name in bodies for table in _tables(bodies[name])),
        key=lambda found: len(found[1]),
    )
    colors = ("Green", "Blue")[: len(topic.plot.bars)]
    said = [f"{color}: {name}." for color, name in zip(colors, topic.plot.bars, strict=True)]
    if topic.plot.marked is not None:
        said.append(f"Dashed: {topic.plot.marked[1]}.")
    if len(drawn) > topic.plot.most:
        said.append(f"The first {topic.plot.most} of {len(drawn)} rows.")
    said.append(f"From `{chosen}`.")
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
        *bodies.values(),
    ]
    return "\n".join(lines).rstrip() + "\n", _drawn(topic, drawn)


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
        "One page per topic. `scripts/bench NAME` runs a benchmark again; `scripts/bench tables`",
        "writes these pages from the files under `bench/results/`.",
        "",
        "| topic | what was measured, and the outcome |",
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


def _lines(plot: Plot, table: Sequence[Cells]) -> list[Line]:
    """A line of the plot for each row of a table that has its columns."""
    from graphwright.report.page import CHOSEN
    from graphwright.report.plots import Line, Mark

    lines = []
    for cells in table:
        values = [figure(cells) for figure in plot.bars.values()]
        colors = zip(values, (CHOSEN, "s1"), strict=False)
        marks = [Mark(value, color=color) for value, color in colors if value is not None]
        if values[0] is not None:
            said = " / ".join("–" if value is None else plot.form(value) for value in values)
            lines.append(Line(cells[""].replace("\\", ""), said, marks))
    return lines


def _drawn(topic: Topic, lines: Sequence[Line]) -> str:
    """The plot as SVG."""
    from graphwright.report.plots import Group, rows

    plot = topic.plot
    if not lines:
        raise ValueError(f"{topic.name}: no table has {', '.join(plot.bars)}")
    return rows(
        topic.name,
        plot.label,
        [Group("", lines[: plot.most])],
        plot.axis,
        plot.form,
        reference=plot.marked,
        alone=True,
    )
