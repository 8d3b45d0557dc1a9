"""Have tune() choose a strategy, whatever its time is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from graphwright.report import Row


@contextlib.contextmanager
def choosing(name: str) -> Iterator[None]:
    def ranked(report: object, rows: list[Row]) -> list[Row]:
        return sorted((r for r in rows if r.status == "ok"), key=lambda row: row.strategy != name)

    with (
        mock.patch("graphwright.tuner.ranked", ranked),
        mock.patch("graphwright.finals.near_best", lambda report: report.rows),
        mock.patch("graphwright.tuner.near_best", lambda report: report.rows),
        mock.patch("graphwright.evaluation._SLOWER", 1e9),
    ):
        yield
