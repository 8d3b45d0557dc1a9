"""Parts inside of a captured call: what they run there, and what that depends on.

A fused or tuned module inside of a captured call runs what it was made into, not the module that it
stands for, and so its gain is kept. The graph then holds copies of weights that only the part knows
of. It tells the capture which changes make these out of date, and the graph's owner looks for those
at each call too.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _python_dispatch as dispatch

from ..calls.holders import Held
from ..calls.signature import inside_transform
from ..calls.watch import ModuleWatch, Watched
from ..errors import levels_above

# How often a capture begins again since a part has to be set up before.
_MAX_SET_UPS = 64


class _ThreadParts(threading.local):
    """What this thread is inside of: what parts join in the capture, if its owner looks at them."""

    parts: Parts | None = None
    # How many parts it is inside of, one in another.
    depth = 0


_THREAD = _ThreadParts()
_WARNED_OF: weakref.WeakSet[Any] = weakref.WeakSet()


class SetUpFirst(BaseException):
    """A part has not been made ready for a kind of call, and cannot be while it is captured.

    Not an Exception: a model that handles errors must not take it for one of its own.
    """

    def __init__(self, set_up: Callable[[], object]) -> None:
        super().__init__("A part is to be set up before the capture.")
        self.set_up = set_up


class Parts:
    """What a capture runs of the parts inside of it.

    Attributes:
        names: what they are, in words.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._packed: dict[int, torch.Tensor] = {}
        self._watches: dict[int, Watched] = {}
        self._own: list[Watched] = []
        self._set_ups = _MAX_SET_UPS
        self._lost: list[tuple[Any, str, str]] = []

    def unchanged(self) -> bool:
        """A fast check; as `ModuleWatch.unchanged`."""
        return all(watch.unchanged() for watch in self._watches.values())

    def changed(self) -> str | None:
        """What makes the graph out of date, in words, or None."""
        return next(filter(None, (watch.changed() for watch in self._watches.values())), None)

    def add(self, name: str, watch: ModuleWatch, packed: Sequence[torch.Tensor] = ()) -> None:
        """Note that the capture runs what a part was made into.

        Args:
            name: what it is, in words.
            watch: notices what puts it out of date.
            packed: constants of its own in a library's layout, which nobody writes to.
        """
        self._packed.update((id(tensor), tensor) for tensor in packed)
        if not self.has(watch):
            self._watches[id(watch)] = watch
            self.names.append(name)

    def watch(self, watch: Watched) -> None:
        """Have the capture's owner look at what the capture depends on and nobody else watches."""
        self._watches[id(watch)] = watch
        self._own.append(watch)

    def let_go(self) -> None:
        """Look at these no more, and keep alive no longer what they hold."""
        for watch in self._own:
            del self._watches[id(watch)]
        self._own = []

    def covers(self, value: Any) -> bool:
        """Whether the capture's owner looks at where something was found."""
        return any(each.covers(value) for each in self._own if isinstance(each, Held))

    @property
    def watches(self) -> bool:
        """Whether there is anything that the capture's owner has to look at."""
        return bool(self._watches)

    def has(self, watch: ModuleWatch) -> bool:
        """Whether what it watches has joined, so that the capture's owner looks at it."""
        return id(watch) in self._watches

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the parts' packed constants."""
        return id(tensor) in self._packed

    def need(self, set_up: Callable[[], object]) -> None:
        """Have a part set up before the capture begins again; returns if that was tried enough.

        Raises:
            SetUpFirst: it is to be set up now.
        """
        if self._set_ups > 0:
            raise SetUpFirst(set_up)

    def settle(self) -> None:
        """From now on, set nothing up: no capture can begin again."""
        self._set_ups = 0

    def set_up(self, first: SetUpFirst) -> None:
        """Set a part up; what fails there fails in the capture as it does in eager."""
        self._set_ups -= 1
        with contextlib.suppress(Exception):
            first.set_up()

    def lose(self, part: Any, what: str, remedy: str) -> None:
        """Note that a part ran the module itself; as `warn_of_lost_gain`, once the capture is over.

        A warning may be an error, which would break the capture.
        """
        self._lost.append((part, what, remedy))

    def warn(self) -> None:
        """Warn of parts that ran the module itself."""
        lost, self._lost = self._lost, []
        for each in lost:
            warn_of_lost_gain(*each)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Let parts join that are called inside the block, on this thread."""
        before, _THREAD.parts = _THREAD.parts, self
        try:
            yield
        finally:
            _THREAD.parts = before


def parts_of_capture() -> Parts | None:
    """What a part inside of a capture joins; None where it has to step aside."""
    return _THREAD.parts


@contextlib.contextmanager
def running_part() -> Iterator[None]:
    """Run what a part was made into: what that reads, the part itself looks at."""
    _THREAD.depth += 1
    try:
        yield
    finally:
        _THREAD.depth -= 1


def inside_part() -> bool:
    """Whether what runs now is what a part was made into."""
    return _THREAD.depth > 0


def packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a constant of a part, in a library's layout: it has no memory to keep."""
    parts = None if tensor.layout is torch.strided else parts_of_capture()
    return parts is not None and parts.holds(tensor)


@contextlib.contextmanager
def apart_from_capture() -> Iterator[bool]:
    """Lay the modes aside by which a capture looks on; gives whether these are all.

    What decides whether a call fits would take them for a transform that has to see all operations.
    """
    kept = dispatch._get_current_dispatch_mode_stack()
    places = range(torch._C._len_torch_function_stack())
    functions = [torch._C._get_function_stack_at(place) for place in places]
    if not (kept or functions):
        yield not inside_transform()
        return
    if not all(type(mode).__module__.startswith("graphwright.") for mode in (*kept, *functions)):
        yield False
        return
    for _ in kept:
        dispatch._pop_mode()
    for _ in functions:
        pop_function_mode()
    try:
        yield not inside_transform()
    finally:
        for mode in functions:
            push_function_mode(mode)
        for mode in kept:
            dispatch._push_mode(mode)


def warn_if_traced(part: Any, maker: str) -> None:
    """Warn where torch.jit.trace or torch.export traces a part: it keeps the module itself."""
    if torch._C._is_tracing() or torch.compiler.is_exporting():
        what = f"What {maker}() made is traced by torch.jit.trace or torch.export"
        warn_of_lost_gain(
            part, what, f"Trace or export the model first, then {maker}() the result."
        )


def warn_of_lost_gain(part: Any, what: str, remedy: str) -> None:
    """Warn, once for a part, that the module itself runs where the part is."""
    if part not in _WARNED_OF:
        _WARNED_OF.add(part)
        warnings.warn(
            f"{what}: the module itself runs there, and what was gained is lost. {remedy}",
            RuntimeWarning,
            stacklevel=levels_above(),
        )
