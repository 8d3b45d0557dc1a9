"""What a profile holds, as data: the verdict on a call, and all that it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..calls.options import choice_problem, refuse
from .remedies import Remedy
from .roofs import Roofs
from .table import GROUPS, Measured, OperationRow, grouped
from .timing import CallTimes
from .trace import Event
from .verdict import CpuFigures, GpuFigures, Verdict

SCHEMA, SCHEMA_VERSION = "graphwright.profile", 1


@dataclass(frozen=True)
class ProfileData:
    """What bounds a call, and the most that each remedy can give.

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

    @property
    def call_s(self) -> float:
        """Seconds of a call: the median on a GPU; on a CPU, as other work only adds, the fastest.

        What else is in seconds here is a part of it.
        """
        return self.figures.call_s

    def table(self, by: str = "operation") -> list[OperationRow]:
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
