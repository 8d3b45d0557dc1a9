"""What to do after a command: further commands, and after `tune` lines of Python, too.

The lines find its choice in the cache. All repeat the options of the run, since another option may
mean another choice.
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


def load_options(strategy: str, target: str, *, model: bool) -> list[str]:
    """The options with which `run` and `serve` load a file of a strategy.

    Args:
        strategy: its name.
        target: the model that was tuned.
        model: whether loading needs it.
    """
    from ..strategies.registry import COMPILERS

    parts = strategy.split("+")
    code = any("trust" in needs(each) for each in COMPILERS if each.name in parts)
    return ["--model", target] * model + ["--trust"] * code


def serving(saved: Sequence[str]) -> str:
    """How to serve a file, which is followed by the options that load it."""
    return f"Serve it:  {shlex.join(['graphwright', 'serve', *saved])}"


def needs(compiler: Any) -> str:
    """What `load` needs beside what was saved of a compiler."""
    from ..strategies.base import Loader

    if getattr(compiler, "unsavable", None) is not None:
        return "never"
    if isinstance(compiler, Loader):
        return "trust" if compiler.holds_code else "nothing"
    # Caches of compilers are code as well.
    return "model, trust" if hasattr(compiler, "warm") else "model"


def commands(
    target: str, words: Sequence[str], saved: Sequence[str] | None, report: str | None
) -> str:
    """How to save the choice, or to time and serve what was saved, and to see more: a line each.

    Args:
        target: TARGET.
        words: the options of this run, but for files.
        saved: the file that was saved, and the options that load it; None if none was.
        report: the file of the report, if it was saved.
    """
    again = shlex.join(["graphwright", "tune", target, *words])
    name = (target.rpartition(":")[2] or "model").rpartition(".")[2]
    more = again if report is None else f"graphwright report {shlex.quote(report)}"
    if saved is None:
        first = f"Save it:   {again} --save {name}.gw"
    else:
        first = f"Time it:   {shlex.join(['graphwright', 'run', *saved])}\n{serving(saved)}"
    return f"{first}\nSee more:  {more} --details"


def in_python(
    target: str, loaded: Target, options: Mapping[str, Any], *, why_not: str | None
) -> str:
    """Lines of Python that tune the same model for the same inputs: the cache has the choice.

    They are for a Python that begins in this folder.

    Args:
        target: TARGET.
        loaded: what it gave.
        options: of `gw.tune`, as they were given.
        why_not: why the choice is not in the cache; None if it is.
    """
    from ..tuning.tuner import tune

    usual = inspect.signature(tune).parameters
    changed = {name: value for name, value in options.items() if value != usual[name].default}
    place, _, name = target.rpartition(":")
    lines = ["import graphwright as gw", *_import(place, name), *loaded.lines]
    words = [loaded.arguments, *(f"{option}={value!r}" for option, value in changed.items())]
    call = f"fast = gw.tune(model, {', '.join(words)})"
    if why_not is None:
        what = "this choice, from the cache"
    else:
        lines.append(f"# not cached: {why_not}")
        what = "tunes again"
    lines += [f"{call}   # {what}"] if len(call) + len(what) < _WIDTH else [f"# {what}:", call]
    return "\n".join(["Next, in Python:", *(f"    {line}" for line in lines)])


def program_in_python(
    target: str, *, with_run: bool, options: Mapping[str, Any], saved: str | None
) -> str:
    """Lines of Python that accelerate the same program: what was found is remembered.

    They are for a Python that begins in this folder.

    Args:
        target: TARGET.
        with_run: whether it gave what runs the program.
        options: of `gw.accelerate`, as they were given.
        saved: the file that was saved; None if none was.
    """
    from ..programs.acceleration import accelerate

    usual = inspect.signature(accelerate).parameters
    changed = {name: value for name, value in options.items() if value != usual[name].default}
    place, _, name = target.rpartition(":")
    names = "program, calls, run" if with_run else "program, calls"
    lines = ["import graphwright as gw", *_import(place, name), f"{names} = {name}()"]
    if saved is None:
        words = ["program, calls", *["run=run"] * with_run]
        words += [f"{option}={value!r}" for option, value in changed.items()]
        lines.append(f"accelerated = gw.accelerate({', '.join(words)})")
    else:
        lines.append(f"accelerated = gw.load({saved!r}, program, trust=True)")
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
