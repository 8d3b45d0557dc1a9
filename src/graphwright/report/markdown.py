"""A report as Markdown, for an issue, a pull request or the documentation."""

from __future__ import annotations

from .result import Results, Row
from .table import blocks, closing, columns, explanations, shapes, title


def to_markdown(report: Results) -> str:
    """Title, the tables with all their columns, the choice, explanations and the machine."""
    lines = [f"### {title(report)}", ""]
    for block in blocks(report):
        if block.heading:
            lines += [f"{block.heading}:", ""]
        lines += [*_table(report, block.rows), ""]
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


def _table(report: Results, rows: list[Row]) -> list[str]:
    shown = columns(report, rows)
    lines = [
        "| " + " | ".join(column.heading for column in shown) + " |",
        "| " + " | ".join("---" if i < 2 else "---:" for i in range(len(shown))) + " |",
    ]
    for row in rows:
        cells = [_escaped(column.cell(report, row)) for column in shown]
        if row.strategy == report.chosen:
            cells[:2] = [f"**{cells[0]}**", "**chosen**"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _escaped(text: str) -> str:
    for mark in ("\\", "|", "<", "*", "_"):
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", " ")
