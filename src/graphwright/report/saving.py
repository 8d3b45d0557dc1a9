"""Results in files whose name says of what kind they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import GraphwrightError


def save_as(path: str | os.PathLike[str], makers: Mapping[str, Callable[[], str]]) -> None:
    """Write a result in the form that the file's suffix names.

    Args:
        path: of the file.
        makers: the text of the file, by suffix.

    Raises:
        GraphwrightError: the suffix is none of these, or the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in makers:
        *others, last = makers
        raise GraphwrightError(
            f"{os.fspath(path)} cannot be written: its suffix is not one of those known.",
            remedy=f"End it with {', '.join(others)} or {last}.",
        )
    text = makers[suffix]()
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphwrightError(
            f"{os.fspath(path)} cannot be written: {error.strerror or error}.",
            remedy="Choose another place.",
        ) from error
