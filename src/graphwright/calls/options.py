"""Checks of what public functions are given: all that is wrong is named at once, with the fix.

A check is a function of an argument's name and value. It returns what is wrong with the value, in
words, or None. `refuse` turns what several checks have found into one error. A caller raises it
before anything runs, so that no wrong argument ends in an error from deep inside.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import OptionError

_P = ParamSpec("_P")
_R = TypeVar("_R")
# A longer value is cut in an error.
_LONGEST = 60
_SHORT_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def refuse(function: str, *problems: str | None) -> None:
    """Raise for the arguments of a function that something is wrong with.

    Args:
        function: the public function that was called.
        problems: what the checks below returned.

    Raises:
        OptionError: one of them is not None; its text holds all.
    """
    found = [problem for problem in problems if problem is not None]
    if found:
        raise OptionError(f"Bad arguments of {function}(): {'; '.join(found)}.")


def names_checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A public function that names all keywords that it does not have at once, in an OptionError.

    Python's own TypeError names one of them, and not the one that was meant. It is not for a
    function that hands keywords on, as to a model.
    """
    known = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        refuse(function.__name__, *names_problems(kwargs, known))
        return function(*args, **kwargs)

    return checked


def in_brief(value: Any) -> str:
    """A value in an error: a plain one as it is written, any other by its type."""
    if value is None or type(value) in _SHORT_TYPES:
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that suggests the known name most like a misspelt one; empty if none is."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {found[0]!r}?" if found else ""


# The checks.


def names_problems(given: Iterable[str], known: Collection[str]) -> list[str]:
    """What is wrong with the names of arguments: one problem for each that is unknown."""
    unknown = [name for name in given if name not in known]
    hints = {name: nearest(name, known) for name in unknown}
    found = [f"there is no {name}{hint and f' ({hint})'}" for name, hint in hints.items()]
    return found + [f"its arguments are {', '.join(known)}"] * (not all(hints.values()))


def callable_problem(name: str, value: Any) -> str | None:
    """What is wrong with a module or function."""
    if inspect.isclass(value):
        return f"{name} is the class {value.__name__}: pass an instance, {value.__name__}(…)"
    if not callable(value):
        return f"{name} is {in_brief(value)}, which cannot be called: pass a module or a function"
    return None


def args_problem(name: str, value: Any, keywords: str = "kwargs") -> str | None:
    """What is wrong with the positional arguments of a call; `keywords` is where others go."""
    if isinstance(value, tuple | list):
        return None
    if isinstance(value, Mapping):
        return (
            f"{name} is {in_brief(value)}: write {keywords}=inputs for inputs by name, or "
            "(inputs,) for a dictionary that is the one input"
        )
    return f"{name} is {in_brief(value)}: write (x,) for a single input"


def kwargs_problem(name: str, value: Any) -> str | None:
    """What is wrong with the keyword arguments of a call."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return f"{name} is {in_brief(value)}, not a dictionary of inputs by name: write {{'x': x}}"
    wrong = [key for key in value if not isinstance(key, str)]
    if not wrong:
        return None
    return f"{name} has the key {in_brief(wrong[0])}, which names no argument: write {{'x': x}}"


def count_problem(name: str, value: Any, least: int = 1, *, optional: bool = False) -> str | None:
    """What is wrong with a whole number."""
    if optional and value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    return (
        f"{name} is {in_brief(value)}, not a whole number of at least {least}{_or_none(optional)}"
    )


def positive_problem(name: str, value: Any, what: str, *, optional: bool = False) -> str | None:
    """What is wrong with a number that has to be above 0 and finite; `what` follows "positive"."""
    if (optional and value is None) or is_positive(value):
        return None
    return f"{name} is {in_brief(value)}, not a positive {what}{_or_none(optional)}"


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def choice_problem(name: str, value: Any, choices: Collection[str]) -> str | None:
    """What is wrong with a text that has to be one of several."""
    if isinstance(value, str) and value in choices:
        return None
    hint = nearest(value, choices) if isinstance(value, str) else ""
    *others, last = map(repr, choices)
    known = f"{', '.join(others)} or {last}" if others else last
    return f"{name} is {known}, not {in_brief(value)}{hint and f' ({hint})'}"


def flag_problem(name: str, value: Any, *, optional: bool = False) -> str | None:
    """What is wrong with True or False."""
    if isinstance(value, bool) or (optional and value is None):
        return None
    return f"{name} is {in_brief(value)}, not True{', False or None' if optional else ' or False'}"


def kind_problem(
    name: str, value: Any, kind: type, fix: str, *, optional: bool = False
) -> str | None:
    """What is wrong with an object that has to be of some class; `fix` says what to write."""
    if isinstance(value, kind) or (optional and value is None):
        return None
    return f"{name} is {in_brief(value)}, not a {kind.__name__}: {fix}"


def items_problem(name: str, value: Any, what: str) -> str | None:
    """What is wrong with a list of something; a text is none."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | torch.Tensor):
        return None
    return f"{name} is {in_brief(value)}, not a list of {what}"


def texts_problem(name: str, value: Any) -> str | None:
    """What is wrong with a list of texts; one text alone is none."""
    if isinstance(value, str):
        return f"{name} is one text: write {name}=({value!r},)"
    if not isinstance(value, Collection) or isinstance(value, bytes | Mapping | torch.Tensor):
        return f"{name} is {in_brief(value)}, not a tuple of texts"
    wrong = [each for each in value if not isinstance(each, str)]
    return f"{name} holds {in_brief(wrong[0])}, not only texts" if wrong else None


def device_problem(name: str, value: Any) -> str | None:
    """What is wrong with a device; None stands for a default."""
    if value is None:
        return None
    try:
        device = torch.device(value) if isinstance(value, str | torch.device) else None
    except RuntimeError:
        device = None
    if device is None:
        return f"{name} is {in_brief(value)}, not a device: write 'cpu', 'cuda' or 'cuda:1'"
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"{name} is {in_brief(value)}, which this machine does not have: write {devices()}"
    return None


def devices() -> str:
    """The devices of this machine, as they are written."""
    count = torch.cuda.device_count()
    if not count:
        return "cpu: there is no CUDA device here"
    return "cpu or cuda" if count == 1 else f"cpu, or cuda:0 to cuda:{count - 1}"


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""
