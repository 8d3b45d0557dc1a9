"""The rooms of the package and what they import from one another, as a picture."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = "graphwright"
DOT, SVG = (ROOT / "docs" / "images" / f"rooms.{kind}" for kind in ("dot", "svg"))
HEAD = """digraph rooms {
  rankdir=BT; ranksep=0.45; nodesep=0.25; bgcolor=white;
  node [shape=box, style="rounded,filled", fillcolor="#eef4fb", color="#5b7fa6", fontname=Helvetica,
        fontsize=12, margin="0.16,0.09"];
  edge [color="#7a8794", arrowsize=0.6];
"""


def floors() -> list[list[str]]:
    """Rooms by floor, the top first, as import-linter holds them to."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c.get("containers") == [PACKAGE])
    return [re.split(r"\s*\|\s*", layer) for layer in layers]


def said_of(room: str) -> str:
    """The first line of a room's docstring."""
    folder = ROOT / "src" / PACKAGE / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].rstrip(".")


def imports(rooms: list[str]) -> set[tuple[str, str]]:
    """Which room imports which, those of type checkers too."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    found = set()
    for room in rooms:
        for other in rooms:
            if room != other and graph.find_matching_direct_imports(
                import_expression=f"{PACKAGE}.{room}.** -> {PACKAGE}.{other}.**"
            ):
                found.add((room, other))
    return found


def told_anyway(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Edges that a longer way shows too."""
    below: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in below:
            direct = {b for a, b in edges if a == room}
            below[room] = direct.union(*map(reach, direct))
        return below[room]

    return {(a, b) for a, b in edges if any((a, c) in edges and b in reach(c) for c in reach(a))}


def drawn() -> str:
    """The picture, in graphviz' language."""
    by_floor = [[r for r in floor if r not in ("errors", "_version")] for floor in floors()]
    rooms = [room for floor in by_floor for room in floor]
    lines = [HEAD]
    for floor in filter(None, by_floor):
        names = "; ".join(floor)
        lines.append(f"  {{ rank=same; {names} }}")
    for room in rooms:
        lines.append(
            f'  {room} [label=<<b>{room}/</b><br/><font point-size="9">'
            f"{wrapped(said_of(room))}</font>>];"
        )
    edges = imports(rooms)
    for a, b in sorted(edges - told_anyway(edges)):
        lines.append(f"  {b} -> {a} [dir=back];")
    return "\n".join([*lines, "}", ""])


def wrapped(text: str) -> str:
    """Text in lines of a box."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    lines, words = [""], escaped.split()
    for word in words:
        if len(lines[-1]) + len(word) > 34:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br/>".join(lines)


def main() -> int:
    """Write the picture, or check that it is true."""
    parser = argparse.ArgumentParser(prog="scripts/architecture")
    parser.add_argument("--check", action="store_true", help="only see whether it is up to date")
    check, text = parser.parse_args().check, drawn()
    if not check:
        DOT.write_text(text, encoding="utf-8")
        subprocess.run(["dot", "-Tsvg", DOT, "-o", SVG], check=True)
    elif not DOT.exists() or DOT.read_text(encoding="utf-8") != text:
        print("docs/images/rooms.dot is not what the code imports; run scripts/architecture")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
