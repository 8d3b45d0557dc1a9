"""docs/results/: a page for each topic, made from bench/results/, with a plot at its top."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from .common.record import RESULTS, ROOT
from .common.rendering import gpu_name
from .topics import TOPICS, Result, Results, Topic
from .tune.table import read, reports

DOCS = ROOT / "docs"
# Whose report README shows.
PICTURE = "minilm"
# A table or list that is longer is folded.
_LONG = 14


def write_pages(folder: Path = DOCS) -> None:
    """All pages and their plots, and README's picture."""
    from graphwright.report.terminal import to_svg

    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir(exist_ok=True)
    rows = []
    for topic in TOPICS:
        found = results_of(topic)
        page, picture, row = page_of(topic, found)
        rows.append(row)
        (folder / "results" / f"{topic.name}.md").write_text(page, encoding="utf-8")
        (folder / "images" / f"results-{topic.name}.svg").write_text(picture, encoding="utf-8")
    (folder / "results" / "index.md").write_text(_index(rows), encoding="utf-8")
    for file in sorted(RESULTS.glob("tune*.json")):
        shown = read(reports(json.loads(file.read_text(encoding="utf-8"))).get(PICTURE, {}))
        if shown is not None:
            picture = to_svg(shown, 84)
            (folder / "images" / f"{PICTURE}.svg").write_text(picture, encoding="utf-8")


def results_of(topic: Topic) -> dict[str, Result]:
    """What the files of a topic hold, by their names without the ending."""
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for pattern in topic.files
        for file in sorted(RESULTS.glob(f"{pattern}.json"))
    }


def page_of(topic: Topic, results: Results) -> tuple[str, str, list[str]]:
    """A page as Markdown, its plot as SVG, and its row of the index."""
    outcome = topic.outcome(results)
    measured = [name for name in topic.commands if any(stem.startswith(name) for stem in results)]
    commands = " and ".join(f"`scripts/bench {command}`" for command in measured)
    lines = [
        f"# {topic.title}",
        "",
        f"{topic.says} **Result:** {outcome.says}.",
        "",
        f"![{outcome.plot.label}](../images/results-{topic.name}.svg)",
        "",
        f"To repeat: {commands}; `scripts/bench tables` makes this page from the files under "
        "`bench/results/`, which hold what was measured. [How the figures are "
        "taken](../explanation/measuring.md).",
        "",
    ]
    for pattern, to_markdown in topic.files.items():
        for file in sorted(RESULTS.glob(f"{pattern}.json")):
            data = results[file.stem]
            lines += [
                f"## {measured_on(data)}: `{file.name}`",
                "",
                f"Measured at {_commits(data)}, {data['date']}.",
                "",
                _folded(_demoted(to_markdown(data, file.name))),
                "",
            ]
    machines = [f"{measured_on(data)}, {_day(data['date'])}" for data in results.values()]
    row = [
        f"[{topic.title}]({topic.name}.md)",
        outcome.says,
        "<br>".join(dict.fromkeys(machines)),
    ]
    return "\n".join(lines).rstrip() + "\n", outcome.plot.to_svg(topic.name), row


def _commits(data: Result) -> str:
    """The commit of a result in words; all of them where runs at several were joined."""
    models = data.get("models")
    found = [model.get("commit") for model in models.values()] if isinstance(models, dict) else []
    commits = [*dict.fromkeys([*filter(None, found)] or [data["commit"]])]
    if len(commits) == 1:
        return f"commit {commits[0]}"
    return f"commits {', '.join(commits)} (the file says which one measured which model)"


def measured_on(data: Result) -> str:
    """The GPU, all of them where runs on several were joined, or the processor."""
    found: Sequence[Mapping[str, str]] = data.get("environments") or [data["environment"]]
    gpus = dict.fromkeys(gpu_name(gpu) for each in found if (gpu := each.get("gpu")))
    if gpus:
        return " and ".join(gpus)
    environment = found[0]
    threads = int(environment["threads"])
    return f"CPU ({environment['processor']}, {threads} thread{'s' * (threads != 1)})"


def _day(date: str) -> str:
    """A date whose parts stay together in a narrow table."""
    day = datetime.fromisoformat(date)
    return f"{day.day}&nbsp;{day:%b&nbsp;%Y}"


def _index(rows: list[list[str]]) -> str:
    lines = [
        "# Results",
        "",
        "One page per topic, each with a plot and the `scripts/bench NAME` that measures it again.",
        "`scripts/bench tables` makes these pages from the files under `bench/results/`, which",
        "hold every single timing. [How the figures are taken](../explanation/measuring.md).",
        "",
        "| topic | result | measured on |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
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
