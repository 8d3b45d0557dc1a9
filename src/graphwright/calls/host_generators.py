"""Random generators of the host's: which ones a call can reach, where they are, and back again.

The process has one of Python's, one of NumPy's and one of PyTorch's; modules, functions and what
they hold may have more: `random.Random`, `numpy.random.Generator` over any bit generator,
`numpy.random.RandomState`, `numpy.random.SeedSequence` and `torch.Generator`. All of them are put
back in place: whoever else holds one sees it where it was. What the system draws
(`random.SystemRandom`, `secrets`) has no state.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import warn_once
from .threads import others_run

# A generator's state in a form that can be compared, and what puts it back.
_State = tuple[Hashable, Callable[[], object]]


class Reached(Protocol):
    """What a call can reach: `dependencies.Dependencies`, which itself asks what is a generator."""

    places: list[Any]

    @property
    def objects(self) -> list[Any]:
        """Everything that was looked into."""


class HostGenerators:
    """The host's random generators that a call can reach, as they are now.

    Args:
        found: what the call can reach.
        process: whether those of the process count too.

    Attributes:
        alone: whether no other thread ran when this was made; if one did, it may have drawn.
    """

    def __init__(self, found: Reached, *, process: bool = True) -> None:
        self.alone = not others_run()
        shared = _of_process()
        ours = {id(generator) for generator, _ in shared}
        self._shared = [_Position(g, name) for g, name in shared if process]
        self._own = [
            _Position(value, _name_of(value, found.places))
            for value in _sources_of_bits(found.objects)
            if id(value) not in ours
        ]

    def moved(self) -> str | None:
        """The name of one that has moved and is no generator of the process; None if none has."""
        return next((p.name for p in self._own if p.moved() and not p.is_torch), None)

    def moved_of_process(self) -> str | None:
        """The name of Python's or NumPy's own if it has moved, and this thread alone can draw."""
        if not self.alone:
            return None
        return next((p.name for p in self._shared if p.moved() and not p.is_torch), None)

    def put_back(self, *, own: bool = True) -> None:
        """Put them back to where they were, unless another thread can have drawn.

        Args:
            own: whether to put back those that are not the process's too.
        """
        if self.alone:
            for position in (*self._shared, *(self._own if own else ())):
                position.put_back()
        elif own and (name := self.moved()) is not None:
            warn_once(
                f"{name} was drawn from while other threads were running, which may have drawn "
                "from it too. So it was not put back to where it was before: the next numbers are "
                "not those of a program without graphwright."
            )


@contextlib.contextmanager
def generators_kept(found: Reached) -> Iterator[None]:
    """Put back after the block what it draws from the host's generators.

    Args:
        found: what can be reached by what runs inside it.
    """
    kept = HostGenerators(found)
    try:
        yield
    finally:
        kept.put_back()


class _Position:
    """Where one generator is.

    Attributes:
        name: of the generator, in words.
        is_torch: whether it is one of PyTorch's, whose draws are seen as operations.
    """

    def __init__(self, generator: Any, name: str) -> None:
        self.name = name
        self.is_torch = isinstance(generator, torch.Generator)
        self._generator = generator
        self._states = _states(generator)

    def moved(self) -> bool:
        """Whether it is elsewhere now."""
        return [key for key, _ in _states(self._generator)] != [key for key, _ in self._states]

    def put_back(self) -> None:
        """Put it back in place."""
        if self.moved():
            for _, restore in self._states:
                # That a class of the user's refuses its own state must not hide the first error.
                with contextlib.suppress(Exception):
                    restore()


def is_host_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python's, NumPy's or PyTorch's."""
    if isinstance(value, random.Random | torch.Generator):
        return True
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return False
    kinds = (numpy.Generator, numpy.RandomState, numpy.BitGenerator, numpy.SeedSequence)
    return isinstance(value, kinds)


def draws(value: Any) -> bool:
    """Whether a value is such a generator, or a method of one."""
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        value = value.__self__
    return is_host_generator(value)


def _of_process() -> list[tuple[Any, str]]:
    """The process's generators, and their names."""
    # The functions are methods of a generator that Python's module keeps to itself.
    found: list[tuple[Any, str]] = [(random.getstate.__self__, "Python's random")]  # type: ignore[attr-defined]  # a bound method
    found.append((torch.default_generator, "PyTorch's default generator"))
    # NumPy imports it at its first use, which may be in the call.
    numpy = importlib.import_module("numpy.random")
    found.append((numpy.get_state.__self__, "numpy.random"))
    return found


def _sources_of_bits(objects: Iterable[Any]) -> list[Any]:
    """The generators among objects; of NumPy's what they draw from, which they may share."""
    found = {}
    for value in filter(is_host_generator, objects):
        # RandomState keeps half of a pair of normal numbers itself.
        each = getattr(value, "bit_generator", value)
        found[id(each)] = each
    return list(found.values())


def _states(generator: Any) -> list[_State]:
    """The parts of a generator's state."""
    if isinstance(generator, random.Random):
        return list(_states_of_python(generator))
    if isinstance(generator, torch.Generator):
        return list(_states_of_torch(generator))
    return list(_states_of_numpy(generator))


def _states_of_python(generator: random.Random) -> Iterator[_State]:
    kinds: list[Any] = [random.Random]
    # A class that draws in another way has a state of its own beside the one that it inherits.
    if type(generator).getstate is not random.Random.getstate:
        kinds.append(type(generator))
    for kind in kinds:
        with contextlib.suppress(Exception):  # The system's has none, and says so.
            state = kind.getstate(generator)
            # That of Python's own is made of 625 numbers, in tuples.
            frozen = state if kind is random.Random else _frozen(state)
            yield frozen, functools.partial(kind.setstate, generator, state)


def _states_of_torch(generator: torch.Generator) -> Iterator[_State]:
    if generator.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # The graph moves it.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        state = generator.get_state()
        yield state.numpy().tobytes(), lambda: generator.set_state(state)


def _states_of_numpy(generator: Any) -> Iterator[_State]:
    seeds: Any = getattr(generator, "seed_seq", None)
    if hasattr(generator, "spawn_key"):
        seeds = generator
    elif hasattr(generator, "get_state"):
        state = generator.get_state(legacy=False)
        seeds = getattr(getattr(generator, "_bit_generator", None), "seed_seq", None)
        yield _frozen(state), lambda: generator.set_state(state)
    else:
        with contextlib.suppress(NotImplementedError, AttributeError):  # One of the user's own.
            state = generator.state
            yield _frozen(state), lambda: setattr(generator, "state", state)
    if hasattr(seeds, "n_children_spawned"):
        # `spawn()` counts there; only unpickling sets it.
        count = seeds.n_children_spawned
        with contextlib.suppress(Exception):
            held = seeds.__reduce__()[2]
            yield count, lambda: seeds.__setstate__(held)


def _frozen(value: Any) -> Hashable:
    """A value of dictionaries, sequences and arrays as one that can be compared."""
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if hasattr(value, "tobytes"):
        return value.tobytes(), str(value.dtype)  # Also in NaN and -0.0.
    return value if isinstance(value, Hashable) else repr(value)


def _name_of(generator: Any, places: Iterable[Any]) -> str:
    """The name of the place that holds a generator."""
    for place in places:
        for key, value in place.held.items():
            if value is generator or getattr(value, "bit_generator", None) is generator:
                return f"{place.key_name(key)} (a {type(value).__name__})"
            # A method of it, such as `self.draw = numpy.random.default_rng().random`.
            if getattr(value, "__self__", None) is generator:
                return f"{place.key_name(key)} (of a {type(generator).__name__})"
    return f"a random generator (a {type(generator).__name__})"
