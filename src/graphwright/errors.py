"""The one tree of exceptions.

Every error that a user can meet derives from `GraphwrightError` and says three things:
what happened, where (a file and line of the user's own code, when there is one) and what to
do about it. docs/reference/errors.md mirrors this file.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import sysconfig
import traceback
import types
import warnings
from pathlib import Path

import torch

_TORCH_ROOT = str(Path(torch.__file__).parent)
_OWN_ROOT = str(Path(__file__).parent)
_NOT_THE_USER_S = (_TORCH_ROOT, _OWN_ROOT, contextlib.__file__, "<")
_PYTHON_ROOT = sysconfig.get_path("stdlib")


class GraphwrightError(Exception):
    """Base of all errors that graphwright raises.

    Args:
        what: what happened, as one sentence.
        where: the place in the user's code (`file:line`), if there is one.
        remedy: what to do about it, as one sentence.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        parts = [what if where is None else f"{what} (at {where})"]
        if remedy:
            parts.append(remedy)
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive BaseException's own pickling.
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(
    cls: type[GraphwrightError], what: str, where: str | None, remedy: str | None
) -> GraphwrightError:
    return cls(what, where=where, remedy=remedy)


class OptionError(GraphwrightError, ValueError):
    """An argument is of a wrong type, unknown, or has a value that makes no sense."""


class TargetError(GraphwrightError):
    """The command line's TARGET or --input names nothing that can be tuned."""


class SignatureError(GraphwrightError):
    """A call's arguments or results are not what can be compared, captured or tuned."""


class ModelFailed(GraphwrightError):
    """The model itself raises when it is called eagerly with the sample inputs."""


class CaptureError(GraphwrightError):
    """The work of a call could not be captured as a graph."""


class PaddingError(GraphwrightError):
    """A call may not be padded to a bucket: what it returns would depend on the padding."""


class MemoryBudgetExceeded(GraphwrightError):
    """A graph does not fit under its memory pool's limit."""


class StrategyFailed(GraphwrightError):
    """A strategy is available but could not build or run this model."""


class ArtifactError(GraphwrightError):
    """A tuned model cannot be saved, or a file cannot be loaded as one."""


class ExtensionError(GraphwrightError):
    """An operator of the user's could not be built, or is not what was said of it."""


class VerificationError(GraphwrightError):
    """A model does not agree with itself, or a graph's result with it."""


def is_the_user_s(file: str) -> bool:
    """Whether a source file belongs neither to torch nor to graphwright."""
    return not file.startswith(_NOT_THE_USER_S)


def is_own(file: str) -> bool:
    """Whether a source file is graphwright's."""
    return file.startswith(_OWN_ROOT)


def user_frame(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that is neither torch's, graphwright's nor Python's own.

    Returns None when every frame of the error's traceback belongs to one of these.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Packages may be installed below Python's own folder.
        own = frame.filename.startswith(_PYTHON_ROOT) and "site-packages" not in frame.filename
        if is_the_user_s(frame.filename) and not own:
            return f"{frame.filename}:{frame.lineno}"
    return None


def current_frame() -> types.FrameType | None:
    """The frame of the user's code that is running now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (
        not is_the_user_s(frame.f_code.co_filename) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return frame


def current_place() -> str | None:
    """`file:line` of the user's code that is running now."""
    frame = current_frame()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class FallbackWarning(RuntimeWarning):
    """What graphwright made answers a kind of call by the model itself, eagerly."""


_LOGGER = logging.getLogger("graphwright")
# Without a handler of the user's own, the warning alone is shown.
_LOGGER.addHandler(logging.NullHandler())


RUNS_EAGERLY = "runs eagerly"


def warn_of_fallback(what: str, why: str, remedy: str, how: str = RUNS_EAGERLY) -> None:
    """Warn and log that no graph answers calls of a kind; callers do so once for a kind.

    Args:
        what: the object that was called.
        why: in words, without a full stop.
        remedy: what the user can do, as sentences.
        how: what it does instead.
    """
    text = f"{what} {how} for this kind of call, since {why.rstrip('.')}. {remedy}"
    _LOGGER.warning(text)
    warnings.warn(text, FallbackWarning, stacklevel=levels_above())


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn of something, once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=levels_above())


def levels_above() -> int:
    """The `stacklevel` of a warning of the caller's that is meant for the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_ROOT):
        frame, level = frame.f_back, level + 1
    return level


def first_line(error: BaseException, limit: int = 300) -> str:
    """Type and first telling line of an error of a foreign library, for a table or a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].removesuffix(" At") if lines else "no message"
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}"


def in_a_row(error: GraphwrightError) -> str:
    """What happened and what to do about it, in one line, for a reason in a longer text."""
    return f"{error.what} {error.remedy}" if error.remedy else error.what


def in_words(error: Exception) -> tuple[str, str]:
    """What happened, with its place, and the remedy: an error as a row of a table tells it."""
    if isinstance(error, GraphwrightError):
        where = f" (at {error.where})" if error.where else ""
        cause = error.__cause__
        if isinstance(error, StrategyFailed) and isinstance(cause, GraphwrightError):
            return in_words(cause)
        return error.what + where, error.remedy or ""
    frame = user_frame(error)
    return first_line(error) + (f" (at {frame})" if frame else ""), ""
