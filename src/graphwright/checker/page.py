"""The page of a check: what keeps a call from being captured, with lines and fixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..calls.plurals import counted
from ..report.markup import Html, element, join, table
from ..report.page import Section, Tile, note, page
from .finding import Finding, Severity
from .summary import MEANINGS, summary

_TONES = {
    Severity.BLOCKS: "bad",
    Severity.BREAKS: "warn",
    Severity.HOISTED: "dim",
    Severity.FROZEN: "bad",
    Severity.SLOW: "dim",
}


def to_page(name: str, findings: Sequence[Finding]) -> str:
    """Findings as a page of their own, which needs no library."""
    counts = Counter(finding.severity for finding in findings)
    tiles = [
        Tile(str(severity), str(counts[severity]), MEANINGS[severity])
        for severity in Severity
        if counts[severity]
    ]
    sections = []
    for severity in Severity:
        found = [finding for finding in findings if finding.severity is severity]
        if found:
            aside = f"{counted(len(found), 'finding')}: {MEANINGS[severity]}"
            body = join(_of_finding(finding) for finding in found)
            sections.append(Section(severity.capitalize(), body, aside))
    if findings:
        sections.append(Section("All findings", _table(findings), folded=True))
    return page(
        "graphwright check",
        name,
        "What keeps it from being captured as a graph",
        summary(name, findings),
        sections,
        tiles=tiles,
    )


def _of_finding(finding: Finding) -> Html:
    place = finding.place
    head = [_badge(finding), " ", element("strong", finding.kind)]
    if place.file:
        head += [" ", element("code", f"{place.file}:{place.line}:{place.column}")]
    if finding.count > 1:
        head.append(element("span", f" {finding.count} times", class_="dim"))
    parts = [element("p", *head)]
    if place.source:
        parts.append(element("pre", _marked(place.source, place.expression)))
    parts.append(element("p", f"{finding.what} {finding.fix}"))
    if finding.replacement:
        parts.append(element("pre", finding.replacement, class_="suggested"))
    return element("article", *parts, class_="finding")


def _badge(finding: Finding) -> Html:
    return element("span", str(finding.severity), class_=f"badge {_TONES[finding.severity]}")


def _marked(source: str, expression: str) -> Html:
    """A line of source with the expression that it is about."""
    before, found, after = source.partition(expression) if expression else (source, "", "")
    return join([before, element("mark", found) if found else "", after])


def _table(findings: Sequence[Finding]) -> Html:
    cells = [
        [
            str(finding.severity),
            finding.kind,
            element("code", f"{finding.place.file}:{finding.place.line}")
            if finding.place.file
            else "–",
            element("code", finding.operation),
            str(finding.count),
        ]
        for finding in findings
    ]
    return table(["severity", "kind", "where", "operation", "times"], cells, texts=4)


def to_short_html(name: str, findings: Sequence[Finding]) -> str:
    """Findings for a notebook, without colours of their own."""
    head = element("tr", *(element("th", h) for h in ("severity", "where", "what", "fix")))
    lines = [
        element(
            "tr",
            element("td", str(finding.severity)),
            element("td", f"{finding.place.file}:{finding.place.line}" * bool(finding.place.file),
                    element("br"), element("code", finding.place.source)),
            element("td", finding.what),
            element("td", finding.fix, element("br"), element("code", finding.replacement)),
        )
        for finding in findings
    ]  # fmt: skip
    listed = element("table", element("thead", head), element("tbody", *lines)) if lines else ""
    return element("div", note(summary(name, findings)), listed)
