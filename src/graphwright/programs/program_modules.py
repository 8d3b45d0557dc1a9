"""The modules inside a program: of any object that holds them, or of what a function reaches."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from ..calls.dependencies import Dependencies

# How the walk names what it is given here.
_GIVEN = re.compile(r"^.*?\bkeywords\['(program|run)'\]\.?")


def modules_inside(program: Any, run: Callable[..., Any] | None = None) -> dict[str, nn.Module]:
    """The outermost modules that a program holds or reaches, by where they are in it.

    A module is its own only one, by the name of its class.

    Args:
        program: a module, an object with modules inside, or a function.
        run: what runs it; it may reach more.
    """
    if inspect.ismethod(program):
        program = program.__self__
    if isinstance(program, nn.Module):
        return {type(program).__name__: program}
    reached = functools.partial(print, program=program, run=run)
    found: dict[str, nn.Module] = {}
    for name, thing in Dependencies(reached, whole=True).outermost.values():
        if isinstance(thing, nn.Module):
            place = _GIVEN.sub("", f"{name.text}{name.after}")
            others = sum(each.partition(" (")[0] == place for each in found)
            found[f"{place} ({others + 1})" if others else place] = thing
    return found
