"""Profile: the verdict on a call with all that it rests on; text, JSON, plots, a Chrome trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..calls.options import kind_problem, refuse
from ..errors import GraphwrightError
from ..report.result import Prediction, Results
from ..report.saving import save_as
from .comparison import compared
from .page import to_page, to_short_html
from .plots import drawn_timeline, roofline
from .profile_data import ProfileData
from .rendering import to_text
from .trace import named, timeline


class Profile(ProfileData):
    """What bounds a call, and the most that each remedy can give: what `profile` returns.

    `print(profile)` shows it in 80 columns.
    """

    def compare(self, report: Results) -> list[Prediction]:
        """Set what was predicted of each remedy beside what tuning then measured.

        Args:
            report: the report of `tune` for the same model and inputs. Gains are medians of its
                ratios to eager.

        Returns:
            a comparison for each remedy with a strategy of its own that was timed, such as
            "eager+graph" or "bf16"; `print` shows it as a line.

        Raises:
            OptionError: `report` is no report.
        """
        fix = "pass tuned.report"
        refuse("compare", kind_problem("report", report, Results, fix))
        return compared(self.remedies, report)

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def to_html(self) -> str:
        """A page that opens offline: the verdict, plots, remedies, tables, the machine's roofs.

        Raises:
            GraphwrightError: matplotlib is not installed.
        """
        return to_page(self, self._measured, timeline(self._events))

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write all of it as JSON, or as a page for a browser.

        Args:
            file: its suffix is .json or .html.

        Raises:
            GraphwrightError: the suffix is another one, the file cannot be written, or a page's
                plots cannot be drawn, since matplotlib is not installed.
        """
        save_as(file, {".json": self.to_json, ".html": self.to_html})

    def save_trace(self, file: str | Path) -> None:
        """Write a Chrome trace, for chrome://tracing or ui.perfetto.dev.

        It holds one call as it is, and one in which each operation is inside a mark that bears the
        name of its module.

        Raises:
            GraphwrightError: the file cannot be written.
        """
        operations = [each.operation for each in self._measured]
        events = list(named(self._events, operations))
        _write(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def save_roofline(self, file: str | Path) -> None:
        """Write a roofline plot as SVG: matrix products and convolutions below the machine's roofs.

        Raises:
            GraphwrightError: the file cannot be written, or matplotlib is not installed.
        """
        _write(file, roofline(self.name, self._measured, self.roofs))

    def save_timeline(self, file: str | Path) -> None:
        """Write a timeline of one call as SVG: the host's operations, its waits, the device's work.

        Raises:
            GraphwrightError: the file cannot be written, or matplotlib is not installed.
        """
        _write(file, drawn_timeline(self.name, timeline(self._events)))

    def _repr_html_(self) -> str:
        return to_short_html(self)

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        causes = " or ".join(map(str, self.verdict.causes))
        return f"<Profile {self.name}, {self.call_s * 1e3:.3g} ms a call, bound by {causes}>"


def _write(file: str | Path, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphwrightError(
            f"{file} cannot be written: {error.strerror or error}.", remedy="Choose another place."
        ) from error
