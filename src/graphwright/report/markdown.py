"""A report as Markdown, for an issue, a pull request or the documentation."""

from __future__ import annotations

from .result import Results
from .table import closing, columns, explanations, ordered, shapes, title


def to_markdown(report: Results) -> str:
    """Title, the table with all its columns, the choice, explanations and the machine."""
    shown = columns(report)
    lines = [f"### {title(report)}", ""]
    lines.append("| " + " | ".join(column.heading for column in shown) + " |")
    lines.append("| " + " | ".join("---" if i < 2 else "---:" for i in range(len(shown))) + " |")
    for row in ordered(report):
        cells = [_escaped(column.cell(report, row)) for column in shown]
        if row.strategy == report.chosen:
            cells[:2] = [f"**{cells[0]}**", "**chosen**"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    headings, *by_shape = shapes(report) or [[]]
    if by_shape:
        lines.append("| " + " | ".join(map(_escaped, headings)) + " |")
        lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
        lines += ["| " + " | ".join(map(_escaped, cells)) + " |" for cells in by_shape]
        lines.append("")
    if report.interrupted:
        lines += ["Interrupted: this is what was known by then.", ""]
    if report.reason:
        lines += [report.reason, ""]
    found = explanations(report)
    if found:
        lines += [f"- `{name}`: {_escaped(text)}" for name, text in found]
        lines.append("")
    lines += [_escaped(line) + "\n" for line in closing(report)]
    return "\n".join(lines).rstrip() + "\n"


def _escaped(text: str) -> str:
    for mark in ("\\", "|", "<", "*", "_"):
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", " ")
