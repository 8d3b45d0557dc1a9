"""The tree of a call's segments in words, for explain()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...calls.plurals import counted
from .segment import Break, Segment
from .steps import Host, New, Step

_MOST_LINES = 40
_MOST_OUTCOMES = 6
_LONGEST_OUTCOME = 40
# Readable names for operations that read values.
_READS = {"local_scalar_dense": "item", "clone": "contents", "to_copy": "contents"}


def describe_tree(root: Segment) -> list[str]:
    """Lines on segments with their nodes and times, and on breaks with their outcomes and counts.

    The path that most calls take runs down the left edge; other paths are indented below the break
    where they leave it.
    """
    lines = list(_describe(root, ""))
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"… and {more} lines more"] if more > 1 else lines


def _describe(node: Segment, indent: str) -> Iterator[str]:
    following: Segment | None = node
    while following is not None:
        node = following
        yield from (f"{indent}{line}" for line in _segment(node))
        break_, following = node.break_, None
        if break_ is None:
            return
        outcomes = sorted(break_.after.values(), key=lambda outcome: outcome.hits, reverse=True)
        named = [(_outcome(outcome.arrival), outcome) for outcome in outcomes]
        counts = [f"{name} {outcome.hits}×" for name, outcome in named[:_MOST_OUTCOMES]]
        counts += [f"{len(named) - _MOST_OUTCOMES} more"] if named[_MOST_OUTCOMES:] else []
        yield f"{indent}break at {short(break_.place)}, {_read_of(break_)}: {', '.join(counts)}"
        for name, outcome in named[1:]:
            yield f"{indent}  {name}:"
            yield from _describe(outcome, f"{indent}  │ ")
        following = outcomes[0] if outcomes else None


def _segment(node: Segment) -> Iterator[str]:
    for place, count in hoisted(node).items():
        yield f"constants kept on the device: {count}, of {short(place)}"
    if node.recording is None:
        return
    seconds = node.seconds
    took = "" if seconds is None else f", {seconds * 1e6:.1f} µs"
    count = node.recording.nodes
    yield f"graph of {counted(count, 'node')}{took}"


def hoisted(node: Segment) -> Counter[str | None]:
    """How many copies from the host were hoisted out of a segment, by their place."""
    found: Counter[str | None] = Counter()
    for step in node.steps:
        if step.statics:
            found[step.place] += len(step.statics)
    return found


def _read_of(break_: Break) -> str:
    plain = break_.operation.removeprefix("aten.").partition(".")[0].lstrip("_")
    return _READS.get(plain, plain)


def short(place: str | None) -> str:
    """A `file:line` without its folders."""
    return "an unknown line" if place is None else Path(place).name


def _outcome(arrival: Step | None) -> str:
    """The outcome of a break in words."""
    if arrival is None:
        return ""
    parts = [_value(made) for made in arrival.made]
    text = ", ".join(part for part in parts if part)
    return text if len(text) <= _LONGEST_OUTCOME else text[: _LONGEST_OUTCOME - 1] + "…"


def _value(made: Any) -> str:
    if isinstance(made, New):
        return f"shape {'×'.join(map(str, made.geometry.size)) or '()'}"
    if isinstance(made, Host):
        tensor = made.tensor.detach()
        with torch.no_grad():
            values = tensor.reshape(-1)[:4].tolist()
        more = ", …" if tensor.numel() > len(values) else ""
        return f"[{', '.join(map(str, values))}{more}]"
    if isinstance(made, float):
        return f"{made:.6g}"
    return repr(made) if isinstance(made, bool | int | complex | str) else ""
