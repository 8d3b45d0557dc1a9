"""The nodes of a graph as a table of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .node import Node, gaps, idle_us

WIDTH = 80
_NAME = 26


def to_table(name: str, nodes: Sequence[Node], notes: Sequence[str]) -> str:
    """A line for the graph, one for each node, and the notes."""
    kinds = Counter(node.kind for node in nodes)
    counts = ", ".join(f"{n} {plural(kind, n)}" for kind, n in kinds.most_common())
    lines = [cut(f"{name}: {counts or 'no nodes'}{_aside(nodes)}", WIDTH)]
    head, rows = _columns(nodes)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    left = max(0, WIDTH - sum(widths) - 2 * len(widths))
    head.append("from")
    for row, node in zip(rows, nodes, strict=True):
        row.append(_origin(node, left))
    for row in [head, *rows] if len(nodes) else []:
        cells = [cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)]
        lines.append(cut("  ".join(cells).rstrip(), WIDTH))
    for note in notes:
        lines += wrapped(note)
    return "\n".join(lines)


def _columns(nodes: Sequence[Node]) -> tuple[list[str], list[list[str]]]:
    """The columns but for the last one: their names, and a row for each node."""
    head = ["#", "branch", "node"]
    rows = [[str(node.index), _lane(node, nodes), _named(node)] for node in nodes]
    if any(node.grid for node in nodes):
        head += ["grid×block"]
        for row, node in zip(rows, nodes, strict=True):
            row.append(_launch(node))
    head.append("bytes")
    for row, node in zip(rows, nodes, strict=True):
        row.append("" if node.bytes is None else size(node.bytes))
    if idle_us(nodes) is not None:
        head += ["µs", "idle"]
        for row, node, gap in zip(rows, nodes, gaps(nodes), strict=True):
            took = node.duration_us
            row += ["" if took is None else f"{took:.1f}", f"{gap:.1f}" if gap else ""]
    return head, rows


def plural(kind: str, count: int) -> str:
    """A kind of node, for a number of them."""
    if count == 1 or kind in ("empty", "other", "conditional"):
        return kind
    return "copies" if kind == "copy" else f"{kind}s"


def cut(text: str, width: int) -> str:
    """A text that is no longer than some width."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def size(count: int) -> str:
    """Bytes in a few characters."""
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth, kept = 0, ""
    for character in name:
        depth += character in "<"
        if character == "(" and not depth:
            break
        if not depth:
            kept += character
        depth -= character in ">"
    return kept.rpartition("::")[2].strip() or name


def label_of(node: Node) -> str:
    """A node's name, without what most names have in common."""
    if node.kind == "kernel":
        return short_name(node.name)
    return plain(node.name) if node.kind == "operation" else node.name


def plain(operation: str) -> str:
    """An operation's name without the namespace and the overload that most have."""
    return operation.removeprefix("aten.").removesuffix(".default")


def wrapped(text: str) -> list[str]:
    """A text in lines of the table's width."""
    return textwrap.wrap(text, WIDTH)


def _aside(nodes: Sequence[Node]) -> str:
    branches, idle = max((node.branch + 1 for node in nodes), default=0), idle_us(nodes)
    parts = [f"{branches} branches"] if branches > 1 else []
    segments = len({node.segment for node in nodes})
    parts += [f"{segments} segments"] if segments > 1 else []
    if idle is not None:
        busy = sum(node.duration_us or 0.0 for node in nodes)
        parts += [f"{busy:.1f} µs at work, {idle:.1f} µs idle"]
    return f" ({'; '.join(parts)})" if parts else ""


def _lane(node: Node, nodes: Sequence[Node]) -> str:
    """The branch, drawn as a column; a meeting of branches ends in a mark."""
    mark = "┴" if len({nodes[b].branch for b in node.predecessors}) > 1 else "│"
    return " " * min(node.branch, 5) + (mark if node.branch < 6 else str(node.branch))


def _named(node: Node) -> str:
    return cut(label_of(node), _NAME)


def _launch(node: Node) -> str:
    if node.grid is None or node.block is None:
        return ""
    grid, block = ("×".join(str(n) for n in _trimmed(of)) for of in (node.grid, node.block))
    return cut(f"{grid} × {block}", 16)


def _trimmed(of: tuple[int, int, int]) -> Sequence[int]:
    x, y, z = of
    return of if z > 1 else (x, y) if y > 1 else (x,)


def _origin(node: Node, width: int) -> str:
    """Operation, module and line, as much of them as there is room for."""
    operation = None if node.kind == "operation" or node.operation is None else node.operation
    short = None if operation is None else plain(operation)
    line = None if node.line is None else Path(node.line).name
    module = node.module or None
    for parts in ((short, module, line), (module, line), (short, line), (line,), (module,)):
        text = " ".join(part for part in parts if part)
        if text and len(text) <= width:
            return text
    return cut(module or line or short or "", width)
