"""GraphedParts: a module whose submodules are answered by graphs, as there is none for the whole.

The module's own forward runs as Python. Its submodules have another `forward`, which answers the
calls that are made from there by a graph, and others as before. Whether that is faster than eager
is timed, in calls that are made anyway.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..calls.dependencies import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    GLOBAL_FORWARD_HOOKS,
    Dependencies,
)
from ..calls.introspection import FunctionStandIn, StandIn
from ..calls.modes import opaque
from ..calls.modules import forward_of_class
from ..calls.plurals import counted
from ..calls.split import Args, Kwargs
from ..graphs.graph import Graph
from ..graphs.python_state import StateChanges
from .payoff import Payoff
from .statistics import CallStatistics

# Calls in which graphs are captured before any is timed.
_FIRST = 4
# Nodes of a graph below which launching it takes no less than launching them one by one.
_FEW_NODES = 6
# Guards the attributes of modules; a finalizer may run on a thread that holds it.
_LOCK = threading.RLock()


class PartGraphs(Protocol):
    """What answers the calls of a submodule; `GraphedCallable` does."""

    @property
    def statistics(self) -> CallStatistics:
        """How the calls went so far."""

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that answer calls now."""

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
        graphs: what answers the calls of parts, by their names.
    """

    def __init__(self, module: nn.Module, make: Make, *, timed: bool = True) -> None:
        """Find the submodules that may have graphs; nothing runs yet.

        Args:
            module: the module.
            make: makes what answers a submodule's calls.
            timed: whether parts are used only where that is faster.
        """
        first = next(iter(module.parameters()), None)
        self._payoff = Payoff(None if first is None else first.device, _FIRST) if timed else None
        children = dict(_divided(module))
        self.graphs = {name: make(child) for name, child in children.items()}
        self._parts = {
            name: _PartForward(children[name], made) for name, made in self.graphs.items()
        }
        self._count = 0
        self._used = bool(self._parts)

    @property
    def ratio(self) -> float | None:
        """Seconds of a call as a share of eager's; None until that is known."""
        return None if self._payoff is None else self._payoff.ratio

    @property
    def used(self) -> bool:
        """Whether calls may be answered with parts."""
        return self._used

    def call(self, run: Callable[[], Any]) -> tuple[Any, bool]:
        """Answer a call.

        Args:
            run: calls the module.

        Returns:
            the result, and whether parts took part in it.
        """
        if not self._used or _global_hooks():
            return run(), False
        self._count += 1
        if self._count == _FIRST:
            self.settle()
        used = self._used

        def in_parts() -> Any:
            with self._answering():
                return run()

        if self._payoff is None:
            return in_parts(), used
        result, with_parts = self._payoff.call(run, in_parts)
        if not self._payoff.pays:
            self.close()
        return result, with_parts and used

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Have the calls of parts answered by their graphs inside the block, on this thread."""
        parts = list(self._parts.values())
        with _LOCK:
            for part in parts:
                part.enter()
        try:
            yield
        finally:
            with _LOCK:
                for part in parts:
                    part.leave()

    def settle(self) -> bool:
        """Call submodules themselves that no graph has answered; whether any part is left."""
        for name, graphs in self.graphs.items():
            if not graphs._pays(_FEW_NODES):
                self._drop(name)
        self._used = self._used and bool(self._parts)
        return self._used

    def in_words(self) -> list[str]:
        """Lines on the parts, and on what they win."""
        if self.ratio is not None and not self._used:
            return [f"in parts it would take {self.ratio:.2f} of eager's time"]
        found = {name: graphs.statistics for name, graphs in self.graphs.items()}
        lines = [
            f"part {name}: {counted(now.hits, 'call')} answered by graphs"
            for name, now in found.items()
        ]
        if self.ratio is not None:
            lines.append(f"in parts it takes {self.ratio:.2f} of eager's time")
        return lines

    def close(self) -> None:
        """Close the graphs of all parts; calls run the module itself from now on."""
        self._used = False
        for name in self.graphs:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Call a submodule itself from now on; another thread may have done so already."""
        part, graphs = self._parts.get(name), self.graphs.get(name)
        # New dictionaries: other threads may be going through the old ones.
        self._parts = {key: each for key, each in self._parts.items() if key != name}
        self.graphs = {key: each for key, each in self.graphs.items() if key != name}
        if part is not None and graphs is not None:
            part.remove()
            graphs.close()

    def __del__(self) -> None:
        for part in getattr(self, "_parts", {}).values():
            part.remove()


class _ThreadCalls(threading.local):
    """What a thread is inside of.

    Attributes:
        depth: how many calls with parts.
        busy: whether the graphs of a part are answering a call of it.
    """

    depth = 0
    busy = False


class _PartForward(FunctionStandIn):
    """Stands for the forward of a submodule, and answers calls of threads that are with parts.

    It is the submodule's forward during such calls only: between them nothing of ours is in the
    user's modules.
    """

    def __init__(self, module: nn.Module, graphs: PartGraphs) -> None:
        self.module = module
        self.thread = _ThreadCalls()
        # Calls of all threads; `_LOCK` guards it.
        self._calls = 0
        # The module holds this, and must not keep the graphs alive.
        self._graphs = weakref.ref(graphs)

    def enter(self) -> None:
        """Let it be the module's forward, unless there is another one, and answer this thread."""
        self._calls += 1
        self.thread.depth += 1
        if self._calls == 1 and _has_own_forward(self.module):
            vars(self.module)["forward"] = self

    def leave(self) -> None:
        """The end of what `enter` begins."""
        self._calls -= 1
        self.thread.depth -= 1
        if not self._calls:
            self.remove()

    def remove(self) -> None:
        """Let the module's forward be that of its class again."""
        with _LOCK:
            if vars(self.module).get("forward") is self:
                del vars(self.module)["forward"]

    @property
    def _graphwright_stands_for(self) -> Any:
        return forward_of_class(self.module)

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        thread = self.thread
        graphs = self._graphs() if thread.depth and not thread.busy else None
        if graphs is None or torch.is_grad_enabled() or has_hooks(module):
            return forward_of_class(module)(*args, **kwargs)
        thread.busy = True
        try:
            return graphs._call(args, kwargs)
        finally:
            thread.busy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = copy.deepcopy(self.module, memo)
        return forward_of_class(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return forward_of_class, (self.module,)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is that of its class."""
    found = vars(module).get("forward")
    own = type(module).forward
    return found is None or (getattr(found, "__func__", None) is own and found.__self__ is module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which run around its forward."""
    attributes = vars(module)
    return any(attributes.get(name) for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS))


def _global_hooks() -> bool:
    """Whether there are hooks of all modules."""
    return any(getattr(torch.nn.modules.module, name) for name in GLOBAL_FORWARD_HOOKS)


def _divided(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that may have a graph of their own, by name: those that hold others."""
    seen = {id(module)}
    waiting = [("", module)]
    while waiting:
        path, around = waiting.pop()
        for name, child in around._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            where = f"{path}.{name}" if path else name
            if type(child).forward is nn.Module.forward:  # A ModuleList or ModuleDict.
                waiting.append((where, child))
            elif _may_have_graph(child):
                yield where, child


def _may_have_graph(child: nn.Module) -> bool:
    """Whether a submodule may be answered by a graph while Python runs what is around it."""
    if isinstance(child, StandIn | torch.jit.ScriptModule | torch.fx.GraphModule):
        return False
    if not _has_own_forward(child) or type(child).__call__ is not nn.Module.__call__:
        return False
    # What holds no others is a single operation, and no faster as a graph.
    return not has_hooks(child) and any(each is not None for each in child._modules.values())


def refuse_talk(part: nn.Module) -> None:
    """Raise StateChanges where the module around a part may talk to it by what nobody watches."""
    if any(has_hooks(each) for each in part.modules()):
        raise StateChanges(
            "It has hooks, which may hand what they see to what is around it.",
            remedy="Graph the module by itself, or remove them.",
        )
    for found in Dependencies(part, training=True, whole=True).objects:
        if isinstance(found, contextvars.ContextVar | threading.local):
            raise StateChanges(
                f"It reaches a {type(found).__name__}, by which what is around it may talk to it.",
                remedy="Pass what it holds as an argument.",
            )
