"""Findings as text for a terminal, as lines for an editor, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from .finding import SCHEMA, SCHEMA_VERSION, Finding, Severity
from .summary import MEANINGS, summary

_STYLES = {
    Severity.BLOCKS: "bold red",
    Severity.BREAKS: "bold yellow",
    Severity.HOISTED: "bold blue",
    Severity.FROZEN: "bold magenta",
    Severity.SLOW: "bold cyan",
}


def to_json(name: str, findings: Sequence[Finding]) -> str:
    """Findings as JSON with a schema version."""
    result = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": name,
        "findings": [finding.to_dict() for finding in findings],
    }
    return json.dumps(result, indent=1, ensure_ascii=False) + "\n"


def to_lines(findings: Sequence[Finding]) -> str:
    """One line a finding: file:line:column: severity: message."""
    return "".join(f"{finding}\n" for finding in findings)


def render(name: str, findings: Sequence[Finding]) -> RenderableType:
    """Findings with their source lines, for a terminal."""
    parts: list[RenderableType] = []
    for finding in findings:
        place = finding.place
        style = _STYLES[finding.severity]
        head = Text(f"{finding.severity}", style)
        head.append(f"  {finding.kind}", "bold")
        if place.file:
            head.append(f"  {place.file}:{place.line}:{place.column}", "default")
        if finding.count > 1:
            head.append(f"  {finding.count} times", "dim")
        body = []
        if place.source:
            source = Text(place.source, "dim", no_wrap=True, overflow="ellipsis")
            if place.expression:
                source.highlight_words([place.expression], f"not dim {style}")
            body.append(source)
        body.append(Text(f"{finding.what} {finding.fix}"))
        if finding.replacement:
            body.append(Text(finding.replacement, "green"))
        parts += [head, Padding(Group(*body), (0, 0, 1, 4))]
    met = {finding.severity for finding in findings}
    parts += [Text(f"{s}: {MEANINGS[s]}", "dim") for s in Severity if s in met]
    parts.append(Text(summary(name, findings), "bold"))
    return Group(*parts)


def show(name: str, findings: Sequence[Finding]) -> None:
    """Print to a terminal; into a file or a pipe, one line a finding."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(render(name, findings))
        return
    console.print(to_lines(findings), end="", markup=False, soft_wrap=True)
    console.print(summary(name, findings), markup=False, soft_wrap=True)
