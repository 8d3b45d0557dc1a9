"""The nodes of a graph as a picture, in the language of graphviz, and laid out by it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from ...calls.plurals import counted
from ...errors import GraphwrightError
from .node import Node, gaps
from .table import cut, label_of, plain, size

_HEAD = """digraph nodes {
  rankdir=TB; nodesep=0.2; ranksep=0.28; bgcolor=white; compound=true;
  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=10, margin="0.12,0.06",
        color="#5b7fa6"];
  edge [color="#7a8794", arrowsize=0.6];
  graph [fontname=Helvetica, fontsize=10, color="#c9d3dd", style=rounded, labeljust=r];
"""
_FILL = {
    "kernel": "#eef4fb",
    "operation": "#eef4fb",
    "copy": "#fdf3e1",
    "memset": "#fdf3e1",
    "empty": "#f3f3f3",
}
_OTHER = "#f6eafa"
# Seconds that graphviz may take; a thousand nodes take it a few.
_TIMEOUT_S = 120.0


def to_dot(name: str, nodes: Sequence[Node]) -> str:
    """The graph in the language of graphviz; a frame for each stretch of nodes of one module."""
    lines = [_HEAD, f'  label="{_escaped(name)}"; labelloc=t;']
    idle = gaps(nodes)
    for number, (module, members) in enumerate(_stretches(nodes)):
        inside = [f"  {_node(node)}" for node in members]
        if module:
            inside = [
                f'  subgraph cluster_{number} {{ label="{_escaped(module)}";',
                *(f"  {line}" for line in inside),
                "  }",
            ]
        lines += inside
    for node in nodes:
        waited = idle[node.index]
        label = f' [label=" {waited:.1f} µs idle", fontsize=9]' if waited else ""
        for before in node.predecessors:
            lines.append(f"  n{before} -> n{node.index}{label};")
            label = ""
    lines.append("}\n")
    return "\n".join(lines)


def to_svg(name: str, nodes: Sequence[Node]) -> str:
    """The graph as a picture."""
    program = shutil.which("dot")
    if program is None:
        raise GraphwrightError(
            "A picture of a graph is laid out by graphviz, and there is no program `dot` here.",
            remedy="Install graphviz (apt install graphviz), or use to_dot() and lay it out "
            "elsewhere.",
        )
    try:
        done = subprocess.run(
            [program, "-Tsvg"],
            input=to_dot(name, nodes),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise GraphwrightError(
            f"graphviz has not laid out {counted(len(nodes), 'node')} in {_TIMEOUT_S:.0f} s.",
            remedy="Use to_dot(), or capture a part of the model.",
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise GraphwrightError(
            f"graphviz could not lay out the graph: {said.strip().splitlines()[-1]}",
            remedy="Use to_dot() and lay it out elsewhere.",
        ) from error
    return done.stdout


def _stretches(nodes: Sequence[Node]) -> list[tuple[str | None, list[Node]]]:
    """Nodes by module, in stretches of a branch that one module ran."""
    found: list[tuple[str | None, list[Node]]] = []
    latest: dict[tuple[int, int], int] = {}
    for node in nodes:
        key = node.segment, node.branch
        place = latest.get(key)
        if place is not None and found[place][0] == node.module:
            found[place][1].append(node)
            continue
        latest[key] = len(found)
        found.append((node.module, [node]))
    return found


def _node(node: Node) -> str:
    lines = [cut(label_of(node), 44)]
    if node.kind != "operation" and node.operation is not None:
        lines.append(cut(plain(node.operation), 44))
    facts = []
    if node.grid is not None and node.block is not None:
        facts.append(f"grid {'×'.join(map(str, node.grid))} of {'×'.join(map(str, node.block))}")
    facts += [] if node.registers is None else [counted(node.registers, "register")]
    facts += [] if not node.shared_bytes else [f"{size(node.shared_bytes)} shared"]
    facts += [] if node.bytes is None else [size(node.bytes)]
    facts += [] if node.duration_us is None else [f"{node.duration_us:.1f} µs"]
    lines += [", ".join(facts)] if facts else []
    lines += [] if node.line is None else [cut(node.line.rpartition("/")[2], 44)]
    label = "\\n".join(_escaped(line) for line in lines)
    fill = _FILL.get(node.kind, _OTHER)
    tip = _escaped(f"{node.kind} {node.index}: {node.name}")
    return f'n{node.index} [label="{label}", fillcolor="{fill}", tooltip="{tip}"];'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
