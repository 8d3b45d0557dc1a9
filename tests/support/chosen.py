"""Have tune() choose a strategy, whatever its time is, with objects taken apart or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from graphwright.report.report import Report
from graphwright.report.result import Row


@contextlib.contextmanager
def choosing(name: str) -> Iterator[None]:
    def ranked(report: object, rows: list[Row]) -> list[Row]:
        return sorted((r for r in rows if r.status == "ok"), key=lambda row: row.strategy != name)

    def right(report: Report) -> list[Row]:
        return [row for row in report.rows if row.status == "ok"]

    with (
        mock.patch("graphwright.tuning.tuner.ranked", ranked),
        mock.patch("graphwright.tuning.final_rounds.near_best", right),
        mock.patch("graphwright.tuning.tuner.near_best", right),
        mock.patch("graphwright.tuning.trial._SLOWER", 1e9),
        # What answers, and the model itself.
        mock.patch("graphwright.tuning.tuner.seconds_with_objects", return_value=(0.0, 1.0)),
    ):
        yield
