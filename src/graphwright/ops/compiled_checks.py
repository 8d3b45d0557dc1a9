"""Building the checks of modules in C++: once for a machine.

`tune` builds them before it times anything. Where a model is only graphed or fused, a process of
its own builds them, once there were many looks; it goes on when this process ends, for the next
one. Until they are there, and where there is no compiler, `ModuleWatch` checks in Python.
"""

from __future__ import annotations

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
from ..errors import GraphwrightError, first_line, in_a_row
from ..processes.child import Child
from ..processes.environment_variables import COMPILED_CHECKS, is_on
from .custom.building import Flags, existing, library
from .custom.sources import Unit

_SOURCE = Path(watch.__file__).parent / "checks.cpp"
_NAME = "the checks in C++"
# What `provide` says where there are none yet, and none are to be built.
NOT_BUILT = "not built yet"
_LOCK = threading.Lock()
_FLAGS = Flags(cpp=("-O2",))
# Seconds that a build beside other work may take.
_LIMIT_S = 900.0
# What builds them in a process of its own, of lower priority than what it goes on beside.
_NICE, _BUILD = 10, f"from {__name__} import provide; provide()"


@functools.cache
def offer() -> None:
    """Load them if they were built before; else build them beside this process, at many looks."""
    own_thread(_offer, "checks in C++")


def _offer() -> None:
    provide(build=False)
    if not watch.COMPILED:
        watch.WANTED[:] = [lambda: own_thread(_build_beside, "checks in C++")]


def _build_beside() -> None:
    """Have them built by a process that this one's end does not stop, and load them."""
    if why_never() is not None:
        return
    # It inherits nothing that others wait for the end of.
    words = ["-c", f"import os; os.nice({_NICE}); {_BUILD}"]
    environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    child = Child(words, environment=environment)
    child.status_within(_LIMIT_S)
    child.end()
    provide(build=False)


def begin() -> Callable[[], str | None]:
    """Begin to provide them, beside other work; the function waits until that is done.

    It returns as `provide` does.
    """
    found: list[str | None] = []
    thread = own_thread(lambda: found.append(provide()), "checks in C++")

    def wait() -> str | None:
        thread.join()
        return found[0]

    return wait


def why_never() -> str | None:
    """Why they are not used in this interpreter at all; None if they may be."""
    if not is_on(COMPILED_CHECKS, by_default=True):
        return "turned off by GRAPHWRIGHT_COMPILED_CHECKS=0"
    # It is one thread's at a time, which the interpreter's lock sees to.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python has no global lock"
    # Attributes of instances fire no events in 3.13.0 (CPython issue 125608).
    if sys.implementation.name != "cpython" or sys.version_info[:3] == (3, 13, 0):
        return "this Python does not tell of changes"
    return None


def provide(*, build: bool = True, quiet: bool = True) -> str | None:
    """Let watches use them, if they can be loaded and see what they have to see.

    Args:
        build: whether they are built where they were not before, which takes some seconds.
        quiet: whether no progress is shown.

    Returns:
        Why they are not used; None if they are.
    """
    if watch.COMPILED:
        return None
    why = why_never()
    if why is not None:
        return why
    try:
        with _LOCK:
            text = _SOURCE.read_text(encoding="utf-8")
            unit = Unit("C++", text, (_SOURCE.name,), (), ())
            path = existing(unit, _NAME, _FLAGS)
            if path is None and build:
                path = library(unit, _NAME, _FLAGS, quiet=quiet, alone=True)
            if path is None:
                return NOT_BUILT
            return _load(path)
    except GraphwrightError as error:
        return in_a_row(error)
    except Exception as error:  # They are for speed alone, and the checks in Python are there.
        return first_line(error, 200)


def _load(path: Path) -> str | None:
    loaded = ctypes.PyDLL(str(path))
    for made in (loaded.graphwright_check_type, loaded.graphwright_arguments_type):
        made.restype = ctypes.py_object
    known = torch.zeros(1)
    address = ctypes.c_size_t(known._cdata)
    if not loaded.graphwright_knows_tensor(ctypes.py_object(known), address):
        return "tensors of this PyTorch look otherwise than they expect"
    check, arguments = loaded.graphwright_check_type(), loaded.graphwright_arguments_type()
    if _tells(arguments):
        watch.COMPILED_ARGUMENTS[:] = [arguments]
    if not _sees(check):
        return "they do not see each change in this Python"
    watch.COMPILED[:] = [check]
    return None


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
    return (
        _tells_kinds(arguments)
        and _tells_orders(arguments)
        and _tells_modes(arguments)
        and _tells_freed(arguments)
    )


def _tells_kinds(arguments: Callable[..., watch.FittingTensors]) -> bool:
    """Whether it heeds which tensors there are, and what is known of them."""
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
    return fits and all(made(*call) is None for call in misses)


def _tells_orders(arguments: Callable[..., watch.FittingTensors]) -> bool:
    """Whether it heeds the order of keywords where that matters."""
    x, y = torch.zeros(2, 3), torch.zeros(3)
    both, other = {"x": x, "y": y}, {"y": y, "x": x}
    made, either = (arguments((x, y), ("x", "y"), any_order, True) for any_order in (False, True))
    given = either((), other)
    fits = given is not None and given[0] is x and given[1] is y
    return fits and made((), both) is not None and made((), other) is None


def _tells_modes(arguments: Callable[..., watch.FittingTensors]) -> bool:
    """Whether it heeds autocast, and the mode of a device."""
    x, y = torch.zeros(2, 3), torch.zeros(3)
    call: tuple[Any, Any] = (x,), {"y": y}
    made = arguments((x, y), ("y",), False, True)
    with torch.autocast("cpu"):
        if made(*call) is not None:
            return False
    with torch.device("cpu"):
        under = arguments((x, y), ("y",), False, True)
        if made(*call) is not None or under(*call) is None:
            return False
    return under(*call) is None


def _tells_freed(arguments: Callable[..., watch.FittingTensors]) -> bool:
    """Whether it heeds that memory was freed."""
    freed = torch.zeros(2, 3)
    made = arguments((freed,), (), False, True)
    fits = made((freed,), {}) is not None
    freed.untyped_storage().resize_(0)
    return fits and made((freed,), {}) is None
