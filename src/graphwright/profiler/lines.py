"""Lines of the user's own source: which one runs an operation, and where Python spends its time."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from ..calls.threads import own_thread
from ..errors import is_the_user_s

_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
# Seconds between two samples, and after which Python hands its lock over to the sampler.
_EVERY_S, _SWITCH_S = 5e-4, 1e-4
# The folder whose files call the profiled function.
_ROOM = str(Path(__file__).parent)
# Characters of a line that are shown.
_LONGEST = 120


@dataclass(frozen=True)
class Line:
    """A line of source; its number counts from 1."""

    file: str
    number: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def line_of(frame: FrameType | None) -> Line | None:
    """The innermost line that is neither PyTorch's, graphwright's nor Python's own.

    None if there is none up to the frame that called the profiled function.
    """
    found = _own_frame(frame)
    return None if found is None else _line(found.f_code.co_filename, found.f_lineno)


def module_of(frame: FrameType | None, names: Mapping[int, str]) -> str:
    """The name of the innermost module whose method is running; empty if there is none.

    Args:
        frame: the innermost frame.
        names: names of modules by their identity.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                return names[id(owner)]
        frame = frame.f_back
    return ""


class Sampler:
    """Samples the lines that one thread runs, from another thread.

    Attributes:
        counts: samples by line; those that no line of the user's own ran are under None.
    """

    def __init__(self) -> None:
        self.counts: Counter[Line | None] = Counter()
        self._watched = threading.get_ident()
        self._over = threading.Event()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample while the block runs."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        thread = own_thread(self._run, "sampler")
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            sys.setswitchinterval(before)

    def _run(self) -> None:
        while not self._over.is_set():
            time.sleep(_EVERY_S)
            frame = sys._current_frames().get(self._watched)
            self.counts[line_of(frame)] += 1

    def shares(self) -> list[tuple[Line, float]]:
        """Lines with their share of the samples, the largest first."""
        total = sum(self.counts.values())
        return [(line, n / total) for line, n in self.counts.most_common() if line is not None]


def _own_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ROOM):
            return None
        if _is_own(file):
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    if file.startswith("<"):
        return file in linecache.cache and not file.startswith("<frozen")  # of a notebook
    if not is_the_user_s(file):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD)


@lru_cache(maxsize=4096)
def _line(file: str, number: int) -> Line:
    source = linecache.getline(file, number).strip()[:_LONGEST]
    with suppress(ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    return Line(file, number, source)
