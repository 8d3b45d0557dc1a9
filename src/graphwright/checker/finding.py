"""Finding: one obstacle, its severity, its place in the user's source, and the suggested fix."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import sysconfig
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ..errors import is_the_user_s

SCHEMA, SCHEMA_VERSION = "graphwright.check", 2

_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_STATEMENTS = ("if ", "elif ", "while ", "assert ")
# The file whose frames call the user's code.
_RUN_BY = str(Path(__file__).with_name("checker.py"))
# Characters of source that a finding shows.
_LONGEST = 160
# Modules of the standard library that may use clocks without any effect on results.
_INDIFFERENT = ("logging", "threading", "concurrent", "queue", "asyncio")


class Severity(StrEnum):
    """What an obstacle does to a capture.

    Attributes:
        BLOCKS: it cannot be captured, or is refused since replays would be wrong.
        BREAKS: the graph must end here, since the host needs a value first.
        HOISTED: a plain capture fails, but the value is constant, or the object known, and can be
            prepared before the capture.
        FROZEN: it can be captured, and each replay silently repeats what was true at the capture.
        SLOW: it can be captured, and costs time.
    """

    BLOCKS = "blocks"
    BREAKS = "breaks"
    HOISTED = "hoisted"
    FROZEN = "frozen"
    SLOW = "slow"

    @property
    def stops(self) -> bool:
        """Whether a plain capture, by `graphwright.capture`, raises."""
        return self in (Severity.BLOCKS, Severity.BREAKS, Severity.HOISTED)


@dataclass(frozen=True)
class Place:
    """A piece of the user's source: lines and columns count from 1; unknown ones are 0."""

    file: str = ""
    line: int = 0
    column: int = 0
    source: str = ""
    expression: str = ""


@dataclass(frozen=True)
class Finding:
    """One obstacle to capturing a call as a graph.

    Attributes:
        kind: of obstacle, such as "read" or "dynamic shape"; docs/reference/findings.md lists them.
        severity: what it does to a capture.
        operation: what was called, as the user wrote it if that is known.
        what: what is wrong, as one sentence.
        fix: how to fix it, as one sentence.
        replacement: code to write in place of the expression; empty if there is none.
        place: where it is in the user's own source.
        count: how often it happens in one call.
    """

    kind: str
    severity: Severity
    operation: str
    what: str
    fix: str
    replacement: str = ""
    place: Place = Place()
    count: int = 1

    def __str__(self) -> str:
        at = f"{self.place.file}:{self.place.line}:{self.place.column}: " if self.place.file else ""
        often = f" ({self.count} times)" if self.count > 1 else ""
        code = f" Write: {self.replacement}" if self.replacement else ""
        return f"{at}{self.severity}: {self.what}{often} {self.fix}{code}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def place_of(frame: FrameType | None) -> Place:
    """The innermost frame of the user's own code, not PyTorch's, graphwright's or Python's."""
    while frame is not None and not _is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == _RUN_BY:
            return Place()  # None is the user's own, as for a TorchScript module.
        frame = frame.f_back
    if frame is not None:
        linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
    if frame is None:
        return Place()
    code = frame.f_code
    return _place(code, code.co_filename, frame.f_lasti, frame.f_lineno)


@functools.lru_cache(maxsize=4096)
def _place(code: CodeType, file: str, instruction: int, line: int) -> Place:
    # The file is given, too, since equal code in another one is equal.
    _, end, column, last = next(itertools.islice(code.co_positions(), instruction // 2, None))
    source = linecache.getline(file, line)
    expression = ""
    if end == line and column is not None and last is not None:
        # Columns are counted in bytes.
        expression = source.encode()[column:last].decode(errors="replace")
    if not expression or expression.startswith(_STATEMENTS):
        expression, column = _condition(source) or ("", column)
    return Place(
        _short(file),
        line,
        (column or 0) + 1,
        source.strip()[:_LONGEST],
        expression[:_LONGEST],
    )


def _condition(line: str) -> tuple[str, int] | None:
    """The condition in a line with an if, a while or an assert, and the byte where it begins.

    It is needed since the position of a branch instruction is that of the whole statement.
    """
    text = line.strip()
    lead = len(line) - len(line.lstrip())
    shift = 2 if text.startswith("elif ") else 0
    statement: ast.stmt | None = None
    for body in ("", "\n pass"):
        with contextlib.suppress(SyntaxError, ValueError):
            (statement,) = ast.parse(text[shift:] + body).body
    if not isinstance(statement, ast.If | ast.While | ast.Assert):
        return None
    test = statement.test
    test = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    expression = ast.get_source_segment(text[shift:], test)
    return None if expression is None else (expression, lead + shift + test.col_offset)


def is_direct(frame: FrameType | None) -> bool:
    """Whether a frame runs the user's own code, or code of the standard library called by it.

    Imports do not count: what a module does when it is imported is no part of the call.
    """
    while frame is not None and not _is_own(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if not file.startswith(_STANDARD):
            return False
        if any(name in Path(file).parts or Path(file).stem == name for name in _INDIFFERENT):
            return False
        frame = frame.f_back
    direct = frame is not None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return direct


def place_of_error(error: BaseException) -> Place:
    """Where in the user's own code an error comes from."""
    found, step = Place(), error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if _is_own(code.co_filename):
            found = _place(code, code.co_filename, step.tb_lasti, step.tb_lineno)
        step = step.tb_next
    return found


def place_of_line(where: str) -> Place:
    """The place that an error of graphwright's names as `file:line`."""
    file, _, line = where.rpartition(":")
    return Place(_short(file), int(line), 1, linecache.getline(file, int(line)).strip())


def place_of_code(function: Any) -> Place:
    """Where a function is defined, if that is the user's own code."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not _is_own(code.co_filename):
        return Place()
    line = code.co_firstlineno
    return Place(
        _short(code.co_filename), line, 1, linecache.getline(code.co_filename, line).strip()
    )


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    if file.startswith("<"):
        return file in linecache.cache and not file.startswith("<frozen")  # of a notebook
    if not is_the_user_s(file):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD)


def _short(file: str) -> str:
    """Relative to the working directory, if the file lies in it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
