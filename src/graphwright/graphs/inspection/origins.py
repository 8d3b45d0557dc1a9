"""Which operation, module and line of the user's code something recorded came from.

Nothing here is used in an ordinary capture: whoever wants to know records the call once more, and
has it observed.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ...calls.operations import tensors
from ...errors import is_the_user_s

# The code that calls a module's hooks and forward, and what its frames call the module.
_CALLS: tuple[CodeType, ...] = (nn.Module._call_impl.__code__,)
# The file whose frames call what was captured.
_RUN_BY = str(Path(__file__).parents[1] / "call_work.py")
_PYTHON_ROOT = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Operation:
    """An operation that ran, and what ran it.

    Attributes:
        name: of ATen's operation, with its overload.
        module: path of the submodule; "" for the module itself; None if no module ran it.
        line: `file:line` of the user's code, the innermost one; None if there is none.
        bytes: of the tensors that it was given and that it made.
    """

    name: str
    module: str | None = None
    line: str | None = None
    bytes: int = 0

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        return f"{self.name}{where}" + (f" (at {self.line})" if self.line else "")


class Origins:
    """Names the module and the line that run, from the frames of Python.

    Args:
        module: what was captured; None for a block, whose modules are named by their class.
    """

    def __init__(self, module: nn.Module | None) -> None:
        # Of a module that several paths reach, the first one.
        self._paths: dict[int, str] = {}
        for path, each in () if module is None else module.named_modules():
            self._paths.setdefault(id(each), path)
        self._module = module  # While it lives, no other has its id.

    def of(
        self, func: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, made: Any = ()
    ) -> Operation:
        """What runs an operation now.

        Args:
            func: the operation.
            args: what it is given.
            kwargs: likewise.
            made: what it made.
        """
        line, path = self._place(sys._getframe(1))
        return Operation(str(func), path, line, bytes_of((args, kwargs or {}), made))

    def _place(self, frame: FrameType | None) -> tuple[str | None, str | None]:
        line = path = None
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            if file == _RUN_BY:
                break
            if line is None and is_the_user_s(file) and not _of_python(file):
                line = f"{file}:{frame.f_lineno}"
            if path is None and code in _CALLS:
                path = self._path(frame.f_locals.get("self"))
            if line is not None and path is not None:
                break
            frame = frame.f_back
        return line, path

    def _path(self, module: Any) -> str | None:
        if self._module is None:
            return type(module).__name__
        return self._paths.get(id(module))


def _of_python(file: str) -> bool:
    """Whether a file belongs to the standard library."""
    return file.startswith(_PYTHON_ROOT) and "site-packages" not in file


def bytes_of(given: Any, made: Any) -> int:
    """Bytes of the elements of an operation's tensors, each tensor once."""
    seen = {id(t): t for t in (*tensors(given), *tensors(made)) if t.layout is torch.strided}
    return sum(t.numel() * t.element_size() for t in seen.values())


class Observer:
    """Is told of each operation that is recorded inside `observing`; subclasses do more."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        # What each operation recorded, by key: a CUDA graph's node, or a step's number on a tape.
        self.recorded: dict[int, Operation] = {}

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """An operation is about to be recorded."""

    def after(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        keys: Sequence[int],
    ) -> None:
        """An operation was recorded.

        Args:
            func: the operation.
            args: what it was given.
            kwargs: likewise.
            result: what it made.
            keys: of the nodes, or steps, that it has added.
        """
        operation = self.origins.of(func, args, kwargs, result)
        for key in keys:
            self.recorded[key] = operation


class _Observing(threading.local):
    """Who is told of what this thread records."""

    now: Observer | None = None


_OBSERVING = _Observing()


def observer() -> Observer | None:
    """Who is to be told of what is recorded; None in ordinary captures."""
    return _OBSERVING.now


@contextlib.contextmanager
def observing(by: Observer | None) -> Iterator[None]:
    """Tell an observer of the operations that are recorded inside the block."""
    outer, _OBSERVING.now = _OBSERVING.now, by
    try:
        yield
    finally:
        _OBSERVING.now = outer
