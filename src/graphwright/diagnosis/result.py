"""Diagnosis: the first operation at which a replay and eager part, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DifferenceCause(StrEnum):
    """Why a replay and eager differ.

    Attributes:
        NONE: they do not.
        RESULT: an operation was given the same, and its result differs.
        CONSTANT: the graph computes with a value or an address of the capture, eager with another.
        OPERATIONS: eager runs other operations than were captured.
        ERROR: eager raises an error.
        FAULT: the device faults, or the process dies.
        UNKNOWN: they differ, and no operation by itself does.
    """

    NONE = "none"
    RESULT = "result"
    CONSTANT = "constant"
    OPERATIONS = "operations"
    ERROR = "error"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` has found; `str()` says it in sentences.

    Attributes:
        graph: the name of the graph.
        cause: why the replay and eager differ; `DifferenceCause.NONE` if they agree.
        what: what is wrong, as one sentence.
        operation: the first ATen operation at which they part; None if none is known.
        module: path of the submodule that ran it, "" for the module itself; None if unknown.
        line: `file:line` of the user's code that ran it; None if unknown.
        index: how many operations ran before it; None if unknown.
        kernel: the kernel of the device that is wrong or has faulted; None if unknown.
        error: how the results differ, or what the device or eager says; None if they agree.
        compared: how many operations' results were compared one by one.
        seconds: that the diagnosis took.
        notes: what could not be looked at, as sentences.
    """

    graph: str
    cause: DifferenceCause
    what: str
    operation: str | None = None
    module: str | None = None
    line: str | None = None
    index: int | None = None
    kernel: str | None = None
    error: str | None = None
    compared: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the replay and eager agree."""
        return self.cause is DifferenceCause.NONE

    def __str__(self) -> str:
        lines = [f"{self.graph}: {self.what}"]
        if self.operation is not None:
            number = "" if self.index is None else f" (number {self.index + 1} of the call)"
            lines.append(f"  operation  {self.operation}{number}")
        if self.module is not None:
            lines.append(f"  module     {self.module or 'the captured module itself'}")
        if self.line is not None:
            lines.append(f"  line       {self.line}")
        if self.kernel is not None:
            lines.append(f"  kernel     {self.kernel}")
        if self.error is not None:
            lines.append(f"  error      {self.error}")
        return "\n".join([*lines, *self.notes])


# Its name in files that were pickled before.
Cause = DifferenceCause
