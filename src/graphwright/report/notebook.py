"""A report as HTML, for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .markup import element
from .result import Results
from .table import closing, columns, explanations, footnotes, shapes, title, tried


def to_html(report: Results) -> str:
    """Title, the choice, the table with all its columns; explanations and the machine folded.

    It has no colours of its own, and so is readable in a dark notebook too.
    """
    parts = [f"<strong>{escape(title(report))}</strong>"]
    if report.interrupted:
        parts.append("<p><em>Interrupted: these are the results so far.</em></p>")
    if report.reason:
        parts.append(f"<p>{escape(report.reason)}</p>")
    rows = tried(report)
    shown = columns(report, rows)
    if shown:
        cells = [[column.cell(report, row) for column in shown] for row in rows]
        chosen = next((i for i, row in enumerate(rows) if row.strategy == report.chosen), None)
        parts.append(_table([c.heading for c in shown], cells, chosen))
    parts += [f"<p>{escape(line)}</p>" for line in footnotes(report, rows)]
    headings, *by_shape = shapes(report) or [[]]
    if by_shape:
        parts.append(_table(headings, by_shape, None))
    notes = [f"<b>{escape(name)}</b>: {escape(text)}" for name, text in explanations(report)]
    notes += map(escape, closing(report))
    items = "".join(f"<li>{note}</li>" for note in notes)
    parts.append(f"<details><summary>Why, and on which machine</summary><ul>{items}</ul></details>")
    return "<div>" + "\n".join(parts) + "</div>"


def short_table(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A title with a few names and their values, for a notebook; without colours of its own."""
    rows = (element("tr", element("th", name), element("td", value)) for name, value in pairs)
    return element("div", element("strong", title), element("table", element("tbody", *rows)))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], emphasized: int | None) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = []
    for number, row in enumerate(rows):
        texts = [escape(cell) for cell in row]
        if number == emphasized:
            texts = [f"<b>{text}</b>" for text in texts]
        lines.append("<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>")
    body = "".join(lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
