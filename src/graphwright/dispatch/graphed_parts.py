"""GraphedParts: a module whose submodules are answered by graphs, as there is none for the whole.

The module's own forward runs as Python. It sees other submodules: objects of the same class that
share their attributes, and that are called through a graph. Whether that is faster than eager is
timed, in calls that are made anyway.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..calls.dependencies import StandIn
from ..calls.modes import opaque
from ..calls.signature import Args, Kwargs
from .statistics import CallStatistics

Run = Callable[[Callable[..., Any]], Any]

# Calls in which graphs are captured before any is timed, and timed calls of either kind.
_FIRST, _ROUNDS = 4, 5
# The share of eager's time above which parts do not pay.
_WORTH = 0.97
# Nodes of a graph below which launching it takes no less than launching them one by one.
_FEW_NODES = 6


class PartGraphs(Protocol):
    """What answers the calls of a submodule; `GraphedCallable` does."""

    @property
    def statistics(self) -> CallStatistics:
        """How the calls went so far."""

    def _call(self, args: Args, kwargs: Kwargs) -> Any: ...

    def _pays(self, nodes: int) -> bool:
        """Whether graphs of at least so many nodes have answered calls, or those of parts."""

    def close(self) -> None:
        """Close all graphs for good."""


# Makes what answers a submodule's calls.
Make = Callable[[nn.Module], PartGraphs]


class GraphedParts:
    """Runs a module with submodules that are answered by graphs, where that is faster.

    Attributes:
        ratio: seconds of a call as a share of eager's; None until that is known.
    """

    def __init__(self, module: nn.Module, make: Make, *, timed: bool = True) -> None:
        """Find the submodules that may have graphs; nothing runs yet.

        Args:
            module: the module.
            make: makes what answers a submodule's calls.
            timed: whether parts are used only where that is faster.
        """
        self.ratio: float | None = None
        self._module = module
        self._timed = timed
        self._twin = _twin_of(module, make, {})
        self._count = 0
        self._used = self._twin is not None
        # Seconds of calls: of the module's own, and of those with parts.
        self._seconds: tuple[list[float], list[float]] = [], []

    @property
    def graphs(self) -> dict[str, PartGraphs]:
        """What answers the calls of parts, by their names."""
        return {} if self._twin is None else dict(_graphs_of(self._twin, "", set()))

    @property
    def used(self) -> bool:
        """Whether calls may be answered with parts."""
        return self._used

    def call(self, run: Run) -> tuple[Any, bool]:
        """Answer a call.

        Args:
            run: calls a function with the call's arguments.

        Returns:
            the result, and whether parts took part in it.
        """
        twin = self._twin
        if twin is None or not self._used:
            return run(self._module), False
        self._count += 1
        if self._count <= _FIRST or not self._timed or self.ratio is not None:
            if self._count == _FIRST:
                self.settle()
            return run(twin), True
        with_parts = self._count % 2 == 0
        _wait(self._module)
        began = time.perf_counter()
        result = run(twin if with_parts else self._module)
        _wait(self._module)
        self._seconds[with_parts].append(time.perf_counter() - began)
        if all(len(each) >= _ROUNDS for each in self._seconds):
            eager, parts = map(statistics.median, self._seconds)
            self.ratio = parts / eager
            if self.ratio > _WORTH:
                self.close()
        return result, with_parts

    def settle(self) -> bool:
        """Call submodules themselves that no graph has answered; whether any part is left."""
        if self._twin is not None and not _drop_idle(self._twin):
            self.close()
        return self._used

    def in_words(self) -> list[str]:
        """Lines on the parts, and on what they win."""
        if self.ratio is not None and not self._used:
            return [f"in parts it would take {self.ratio:.2f} of eager's time"]
        found = {name: graphs.statistics for name, graphs in self.graphs.items()}
        lines = [f"part {name}: {now.hits} calls answered by graphs" for name, now in found.items()]
        if self.ratio is not None:
            lines.append(f"in parts it takes {self.ratio:.2f} of eager's time")
        return lines

    def close(self) -> None:
        """Close the graphs of all parts; calls run the module itself from now on."""
        self._used = False
        for graphs in self.graphs.values():
            graphs.close()
        self._twin = None


def _wait(module: nn.Module) -> None:
    """Wait for a module's device."""
    first = next(iter(module.parameters()), None)
    if first is not None and first.device.type == "cuda":
        torch.cuda.synchronize(first.device)


class _Parts:
    """What a twin calls instead of a module's submodules.

    Attributes:
        module: whose attributes the twin shares.
        parts: what stands for some of its submodules, by name.
        graphs: what answers calls of the twin itself; None if its forward runs as Python.
    """

    def __init__(self, module: nn.Module, graphs: PartGraphs | None = None) -> None:
        self.module = module
        self.parts: dict[str, nn.Module] = {}
        self.graphs = graphs

    def shown(self) -> dict[str, nn.Module | None]:
        """The submodules, with those that something stands for replaced."""
        return {name: self.part(name) or child for name, child in self.module._modules.items()}

    def part(self, name: str) -> nn.Module | None:
        """What stands for a submodule; None where nothing does, or it has been replaced since."""
        part = self.parts.get(name)
        if part is None or self.module._modules.get(name) is not _parts_of(part).module:
            return None
        return part


@functools.lru_cache(1024)
def _twin_class(cls: Any) -> Any:
    """A subclass whose objects share another's attributes and show other submodules."""

    class Twin(cls):  # type: ignore[misc]  # the class is a variable
        __slots__ = ("_graphwright_parts",)

        _graphwright_parts: _Parts

        @property  # type: ignore[misc]  # only read
        def __class__(self) -> Any:
            return cls  # Slices of a ModuleList are made by it.

        @property
        def _modules(self) -> Any:
            return self._graphwright_parts.shown()

        def __getattr__(self, name: str) -> Any:
            part = _parts_of(self).part(name)
            return super().__getattr__(name) if part is None else part

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _parts_of(value).module if _is_twin(value) else value)

        @opaque
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            graphs = _parts_of(self).graphs
            if graphs is None:
                return super().__call__(*args, **kwargs)
            return graphs._call(args, kwargs)

    Twin.__name__, Twin.__qualname__ = cls.__name__, cls.__qualname__
    Twin.__module__ = cls.__module__
    return Twin


def _made(parts: _Parts) -> nn.Module:
    """A twin of a module."""
    cls: Any = type(parts.module)
    twin: nn.Module = object.__new__(_twin_class(cls))
    object.__setattr__(twin, "__dict__", parts.module.__dict__)
    object.__setattr__(twin, "_graphwright_parts", parts)
    return twin


def _parts_of(twin: nn.Module) -> _Parts:
    found: _Parts = object.__getattribute__(twin, "_graphwright_parts")
    return found


def _is_twin(value: Any) -> bool:
    return isinstance(value, nn.Module) and hasattr(type(value), "_graphwright_parts")


def _twin_of(module: nn.Module, make: Make, known: dict[int, nn.Module | None]) -> nn.Module | None:
    """A module with parts; None where none of its submodules may have a graph."""
    if not _plain(module):
        return None
    parts = _Parts(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) not in known:
            known[id(child)] = None  # A module that holds itself has no part.
            known[id(child)] = _part_of(child, make, known)
        part = known[id(child)]
        if part is not None:
            parts.parts[name] = part
    return _made(parts) if parts.parts else None


def _part_of(child: nn.Module, make: Make, known: dict[int, nn.Module | None]) -> nn.Module | None:
    """What stands for a submodule: it has a graph of its own, or is a container of those."""
    if not _plain(child) or not any(each is not None for each in child._modules.values()):
        return None  # What holds no others is a single operation, and no faster as a graph.
    if type(child).forward is nn.Module.forward:  # A ModuleList or ModuleDict.
        return _twin_of(child, make, known)
    return _made(_Parts(child, make(child)))


def _plain(module: nn.Module) -> bool:
    """Whether a module's forward may be run with other submodules."""
    if isinstance(module, StandIn | torch.jit.ScriptModule | torch.fx.GraphModule):
        return False
    return "forward" not in vars(module) and type(module).__call__ is nn.Module.__call__


def _graphs_of(twin: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, PartGraphs]]:
    """What answers the calls of a twin's parts, by their names."""
    if id(twin) in seen:
        return
    seen.add(id(twin))
    parts = _parts_of(twin)
    if parts.graphs is not None:
        yield path, parts.graphs
    for name, part in parts.parts.items():
        yield from _graphs_of(part, f"{path}.{name}" if path else name, seen)


def _drop_idle(twin: nn.Module) -> bool:
    """Drop parts that no graph has answered; whether any is left, or the twin is one."""
    parts = _parts_of(twin)
    for name, part in list(parts.parts.items()):
        if not _drop_idle(part):
            del parts.parts[name]
    return bool(parts.parts) or (parts.graphs is not None and parts.graphs._pays(_FEW_NODES))
