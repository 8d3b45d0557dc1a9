"""Report: results that can show themselves as a table."""

from __future__ import annotations

from dataclasses import dataclass

from .result import Results
from .table import duration, ratio


@dataclass
class Report(Results):
    """The result of one run of `tune`; `str()` and `print()` show it as tables."""

    def check(self) -> None:
        """Raise if it cannot be shown."""
        str(self)

    def __repr__(self) -> str:
        device = self.environment.get("gpu") or self.environment.get("processor")
        text = f"{self.model} on {device}" if device else self.model
        row, rows = self.chosen_row, len(self.rows)
        if row is not None:
            text += f": {row.strategy} chosen"
            if row.measurement is not None:
                text += f", {duration(row.measurement.typical().median)}"
            speed = self.speedup(row)
            if speed is not None:
                text += f", {ratio(speed[0])} eager"
        return f"<Report of {text}; {rows} row{'s' * (rows != 1)}>"

    def __str__(self) -> str:
        from .terminal import to_text  # Imported late: it needs rich.

        return to_text(self)
