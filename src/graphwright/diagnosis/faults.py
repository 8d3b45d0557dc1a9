"""Faults of the device, and of the process, found in a child: it ends, and the caller goes on.

The child runs the call eagerly, one operation at a time and each to its end. If none faults, it
captures the call and replays it; each operation of that capture leaves its number on the host, in
memory that a fault of the device does not take away, so that the last number tells where it
stopped.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import first_line
from ..graphs.captured_call import CapturedCall
from ..graphs.memory import format_bytes
from ..processes.child import Child, ending
from ..processes.pickled_files import write_pickled

# How a failed assertion in device code names its kernel: file:line: kernel: block: [0,0,0], …
_ASSERTION = re.compile(
    r"^(?P<file>\S+):(?P<line>\d+): (?P<kernel>.+?): block: \[.*?Assertion (?P<text>.*?) failed",
    re.MULTILINE,
)
_MAIN = "graphwright.diagnosis.fault_main"
# A larger model is not written to a file for the child.
_MOST_BYTES = 8 << 30


@dataclass(frozen=True)
class Fault:
    """A fault that a child met.

    Attributes:
        error: what the device, the operation or the system said.
        operation: that ran then; None if none did.
        module: its module.
        line: its line.
        index: how many operations ran before it.
        kernel: the kernel, if it is known.
        phase: "eager" or "replay".
        died: whether the process died, or the device can no longer be used; else it is an error of
            Python's.
    """

    error: str
    operation: str | None
    module: str | None
    line: str | None
    index: int | None
    kernel: str | None
    phase: str
    died: bool


def look_for_fault(
    graph: CapturedCall, arguments: Sequence[Any], timeout_s: float
) -> tuple[Fault | None, str | None]:
    """Run and capture a graph's call anew in a child process.

    Args:
        graph: whose function is run.
        arguments: leaves of the arguments.
        timeout_s: seconds that the child may take.

    Returns:
        the fault, if there was one; a note on why the child could tell nothing, if so.
    """
    held = [*graph.spec.module.parameters(), *graph.spec.module.buffers()]
    size = sum(tensor.nbytes for tensor in held)
    if size > _MOST_BYTES:
        return None, (
            f"No child process looked for faults of the device: the model's {format_bytes(size)} "
            "are too much to pickle."
        )
    args, kwargs = graph.spec.arguments(list(arguments))
    try:
        task = write_pickled((graph.function, args, kwargs))
    except Exception as error:
        return None, (
            f"No child process looked for faults of the device: the call cannot be pickled "
            f"({first_line(error, 120)})."
        )
    with task, tempfile.TemporaryDirectory(prefix="graphwright-") as folder:
        told = Path(folder, "told")
        told.touch()
        environment = {
            "CUDA_LAUNCH_BLOCKING": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        words, handles = ["-m", _MAIN, str(task.fileno()), str(told)], [task.fileno()]
        with Child(words, handles=handles, environment=environment) as child:
            status, said = child.status_within(timeout_s), child.printed()
        return judged(told.read_text(encoding="utf-8"), status, said, timeout_s)


def judged(
    told: str, status: int | None, said: str, timeout_s: float
) -> tuple[Fault | None, str | None]:
    """What a child's messages and its end mean.

    Args:
        told: its messages, a JSON object a line.
        status: of its end; None if it was stopped for its time.
        said: what it has printed to stderr.
        timeout_s: that time.
    """
    heard = _Told.of(told)
    error, kernel = heard.error, heard.kernel
    if heard.over and error is None:
        return None, None
    asserted = _ASSERTION.search(said)
    if asserted is not None:
        kernel = asserted["kernel"]
        error = f"assertion {asserted['text']} failed ({Path(asserted['file']).name}:" + (
            f"{asserted['line']})"
        )
    died = status is None or status < 0 or asserted is not None or _of_device(error)
    if error is None:
        printed = (said.strip().splitlines() or [""])[-1]
        too_long = f"it did not end within {timeout_s:.0f} s"
        if not heard.phase:
            why = too_long if status is None else ending(status, printed)
            return None, f"No child process looked for faults of the device: {why[:240]}"
        error = too_long if status is None else ending(status)
        died = True
    place = heard.place
    return (
        Fault(
            error,
            place.get("name"),
            place.get("module"),
            place.get("line"),
            place.get("index"),
            kernel,
            heard.phase or "eager",
            died,
        ),
        None,
    )


@dataclass
class _Told:
    """What a child has said before it ended.

    Attributes:
        phase: that it was in; empty before the first.
        place: its latest operation.
        error: that it has seen.
        kernel: in which it was.
        over: whether the child is done.
    """

    phase: str = ""
    place: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    kernel: str | None = None
    over: bool = False

    @classmethod
    def of(cls, text: str) -> _Told:
        """What is in its messages, a JSON object a line."""
        told = cls()
        for line in text.splitlines():
            try:
                message = json.loads(line)
            except ValueError:  # It died while it wrote this.
                break
            if message["say"] == "phase":
                told.phase, told.place = message["phase"], {}
            elif message["say"] == "operation":
                told.place = message
            elif message["say"] == "error":
                told.error, told.kernel = message["error"], message.get("kernel")
                told.place = message.get("operation") or told.place
            elif message["say"] == "over":
                told.over = True
        return told


def _of_device(error: str | None) -> bool:
    return error is not None and ("CUDA error" in error or "cuda" in error.lower())
