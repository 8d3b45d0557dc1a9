"""The files that commands write: checked before the work, written before anything is shown."""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..artifacts.saving import Saved

EXIT_BAD_INPUT = 2
_SPACES = re.compile(" +(?=\n)")
# Writes a file, and returns what is to be said of it.
_Writer = Callable[[str], str]


class Unpadded:
    """A text stream whose lines lose the spaces at their ends, which tables are filled up with."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._spaces = stream, ""

    def write(self, text: str) -> int:
        whole = self._spaces + text
        kept = whole.rstrip(" ")
        self._spaces = whole[len(kept) :]
        self._stream.write(_SPACES.sub("", kept))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def check_files(files: Mapping[str, str | None]) -> None:
    """Before minutes of work, not after: can results be written, and would one end another?"""
    from ..artifacts.evidence import FILES
    from ..errors import TargetError
    from ..programs.saved_program import PROGRAM_FILE

    remedy, members = "Choose another place.", (FILES[0], PROGRAM_FILE)
    options: dict[str, str] = {}
    for option, name in files.items():
        if name is None:
            continue
        path = Path(name)
        other = options.setdefault(os.path.realpath(path), option)
        if other != option:
            raise TargetError(f"--{other} and --{option} are one file, {name}.", remedy=remedy)
        # What is saved replaces a file as a whole.
        replaced = option == "save" or not path.exists()
        if not path.parent.is_dir():
            raise TargetError(
                f"--{option} {name}: there is no folder {path.parent}.", remedy=remedy
            )
        try:
            if replaced:
                with tempfile.NamedTemporaryFile(dir=path.parent):
                    pass
            elif path.is_file():  # To open a pipe would wait.
                with open(path, "ab"):
                    pass
        except OSError as error:
            raise _unwritten(option, name, error) from error
        lost = path.exists() and (not path.is_file() or path.stat().st_size > 0)
        if option == "save" and lost and not any(_holds(path, member) for member in members):
            raise TargetError(
                f"--save {name}: what is there is no artifact, and would be lost.", remedy=remedy
            )


def _holds(path: Path, member: str) -> bool:
    """Whether a file is an archive with some member."""
    try:
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                return member in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        pass
    return False


def check_plots(*files: str | None) -> None:
    """Likewise: can plots be drawn for these files, if any is named?"""
    from ..report.plots import need_matplotlib

    if any(files):
        need_matplotlib()


def check_sources(files: Mapping[str, str | None], source: Path | None) -> None:
    """No result may take the place of what it comes from."""
    from ..errors import TargetError

    for option, name in files.items():
        if name is not None and source is not None and Path(name).resolve() == source.resolve():
            raise TargetError(
                f"--{option} {name} would overwrite what is read.", remedy="Choose another place."
            )


def is_stdout(name: str | None) -> bool:
    """Whether a file is what is printed to, as /dev/stdout is: the rest would end in its midst."""
    try:
        return name is not None and os.path.samestat(os.stat(name), os.fstat(1))
    except OSError:
        return False


def _unwritten(option: str, name: str, error: OSError) -> Exception:
    from ..errors import GraphwrightError

    return GraphwrightError(
        f"--{option} {name} cannot be written: {error.strerror or error}.",
        remedy="Choose another place.",
    )


def report_writers(result: Any, *, with_samples: bool = False) -> dict[str, _Writer]:
    """How a report is written, by option; a page has every raw sample only if that is asked for."""
    from ..report.markdown import to_markdown
    from ..report.terminal import to_svg

    return {
        "json": lambda name: write_text(name, result.to_json()),
        "markdown": lambda name: write_text(name, to_markdown(result)),
        "svg": lambda name: write_text(name, to_svg(result)),
        "html": lambda name: write_text(name, result.to_html(with_samples=with_samples)),
    }


def write_text(name: str, text: str) -> str:
    """Write a file of text, of which nothing is said."""
    Path(name).write_text(text, encoding="utf-8")
    return ""


def silently(write: Callable[[str], object]) -> _Writer:
    """A writer of which nothing is said."""

    def written(name: str) -> str:
        write(name)
        return ""

    return written


def save_winner(tuned: Any, name: str) -> tuple[Saved, str]:
    """Save what was chosen, or the best that can be saved; and what is to be said of it."""
    from rich.console import Console

    from ..artifacts.saving import save_best
    from ..report.table import memory

    with Console(stderr=True).status(f"saving {name}"):
        saved = save_best(tuned, name)
    parts = [
        saved.note,
        f"Saved as {name}, {memory(Path(name).stat().st_size)}.",
        "It is built again from the model: run it with --model." * saved.needs_model,
    ]
    return saved, " ".join(filter(None, parts))


def deliver(
    files: Mapping[str, str | None],
    writers: Mapping[str, _Writer],
    show: Callable[[], None],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write, then print: whoever reads may have gone. What fails keeps nothing else from it.

    Args:
        files: by option.
        writers: likewise; what they return is printed after the results.
        show: prints the results.
        then: prints the next commands, last.
    """
    from ..errors import GraphwrightError
    from ..report.terminal import printing

    messages: list[str] = []
    failed: list[Exception] = []
    try:
        for option, name in files.items():
            if name is not None and option in writers:
                try:
                    messages.append(writers[option](name))
                except OSError as error:
                    failed.append(_unwritten(option, name, error))
                except GraphwrightError as error:
                    failed.append(error)
    finally:  # After Ctrl-C as well.
        with printing():
            if not any(map(is_stdout, files.values())):
                show()
                for line in filter(None, messages):
                    click.echo(line)
                then()
    for each in failed:
        click.echo(f"graphwright: {each}", err=True)
    if failed:
        raise SystemExit(EXIT_BAD_INPUT)
