"""Report: results that can show themselves as a table."""

from __future__ import annotations

from dataclasses import dataclass

from .result import Results


@dataclass
class Report(Results):
    """The result of one run of `tune`; `str()` and `print()` show it as a table."""

    def check(self) -> None:
        """Raise if it cannot be shown."""
        str(self)

    def __str__(self) -> str:
        from .terminal import to_text  # Imported late: it needs rich.

        return to_text(self)
