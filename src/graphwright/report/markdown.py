"""A report as Markdown, for an issue, a pull request or the documentation."""

from __future__ import annotations

from .result import Results
from .table import closing, columns, explanations, footnotes, shapes, title, tried


def to_markdown(report: Results) -> str:
    """Title, the table with all its columns, the choice, explanations and the machine."""
    lines = [f"### {title(report)}", "", *_table(report), ""]
    headings, *by_shape = shapes(report) or [[]]
    if by_shape:
        lines.append("| " + " | ".join(map(_escaped, headings)) + " |")
        lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
        lines += ["| " + " | ".join(map(_escaped, cells)) + " |" for cells in by_shape]
        lines.append("")
    if report.interrupted:
        lines += ["Interrupted: these are the results so far.", ""]
    if report.reason:
        lines += [report.reason, ""]
    found = explanations(report)
    if found:
        lines += [f"- `{name}`: {_escaped(text)}" for name, text in found]
        lines.append("")
    lines += [_escaped(line) + "\n" for line in closing(report)]
    return "\n".join(lines).rstrip() + "\n"


def _table(report: Results) -> list[str]:
    rows = tried(report)
    shown = columns(report, rows)
    if not shown:
        return []
    texts = ("strategy", "status")
    lines = [
        "| " + " | ".join(column.heading for column in shown) + " |",
        "| " + " | ".join("---" if c.heading in texts else "---:" for c in shown) + " |",
    ]
    for row in rows:
        cells = [_escaped(column.cell(report, row)) for column in shown]
        if row.strategy == report.chosen:
            cells = [f"**{c}**" if s.heading in texts else c
                     for c, s in zip(cells, shown, strict=True)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, *(f"\n{line}" for line in map(_escaped, footnotes(report, rows)))]


def _escaped(text: str) -> str:
    for mark in ("\\", "|", "<", "*", "_"):
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", " ")
