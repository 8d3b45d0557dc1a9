"""The tree of a call's segments in words, for explain()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .segment import Break, Segment
from .steps import Host, New, Step

_MOST_LINES = 40
_MOST_WAYS = 6
_READS = {"local_scalar_dense": "item", "clone": "contents", "to_copy": "contents"}
_LONGEST = 40


def drawn(root: Segment) -> list[str]:
    """Its segments with their nodes and times, its breaks with what they gave and how often.

    The way that most calls go runs down the left edge; others are indented at the break where they
    leave it.
    """
    lines = list(_drawn(root, ""))
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"… and {more} lines more"] if more > 1 else lines


def _drawn(node: Segment, indent: str) -> Iterator[str]:
    following: Segment | None = node
    while following is not None:
        node = following
        yield from (f"{indent}{line}" for line in _segment(node))
        stop, following = node.stop, None
        if stop is None:
            return
        ways = sorted(stop.after.values(), key=lambda way: way.hits, reverse=True)
        named = [(_outcome(way.arrival), way) for way in ways]
        counts = [f"{name} {way.hits}×" for name, way in named[:_MOST_WAYS]]
        counts += [f"{len(named) - _MOST_WAYS} more"] if named[_MOST_WAYS:] else []
        yield f"{indent}break at {short(stop.place)}, {_spoken(stop)}: {', '.join(counts)}"
        for name, way in named[1:]:
            yield f"{indent}  {name}:"
            yield from _drawn(way, f"{indent}  │ ")
        following = ways[0] if ways else None


def _segment(node: Segment) -> Iterator[str]:
    for place, count in hoisted(node).items():
        yield f"constants kept on the device: {count}, of {short(place)}"
    if node.recording is None:
        return
    seconds = node.seconds
    took = "" if seconds is None else f", {seconds * 1e6:.1f} µs"
    count = node.recording.nodes
    yield f"graph of {count} node{'s' * (count != 1)}{took}"


def hoisted(node: Segment) -> Counter[str | None]:
    """How many copies from the host a segment does without, by their place."""
    found: Counter[str | None] = Counter()
    for step in node.steps:
        if step.statics:
            found[step.place] += len(step.statics)
    return found


def _spoken(stop: Break) -> str:
    plain = stop.operation.removeprefix("aten.").partition(".")[0].lstrip("_")
    return _READS.get(plain, plain)


def short(place: str | None) -> str:
    """A `file:line` without the folders."""
    return "an unknown line" if place is None else Path(place).name


def _outcome(arrival: Step | None) -> str:
    """What a break gave."""
    if arrival is None:
        return ""
    parts = [_value(made) for made in arrival.made]
    text = ", ".join(part for part in parts if part)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


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
