"""What severities mean, and what findings come to, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..calls.plurals import counted
from .finding import Finding, Severity

MEANINGS = {
    Severity.BLOCKS: "cannot be captured",
    Severity.BREAKS: "ends the graph: the host has to see a value, and graph() goes on in another",
    Severity.HOISTED: "stops a plain capture; graph() prepares it beforehand",
    Severity.FROZEN: "captured; replays silently repeat the value from the capture",
    Severity.SLOW: "captured; costs time",
}


def summary(name: str, findings: Sequence[Finding]) -> str:
    """How many findings there are of each severity, and what a capture and graph() would do."""
    if not findings:
        return f"{name}: found nothing that prevents a capture."
    counts = Counter(finding.severity for finding in findings)
    listed = ", ".join(
        _counted(counts[severity], severity) for severity in Severity if counts[severity]
    )
    stops = any(finding.severity.stops for finding in findings)
    outcome = "A plain capture fails" if stops else "A plain capture works"
    if stops and not counts[Severity.BLOCKS]:
        divided = counts[Severity.BREAKS]
        outcome += (
            "; graph() divides the call"
            if divided
            else "; graph() keeps the constants on the device"
        )
    return f"{name}: {listed}. {outcome}."


def _counted(count: int, severity: Severity) -> str:
    """How many findings of a severity there are: those that are nouns have a plural."""
    word = severity.removesuffix("s")
    return counted(count, word, str(severity))
