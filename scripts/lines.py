"""Code lines of the package by room and file, beside those of another commit.

    scripts/lines             as they are now
    scripts/lines COMMIT      beside those of a commit, with the difference
    scripts/lines --rooms     rooms alone

A code line holds code: no blank one, no comment, no line of a docstring. C++ and CUDA count too.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
SOURCE = "src/graphwright"
KINDS = (".py", ".cpp", ".cu", ".cuh", ".h")
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Texts come first, so that no comment begins in one.
_CPP = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def code_lines(name: str, text: str) -> int:
    """How many lines of a file hold code."""
    return _of_python(text) if name.endswith(".py") else _of_cpp(text)


def _of_python(text: str) -> int:
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(found)


def _of_cpp(text: str) -> int:
    def without(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else "\n" * found[0].count("\n")

    return sum(bool(line.strip()) for line in _CPP.sub(without, text).splitlines())


def counted(commit: str | None) -> dict[str, int]:
    """The code lines of each file, by its path in the package: as it is now, or in a commit."""
    if commit is None:
        folder = ROOT / SOURCE
        files = {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in folder.rglob("*")
            if path.suffix in KINDS
        }
    else:
        names = _git("ls-tree", "-r", "--name-only", f"{commit}:{SOURCE}").splitlines()
        files = {
            name: _git("show", f"{commit}:{SOURCE}/{name}")
            for name in names
            if name.endswith(KINDS)
        }
    return {name: code_lines(name, text) for name, text in files.items()}


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8"
    ).stdout


def table(now: dict[str, int], before: dict[str, int] | None, *, rooms: bool) -> str:
    """Lines by room and file, with the difference to others if there are any."""
    lines = []

    def row(name: str, files: list[str]) -> None:
        mine = sum(now.get(file, 0) for file in files)
        text = f"{name:44}{mine:8,}"
        if before is not None:
            its = sum(before.get(file, 0) for file in files)
            text += f"{its:8,}{mine - its:+8,}" if mine != its else f"{its:8,}"
        lines.append(text)

    by_room: dict[str, list[str]] = {}
    for file in sorted({*now, *(before or {})}):
        parts = PurePosixPath(file).parts
        by_room.setdefault(f"{parts[0]}/" if len(parts) > 1 else ".", []).append(file)
    for room, files in by_room.items():
        row(room, files)
        for file in [] if rooms else files:
            row(f"  {file.removeprefix(room)}", [file])
    row("all", [file for files in by_room.values() for file in files])
    return "\n".join(lines)


def main() -> int:
    """Print the table; 2 for a commit that is not there."""
    parser = argparse.ArgumentParser(prog="scripts/lines")
    parser.add_argument("commit", nargs="?", help="another state to compare with")
    parser.add_argument("--rooms", action="store_true", help="leave the files out")
    options = parser.parse_args()
    try:
        before = None if options.commit is None else counted(options.commit)
    except subprocess.CalledProcessError:
        print(f"There is no commit {options.commit} with {SOURCE}.", file=sys.stderr)
        return 2
    print(table(counted(None), before, rooms=options.rooms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
