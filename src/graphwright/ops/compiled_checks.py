"""Building the check of modules in C++: once for a machine, in the background.

Until it is there, and where there is no compiler, `ModuleWatch` checks in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..calls import watch
from ..calls.dictionaries import ORDER
from ..calls.threads import own_thread
from .custom.building import Flags, existing, library
from .custom.sources import Unit

_SOURCE = Path(watch.__file__).parent / "checks.cpp"
_LOCK = threading.Lock()


_FLAGS = Flags(cpp=("-O2",))


@functools.cache
def offer() -> None:
    """Load it if it was built before; else build it in the background, once there are many looks.

    A process that ends soon is not worth a compiler's time.
    """
    own_thread(_offer, "checks in C++")


def _offer() -> None:
    provide(build=False)
    if not watch.COMPILED:
        watch.WANTED[:] = [lambda: own_thread(provide, "checks in C++")]


def provide(*, build: bool = True) -> None:
    """Let watches use it, if it can be loaded and sees what it has to see.

    Args:
        build: whether it is built where it was not before, which takes half a minute.
    """
    if watch.COMPILED or os.environ.get("GRAPHWRIGHT_COMPILED_CHECKS") == "0":
        return
    # It is one thread's at a time, which the interpreter's lock sees to.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return
    # Attributes of instances fire no events in 3.13.0 (CPython issue 125608).
    if sys.implementation.name != "cpython" or sys.version_info[:3] == (3, 13, 0):
        return
    # It is for speed alone, and the checks in Python are there.
    with contextlib.suppress(Exception), _LOCK:
        text = _SOURCE.read_text(encoding="utf-8")
        unit = Unit("C++", text, (_SOURCE.name,), (), ())
        path = existing(unit, "checks", _FLAGS)
        if path is None and build:
            path = library(unit, "checks", _FLAGS, quiet=True)
        if path is None:
            return
        loaded = ctypes.PyDLL(str(path))
        for made in (loaded.graphwright_check_type, loaded.graphwright_arguments_type):
            made.restype = ctypes.py_object
        check, arguments = loaded.graphwright_check_type(), loaded.graphwright_arguments_type()
        if _sees(check):
            watch.COMPILED[:] = [check]
        if _tells(arguments):
            watch.COMPILED_ARGUMENTS[:] = [arguments]


def _sees(check: Callable[..., Callable[[], bool]]) -> bool:
    """Whether it sees each kind of change, and none where nothing has changed."""

    class Tried:
        pass

    class Other:
        pass

    def written_often(tried: Any) -> None:
        # CPython takes other ways to write once a line has run some times.
        for n in range(64):
            tried.a = n

    def changes(tried: Any) -> list[Callable[[], object]]:
        return [
            lambda: setattr(tried, "a", 2),
            lambda: vars(tried).update(a=3),
            lambda: setattr(tried, "b", 3),
            lambda: delattr(tried, "a"),
            lambda: setattr(tried, "__dict__", dict(vars(tried))),
            lambda: setattr(tried, "__class__", Other),
            lambda: written_often(tried),
            lambda: tried.held.update(new=1),
            lambda: tried.items.append(None),
            lambda: tried.empty.update(new=1),
            lambda: tried.ordered.update(new=1),
            lambda: tried.sorted.update(a=2),
            *([lambda: tried.sorted.move_to_end("a")] if ORDER else []),
            lambda: tried.tensor.add_(1),
            lambda: setattr(tried.tensor, "data", torch.zeros(3)),
            lambda: tried.tensor.untyped_storage().resize_(0),
            lambda: torch.utils.swap_tensors(tried.tensor, torch.ones(3)),
            lambda: tried.tensor.unsqueeze_(0),
            lambda: setattr(tried.tensor, "data", torch._neg_view(tried.tensor)),
        ]

    for n in range(len(changes(Tried()))):
        tried: Any = Tried()
        tried.a, tried.held, tried.items, tried.empty = 1, {"a": 1}, [object()], {}
        tried.ordered, tried.tensor = OrderedDict(), torch.zeros(3)
        tried.sorted = OrderedDict(a=1, b=2)
        items = list(tried.items)
        given = [[tried], [tried.held, tried.sorted], [tried.empty, tried.ordered], [tried]]
        given += [[Tried], [], []]
        given += [[tried.items], [1], items, [], [], [], [tried.tensor], [tried.tensor._version]]
        made = check(*given)
        if not (made() and made()):
            return False
        changes(tried)[n]()
        if made():
            return False
    return True


def _tells(arguments: Callable[..., watch.FittingTensors]) -> bool:
    """Whether it gives the tensors of calls that fit, and None for each other kind of call."""
    x, y = torch.zeros(2, 3), torch.zeros(3)
    made = arguments((x, y), ("y",), False, True)
    given = made((x,), {"y": y})
    fits = given is not None and len(given) == 2 and given[0] is x and given[1] is y
    misses: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y), {}),
        ((x,), {"z": y}),
        ((torch.zeros(3, 3),), {"y": y}),
        ((torch.zeros(3, 2).T,), {"y": y}),
        ((x.double(),), {"y": y}),
        ((x.to("meta"),), {"y": y}),
        ((x,), {"y": x[0]}),
        ((x,), {"y": None}),
        ((torch.nn.Parameter(x),), {"y": y}),
        ((x.clone().requires_grad_(),), {"y": y}),
    ]
    if not fits or any(made(*call) is not None for call in misses):
        return False
    both, other = {"x": x, "y": y}, {"y": y, "x": x}
    made, either = (arguments((x, y), ("x", "y"), any_order, True) for any_order in (False, True))
    if made((), both) is None or made((), other) is not None:
        return False
    given = either((), other)
    if given is None or given[0] is not x or given[1] is not y:
        return False
    with torch.autocast("cpu"):
        if made((x,), {"y": y}) is not None:
            return False
    with torch.device("cpu"):
        if made((x,), {"y": y}) is not None:
            return False
        under = arguments((x, y), ("y",), False, True)
        if under((x,), {"y": y}) is None:
            return False
    if under((x,), {"y": y}) is not None:
        return False
    freed = torch.zeros(2, 3)
    made = arguments((freed,), (), False, True)
    fits = made((freed,), {}) is not None
    freed.untyped_storage().resize_(0)
    return fits and made((freed,), {}) is None
