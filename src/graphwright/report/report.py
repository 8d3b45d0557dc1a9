"""Report: results that can show themselves as a table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..calls.plurals import counted
from ..errors import GraphwrightError
from .result import Results, Row
from .saving import save_as
from .table import duration, ordered, ratio

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass
class Report(Results):
    """The result of one run of `tune`; `str()` and `print()` show it as tables."""

    def check(self) -> None:
        """Raise if the report cannot be displayed."""
        str(self)

    def to_html(self, *, with_samples: bool = False) -> str:
        """A page that opens offline: the verdict, plots, tables, what was refused, the machine.

        Args:
            with_samples: whether every raw sample is in it, too.

        Raises:
            GraphwrightError: matplotlib is not installed.
        """
        from .tune_page import to_page

        return to_page(self, with_samples=with_samples)

    def save(self, path: str | os.PathLike[str], *, with_samples: bool = False) -> None:
        """Write it as a page, as JSON, as Markdown or as a picture of its tables.

        Args:
            path: of a file whose suffix is .html, .json, .md or .svg. JSON has every sample.
            with_samples: whether a page has them, too.

        Raises:
            GraphwrightError: the suffix is another one, the file cannot be written, or a page's
                plots cannot be drawn, since matplotlib is not installed.
        """
        from .markdown import to_markdown
        from .terminal import to_svg

        save_as(
            path,
            {
                ".html": lambda: self.to_html(with_samples=with_samples),
                ".json": self.to_json,
                ".md": lambda: to_markdown(self),
                ".svg": lambda: to_svg(self),
            },
        )

    def to_frame(self) -> DataFrame:
        """A row for each strategy, as the tables order them: times in seconds, memory in bytes.

        Raises:
            GraphwrightError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise GraphwrightError(
                "to_frame() needs pandas, which is not installed.",
                remedy="pip install pandas, or use to_dict().",
            ) from error
        found: DataFrame = pandas.DataFrame([self._record(row) for row in ordered(self)])
        return found

    def _record(self, row: Row) -> dict[str, Any]:
        samples = None if row.measurement is None else row.measurement.typical()
        speed = self.speedup(row)
        return {
            "strategy": row.strategy,
            "status": str(row.status),
            "chosen": row.strategy == self.chosen,
            "finalist": row.final is not None,
            "latency_s": None if samples is None else samples.median,
            "spread_s": None if samples is None else samples.spread,
            "vs_eager": None if speed is None else speed[0],
            "setup_s": row.setup_s,
            "peak_bytes": row.peak_bytes,
            "error": None if row.error is None else row.error.rms,
            "reason": row.reason,
        }

    def _repr_html_(self) -> str:
        from .notebook import to_html

        return to_html(self)

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
        return f"<Report of {text}; {counted(rows, 'row')}>"

    def __str__(self) -> str:
        from .terminal import to_text  # Imported late: it needs rich.

        return to_text(self)
