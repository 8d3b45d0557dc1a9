"""All kinds of obstacles, with their messages and fixes, and the findings that are made of them.

In messages, {operation} and {detail} are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from .finding import Finding, Place, Severity
from .suggestions import chosen_on_the_gpu, made_once


@dataclass(frozen=True)
class Obstacle:
    """A kind of obstacle.

    Attributes:
        name: the name of the kind; several obstacles may share one.
        severity: what it does to a capture.
        what: the message, with {operation} and {detail}.
        fix: the suggested fix, as a sentence.
        replacement: code that shows the fix; empty if `propose` makes it or none fits all cases.
        propose: makes such code from the expression and the line that it is in.
    """

    name: str
    severity: Severity
    what: str
    fix: str
    replacement: str = ""
    propose: Callable[[str, str], str] | None = None


READ = Obstacle(
    "read",
    Severity.BREAKS,
    "{operation} reads a value of a tensor on the GPU: the host waits for it.",
    "Compute with tensors instead, or read it outside the captured call.",
)
CONDITION = Obstacle(
    "read",
    Severity.BREAKS,
    "{operation} decides by a value of a tensor on the GPU: the host waits for it.",
    "Compute both ways and choose on the GPU, or decide outside the captured call.",
    propose=chosen_on_the_gpu,
)
TRANSFER = Obstacle(
    "copy to the host",
    Severity.BREAKS,
    "{operation} copies a tensor from the GPU to the host.",
    "Copy outside the captured call.",
)
SHAPE = Obstacle(
    "dynamic shape",
    Severity.BREAKS,
    "The result shape of {operation} depends on values: the host waits for its size.",
    "Use an operation of fixed shape: torch.where, masked_fill, a sum over a mask.",
)
NONZERO = Obstacle(
    "dynamic shape",
    Severity.BREAKS,
    SHAPE.what,
    "Give an upper bound of how many there are.",
    "torch.nonzero_static(mask, size=N)",
)
REPEAT = Obstacle(
    "dynamic shape",
    Severity.BREAKS,
    SHAPE.what,
    "Say how long the result is.",
    "torch.repeat_interleave(x, repeats, output_size=N)",
)
MASKED_WRITE = Obstacle(
    "dynamic shape",
    Severity.BREAKS,
    "{operation} writes through a mask: the host waits for the number of elements.",
    "Choose on the GPU.",
    "x = torch.where(mask, values, x)",
)
CONSTANT_COPY = Obstacle(
    "copy of a constant",
    Severity.HOISTED,
    "{operation} copies a constant from ordinary host memory to the GPU in every call.",
    "Make it on the GPU, once.",
    propose=lambda expression, source: made_once(expression),
)
CHANGING_COPY = Obstacle(
    "copy of a host value",
    Severity.BREAKS,
    "{operation} copies a newly computed host value to the GPU; a graph would keep the first one.",
    "Pass it to the call as an argument that is on the GPU, or compute it there.",
)
INPUT_COPY = Obstacle(
    "copy of an input",
    Severity.SLOW,
    "{operation} copies an argument from the host to the GPU; graphs do so before each replay.",
    "Keep it on the GPU if it is large and seldom changes.",
)
PINNED_COPY = Obstacle(
    "copy from pinned memory",
    Severity.FROZEN,
    "{operation} copies from pinned memory: each replay reads it again, whatever it holds then.",
    "Copy before the call, or keep that memory and write new values into it.",
)
MIXED = Obstacle(
    "mixed devices",
    Severity.BLOCKS,
    "{operation} is given tensors on the GPU and on the host; on a GPU it raises.",
    "Move them to one device: x.to(y.device) before the call, or a buffer.",
)
WAIT = Obstacle(
    "synchronisation",
    Severity.BLOCKS,
    "{operation} waits for the GPU, which cannot be captured.",
    "Remove it; the caller can wait.",
)
STREAM = Obstacle(
    "streams and events",
    Severity.SLOW,
    "{operation} uses streams or events; they are captured if they fork from the stream of the "
    "capture and join it again.",
    "Begin with side.wait_stream(current) and end with current.wait_stream(side).",
)
NESTED = Obstacle(
    "nested capture",
    Severity.BLOCKS,
    "{operation} captures or replays a graph inside the call.",
    "Capture the outer call alone.",
)
LAYOUT = Obstacle(
    "memory",
    Severity.BLOCKS,
    "{detail}",
    "Use dense tensors, and make new ones instead of giving them other memory.",
)
INPUT_WRITE = Obstacle(
    "in-place change",
    Severity.SLOW,
    "{operation} writes to {detail}: it is copied back after each replay.",
    "Return what is new instead, if nobody needs it in place.",
)
STATE_WRITE = Obstacle(
    "in-place change",
    Severity.SLOW,
    "{operation} writes to {detail}: each replay does so too, after all checks instead of beside "
    "them.",
    "Leave it out of inference, if it is not meant.",
)
CLOCK = Obstacle(
    "clock",
    Severity.FROZEN,
    "{operation} is read once, at the capture: replays keep that value.",
    "Take the time where the graph is called.",
)
HOST_RANDOM = Obstacle(
    "host randomness",
    Severity.FROZEN,
    "{operation} draws random numbers on the host: replays keep the first ones.",
    "Draw on the GPU; such draws differ from replay to replay and follow the seed.",
    "torch.rand((), device=x.device)",
)
DRAWN_ON_HOST = replace(HOST_RANDOM, severity=Severity.BLOCKS)
STATE = Obstacle(
    "changing state",
    Severity.BLOCKS,
    "{detail}",
    "Pass it in and return it as a tensor, or update it where the graph is called.",
)
SCALAR = Obstacle(
    "changing number",
    Severity.FROZEN,
    "{operation} is given other numbers by Python in each run ({detail}): replays keep the first.",
    "Pass them as tensors on the GPU.",
)
SEQUENCE = Obstacle(
    "other operations",
    Severity.BLOCKS,
    "The operations of two runs of the same call differ from {operation} on ({detail}).",
    "Do not let Python state decide what is computed.",
)
HOOK = Obstacle(
    "hook",
    Severity.FROZEN,
    "{operation} is Python that runs in each call; replays repeat only its work on the GPU.",
    "Remove it before the capture, or keep it to work on tensors.",
)
SMALL = Obstacle(
    "small",
    Severity.SLOW,
    "The call runs {detail}: a graph hardly pays for its launch and copies.",
    "Capture a larger part of the model.",
)
FAILS = Obstacle(
    "another way",
    Severity.BLOCKS,
    "The call works by itself and fails once it is told that it is on a GPU and being captured: "
    "{detail}.",
    "It checks the device or torch.cuda.is_current_stream_capturing(), and takes another branch.",
)
OTHERWISE = Obstacle(
    "another way",
    Severity.BLOCKS,
    "{detail}",
    "It asks torch.cuda.is_current_stream_capturing(), and so does transformers for attention "
    "masks: try attn_implementation='eager', or pass the mask explicitly.",
)
VARIES = Obstacle(
    "changing state",
    Severity.BLOCKS,
    "The call returns something else in each run, for an unknown reason.",
    "Look for a state that it keeps outside of tensors: a global, an iterator, a generator.",
)
SEED = Obstacle(
    "seeding",
    Severity.BLOCKS,
    "{operation} sets the generators inside the call, which cannot be captured.",
    "Seed before the call: each replay then draws on from there.",
)


REFUSED = Obstacle(
    "refused",
    Severity.BLOCKS,
    "{detail}",
    "Leave this out of the captured call.",
)


class Findings:
    """The findings of some runs; one that happens again only raises its count."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Finding] = {}

    def add(
        self, obstacle: Obstacle, place: Place, operation: str, detail: str = "", fix: str = ""
    ) -> None:
        """Note an obstacle.

        Args:
            obstacle: its kind.
            place: where it is.
            operation: what was called.
            detail: what the message of its kind leaves open.
            fix: a fix to suggest instead of the one of its kind.
        """
        key = obstacle.name, obstacle.severity, operation, place, detail
        known = self._found.get(key)
        if known is not None:
            self._found[key] = replace(known, count=known.count + 1)
            return
        code = obstacle.replacement
        if obstacle.propose is not None and place.expression:
            code = obstacle.propose(place.expression, place.source)
        self._found[key] = Finding(
            obstacle.name,
            obstacle.severity,
            operation,
            obstacle.what.format(operation=operation, detail=detail),
            fix or obstacle.fix,
            code,
            place,
        )

    def change(self, place: Place, operation: str, old: Obstacle, new: Obstacle) -> None:
        """Replace one obstacle at a place by another one."""
        key = old.name, old.severity, operation, place, ""
        if key in self._found:
            number = list(self._found).index(key)
            count = self._found[key].count
            self.add(new, place, operation)
            items = list(self._found.items())
            new_key, finding = items.pop()
            items[number] = new_key, replace(finding, count=count)
            self._found = dict(items)

    def drop(self, obstacle: Obstacle, place: Place, operation: str) -> None:
        """Forget an obstacle that turns out to be none."""
        self._found.pop((obstacle.name, obstacle.severity, operation, place, ""), None)

    def block(self, names: Collection[str]) -> bool:
        """Let all findings of these kinds keep the call from being captured; whether there are any.

        Args:
            names: of the kinds.
        """
        found = [(key, f) for key, f in self._found.items() if f.kind in names]
        for key, finding in found:
            if not finding.severity.stops:
                self._found[key] = replace(finding, severity=Severity.BLOCKS)
        return bool(found)

    def all(self) -> list[Finding]:
        """All findings, in the order in which they were met."""
        return list(self._found.values())

    def merge(self, other: Findings) -> None:
        """Add the findings of another run; those that both have keep the larger count."""
        for key, finding in other._found.items():
            known = self._found.get(key)
            if known is None or known.count < finding.count:
                self._found[key] = finding
