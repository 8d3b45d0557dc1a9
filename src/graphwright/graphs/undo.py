"""What a warm-up may change beside tensors, and how it is put back: Python's side of the state.

Python's random numbers, modules' attributes, gradients and containers are kept before the first
run. What changes in every run is state that a graph cannot carry on, and is refused by name.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CaptureError
from ..signature import SCALARS, describe
from ..watch import FunctionModule, values_behind

_MAX_DEPTH = 6
_MAX_VALUES = 20_000
_HOLDERS = ("_modules", "_parameters", "_buffers")
# What nn.Module keeps for itself, hooks above all, is watched by ModuleWatch.
_OWN = frozenset(vars(nn.Module())) - {"training"}
_WITHOUT_STATE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


class Undo:
    """The Python side of a module's state as it was before the first run.

    Args:
        module: what is captured; a plain function as a FunctionModule.
        trained: parameters whose gradients the call may set; by default it may set none.
    """

    def __init__(self, module: nn.Module, trained: Sequence[torch.Tensor] | None = None) -> None:
        self._module = module
        # With other threads at work nobody can tell who drew from the host's generators.
        self._alone = threading.active_count() == 1
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._trains = trained is not None
        self._grads = [(p, p.grad) for p in (module.parameters() if trained is None else trained)]
        held = [t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided]
        self._data = [(tensor, tensor.detach()) for tensor in held]
        self._kept: list[tuple[Any, Any]] = []
        self._alive: dict[int, Any] = {}
        self._look(keep=True)
        self._settled: dict[str, Any] | None = None

    def check(self) -> None:
        """Look after a run; what changes once may be a cache, what goes on changing is state.

        Raises:
            CaptureError: naming the attribute or variable.
        """
        if not self._trains and any(p.grad is not grad for p, grad in self._grads):
            raise CaptureError(
                "The call sets gradients of parameters, which a captured call does not.",
                remedy="Leave backward() out of the captured call.",
            )
        now = self._look(keep=False)
        before = self._settled
        self._settled = now
        if before is None or before == now:
            return
        name = next(n for n in (*now, *before) if now.get(n) != before.get(n))
        raise CaptureError(
            f"{name} changes with every call, and a graph repeats no Python.",
            remedy="Keep it out of the captured call: pass it in and return it as a tensor, or "
            "update it where the graph is called.",
        )

    def refuse_host_randomness(
        self, device: torch.device, generators: Sequence[torch.Generator]
    ) -> None:
        """Raise CaptureError where random numbers came from a generator that no graph repeats.

        Args:
            device: where the graph runs.
            generators: those of PyTorch that the call drew from.
        """
        drawn = [
            f"a generator on the {g.device}" for g in generators if g.device.type != device.type
        ]
        if self._alone and random.getstate() != self._python:
            drawn.append("Python's random")
        if self._alone and self._numpy is not None:
            state = sys.modules["numpy"].random.get_state()
            if not all(_same(a, b) for a, b in zip(state, self._numpy, strict=True)):
                drawn.append("numpy.random")
        if drawn:
            raise CaptureError(
                f"The call draws random numbers from {drawn[0]}; a graph would keep them.",
                remedy="Draw them on the device, or outside the captured call.",
            )

    def restore(self, *, python: bool) -> None:
        """Put back random numbers and gradients; with `python`, attributes and containers too.

        After a success what the first run has set up, such as a cache, stays, as it would after
        an eager call.
        """
        if self._alone:
            random.setstate(self._python)
            torch.default_generator.set_state(self._torch)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        for tensor, alias in self._data:
            if _place(tensor) != _place(alias):
                tensor.data = alias
        if python:
            for container, content in self._kept:
                _refill(container, content)

    def _look(self, *, keep: bool) -> dict[str, Any]:
        """A fingerprint of everything by name; with `keep`, copies of what can be put back."""
        look = _Look(keep)
        found: dict[str, Any] = {}
        for path, module in self._module.named_modules():
            if isinstance(module, FunctionModule):
                for name, value in values_behind(module._function):
                    found[f"the variable {name}"] = look.at(value)
                continue
            of = f" of {type(module).__name__}{f' ({path})' if path else ''}"
            attributes = vars(module)
            look.note(attributes)
            for name, value in attributes.items():
                if name in _OWN and name not in _HOLDERS and isinstance(value, dict):
                    look.note(value)  # Hooks, which some libraries add in their first run.
            for holder in _HOLDERS:
                if not isinstance(attributes.get(holder), dict):  # of a ScriptModule
                    continue
                look.note(attributes[holder])
                for name, value in attributes[holder].items():
                    found[f"{name}{of}"] = look.at(value)
            for name, value in attributes.items():
                if name not in _OWN:
                    found[f"attribute {name}{of}"] = look.at(value)
        if keep:
            self._kept = look.kept
        # What was seen is held until the next look, so that no id comes back meanwhile.
        self._alive = look.seen
        return found


class _Look:
    """One pass over values: identities and, in containers and plain objects, what is in them."""

    def __init__(self, keep: bool) -> None:
        self.seen: dict[int, Any] = {}
        self.kept: list[tuple[Any, Any]] = []
        self._keep = keep

    def note(self, container: Any) -> None:
        """Keep a copy of what a container holds."""
        if self._keep:
            copy = container.copy() if isinstance(container, dict) else type(container)(container)
            self.kept.append((container, copy))

    def at(self, value: Any, depth: int = 0) -> Any:
        """What identifies a value and what is in it."""
        if isinstance(value, SCALARS):
            return describe(value)
        known = id(value) in self.seen
        self.seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            return id(value), _place(value) if value.layout is torch.strided else 0
        if known or depth > _MAX_DEPTH or len(self.seen) > _MAX_VALUES:
            return id(value)
        if isinstance(value, (nn.Module, *_WITHOUT_STATE)) or _is_machinery(value):
            return id(value)
        state = _random_state(value)
        if state is not None:
            return id(value), state
        parts: list[Any]
        if isinstance(value, dict):
            self.note(value)
            parts = [*value.keys(), *value.values()]
        elif type(value) in (list, set, tuple, deque):
            if not isinstance(value, tuple):
                self.note(value)
            parts = list(value)
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            self.note(attributes)
            parts = [*attributes.keys(), *attributes.values()]
        else:
            return id(value)
        return id(value), len(parts), [self.at(part, depth + 1) for part in parts[:_MAX_VALUES]]


def _random_state(value: Any) -> str | None:
    """Where a random generator of Python's or NumPy's stands; None for other things."""
    if isinstance(value, random.Random):
        with contextlib.suppress(NotImplementedError):  # Of the system's, which has no state.
            return str(value.getstate())
        return None
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    return None if bits is None else str(bits.state)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _is_machinery(value: Any) -> bool:
    """Whether an object is PyTorch's or ours: what it keeps for itself is no state of the call."""
    if isinstance(value, Optimizer | LRScheduler | GradScaler):
        return True
    return type(value).__module__.partition(".")[0] in ("torch", "graphwright")


def _same(a: Any, b: Any) -> bool:
    equal = a == b
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _refill(container: Any, content: Any) -> None:
    """Give a container back what it held, in place."""
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, deque):
        container.clear()
        container.extend(content)
    elif isinstance(container, set):
        container.clear()
        container |= content
    else:
        for name in [name for name in container if name not in content]:
            del container[name]
        for name, value in content.items():
            if name not in container or container[name] is not value:
                container[name] = value


@contextlib.contextmanager
def autocast_cache_apart() -> Iterator[None]:
    """Use no cast made before the block, and leave none that was made inside it.

    Autocast keeps casts of weights until it is left. A graph must make its own: one from outside
    would be freed under it, and would not follow the weight; one from inside lies in its memory.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
