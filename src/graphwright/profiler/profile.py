"""Profile: the verdict on a call with all that it rests on; text, JSON, plots and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calls.options import choice_problem, refuse
from ..errors import GraphwrightError
from .remedies import Remedy
from .roofs import Roofs
from .table import GROUPS, Measured, Row, grouped
from .timing import CallTimes
from .trace import Event, named, timeline
from .verdict import CpuFigures, GpuFigures, Verdict

SCHEMA, SCHEMA_VERSION = "graphwright.profile", 1


@dataclass(frozen=True)
class Profile:
    """What bounds a call, and the most that each remedy can give.

    `print(profile)` shows it in 80 columns.

    Attributes:
        name: of the function or module.
        device: "cpu", or "cuda:0".
        training: whether the call is a forward and a backward pass.
        verdict: what bounds it, with shares of its time and the lines that are to blame.
        remedies: with the range of their gains.
        times: of single synchronised calls, in seconds.
        figures: what the verdict is decided from, in seconds.
        roofs: what the machine can do at most.
        environment: names and versions of hardware and software.
        notes: what could not be measured, and what else to know.
        seconds: that profiling took.
    """

    name: str
    device: str
    training: bool
    verdict: Verdict
    remedies: tuple[Remedy, ...]
    times: CallTimes
    figures: GpuFigures | CpuFigures
    roofs: Roofs
    environment: Mapping[str, str]
    notes: tuple[str, ...]
    seconds: float
    _measured: tuple[Measured, ...] = field(default=(), repr=False)
    _events: Sequence[Event] = field(default=(), repr=False)

    def table(self, by: str = "operation") -> list[Row]:
        """The call's operations by "module", "operation" or "line", the longest first.

        Raises:
            OptionError: `by` is none of these.
        """
        refuse("table", choice_problem("by", by, GROUPS))
        return grouped(self._measured, by, self.roofs)

    def remedy(self, name: str) -> Remedy:
        """A remedy by its name, such as "graph" or "bf16".

        Raises:
            OptionError: there is none of that name.
        """
        known = {each.name: each for each in self.remedies}
        refuse("remedy", choice_problem("name", name, [*known]))
        return known[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain values with a schema version, for JSON; times are in seconds."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "device": self.device,
            "training": self.training,
            "verdict": self.verdict.to_dict(),
            "remedies": [remedy.to_dict() for remedy in self.remedies],
            "times": vars(self.times),
            "figures": self.figures.to_dict(),
            "roofs": self.roofs.to_dict(),
            "environment": dict(self.environment),
            "notes": list(self.notes),
            "seconds": self.seconds,
            "tables": {by: [row.to_dict() for row in self.table(by)] for by in GROUPS},
            "operations": [
                {
                    **each.operation.to_dict(),
                    "seconds": each.seconds,
                    "launches": each.launches,
                    "cause": each.cause,
                }
                for each in self._measured
            ],
        }

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def save(self, file: str | Path) -> None:
        """Write all of it as JSON.

        Raises:
            GraphwrightError: the file cannot be written.
        """
        _write(file, self.to_json())

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
            GraphwrightError: the file cannot be written.
        """
        from .plots import roofline

        _write(file, roofline(self.name, self._measured, self.roofs))

    def save_timeline(self, file: str | Path) -> None:
        """Write a timeline of one call as SVG: the host's operations, its waits, the device's work.

        Raises:
            GraphwrightError: the file cannot be written.
        """
        from .plots import drawn_timeline

        _write(file, drawn_timeline(self.name, timeline(self._events)))

    def __str__(self) -> str:
        from .rendering import to_text

        return to_text(self)

    def __repr__(self) -> str:
        causes = " or ".join(map(str, self.verdict.causes))
        return f"<Profile {self.name}, {self.times.call_s * 1e3:.3g} ms a call, bound by {causes}>"


def _write(file: str | Path, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphwrightError(
            f"{file} cannot be written: {error.strerror or error}.", remedy="Choose another place."
        ) from error
