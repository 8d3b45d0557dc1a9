"""What to do after `tune`: commands, and lines of Python that find its choice in the cache.

Both repeat the options of the run, since another option may mean another choice.
"""

from __future__ import annotations

import inspect
import keyword
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .targets import Target

_WIDTH = 80


def words_of(context: click.Context, leave_out: Sequence[str]) -> list[str]:
    """The options of a command line as words, but for some."""
    given: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if not isinstance(parameter, click.Option) or name in leave_out:
            continue
        if source is not click.core.ParameterSource.COMMANDLINE:
            continue
        value: Any = context.params[name]
        option = parameter.opts[0]
        unit = "s" if parameter.type.name == "seconds" else ""
        if parameter.is_flag:
            given += [option] * bool(value)
        else:
            for each in value if parameter.multiple else [value]:
                given += [option, f"{each:g}{unit}" if isinstance(each, float) else str(each)]
    return given


def repeater(target: str, words: Sequence[str]) -> Callable[[str], str]:
    """What gives the command that tries one strategy again, as this run has tried it."""
    given = ["graphwright", "tune", target, *words]
    return lambda strategy: shlex.join([*given, "--strategies", strategy, "--fresh"])


def serving(file: str, strategy: str, target: str, *, model: bool) -> str:
    """The command that serves a file of a strategy; `model` says whether it needs its model."""
    from ..strategies.registry import COMPILERS

    words = ["graphwright", "serve", file]
    words += ["--model", target] if model else []
    parts = strategy.split("+")
    code = any("trust" in needs(each) for each in COMPILERS if each.name in parts)
    return shlex.join([*words, *["--trust"] * code])


def needs(compiler: Any) -> str:
    """What `load` needs beside what was saved of a compiler."""
    from ..strategies.base import Loader

    if getattr(compiler, "unsavable", None) is not None:
        return "never"
    if isinstance(compiler, Loader):
        return "trust" if compiler.holds_code else "nothing"
    # Caches of compilers are code as well.
    return "model, trust" if hasattr(compiler, "warm") else "model"


def commands(target: str, words: Sequence[str], served: str | None, report: str | None) -> str:
    """How to save or serve the choice, and to see more: a line each.

    Args:
        target: TARGET.
        words: the options of this run, but for files.
        served: the command that serves the file that was saved; None if none was.
        report: the file of the report, if it was saved.
    """
    again = shlex.join(["graphwright", "tune", target, *words])
    name = (target.rpartition(":")[2] or "model").rpartition(".")[2]
    more = again if report is None else f"graphwright report {shlex.quote(report)}"
    first = f"Save it:   {again} --save {name}.gw" if served is None else f"Serve it:  {served}"
    return f"{first}\nSee more:  {more} --details"


def in_python(target: str, loaded: Target, options: Mapping[str, Any], *, cached: bool) -> str:
    """Lines of Python that tune the same model for the same inputs: the cache has the choice.

    They are for a Python that begins in this folder.

    Args:
        target: TARGET.
        loaded: what it gave.
        options: of `gw.tune`, as they were given.
        cached: whether the choice is in the cache.
    """
    from ..tuning.tuner import tune

    usual = inspect.signature(tune).parameters
    changed = {name: value for name, value in options.items() if value != usual[name].default}
    place, _, name = target.rpartition(":")
    lines = ["import graphwright as gw", *_import(place, name), *loaded.lines]
    words = [loaded.arguments, *(f"{option}={value!r}" for option, value in changed.items())]
    call = f"fast = gw.tune(model, {', '.join(words)})"
    what = "this choice, from the cache" if cached else "tunes again: this choice was not cached"
    lines += [f"{call}   # {what}"] if len(call) + len(what) < _WIDTH else [f"# {what}:", call]
    return "\n".join(["Next, in Python:", *(f"    {line}" for line in lines)])


def _import(place: str, name: str) -> list[str]:
    """Lines that import a name from where TARGET says it is."""
    module, lines = place, []
    if place.endswith(".py"):
        path = Path(place)
        module = path.stem
        if path.parent.resolve() != Path.cwd():
            lines = ["import sys", f"sys.path.insert(0, {str(path.parent)!r})"]
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split(".")):
        return [*lines, f"from {module} import {name}"]
    return [*lines, "import importlib", f"{name} = importlib.import_module({module!r}).{name}"]
