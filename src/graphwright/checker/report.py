"""CheckReport: the findings of one check, a list that can be saved and shown in a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..report.saving import save_as
from .finding import Finding


class CheckReport(list[Finding]):
    """The obstacles that `check` has found, in the order in which they are met.

    Args:
        name: of the module or function that was checked.
        findings: of the check.
    """

    def __init__(self, name: str, findings: Iterable[Finding]) -> None:
        super().__init__(findings)
        self.name = name

    def to_html(self) -> str:
        """A page that opens offline: each obstacle with its line and the suggested fix."""
        from .page import to_page

        return to_page(self.name, self)

    def to_json(self) -> str:
        """The findings as JSON with a schema version."""
        from .rendering import to_json  # Imported late: it needs rich.

        return to_json(self.name, self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them as a page, as JSON, or as one line a finding.

        Args:
            path: of a file whose suffix is .html, .json or .txt.

        Raises:
            GraphwrightError: the suffix is another one, or the file cannot be written.
        """
        from .rendering import to_lines

        makers = {".html": self.to_html, ".json": self.to_json, ".txt": lambda: to_lines(self)}
        save_as(path, makers)

    def _repr_html_(self) -> str:
        from .page import to_short_html

        return to_short_html(self.name, self)
