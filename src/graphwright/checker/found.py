"""What a run of a call has found, each thing once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .finding import Finding, Place
from .kinds import Kind


class Found:
    """Findings, each counted once however often it happens."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Finding] = {}

    def add(self, kind: Kind, place: Place, operation: str, detail: str = "") -> None:
        """Note an obstacle."""
        key = kind.name, kind.severity, operation, place, detail
        known = self._found.get(key)
        if known is not None:
            self._found[key] = replace(known, count=known.count + 1)
            return
        code = kind.replacement
        if kind.propose is not None and place.expression:
            code = kind.propose(place.expression, place.source)
        self._found[key] = Finding(
            kind.name,
            kind.severity,
            operation,
            kind.what.format(operation=operation, detail=detail),
            kind.mend,
            code,
            place,
        )

    def change(self, place: Place, operation: str, kind: Kind, other: Kind) -> None:
        """What was taken for one kind is another."""
        key = kind.name, kind.severity, operation, place, ""
        if key in self._found:
            number = list(self._found).index(key)
            count = self._found[key].count
            self.add(other, place, operation)
            items = list(self._found.items())
            new_key, finding = items.pop()
            items[number] = new_key, replace(finding, count=count)
            self._found = dict(items)

    def all(self) -> list[Finding]:
        """In the order in which they were met."""
        return list(self._found.values())

    def merge(self, other: Found) -> None:
        """Take what another run has found; what both have keeps the larger count."""
        for key, finding in other._found.items():
            known = self._found.get(key)
            if known is None or known.count < finding.count:
                self._found[key] = finding
