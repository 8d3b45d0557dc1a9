"""Results that can show themselves."""

from __future__ import annotations

from dataclasses import dataclass

from .result import Results


@dataclass
class Report(Results):
    """The result of one run of `tune`; `str()` and `print()` show it as a table."""

    def check(self) -> None:
        """Raise where it cannot be shown."""
        str(self)

    def __str__(self) -> str:
        from .terminal import to_text  # rich is imported by whoever shows something.

        return to_text(self)
