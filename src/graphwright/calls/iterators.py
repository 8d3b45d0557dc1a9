"""Iterators that a call can reach: advanced once, they cannot be put back.

A list's iterator, `itertools.count`, a generator, an open file, the iterator of a DataLoader: where
they stand is hidden inside of them, a graph would not advance them, and the runs that a capture
takes would. So a call that advances one is refused by name, before it is advanced where the code
shows that it is about to be: `next(self.batches)`, `for x in self.batches`. Where only their
position shows it afterwards, the error says so. An iterator that no call advances may be there.

Iterators whose class is written in Python are not meant: what their `__next__` changes is seen.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import io
import itertools
import operator
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import nn

from ..errors import CaptureError, warn_once
from .host_generators import Reached
from .leaves import SCALARS
from .threads import others_run

# What takes the items of an iterator that it is given.
_CONSUMERS = frozenset(
    (
        *(next, list, tuple, set, frozenset, dict, sum, any, all, max, min, sorted, bytes),
        *(zip, enumerate, map, filter, deque, functools.reduce, operator.length_hint),
        *(value for value in vars(itertools).values() if isinstance(value, type)),
    )
)
# Methods of iterators and files that move them.
_MOVES = frozenset(
    ("__next__", "send", "throw", "close", "read", "read1", "readinto", "readline", "readlines")
)
# Instructions that take items of what the one before has loaded.
_TAKES_ITEMS = frozenset(
    (
        *("GET_ITER", "GET_YIELD_FROM_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND"),
        *("SET_UPDATE", "CONTAINS_OP", "CALL_FUNCTION_EX"),
    )
)
_SKIPPED = frozenset(("CACHE", "NOP", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "KW_NAMES"))
_UNKNOWN: Any = object()
# Iterators that show how many items are left, and packages whose own are pickled by position.
_EMPTY: dict[int, int] = {}
_VIEWS: tuple[Any, ...] = (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())
_BY_LENGTH = frozenset(
    (type(iter(set[int]())), *(type(make(view)) for view in _VIEWS for make in (iter, reversed)))
)
_REDUCED = ("builtins", "itertools", "collections", "_collections")
# How many items of a tuple, and how many iterators in one another, are looked at.
_MOST, _MAX_DEPTH = 100, 3
# An expression that code evaluates: what it is, and its parts.
_Expression = tuple[Any, ...]


class AdvancesIterator(CaptureError):
    """The call advances an iterator that was there before."""


class Iterators:
    """The iterators that a call can reach, and where they stand.

    Args:
        found: what the call can reach.
    """

    def __init__(self, found: Reached) -> None:
        # While other threads run, nobody can tell who advances them.
        self._alone = not others_run()
        held = list(filter(is_opaque_iterator, found.objects))
        self._held = {id(each): each for each in held}
        self._names: dict[int, str] = {}
        for place in found.places if held else ():
            for key, value in place.held.items():
                if id(value) in self._held:
                    self._names.setdefault(id(value), str(place.key_name(key)))
        self._positions = {key: _steady(each) for key, each in self._held.items()}

    def check(self) -> None:
        """Compare with where they stood, unless other threads may have advanced them.

        Raises:
            AdvancesIterator: one has been advanced; it stays so.
        """
        for key, each in self._held.items() if self._alone else ():
            if _steady(each) != self._positions[key]:
                raise self._error(each, None, advanced=True)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Stop a run inside the block, on this thread, before it advances one of them.

        Raises:
            AdvancesIterator: the run would advance one, or has done so unseen.
        """
        if not self._held:
            yield
            return
        refused: list[AdvancesIterator] = []
        generators = [v for v in self._held.values() if isinstance(v, types.GeneratorType)]
        running = {each.gi_frame: each for each in generators if each.gi_frame is not None}
        active = True

        def enter(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
            if frame in running:  # Resumed by what no instruction shows: C code.
                refused.append(self._error(running[frame], None, advanced=True))
                return None
            if not _consumers(frame.f_code):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return look

        def look(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
            if not active:  # A generator that has outlived the block.
                return None
            if event == "opcode":
                for expression in _consumers(frame.f_code).get(frame.f_lasti, ()):
                    each = _evaluated(expression, frame)
                    if id(each) in self._held:
                        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                        refused.append(self._error(each, where, advanced=False))
                        raise refused[-1]
            return look

        before = sys.gettrace()
        # Python 3.12 tells of instructions only if a frame has asked for them beforehand.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(enter)
        try:
            yield
        except Exception as error:
            if not refused or error is refused[0]:
                raise
            raise refused[0] from error
        finally:
            active = False
            sys.settrace(before)
        if refused:  # The call went on after the error, or none was raised.
            raise refused[0]
        self.check()

    def _error(self, each: Any, where: str | None, *, advanced: bool) -> AdvancesIterator:
        kind = f"{type(each).__module__}.{type(each).__qualname__}".removeprefix("builtins.")
        name = self._names.get(id(each), "an iterator")
        what = f"The call advances {name} (a {kind}), which a graph would not."
        if advanced:
            what += " It was advanced by a run for the capture, and cannot be put back."
            warn_once(what)
        remedy = "Take the next item outside of the call, and pass it in."
        return AdvancesIterator(what, where=where, remedy=remedy)


def is_opaque_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose position no attribute shows."""
    kind = type(value)
    if not hasattr(kind, "__next__"):
        return False
    advance = inspect.getattr_static(kind, "__next__", None)
    if advance is None or issubclass(kind, weakref.ProxyTypes):
        return False
    # PyTorch's own are not looked into, as those of a DataLoader.
    return not isinstance(advance, types.FunctionType) or kind.__module__.startswith("torch.")


# Where an iterator stands.


def _steady(value: Any) -> Any:
    """The position of an iterator; None if it differs though nobody advances it."""
    position = _position(value)
    return position if _position(value) == position else None


def _position(value: Any, depth: int = 0) -> Any:
    """What differs once an iterator has been advanced, as far as that can be seen."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return None
        return frame.f_lasti, [(key, _mark(v, depth)) for key, v in frame.f_locals.items()]
    if isinstance(value, io.IOBase):
        return _position_of_file(value)
    if type(value) in _BY_LENGTH:
        return operator.length_hint(value, -1)
    if type(value).__module__ in _REDUCED:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")  # itertools' can be pickled for some versions more.
            return _mark(value.__reduce__()[1:], depth)
        return repr(value) if isinstance(value, itertools.count | itertools.repeat) else None
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return [(key, each) for key, each in attributes.items() if isinstance(each, SCALARS)]
    return getattr(value, "line_num", None)  # Of a csv.reader.


def _mark(value: Any, depth: int) -> Any:
    """What tells a value that an iterator holds from the one at its next position."""
    if isinstance(value, SCALARS):
        return value if value == value else repr(value)
    if isinstance(value, range):
        return repr(value)  # Another object each time.
    if isinstance(value, tuple):
        return [_mark(each, depth) for each in value[:_MOST]]
    if depth < _MAX_DEPTH and is_opaque_iterator(value):
        return _position(value, depth + 1)
    return id(value)


def _position_of_file(file: io.IOBase) -> Any:
    """Where a file is read; one that is written to, such as a log, may move."""
    with contextlib.suppress(Exception):
        if file.closed or not file.readable() or file.writable():
            return None
        try:
            return file.tell()
        except OSError:  # A text file that is gone through line by line does not tell.
            return True
    return None


# What code is about to advance.

# Instructions that load a value; that join so many for each of their argument; that join two; that
# make one of another.
_LEAVES = {
    **dict.fromkeys(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF"), "local"),
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), "global"),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), "constant"),
}
_BUILDS = dict.fromkeys(("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET", "BUILD_STRING"), 1)
_BUILDS |= {"BUILD_MAP": 2, "BUILD_SLICE": 1}
_OF_TWO = ("BINARY_SUBSCR", "BINARY_OP", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "LIST_EXTEND")
_OF_ONE = ("LOAD_ATTR", "LOAD_METHOD", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT", "GET_ITER")
# Any other expression.
_OTHER: _Expression = ("other",)


@functools.lru_cache(maxsize=4096)
def _consumers(code: CodeType) -> dict[int, list[_Expression]]:
    """Instructions that take items, by their offset, with the expressions of what they take from.

    Only expressions that can be evaluated beforehand count: names, attributes, items.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    found: dict[int, list[_Expression]] = {}
    for index, step in enumerate(steps):
        taken: list[_Expression] = []
        if step.opname in _TAKES_ITEMS:
            taken = _operands(steps, index - 1, 1)[0]
        elif step.opname == "CALL":
            called, *arguments = _operands(steps, index - 1, (step.arg or 0) + 1)[0] or [_OTHER]
            taken = [("given", called, each) for each in arguments if each != _OTHER]
            if called[0] == "attribute" and called[2] in _MOVES:
                taken.append(called[1])
        taken = [each for each in taken if each != _OTHER]
        if taken:
            found[step.offset] = taken
    return found


def _operands(
    steps: Sequence[dis.Instruction], index: int, count: int
) -> tuple[list[_Expression], int]:
    """The last expressions up to an instruction, and where the one before them ends.

    Nothing is found where one of them has parts that are not known.
    """
    found: list[_Expression] = []
    for _ in range(count):
        expression, index = _parsed(steps, index)
        if expression is None:
            return [], index
        found.insert(0, expression)
    return found, index


def _count_of_operands(name: str, argument: int) -> int | None:
    """How many operands an instruction takes; None of one that is no expression."""
    if name == "CALL":
        return argument + 1
    if name in _BUILDS:
        return argument * _BUILDS[name]
    if name in _OF_TWO:
        return 2
    return 1 if name in _OF_ONE else None


def _parsed(steps: Sequence[dis.Instruction], index: int) -> tuple[_Expression | None, int]:
    """The expression that ends in an instruction, and where the one before it ends."""
    if index < 0:
        return None, index
    step = steps[index]
    name, argument = step.opname, step.arg or 0
    if name in _LEAVES:
        return (_LEAVES[name], step.argval), index - 1
    count = _count_of_operands(name, argument)
    if count is None:
        return None, index
    operands, before = _operands(steps, index - 1, count)
    if len(operands) < count:
        return None, before
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        return ("attribute", operands[0], step.argval), before
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and step.argrepr == "[]"):
        return ("item", *operands), before
    if name == "CALL" and operands[0] == ("global", "iter") and count == 2:
        return operands[1], before  # It is the iterator itself.
    return _OTHER, before


def _evaluated(expression: _Expression, frame: FrameType) -> Any:
    """The value that an expression has, as far as no code of the user's has to run for it."""
    kind, *parts = expression
    if kind == "other":
        return _UNKNOWN
    if kind == "given":
        called = _evaluated(parts[0], frame)
        # Not by hash: that of what is called may be a user's code.
        takes = any(called is each for each in _CONSUMERS)
        return _evaluated(parts[1], frame) if takes else _UNKNOWN
    if kind == "local":
        return frame.f_locals.get(parts[0], _UNKNOWN)
    if kind == "global":
        builtin = getattr(builtins, parts[0], _UNKNOWN)
        return frame.f_globals.get(parts[0], builtin)
    if kind == "constant":
        return parts[0]
    owner = _evaluated(parts[0], frame)
    if owner is _UNKNOWN:
        return _UNKNOWN
    if kind == "attribute":
        return _attribute(owner, parts[1])
    return _item(owner, _evaluated(parts[1], frame))


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that is plainly there."""
    if isinstance(owner, nn.Module):
        for holder in (vars(owner), owner._modules):
            if name in holder:
                return holder[name]
    try:
        found = inspect.getattr_static(owner, name, _UNKNOWN)
        if isinstance(found, types.MemberDescriptorType):  # A slot.
            return object.__getattribute__(owner, name)
    except Exception:
        return _UNKNOWN
    return _UNKNOWN if hasattr(type(found), "__get__") and not callable(found) else found


def _item(owner: Any, key: Any) -> Any:
    """An item of a plain container."""
    kinds: tuple[Any, ...] = (list, tuple, dict, deque)
    for kind in kinds:
        if isinstance(owner, kind) and isinstance(key, SCALARS):
            with contextlib.suppress(Exception):
                return kind.__getitem__(owner, key)
    return _UNKNOWN
