"""What a warm-up may change beside tensors, and how it is put back: Python's side of the state.

Python's random numbers, modules' attributes, gradients and containers are kept before the first
run. What changes in every run is state that a graph cannot carry on, and is refused by name.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..calls.dependencies import Dependencies
from ..calls.signature import SCALARS, describe, without_memory
from ..calls.watch import ModuleWatch
from ..errors import CaptureError


class PythonState:
    """The Python side of a module's state as it was before the first run.

    Args:
        module: what is captured; a plain function as a FunctionModule.
        trained: parameters whose gradients the call may set; by default it may set none.
        hooks: whether what hooks change counts, which is put back in any case.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Sequence[torch.Tensor] | None = None,
        *,
        hooks: bool = True,
    ) -> None:
        self._module = module
        self._hooks = hooks
        # With other threads at work nobody can tell who drew from the host's generators.
        self._alone = threading.active_count() == 1
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._trains = trained is not None
        trainable = module.parameters() if trained is None else trained
        self._grads = [(p, grad_of(p)) for p in trainable]
        self._kept = _Look(module)
        held = [t for _, t in self._kept.found.tensors]
        held += [*module.parameters(), *module.buffers()]  # Those of a ScriptModule too.
        held = list({id(t): t for t in held if t.layout is torch.strided}.values())
        # Inside of a transform of torch.func the alias is a tensor of another kind.
        self._data = [(tensor, tensor.detach(), _place(tensor)) for tensor in held]
        # A call that should not train at all may do so by mistake.
        optimizers = self._kept.found.optimizers if trained is None else []
        self._optimizers = [
            (o, {p: dict(state) for p, state in o.state.items()}, list(map(dict, o.param_groups)))
            for o in optimizers
        ]
        self._settled: _Look | None = None

    def check(self) -> None:
        """Look after a run; what changes once may be a cache, what goes on changing is state.

        Raises:
            CaptureError: naming the attribute or variable.
        """
        if not self._trains and any(grad_of(p) is not grad for p, grad in self._grads):
            raise CaptureError(
                "The call sets gradients of parameters, which a captured call does not.",
                remedy="Leave backward() out of the captured call.",
            )
        before = self._settled
        if before is not None and before.still_holds():
            return
        self._settled = now = _Look(self._module, hooks=self._hooks)
        name = None if before is None else _first_change(before, now)
        if name is not None:
            raise StateChanges(
                f"{name} changes with every call, and a graph repeats no Python.",
                remedy="Keep it out of the captured call: pass it in and return it as a tensor, or "
                "update it where the graph is called.",
            )

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory is that of a tensor of the model's, and none that it trains."""
        return not self._trains and any(
            alias.untyped_storage()._cdata == storage._cdata
            for _, alias, _ in self._data
            if without_memory(alias) is None
        )

    def changed(self) -> str | None:
        """The name of something that differs from what it was at the beginning, if any does."""
        return _first_change(self._kept, _Look(self._module))

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
        an eager call; other memory that it has given to parameters with it.
        """
        if self._alone:
            random.setstate(self._python)
            torch.default_generator.set_state(self._torch)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)
        for parameter, grad in self._grads:
            if grad_of(parameter) is not grad:
                parameter.grad = grad
        for optimizer, states, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, before in zip(optimizer.param_groups, groups, strict=False):
                group.update(before)
        if python:
            self._kept.found.put_back()
            for tensor, alias, place in self._data:
                if _place(tensor) != place:
                    tensor.data = alias


def grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient; None where another tensor stands in for it, which has none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


class StateChanges(CaptureError):
    """What is captured keeps state in Python that changes with every call."""


class _Look:
    """Everything that a call can reach beside tensors' values, as it was at a moment.

    It holds what it has seen, so that no identity comes back meanwhile.
    """

    def __init__(self, module: nn.Module, *, hooks: bool = True) -> None:
        self.found = Dependencies(module, training=True, whole=True, hooks=hooks)
        self.places = {
            str(name): (tensor, _place(tensor))
            for name, tensor in self.found.tensors
            if tensor.layout is torch.strided
        }
        held = [value for source in self.found.sources for value in source.held.values()]
        self._random = [(value, state) for value in held if (state := _random_state(value))]
        self._watch = ModuleWatch(module, values=False, training=True, found=self.found)

    def still_holds(self) -> bool:
        """Whether all is as it was; it may say no where it is."""
        return self._watch.unchanged() and not self.drawn()

    def drawn(self) -> bool:
        """Whether a random generator stands elsewhere."""
        return any(_random_state(value) != state for value, state in self._random)


def _first_change(before: _Look, now: _Look) -> str | None:
    """The name of something that differs between two runs."""
    known = {(type(s), str(s.name), id(s.owner)): s for s in now.found.sources}
    for old in before.found.sources:
        source = known.get((type(old), str(old.name), id(old.owner)))
        if source is None:
            continue  # Another object is in its place, which shows where that is held.
        if source.held.keys() != old.held.keys():
            key = next(iter(source.held.keys() ^ old.held.keys()))
            return str(source.name if source.name.text else source.key_name(key))
        for key, value in source.held.items():
            if _identity(value) != _identity(old.held[key]):
                return str(source.key_name(key))
    for name, (tensor, place) in before.places.items():
        if now.places.get(name, (None, None)) != (tensor, place) and name in now.places:
            return name
    return "a random generator of Python's or NumPy's" if before.drawn() else None


def _identity(value: Any) -> Any:
    if isinstance(value, SCALARS):
        return describe(value)
    return id(value)


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
    address = tensor.data_ptr() if without_memory(tensor) is None else 0
    return address, tensor.shape, tensor.stride()


def _same(a: Any, b: Any) -> bool:
    equal = a == b
    return bool(equal.all() if hasattr(equal, "all") else equal)
