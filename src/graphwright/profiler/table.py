"""The table of a profile: operations grouped by module, by operation or by source line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .observation import ObservedOperation
from .roofs import Roofs
from .verdict import floor_of

# What operations can be grouped by.
GROUPS = ("module", "operation", "line")


@dataclass(frozen=True)
class OperationRow:
    """Some operations together.

    Attributes:
        key: the module, operation or line.
        seconds: of their device in one call; on a CPU, of the operations themselves.
        share: of all operations' seconds.
        operations: how many there are.
        launches: pieces of work on a GPU; 0 on a CPU.
        nbytes: bytes that they have to read and write.
        flops: of matrix products and convolutions.
        of_roof: the least time that the machine's roofs allow, over their time.
        cause: what bounds most of their time.
    """

    key: str
    seconds: float
    share: float
    operations: int
    launches: int
    nbytes: int
    flops: int
    of_roof: float
    cause: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """An operation with what was measured of it."""

    operation: ObservedOperation
    seconds: float
    launches: int
    cause: str


def grouped(measured: Sequence[Measured], by: str, roofs: Roofs) -> list[OperationRow]:
    """Rows by module, operation or line, the longest first.

    Args:
        measured: all operations of a call.
        by: one of GROUPS.
        roofs: of the machine.
    """
    key = _KEYS[by]
    groups: dict[str, list[Measured]] = {}
    for each in measured:
        groups.setdefault(key(each.operation), []).append(each)
    total = sum(each.seconds for each in measured) or 1.0
    rows = [_row(name, group, total, roofs) for name, group in groups.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _row(name: str, group: Sequence[Measured], total: float, roofs: Roofs) -> OperationRow:
    seconds = sum(each.seconds for each in group)
    floors = sum(max(floor_of(each.operation, roofs)) for each in group if not each.operation.view)
    causes: dict[str, float] = {}
    for each in group:
        causes[each.cause] = causes.get(each.cause, 0.0) + each.seconds
    return OperationRow(
        name,
        seconds,
        seconds / total,
        len(group),
        sum(each.launches for each in group),
        sum(each.operation.nbytes for each in group),
        sum(each.operation.flops or 0 for each in group),
        floors / seconds if seconds else 0.0,
        max(causes, key=lambda cause: causes[cause]),
    )


_KEYS: Mapping[str, Callable[[ObservedOperation], str]] = {
    "module": lambda operation: operation.module or "(no module)",
    "operation": lambda operation: operation.name,
    "line": lambda operation: str(operation.line or "(no line of yours)"),
}
